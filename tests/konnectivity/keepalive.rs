//! Keepalive of the connections of a Culvert server to agents and to clients, as bytes on the wire.

use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use culvert_kit::client::{self, FrontEnd};
use culvert_kit::services::Services;
use culvert_tests::{Mode, Topology, Transport, eventually};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::time::Instant;

use crate::searching::Lone;
use crate::support::{Innocent, LIMIT};

/// Size of the head of an HTTP/2 frame, in bytes (RFC 9113, section 4.1).
const FRAME_HEAD: usize = 9;

/// Type of the frame PING, and the flag of an answer (RFC 9113, section 6.7).
const PING: u8 = 6;
const ACK: u8 = 1;

/// Size of a TLS 1.3 record with one HTTP/2 PING, in bytes: a record header of 5, a PING of 17, a content type of 1,
/// and an authentication tag of 16.
const PING_RECORD: usize = 39;

/// Length of a pause before a PING that only a keepalive shorter than the default of 30 s sends.
const PAUSE: Range<Duration> = Duration::from_secs(5)..Duration::from_secs(28);

/// Time and size of each piece that went through.
type Pieces = Arc<Mutex<Vec<(Instant, usize)>>>;

/// A relay that records the pieces of its only connection, by direction.
struct Wire {
    addr: SocketAddr,
    from_agent: Pieces,
    from_server: Pieces,
}

impl Wire {
    async fn start(server: SocketAddr) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (from_agent, from_server) = (Pieces::default(), Pieces::default());
        let (up, down) = (from_agent.clone(), from_server.clone());
        tokio::spawn(async move {
            let (agent, _) = listener.accept().await?;
            let server = TcpStream::connect(server).await?;
            let (agent, server) = (agent.into_split(), server.into_split());
            tokio::try_join!(
                record(agent.0, server.1, up),
                record(server.0, agent.1, down)
            )
        });
        Self {
            addr,
            from_agent,
            from_server,
        }
    }

    /// Waits until each end sends PINGs or their answers, and nothing else, after a pause.
    async fn carries_pings(&self) {
        for (end, pieces) in [("server", &self.from_server), ("agent", &self.from_agent)] {
            let what = format!("a PING or its answer from the {end}");
            eventually(&what, LIMIT, async || {
                let pieces = pieces.lock();
                let bytes = after_pause(&pieces);
                (bytes > 0 && bytes.is_multiple_of(PING_RECORD))
                    .then_some(())
                    .ok_or_else(|| format!("{pieces:?}"))
            })
            .await;
        }
    }
}

/// Returns the number of bytes after the last long pause, or 0 if this pause was longer than [`PAUSE`]. The pieces do not
/// have to be records: one read may return a part of a record, or several records.
fn after_pause(pieces: &[(Instant, usize)]) -> usize {
    let mut after: Option<usize> = None;
    let times = pieces.iter().map(|(at, _)| *at);
    for (before, (at, bytes)) in times.zip(pieces.iter().skip(1)) {
        let pause = *at - before;
        if pause >= PAUSE.start {
            after = PAUSE.contains(&pause).then_some(0);
        }
        after = after.map(|sum| sum + *bytes);
    }
    after.unwrap_or(0)
}

async fn record(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    pieces: Pieces,
) -> std::io::Result<()> {
    let mut bytes = vec![0; 1 << 16];
    loop {
        let read = from.read(&mut bytes).await?;
        pieces.lock().push((Instant::now(), read));
        if read == 0 {
            return to.shutdown().await;
        }
        to.write_all(&bytes[..read]).await?;
    }
}

/// Starts a server and an agent behind a [`Wire`], and waits for the PINGs.
async fn pings_with(server: &[&str], agent: &[&str]) {
    let topology = Topology::builder(Mode::HttpConnect, Transport::Uds)
        .servers(1)
        .server_args(server)
        .start()
        .await;
    let wire = Wire::start(topology.agent_address(0)).await;
    let mut lone = Lone::new();
    lone.pki = topology.pki().clone();
    let port = format!("--proxy-server-port={}", wire.addr.port());
    let flags: Vec<&str> = [port.as_str(), "--agent-id=behind-the-wire"]
        .into_iter()
        .chain(agent.iter().copied())
        .collect();
    lone.start(&flags, &[]);
    lone.shows("open_server_connections", 1.0).await;
    wire.carries_pings().await;
}

#[tokio::test]
async fn keepalive_time_of_either_end_sets_the_pings_of_an_idle_native_connection() {
    tokio::join!(
        pings_with(&["--keepalive-time=10s"], &[]),
        pings_with(&[], &["--keepalive-time=10s"]),
    );
}

/// A gRPC client with an open, idle call, and the number of PINGs from the server.
struct IdleClient {
    connection: Innocent,
    pings: Arc<AtomicUsize>,
    _topology: Topology,
}

impl IdleClient {
    /// Starts a server with these flags, an agent, and the client.
    async fn start(services: &Services, flags: &[&str]) -> Self {
        let topology = Topology::builder(Mode::Grpc, Transport::Uds)
            .servers(1)
            .server_args(flags)
            .agents(1)
            .start()
            .await;
        let FrontEnd::GrpcUds(socket) = topology.front_end().clone() else {
            panic!("the front end must be gRPC over a Unix socket");
        };
        let path = topology.dir().join("counted.socket");
        let listener = UnixListener::bind(&path).unwrap();
        let pings = Arc::<AtomicUsize>::default();
        tokio::spawn(count_pings(listener, socket, pings.clone()));
        let front = FrontEnd::GrpcUds(path);
        let stream = client::connect(&front, &services.raw.to_string(), LIMIT).await;
        Self {
            connection: Innocent::over(stream.unwrap()).await,
            pings,
            _topology: topology,
        }
    }
}

/// Forwards one connection to the server at `socket`, and counts the PINGs from the server.
async fn count_pings(
    listener: UnixListener,
    socket: PathBuf,
    pings: Arc<AtomicUsize>,
) -> std::io::Result<()> {
    let (client, _) = listener.accept().await?;
    let server = UnixStream::connect(socket).await?;
    let (mut from_client, to_client) = client.into_split();
    let (from_server, mut to_server) = server.into_split();
    tokio::select! {
        ended = forward_frames(from_server, to_client, &pings) => ended,
        copied = tokio::io::copy(&mut from_client, &mut to_server) => copied.map(drop),
    }
}

/// Forwards HTTP/2 frames until an error, and counts PINGs.
async fn forward_frames(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    pings: &AtomicUsize,
) -> std::io::Result<()> {
    loop {
        let mut head = [0_u8; FRAME_HEAD];
        from.read_exact(&mut head).await?;
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let mut payload = vec![0_u8; length as usize];
        from.read_exact(&mut payload).await?;
        if head[3] == PING && head[4] & ACK == 0 {
            pings.fetch_add(1, Ordering::Relaxed);
        }
        to.write_all(&head).await?;
        to.write_all(&payload).await?;
    }
}

#[tokio::test]
async fn frontend_keepalive_time_sets_the_pings_of_an_idle_client() {
    let services = Services::start().await.unwrap();
    let rare = ["--frontend-keepalive-time=1h", "--keepalive-time=1s"];
    let frequent = ["--frontend-keepalive-time=1s", "--keepalive-time=1h"];
    let mut without = IdleClient::start(&services, &rare).await;
    let mut with = IdleClient::start(&services, &frequent).await;
    eventually("three PINGs", LIMIT, async || {
        let count = with.pings.load(Ordering::Relaxed);
        (count >= 3).then_some(()).ok_or(count)
    })
    .await;
    // This client has been idle for longer.
    assert_eq!(without.pings.load(Ordering::Relaxed), 0);
    for client in [&mut with, &mut without] {
        client.connection.still_echoes("the idle time").await;
    }
}

#[test]
fn bytes_after_the_last_pause_count_in_pieces_of_any_size() {
    let start = Instant::now();
    let after = |pieces: &[(u64, usize)]| {
        let at = |(seconds, bytes): &(u64, usize)| (start + Duration::from_secs(*seconds), *bytes);
        after_pause(&pieces.iter().map(at).collect::<Vec<_>>())
    };
    assert_eq!(after(&[(0, 500), (1, 60)]), 0);
    assert_eq!(after(&[(0, 500), (10, 39)]), 39);
    assert_eq!(after(&[(0, 500), (6, 70), (16, 20), (16, 19)]), 39);
    assert_eq!(after(&[(0, 500), (30, 39)]), 0);
}
