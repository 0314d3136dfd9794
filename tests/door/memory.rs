//! The memory that a stranger's HTTP/2 connections occupy, without any tunnel, and the number that a memory limit permits.

use std::time::Duration;

use culvert_kit::services::Services;
use culvert_tests::black_hole;
use culvert_tests::namespace::{alone, memory_limit};
use culvert_tests::wait::eventually;
use tokio::io::AsyncWriteExt;
use tokio::net::tcp::OwnedWriteHalf;
use tokio::time::timeout;

use crate::frames::{
    self, DATA, END_HEADERS, END_STREAM, Frames, GOAWAY, HEADERS, PRIORITY, RST_STREAM, SETTINGS,
    connect_fields, frame,
};
use crate::support::{Door, Http2, LIMIT, Upstream, connect_from, converse};

/// Number of connections, and the most memory of each, in bytes.
const CONNECTIONS: u64 = 100;
const MOST_BYTES: u64 = 384 << 10;

/// Number of requests on each connection: the limit of HTTP/2 streams.
const REQUESTS: u32 = 1024;

/// Number of requests that HTTP/2 refuses by itself on a connection that goes on.
const UNDECIDED: u32 = 15;

/// Flag of a SETTINGS frame.
const ACK: u8 = 1;

/// HTTP/2 error code ENHANCE_YOUR_CALM (RFC 9113, section 7).
const CALM: u32 = 11;

const UNKNOWN: &str = "other.demo.svc.cluster.local:443";

#[derive(Clone, Copy, Debug)]
enum Kind {
    /// Depends on itself, which is an error (RFC 7540, section 5.3.1).
    Wrong,
    /// Has a header list that is too large.
    Large,
    /// Is denied while the client may still send.
    Open,
    /// Is denied after its end.
    Ended,
}

impl Kind {
    /// Encodes the requests of one connection.
    fn requests(self) -> Vec<u8> {
        let fields = connect_fields(UNKNOWN);
        let one = |id: u32| match self {
            Self::Wrong => {
                let dependency = [&id.to_be_bytes()[..], &[15]].concat();
                frame(HEADERS, END_HEADERS | PRIORITY, id, &dependency)
            }
            Self::Large => {
                let definition: &[u8] = if id == 1 { &[0x40, 1, b'x', 0] } else { &[] };
                let block = [&fields[..], definition, &[0x80 | 62; 300]].concat();
                frame(HEADERS, END_HEADERS, id, &block)
            }
            Self::Open => frame(HEADERS, END_HEADERS, id, &fields),
            Self::Ended => frame(HEADERS, END_HEADERS | END_STREAM, id, &fields),
        };
        (0..REQUESTS).flat_map(|index| one(2 * index + 1)).collect()
    }

    /// Reads until the front door has answered what it reads of the requests.
    async fn read(self, frames: &mut Frames) {
        let (kind, count) = match self {
            Self::Wrong | Self::Large => (RST_STREAM, UNDECIDED),
            Self::Open => (RST_STREAM, REQUESTS),
            Self::Ended => (HEADERS, REQUESTS),
        };
        for _ in 0..count {
            let next = frames.next_of(kind).await;
            assert!(next.is_some(), "{self:?}");
        }
    }
}

/// Sends requests, as many as the front door takes.
async fn send(write: &mut OwnedWriteHalf, kind: Kind) {
    let requests = kind.requests();
    let sent = write.write_all(&requests);
    // More wait if the front door reads no further.
    if let Ok(sent) = timeout(Duration::from_millis(200), sent).await {
        sent.unwrap();
    }
}

#[tokio::test]
async fn requests_without_a_tunnel_occupy_little_memory() {
    for is_read in [true, false] {
        for kind in [Kind::Wrong, Kind::Large, Kind::Open, Kind::Ended] {
            let nowhere = "127.0.0.1:1".parse().unwrap();
            let door = Door::start(&[Upstream::new("demo/x", nowhere).authority("x:1")]).await;
            let before = door.program.rss();
            let mut strangers = Vec::new();
            for _ in 0..CONNECTIONS {
                let (mut frames, mut write) = match is_read {
                    true => frames::connect(door.tunneling, &[]).await,
                    false => frames::connect_unread(door.tunneling).await,
                };
                let read = async {
                    if is_read {
                        kind.read(&mut frames).await;
                    }
                };
                tokio::join!(send(&mut write, kind), read);
                strangers.push((frames, write));
            }
            // Other clients are served.
            let client = Http2::connect(door.tunneling).await;
            let denied = client.open(UNKNOWN, b"").await.err();
            assert_eq!(denied, Some(http::StatusCode::NOT_FOUND));
            let more = door.program.peak_rss().saturating_sub(before) / CONNECTIONS;
            let text = format!("{kind:?}, read: {is_read}: {} KiB", more >> 10);
            assert!(more < MOST_BYTES, "{text}");
        }
    }
}

#[test]
fn the_memory_limit_bounds_http2_connections_and_metrics_show_it() {
    alone(async || {
        memory_limit(4 * 96 * 1024);
        let services = Services::start().await.unwrap();
        let upstream = Upstream::new("demo/raw", services.raw).authority("raw:1");
        let door = Door::start(&[upstream]).await;
        let mut clients = Vec::new();
        for _ in 0..4 {
            let client = Http2::connect(door.tunneling).await;
            client.open("raw:1", b"").await.unwrap();
            clients.push(client);
        }
        let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
        assert_eq!(converse(door.tunneling, preface).await, b"");
        door.has_refused("tunneling", "too_many_connections", 1.0)
            .await;
        let limit = "culvert_nodeport_proxy_http2_connections_limit";
        assert_eq!(door.value(limit, &[]).await, 4.0);
        let open = async || {
            let open = "culvert_nodeport_proxy_http2_connections";
            door.value(open, &[]).await
        };
        assert_eq!(open().await, 4.0);
        clients.pop();
        eventually("a place is free", LIMIT, async || {
            let open = open().await;
            (open == 3.0).then_some(()).ok_or(open)
        })
        .await;
        let client = Http2::connect(door.tunneling).await;
        client.open("raw:1", b"").await.unwrap();
    });
}

#[test]
fn uploads_that_no_endpoint_reads_end_the_connection_with_the_largest() {
    alone(async || {
        memory_limit(16 << 20);
        let services = Services::start().await.unwrap();
        let hole = black_hole().await;
        let upstreams = [
            Upstream::new("demo/raw", services.raw).authority("raw:1"),
            Upstream::new("demo/hole", hole.addr()).authority("hole:1"),
        ];
        let door = Door::start(&upstreams).await;
        let client = Http2::connect(door.tunneling).await;
        let mut bystander = client.open("raw:1", b"echo\n").await.unwrap();
        // The client confirms only the first SETTINGS, and sends eight windows of 1 MiB while the endpoint does not accept.
        let (mut frames, mut write) = frames::connect(door.tunneling, &[]).await;
        frames.next_of(SETTINGS).await.unwrap();
        let mut uploads = frame(SETTINGS, ACK, 0, &[]);
        for id in (1..16).step_by(2) {
            uploads.extend(frame(HEADERS, END_HEADERS, id, &connect_fields("hole:1")));
            uploads.extend(frame(DATA, 0, id, &[0; 16 << 10]).repeat(64));
        }
        // Fails if the front door has ended the connection already.
        let send = async { drop(write.write_all(&uploads).await) };
        let (goaway, ()) = tokio::join!(frames.next_of(GOAWAY), send);
        assert!(goaway.is_none_or(|goaway| goaway.code() == CALM));
        door.has_refused("tunneling", "buffer_exceeded", 1.0).await;
        bystander.say(b"x");
        assert_eq!(bystander.hear(1).await, b"x");
    });
}

#[test]
fn idle_http2_connection_gives_its_place_to_a_client_of_another_address() {
    alone(async || {
        memory_limit(4 * 96 * 1024);
        let services = Services::start().await.unwrap();
        let upstream = Upstream::new("demo/raw", services.raw).authority("raw:1");
        let door = Door::start(&[upstream]).await;
        let client = Http2::connect(door.tunneling).await;
        let mut tunnel = client.open("raw:1", b"echo\n").await.unwrap();
        let mut idle = Vec::new();
        for _ in 0..3 {
            let (mut frames, write) = frames::connect(door.tunneling, &[]).await;
            frames.next_of(SETTINGS).await.unwrap();
            idle.push((frames, write));
        }
        let other = connect_from([127, 0, 0, 2], door.tunneling).await;
        let (mut frames, _write) = frames::begin(other, &[]).await;
        frames.next_of(SETTINGS).await.unwrap();
        let goaway = idle[0].0.next_of(GOAWAY).await.unwrap();
        assert_eq!(goaway.code(), 0);
        // The connection ends although the client does not answer.
        while idle[0].0.next().await.is_some() {}
        door.has_refused("tunneling", "too_many_connections", 1.0)
            .await;
        tunnel.say(b"x");
        assert_eq!(tunnel.hear(1).await, b"x");
    });
}
