//! Our programs and stock programs that stop, die and restart while the other side keeps running.

use std::net::SocketAddrV4;

use culvert_kit::check;
use culvert_tests::namespace::alone;
use culvert_tests::openvpn::cluster::{NODE, NODE_ACCESSED, POD, RAW};
use culvert_tests::openvpn::scenario::Dial as _;
use culvert_tests::openvpn::{Cluster, OpenVpn, kkp, scenario};
use culvert_tests::topology::PATIENCE;
use culvert_tests::{Signal, eventually};
use tokio::io::AsyncReadExt as _;
use tokio::time::timeout;

use crate::agent::{Agent, platform_file};
use crate::server::{Server, client_with, masquerade};

const TO: SocketAddrV4 = SocketAddrV4::new(POD, RAW);

/// Number of bytes that a test sends to check that a tunnel works again.
const LITTLE: u64 = 200_001;

async fn echoes(server: &Server) {
    let stream = server.dial(TO).await.unwrap();
    check::echo(stream, 5, 1000).await.unwrap();
}

/// Dials an endpoint, and returns the text of the expected error.
async fn refusal(server: &Server) -> String {
    let dialed = server.dial(TO).await;
    dialed.err().expect("a failed dial").to_string()
}

async fn our_server_and_its_clients(proto: &str) {
    let Some(openvpn) = OpenVpn::get() else {
        return;
    };
    let cluster = Cluster::start().await;
    masquerade(&cluster);
    let clients = cluster.dir("culvert").join("clients");
    std::fs::create_dir_all(&clients).unwrap();
    std::fs::write(clients.join("DEFAULT"), "iroute 172.25.0.0 255.255.0.0\n").unwrap();
    let listen = format!("--openvpn-listen={proto}::1194");
    // The server's own timeout is twice as long as the timeout of its clients.
    let flags = [&listen, "--openvpn-ping=1s", "--openvpn-ping-restart=3s"];
    let server = Server::start(&cluster, "http-connect", &flags).await;
    let with = format!("--proto {proto}");
    let start = || {
        let pair = &cluster.pki.user_cluster;
        client_with(openvpn, &cluster, "tun5", pair, &with)
    };
    let mut user = start();
    user.is_up().await;
    server.has_clients(1).await;

    // The only client stops: dials fail with the reason, and open connections end.
    let mut open = server.dial(TO).await.unwrap();
    user.program.signal(Signal::STOP);
    let why = refusal(&server).await;
    let told = [
        "timed out waiting for backend dial",
        "ended while the dial was pending",
    ];
    assert!(told.iter().any(|text| why.contains(text)), "{why}");
    server.has_clients(0).await;
    server.says("nothing received for 6 s").await;
    let why = refusal(&server).await;
    assert!(why.contains("No OpenVPN client available"), "{why}");
    let ended = timeout(PATIENCE, open.read_to_end(&mut Vec::new())).await;
    ended.expect("the end of an open connection").ok();
    user.program.signal(Signal::CONT);
    user.is_up_again(2).await;
    server.has_clients(1).await;
    scenario::reaches_everything(&server, &cluster, NODE).await;

    // Our agent stops. The server tries the agent first because the agent is the newer client.
    let config = platform_file(&cluster, &format!("proto {proto}\n"));
    let pair = &cluster.pki.internal;
    let flags = [
        format!("--openvpn-config={}", config.display()),
        format!("--openvpn-cert={}", pair.cert.display()),
        format!("--openvpn-key={}", pair.key.display()),
    ];
    let mut agent = Agent::start(&cluster.client, &flags.each_ref().map(String::as_str));
    agent.is_ready(true).await;
    server.has_clients(2).await;
    agent.program.signal(Signal::STOP);
    echoes(&server).await;
    server.says("dial moved to another OpenVPN client").await;
    server.has_clients(1).await;
    agent.program.signal(Signal::CONT);
    agent.says("lost the OpenVPN server").await;
    server.has_clients(2).await;
    agent.is_ready(true).await;
    scenario::carries(&server, POD, LITTLE).await;

    // The client is killed and replaced. Over UDP, the new client usually connects before the server misses the
    // old client.
    const REPLACED: &str = "replaced by a newer client of the same name";
    const MISSED: &str = "nothing received for 6 s";
    let missed = server.program.log().matches(MISSED).count();
    user.program.kill();
    let mut user = start();
    user.is_up().await;
    server.has_clients(2).await;
    scenario::reaches_everything(&server, &cluster, NODE).await;
    if proto == "udp" {
        // On a loaded machine, the server may miss the old client before the new client has started.
        eventually("the old client is gone", PATIENCE, async || {
            let log = server.program.log();
            let gone = log.contains(REPLACED) || log.matches(MISSED).count() > missed;
            gone.then_some(()).ok_or("neither replaced nor missed")
        })
        .await;
    }

    // The server is killed: all clients connect to the next server on their own.
    drop(server);
    let server = Server::start(&cluster, "http-connect", &[&listen]).await;
    user.is_up_again(2).await;
    server.has_clients(2).await;
    agent.is_ready(true).await;
    scenario::carries(&server, POD, LITTLE).await;
}

#[test]
fn our_server_and_its_clients_recover_over_tcp() {
    alone(async || our_server_and_its_clients("tcp").await);
}

#[test]
fn our_server_and_its_clients_recover_over_udp() {
    alone(async || our_server_and_its_clients("udp").await);
}

async fn our_agent_and_a_stock_server(proto: &str) {
    let Some(openvpn) = OpenVpn::get() else {
        return;
    };
    let cluster = Cluster::start().await;
    let seed = &cluster.seed;
    let options = kkp::server(&cluster.pki, &cluster.dir("server"))
        .with(&format!("--proto {proto} --ping 1"))
        .with("--push \"ping 1\" --push \"ping-restart 3\"");
    let mut server = openvpn.start(seed, &options);
    server.is_up().await;
    let config = platform_file(&cluster, &format!("proto {proto}\n"));
    let config = format!("--openvpn-config={}", config.display());
    let mut agent = Agent::start(&cluster.client, &[&config]);
    agent.is_ready(true).await;
    scenario::carries(seed, POD, LITTLE).await;

    server.program.signal(Signal::STOP);
    agent.says("nothing received for 3 s").await;
    agent.is_ready(false).await;
    server.program.signal(Signal::CONT);
    agent.is_ready(true).await;
    scenario::carries(seed, POD, LITTLE).await;

    server.program.kill();
    agent.is_ready(false).await;
    let mut server = openvpn.start(seed, &options);
    server.is_up().await;
    agent.is_ready(true).await;
    scenario::reaches_everything(seed, &cluster, NODE_ACCESSED).await;
    scenario::carries(seed, POD, LITTLE).await;
}

#[test]
fn our_agent_recovers_from_server_outages_over_tcp() {
    alone(async || our_agent_and_a_stock_server("tcp").await);
}

#[test]
fn our_agent_recovers_from_server_outages_over_udp() {
    alone(async || our_agent_and_a_stock_server("udp").await);
}
