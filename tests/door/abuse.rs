//! Malicious clients of the CONNECT port, written in raw HTTP/2 frames. The front door bounds the memory of
//! each client and closes its connection. Other clients are not affected.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use culvert_kit::services::Services;
use culvert_tests::{black_hole, eventually};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedWriteHalf;
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::frames::{
    self, CONTINUATION, DATA, END_HEADERS, END_STREAM, Frames, GOAWAY, HEADERS,
    INITIAL_WINDOW_SIZE, PING, PRIORITY, RST_STREAM, SETTINGS, Settings, WINDOW_UPDATE,
    connect_fields, field, frame,
};
use crate::support::{Door, Http2, LIMIT, Tunnel, Upstream, stands_still, timely};

const RAW: &str = "raw.demo.svc.cluster.local:443";
const SILENT: &str = "silent.demo.svc.cluster.local:443";

/// Limit of the program's memory growth during a flood, in bytes. A flood sends far more.
const FLOOD_BYTES: u64 = 16 << 20;

/// Limit of the program's memory growth for one client with a thousand unread tunnels, in bytes: 24 MiB of
/// buffers, plus a thousand tasks and sockets in a build without optimizations.
const UNREAD_BYTES: u64 = 48 << 20;

/// Number of connections that send nothing, and limit of the program's memory growth for each, in bytes. The limit
/// includes the memory for well-behaved clients, and suits a build without optimizations.
const SILENT_CONNECTIONS: u64 = 600;
const SILENT_BYTES: u64 = 8 << 10;

/// HTTP/2 error code PROTOCOL_ERROR (RFC 9113, section 7).
const PROTOCOL_ERROR: u32 = 1;
/// HTTP/2 error code FRAME_SIZE_ERROR (RFC 9113, section 7).
const FRAME_SIZE_ERROR: u32 = 6;
/// HTTP/2 error code ENHANCE_YOUR_CALM (RFC 9113, section 7).
const CALM: u32 = 11;

/// Time limit for the door to close the connection of a peer that answers nothing. The door waits 20 s for the
/// answer to a ping.
const SILENCE: Duration = Duration::from_secs(60);

/// A front door, and the tunnel of a well-behaved client.
struct Stage {
    door: Door,
    _services: Services,
    _client: Http2,
    bystander: Tunnel,
    before: u64,
}

impl Stage {
    async fn new(flags: &[&str]) -> Self {
        let services = Services::start().await.unwrap();
        let routes = [
            Upstream::new("demo/raw", services.raw).authority(RAW),
            Upstream::new("demo/silent", services.silent).authority(SILENT),
        ];
        let door = Door::start_with(&routes, flags).await;
        let client = Http2::connect(door.tunneling).await;
        let mut bystander = client.open(RAW, b"echo\n").await.unwrap();
        bystander.say(b"x");
        assert_eq!(bystander.hear(1).await, b"x");
        let before = door.program.rss();
        Self {
            door,
            _services: services,
            _client: client,
            bystander,
            before,
        }
    }

    fn at(&self) -> SocketAddr {
        self.door.tunneling
    }

    /// Asserts that well-behaved clients are served, and that the program's memory has grown by less than
    /// `bound` bytes.
    async fn is_well(&mut self, bound: u64) {
        self.bystander.say(b"y");
        assert_eq!(self.bystander.hear(1).await, b"y");
        let other = Http2::connect(self.door.tunneling).await;
        let mut tunnel = other.open(RAW, b"download 100000\n").await.unwrap();
        assert_eq!(tunnel.hear(100_001).await.len(), 100_000);
        let more = self.door.program.rss().saturating_sub(self.before);
        assert!(more < bound, "memory has grown by {} KiB", more / 1024);
    }
}

/// Sends `bytes` repeatedly until the door closes the connection or `limit` has passed. Returns true if the
/// door closed the connection.
async fn flood(write: &mut OwnedWriteHalf, bytes: &[u8], limit: Duration) -> bool {
    let all = async { while write.write_all(bytes).await.is_ok() {} };
    timeout(limit, all).await.is_ok()
}

/// Floods a new connection while reading all input, and asserts that the door closes the connection. Returns
/// the error code of the GOAWAY frame, or `None` if a TCP reset discarded the frame.
pub(crate) async fn answered_flood(at: SocketAddr, begin: &[u8], bytes: &[u8]) -> Option<u32> {
    let (mut frames, mut write) = frames::connect(at, &[]).await;
    // Fails if the door has closed the connection already.
    let _ = write.write_all(begin).await;
    let (closed, goaway) = tokio::join!(flood(&mut write, bytes, SILENCE), frames.next_of(GOAWAY));
    assert!(closed, "the door did not close the connection");
    goaway.map(|frame| frame.code())
}

fn is_closed_for(code: u32, seen: Option<u32>, what: &str) {
    assert!(seen.is_none_or(|seen| seen == code), "{what}: {seen:?}");
}

#[tokio::test]
async fn silent_connections_cost_little_memory() {
    let mut stage = Stage::new(&[]).await;
    let mut silent = Vec::new();
    for _ in 0..SILENT_CONNECTIONS {
        silent.push(TcpStream::connect(stage.at()).await.unwrap());
    }
    let name = "envoy_http_downstream_cx_active";
    let labels = [("envoy_http_conn_manager_prefix", "ingress_http")];
    eventually("all connections are accepted", LIMIT, async || {
        let open = stage.door.value(name, &labels).await;
        (open >= SILENT_CONNECTIONS as f64)
            .then_some(())
            .ok_or(open)
    })
    .await;
    stage.is_well(SILENT_CONNECTIONS * SILENT_BYTES).await;
}

#[tokio::test]
async fn endless_header_block_closes_the_connection() {
    let mut stage = Stage::new(&[]).await;
    let begin = frame(HEADERS, 0, 1, &connect_fields(RAW));
    // Each field has 100 bytes, so that a frame contains whole fields only.
    let fields = field("x", &"y".repeat(96)).repeat(160);
    for (what, block) in [
        ("empty", Vec::new()),
        ("small", field("x", "y")),
        ("large", fields),
    ] {
        let more = frame(CONTINUATION, 0, 1, &block);
        let seen = answered_flood(stage.at(), &begin, &more).await;
        is_closed_for(CALM, seen, what);
        stage.is_well(FLOOD_BYTES).await;
    }
    // A single field with a value of 2 GiB, sent in frames of 16 KiB.
    let endless = [&[0, 1, b'x', 0x7f], &[0xff; 4][..], &[7]].concat();
    let begin = frame(HEADERS, 0, 1, &[connect_fields(RAW), endless].concat());
    let more = frame(CONTINUATION, 0, 1, &[b'y'; 16_384]);
    let seen = answered_flood(stage.at(), &begin, &more).await;
    assert!(
        matches!(seen, None | Some(CALM | PROTOCOL_ERROR)),
        "{seen:?}"
    );
    stage.is_well(FLOOD_BYTES).await;
}

#[tokio::test]
async fn compressed_header_list_of_48_mb_closes_the_connection() {
    let mut stage = Stage::new(&[]).await;
    // Adds a field of 4,000 bytes to the dynamic table, then refers to the field 12,000 times with one byte
    // each.
    let value = [&[0x40, 1, b'x', 0x7f], &[0x9d, 30][..], &[b'y'; 3996]].concat();
    let block = [connect_fields(RAW), value, vec![0x80 | 62; 12_000]].concat();
    let bomb = frame(HEADERS, END_HEADERS, 1, &block);
    let (mut frames, mut write) = frames::connect(stage.at(), &[]).await;
    write.write_all(&bomb).await.unwrap();
    let goaway = frames.next_of(GOAWAY).await;
    is_closed_for(CALM, goaway.map(|frame| frame.code()), "48 MB");
    stage.is_well(FLOOD_BYTES).await;
}

/// Encodes the fields of a CONNECT request that nobody serves, and `count` equal fields with an empty value, of one byte
/// each. The first request of a connection defines the field.
fn many_fields(is_first: bool, count: usize) -> Vec<u8> {
    let definition: &[u8] = if is_first { &[0x40, 1, b'x', 0] } else { &[] };
    let request = connect_fields("other.demo.svc.cluster.local:443");
    [&request[..], definition, &vec![0x80 | 62; count]].concat()
}

#[tokio::test]
async fn header_lists_of_more_than_8_kib_are_refused() {
    let mut stage = Stage::new(&[]).await;
    let (mut frames, mut write) = frames::connect(stage.at(), &[]).await;
    // A field counts 33 bytes.
    let large = frame(HEADERS, END_HEADERS, 1, &many_fields(true, 300));
    let next = frame(HEADERS, END_HEADERS, 3, &many_fields(false, 200));
    write.write_all(&[large, next].concat()).await.unwrap();
    let reset = frames.next_of(RST_STREAM).await.unwrap();
    assert_eq!((reset.stream, reset.code()), (1, PROTOCOL_ERROR));
    let served = frame(HEADERS, END_HEADERS, 5, &connect_fields(RAW));
    write.write_all(&served).await.unwrap();
    let mut answer = frames.next_of(HEADERS).await.unwrap();
    while answer.stream != 5 {
        answer = frames.next_of(HEADERS).await.unwrap();
    }
    assert_eq!(answer.status(), Some(200));
    let huge = frame(HEADERS, END_HEADERS, 7, &many_fields(false, 1200));
    write.write_all(&huge).await.unwrap();
    let goaway = frames.next_of(GOAWAY).await;
    is_closed_for(CALM, goaway.map(|frame| frame.code()), "39 KiB");
    stage.is_well(FLOOD_BYTES).await;
}

/// Connections that send a thousand requests each at once, with header fields of 18 KiB in memory: 288 MiB together.
const CROWD: usize = 16;
/// Limit of the program's memory growth meanwhile, in bytes.
const CROWD_BYTES: u64 = 160 << 20;

#[tokio::test]
async fn requests_of_a_burst_are_not_in_memory_at_once() {
    let mut stage = Stage::new(&[]).await;
    let before = stage.door.program.peak_rss();
    let mut burst = Vec::new();
    for id in (1..2000u32).step_by(2) {
        let fields = many_fields(id == 1, 230);
        burst.extend(frame(HEADERS, END_HEADERS | END_STREAM, id, &fields));
    }
    let mut crowd = JoinSet::new();
    for _ in 0..CROWD {
        let (burst, at) = (burst.clone(), stage.at());
        crowd.spawn(async move {
            let (mut frames, mut write) = frames::connect(at, &[]).await;
            let answers = async {
                for _ in 0..1000 {
                    let answer = frames.next_of(HEADERS).await.unwrap();
                    assert_eq!(answer.status(), Some(404));
                }
            };
            let (sent, ()) = tokio::join!(write.write_all(&burst), answers);
            sent.unwrap();
        });
    }
    while let Some(served) = crowd.join_next().await {
        served.unwrap();
    }
    let more = stage.door.program.peak_rss() - before;
    assert!(
        more < CROWD_BYTES,
        "memory has grown by {} KiB",
        more / 1024
    );
    stage.is_well(CROWD_BYTES).await;
}

/// Opens up to 3,000 streams and resets each stream at once. Returns true if the door closed the connection,
/// and the error code of the GOAWAY frame.
pub(crate) async fn reset_many(at: SocketAddr, authority: &str) -> (bool, Option<u32>) {
    let (mut frames, mut write) = frames::connect(at, &[]).await;
    let send = async {
        let fields = connect_fields(authority);
        for id in (1..6000).step_by(2) {
            let open = frame(HEADERS, END_HEADERS, id, &fields);
            let reset = frame(RST_STREAM, 0, id, &8u32.to_be_bytes());
            if write.write_all(&[open, reset].concat()).await.is_err() {
                return;
            }
        }
    };
    let (goaway, ()) = tokio::join!(timeout(LIMIT, frames.next_of(GOAWAY)), send);
    (
        goaway.is_ok(),
        goaway.ok().flatten().map(|frame| frame.code()),
    )
}

#[tokio::test]
async fn streams_reset_right_after_opening_close_the_connection() {
    let mut stage = Stage::new(&[]).await;
    for (floods, authority) in [(1.0, SILENT), (2.0, "other.demo.svc.cluster.local:443")] {
        let (closed, code) = reset_many(stage.at(), authority).await;
        assert!(closed, "{authority}");
        is_closed_for(CALM, code, authority);
        stage.is_well(FLOOD_BYTES).await;
        assert_eq!(stage.door.refused("tunneling", "flood").await, floods);
    }
    let labels = [("envoy_cluster_name", "demo/silent")];
    let opened = stage.door.value("envoy_cluster_upstream_cx_total", &labels);
    let opened = opened.await;
    assert!(opened <= 500.0, "{opened} connections to the endpoint");
}

#[tokio::test]
async fn resets_of_half_the_streams_are_tolerated() {
    let mut stage = Stage::new(&["--max-connections=5000"]).await;
    let (mut frames, mut write) = frames::connect(stage.at(), &[]).await;
    let mut id = 1;
    for _ in 0..600 {
        // The first stream gets an answer; the client resets the second stream at once.
        let unknown = connect_fields("other.demo.svc.cluster.local:443");
        let open = frame(HEADERS, END_HEADERS, id, &unknown);
        write.write_all(&open).await.unwrap();
        let answer = frames.next_of(HEADERS).await.unwrap();
        assert_eq!(answer.status(), Some(404));
        let given_up = frame(HEADERS, END_HEADERS, id + 2, &unknown);
        let reset = frame(RST_STREAM, 0, id + 2, &8u32.to_be_bytes());
        write.write_all(&[given_up, reset].concat()).await.unwrap();
        id += 4;
    }
    stage.is_well(FLOOD_BYTES).await;
    assert_eq!(stage.door.refused("tunneling", "flood").await, 0.0);
}

#[tokio::test]
async fn ping_and_settings_floods_with_unread_answers_are_closed() {
    let mut stage = Stage::new(&[]).await;
    let at = stage.at();
    let pings = frame(PING, 0, 0, &[7; 8]).repeat(1000);
    let settings = frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 255, 255]).repeat(1000);
    let (_unread, mut one) = frames::connect(at, &[]).await;
    let (_unread2, mut two) = frames::connect(at, &[]).await;
    let both = async {
        tokio::join!(
            flood(&mut one, &pings, SILENCE),
            flood(&mut two, &settings, SILENCE)
        )
    };
    let meanwhile = async {
        for _ in 0..10 {
            tokio::time::sleep(Duration::from_millis(200)).await;
            stage.is_well(FLOOD_BYTES).await;
        }
    };
    let (closed, ()) = tokio::join!(both, meanwhile);
    assert_eq!(closed, (true, true), "PING and SETTINGS");
    stage.is_well(FLOOD_BYTES).await;
}

#[tokio::test]
async fn small_frames_before_and_after_the_answer_disturb_nobody() {
    let services = Services::start().await.unwrap();
    let hole = black_hole().await;
    let routes = [
        Upstream::new("demo/raw", services.raw).authority(RAW),
        Upstream::new("demo/silent", hole.addr()).authority(SILENT),
    ];
    let door = Door::start(&routes).await;
    let small = frame(DATA, 0, 1, b"x").repeat(20_000);

    // The first stream has no answer: its endpoint does not accept.
    let open = frame(HEADERS, END_HEADERS, 1, &connect_fields(SILENT));
    let (mut frames, mut write) = frames::connect(door.tunneling, &[]).await;
    write.write_all(&[open, small].concat()).await.unwrap();

    let open = frame(HEADERS, END_HEADERS, 3, &connect_fields(RAW));
    let echo = frame(DATA, 0, 3, b"echo\n");
    let small = frame(DATA, 0, 3, b"x").repeat(20_000);
    write.write_all(&[open, echo].concat()).await.unwrap();
    let answer = frames.next_of(HEADERS).await.unwrap();
    assert_eq!(answer.status(), Some(200));
    write.write_all(&small).await.unwrap();
    let mut echoed = 0;
    while echoed < 20_000 {
        let data = frames.next_of(DATA).await.expect("an open connection");
        echoed += data.payload.len();
    }
}

#[tokio::test]
async fn frame_of_more_than_64_kib_closes_the_connection_before_its_payload_arrives() {
    let mut stage = Stage::new(&[]).await;
    let (mut frames, mut write) = frames::connect(stage.at(), &[]).await;
    let open = frame(HEADERS, END_HEADERS, 1, &connect_fields(RAW));
    let whole = frame(DATA, 0, 1, &[b'x'; 65_000]);
    write.write_all(&open).await.unwrap();
    let answer = frames.next_of(HEADERS).await.unwrap();
    assert_eq!(answer.status(), Some(200));
    write.write_all(&whole).await.unwrap();
    let large = frame(DATA, 0, 1, &[b'x'; 65_537]);
    write.write_all(&large[..9]).await.unwrap();
    let goaway = frames.next_of(GOAWAY).await.unwrap();
    assert_eq!(goaway.code(), FRAME_SIZE_ERROR);
    stage.is_well(FLOOD_BYTES).await;
}

/// HEADERS frames of 100,000 streams, each of which depends on itself (RFC 7540, section 5.3.1). Each is an error that
/// resets the stream.
fn self_dependent_streams() -> Vec<u8> {
    let mut frames = Vec::new();
    for id in (1..200_000u32).step_by(2) {
        let dependency = [&id.to_be_bytes()[..], &[15]].concat();
        frames.extend(frame(HEADERS, END_HEADERS | PRIORITY, id, &dependency));
    }
    frames
}

#[tokio::test]
async fn flood_of_stream_errors_closes_the_connection() {
    let mut stage = Stage::new(&[]).await;
    let seen = answered_flood(stage.at(), &[], &self_dependent_streams()).await;
    is_closed_for(CALM, seen, "stream errors");
    assert_eq!(stage.door.refused("tunneling", "flood").await, 1.0);
    stage.is_well(FLOOD_BYTES).await;
}

#[tokio::test]
async fn unread_flood_of_stream_errors_occupies_little_memory_and_is_closed() {
    let mut stage = Stage::new(&[]).await;
    let errors = self_dependent_streams();
    let (_unread, mut write) = frames::connect_unread(stage.at()).await;
    let meanwhile = async {
        for _ in 0..10 {
            tokio::time::sleep(Duration::from_millis(200)).await;
            stage.is_well(FLOOD_BYTES).await;
        }
    };
    let (closed, ()) = tokio::join!(flood(&mut write, &errors, SILENCE), meanwhile);
    assert!(closed, "the door did not close the connection");
    stage.is_well(FLOOD_BYTES).await;
}

#[tokio::test]
async fn flood_of_empty_data_frames_is_closed() {
    let mut stage = Stage::new(&[]).await;
    let begin = frame(HEADERS, END_HEADERS, 1, &connect_fields(RAW));
    let empty = frame(DATA, 0, 1, &[]).repeat(1000);
    let seen = answered_flood(stage.at(), &begin, &empty).await;
    is_closed_for(CALM, seen, "empty DATA");
    stage.is_well(FLOOD_BYTES).await;
}

#[tokio::test]
async fn bytes_after_a_refused_connect_are_discarded() {
    let stage = Stage::new(&[]).await;
    let smuggled = format!("CONNECT {RAW} HTTP/1.1\r\n\r\ndownload 10\n");
    for (refused, status) in [
        ("CONNECT other.demo.svc.cluster.local:443", "404 Not Found"),
        ("CONNECT raw.demo.svc.cluster.local", "400 Bad Request"),
        (
            "GET http://raw.demo.svc.cluster.local:443/",
            "404 Not Found",
        ),
    ] {
        let mut stream = TcpStream::connect(stage.at()).await.unwrap();
        let both = format!("{refused} HTTP/1.1\r\ncontent-length: 0\r\n\r\n{smuggled}");
        stream.write_all(both.as_bytes()).await.unwrap();
        let mut heard = String::new();
        timely("the end", stream.read_to_string(&mut heard))
            .await
            .unwrap();
        assert!(
            heard.starts_with(&format!("HTTP/1.1 {status}\r\n")),
            "{heard}"
        );
        assert_eq!(heard.matches("HTTP/1.1 ").count(), 1, "{heard}");
    }
    // Only the bystander has a connection to the endpoint.
    let labels = [("envoy_cluster_name", "demo/raw")];
    let opened = stage.door.value("envoy_cluster_upstream_cx_total", &labels);
    assert_eq!(opened.await, 1.0);
}

/// Small stream window, in bytes: an endpoint fills the window at once.
const USED_UP: u32 = 100_000;

/// Increment of each tunnel's window, in bytes. A client reads a thousand increments quickly.
const MORE: u32 = 1000;

/// Sends a ping every 4 s, because the door closes the connection of a client that sends nothing for 20 s.
fn stay_alive(write: &Arc<Mutex<OwnedWriteHalf>>) -> JoinSet<()> {
    let write = write.clone();
    let mut task = JoinSet::new();
    task.spawn(async move {
        let ping = frame(PING, 0, 0, &[0; 8]);
        while write.lock().await.write_all(&ping).await.is_ok() {
            tokio::time::sleep(Duration::from_secs(4)).await;
        }
    });
    task
}

/// Opens a thousand tunnels and requests 300,000 bytes through each tunnel. The connection window has the
/// largest possible size.
async fn a_thousand(at: SocketAddr, settings: Settings<'_>) -> (Frames, OwnedWriteHalf) {
    let (mut frames, mut write) = frames::connect(at, settings).await;
    let all = frame(WINDOW_UPDATE, 0, 0, &(i32::MAX - 65_535).to_be_bytes());
    write.write_all(&all).await.unwrap();
    for id in (1..2000).step_by(2) {
        let open = frame(HEADERS, END_HEADERS, id, &connect_fields(RAW));
        write.write_all(&open).await.unwrap();
        let answer = frames.next_of(HEADERS).await.unwrap();
        assert_eq!(answer.status(), Some(200));
    }
    // The total of 300 MB is far above the proxy's limit, but far below the kernel's limit for TCP. A kernel
    // without memory for TCP drops packets and retries after half a minute.
    for id in (1..2000).step_by(2) {
        let ask = frame(DATA, 0, id, b"download 300000\n");
        write.write_all(&ask).await.unwrap();
    }
    (frames, write)
}

#[tokio::test]
async fn a_thousand_unread_tunnels_stay_within_the_memory_limit() {
    // With the large window, the client reads nothing. With the small window, the client reads all of the
    // window and sends no WINDOW_UPDATE.
    for window in [1 << 30, USED_UP] {
        let mut stage = Stage::new(&["--max-connections=3000"]).await;
        let settings = [(INITIAL_WINDOW_SIZE, window)];
        let (mut frames, write) = a_thousand(stage.at(), &settings).await;
        let write = Arc::new(Mutex::new(write));
        let alive = stay_alive(&write);
        let mut left = if window == USED_UP { 1000 * 100_000 } else { 0 };
        while left > 0 {
            let data = frames.next_of(DATA).await.expect("an open connection");
            left -= data.payload.len();
        }
        stands_still(&stage.door, SILENCE).await;
        stage.is_well(UNREAD_BYTES).await;
        // Every tunnel continues after a WINDOW_UPDATE.
        let mut windows = Vec::new();
        for id in (1..2000).step_by(2) {
            windows.extend(frame(WINDOW_UPDATE, 0, id, &MORE.to_be_bytes()));
        }
        let mut moved = std::collections::HashSet::new();
        let go_on = async {
            write.lock().await.write_all(&windows).await.unwrap();
            while moved.len() < 1000 {
                let data = frames.next_of(DATA).await.expect("an open connection");
                moved.insert(data.stream);
            }
        };
        timely("data from every tunnel", go_on).await;
        drop((frames, write, alive));
        let labels = [("envoy_cluster_name", "demo/raw")];
        eventually(
            "only the bystander's connection is open",
            SILENCE,
            async || {
                let open = stage
                    .door
                    .value("envoy_cluster_upstream_cx_active", &labels);
                let open = open.await;
                (open == 1.0).then_some(()).ok_or(open)
            },
        )
        .await;
        stage.is_well(UNREAD_BYTES).await;
    }
}
