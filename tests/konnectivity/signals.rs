//! How the programs react to signals: exit codes, drains and cleanup.

use std::time::Duration;

use culvert_kit::client::FrontEnd;
use culvert_kit::services::Services;
use culvert_tests::{Executable, Mode, Signal, Topology, Transport, black_hole, eventually};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::sleep;

use crate::listeners::get;
use crate::scripts;
use crate::searching::Lone;
use crate::support::*;

#[tokio::test]
async fn server_exits_on_the_first_signal_and_removes_its_socket() {
    let services = Services::start().await.unwrap();
    for mode in MODES {
        for signal in [Signal::TERM, Signal::INT] {
            let mut topology = Topology::simple(mode, Transport::Uds).await;
            let (FrontEnd::GrpcUds(socket) | FrontEnd::ConnectUds(socket)) =
                topology.front_end().clone()
            else {
                panic!("not a Unix socket");
            };
            let mut stream = open(&topology, &services.raw.to_string()).await;
            stream.write_all(b"echo\n").await.unwrap();
            assert!(socket.exists());
            topology.server(0).signal(signal);
            let status = topology.server(0).wait_exit(LIMIT).await;
            assert_eq!(status.code(), Some(0), "{}", topology.server(0).log());
            assert!(!socket.exists());
            assert!(read_rest(&mut stream).await.is_empty());
            // The agent notices the loss of its server.
            agent_shows(&topology, "open_server_connections", &[], 0.0).await;
            agent_shows(&topology, "open_endpoint_connections", &[], 0.0).await;
        }
    }
}

#[tokio::test]
async fn stop_of_a_server_is_the_reason_in_the_log_for_the_end_of_each_agent() {
    // The agent of the topology is native, and the scripted agent has a packet stream.
    let mut topology = Topology::simple(Mode::HttpConnect, Transport::Uds).await;
    let _agent = scripts::agent(&topology, "scripted").await;
    topology.server(0).signal(Signal::TERM);
    topology.server(0).wait_exit(LIMIT).await;
    let log = topology.server(0).log();
    let ends = log
        .lines()
        .filter(|line| line.contains("agent disconnected"));
    let stops = ends
        .clone()
        .filter(|line| line.contains("this server is stopping"));
    assert_eq!((ends.count(), stops.count()), (2, 2), "{log}");
}

#[tokio::test]
async fn server_exits_despite_pending_dials_and_unfinished_handshakes() {
    let hole = black_hole().await;
    for (mode, transport) in FRONTS {
        let mut topology = Topology::simple(mode, transport).await;
        let target = hole.addr().to_string();
        let pending = {
            let front = topology.front_end().clone();
            tokio::spawn(async move {
                let connected = culvert_kit::client::connect(&front, &target, LIMIT).await;
                connected.is_ok()
            })
        };
        server_shows(&topology, "pending_backend_dials", &[], 1.0).await;
        let _undecided = tokio::net::TcpStream::connect(topology.agent_address(0)).await;
        topology.server(0).signal(Signal::TERM);
        // Shorter than the timeout of a stalled handshake.
        let soon = Duration::from_secs(10);
        let status = topology.server(0).wait_exit(soon).await;
        assert_eq!(status.code(), Some(0));
        assert!(!timely("the pending dial", pending).await.unwrap());
    }
}

#[tokio::test]
async fn an_idle_agent_exits_after_its_linger() {
    let builder = Topology::builder(Mode::HttpConnect, Transport::Uds);
    let builder = builder
        .servers(1)
        .agents(1)
        .agent_args(&["--drain-linger=200ms"]);
    let mut topology = builder.start().await;
    topology.agent(0).signal(Signal::TERM);
    let status = topology.agent(0).wait_exit(LIMIT).await;
    assert_eq!(status.code(), Some(0));
    assert!(topology.agent(0).log().contains("drained"));
    server_shows(&topology, "ready_backends", &[], 0.0).await;
}

#[tokio::test]
async fn draining_agent_keeps_its_connections_and_exits_after_the_last() {
    let services = Services::start().await.unwrap();
    for mode in MODES {
        let builder = Topology::builder(mode, Transport::Uds);
        let mut topology = builder
            .servers(1)
            .agent(Executable::Ours, &["--drain-linger=200ms"])
            .start()
            .await;
        let mut innocent = Innocent::open(&topology, services.raw).await;
        topology.agent(0).signal(Signal::TERM);
        topology.agent(0).wait_for_log("draining", LIMIT).await;
        innocent.still_echoes("the signal").await;
        // No other agent exists, so new dials still reach the draining agent.
        Innocent::open(&topology, services.raw)
            .await
            .still_echoes("a late dial")
            .await;
        let packets = [("segment", "from_agent"), ("packet_type", "DRAIN")];
        server_shows(&topology, "stream_packets_total", &packets, 1.0).await;
        innocent.still_echoes("the drain").await;
        assert_eq!(topology.agent(0).exited(), None);
        drop(innocent);
        assert_eq!(topology.agent(0).wait_exit(LIMIT).await.code(), Some(0));
    }
}

#[tokio::test]
async fn new_dials_avoid_a_draining_agent() {
    let services = Services::start().await.unwrap();
    let builder = Topology::builder(Mode::HttpConnect, Transport::Uds);
    let mut topology = builder.servers(1).agents(2).start().await;
    topology.agent(0).signal(Signal::TERM);
    let packets = [("segment", "from_agent"), ("packet_type", "DRAIN")];
    server_shows(&topology, "stream_packets_total", &packets, 1.0).await;
    let mut held = Vec::new();
    for _ in 0..10 {
        held.push(Innocent::open(&topology, services.raw).await);
    }
    let open = topology.agent_metrics(1).await;
    assert_eq!(
        open.value(&agent_name("open_endpoint_connections"), &[]),
        Some(10.0)
    );
}

#[tokio::test]
async fn a_drain_ends_at_its_timeout() {
    let services = Services::start().await.unwrap();
    let builder = Topology::builder(Mode::HttpConnect, Transport::Uds);
    let builder = builder.servers(1);
    let args = ["--drain-linger=200ms", "--drain-timeout=1s"];
    let mut topology = builder.agent(Executable::Ours, &args).start().await;
    let mut stream = open(&topology, &services.raw.to_string()).await;
    stream.write_all(b"echo\nx").await.unwrap();
    assert_eq!(timely("an echo", stream.read_u8()).await.unwrap(), b'x');
    topology.agent(0).signal(Signal::TERM);
    assert_eq!(topology.agent(0).wait_exit(LIMIT).await.code(), Some(0));
    assert!(topology.agent(0).log().contains("the drain timeout passed"));
    assert!(read_rest(&mut stream).await.is_empty());
    let closed = async || services.open_connections() == 0;
    eventually("the endpoint's connection ended", LIMIT, closed).await;
}

#[tokio::test]
async fn the_second_signal_ends_an_agent_at_once() {
    let services = Services::start().await.unwrap();
    let mut topology = Topology::simple(Mode::HttpConnect, Transport::Uds).await;
    let _innocent = Innocent::open(&topology, services.raw).await;
    topology.agent(0).signal(Signal::TERM);
    topology.agent(0).wait_for_log("draining", LIMIT).await;
    topology.agent(0).signal(Signal::INT);
    assert_eq!(topology.agent(0).wait_exit(LIMIT).await.code(), Some(0));
}

#[tokio::test]
async fn an_agent_without_servers_exits_on_a_signal() {
    let mut lone = Lone::new();
    lone.start(&["--proxy-server-port=1", "--drain-linger=200ms"], &[]);
    lone.program().wait_for_log("cannot connect", LIMIT).await;
    lone.program().signal(Signal::TERM);
    assert_eq!(lone.program().wait_exit(LIMIT).await.code(), Some(0));
}

#[tokio::test]
async fn agent_waiting_for_a_silent_server_exits_on_a_signal() {
    let silent = crate::endpoints::Endpoint::start().await;
    let mut lone = Lone::new();
    let port = format!("--proxy-server-port={}", silent.addr().port());
    lone.start(&[&port, "--drain-linger=200ms"], &[]);
    let _held = silent.accept().await;
    lone.program().signal(Signal::TERM);
    let status = lone.program().wait_exit(Duration::from_secs(15)).await;
    assert_eq!(status.code(), Some(0));
}

/// Starts a server that drains for up to `grace`, with an agent.
async fn draining_server(mode: Mode, grace: &str) -> Topology {
    let grace = format!("--graceful-shutdown-timeout={grace}");
    let builder = Topology::builder(mode, Transport::Uds);
    let builder = builder.server(Executable::Ours, &[&grace, "--drain-linger=200ms"]);
    builder.agents(1).start().await
}

#[tokio::test]
async fn draining_server_serves_until_its_connections_have_ended() {
    let services = Services::start().await.unwrap();
    for mode in MODES {
        let mut topology = draining_server(mode, "10m").await;
        let mut innocent = Innocent::open(&topology, services.raw).await;
        topology.server(0).signal(Signal::TERM);
        topology.server(0).wait_for_log("draining", LIMIT).await;
        let health = topology.server_health(0);
        let (status, body) = get(health, "/readyz").await;
        assert_eq!((status, body.contains("drains")), (500, true), "{body}");
        assert_eq!(get(health, "/healthz").await.0, 200);
        topology
            .agent(0)
            .wait_for_log("the server drains", LIMIT)
            .await;
        // New dials are served, also over new client connections.
        let late = Innocent::open(&topology, services.raw).await;
        innocent.still_echoes("a late dial").await;
        drop(late);
        server_shows(&topology, "established_connections", &[], 1.0).await;
        assert_eq!(topology.server(0).exited(), None);
        drop(innocent);
        let status = topology.server(0).wait_exit(LIMIT).await;
        assert_eq!(status.code(), Some(0), "{}", topology.server(0).log());
        assert!(topology.server(0).log().contains("drained"));
    }
}

#[tokio::test]
async fn draining_server_without_connections_serves_dials_during_its_linger() {
    let services = Services::start().await.unwrap();
    let args = ["--graceful-shutdown-timeout=10m", "--drain-linger=10m"];
    let builder = Topology::builder(Mode::HttpConnect, Transport::Uds);
    let builder = builder.server(Executable::Ours, &args);
    let mut topology = builder.agents(1).start().await;
    topology.server(0).signal(Signal::TERM);
    topology.server(0).wait_for_log("draining", LIMIT).await;
    // The default linger is 5 s.
    sleep(Duration::from_secs(7)).await;
    Innocent::open(&topology, services.raw).await;
    topology.server(0).signal(Signal::TERM);
    topology.server(0).wait_exit(LIMIT).await;
}

#[tokio::test]
async fn drain_of_a_server_ends_at_its_timeout_with_the_upstream_exit_code() {
    let services = Services::start().await.unwrap();
    // k0s passes 1ns to end the server at once.
    for grace in ["1ns", "1s"] {
        let mut topology = draining_server(Mode::HttpConnect, grace).await;
        let mut stream = open(&topology, &services.raw.to_string()).await;
        stream.write_all(b"echo\nx").await.unwrap();
        assert_eq!(timely("an echo", stream.read_u8()).await.unwrap(), b'x');
        topology.server(0).signal(Signal::TERM);
        assert_eq!(topology.server(0).wait_exit(LIMIT).await.code(), Some(0));
        let log = topology.server(0).log();
        assert!(
            log.contains("--graceful-shutdown-timeout has passed"),
            "{log}"
        );
        assert!(read_rest(&mut stream).await.is_empty());
    }
}

#[tokio::test]
async fn second_signal_ends_the_drain_of_a_server() {
    let services = Services::start().await.unwrap();
    let mut topology = draining_server(Mode::Grpc, "10m").await;
    let _innocent = Innocent::open(&topology, services.raw).await;
    topology.server(0).signal(Signal::TERM);
    topology.server(0).wait_for_log("draining", LIMIT).await;
    topology.server(0).signal(Signal::TERM);
    assert_eq!(topology.server(0).wait_exit(LIMIT).await.code(), Some(1));
}
