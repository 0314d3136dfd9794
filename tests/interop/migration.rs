//! A migration half way: stock programs and ours at the same time, on both sides.

use culvert_kit::check;
use culvert_kit::client;
use culvert_kit::services::Services;
use culvert_tests::{Mode, Topology, Transport, eventually};

use crate::case::{LIMIT, Make};

/// Number of connections through a server. Both agents get some of them.
const DIALS: usize = 20;

/// Starts a server of ours, a stock server, and an agent of each kind. Returns `None` without Go.
async fn start(mode: Mode) -> Option<Topology> {
    let [ours, stock] = [Make::Ours, Make::Stock];
    Topology::builder(mode, Transport::Uds)
        .server(ours.executable(|it| &it.proxy_server)?, &[])
        .server(stock.executable(|it| &it.proxy_server)?, &[])
        .agent(ours.executable(|it| &it.proxy_agent)?, &["--sync-forever"])
        .agent(stock.executable(|it| &it.proxy_agent)?, &["--sync-forever"])
        .start()
        .await
        .into()
}

/// Opens connections through a server, and checks their bytes.
async fn through(topology: &Topology, server: usize, services: &Services) {
    let target = services.raw.to_string();
    for _ in 0..DIALS {
        let dialed = client::connect(topology.front_end_of(server), &target, LIMIT).await;
        let stream = dialed.unwrap_or_else(|error| panic!("server {server}: {error}"));
        check::echo(stream, 2, 1000).await.unwrap();
    }
}

async fn both_kinds(mode: Mode) {
    let services = Services::start().await.unwrap();
    let Some(mut topology) = start(mode).await else {
        return;
    };
    topology.wait_for_agents().await;
    for server in 0..2 {
        through(&topology, server, &services).await;
    }
    // One kind of agent is left, then the other kind.
    for agent in 0..2 {
        topology.kill_agent(agent);
        for server in 0..2 {
            eventually("the agent is gone", LIMIT, async || {
                let ready = topology.ready_agents(server).await;
                (ready == 1.0).then_some(()).ok_or(ready)
            })
            .await;
            through(&topology, server, &services).await;
        }
        topology.start_agent(agent).await;
        topology.wait_for_agents().await;
    }
    // One kind of server is left, then the other kind.
    for server in 0..2 {
        topology.kill_server(server);
        through(&topology, 1 - server, &services).await;
        topology.start_server(server).await;
        topology.wait_for_agents().await;
        through(&topology, server, &services).await;
    }
}

#[tokio::test]
async fn programs_of_both_kinds_work_together_behind_grpc() {
    both_kinds(Mode::Grpc).await;
}

#[tokio::test]
async fn programs_of_both_kinds_work_together_behind_connect() {
    both_kinds(Mode::HttpConnect).await;
}
