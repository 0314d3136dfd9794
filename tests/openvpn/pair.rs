//! Our server with our agent, without a stock OpenVPN program.

use std::time::Duration;

use culvert_tests::namespace::alone;
use culvert_tests::openvpn::cluster::{NODE, POD, SEED};
use culvert_tests::openvpn::pki::Pair;
use culvert_tests::openvpn::scenario::BULK;
use culvert_tests::openvpn::{Cluster, OpenVpn, scenario};

use crate::agent::{Agent, platform_file};
use crate::server::Server;

/// Runs our server and our agent over one transport. The caller must be in the namespaces of [`alone`].
async fn need_nobody_else(proto: &str) {
    if OpenVpn::get().is_none() {
        return;
    }
    let cluster = Cluster::start().await;
    let listen = format!("--openvpn-listen={proto}::1194");
    let server = Server::start(
        &cluster,
        "http-connect",
        &[&listen, "--openvpn-reneg-sec=3"],
    )
    .await;
    let config = platform_file(&cluster, &format!("proto {proto}\n"));
    let config = format!("--openvpn-config={}", config.display());
    let mut agent = Agent::start(&cluster.client, &[&config]);
    agent.is_ready(true).await;
    server.has_clients(1).await;
    // The server translates the addresses of nodes, and the agent reverses the translation.
    scenario::reaches_everything(&server, &cluster, NODE).await;
    for _ in 0..3 {
        scenario::carries(&server, POD, BULK).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    scenario::carries_many(&server, POD, 50).await;
    scenario::refuses(&server, POD).await;
    assert!(agent.metric("rekeys_total", &[]).await >= 1.0);

    // The server is replaced.
    drop(server);
    agent.is_ready(false).await;
    let server = Server::start(&cluster, "http-connect", &[&listen]).await;
    agent.is_ready(true).await;
    server.has_clients(1).await;
    scenario::reaches_everything(&server, &cluster, NODE).await;
}

#[test]
fn our_server_and_our_agent_work_together_over_tcp() {
    alone(async || need_nobody_else("tcp").await);
}

#[test]
fn our_server_and_our_agent_work_together_over_udp() {
    alone(async || need_nobody_else("udp").await);
}

/// Log texts for each kind of wrong certificate: at the owner of the certificate, and at the peer that refuses
/// the certificate.
const REFUSALS: [(&str, &str); 3] = [
    (
        "`ca` did not sign our certificate",
        "by one of the same name",
    ),
    (
        "our certificate has expired",
        "renew it, or look at the clocks",
    ),
    (
        "our certificate is not made for this role",
        "wrong extended key usage",
    ),
];

#[test]
fn wrong_certificates_are_logged_at_both_ends() {
    alone(async || {
        if OpenVpn::get().is_none() {
            return;
        }
        let cluster = Cluster::start().await;
        let pki = &cluster.pki;
        let shows = |pair: &Pair| {
            let (cert, key) = (pair.cert.display(), pair.key.display());
            [
                format!("--openvpn-cert={cert}"),
                format!("--openvpn-key={key}"),
            ]
        };
        let config = platform_file(&cluster, "");
        let config = format!("--openvpn-config={}", config.display());
        let protos = ["tcp", "udp", "tcp"];
        let all = [&pki.stranger, &pki.expired, &pki.swapped];
        for (number, wrong) in all.into_iter().enumerate() {
            let (heard, told) = REFUSALS[number];
            let remote = format!("--openvpn-remote={SEED}:1194,{}", protos[number]);
            let listen = "--openvpn-listen=tcp::1194,udp::1194";

            let server = Server::start(&cluster, "http-connect", &[listen]).await;
            let [cert, key] = shows(&wrong.client);
            let mut agent = Agent::start(&cluster.client, &[&config, &remote, &cert, &key]);
            server
                .says("certificate of \\\"CN=user-cluster-client")
                .await;
            server.says(told).await;
            agent.says(heard).await;
            agent.is_ready(false).await;
            drop((server, agent));

            let [cert, key] = shows(&wrong.server);
            let server = Server::start(&cluster, "http-connect", &[listen, &cert, &key]).await;
            let mut agent = Agent::start(&cluster.client, &[&config, &remote]);
            agent.says("certificate of \\\"CN=openvpn-server").await;
            agent.says(told).await;
            server.says(heard).await;
            agent.is_ready(false).await;
            server.has_clients(0).await;
        }
    });
}
