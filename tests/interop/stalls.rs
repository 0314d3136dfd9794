//! Stalled connections beside a working connection, with one of our programs and one stock program.
//!
//! The memory of our program is bounded. If our program has to wait for a stalled reader, our program closes
//! only the stalled connections. If the stock program waits, the stream that all connections share stops. Our
//! program then gives up that stream, and other connections continue on a new stream.

use std::time::Duration;

use culvert_kit::check;
use culvert_kit::client::BoxedStream;
use culvert_kit::pattern;
use culvert_kit::services::Services;
use culvert_tests::interop::Interop;
use culvert_tests::{Executable, Mode, Program, Topology, Transport, eventually};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::case::LIMIT;

const STALLED: usize = 8;

/// Number of bytes on each stalled connection. Far more than all buffers on the path can store.
const BYTES: u64 = 128 * 1024 * 1024;

/// Limit for the memory growth of our program, in bytes: the shared excess of 64 MiB in the server, each
/// connection's own buffers, and as much again for the allocator, which rounds up and frees late.
const GROWTH: u64 = 256 * 1024 * 1024;

/// Limit for the time that a stock program may stop the stream shared with our program. Our program gives up
/// a peer that reads nothing for a minute.
const STOPPED: Duration = Duration::from_secs(120);

/// The connection ends that do not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Deaf {
    Clients,
    Endpoints,
}

/// Our program in a tunnel with one stock program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ours {
    Server,
    Agent,
}

impl Ours {
    async fn start(self, mode: Mode) -> Option<Topology> {
        let interop = Interop::get()?;
        let quick = ["--stall-timeout=2s"];
        let builder = Topology::builder(mode, Transport::Uds);
        let builder = match self {
            Self::Server => builder
                .server(Executable::Ours, &quick)
                .agent(Executable::At(interop.proxy_agent.clone()), &[]),
            Self::Agent => builder
                .server(Executable::At(interop.proxy_server.clone()), &[])
                .agent(Executable::Ours, &quick),
        };
        Some(builder.start().await)
    }

    fn program(self, topology: &mut Topology) -> &mut Program {
        match self {
            Self::Server => topology.server(0),
            Self::Agent => topology.agent(0),
        }
    }

    /// Returns the number of connections closed by our program for these reasons.
    async fn closed(self, topology: &Topology, reasons: &[&str]) -> f64 {
        let metrics = match self {
            Self::Server => topology.server_metrics(0).await,
            Self::Agent => topology.agent_metrics(0).await,
        };
        let closed = |reason: &&str| {
            let reason = [("reason", *reason)];
            metrics.value("culvert_connections_closed_total", &reason)
        };
        reasons.iter().filter_map(closed).sum()
    }
}

/// Makes a connection stall. Returns a stalled client, or starts a task that sends to a stalled endpoint.
async fn stall(
    mut stream: BoxedStream,
    deaf: Deaf,
    tasks: &mut JoinSet<()>,
) -> Option<BoxedStream> {
    match deaf {
        Deaf::Clients => {
            let command = format!("download {BYTES}\n");
            stream.write_all(command.as_bytes()).await.expect("a write");
            stream.flush().await.expect("a flush");
            Some(stream)
        }
        Deaf::Endpoints => {
            tasks.spawn(async move {
                for piece in pattern::pieces(BYTES) {
                    if stream.write_all(&piece).await.is_err() {
                        return;
                    }
                }
                unreachable!("everything was sent to an endpoint that reads nothing");
            });
            None
        }
    }
}

async fn echo(stream: &mut BoxedStream) {
    let mut back = [0; 5];
    stream.write_all(b"hello").await.expect("a write");
    stream.flush().await.expect("a flush");
    stream.read_exact(&mut back).await.expect("an echo");
    assert_eq!(&back, b"hello");
}

async fn stalled_beside_one(ours: Ours, deaf: Deaf, mode: Mode) {
    let Some(mut topology) = ours.start(mode).await else {
        return;
    };
    let services = Services::start().await.expect("the services");
    let raw = services.raw.to_string();
    let mut other = topology.connect(&raw).await.expect("a dial");
    other.write_all(b"echo\n").await.expect("a write");
    echo(&mut other).await;
    let before = ours.program(&mut topology).rss();
    let target = match deaf {
        Deaf::Clients => raw.clone(),
        Deaf::Endpoints => services.silent.to_string(),
    };
    // Dial first: the first stalled connection may block further dials.
    let mut streams = Vec::new();
    for _ in 0..STALLED {
        streams.push(topology.connect(&target).await.expect("a dial"));
    }
    let (mut clients, mut sending) = (Vec::new(), JoinSet::new());
    for stream in streams {
        clients.push(stall(stream, deaf, &mut sending).await);
    }

    let waits_itself = (ours == Ours::Server) == (deaf == Deaf::Clients);
    if waits_itself {
        let slow = ["stalled", "buffer_exceeded"];
        eventually("the stalled connections are closed", LIMIT, async || {
            echo(&mut other).await;
            let closed = ours.closed(&topology, &slow).await;
            (closed == STALLED as f64).then_some(()).ok_or(closed)
        })
        .await;
        echo(&mut other).await;
    }
    if mode == Mode::HttpConnect && (ours, deaf) == (Ours::Agent, Deaf::Clients) {
        // A stock server waits for a stalled client without a limit. Meanwhile it keeps using the agent's
        // dead stream, although the agent has opened a new stream. Only the client can end this wait.
        clients.clear();
    }
    while let Some(ended) = sending.try_join_next() {
        ended.expect("the endpoint read nothing");
    }
    eventually("new connections carry bytes again", STOPPED, async || {
        let carried = timeout(LIMIT, async {
            let fresh = topology.connect(&raw).await.map_err(|e| e.to_string())?;
            let outcome = check::download(fresh, 1_000_000).await;
            outcome.map(drop).map_err(|error| error.to_string())
        });
        carried.await.unwrap_or_else(|_| Err("no bytes".into()))
    })
    .await;
    let grown = ours.program(&mut topology).rss().saturating_sub(before);
    assert!(grown < GROWTH, "memory grew by {grown} bytes");
}

macro_rules! tests {
    ($($name:ident: $ours:ident, $deaf:ident;)+) => { $(
        mod $name {
            use super::{Deaf, Mode, Ours, stalled_beside_one};

            #[tokio::test]
            async fn grpc() {
                stalled_beside_one(Ours::$ours, Deaf::$deaf, Mode::Grpc).await;
            }

            #[tokio::test]
            async fn connect() {
                stalled_beside_one(Ours::$ours, Deaf::$deaf, Mode::HttpConnect).await;
            }
        }
    )+ };
}

tests! {
    clients_of_our_server: Server, Clients;
    endpoints_of_our_agent: Agent, Endpoints;
    clients_of_a_stock_server: Agent, Clients;
    endpoints_of_a_stock_agent: Server, Endpoints;
}
