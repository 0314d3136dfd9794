//! Killed programs with open native connections, and agents with the same id.

use std::io::ErrorKind;

use culvert_kit::services::Services;
use culvert_tests::metrics::Metrics;
use culvert_tests::{Mode, Signal, Topology, Transport, black_hole, eventually};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::endpoints::Endpoint;
use crate::searching::Lone;
use crate::support::*;

/// Size of a download, in bytes. Far more than arrives before a program is killed.
const BULK: u64 = 1 << 40;

fn closed(metrics: &Metrics, reason: &str) -> f64 {
    let name = "culvert_connections_closed_total";
    value(metrics, name, &[("reason", reason)])
}

/// Returns the number of dials received by an agent.
async fn dials(topology: &Topology, agent: usize) -> f64 {
    let metrics = topology.agent_metrics(agent).await;
    let labels = [("segment", "to_agent"), ("packet_type", "DIAL_REQ")];
    value(&metrics, &agent_name("stream_packets_total"), &labels)
}

/// Opens a download and reads its first MiB.
async fn transfer(topology: &Topology, services: &Services) -> culvert_kit::client::BoxedStream {
    let mut stream = open(topology, &services.raw.to_string()).await;
    let command = format!("download {BULK}\n");
    stream.write_all(command.as_bytes()).await.unwrap();
    stream.flush().await.unwrap();
    let mut first = vec![0; 1 << 20];
    timely("bytes", stream.read_exact(&mut first))
        .await
        .unwrap();
    stream
}

#[tokio::test]
async fn agent_killed_during_a_transfer_closes_the_connection_as_agent_lost() {
    let services = Services::start().await.unwrap();
    for mode in MODES {
        let mut topology = Topology::simple(mode, Transport::Uds).await;
        let mut stream = transfer(&topology, &services).await;
        topology.kill_agent(0);
        let mut nowhere = tokio::io::sink();
        let rest = tokio::io::copy(&mut stream, &mut nowhere);
        timely("the client's end", rest).await.ok();
        drop(stream);
        server_is_idle(&topology).await;
        let metrics = topology.server_metrics(0).await;
        assert_eq!(closed(&metrics, "agent_lost"), 1.0, "{}", metrics.text());
        server_shows(&topology, "ready_backends", &[], 0.0).await;
        let ended = async || services.open_connections() == 0;
        eventually("the endpoint's connection ended", LIMIT, ended).await;
        topology.start_agent(0).await;
        topology.wait_for_agents().await;
        Innocent::open(&topology, services.raw).await;
    }
}

#[tokio::test]
async fn lost_agent_is_no_ordinary_end_for_a_tls_client() {
    let services = Services::start().await.unwrap();
    let mut topology = Topology::simple(Mode::HttpConnect, Transport::Tcp).await;
    let mut stream = transfer(&topology, &services).await;
    topology.kill_agent(0);
    let mut nowhere = tokio::io::sink();
    let rest = tokio::io::copy(&mut stream, &mut nowhere);
    let error = timely("the client's end", rest).await.unwrap_err();
    let kinds = [ErrorKind::UnexpectedEof, ErrorKind::ConnectionReset];
    assert!(kinds.contains(&error.kind()), "{error}");
}

#[tokio::test]
async fn upload_that_ends_with_its_server_is_reset() {
    let endpoint = Endpoint::start().await;
    let mut topology = Topology::simple(Mode::HttpConnect, Transport::Uds).await;
    let mut stream = open(&topology, &endpoint.addr().to_string()).await;
    let mut far = endpoint.accept().await;
    stream.write_all(b"a part").await.unwrap();
    stream.flush().await.unwrap();
    timely("the part", far.read_exact(&mut [0; 6]))
        .await
        .unwrap();
    topology.kill_server(0);
    let ended = timely("the end", far.read(&mut [0; 1])).await;
    assert_eq!(ended.unwrap_err().kind(), ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn agent_reconnects_to_a_server_killed_during_a_transfer() {
    let services = Services::start().await.unwrap();
    let mut topology = Topology::simple(Mode::HttpConnect, Transport::Uds).await;
    let mut stream = transfer(&topology, &services).await;
    topology.kill_server(0);
    let mut nowhere = tokio::io::sink();
    let rest = tokio::io::copy(&mut stream, &mut nowhere);
    timely("the client's end", rest).await.ok();
    agent_shows(&topology, "open_endpoint_connections", &[], 0.0).await;
    agent_shows(&topology, "open_server_connections", &[], 0.0).await;
    let metrics = topology.agent_metrics(0).await;
    assert_eq!(closed(&metrics, "server_lost"), 1.0, "{}", metrics.text());
    let ended = async || services.open_connections() == 0;
    eventually("the endpoint's connection ended", LIMIT, ended).await;
    // The agent finds the restarted server in its own search.
    std::fs::remove_file(topology.dir().join("front-0.socket")).ok();
    topology.start_server(0).await;
    topology.wait_for_agents().await;
    agent_shows(&topology, "open_server_connections", &[], 1.0).await;
    Innocent::open(&topology, services.raw).await;
}

#[tokio::test]
async fn agents_with_one_id_keep_separate_connections() {
    let services = Services::start().await.unwrap();
    let mut topology = Topology::simple(Mode::HttpConnect, Transport::Uds).await;
    let mut of_first = Vec::new();
    for _ in 0..3 {
        of_first.push(Innocent::open(&topology, services.raw).await);
    }
    // From now on, new dials prefer the other agent.
    topology.agent(0).signal(Signal::TERM);
    let drains = [("segment", "from_agent"), ("packet_type", "DRAIN")];
    server_shows(&topology, "stream_packets_total", &drains, 1.0).await;
    let mut namesake = Lone::new();
    namesake.pki = topology.pki().clone();
    let port = topology.agent_address(0).port();
    let flags = [&format!("--proxy-server-port={port}"), "--agent-id=agent-0"];
    namesake.start(&flags, &[]);
    let connections = [("service_method", "Connect")];
    server_shows(&topology, "grpc_connections", &connections, 2.0).await;
    server_shows(&topology, "ready_backends", &[], 1.0).await;
    let mut of_second = Vec::new();
    for _ in 0..4 {
        of_second.push(Innocent::open(&topology, services.raw).await);
    }
    agent_shows(&topology, "open_endpoint_connections", &[], 3.0).await;
    namesake.shows("open_endpoint_connections", 4.0).await;
    for innocent in of_first.iter_mut().chain(&mut of_second) {
        innocent.still_echoes("all are open").await;
    }
    topology.kill_agent(0);
    server_shows(&topology, "grpc_connections", &connections, 1.0).await;
    server_shows(&topology, "established_connections", &[], 4.0).await;
    let metrics = topology.server_metrics(0).await;
    assert_eq!(closed(&metrics, "agent_lost"), 3.0, "{}", metrics.text());
    for innocent in &mut of_second {
        innocent
            .still_echoes("the death of the other agent with the same id")
            .await;
    }
    server_shows(&topology, "ready_backends", &[], 1.0).await;
    Innocent::open(&topology, services.raw).await;
    drop((of_first, of_second));
    server_is_idle(&topology).await;
}

#[tokio::test]
async fn pending_dial_moves_to_another_native_agent_when_its_agent_dies() {
    let hole = black_hole().await;
    let target = hole.addr().to_string();
    for mode in MODES {
        let builder = Topology::builder(mode, Transport::Uds);
        let mut topology = builder.servers(1).agents(2).start().await;
        let front = topology.front_end().clone();
        let target = target.clone();
        let pending = tokio::spawn(async move {
            let connected = culvert_kit::client::connect(&front, &target, LIMIT).await;
            connected.err().map(|error| error.to_string())
        });
        let asked = eventually("an agent receives the dial", LIMIT, async || {
            for agent in 0..2 {
                if dials(&topology, agent).await == 1.0 {
                    return Ok(agent);
                }
            }
            Err("neither agent")
        })
        .await;
        let other = 1 - asked;
        assert_eq!(dials(&topology, other).await, 0.0);
        topology.kill_agent(asked);
        eventually("the other agent receives the dial", LIMIT, async || {
            dials(&topology, other).await == 1.0
        })
        .await;
        server_shows(&topology, "pending_backend_dials", &[], 1.0).await;
        assert!(!pending.is_finished());
        pending.abort();
        server_shows(&topology, "pending_backend_dials", &[], 0.0).await;
    }
}
