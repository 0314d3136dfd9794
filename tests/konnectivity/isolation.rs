//! Many connections stall at the same time, without any effect on many other connections.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::time::Duration;

use bytes::Bytes;
use culvert_kit::client::BoxedStream;
use culvert_kit::pattern::{self, Verifier};
use culvert_kit::services::Services;
use culvert_konnectivity::message::{ConnectId, Message};
use culvert_tests::{Mode, Topology, Transport, eventually};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::JoinSet;

use crate::agent_streams::{open_as, works};
use crate::endpoints::Endpoint;
use crate::scripts::{self, Server, close_request, data};
use crate::searching::Lone;
use crate::streams_of_servers::dialed;
use crate::support::*;

const STALLED: i64 = 8;
const OTHERS: i64 = 20;

/// Number of 64 KiB packets that a script sends to each stalled connection.
const FLOOD: usize = 192;

/// Number of bytes on each stalled connection between our programs. Far more than the sockets and windows on
/// the path can buffer, so the connection really stalls.
const STALLED_BYTES: u64 = 32 * 1024 * 1024;

/// Limit for the memory growth of one program during the test, in bytes. A fraction of the growth without
/// bounds.
const HELD_LIMIT: u64 = 96 * 1024 * 1024;

/// Number of bytes for each of the other connections per round of the flood.
const PIECE: usize = 2048;

fn bytes_of(connection: i64) -> Vec<u8> {
    let bytes = (0..FLOOD * PIECE).map(|i| (i as i64 * 31 + connection) as u8);
    bytes.collect()
}

/// Returns the flood for the stalled connections, with the bytes for the other connections in between. The
/// ids of the other connections start at `first_other`.
fn interleaved(stalled: RangeInclusive<i64>, first_other: i64) -> Vec<Message> {
    let block = Bytes::from(vec![0; 64 * 1024]);
    let others: Vec<_> = (first_other..first_other + OTHERS)
        .map(|id| (ConnectId(id), Bytes::from(bytes_of(id))))
        .collect();
    let mut messages = Vec::new();
    for round in 0..FLOOD {
        messages.extend(stalled.clone().map(|id| Message::Data {
            connection: ConnectId(id),
            bytes: block.clone(),
        }));
        messages.extend(others.iter().map(|(connection, bytes)| Message::Data {
            connection: *connection,
            bytes: bytes.slice(round * PIECE..(round + 1) * PIECE),
        }));
    }
    messages
}

/// Sends all bytes of a connection through the echo service, piece by piece, and checks every echo.
async fn echoes(mut stream: BoxedStream, connection: i64) -> BoxedStream {
    let bytes = bytes_of(connection);
    let mut back = vec![0; PIECE];
    for piece in bytes.chunks(PIECE) {
        stream.write_all(piece).await.unwrap();
        stream.flush().await.unwrap();
        timely("an echo", stream.read_exact(&mut back))
            .await
            .unwrap();
        assert_eq!(back, piece);
    }
    stream
}

/// Opens a connection, requests a flood and reads nothing.
async fn stalled_client(topology: &Topology, services: &Services) -> BoxedStream {
    let mut stream = open(topology, &services.raw.to_string()).await;
    let command = format!("download {STALLED_BYTES}\n");
    stream.write_all(command.as_bytes()).await.unwrap();
    stream.flush().await.unwrap();
    stream
}

/// Sends all bytes, although the endpoint reads nothing at first.
async fn sends(mut stream: BoxedStream) -> BoxedStream {
    for piece in pattern::pieces(STALLED_BYTES) {
        stream.write_all(&piece).await.unwrap();
    }
    stream.flush().await.unwrap();
    stream
}

/// Reads and verifies all bytes.
async fn reads(stream: &mut (impl AsyncRead + Unpin)) {
    let mut verifier = Verifier::default();
    let mut buffer = vec![0; 64 * 1024];
    while verifier.verified() < STALLED_BYTES {
        let n = timely("bytes", stream.read(&mut buffer)).await.unwrap();
        assert_ne!(n, 0, "ended after {}", verifier.verified());
        verifier.feed(&buffer[..n]).expect("the expected bytes");
    }
}

/// Returns the memory use of the server and the agent, in bytes.
fn memory(topology: &mut Topology) -> [u64; 2] {
    [topology.server(0).rss(), topology.agent(0).rss()]
}

/// Between our programs, every connection has its own flow control. A stalled reader stops only its own
/// sender, costs only a bounded buffer, and does not affect other connections.
async fn between_our_programs(mode: Mode) {
    let services = Services::start().await.unwrap();
    let endpoint = Endpoint::start().await;
    let mut topology = Topology::simple(mode, Transport::Uds).await;
    let raw = services.raw.to_string();
    let mut others = Vec::new();
    for _ in 0..OTHERS {
        let mut stream = open(&topology, &raw).await;
        stream.write_all(b"echo\n").await.unwrap();
        others.push(stream);
    }
    let before = memory(&mut topology);
    let mut stalled = Vec::new();
    let mut sending = JoinSet::new();
    let mut deaf = Vec::new();
    for _ in 0..STALLED {
        stalled.push(stalled_client(&topology, &services).await);
        let stream = open(&topology, &endpoint.addr().to_string()).await;
        deaf.push(endpoint.accept().await);
        sending.spawn(sends(stream));
    }
    let mut echoing = JoinSet::new();
    for (connection, stream) in (1..).zip(others) {
        echoing.spawn(echoes(stream, connection));
    }
    let others = timely("all echoes", echoing.join_all()).await;
    let after = memory(&mut topology);
    for (after, before) in after.iter().zip(before) {
        let grown = after.saturating_sub(before);
        assert!(grown < HELD_LIMIT, "memory grew by {grown} bytes");
    }
    assert!(
        sending.try_join_next().is_none(),
        "a client has sent everything to an endpoint that reads nothing"
    );
    let open = 2.0 * STALLED as f64 + OTHERS as f64;
    server_shows(&topology, "established_connections", &[], open).await;

    // Once the readers resume, every byte arrives.
    let mut reading = JoinSet::new();
    for mut stream in stalled {
        reading.spawn(async move {
            reads(&mut stream).await;
            assert!(read_rest(&mut stream).await.is_empty());
        });
    }
    for mut far in deaf {
        reading.spawn(async move {
            reads(&mut far).await;
            far.write_all(b"all").await.unwrap();
        });
    }
    reading.join_all().await;
    for mut stream in timely("everything is sent", sending.join_all()).await {
        let answer = read_rest(&mut stream).await;
        assert_eq!(answer, b"all");
    }
    for (connection, stream) in (1..).zip(others) {
        echoes(stream, connection).await;
    }
    for metrics in [
        topology.server_metrics(0).await,
        topology.agent_metrics(0).await,
    ] {
        assert_eq!(closed_as_slow(&metrics), 0.0, "{}", metrics.text());
    }
    server_is_idle(&topology).await;
    agent_shows(&topology, "open_endpoint_connections", &[], 0.0).await;
    excess_is_given_back(&topology).await;
    assert_unharmed(&mut topology).await;
}

/// Number of stalled downloads whose memory the programs return.
const PEAK: usize = 32;

/// Time in which idle programs return memory: ten times the time for which unused memory stays.
const RETURNED: Duration = Duration::from_secs(20);

#[tokio::test]
async fn idle_programs_return_the_memory_of_a_peak() {
    let services = Services::start().await.unwrap();
    let mut topology = Topology::simple(Mode::HttpConnect, Transport::Uds).await;
    drop(stalled_client(&topology, &services).await);
    let before = memory(&mut topology);
    let growth = |topology: &mut Topology| {
        let both = memory(topology).into_iter().zip(before);
        both.map(|(now, before)| now.saturating_sub(before)).sum()
    };
    let mut stalled = Vec::new();
    for _ in 0..PEAK {
        stalled.push(stalled_client(&topology, &services).await);
    }
    let mut peak: u64 = 0;
    eventually("a peak of 24 MiB", LIMIT, async || {
        peak = growth(&mut topology);
        (peak >= 24 << 20).then_some(()).ok_or(peak)
    })
    .await;
    drop(stalled);
    // Nobody asks the programs for anything meanwhile, except for a ping every 30 s.
    eventually("a quarter of the peak", RETURNED, async || {
        let now = growth(&mut topology);
        (now <= peak / 4).then_some(()).ok_or(now)
    })
    .await;
    assert_unharmed(&mut topology).await;
}

async fn excess_is_given_back(topology: &Topology) {
    let in_use = value(
        &topology.server_metrics(0).await,
        "culvert_excess_buffer_bytes",
        &[],
    );
    assert_eq!(in_use, 0.0);
}

#[tokio::test]
async fn stalled_connections_between_our_programs_do_not_disturb_others() {
    for mode in MODES {
        between_our_programs(mode).await;
    }
}

#[tokio::test]
async fn stalled_clients_of_a_stock_agent_are_closed_without_harming_others() {
    for mode in MODES {
        let topology = Topology::builder(mode, Transport::Uds)
            .servers(1)
            .server_args(&["--excess-buffer-bytes=4194304"])
            .start()
            .await;
        let mut agent = scripts::agent(&topology, "stock").await;
        let mut stalled = Vec::new();
        for id in 1..=STALLED {
            stalled.push(open_as(&topology, &mut agent, id).await);
        }
        let mut readers = JoinSet::new();
        let others = STALLED + 1;
        for id in others..others + OTHERS {
            let mut stream = open_as(&topology, &mut agent, id).await;
            readers.spawn(async move {
                let mut bytes = vec![0; FLOOD * PIECE];
                timely("bytes", stream.read_exact(&mut bytes))
                    .await
                    .unwrap();
                assert!(bytes == bytes_of(id), "wrong bytes on connection {id}");
                stream
            });
        }
        for message in interleaved(1..=STALLED, others) {
            agent.say(message).await;
        }
        let readers = timely("the others' bytes", readers.join_all()).await;
        let mut closed = BTreeSet::new();
        for _ in 0..STALLED {
            match agent.hear().await {
                Message::CloseRequest { connection } => closed.insert(connection.0),
                other => panic!("not a close: {other:?}"),
            };
        }
        assert_eq!(closed, (1..=STALLED).collect());
        assert_eq!(readers.len(), OTHERS as usize);
        server_shows(&topology, "established_connections", &[], OTHERS as f64).await;
        drop((stalled, readers));
        server_is_idle(&topology).await;
        excess_is_given_back(&topology).await;
    }
}

/// A slow connection delays a packet stream only by a limited time, so other connections of the stream
/// continue.
#[tokio::test]
async fn client_slower_than_a_stock_agent_is_closed_once_the_pool_is_empty() {
    let topology = Topology::builder(Mode::HttpConnect, Transport::Uds)
        .servers(1)
        .server_args(&["--excess-buffer-bytes=1048576"])
        .start()
        .await;
    let mut agent = scripts::agent(&topology, "stock").await;
    let mut slow = open_as(&topology, &mut agent, 1).await;
    let mut other = open_as(&topology, &mut agent, 2).await;
    let block = vec![0; 64 * 1024];
    let (mut sent, mut received) = (0, 0);
    let mut buffer = vec![0; 4096];
    loop {
        agent.say(data(1, &block)).await;
        sent += block.len();
        assert!(sent < 1 << 30, "the slow client is never closed");
        match timely("bytes or the end", slow.read(&mut buffer)).await {
            Ok(0) | Err(_) => break,
            Ok(n) => received += n,
        }
    }
    assert!(0 < received && received < sent, "{received} of {sent}");
    let exceeded = [("reason", "buffer_exceeded")];
    let metrics = topology.server_metrics(0).await;
    let closed = value(&metrics, "culvert_connections_closed_total", &exceeded);
    assert_eq!(closed, 1.0);
    // The other connection continues. The server has answered late packets for the slow connection with
    // closes.
    other.write_all(b"question").await.unwrap();
    other.flush().await.unwrap();
    let mut closes = 0;
    let asked = loop {
        match agent.hear().await {
            message if message == close_request(1) => closes += 1,
            message => break message,
        }
    };
    assert!(closes >= 1);
    assert_eq!(asked, data(2, b"question"));
    agent.say(data(2, b"answer")).await;
    let mut answer = [0; 6];
    let read = timely("an answer", other.read_exact(&mut answer)).await;
    assert_eq!((read.unwrap(), &answer), (6, b"answer"));
}

#[tokio::test]
async fn client_stalled_on_many_small_packets_is_closed_as_stalled() {
    let topology = Topology::builder(Mode::HttpConnect, Transport::Uds)
        .servers(1)
        .server_args(&["--stall-timeout=15s"])
        .start()
        .await;
    let mut agent = scripts::agent(&topology, "stock").await;
    let stalled = open_as(&topology, &mut agent, 1).await;
    let mut other = open_as(&topology, &mut agent, 2).await;
    for _ in 0..10_000 {
        agent.say(data(1, b"x")).await;
    }
    works(&mut agent, 2, &mut other).await;
    assert_eq!(agent.hear().await, close_request(1));
    let metrics = topology.server_metrics(0).await;
    let stalled_ones = [("reason", "stalled")];
    let closed = value(&metrics, "culvert_connections_closed_total", &stalled_ones);
    assert_eq!(closed, 1.0);
    works(&mut agent, 2, &mut other).await;
    drop((stalled, other));
    server_is_idle(&topology).await;
}

#[tokio::test]
async fn stalled_endpoints_of_a_stock_server_are_closed_without_harming_others() {
    let endpoint = Endpoint::start().await;
    let target = endpoint.addr().to_string();
    let mut lone = Lone::new();
    let mut server = Server::start(&lone.pki.cluster, &["a"], "1").await;
    lone.start(
        &[
            &format!("--proxy-server-port={}", server.addr.port()),
            "--excess-buffer-bytes=2097152",
            "--xfr-channel-size=8",
        ],
        &[],
    );
    let mut call = server.call().await;
    let mut stalled = Vec::new();
    let mut last = 0;
    for random in 1..=STALLED {
        last = dialed(&mut call, random, "tcp", &target).await.0;
        stalled.push(endpoint.accept().await);
    }
    let ids = last - STALLED + 1..=last;
    let mut readers = JoinSet::new();
    let others = last + 1;
    for id in others..others + OTHERS {
        assert_eq!(dialed(&mut call, id, "tcp", &target).await.0, id);
        let mut far = endpoint.accept().await;
        readers.spawn(async move {
            let mut bytes = vec![0; FLOOD * PIECE];
            timely("bytes", far.read_exact(&mut bytes)).await.unwrap();
            assert!(bytes == bytes_of(id), "wrong bytes on connection {id}");
            far
        });
    }
    let saying = tokio::spawn(call.saying(interleaved(ids.clone(), others)));
    let mut closed = BTreeSet::new();
    while closed.len() < STALLED as usize {
        match call.hear().await {
            Message::CloseResponse { connection, error } if error.starts_with("closed: ") => {
                assert!(
                    closed.insert(connection.0),
                    "{connection:?} was closed twice"
                );
            }
            Message::CloseResponse { connection, error } => {
                assert_eq!(error, "unrecognized connectID");
                assert!(closed.contains(&connection.0), "{connection:?}");
            }
            other => panic!("not a close: {other:?}"),
        }
    }
    assert_eq!(closed, ids.collect());
    timely("the flood", saying).await.unwrap();
    let mut readers = timely("the others' bytes", readers.join_all()).await;
    lone.shows("open_endpoint_connections", OTHERS as f64).await;
    for far in &mut readers {
        far.write_all(b"!").await.unwrap();
    }
    let mut heard = BTreeSet::new();
    while heard.len() < OTHERS as usize {
        match call.hear().await {
            Message::Data { connection, bytes } => {
                assert_eq!(bytes, "!");
                heard.insert(connection.0);
            }
            Message::CloseResponse { connection, .. } => {
                assert!(closed.contains(&connection.0), "{connection:?}");
            }
            other => panic!("neither data nor a late close: {other:?}"),
        }
    }
    assert_eq!(heard, (others..others + OTHERS).collect());
}
