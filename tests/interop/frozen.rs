//! An agent that stops answering although its connection is open, beside an agent that answers.

use std::time::Duration;

use culvert_kit::check;
use culvert_kit::client::BoxedStream;
use culvert_kit::services::Services;
use culvert_tests::interop::Interop;
use culvert_tests::{Executable, Mode, Signal, Topology, Transport, eventually};
use tokio::io::AsyncWriteExt as _;
use tokio::time::{sleep, timeout};

use crate::case::LIMIT;

/// Log line of a dial that moves to another agent.
const MOVED: &str = "trying another agent";

/// Number of dials, one after another. The first agent is random, so all of them would avoid the frozen
/// agent by chance only once in 2^25 runs.
const DIALS: usize = 25;

async fn dial(topology: &Topology, target: &str) -> BoxedStream {
    let dialing = topology.connect(target);
    let dialed = timeout(LIMIT, dialing).await.expect("the dial ends");
    dialed.expect("the dial succeeds")
}

/// Freezes one of two agents: one dial may wait for the frozen agent, and no dial fails. The agent gets dials
/// again after it continues.
async fn frozen_agent_delays_one_dial(agent: Executable) {
    let services = Services::start().await.unwrap();
    let target = services.raw.to_string();
    let mut topology = Topology::builder(Mode::HttpConnect, Transport::Uds)
        .server(Executable::Ours, &["--v=4"])
        .agent(agent.clone(), &[])
        .agent(agent, &[])
        .start()
        .await;
    topology.agent(0).signal(Signal::STOP);
    for _ in 0..DIALS {
        let stream = dial(&topology, &target).await;
        check::echo(stream, 1, 64).await.unwrap();
        sleep(Duration::from_millis(50)).await;
    }
    let log = topology.server(0).log();
    assert_eq!(log.matches(MOVED).count(), 1, "{log}");
    topology.agent(0).signal(Signal::CONT);
    let carries = async || {
        let mut stream = dial(&topology, &target).await;
        stream.write_all(b"echo\n").await.unwrap();
        let metrics = topology.agent_metrics(0).await;
        let name = "konnectivity_network_proxy_agent_open_endpoint_connections";
        metrics.value(name, &[]).is_some_and(|open| open > 0.0)
    };
    eventually("the agent gets dials again", LIMIT, carries).await;
}

#[tokio::test]
async fn frozen_agent_of_ours_delays_one_dial() {
    frozen_agent_delays_one_dial(Executable::Ours).await;
}

#[tokio::test]
async fn frozen_stock_agent_delays_one_dial() {
    let Some(interop) = Interop::get() else {
        return;
    };
    frozen_agent_delays_one_dial(Executable::At(interop.proxy_agent.clone())).await;
}
