//! Thousands of connections that end in awkward ways leave nothing behind.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use culvert_kit::client::{self, FrontEnd};
use culvert_kit::services::Services;
use culvert_tests::{Mode, Topology, Transport, black_hole, eventually};
use rand::Rng as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::endpoints::reset;
use crate::support::*;

/// Number of concurrent connections: enough to overlap, few enough for the limit on open files.
const AT_ONCE: usize = 100;

/// Allowed growth of a program's number of file descriptors, for connections of the test's own metric scrapes
/// that the program has not closed yet.
const SCRAPES: usize = 3;

/// Dialed addresses.
#[derive(Clone, Copy)]
struct Targets {
    raw: SocketAddr,
    /// A silent endpoint.
    quiet: SocketAddr,
    /// An endpoint that closes or resets connections at once, in turn.
    abrupt: SocketAddr,
    hole: SocketAddr,
}

/// Number of ways to end a connection.
const WAYS: usize = 8;

/// Runs one connection to an awkward end. An error is also an end, once the connection is open.
///
/// # Panics
/// If a connection to an endpoint that accepts connections does not open.
async fn live(way: usize, front: &FrontEnd, targets: Targets) {
    let connect =
        async |target: SocketAddr| client::connect(front, &target.to_string(), LIMIT).await;
    let open = async |target: SocketAddr| connect(target).await.unwrap();
    let moment = Duration::from_micros(rand::rng().random_range(0..3000));
    match way {
        // The client leaves before its request is complete.
        0 => break_off(front).await,
        // The client leaves while its dial is pending.
        1 => drop(timeout(moment, connect(targets.hole)).await),
        // The client leaves about when its dial is answered.
        2 => drop(timeout(moment, connect(targets.raw)).await),
        // The client leaves as soon as the connection is open.
        3 => drop(open(targets.raw).await),
        // The client leaves during a download.
        4 => {
            let mut stream = open(targets.raw).await;
            stream.write_all(b"download 10000000\n").await.ok();
            stream.read_exact(&mut vec![0; 10_000]).await.ok();
        }
        // The client leaves during an upload.
        5 => {
            let mut stream = open(targets.raw).await;
            stream.write_all(b"upload 10000000\n").await.ok();
            stream.write_all(&vec![0; 100_000]).await.ok();
        }
        // The endpoint closes or resets the connection first, perhaps before the agent's dial has ended.
        6 => {
            if let Ok(mut stream) = connect(targets.abrupt).await {
                stream.write_all(b"anybody there?").await.ok();
                stream.read_to_end(&mut Vec::new()).await.ok();
            }
        }
        // The client leaves a silent endpoint.
        _ => {
            let mut stream = open(targets.quiet).await;
            stream.write_all(&vec![0; 1000]).await.ok();
        }
    }
}

/// Leaves in the middle of a request; over TCP, with a reset.
async fn break_off(front: &FrontEnd) {
    let piece = b"CONNECT 127.0.0.1:1 HT";
    match front {
        FrontEnd::GrpcUds(path) | FrontEnd::ConnectUds(path) => {
            if let Ok(mut stream) = UnixStream::connect(path).await {
                stream.write_all(piece).await.ok();
            }
        }
        FrontEnd::GrpcTcp { addr, .. } | FrontEnd::ConnectTcp { addr, .. } => {
            if let Ok(mut stream) = TcpStream::connect(addr).await {
                stream.write_all(piece).await.ok();
                reset(stream);
            }
        }
    }
}

/// Starts an endpoint that ends every connection at once, in turn with a close or a reset, with or without
/// bytes before the end.
async fn abrupt_endpoint() -> SocketAddr {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        for turn in 0.. {
            let Ok((mut stream, _)) = listener.accept().await else {
                return;
            };
            match turn % 4 {
                0 => drop(stream),
                1 => reset(stream),
                2 => {
                    stream.write_all(&vec![7; 1000]).await.ok();
                }
                _ => {
                    stream.write_all(&vec![7; 1000]).await.ok();
                    reset(stream);
                }
            }
        }
    });
    addr
}

async fn leaves_nothing(mode: Mode, transport: Transport, count: usize) {
    let services = Services::start().await.unwrap();
    let hole = black_hole().await;
    let mut topology = Topology::simple(mode, transport).await;
    let targets = Targets {
        raw: services.raw,
        // In CONNECT mode, a client's close reaches the endpoint as a half close. The endpoint must close the
        // other half.
        quiet: match mode {
            Mode::Grpc => services.silent,
            Mode::HttpConnect => services.half,
        },
        abrupt: abrupt_endpoint().await,
        hole: hole.addr(),
    };
    let mut innocent = Innocent::open(&topology, services.raw).await;
    let before = (topology.server(0).fd_count(), topology.agent(0).fd_count());
    let turns = Arc::new(Semaphore::new(AT_ONCE));
    let mut lives = JoinSet::new();
    for index in 0..count {
        let turn = turns.clone().acquire_owned().await.unwrap();
        let front = topology.front_end().clone();
        lives.spawn(async move {
            let _turn = turn;
            let way = index % WAYS;
            timely(&format!("way {way}"), live(way, &front, targets)).await;
        });
    }
    while let Some(lived) = timely("the remaining connections", lives.join_next()).await {
        lived.unwrap();
    }
    innocent.still_echoes("all awkward ends").await;
    // Only the innocent connection is left.
    server_shows(&topology, "pending_backend_dials", &[], 0.0).await;
    server_shows(&topology, "established_connections", &[], 1.0).await;
    agent_shows(&topology, "open_endpoint_connections", &[], 1.0).await;
    eventually("all file descriptors are closed again", LIMIT, async || {
        let now = (topology.server(0).fd_count(), topology.agent(0).fd_count());
        (now.0 <= before.0 + SCRAPES && now.1 <= before.1 + SCRAPES)
            .then_some(())
            .ok_or_else(|| format!("{now:?} now, {before:?} at the start"))
    })
    .await;
    drop(innocent);
    server_is_idle(&topology).await;
    agent_shows(&topology, "open_endpoint_connections", &[], 0.0).await;
    let full = [("service_method", "Connect")];
    server_shows(&topology, "full_receive_channels", &full, 0.0).await;
    // The silent service never reads its sockets, so the service does not notice their ends.
    if mode == Mode::HttpConnect {
        let closed = async || services.open_connections() == 0;
        eventually("the endpoints' connections ended", LIMIT, closed).await;
    }
    assert_unharmed(&mut topology).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connect_over_a_unix_socket_leaks_nothing() {
    leaves_nothing(Mode::HttpConnect, Transport::Uds, 4000).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connect_over_tls_leaks_nothing() {
    leaves_nothing(Mode::HttpConnect, Transport::Tcp, 1500).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grpc_over_a_unix_socket_leaks_nothing() {
    leaves_nothing(Mode::Grpc, Transport::Uds, 3500).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grpc_over_tls_leaks_nothing() {
    leaves_nothing(Mode::Grpc, Transport::Tcp, 1000).await;
}
