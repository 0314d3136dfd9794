#![allow(clippy::unwrap_used)]

use std::future::poll_fn;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use h2::client::SendRequest;
use h2::{RecvStream, SendStream};
use http::{Request, Response};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::*;
use crate::window::{PACKETS_BESIDE_BYTES, SHORT_PATH_BYTES, WindowProfile};

const LIMIT: Duration = Duration::from_secs(60);

const PINGS: Pings = Pings {
    idle: Duration::from_secs(30),
    timeout: Duration::from_secs(20),
};

/// One way along a path of 100 ms, and along a path within a host.
const FAR: Duration = Duration::from_millis(50);
const NEAR: Duration = Duration::from_micros(50);

/// Bytes per second of a path.
const RATE: u32 = 30_000_000;

/// Window of the long path: twice its 3 MB, in steps of 1 MiB.
const FAR_BYTES: u32 = 6 << 20;

/// Bytes in a frame of bulk.
const PIECE: usize = 16 * 1024;

/// Connects two pipes by a path of [`RATE`]. Every piece arrives after the delay that `delay` has when the piece is
/// sent.
fn path(delay: &watch::Receiver<Duration>) -> (DuplexStream, DuplexStream) {
    let (near, near_end) = duplex(1 << 16);
    let (far, far_end) = duplex(1 << 16);
    let (near_read, near_write) = tokio::io::split(near_end);
    let (far_read, far_write) = tokio::io::split(far_end);
    for (mut from, mut to) in [(near_read, far_write), (far_read, near_write)] {
        let (sent, mut in_flight) = mpsc::unbounded_channel::<(Instant, Bytes)>();
        let delay = delay.clone();
        tokio::spawn(async move {
            let mut buffer = vec![0; 1 << 16];
            let mut left = Instant::now();
            while let Ok(read @ 1..) = from.read(&mut buffer).await {
                let piece = buffer.iter().copied().take(read).collect();
                let time = Duration::from_secs_f64(read as f64 / f64::from(RATE));
                left = left.max(Instant::now()) + time;
                let due = left + *delay.borrow();
                if sent.send((due, piece)).is_err() {
                    return;
                }
            }
        });
        tokio::spawn(async move {
            while let Some((due, piece)) = in_flight.recv().await {
                sleep_until(due).await;
                if to.write_all(&piece).await.is_err() {
                    return;
                }
            }
        });
    }
    (near, far)
}

/// A server that reads everything, and an agent that calls it.
struct Stream {
    inbound: Arc<Inbound>,
    delay: watch::Sender<Duration>,
    /// The agent's packets.
    packets: SendStream<Bytes>,
    /// The body at the server, unless the server reads it.
    unread: Option<RecvStream>,
}

/// Takes calls, and passes their bodies and their answers on.
async fn take(
    mut taker: Taker<DuplexStream, Bytes>,
    bodies: mpsc::UnboundedSender<(RecvStream, SendStream<Bytes>)>,
) {
    while let Ok(Some((request, mut respond))) = taker.next().await {
        let answer = respond.send_response(Response::new(()), false);
        bodies.send((request.into_body(), answer.unwrap())).unwrap();
    }
}

impl Stream {
    /// Connects an agent. The server reads the body if `reads` is true.
    async fn open(one_way: Duration, reads: bool) -> Self {
        let (delay, along) = watch::channel(one_way);
        let (near, far) = path(&along);
        let inbound = Arc::new(Inbound::new(WindowProfile::Packets));
        let (bodies, mut called) = mpsc::unbounded_channel();
        let taker = Taker::for_packets(near, inbound.clone(), 16, PINGS);
        tokio::spawn(async move { take(taker.await.unwrap(), bodies).await });
        let (requests, connection) = h2::client::handshake(far).await.unwrap();
        tokio::spawn(connection);
        let mut requests = requests.ready().await.unwrap();
        let (_, packets) = requests.send_request(Request::new(()), false).unwrap();
        let (mut body, answer) = called.recv().await.unwrap();
        let mut stream = Self {
            inbound,
            delay,
            packets,
            unread: None,
        };
        if reads {
            let inbound = stream.inbound.clone();
            tokio::spawn(async move {
                let _answer = answer;
                while let Some(Ok(bytes)) = body.data().await {
                    inbound.count_message(bytes.len(), false);
                    body.flow_control().release_capacity(bytes.len()).unwrap();
                }
            });
        } else {
            stream.unread = Some(body);
            tokio::spawn(async move {
                let _answer = answer;
                std::future::pending::<()>().await;
            });
        }
        stream
    }

    /// Sends bulk until the window is `expected`.
    async fn bulk_until(&mut self, expected: u32) {
        let bulk = async {
            while self.inbound.window() != expected {
                self.send(PIECE).await;
            }
        };
        let done = timeout(LIMIT, bulk).await;
        let window = self.inbound.window();
        assert!(done.is_ok(), "{window} bytes instead of {expected}");
    }

    /// Sends bulk for a while.
    async fn bulk_for(&mut self, time: Duration) {
        let until = Instant::now() + time;
        while Instant::now() < until {
            self.send(PIECE).await;
        }
    }

    /// Sends a frame as soon as the windows permit.
    async fn send(&mut self, bytes: usize) {
        self.packets.reserve_capacity(bytes);
        while self.packets.capacity() < bytes {
            let room = poll_fn(|cx| self.packets.poll_capacity(cx));
            room.await.unwrap().unwrap();
        }
        let frame = Bytes::from(vec![0; bytes]);
        self.packets.send_data(frame, false).unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn window_follows_a_path_that_becomes_short() {
    let mut stream = Stream::open(FAR, true).await;
    stream.inbound.admit();
    stream.bulk_until(FAR_BYTES).await;
    stream.delay.send_replace(NEAR);
    // A full window keeps the round trip long; a ping on the idle path shows the short round trip.
    sleep(2 * PINGS.idle).await;
    stream.bulk_until(SHORT_PATH_BYTES).await;
}

#[tokio::test(start_paused = true)]
async fn small_messages_shrink_the_window_of_a_short_path_while_they_flow() {
    let mut stream = Stream::open(NEAR, true).await;
    stream.inbound.admit();
    stream.bulk_until(SHORT_PATH_BYTES).await;
    stream.bulk_for(Duration::from_millis(500)).await;
    assert_eq!(stream.inbound.window(), SHORT_PATH_BYTES);
    stream.inbound.small.fetch_add(1, Ordering::Relaxed);
    stream.bulk_until(PACKETS_BESIDE_BYTES).await;
    // No more small messages.
    stream.bulk_until(SHORT_PATH_BYTES).await;
}

#[tokio::test(start_paused = true)]
async fn small_messages_do_not_shrink_the_window_of_a_long_path() {
    let mut stream = Stream::open(FAR, true).await;
    stream.inbound.admit();
    stream.bulk_until(FAR_BYTES).await;
    for _ in 0..10 {
        stream.inbound.small.fetch_add(1, Ordering::Relaxed);
        stream.bulk_for(Duration::from_millis(300)).await;
        assert_eq!(stream.inbound.window(), FAR_BYTES);
    }
}

#[tokio::test(start_paused = true)]
async fn unread_bytes_shrink_the_window_until_they_are_read() {
    let mut stream = Stream::open(FAR, true).await;
    stream.inbound.admit();
    stream.bulk_until(FAR_BYTES).await;
    let held = stream.inbound.held.clone();
    held.store(HELD_BYTES, Ordering::Relaxed);
    stream.bulk_until(PACKETS_BESIDE_BYTES).await;
    held.store(0, Ordering::Relaxed);
    stream.bulk_until(FAR_BYTES).await;
}

#[tokio::test(start_paused = true)]
async fn peer_gets_the_default_window_before_its_admission() {
    let mut stream = Stream::open(NEAR, false).await;
    let default = 65_535;
    stream.packets.reserve_capacity(4 * default);
    sleep(PINGS.timeout * 2).await;
    assert_eq!(stream.packets.capacity(), default);
    stream.inbound.admit();
    let opened = async {
        while stream.packets.capacity() < 4 * default {
            poll_fn(|cx| stream.packets.poll_capacity(cx)).await;
        }
    };
    timeout(LIMIT, opened).await.unwrap();
}

/// Connects a client. Returns its requests, and the calls as the server receives them.
async fn client() -> (
    SendRequest<Bytes>,
    mpsc::UnboundedReceiver<(RecvStream, SendStream<Bytes>)>,
) {
    let (near, far) = duplex(1 << 16);
    let (bodies, called) = mpsc::unbounded_channel();
    let taker = Taker::for_client(near, PINGS);
    tokio::spawn(async move { take(taker.await.unwrap(), bodies).await });
    let (requests, connection) = h2::client::handshake(far).await.unwrap();
    tokio::spawn(connection);
    (requests.ready().await.unwrap(), called)
}

/// A client may fill the window of its stream with frames of 14 bytes: messages of one byte.
#[tokio::test(start_paused = true)]
async fn smallest_messages_of_a_client_may_fill_its_window() {
    let (mut requests, mut called) = client().await;
    let (_, mut packets) = requests.send_request(Request::new(()), false).unwrap();
    let (mut body, _answer) = called.recv().await.unwrap();
    let mut sent = 0;
    while sent + 14 <= CLIENT_WINDOW_BYTES as usize {
        packets.reserve_capacity(14);
        let room = poll_fn(|cx| packets.poll_capacity(cx));
        timeout(LIMIT, room).await.unwrap().unwrap().unwrap();
        packets
            .send_data(Bytes::from_static(&[0; 14]), false)
            .unwrap();
        sent += 14;
    }
    let mut read = 0;
    while read < sent {
        let bytes = timeout(LIMIT, body.data()).await.unwrap();
        read += bytes.unwrap().unwrap().len();
    }
}

/// Sends until the stream has no capacity for a second. Returns the number of sent bytes.
async fn fill(packets: &mut SendStream<Bytes>) -> usize {
    let mut sent = 0;
    loop {
        packets.reserve_capacity(PIECE);
        let room = async {
            while packets.capacity() == 0 {
                let room = poll_fn(|cx| packets.poll_capacity(cx));
                room.await.unwrap().unwrap();
            }
        };
        if timeout(Duration::from_secs(1), room).await.is_err() {
            // Otherwise the stream would get the next room of the connection.
            packets.reserve_capacity(0);
            return sent;
        }
        let bytes = packets.capacity().min(PIECE);
        let frame = Bytes::from(vec![0; bytes]);
        packets.send_data(frame, false).unwrap();
        sent += bytes;
    }
}

#[tokio::test(start_paused = true)]
async fn unread_bytes_of_a_client_are_limited_for_each_stream_and_for_all_streams() {
    const STREAM: usize = 1 << 20;
    const ALL: usize = 40 << 20;
    let (mut requests, mut called) = client().await;
    let (mut streams, mut unread, mut sent) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..=ALL / STREAM {
        let (_, mut packets) = requests.send_request(Request::new(()), false).unwrap();
        unread.push(called.recv().await.unwrap());
        sent.push(fill(&mut packets).await);
        streams.push(packets);
        requests = requests.ready().await.unwrap();
    }
    let mut further = streams.pop().unwrap();
    assert_eq!(sent.pop(), Some(0));
    assert_eq!(sent, [STREAM; ALL / STREAM]);

    // The client may send as many bytes as the server has read.
    let (body, _answer) = unread.first_mut().unwrap();
    let mut read = 0;
    while read < STREAM {
        let bytes = timeout(LIMIT, body.data()).await.unwrap();
        let bytes = bytes.unwrap().unwrap().len();
        body.flow_control().release_capacity(bytes).unwrap();
        read += bytes;
    }
    assert_eq!(fill(&mut further).await, STREAM);
}

/// `h2` counts unread small frames against a budget, which by default follows the window of the connection.
#[tokio::test(start_paused = true)]
async fn unread_small_messages_do_not_end_the_connection() {
    const MESSAGES: usize = 6000;
    let mut stream = Stream::open(NEAR, false).await;
    stream.inbound.admit();
    for _ in 0..MESSAGES {
        stream.send(64).await;
    }
    let mut body = stream.unread.take().unwrap();
    let mut read = 0;
    while read < MESSAGES * 64 {
        let bytes = timeout(LIMIT, body.data()).await.unwrap();
        read += bytes.unwrap().unwrap().len();
    }
}

/// Frame types (RFC 9113, section 6).
const SETTINGS: u8 = 4;
const PING: u8 = 6;

/// Reads frames until a frame of type `kind`. Returns its payload.
async fn next_frame(peer: &mut DuplexStream, kind: u8) -> Vec<u8> {
    loop {
        let mut head = [0; 9];
        peer.read_exact(&mut head).await.unwrap();
        let [high, mid, low, found, ..] = head;
        let mut payload = vec![0; u32::from_be_bytes([0, high, mid, low]) as usize];
        peer.read_exact(&mut payload).await.unwrap();
        if found == kind {
            return payload;
        }
    }
}

/// Starts a server of packet streams. The returned end has sent its first frames.
async fn unadmitted(inbound: &Arc<Inbound>) -> (DuplexStream, Taker<DuplexStream, Bytes>) {
    let (near, mut far) = duplex(1 << 22);
    far.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        .await
        .unwrap();
    far.write_all(&[0, 0, 0, SETTINGS, 0, 0, 0, 0, 0])
        .await
        .unwrap();
    let taker = Taker::for_packets(near, inbound.clone(), 2, PINGS).await;
    (far, taker.unwrap())
}

/// Connects a peer that has sent its first frames, and runs the server's end.
async fn scripted(inbound: &Arc<Inbound>) -> (DuplexStream, JoinHandle<Result<(), String>>) {
    let (far, mut taker) = unadmitted(inbound).await;
    let run = tokio::spawn(async move { taker.next().await.map(|_| ()) });
    (far, run)
}

#[tokio::test(start_paused = true)]
async fn peer_is_pinged_only_after_its_admission() {
    let inbound = Arc::new(Inbound::new(WindowProfile::Packets));
    let (mut far, _run) = scripted(&inbound).await;
    let (started, wait) = (Instant::now(), 3 * PINGS.idle);
    let admit = async {
        sleep(wait).await;
        inbound.admit();
    };
    tokio::join!(next_frame(&mut far, PING), admit);
    assert_eq!(started.elapsed(), wait);
}

#[tokio::test(start_paused = true)]
async fn window_stays_while_pings_are_unanswered() {
    let inbound = Arc::new(Inbound::new(WindowProfile::Packets));
    inbound.admit();
    let (mut far, run) = scripted(&inbound).await;
    next_frame(&mut far, PING).await;
    // Frames of an unknown type, which are ignored, and no answer.
    let mut noise = vec![0, 0x40, 0, 0xf0, 0, 0, 0, 0, 0];
    noise.resize(9 + 0x4000, 0);
    for _ in 0..100 {
        far.write_all(&noise).await.unwrap();
        sleep(Duration::from_secs(1)).await;
        assert_eq!(inbound.window(), SHORT_PATH_BYTES);
    }
    assert!(!run.is_finished());
    let ended = timeout(LIMIT, run).await.unwrap().unwrap();
    assert!(ended.unwrap_err().contains("silent"));
}

/// Fields of a call (RFC 7541, C.2): `:method: POST`, `:scheme: https` and `:path: /`.
const CALL: [u8; 3] = [0x83, 0x87, 0x84];

/// Encodes a HEADERS frame. `flags` are added to END_HEADERS.
fn headers(flags: u8, stream: u8, fields: &[u8]) -> Vec<u8> {
    let [high, low] = u16::try_from(fields.len()).unwrap().to_be_bytes();
    [&[0, high, low, 1, 4 | flags, 0, 0, 0, stream], fields].concat()
}

/// DATA frame of one byte in the first stream.
const ONE_BYTE: [u8; 10] = [0, 0, 1, 0, 0, 0, 0, 0, 1, b'x'];

/// Runs a server that keeps all its calls. Returns the number of calls.
fn keeping(
    mut taker: Taker<DuplexStream, Bytes>,
) -> (watch::Receiver<usize>, JoinHandle<Result<(), String>>) {
    let (count, counted) = watch::channel(0);
    let run = tokio::spawn(async move {
        let mut calls = Vec::new();
        while let Some(call) = taker.next().await? {
            calls.push(call);
            count.send_replace(calls.len());
        }
        Ok::<_, String>(())
    });
    (counted, run)
}

#[tokio::test(start_paused = true)]
async fn little_is_read_between_a_call_and_the_admission_of_the_agent() {
    const FRAMES: usize = 8000;
    let inbound = Arc::new(Inbound::new(WindowProfile::Packets));
    let (mut far, taker) = unadmitted(&inbound).await;
    far.write_all(&headers(0, 1, &CALL)).await.unwrap();
    far.write_all(&ONE_BYTE.repeat(FRAMES)).await.unwrap();
    let (mut calls, _run) = keeping(taker);
    timeout(LIMIT, calls.wait_for(|calls| *calls == 1))
        .await
        .unwrap()
        .unwrap();
    sleep(Duration::from_secs(1)).await;
    let read = inbound.heard();
    assert!(read <= 3 * FIRST_READ_BYTES as u64, "{read} bytes");
    inbound.admit();
    let all = async {
        while inbound.heard() < (FRAMES * ONE_BYTE.len()) as u64 {
            sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(LIMIT, all).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn reads_without_a_call_stop_after_20_kib() {
    let inbound = Arc::new(Inbound::new(WindowProfile::Packets));
    let (mut far, taker) = unadmitted(&inbound).await;
    // Frames of an unknown type, which are ignored.
    let ignored = [0, 0, 0, 0xf0, 0, 0, 0, 0, 0].repeat(10_000);
    far.write_all(&ignored).await.unwrap();
    let (calls, run) = keeping(taker);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(inbound.heard(), FIRST_BYTES as u64);
    assert!(!run.is_finished());
    assert_eq!(*calls.borrow(), 0);
}

/// A list of 15 KiB: a token of 13 KiB, more than any API server issues, and many identifiers.
#[tokio::test(start_paused = true)]
async fn call_with_a_large_token_is_accepted_before_the_admission() {
    let inbound = Arc::new(Inbound::new(WindowProfile::Packets));
    let (near, far) = duplex(1 << 16);
    let (requests, connection) = h2::client::handshake(far).await.unwrap();
    tokio::spawn(connection);
    let taker = Taker::for_packets(near, inbound, 2, PINGS).await.unwrap();
    let (mut calls, _run) = keeping(taker);
    let mut requests = requests.ready().await.unwrap();
    let request = Request::post("https://localhost/")
        .header("authorization", format!("Bearer {}", "t".repeat(13 << 10)))
        .header("agentidentifiers", "h".repeat(1 << 10));
    let (_answer, _body) = requests
        .send_request(request.body(()).unwrap(), false)
        .unwrap();
    let called = timeout(LIMIT, calls.wait_for(|calls| *calls == 1)).await;
    called.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn list_of_many_empty_fields_is_refused_and_stream_errors_end_the_connection() {
    let inbound = Arc::new(Inbound::new(WindowProfile::Packets));
    inbound.admit();
    let (mut far, taker) = unadmitted(&inbound).await;
    let (mut calls, run) = keeping(taker);
    // The first field is defined by its name, the others refer to it. Each counts 33 bytes.
    let fields = |count| [&CALL[..], &[0x40, 1, b'x', 0], &vec![0x80 | 62; count]].concat();
    far.write_all(&headers(0, 1, &fields(500))).await.unwrap();
    far.write_all(&headers(0, 3, &CALL)).await.unwrap();
    let called = timeout(LIMIT, calls.wait_for(|calls| *calls == 1)).await;
    called.unwrap().unwrap();
    // Streams that depend on themselves (RFC 7540, section 5.3.1).
    let mut errors = Vec::new();
    for id in (5..).step_by(2).take(ERROR_RESETS + 1) {
        errors.extend(headers(0x20, id, &[0, 0, 0, id, 15]));
    }
    far.write_all(&errors).await.unwrap();
    let ended = timeout(LIMIT / 4, run).await.unwrap().unwrap();
    let why = ended.unwrap_err();
    assert!(!why.contains("silent"), "{why}");
    assert_eq!(*calls.borrow(), 1);
}

/// Idle time after which the agent of [`stock_server`] sends a ping.
const IDLE: Duration = Duration::from_secs(3600);

/// Connects an agent to the returned end, which plays a stock server.
async fn stock_server() -> (DuplexStream, Arc<Inbound>) {
    let (near, mut far) = duplex(1 << 22);
    far.write_all(&[0, 0, 0, SETTINGS, 0, 0, 0, 0, 0])
        .await
        .unwrap();
    let inbound = Arc::new(Inbound::new(WindowProfile::Packets));
    inbound.admit();
    let pings = Pings {
        idle: IDLE,
        ..PINGS
    };
    let opened = Opener::<_, Bytes>::for_packets(near, inbound.clone(), pings).await;
    let (requests, mut opener) = opened.unwrap();
    tokio::spawn(async move {
        let _requests = requests;
        opener.run().await
    });
    far.read_exact(&mut [0; 24]).await.unwrap();
    (far, inbound)
}

/// Answers a ping.
async fn answer(far: &mut DuplexStream, ping: &[u8]) {
    let answer = [&[0, 0, 8, PING, 1, 0, 0, 0, 0], ping].concat();
    far.write_all(&answer).await.unwrap();
}

/// The limit of unread bytes follows the shortest round trip, which the first answer of a busy machine may exceed.
#[tokio::test(start_paused = true)]
async fn data_of_a_stock_server_confirms_the_round_trip_three_times() {
    let (mut far, inbound) = stock_server().await;
    let mut count = 0;
    for second in 0..20 {
        while let Ok(ping) = timeout(Duration::from_millis(900), next_frame(&mut far, PING)).await {
            count += 1;
            answer(&mut far, &ping).await;
        }
        sleep(Duration::from_secs(1)).await;
        // A frame of an unknown type wakes the connection. Without DATA, no further ping follows.
        if second >= 5 {
            inbound.count_message(10, true);
        }
        far.write_all(&[0, 0, 0, 0xf0, 0, 0, 0, 0, 0])
            .await
            .unwrap();
        let expected = if second < 5 { 1..=1 } else { 1..=4 };
        assert!(expected.contains(&count), "{count} pings after {second} s");
    }
    assert_eq!(count, 4);
    assert_eq!(inbound.ahead(), None);
    inbound.limit_ahead();
    sleep(Duration::from_millis(1)).await;
    assert!(inbound.ahead().is_some());
}

/// A stock server ends the connection after three pings with less than 30 s between them, unless it sends DATA in between
/// (grpc-go, `keepalive.EnforcementPolicy`). An upload of the agent makes it send window updates only.
#[tokio::test(start_paused = true)]
async fn window_updates_cause_no_pings() {
    let (mut far, _inbound) = stock_server().await;
    let ping = next_frame(&mut far, PING).await;
    answer(&mut far, &ping).await;
    let update = [0, 0, 4, 8, 0, 0, 0, 0, 0, 0, 0, 0, 1];
    for _ in 0..60 {
        far.write_all(&update.repeat(2000)).await.unwrap();
        sleep(Duration::from_secs(1)).await;
    }
    let another = timeout(IDLE / 2, next_frame(&mut far, PING)).await;
    assert!(another.is_err(), "{another:?}");
}
