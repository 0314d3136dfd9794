//! Keepalive of a connection between a Culvert server and a Culvert agent, as bytes on the wire.

use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use culvert_tests::{Mode, Topology, Transport, eventually};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;

use crate::searching::Lone;
use crate::support::LIMIT;

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
