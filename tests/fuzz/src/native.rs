//! Simulation of one end of a native connection whose peer sends any HTTP/2 frames. The first byte of the input
//! selects the end and the reading of the peer; every operation has three bytes.
//!
//! Invariants: the unread bytes of all streams stay within the windows. After the peer is gone, the connection
//! and all its streams end, and no byte is counted anymore.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use culvert_native::halves::{NativeSink, NativeSource, halves};
use culvert_native::link::{Opener, Taker, TakerLimits};
use culvert_native::window::{Inbound, Pings, WindowProfile};
use culvert_stream::{CloseReason, Sink as _, Source as _};
use http::{Method, Request, Response};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};
use tokio::task::{JoinSet, yield_now};
use tokio::time::timeout;
use tokio_util::task::TaskTracker;

/// Largest number of streams open at once.
const STREAMS: u32 = 8;

/// Window of each stream, in bytes.
const WINDOW_BYTES: u32 = 128 * 1024;

/// Time for the end of a run, far longer than a run takes.
const LIMIT: Duration = Duration::from_secs(60);

/// Times of the opener's pings.
const PINGS: Pings = Pings {
    idle: Duration::from_secs(30),
    timeout: LIMIT,
};

/// Time after which the peer gives up a write.
const STUCK: Duration = Duration::from_millis(100);

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Types of frames (RFC 9113, 6).
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;

const END_STREAM: u8 = 1;
const ACK: u8 = 1;
const END_HEADERS: u8 = 4;

/// Header blocks: CONNECT to `a:1`, status 200, and an empty list (RFC 7541, 6).
const CONNECT: &[u8] = b"\x02\x07CONNECT\x01\x03a:1";
const STATUS: &[u8] = b"\x88";
const NOTHING: &[u8] = b"";

/// Runs a connection with the frames that the bytes encode.
///
/// # Panics
/// If an invariant does not hold.
pub fn run(input: &[u8]) {
    let Some((&first, operations)) = input.split_first() else {
        return;
    };
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_time().build().expect("a runtime");
    runtime.block_on(async {
        let done = timeout(LIMIT, connection(first, operations)).await;
        done.expect("the connection ends with its peer");
    });
}

async fn connection(first: u8, operations: &[u8]) {
    let (near, far) = duplex(1 << 16);
    let inbound = Arc::new(Inbound::new(WindowProfile::Fixed(WINDOW_BYTES)));
    let is_client = first & 1 == 1;
    let end = async {
        match is_client {
            true => opener(near, &inbound).await,
            false => taker(near, &inbound).await,
        }
    };
    tokio::join!(end, peer(far, first, operations, &inbound));
    assert_eq!(inbound.held.load(Ordering::Relaxed), 0, "bytes are counted");
}

/// The end that accepts streams.
async fn taker(near: DuplexStream, inbound: &Arc<Inbound>) {
    let limits = TakerLimits {
        held_bytes: 1 << 20,
        streams: STREAMS,
        send_bytes: 1 << 16,
        ..TakerLimits::trusting()
    };
    let Ok(mut taker) = Taker::new(near, inbound.clone(), limits).await else {
        return;
    };
    let mut streams = JoinSet::new();
    let mut number = 0;
    while let Ok(Some((request, mut respond))) = taker.next().await {
        if let Ok(send) = respond.send_response(Response::new(()), false) {
            let receive = request.into_body();
            let both = halves(send, receive, inbound.clone(), CloseReason::AgentLost);
            streams.spawn(stream(both, number));
            number += 1;
        }
    }
    // The transport keeps the chunk that it was writing, and a stream waits for its last chunk.
    drop(taker);
    streams.join_all().await;
}

/// The end that opens streams.
async fn opener(near: DuplexStream, inbound: &Arc<Inbound>) {
    let opened = Opener::new(near, inbound.clone(), PINGS).await;
    let Ok((requests, mut opener)) = opened else {
        return;
    };
    let mut streams = JoinSet::new();
    for number in 0..STREAMS {
        let (requests, inbound) = (requests.clone(), inbound.clone());
        streams.spawn(async move {
            let mut request = Request::new(());
            *request.method_mut() = Method::CONNECT;
            *request.uri_mut() = http::Uri::from_static("a:1");
            let Ok(mut requests) = requests.ready().await else {
                return;
            };
            let Ok((response, send)) = requests.send_request(request, false) else {
                return;
            };
            if let Ok(response) = response.await {
                let receive = response.into_body();
                let both = halves(send, receive, inbound, CloseReason::AgentLost);
                stream(both, number).await;
            }
        });
    }
    drop(requests);
    let _ = opener.run().await;
    // The transport keeps the chunk that it was writing, and a stream waits for its last chunk.
    drop(opener);
    streams.join_all().await;
}

/// The task of one stream; the number selects its behavior.
async fn stream((mut source, mut sink): (NativeSource, NativeSink), number: u32) {
    let tasks = TaskTracker::new();
    match number % 4 {
        // Echoes all bytes.
        0 => {
            while let Ok(Some(bytes)) = source.recv().await {
                if sink.send(bytes).await.is_err() {
                    return;
                }
            }
            let _ = sink.finish().await;
        }
        // Buffers bytes for a moment, as while a sink is busy, and accepts none.
        1 => {
            let _ = timeout(Duration::from_millis(1), source.fill()).await;
            source.aborted().await;
        }
        // Never reads.
        2 => {
            source.aborted().await;
        }
        // Reads once, sends once, and aborts.
        _ => {
            let _ = source.recv().await;
            let _ = sink.send(Bytes::from_static(&[7; 1000])).await;
            sink.end(CloseReason::Stalled, &tasks);
        }
    }
    tasks.close();
    drop(source);
    tasks.wait().await;
}

/// The peer: sends the frames, and checks the counted bytes after each frame.
async fn peer(far: DuplexStream, first: u8, operations: &[u8], inbound: &Inbound) {
    let (mut reader, mut writer) = tokio::io::split(far);
    let reads = first & 2 == 0;
    let read = async {
        let mut buffer = [0; 4096];
        while reads && reader.read(&mut buffer).await.is_ok_and(|count| count > 0) {}
    };
    let write = async {
        let is_server = first & 1 == 1;
        let mut start = frame(SETTINGS, 0, 0, &[]);
        if !is_server {
            start.splice(0..0, PREFACE.iter().copied());
        }
        let mut next = 1;
        let frames = operations.chunks_exact(3).map(|operation| {
            let [kind, a, b] = [operation[0], operation[1], operation[2]];
            encode(kind % 16, a, b, &mut next, is_server)
        });
        for bytes in std::iter::once(start).chain(frames) {
            // Fails once the end has closed the connection. An end that cannot write may also stop reading.
            let written = timeout(STUCK, writer.write_all(&bytes)).await;
            if !matches!(written, Ok(Ok(()))) {
                break;
            }
            for _ in 0..4 {
                yield_now().await;
            }
            let held = inbound.held.load(Ordering::Relaxed);
            assert!(held <= (STREAMS * WINDOW_BYTES) as usize, "{held} bytes");
        }
    };
    tokio::select! {
        () = write => {}
        () = async { read.await; std::future::pending::<()>().await } => {}
    }
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    let head = [length[1], length[2], length[3], kind, flags];
    [&head, &stream.to_be_bytes()[..], payload].concat()
}

/// Returns the bytes of an operation. `next` is the id of the next stream.
fn encode(kind: u8, a: u8, b: u8, next: &mut u32, is_server: bool) -> Vec<u8> {
    let block = if is_server { STATUS } else { CONNECT };
    // An id in use, or the next one.
    let stream = (2 * u32::from(a % 16) + 1).min(*next);
    let value = u32::from(b);
    match kind {
        0 => {
            let bytes = frame(HEADERS, END_HEADERS | (b & END_STREAM), *next, block);
            *next += 2;
            bytes
        }
        3 => frame(RST_STREAM, 0, stream, &value.to_be_bytes()),
        4 => {
            let stream = if a & 0x80 == 0 { stream } else { 0 };
            frame(WINDOW_UPDATE, 0, stream, &((value << 8) | 1).to_be_bytes())
        }
        5 => {
            // Small values, so that most settings are valid: sizes of tables, windows and lists.
            let setting = [0, [1, 3, 4, 6][usize::from(a % 4)]];
            frame(
                SETTINGS,
                0,
                0,
                &[&setting[..], &(value << 8).to_be_bytes()].concat(),
            )
        }
        6 => frame(PING, a & ACK, 0, &[b; 8]),
        7 => frame(HEADERS, END_HEADERS | END_STREAM, stream, NOTHING),
        8 => frame(a, b, stream, &[a; 8]),
        9 => frame(SETTINGS, ACK, 0, &[]),
        10 => frame(GOAWAY, 0, 0, &[0, 0, 0, a, 0, 0, 0, b]),
        11 => vec![a, b],
        _ => frame(DATA, a >> 7, stream, &vec![b; 64 * usize::from(b)]),
    }
}
