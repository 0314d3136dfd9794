//! A stock client that stops answering although its session is open, beside a peer that answers.

use std::net::SocketAddrV4;
use std::time::Duration;

use culvert_kit::check;
use culvert_server::tunnel::Kind;
use culvert_tests::namespace::alone;
use culvert_tests::openvpn::cluster::{POD, RAW};
use culvert_tests::openvpn::scenario::Dial as _;
use culvert_tests::openvpn::{Cluster, OpenVpn};
use culvert_tests::topology::PATIENCE;
use culvert_tests::{Signal, eventually, process};
use tokio::io::AsyncWriteExt as _;
use tokio::time::sleep;

use crate::agent::{Agent, platform_file};
use crate::server::{Server, client_with, masquerade, user_cluster};
use crate::switching::{Both, konnectivity, way};

const TO: SocketAddrV4 = SocketAddrV4::new(POD, RAW);

/// Number of dials, one after another.
const DIALS: usize = 25;

/// Log line of a dial that moves to another client.
const MOVED: &str = "dial moved to another OpenVPN client";

/// Log line about a client that becomes silent.
const SILENT: &str = "the OpenVPN client does not answer";

/// Dials one after another, and checks an echo over each connection.
async fn dials(server: &Server) {
    for _ in 0..DIALS {
        let stream = server.dial(TO).await.unwrap();
        check::echo(stream, 1, 64).await.unwrap();
        sleep(Duration::from_millis(50)).await;
    }
}

/// The stock client is newer than the agent, so the server prefers it. While the stock client is frozen, one dial
/// waits for it.
async fn frozen_client_delays_one_dial(proto: &str) {
    let Some(openvpn) = OpenVpn::get() else {
        return;
    };
    let cluster = Cluster::start().await;
    masquerade(&cluster);
    let clients = cluster.dir("culvert").join("clients");
    std::fs::create_dir_all(&clients).unwrap();
    std::fs::write(clients.join("DEFAULT"), "iroute 172.25.0.0 255.255.0.0\n").unwrap();
    let listen = format!("--openvpn-listen={proto}::1194");
    let server = Server::start(&cluster, "http-connect", &[&listen]).await;
    let config = platform_file(&cluster, &format!("proto {proto}\n"));
    let pair = &cluster.pki.internal;
    let flags = [
        format!("--openvpn-config={}", config.display()),
        format!("--openvpn-cert={}", pair.cert.display()),
        format!("--openvpn-key={}", pair.key.display()),
    ];
    let mut agent = Agent::start(&cluster.client, &flags.each_ref().map(String::as_str));
    agent.is_ready(true).await;
    let with = format!("--proto {proto}");
    let pair = &cluster.pki.user_cluster;
    let mut user = client_with(openvpn, &cluster, "tun5", pair, &with);
    user.is_up().await;
    server.has_clients(2).await;
    dials(&server).await;
    assert_eq!(server.program.log().matches(MOVED).count(), 0);

    user.program.signal(Signal::STOP);
    dials(&server).await;
    let log = server.program.log();
    assert_eq!(log.matches(MOVED).count(), 1, "{log}");
    assert_eq!(log.matches(SILENT).count(), 1, "{log}");

    user.program.signal(Signal::CONT);
    // A connection through the agent would be counted there.
    eventually("the client gets dials again", PATIENCE, async || {
        let mut stream = server.dial(TO).await.unwrap();
        stream.write_all(b"echo\n").await.unwrap();
        let page = agent.get("/metrics").await.unwrap();
        let idle = "konnectivity_network_proxy_agent_open_endpoint_connections 0";
        page.lines()
            .any(|line| line == idle)
            .then_some(())
            .ok_or(page)
    })
    .await;
}

#[test]
fn frozen_stock_client_delays_one_dial_over_tcp() {
    alone(async || frozen_client_delays_one_dial("tcp").await);
}

#[test]
fn frozen_stock_client_delays_one_dial_over_udp() {
    alone(async || frozen_client_delays_one_dial("udp").await);
}

#[test]
fn frozen_stock_client_delays_one_dial_of_a_server_with_agents() {
    alone(async || {
        let Some(openvpn) = OpenVpn::get() else {
            return;
        };
        let cluster = Cluster::start().await;
        let both = Both::start(&cluster, "http-connect").await;
        let way = way(&cluster);
        let mut user = user_cluster(openvpn, &cluster, "user");
        let agent = process::ours("culvert-agent");
        let _agent = cluster.client.spawn(&agent, &konnectivity(&cluster));
        user.is_up().await;
        both.is_healthy().await;
        both.culvert(&["switch", "--to", "prefer-openvpn"]).await;
        both.new_dials_go_to(Kind::Openvpn).await;
        dials(&both.server).await;
        assert_eq!(both.dials(Kind::Konnectivity, "opened").await, 0.0);

        user.program.signal(Signal::STOP);
        dials(&both.server).await;
        assert_eq!(both.dials(Kind::Openvpn, "moved").await, 1.0);
        assert_eq!(both.dials(Kind::Openvpn, "opened").await, DIALS as f64);
        let opened = both.dials(Kind::Konnectivity, "opened").await;
        assert_eq!(opened, DIALS as f64);

        user.program.signal(Signal::CONT);
        both.is_healthy().await;
        dials(&both.server).await;
        let opened = both.dials(Kind::Openvpn, "opened").await;
        assert_eq!(opened, 2.0 * DIALS as f64);
        way.abort();
    });
}
