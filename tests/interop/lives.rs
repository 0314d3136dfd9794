//! Killed, restarted and drained programs.

use culvert_tests::{Signal, eventually};

use crate::case::{Case, LIMIT, Make, server_value};

/// Kills an agent with an open connection: the client's connection ends, and another agent takes over.
pub(crate) async fn killed_agent(case: Case) {
    let Some(mut tunnel) = case.start(1, &[&[], &[]]).await else {
        return;
    };
    let mut held = tunnel.hold().await;
    held.echoes("before").await;
    let agent = tunnel.serving_agent().await;
    tunnel.topology.kill_agent(agent);
    held.ends().await;
    // A stock server that has not noticed the loss yet sends dials to the dead agent.
    tunnel.counts_agents(1).await;
    let raw = tunnel.services.raw;
    tunnel.succeeds("echo", raw, &["--connections=5"]).await;
    // Only a running agent can report that nothing is left.
    tunnel.topology.start_agent(agent).await;
    tunnel.counts_agents(2).await;
    tunnel.settles().await;
}

/// Kills the only agent and starts it again.
pub(crate) async fn restarted_agent(case: Case) {
    let Some(mut tunnel) = case.start(1, &[&[]]).await else {
        return;
    };
    let raw = tunnel.services.raw;
    tunnel.succeeds("echo", raw, &[]).await;
    tunnel.topology.kill_agent(0);
    tunnel.counts_agents(0).await;
    let refused = tunnel.run("dial", &raw.to_string(), &[]).await;
    assert_eq!(refused["ok"], false, "{refused}");
    assert!(
        refused.to_string().contains("No agent available"),
        "{refused}"
    );
    tunnel.topology.start_agent(0).await;
    tunnel.counts_agents(1).await;
    tunnel.succeeds("echo", raw, &[]).await;
    tunnel.settles().await;
}

/// Restarts a server on the same ports while a connection is open.
pub(crate) async fn restarted_server(case: Case) {
    let Some(mut tunnel) = case.start(1, &[&[]]).await else {
        return;
    };
    let mut held = tunnel.hold().await;
    held.echoes("before").await;
    match case.server {
        Make::Ours | Make::Release(_) => tunnel.topology.restart_server(0).await,
        // On SIGTERM, v0.36.0 waits until its gRPC clients have left.
        Make::Stock => {
            tunnel.topology.kill_server(0);
            tunnel.topology.start_server(0).await;
        }
    }
    held.ends().await;
    tunnel.topology.wait_for_agents().await;
    let raw = tunnel.services.raw;
    tunnel.succeeds("download", raw, &["--bytes=1000000"]).await;
    tunnel.settles().await;
}

/// Drains the only agent: open connections stay open, and new connections still work.
pub(crate) async fn drained_agent(case: Case) {
    let Some(mut tunnel) = case.start(1, &[&[]]).await else {
        return;
    };
    let mut held = tunnel.hold().await;
    held.echoes("before").await;
    tunnel.topology.agent(0).signal(Signal::TERM);
    eventually("the server receives the drain", LIMIT, async || {
        // A released stock agent sends the drain only along with other packets.
        held.echoes("meanwhile").await;
        let metrics = tunnel.topology.server_metrics(0).await;
        let labels = [("segment", "from_agent"), ("packet_type", "DRAIN")];
        server_value(&metrics, "stream_packets_total", &labels) >= 1.0
    })
    .await;
    let raw = tunnel.services.raw;
    tunnel.succeeds("download", raw, &["--bytes=1000000"]).await;
    held.echoes("still").await;
    assert!(tunnel.topology.agent(0).exited().is_none());
}
