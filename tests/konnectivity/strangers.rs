//! Peers that never authenticate: they cost little, and do not keep others out.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use culvert_kit::client::FrontEnd;
use culvert_kit::services::Services;
use culvert_tests::metrics::{http_get, scrape};
use culvert_tests::process::ours;
use culvert_tests::{Mode, Program, Topology, Transport, eventually};
use tokio::net::{TcpSocket, TcpStream};

use crate::support::*;

/// Number of silent connections: more than a listener has slots, and fewer than the test's descriptors.
const SILENT: usize = 600;

/// Limit for the memory growth of a server, in bytes.
const GROWTH: u64 = 32 << 20;

/// Opens [`SILENT`] connections from a loopback address. The server may close some.
async fn silent(from: Ipv4Addr, to: SocketAddr) -> Vec<TcpStream> {
    let mut all = Vec::new();
    for _ in 0..SILENT {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(SocketAddr::from((from, 0))).unwrap();
        all.push(timely("a connection", socket.connect(to)).await.unwrap());
    }
    all
}

#[tokio::test]
async fn silent_connections_do_not_lock_out_agents() {
    let builder = Topology::builder(Mode::HttpConnect, Transport::Uds);
    let mut topology = builder.servers(1).start().await;
    let before = topology.server(0).rss();
    let agents = topology.agent_address(0);
    let mut all = Vec::new();
    // The agents connect from the second address.
    for (round, from) in [[127, 0, 0, 2], [127, 0, 0, 1]].into_iter().enumerate() {
        all.extend(silent(from.into(), agents).await);
        let agent = crate::scripts::agent(&topology, &format!("honest-{round}")).await;
        server_shows(&topology, "ready_backends", &[], 1.0).await;
        drop(agent);
        server_shows(&topology, "ready_backends", &[], 0.0).await;
    }
    let growth = topology.server(0).rss().saturating_sub(before);
    assert!(growth < GROWTH, "{growth} bytes");
    let refused = [("listener", "agent"), ("reason", "too_many_connections")];
    let metrics = topology.server_metrics(0).await;
    let refused = value(&metrics, "culvert_rejected_total", &refused);
    assert!(refused > 0.0, "{refused}");
}

#[tokio::test]
async fn silent_connections_do_not_use_up_the_permits_of_clients() {
    let services = Services::start().await.unwrap();
    let target = services.raw.to_string();
    for mode in MODES {
        let builder = Topology::builder(mode, Transport::Tcp).servers(1);
        let builder = builder.server_args(&["--max-frontend-connections=1"]);
        let topology = builder.agents(1).start().await;
        let (FrontEnd::GrpcTcp { addr, .. } | FrontEnd::ConnectTcp { addr, .. }) =
            topology.front_end()
        else {
            panic!("no TCP front end");
        };
        let _silent = [
            TcpStream::connect(addr).await.unwrap(),
            TcpStream::connect(addr).await.unwrap(),
        ];
        let first = topology.connect(&target).await.unwrap();
        // The limit holds for clients.
        assert!(topology.connect(&target).await.is_err());
        drop(first);
        eventually("the permit is free again", LIMIT, async || {
            topology.connect(&target).await.map(drop)
        })
        .await;
    }
}

#[tokio::test]
async fn idle_connections_do_not_delay_health_checks() {
    let builder = Topology::builder(Mode::HttpConnect, Transport::Uds);
    let topology = builder.servers(1).start().await;
    let health = topology.server_health(0);
    for from in [[127, 0, 0, 2], [127, 0, 0, 1]] {
        let _idle = silent(from.into(), health).await;
        let limit = Duration::from_secs(20);
        let answer = tokio::time::timeout(limit, http_get(health, "/healthz")).await;
        let (status, ..) = answer.expect("an answer in time").unwrap();
        assert!(status.is_success());
    }
}

#[tokio::test]
async fn connections_leave_descriptors_for_health_checks() {
    let builder = Topology::builder(Mode::HttpConnect, Transport::Uds);
    let mut topology = builder.servers(1).start().await;
    let (health, agents) = (topology.server_health(0), topology.agent_address(0));
    let args = topology.server(0).args();
    topology.kill_server(0);
    let program = ours("culvert-server").display().to_string();
    let script = ["-c", "ulimit -n 200; exec \"$0\" \"$@\"", &program];
    let args = args.iter().map(String::as_str);
    let server = Program::spawn("/bin/sh", script.into_iter().chain(args), &[]);
    let is_healthy = async || http_get(health, "/healthz").await.map(|_| ());
    eventually("the server serves", LIMIT, is_healthy).await;
    let _silent = silent(Ipv4Addr::new(127, 0, 0, 2), agents).await;
    server.wait_for_log("too many open files", LIMIT).await;
    eventually("the refused connections count", LIMIT, async || {
        let labels = [("listener", "agent"), ("reason", "too_many_connections")];
        let metrics = scrape(health).await.map_err(|error| error.to_string())?;
        let count = value(&metrics, "culvert_rejected_total", &labels);
        (count > 0.0).then_some(()).ok_or(count.to_string())
    })
    .await;
    let answer = timely("an answer", http_get(health, "/healthz")).await;
    assert!(answer.unwrap().0.is_success());
}

#[tokio::test]
async fn connections_to_endpoints_leave_descriptors_for_health_checks() {
    let services = Services::start().await.unwrap();
    let target = services.silent.to_string();
    let mut topology = Topology::simple(Mode::HttpConnect, Transport::Uds).await;
    let health = topology.agent_health(0);
    let args = topology.agent(0).args();
    topology.kill_agent(0);
    server_shows(&topology, "ready_backends", &[], 0.0).await;
    let program = ours("culvert-agent").display().to_string();
    let script = ["-c", "ulimit -n 200; exec \"$0\" \"$@\"", &program];
    let args = args.iter().map(String::as_str);
    let agent = Program::spawn("/bin/sh", script.into_iter().chain(args), &[]);
    server_shows(&topology, "ready_backends", &[], 1.0).await;
    let mut connections = Vec::new();
    let refused = loop {
        match timely("a dial", topology.connect(&target)).await {
            Ok(connection) => connections.push(connection),
            Err(error) => break error,
        }
    };
    let text = "socket: too many open files; raise the limit";
    let refused = refused.refusal().unwrap();
    assert!(refused.contains(text), "{refused}");
    agent.wait_for_log("dial refused", LIMIT).await;
    let mut idle = Vec::new();
    for _ in 0..3 {
        idle.push(TcpStream::connect(health).await.unwrap());
    }
    let answer = timely("an answer", http_get(health, "/healthz")).await;
    assert!(answer.unwrap().0.is_success());
}
