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

/// Connections in flight at once: enough to overlap, few enough for the limit of open files.
const AT_ONCE: usize = 100;

/// Descriptors that a program may hold beyond those it started with: connections of the tests' own
/// scrapes that it has not closed yet.
const SCRAPES: usize = 3;

/// Where connections lead.
#[derive(Clone, Copy)]
struct Targets {
    raw: SocketAddr,
    /// Says nothing.
    quiet: SocketAddr,
    /// Closes at once, or resets, by turns.
    abrupt: SocketAddr,
    hole: SocketAddr,
}

/// The ways to end.
const WAYS: usize = 8;

/// Lives one connection to an awkward end. Any error is an end too.
async fn live(way: usize, front: &FrontEnd, targets: Targets) {
    let connect =
        async |target: SocketAddr| client::connect(front, &target.to_string(), LIMIT).await;
    let moment = Duration::from_micros(rand::rng().random_range(0..3000));
    match way {
        // Leaves before its request is complete.
        0 => break_off(front).await,
        // Leaves while its dial is pending.
        1 => drop(timeout(moment, connect(targets.hole)).await),
        // Leaves about when its dial is answered.
        2 => drop(timeout(moment, connect(targets.raw)).await),
        // Leaves as soon as it is open.
        3 => drop(connect(targets.raw).await),
        // Leaves in the middle of a download.
        4 => {
            if let Ok(mut stream) = connect(targets.raw).await {
                stream.write_all(b"download 10000000\n").await.ok();
                stream.read_exact(&mut vec![0; 10_000]).await.ok();
            }
        }
        // Leaves in the middle of an upload.
        5 => {
            if let Ok(mut stream) = connect(targets.raw).await {
                stream.write_all(b"upload 10000000\n").await.ok();
                stream.write_all(&vec![0; 100_000]).await.ok();
            }
        }
        // The endpoint ends first, in order or not.
        6 => {
            if let Ok(mut stream) = connect(targets.abrupt).await {
                stream.write_all(b"anybody there?").await.ok();
                stream.read_to_end(&mut Vec::new()).await.ok();
            }
        }
        // Leaves an endpoint that says nothing.
        _ => {
            if let Ok(mut stream) = connect(targets.quiet).await {
                stream.write_all(&vec![0; 1000]).await.ok();
            }
        }
    }
}

/// Breaks off in the middle of a request, and over TCP with a reset.
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

/// An endpoint that ends every connection at once: with a close, with a reset, after bytes.
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
        // A CONNECT client's close is half of one to an endpoint, which has to end the other half.
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
    while let Some(lived) = timely("the last lives", lives.join_next()).await {
        lived.unwrap();
    }
    innocent.still_echoes("all of that").await;
    // The innocent one is all there is.
    server_shows(&topology, "pending_backend_dials", &[], 0.0).await;
    server_shows(&topology, "established_connections", &[], 1.0).await;
    agent_shows(&topology, "open_endpoint_connections", &[], 1.0).await;
    eventually("all descriptors are back", LIMIT, async || {
        let now = (topology.server(0).fd_count(), topology.agent(0).fd_count());
        (now.0 <= before.0 + SCRAPES && now.1 <= before.1 + SCRAPES)
            .then_some(())
            .ok_or_else(|| format!("{now:?}, and {before:?} before"))
    })
    .await;
    drop(innocent);
    server_is_idle(&topology).await;
    agent_shows(&topology, "open_endpoint_connections", &[], 0.0).await;
    let full = [("service_method", "Connect")];
    server_shows(&topology, "full_receive_channels", &full, 0.0).await;
    // The silent service never looks at its sockets, so it does not see them end.
    if mode == Mode::HttpConnect {
        let closed = async || services.open_connections() == 0;
        eventually("the endpoints' connections ended", LIMIT, closed).await;
    }
    assert_unharmed(&mut topology);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connect_over_a_unix_socket() {
    leaves_nothing(Mode::HttpConnect, Transport::Uds, 4000).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connect_over_tls() {
    leaves_nothing(Mode::HttpConnect, Transport::Tcp, 1500).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grpc_over_a_unix_socket() {
    leaves_nothing(Mode::Grpc, Transport::Uds, 3500).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grpc_over_tls() {
    leaves_nothing(Mode::Grpc, Transport::Tcp, 1000).await;
}
