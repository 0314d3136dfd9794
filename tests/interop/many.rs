//! Several servers, and several agents with one id.

use culvert_tests::metrics::scrape;
use culvert_tests::{Mode, Signal, Topology, Transport, eventually};

use crate::case::{Case, LIMIT, Tunnel, agent_value};
use crate::held::Held;

/// Number of connections open at the same time through each of two agents with one id.
const EACH: usize = 3;

/// Two agents with one id: transfers arrive intact, and one agent takes over from the other.
pub(crate) async fn agents_of_one_name(case: Case) {
    let Some(mut tunnel) = namesakes(case).await else {
        return;
    };
    let held = tunnel.hold().await;
    let first = tunnel.serving_agent().await;
    transfers(&tunnel).await;
    tunnel.topology.kill_agent(first);
    held.ends().await;
    let raw = tunnel.services.raw.to_string();
    // A stock server that has not noticed the loss yet sends dials to the dead agent.
    eventually("the other agent takes over", LIMIT, async || {
        let result = tunnel.run("dial", &raw, &["--timeout=2s"]).await;
        let works = result["ok"] == true;
        works.then_some(()).ok_or(result)
    })
    .await;
    transfers(&tunnel).await;
    tunnel.topology.start_agent(first).await;
    tunnel.settles().await;
}

/// Two agents with one id, whose connections have the same numbers and must stay separate.
pub(crate) async fn namesakes_at_once(case: Case) {
    let Some(mut tunnel) = namesakes(case).await else {
        return;
    };
    let mut held = vec![tunnel.hold().await];
    let first = tunnel.serving_agent().await;
    while held.len() < EACH {
        held.push(tunnel.hold().await);
    }
    // A draining agent keeps its connections, and the other agent gets the new connections.
    tunnel.topology.agent(first).signal(Signal::TERM);
    while tunnel.endpoint_connections(1 - first).await < EACH as f64 {
        held.push(tunnel.hold().await);
        assert!(held.len() < 10 * EACH, "the other agent gets nothing");
    }
    tokio::join!(transfers(&tunnel), talk_at_once(&mut held));
}

async fn namesakes(case: Case) -> Option<Tunnel> {
    let name: &[&str] = &["--agent-id=twin"];
    let tunnel = case.start(1, &[name, name]).await?;
    for agent in 0..2 {
        eventually("the agent is connected", LIMIT, async || {
            let metrics = tunnel.topology.agent_metrics(agent).await;
            agent_value(&metrics, "open_server_connections") == 1.0
        })
        .await;
    }
    Some(tunnel)
}

/// Runs transfers of different lengths at the same time, each with a checksum.
async fn transfers(tunnel: &Tunnel) {
    let raw = tunnel.services.raw;
    tokio::join!(
        tunnel.succeeds("download", raw, &["--bytes=1000000"]),
        tunnel.succeeds("download", raw, &["--bytes=1500001"]),
        tunnel.succeeds("upload", raw, &["--bytes=2000003"]),
        tunnel.succeeds("upload", raw, &["--bytes=2500007"]),
    );
}

/// Sends lines through all connections, and checks that each connection receives exactly its own lines.
async fn talk_at_once(held: &mut [Held]) {
    let line = |connection: usize, round: usize| {
        format!("{connection} {round} ").repeat(500 + 10 * connection)
    };
    const ROUNDS: usize = 5;
    for round in 0..ROUNDS {
        for (connection, held) in held.iter_mut().enumerate() {
            held.send(&line(connection, round));
        }
    }
    for (connection, held) in held.iter().enumerate() {
        held.hears(&line(connection, ROUNDS - 1)).await;
        let sent: Vec<String> = (0..ROUNDS).map(|round| line(connection, round)).collect();
        assert!(
            held.heard() == sent,
            "connection {connection} got other lines"
        );
    }
}

/// Three servers behind a balancer: one agent connects to each of them, also after one of them was replaced.
pub(crate) async fn servers_behind_a_balancer(case: Case) {
    let Some(mut tunnel) = case.start(3, &[&[]]).await else {
        return;
    };
    through_each(&tunnel).await;
    tunnel.topology.kill_server(1);
    tunnel.topology.start_server(1).await;
    tunnel.topology.wait_for_agents().await;
    through_each(&tunnel).await;
    tunnel.settles().await;
}

/// Transfers bytes through each of three servers.
async fn through_each(tunnel: &Tunnel) {
    let raw = tunnel.services.raw.to_string();
    for server in 0..3 {
        let result = tunnel
            .run_through(server, "download", &raw, &["--bytes=1000000"])
            .await;
        assert_eq!(result["ok"], true, "through server {server}: {result}");
    }
}

/// Two servers join a server that does not announce them: an agent with `--sync-forever` finds them.
pub(crate) async fn servers_that_join(case: Case) {
    let Some((server, agent)) = case.programs() else {
        return;
    };
    let mut topology = Topology::builder(Mode::HttpConnect, Transport::Uds)
        .server(server.clone(), &["--server-count=1"])
        .server(server.clone(), &[])
        .server(server, &[])
        .start()
        .await;
    let all: Vec<_> = (0..3)
        .map(|server| topology.agent_address(server))
        .collect();
    topology.balancer().set(vec![all[0]]);
    let agent = topology.add_agent(agent, &["--sync-forever"]).await;
    for (expected, backends) in [(1.0, vec![all[0]]), (3.0, all)] {
        topology.balancer().set(backends);
        let what = format!("the agent has {expected} servers");
        eventually(&what, LIMIT, async || {
            let metrics = scrape(topology.agent_health(agent)).await;
            let metrics = metrics.map_err(|error| error.to_string())?;
            let open = agent_value(&metrics, "open_server_connections");
            (open == expected)
                .then_some(())
                .ok_or_else(|| open.to_string())
        })
        .await;
    }
}
