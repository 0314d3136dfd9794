//! The choice of the agent by `--proxy-strategies` and `--agent-identifiers`, as the stock server chooses.

use std::net::SocketAddr;

use culvert_kit::check;
use culvert_kit::services::Services;
use culvert_tests::metrics::Metrics;
use culvert_tests::{Executable, Mode, Topology, Transport};

use crate::case::Make;

/// Number of dials of the same address. A choice at random among two agents would go unnoticed once in 2^6 runs.
const DIALS: usize = 6;

/// Strategies, agents, and the agents that a dial of a host may reach.
struct Row {
    strategies: &'static str,
    /// Identifiers of each agent. One of the strategies has at least as many identifiers or agents as there are
    /// agents, because the start of a topology waits for so many.
    agents: &'static [&'static str],
    /// Host, and the agents that may serve it.
    dials: &'static [(&'static str, &'static [usize])],
}

const ROWS: [Row; 6] = [
    Row {
        strategies: "destHost",
        agents: &["ipv4=127.0.0.1&ipv4=127.0.0.3", "host=localhost&ipv6=::1"],
        dials: &[("127.0.0.1", &[0]), ("localhost", &[1]), ("127.0.0.2", &[])],
    },
    Row {
        strategies: "destHost,defaultRoute",
        agents: &["ipv4=127.0.0.1&host=x", "default-route=true"],
        dials: &[("127.0.0.1", &[0]), ("localhost", &[1])],
    },
    Row {
        strategies: "defaultRoute,destHost",
        agents: &[
            "default-route=T",
            "default-route=true",
            "host=localhost&host=x&host=y",
        ],
        dials: &[("localhost", &[0, 1]), ("127.0.0.1", &[0, 1])],
    },
    Row {
        strategies: "destHost,defaultRoute,default",
        agents: &["host=other", "ipv4=127.0.0.1"],
        dials: &[("127.0.0.1", &[1]), ("localhost", &[0, 1])],
    },
    // The first strategy with an agent decides.
    Row {
        strategies: "default,destHost",
        agents: &["", "host=localhost"],
        dials: &[("localhost", &[0, 1])],
    },
    // No strategy uses networks in upstream.
    Row {
        strategies: "destHost",
        agents: &["cidr=127.0.0.0/8", "host=localhost&host=x"],
        dials: &[("127.0.0.1", &[]), ("localhost", &[1])],
    },
];

async fn start(server: &Executable, agent: &Executable, row: &Row) -> Topology {
    let strategies = format!("--proxy-strategies={}", row.strategies);
    let mut builder =
        Topology::builder(Mode::HttpConnect, Transport::Uds).server(server.clone(), &[&strategies]);
    for identifiers in row.agents {
        let identifiers = format!("--agent-identifiers={identifiers}");
        builder = builder.agent(agent.clone(), &[&identifiers]);
    }
    builder.start().await
}

/// Returns the number of endpoint connections that each agent has opened.
async fn dialed(topology: &Topology, agents: usize) -> Vec<f64> {
    let mut counts = Vec::new();
    for agent in 0..agents {
        let metrics: Metrics = topology.agent_metrics(agent).await;
        let name = "konnectivity_network_proxy_agent_dial_duration_seconds_count";
        counts.push(metrics.value(name, &[]).unwrap_or_default());
    }
    counts
}

async fn every_row(server: Make, agent: Make) {
    let server = server.executable(|release| &release.proxy_server);
    let agent = agent.executable(|release| &release.proxy_agent);
    let (Some(server), Some(agent)) = (server, agent) else {
        return;
    };
    let services = Services::start().await.unwrap();
    for row in &ROWS {
        let topology = start(&server, &agent, row).await;
        for (host, expected) in row.dials {
            check_dials(&topology, row, (host, services.raw), expected).await;
        }
    }
}

async fn check_dials(
    topology: &Topology,
    row: &Row,
    (host, raw): (&str, SocketAddr),
    expected: &[usize],
) {
    let what = format!("{} with {:?}: {host}", row.strategies, row.agents);
    let target = format!("{host}:{}", raw.port());
    let before = dialed(topology, row.agents.len()).await;
    for _ in 0..DIALS {
        let connected = topology.connect(&target).await;
        match (expected, connected) {
            ([], Ok(_)) => panic!("{what}: an agent served the dial"),
            ([], Err(error)) => {
                let text = error.to_string();
                assert!(text.contains("No agent available"), "{what}: {text}");
            }
            (_, Ok(stream)) => {
                check::echo(stream, 1, 64).await.unwrap();
            }
            (_, Err(error)) => panic!("{what}: {error}"),
        }
    }
    let after = dialed(topology, row.agents.len()).await;
    let served = after
        .iter()
        .zip(before)
        .map(|(after, before)| after - before);
    let served: Vec<f64> = served.collect();
    let total: f64 = served.iter().sum();
    let by_expected: f64 = expected.iter().map(|agent| served[*agent]).sum();
    let wanted = if expected.is_empty() { 0 } else { DIALS };
    assert_eq!(
        (total, by_expected),
        (wanted as f64, wanted as f64),
        "{what}: {served:?}"
    );
}

#[tokio::test]
async fn stock_server_chooses_stock_agents_as_expected() {
    every_row(Make::Stock, Make::Stock).await;
}

#[tokio::test]
async fn stock_server_chooses_our_agents_as_stock_agents() {
    every_row(Make::Stock, Make::Ours).await;
}

#[tokio::test]
async fn our_server_chooses_stock_agents_as_the_stock_server() {
    every_row(Make::Ours, Make::Stock).await;
}

#[tokio::test]
async fn our_server_chooses_our_agents_as_the_stock_server() {
    every_row(Make::Ours, Make::Ours).await;
}

#[tokio::test]
async fn our_server_also_chooses_by_network_and_ignores_notation() {
    let services = Services::start().await.unwrap();
    let row = Row {
        strategies: "cidr,destHost,defaultRoute",
        agents: &[
            "cidr=127.0.0.0/8&cidr=192.0.2.0/24&cidr=2001:db8::/32",
            "cidr=127.0.0.1/32",
            "host=LocalHost.",
            "default-route=true",
        ],
        dials: &[("127.0.0.1", &[1]), ("LOCALHOST", &[2])],
    };
    let topology = start(&Executable::Ours, &Executable::Ours, &row).await;
    for (host, expected) in row.dials {
        check_dials(&topology, &row, (host, services.raw), expected).await;
    }
}
