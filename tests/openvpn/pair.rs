//! Our server with our agent, without a stock OpenVPN program.

use std::net::SocketAddrV4;
use std::time::Duration;

use culvert_tests::namespace::alone;
use culvert_tests::openvpn::cluster::{NODE, POD, SEED};
use culvert_tests::openvpn::pki::Pair;
use culvert_tests::openvpn::scenario::{BULK, Dial as _};
use culvert_tests::openvpn::{Cluster, OpenVpn, scenario};
use culvert_tests::topology::PATIENCE;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::timeout;

use crate::agent::{Agent, platform_file};
use crate::server::Server;

/// Port of a service that refuses uploads.
const REFUSING: u16 = 7010;

/// Checks the answer of a service that refuses uploads: the service answers, then closes without reading the rest.
async fn early_answers_arrive(server: &Server, cluster: &Cluster) {
    const ANSWER: &[u8] = b"413 too large\n";
    let at = SocketAddrV4::new(POD, REFUSING);
    let listener = cluster.node.listen(at);
    for _ in 0..20 {
        let mut stream = server.dial(at).await.unwrap();
        let refuse = async {
            let (mut socket, _) = listener.accept().await.unwrap();
            socket.read_exact(&mut [0; 1024]).await.unwrap();
            socket.write_all(ANSWER).await.unwrap();
            // Unread input turns this close into a reset.
            drop(socket);
        };
        let ask = async {
            // The tunnel may close the connection during the upload.
            stream.write_all(&[7; 64 << 10]).await.ok();
            let mut answer = vec![0; ANSWER.len()];
            stream.read_exact(&mut answer).await.unwrap();
            answer
        };
        let both = async { tokio::join!(refuse, ask) };
        let ((), answer) = timeout(PATIENCE, both).await.unwrap();
        assert_eq!(answer, ANSWER);
    }
}

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
    early_answers_arrive(&server, &cluster).await;
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
