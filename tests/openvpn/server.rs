//! Our server in place of the platform's server: with stock clients, with every front end, and without
//! privileges.

use std::net::SocketAddrV4;
use std::ops::{Deref, DerefMut};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use culvert_kit::client::{self, BoxedStream, FrontEnd};
use culvert_tests::namespace::alone;
use culvert_tests::openvpn::cluster::{NODE, POD, RAW, SEED, SEED_INSIDE};
use culvert_tests::openvpn::pki::Pair;
use culvert_tests::openvpn::scenario::{BULK, Dial};
use culvert_tests::openvpn::stock::{Options, lost_pings};
use culvert_tests::openvpn::{Cluster, OpenVpn, Stock, kkp, scenario};
use culvert_tests::topology::PATIENCE;
use culvert_tests::{Signal, eventually};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::ours::{Ours, readable};

/// The server's address in the tunnel.
const SERVER: &str = "10.20.0.1";

/// Networks of pods, Services and nodes in the platform's configuration of its server.
const NETWORKS: &str = "172.25.0.0/16,10.240.16.0/20,10.254.0.0/16";

/// A running server and its front end.
pub(crate) struct Server {
    ours: Ours,
    front_end: FrontEnd,
}

impl Deref for Server {
    type Target = Ours;

    fn deref(&self) -> &Ours {
        &self.ours
    }
}

impl DerefMut for Server {
    fn deref_mut(&mut self) -> &mut Ours {
        &mut self.ours
    }
}

impl Server {
    /// Starts the server in the seed as the user nobody, with the platform's settings and additional flags.
    pub(crate) async fn start(cluster: &Cluster, mode: &str, flags: &[&str]) -> Self {
        let dir = cluster.dir("culvert");
        let _ = kkp::server(&cluster.pki, &dir);
        readable(&[dir.parent().unwrap(), cluster.pki.ca.parent().unwrap()]);
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o777)).unwrap();
        let socket = dir.join(format!("{mode}.sock"));
        let front_end = match mode {
            "grpc" => FrontEnd::GrpcUds(socket.clone()),
            _ => FrontEnd::ConnectUds(socket.clone()),
        };
        let pair = &cluster.pki.server;
        let file = |flag: &str, path: &Path| format!("--{flag}={}", path.display());
        let mut words = vec![
            "--server-port=0".to_owned(),
            "--tunnel-mode=openvpn".to_owned(),
            format!("--mode={mode}"),
            file("uds-name", &socket),
            file("cluster-cert", &pair.cert),
            file("cluster-key", &pair.key),
            file("openvpn-ca", &cluster.pki.ca),
            file("openvpn-cert", &pair.cert),
            file("openvpn-key", &pair.key),
            file("openvpn-client-config-dir", &dir.join("clients")),
            format!("--openvpn-route={NETWORKS}"),
            format!("--openvpn-push-route={NETWORKS}"),
        ];
        words.extend(flags.iter().map(|flag| (*flag).to_owned()));
        let series = "culvert_openvpn_";
        let ours = Ours::start(&cluster.seed, "culvert-server", 8092, series, &words);
        let server = Self { ours, front_end };
        server
            .program
            .wait_for_log("serving OpenVPN", PATIENCE)
            .await;
        server
    }

    /// Waits until `wanted` clients are connected. If `wanted` is not 0, also waits until a client has routes.
    pub(crate) async fn has_clients(&self, wanted: usize) {
        self.has(wanted, wanted > 0).await;
    }

    /// Waits until `wanted` clients are connected, and until the server is ready (`routed` is true) or not
    /// ready. The server is ready if at least one client has routes.
    async fn has(&self, wanted: usize, routed: bool) {
        let what = format!("{wanted} clients are connected");
        eventually(&what, PATIENCE, async || {
            let clients = self.metric("clients", &[]).await;
            let answer = self.get("/readyz").await.unwrap();
            let ready = answer.starts_with("HTTP/1.1 200") == routed;
            let page = self.get("/metrics").await.unwrap();
            let gauge = format!("\nculvert_tunnel_ready {}\n", u8::from(routed));
            (clients == wanted as f64 && ready && page.contains(&gauge))
                .then_some(())
                .ok_or_else(|| format!("{clients} clients: {answer}"))
        })
        .await;
    }
}

impl Dial for Server {
    async fn dial(&self, to: SocketAddrV4) -> std::io::Result<BoxedStream> {
        let stream = client::connect(&self.front_end, &to.to_string(), PATIENCE).await;
        stream.map_err(std::io::Error::other)
    }
}

/// Starts the platform's client in the user cluster.
pub(crate) fn user_cluster(openvpn: &OpenVpn, cluster: &Cluster, name: &str) -> Stock {
    let dir = cluster.dir(name);
    let options = kkp::user_cluster_client(&cluster.pki, &dir, &SEED.to_string());
    openvpn.start(&cluster.client, &options)
}

/// Starts a stock client in the user cluster with other options. `name` is the name of the tun device.
pub(crate) fn client_with(
    openvpn: &OpenVpn,
    cluster: &Cluster,
    name: &str,
    pair: &Pair,
    with: &str,
) -> Stock {
    let with = format!("--remote {SEED} 1194 {with}");
    client_at(openvpn, cluster, name, pair, &with)
}

/// Starts a stock client like [`client_with`]. The options in `with` must contain the server's address.
pub(crate) fn client_at(
    openvpn: &OpenVpn,
    cluster: &Cluster,
    name: &str,
    pair: &Pair,
    with: &str,
) -> Stock {
    let ca: &PathBuf = &cluster.pki.ca;
    let options = Options::default()
        .with("--client --nobind --verb 4 --remote-cert-tls server --dev-type tun")
        .with(&format!("--dev {name}"))
        .identity(ca, pair)
        .with(with);
    openvpn.start(&cluster.client, &options)
}

/// Adds the masquerading rule of the platform's client, for tests with another client.
pub(crate) fn masquerade(cluster: &Cluster) {
    cluster
        .client
        .iptables("-t nat -I POSTROUTING -s 10.20.0.0/24 -j MASQUERADE");
}

#[test]
fn our_server_replaces_the_platforms_server() {
    alone(async || {
        let Some(openvpn) = OpenVpn::get() else {
            return;
        };
        let cluster = Cluster::start().await;
        let flags = ["--openvpn-listen=tcp::1194", "--openvpn-duplicate-cn"];
        let server = Server::start(&cluster, "http-connect", &flags).await;
        server.has_clients(0).await;
        let mut user = user_cluster(openvpn, &cluster, "user");
        user.is_up().await;
        server.has_clients(1).await;

        server.has_no_privileges();

        let pause = Duration::from_millis(200);
        assert_eq!(lost_pings(&cluster.client, SERVER, 3, pause).await, 0);
        scenario::reaches_everything(&server, &cluster, NODE).await;
        scenario::carries(&server, POD, BULK).await;
        scenario::carries_many(&server, POD, 50).await;
        scenario::refuses(&server, POD).await;

        // A pod of the control plane, with the platform's packet filter rules.
        let sidecar = &cluster.sidecar;
        let dir = cluster.dir("sidecar");
        let options = kkp::sidecar(&cluster.pki, &dir, &SEED_INSIDE.to_string());
        let mut inside = openvpn.start(sidecar, &options);
        inside.is_up().await;
        server.has_clients(2).await;
        kkp::node_access_at_sidecar(sidecar, &[NODE]);
        scenario::reaches_everything(sidecar, &cluster, NODE).await;
        scenario::carries(sidecar, POD, BULK).await;
        assert_eq!(lost_pings(sidecar, &POD.to_string(), 3, pause).await, 0);
        // The cluster cannot reach the seed, even with a route.
        cluster.client.ip("route add 10.20.0.0/24 dev kube");
        let intruder = cluster.client.run("ping", "-c 1 -W 1 10.20.0.10").await;
        assert!(intruder.is_err(), "{intruder:?}");
        assert!(
            server
                .metric("dropped_packets_total", &[("reason", "filtered")])
                .await
                > 0.0
        );

        // The client is killed and restarted.
        user.program.kill();
        server.has(1, false).await;
        let mut user = user_cluster(openvpn, &cluster, "user");
        user.is_up().await;
        server.has_clients(2).await;
        scenario::reaches_everything(&server, &cluster, NODE).await;
        let established = [("outcome", "established")];
        assert_eq!(server.metric("handshakes_total", &established).await, 3.0);
        inside.stop().await;
        server.has_clients(1).await;
    });
}

#[test]
fn grpc_front_end_reaches_everything_over_tcp_and_udp() {
    alone(async || {
        let Some(openvpn) = OpenVpn::get() else {
            return;
        };
        let cluster = Cluster::start().await;
        masquerade(&cluster);
        for proto in ["tcp", "udp"] {
            let listen = format!("--openvpn-listen={proto}::1194");
            let mut server = Server::start(&cluster, "grpc", &[&listen]).await;
            let pair = &cluster.pki.user_cluster;
            let with = format!("--proto {proto}");
            let mut user = client_with(openvpn, &cluster, "tun5", pair, &with);
            user.is_up().await;
            server.has_clients(1).await;
            scenario::reaches_everything(&server, &cluster, NODE).await;
            scenario::carries_many(&server, POD, 20).await;
            scenario::refuses(&server, POD).await;
            server.program.signal(Signal::TERM);
            server.program.wait_exit(PATIENCE).await;
            // The stopping server notifies the client, and the client restarts.
            user.says("process restarting", 1).await;
            user.stop().await;
        }
    });
}

#[test]
fn our_server_renews_keys_under_load() {
    alone(async || {
        let Some(openvpn) = OpenVpn::get() else {
            return;
        };
        let cluster = Cluster::start().await;
        masquerade(&cluster);
        let flags = [
            "--openvpn-listen=tcp::1194",
            "--openvpn-listen=udp::1194",
            "--openvpn-reneg-sec=5",
            "--openvpn-duplicate-cn",
        ];
        let server = Server::start(&cluster, "http-connect", &flags).await;
        let pair = &cluster.pki.user_cluster;
        for proto in ["tcp", "udp"] {
            let with = format!("--proto {proto} --reneg-sec 0");
            let mut user = client_with(openvpn, &cluster, "tun5", pair, &with);
            user.is_up().await;
            server.has_clients(1).await;
            let before = server
                .metric("renegotiations_total", &[("outcome", "done")])
                .await;
            let pings = lost_pings(&cluster.client, SERVER, 100, Duration::from_millis(150));
            let traffic = async {
                for _ in 0..3 {
                    scenario::carries(&server, POD, BULK).await;
                    tokio::time::sleep(Duration::from_secs(2)).await;
                }
            };
            let (lost, ()) = tokio::join!(pings, traffic);
            assert_eq!(lost, 0, "{proto}");
            let done = server
                .metric("renegotiations_total", &[("outcome", "done")])
                .await;
            assert!(done - before >= 2.0, "{proto}: {done} {before}");
            user.stop().await;
            if proto == "tcp" {
                server.has_clients(0).await;
            }
        }
        let failed = [("outcome", "failed")];
        assert_eq!(server.metric("renegotiations_total", &failed).await, 0.0);
    });
}

/// Runs a stock client that starts three renegotiations while bytes pass in both directions without a pause.
/// Our server starts no renegotiation.
async fn a_client_renews_keys(with: &str) {
    let Some(openvpn) = OpenVpn::get() else {
        return;
    };
    let cluster = Cluster::start().await;
    masquerade(&cluster);
    let flags = [
        "--openvpn-listen=tcp::1194",
        "--openvpn-listen=udp::1194",
        "--openvpn-reneg-sec=0",
    ];
    let server = Server::start(&cluster, "http-connect", &flags).await;
    let pair = &cluster.pki.user_cluster;
    let with = format!("{with} --reneg-sec 8");
    let mut user = client_with(openvpn, &cluster, "tun5", pair, &with);
    user.is_up().await;
    server.has_clients(1).await;

    let stop = CancellationToken::new();
    let stream = server.dial(SocketAddrV4::new(POD, RAW)).await.unwrap();
    let stream = tokio::spawn(scenario::steady(stream, stop.clone()));
    eventually("three renegotiations", PATIENCE, async || {
        let outcome = [("outcome", "done")];
        let done = server.metric("renegotiations_total", &outcome).await;
        (done >= 3.0).then_some(()).ok_or(done)
    })
    .await;
    assert!(!stream.is_finished(), "the stream ended too early");
    stop.cancel();
    let carried = timeout(PATIENCE, stream)
        .await
        .expect("the rest of the stream");
    let carried = carried.unwrap().unwrap();
    eprintln!("{with}: {carried} bytes either way");
    // The last keys work, too.
    scenario::carries(&server, POD, BULK).await;

    let log = user.program.log();
    assert!(log.matches("TLS: soft reset sec=").count() >= 3, "{log}");
    for complaint in ["TLS Error", "TLS handshake failed", "Authenticate/Decrypt"] {
        let line = log.lines().find(|line| line.contains(complaint));
        assert_eq!(line, None);
    }
    let dropped = async |reason| {
        let label = [("reason", reason)];
        server.metric("dropped_packets_total", &label).await
    };
    // Over UDP, a client may send packets after the notification of its end, and the session is unknown then.
    assert_eq!(dropped("unknown_session").await, 0.0);
    user.stop().await;
    // After the end of the session, the metrics contain all counts of the session.
    server.has_clients(0).await;
    for reason in ["malformed", "not_authentic"] {
        assert_eq!(dropped(reason).await, 0.0, "{reason}");
    }
    let failed = [("outcome", "failed")];
    assert_eq!(server.metric("renegotiations_total", &failed).await, 0.0);
}

#[test]
fn a_client_renews_keys_under_load_over_tcp() {
    alone(async || a_client_renews_keys("--proto tcp").await);
}

#[test]
fn a_client_renews_keys_under_load_over_udp() {
    alone(async || a_client_renews_keys("--proto udp --explicit-exit-notify 1").await);
}

#[test]
fn two_clients_of_one_name_coexist_only_with_duplicate_cn() {
    alone(async || {
        let Some(openvpn) = OpenVpn::get() else {
            return;
        };
        let cluster = Cluster::start().await;
        masquerade(&cluster);
        let pair = &cluster.pki.user_cluster;
        let listen = "--openvpn-listen=tcp::1194";
        let flags = [listen, "--openvpn-duplicate-cn"];
        let mut server = Server::start(&cluster, "http-connect", &flags).await;
        let with = "--proto tcp --connect-retry 300";
        let mut old = client_with(openvpn, &cluster, "tun5", pair, with);
        old.is_up().await;
        let mut new = client_with(openvpn, &cluster, "tun6", pair, with);
        new.is_up().await;
        server.has_clients(2).await;
        scenario::reaches_everything(&server, &cluster, NODE).await;
        new.program.kill();
        server.has_clients(1).await;
        scenario::reaches_everything(&server, &cluster, NODE).await;
        old.program.kill();
        server.program.signal(Signal::TERM);
        server.program.wait_exit(PATIENCE).await;

        let server = Server::start(&cluster, "http-connect", &[listen]).await;
        let mut old = client_with(openvpn, &cluster, "tun5", pair, with);
        old.is_up().await;
        // Both clients have one address and one gateway in one namespace, so the kernel may choose the old client's interface
        // for a route of the new client. The test adds the route when the old client's address is gone.
        let with = format!("{with} --route-noexec");
        let mut new = client_with(openvpn, &cluster, "tun6", pair, &with);
        new.is_up().await;
        server
            .says("replaced by a newer client of the same name")
            .await;
        old.says("process restarting", 1).await;
        cluster
            .client
            .ip("route add 10.20.0.1 via 10.20.0.5 dev tun6");
        server.has_clients(1).await;
        scenario::reaches_everything(&server, &cluster, NODE).await;
    });
}

#[test]
fn rejected_clients_are_logged_and_do_not_affect_others() {
    alone(async || {
        let Some(openvpn) = OpenVpn::get() else {
            return;
        };
        let cluster = Cluster::start().await;
        let flags = ["--openvpn-listen=tcp::1194", "--openvpn-ccd-exclusive"];
        let server = Server::start(&cluster, "http-connect", &flags).await;
        let pki = &cluster.pki;
        let refused = |count: f64| {
            let server = &server;
            async move {
                let what = format!("{count} TLS failures are counted");
                eventually(&what, PATIENCE, async || {
                    let failed = [("outcome", "tls_failed")];
                    let seen = server.metric("handshakes_total", &failed).await;
                    (seen >= count).then_some(()).ok_or(seen)
                })
                .await;
            }
        };
        let cases = [
            (&pki.stranger.client, "our CA"),
            (&pki.expired.client, "expired"),
            (&pki.swapped.client, "clientAuth"),
        ];
        for (number, (pair, text)) in cases.into_iter().enumerate() {
            let name = format!("tun{number}");
            let with = "--proto tcp --connect-retry 300";
            let client = client_with(openvpn, &cluster, &name, pair, with);
            server.says(text).await;
            refused(number as f64 + 1.0).await;
            client.program.kill();
        }
        // The client has a valid certificate, but no file in the directory of client configurations.
        let client = client_with(openvpn, &cluster, "tun9", &pki.internal, "--proto tcp");
        client.says("AUTH_FAILED", 1).await;
        server.says("ccd-exclusive").await;
        let rejected = [("outcome", "rejected")];
        assert_eq!(server.metric("handshakes_total", &rejected).await, 1.0);
        let with = "--proto tcp --data-ciphers AES-256-CBC";
        let client = client_with(openvpn, &cluster, "tun7", &pki.user_cluster, with);
        client.says("AUTH_FAILED", 1).await;
        server.says("add a cipher of the client").await;
        let log = server.program.log();
        let line = log.lines().find(|line| line.contains("add a cipher"));
        for part in ["user-cluster-client", "offers AES-256-CBC,", "AES-256-GCM"] {
            assert!(line.unwrap().contains(part), "{part}: {line:?}");
        }
        // Input that is not OpenVPN ends only the connection that carries it.
        for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 64], &[0, 14, 0xff, 1]] {
            let to = SocketAddrV4::new(SEED, 1194);
            let mut stream = cluster.client.connect(to).await.unwrap();
            stream.write_all(garbage).await.unwrap();
            stream.shutdown().await.unwrap();
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer).await;
        }
        let pair = &pki.user_cluster;
        let mut user = client_with(openvpn, &cluster, "tun8", pair, "--proto tcp");
        user.is_up().await;
        server.has_clients(1).await;
        for secret in ["BEGIN", "PRIVATE"] {
            assert!(!server.program.log().contains(secret), "{secret}");
        }
    });
}

#[test]
fn a_refused_server_certificate_is_logged() {
    alone(async || {
        let Some(openvpn) = OpenVpn::get() else {
            return;
        };
        let cluster = Cluster::start().await;
        let pki = &cluster.pki;
        let cases = [
            (&pki.stranger.server, "", "VERIFY ERROR"),
            (&pki.expired.server, "expired at", "certificate has expired"),
            (
                &pki.swapped.server,
                "serverAuth is needed",
                "unsuitable certificate purpose",
            ),
        ];
        for (number, (pair, doubt, theirs)) in cases.into_iter().enumerate() {
            let cert = format!("--openvpn-cert={}", pair.cert.display());
            let key = format!("--openvpn-key={}", pair.key.display());
            let flags = ["--openvpn-listen=tcp::1194", &cert, &key];
            let server = Server::start(&cluster, "http-connect", &flags).await;
            let log = server.program.log();
            let line = log.lines().find(|line| line.contains("will refuse"));
            let line = line.unwrap_or_default();
            let named = line.contains(pair.cert.to_str().unwrap()) && line.contains(doubt);
            assert!(named != doubt.is_empty(), "{line}");
            let name = format!("tun{number}");
            let good = &pki.user_cluster;
            let client = client_with(openvpn, &cluster, &name, good, "--proto tcp");
            client.says(theirs, 1).await;
            server
                .says("the peer may refuse our certificate silently (its log says why)")
                .await;
            server.has_clients(0).await;
        }
    });
}
