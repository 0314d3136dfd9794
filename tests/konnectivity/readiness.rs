//! Readiness of servers whose agents connect through a Service that routes to ready servers only, and health checks of a
//! load balancer.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use culvert_kit::check;
use culvert_kit::services::Services;
use culvert_tests::haproxy::HaProxy;
use culvert_tests::{Executable, Mode, Topology, Transport, eventually};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};

use crate::listeners::get;
use crate::searching::Lone;
use crate::support::*;

/// A Service in front of one server: closes connections while the server is not ready.
struct Service {
    port: u16,
    refused: Arc<AtomicUsize>,
}

impl Service {
    async fn start(server: SocketAddr, health: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let refused = Arc::new(AtomicUsize::new(0));
        let count = refused.clone();
        tokio::spawn(async move {
            loop {
                let (mut client, _) = listener.accept().await.unwrap();
                if get(health, "/readyz").await.0 != 200 {
                    count.fetch_add(1, Ordering::Relaxed);
                    continue;
                }
                tokio::spawn(async move {
                    let mut server = TcpStream::connect(server).await.unwrap();
                    let _ = copy_bidirectional(&mut client, &mut server).await;
                });
            }
        });
        Self { port, refused }
    }
}

/// Starts a server, and an agent behind a Service for ready servers.
async fn start(flags: &[&str]) -> (Topology, Service, Lone) {
    let builder = Topology::builder(Mode::HttpConnect, Transport::Uds);
    let topology = builder.server(Executable::Ours, flags).start().await;
    let service = Service::start(topology.agent_address(0), topology.server_health(0)).await;
    let mut agent = Lone::new();
    let (port, pki) = (
        format!("--proxy-server-port={}", service.port),
        topology.pki(),
    );
    agent.start(
        &[
            &port,
            &format!("--ca-cert={}", pki.ca.display()),
            &format!("--agent-cert={}", pki.agent.cert.display()),
            &format!("--agent-key={}", pki.agent.key.display()),
        ],
        &[],
    );
    (topology, service, agent)
}

#[tokio::test]
async fn server_and_agent_behind_a_service_wait_for_each_other_by_default() {
    let (topology, service, agent) = start(&[]).await;
    eventually("the Service refused the agent", LIMIT, async || {
        service.refused.load(Ordering::Relaxed) > 10
    })
    .await;
    assert_eq!(get(topology.server_health(0), "/readyz").await.0, 500);
    agent.shows("open_server_connections", 0.0).await;
}

#[tokio::test]
async fn server_is_ready_while_any_strategy_has_an_agent() {
    let builder = Topology::builder(Mode::HttpConnect, Transport::Uds);
    let strategies = ["--proxy-strategies=destHost,cidr,defaultRoute,default"];
    let builder = builder.server(Executable::Ours, &strategies);
    let topology = builder.agent(Executable::Ours, &[]).start().await;
    let of_default = [("proxy_strategy", "default")];
    server_shows(&topology, "ready_backends", &of_default, 1.0).await;
    assert_eq!(get(topology.server_health(0), "/readyz").await.0, 200);
}

#[tokio::test]
async fn ready_without_agents_lets_agents_reach_a_new_server() {
    let (topology, _service, agent) = start(&["--ready-without-agents"]).await;
    agent.shows("open_server_connections", 1.0).await;
    server_shows(&topology, "ready_backends", &[], 1.0).await;
    assert_eq!(get(topology.server_health(0), "/readyz").await.0, 200);
}

#[tokio::test]
async fn health_checks_of_haproxy_pass() {
    let Some(haproxy) = HaProxy::get() else {
        return;
    };
    let services = Services::start().await.unwrap();
    let mut topology = Topology::simple(Mode::HttpConnect, Transport::Uds).await;
    for health in [topology.server_health(0), topology.agent_health(0)] {
        for path in ["/healthz", "/readyz", "/ready"] {
            let listen = SocketAddr::from(([127, 0, 0, 1], topology.next_port()));
            let (_running, line) = haproxy.check(listen, services.raw, health, path).await;
            let has_passed = line.contains("Layer7 check passed, code: 200");
            assert!(has_passed, "{path}: {line}");
            let client = TcpStream::connect(listen).await.unwrap();
            let echoed = check::echo(client, 2, 100);
            timely("an echo through haproxy", echoed).await.unwrap();
        }
    }
}
