//! An agent that stops answering although its connection is open, beside an agent that answers.

use std::time::Duration;

use Direction::{From, To};
use culvert_kit::check;
use culvert_kit::client::BoxedStream;
use culvert_kit::pki::{CLUSTER_NAME, KONNECTIVITY_NAME};
use culvert_kit::services::Services;
use culvert_tests::interop::Interop;
use culvert_tests::namespace::{Direction, alone, can_cut_off, cut_off, hosts, restore};
use culvert_tests::{Executable, Mode, Signal, Topology, Transport, eventually};
use tokio::io::AsyncWriteExt as _;
use tokio::time::{Instant, sleep, timeout};

use crate::case::LIMIT;

/// Log line of a dial that moves to another agent.
const MOVED: &str = "dial moved to another agent";

/// Log line about an agent that becomes silent.
const SILENT: &str = "the agent does not answer";

/// Number of dials, one after another. The first agent is random, so all of them would avoid the silent
/// agent by chance only once in 2^25 runs.
const DIALS: usize = 25;

/// Time limit of a dial that finds out about the silent agent. The server moves the dial 1.5 s after the last byte of the
/// agent. An agent that only receives nothing may still send a PING, 1 s after it has connected to the server, to confirm a
/// long round trip that it measured on a busy machine.
const SLOWEST: Duration = Duration::from_secs(3);

/// Addresses of the server for each agent. The names are in the server's certificate.
const AGENTS: [(&str, &str); 2] = [
    (CLUSTER_NAME, "127.0.0.5"),
    (KONNECTIVITY_NAME, "127.0.0.6"),
];

/// Cause of the silence.
#[derive(Debug, Clone, Copy)]
enum Silence {
    /// The agent is stopped.
    Frozen,
    /// The network drops packets in these directions, seen from the server.
    Dropped(&'static [Direction]),
}

async fn dial(topology: &Topology, target: &str) -> BoxedStream {
    let dialing = topology.connect(target);
    let dialed = timeout(LIMIT, dialing).await.expect("the dial ends");
    dialed.expect("the dial succeeds")
}

/// Starts a server of ours and two agents. If `is_apart`, each agent reaches the server at another address.
async fn start(agent: Executable, is_apart: bool) -> Topology {
    let [first, second] = AGENTS.map(|(name, _)| match is_apart {
        true => vec![format!("--proxy-server-host={name}")],
        false => Vec::new(),
    });
    let bind = match is_apart {
        true => "--agent-bind-address=0.0.0.0",
        false => "--agent-bind-address=127.0.0.1",
    };
    let mut builder = Topology::builder(Mode::HttpConnect, Transport::Uds)
        .server(Executable::Ours, &["--v=4", bind]);
    for flags in [first, second] {
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        builder = builder.agent(agent.clone(), &flags);
    }
    builder.start().await
}

/// Silences one of two agents: one dial may wait for the silent agent, and no dial fails. The agent gets dials
/// again after it is back.
async fn silent_agent_delays_one_dial(agent: Executable, silence: Silence) {
    let is_apart = matches!(silence, Silence::Dropped(_));
    if is_apart {
        hosts(&AGENTS);
    }
    let services = Services::start().await.unwrap();
    let target = services.raw.to_string();
    let mut topology = start(agent, is_apart).await;
    match silence {
        Silence::Frozen => topology.agent(0).signal(Signal::STOP),
        Silence::Dropped(directions) => cut_off(AGENTS[0].1, directions),
    }
    let mut slowest = Duration::ZERO;
    for _ in 0..DIALS {
        let begin = Instant::now();
        let stream = dial(&topology, &target).await;
        check::echo(stream, 1, 64).await.unwrap();
        slowest = slowest.max(begin.elapsed());
        sleep(Duration::from_millis(50)).await;
    }
    let log = topology.server(0).log();
    assert_eq!(log.matches(MOVED).count(), 1, "{log}");
    assert!(slowest <= SLOWEST, "{slowest:?} in {log}");
    assert_eq!(log.matches(SILENT).count(), 1, "{log}");
    if matches!(silence, Silence::Frozen) {
        assert_eq!(doubtful(&topology).await, 1.0);
    }
    match silence {
        Silence::Frozen => topology.agent(0).signal(Signal::CONT),
        Silence::Dropped(_) => restore(),
    }
    let carries = async || {
        let mut stream = dial(&topology, &target).await;
        stream.write_all(b"echo\n").await.unwrap();
        let metrics = topology.agent_metrics(0).await;
        let name = "konnectivity_network_proxy_agent_open_endpoint_connections";
        metrics.value(name, &[]).is_some_and(|open| open > 0.0)
    };
    eventually("the agent gets dials again", LIMIT, carries).await;
    eventually("the server receives from the agent", LIMIT, async || {
        doubtful(&topology).await == 0.0
    })
    .await;
}

/// Returns the number of silent agents of which the server knows.
async fn doubtful(topology: &Topology) -> f64 {
    let labels = [("tunnel", "konnectivity"), ("health", "doubtful")];
    let metrics = topology.server_metrics(0).await;
    metrics.value("culvert_tunnel_peers", &labels).unwrap()
}

fn stock() -> Option<Executable> {
    let interop = Interop::get()?;
    Some(Executable::At(interop.proxy_agent.clone()))
}

#[tokio::test]
async fn frozen_agent_of_ours_delays_one_dial() {
    silent_agent_delays_one_dial(Executable::Ours, Silence::Frozen).await;
}

#[tokio::test]
async fn frozen_stock_agent_delays_one_dial() {
    if let Some(stock) = stock() {
        silent_agent_delays_one_dial(stock, Silence::Frozen).await;
    }
}

macro_rules! dropped {
    ($($ours:ident, $stock:ident: $directions:expr;)+) => { $(
        #[test]
        fn $ours() {
            if can_cut_off() {
                alone(async || {
                    let silence = Silence::Dropped($directions);
                    silent_agent_delays_one_dial(Executable::Ours, silence).await;
                });
            }
        }

        #[test]
        fn $stock() {
            if let (true, Some(stock)) = (can_cut_off(), stock()) {
                alone(async || {
                    let silence = Silence::Dropped($directions);
                    silent_agent_delays_one_dial(stock, silence).await;
                });
            }
        }
    )+ };
}

dropped! {
    dropped_network_of_our_agent_delays_one_dial, dropped_network_of_a_stock_agent_delays_one_dial: &[From, To];
    our_agent_that_receives_nothing_delays_one_dial, stock_agent_that_receives_nothing_delays_one_dial: &[From];
    our_agent_that_sends_nothing_delays_one_dial, stock_agent_that_sends_nothing_delays_one_dial: &[To];
}
