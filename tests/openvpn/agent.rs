//! The agent as the client of a stock server, with the platform's configuration file and without privileges.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::time::Duration;

use culvert_tests::namespace::alone;
use culvert_tests::openvpn::cluster::{NODE_ACCESSED, POD, SEED};
use culvert_tests::openvpn::scenario::BULK;
use culvert_tests::openvpn::stock::lost_pings;
use culvert_tests::openvpn::{Cluster, Namespace, OpenVpn, kkp, scenario};
use culvert_tests::topology::PATIENCE;
use culvert_tests::{Signal, eventually};

use crate::ours::{Ours, readable};

/// The client's address in the tunnel.
const CLIENT: &str = "10.20.0.6";

/// Flag with the network of the cluster's nodes.
const NODES: &str = "--openvpn-nodes=192.168.1.0/24";

/// A running agent.
pub(crate) struct Agent(Ours);

impl Deref for Agent {
    type Target = Ours;

    fn deref(&self) -> &Ours {
        &self.0
    }
}

impl DerefMut for Agent {
    fn deref_mut(&mut self) -> &mut Ours {
        &mut self.0
    }
}

impl Agent {
    pub(crate) fn start(at: &Namespace, flags: &[&str]) -> Self {
        let flags: Vec<_> = [NODES]
            .iter()
            .chain(flags)
            .map(|f| (*f).to_owned())
            .collect();
        let series = "culvert_openvpn_client_";
        Self(Ours::start(at, "culvert-agent", 8093, series, &flags))
    }

    /// Waits until `/readyz` reports that the agent is ready, or not ready if `wanted` is false.
    pub(crate) async fn is_ready(&mut self, wanted: bool) {
        eventually(
            &format!("the agent's readiness is {wanted}"),
            PATIENCE,
            async || {
                if let Some(status) = self.program.exited() {
                    panic!("the agent exited: {status}");
                }
                let answer = self.get("/readyz?verbose").await.unwrap_or_default();
                let is = answer.starts_with("HTTP/1.1 200");
                (is == wanted && !answer.is_empty())
                    .then_some(())
                    .ok_or(answer)
            },
        )
        .await;
    }

    /// Waits until an attempt to connect is counted with this outcome.
    async fn has_outcome(&self, outcome: &str) {
        let what = format!("an attempt to connect is counted as {outcome}");
        eventually(&what, PATIENCE, async || {
            let labels = [("outcome", outcome)];
            let seen = self.metric("connects_total", &labels).await;
            (seen >= 1.0).then_some(()).ok_or(seen)
        })
        .await;
    }
}

/// Writes the platform's configuration file for the client, with the lines of `more` at the end. Returns the
/// path.
pub(crate) fn platform_file(cluster: &Cluster, more: &str) -> PathBuf {
    let dir = cluster.dir("agent");
    let _ = kkp::user_cluster_client(&cluster.pki, &dir, &SEED.to_string());
    let path = dir.join("config");
    let text = std::fs::read_to_string(&path).unwrap();
    // The platform's file still contains `keysize`, which OpenVPN 2.6 rejects.
    std::fs::write(&path, format!("{text}keysize 256\n{more}")).unwrap();
    readable(&[dir.parent().unwrap(), cluster.pki.ca.parent().unwrap()]);
    path
}

/// Exchanges UDP datagrams between the seed and the resolver of the cluster.
async fn datagrams_are_answered(cluster: &Cluster) {
    let resolver = SocketAddrV4::new(POD, 53);
    let server = cluster.node.udp(resolver);
    let client = cluster
        .seed
        .udp(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0));
    client.connect(resolver).await.unwrap();
    let (mut question, mut answer) = ([0; 2000], [0; 2000]);
    for length in [1, 512, 1400] {
        let sent = vec![7; length];
        client.send(&sent).await.unwrap();
        let exchange = async {
            let (asked, from) = server.recv_from(&mut question).await.unwrap();
            assert_eq!(question[..asked], sent);
            server.send_to(&question[..asked], from).await.unwrap();
            let answered = client.recv(&mut answer).await.unwrap();
            assert_eq!(answer[..answered], sent);
        };
        tokio::time::timeout(PATIENCE, exchange).await.unwrap();
    }
}

#[test]
fn the_agent_replaces_the_platforms_client() {
    alone(async || {
        let Some(openvpn) = OpenVpn::get() else {
            return;
        };
        let cluster = Cluster::start().await;
        let (seed, client) = (&cluster.seed, &cluster.client);
        kkp::filter_at_server(seed);
        let options = kkp::server(&cluster.pki, &cluster.dir("server"));
        let config = platform_file(&cluster, "");
        let config = format!("--openvpn-config={}", config.display());
        // The agent retries until the server runs.
        let mut agent = Agent::start(client, &[&config]);
        agent.is_ready(false).await;
        let mut server = openvpn.start(seed, &options);
        server.is_up().await;
        agent.is_ready(true).await;

        agent.has_no_privileges();
        for option in ["up: not needed", "dev: not needed", "keysize: not needed"] {
            assert!(agent.program.log().contains(option), "{option}");
        }

        let pause = Duration::from_millis(200);
        assert_eq!(lost_pings(seed, CLIENT, 3, pause).await, 0);
        scenario::reaches_everything(seed, &cluster, NODE_ACCESSED).await;
        scenario::carries(seed, POD, BULK).await;
        scenario::carries_many(seed, POD, 50).await;
        scenario::refuses(seed, POD).await;
        // A node outside the networks of `--openvpn-nodes` is refused.
        let unknown = SocketAddrV4::new(Ipv4Addr::new(10, 254, 9, 9), 10250);
        let refused = seed.connect(unknown).await.unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
        datagrams_are_answered(&cluster).await;
        assert_eq!(agent.metric("up", &[]).await, 1.0);

        // The server is killed and replaced.
        server.program.kill();
        agent.is_ready(false).await;
        agent.says("lost the OpenVPN server").await;
        let mut server = openvpn.start(seed, &options);
        server.is_up().await;
        agent.is_ready(true).await;
        scenario::reaches_everything(seed, &cluster, NODE_ACCESSED).await;
        let established = [("outcome", "established")];
        assert_eq!(agent.metric("connects_total", &established).await, 2.0);

        // While the agent drains, open connections continue. The agent exits after the last connection.
        let mut open = seed.connect(SocketAddrV4::new(POD, 7001)).await.unwrap();
        agent.program.signal(Signal::TERM);
        agent.says("draining").await;
        let sent = culvert_kit::check::echo(&mut open, 20, 1000).await;
        sent.unwrap();
        drop(open);
        let status = agent.program.wait_exit(PATIENCE).await;
        assert!(status.success(), "{status}");
        server.says("user-cluster-client", 1).await;
    });
}

#[test]
fn key_renewal_loses_no_packet() {
    alone(async || {
        let Some(openvpn) = OpenVpn::get() else {
            return;
        };
        let cluster = Cluster::start().await;
        // OpenVPN drops packets from its tun device while 64 packets wait for the client's socket. The pings must not
        // be among these packets.
        let options = kkp::server(&cluster.pki, &cluster.dir("server"))
            .with("--reneg-sec 4 --tcp-queue-limit 100000");
        let mut server = openvpn.start(&cluster.seed, &options);
        server.is_up().await;
        let config = platform_file(&cluster, "reneg-sec 3\n");
        let config = format!("--openvpn-config={}", config.display());
        let mut agent = Agent::start(&cluster.client, &[&config]);
        agent.is_ready(true).await;
        let pings = lost_pings(&cluster.seed, CLIENT, 500, Duration::from_millis(20));
        let traffic = async {
            for _ in 0..3 {
                scenario::carries(&cluster.seed, POD, BULK).await;
            }
        };
        let (lost, ()) = tokio::join!(pings, traffic);
        assert_eq!(lost, 0);
        eventually("keys were renewed", PATIENCE, async || {
            let rekeys = agent.metric("rekeys_total", &[]).await;
            (rekeys >= 3.0).then_some(()).ok_or(rekeys)
        })
        .await;
        scenario::carries(&cluster.seed, POD, BULK).await;
        assert!(!agent.program.log().contains("lost the OpenVPN server"));
    });
}

#[test]
fn flags_alone_configure_a_client_over_udp() {
    alone(async || {
        let Some(openvpn) = OpenVpn::get() else {
            return;
        };
        let cluster = Cluster::start().await;
        let (key, _) = cluster.pki.static_key();
        let options = kkp::server(&cluster.pki, &cluster.dir("server"))
            .with("--proto udp --explicit-exit-notify 1 --verb 4 --ping 1 --push \"ping 1\" --push \"ping-restart 5\"")
            .option("--tls-crypt", &key);
        let mut server = openvpn.start(&cluster.seed, &options);
        server.is_up().await;
        readable(&[cluster.pki.ca.parent().unwrap()]);
        let pair = &cluster.pki.user_cluster;
        // The first remote has no listener.
        let flags = [
            "--openvpn-remote=192.168.77.1:9".to_owned(),
            "--openvpn-remote=192.168.77.1:1194,udp".to_owned(),
            format!("--openvpn-ca={}", cluster.pki.ca.display()),
            format!("--openvpn-cert={}", pair.cert.display()),
            format!("--openvpn-key={}", pair.key.display()),
            format!("--openvpn-tls-crypt={}", key.display()),
            "--openvpn-data-ciphers=CHACHA20-POLY1305".to_owned(),
        ];
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let mut agent = Agent::start(&cluster.client, &flags);
        agent.is_ready(true).await;
        agent.has_outcome("unreachable").await;
        agent.says("CHACHA20-POLY1305").await;
        scenario::reaches_everything(&cluster.seed, &cluster, NODE_ACCESSED).await;
        scenario::carries(&cluster.seed, POD, BULK).await;

        // The stopping server asks the agent to reconnect, so the agent does not wait for a timeout. The agent reads its
        // key again.
        let text = std::fs::read(&key).unwrap();
        std::fs::write(&key, "no key").unwrap();
        server.stop().await;
        agent.says("the server asks to connect again").await;
        agent.is_ready(false).await;
        agent.has_outcome("files").await;
        std::fs::write(&key, text).unwrap();
        let mut server = openvpn.start(&cluster.seed, &options);
        server.is_up().await;
        agent.is_ready(true).await;

        // The server stops without a notification.
        server.program.signal(Signal::STOP);
        agent.says("nothing received for 5 s").await;
        server.program.signal(Signal::CONT);
        agent.is_ready(true).await;
        scenario::carries(&cluster.seed, POD, 100_000).await;

        agent.program.signal(Signal::TERM);
        agent.program.wait_exit(PATIENCE).await;
        server.says("exit message received by peer", 1).await;
    });
}

#[test]
fn mistakes_in_certificates_and_files_are_logged() {
    alone(async || {
        let Some(openvpn) = OpenVpn::get() else {
            return;
        };
        let cluster = Cluster::start().await;
        let (seed, client, pki) = (&cluster.seed, &cluster.client, &cluster.pki);
        let options = kkp::server(pki, &cluster.dir("server"));
        let mut server = openvpn.start(seed, &options);
        server.is_up().await;
        let config = platform_file(&cluster, "");
        let text = std::fs::read_to_string(&config).unwrap();
        let own = &pki.user_cluster;

        // The agent has a certificate of an unknown CA, an expired certificate, or a server certificate.
        let cases = [
            (&pki.stranger.client, ""),
            (&pki.expired.client, "expired at"),
            (&pki.swapped.client, "clientAuth is needed"),
        ];
        for (pair, doubt) in cases {
            let text = text
                .replace(own.cert.to_str().unwrap(), pair.cert.to_str().unwrap())
                .replace(own.key.to_str().unwrap(), pair.key.to_str().unwrap());
            std::fs::write(&config, text).unwrap();
            let flag = format!("--openvpn-config={}", config.display());
            let mut agent = Agent::start(client, &[&flag]);
            agent
                .says("the peer may refuse our certificate silently (its log says why)")
                .await;
            let log = agent.program.log();
            let line = log.lines().find(|line| line.contains("will refuse"));
            let line = line.unwrap_or_default();
            let named = line.contains(pair.cert.to_str().unwrap()) && line.contains(doubt);
            assert!(named != doubt.is_empty(), "{line}");
            agent.is_ready(false).await;
            assert_eq!(agent.metric("up", &[]).await, 0.0);
            agent.has_outcome("failed").await;
        }
        // The server has a certificate of another CA, a client certificate, or an expired certificate.
        std::fs::write(&config, &text).unwrap();
        let flag = format!("--openvpn-config={}", config.display());
        let ca = format!("--openvpn-ca={}", pki.stranger.server.cert.display());
        let agent = Agent::start(client, &[&flag, &ca]);
        agent.says("not signed by our CA").await;
        drop(agent);
        let mut running = server;
        let cases = [
            (&pki.swapped.server, "wrong extended key usage: serverAuth"),
            (&pki.expired.server, "renew it, or look at the clocks"),
        ];
        for (pair, told) in cases {
            running.stop().await;
            running = openvpn.start(seed, &options.clone().identity(&pki.ca, pair));
            running.is_up().await;
            let agent = Agent::start(client, &[&flag]);
            agent.says("certificate of \\\"CN=openvpn-server").await;
            agent.says(told).await;
        }
        // The server has no file for the agent in its directory of client configurations.
        running.stop().await;
        running = openvpn.start(seed, &options.clone().with("--ccd-exclusive"));
        running.is_up().await;
        let internal = &pki.internal;
        let text_of_internal = text
            .replace(own.cert.to_str().unwrap(), internal.cert.to_str().unwrap())
            .replace(own.key.to_str().unwrap(), internal.key.to_str().unwrap());
        std::fs::write(&config, text_of_internal).unwrap();
        let agent = Agent::start(client, &[&flag]);
        agent.says("the server refused us: AUTH_FAILED").await;
        agent.has_outcome("refused").await;
        drop(agent);

        // Mistakes in files prevent the start.
        std::fs::write(&config, format!("{text}fragment 1300\nfrobnicate\n")).unwrap();
        let mut agent = Agent::start(client, &[&flag]);
        let status = agent.program.wait_exit(PATIENCE).await;
        assert_eq!(status.code(), Some(1));
        let lines = text.lines().count();
        for (line, said) in [
            (lines + 1, "fragment: not supported"),
            (lines + 2, "frobnicate: not an option"),
        ] {
            agent.says(&format!("config:{line}: {said}")).await;
        }
        std::fs::write(&config, &text).unwrap();
        let key = format!("--openvpn-key={}", pki.internal.key.display());
        let cert = format!("--openvpn-cert={}", own.cert.display());
        let mut agent = Agent::start(client, &[&flag, &cert, &key]);
        let status = agent.program.wait_exit(PATIENCE).await;
        assert_eq!(status.code(), Some(1));
        agent
            .says("the private key does not belong to the certificate")
            .await;
    });
}
