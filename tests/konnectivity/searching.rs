//! An agent's search for servers: silent servers, duplicates, tokens and outbound proxies.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use culvert_host::tls::{Identity, TlsOptions, server_config};
use culvert_kit::pki::{CLUSTER_NAME, Pair, Pki};
use culvert_tests::kube_api::KubeApi;
use culvert_tests::metrics::scrape;
use culvert_tests::ports::Ports;
use culvert_tests::{
    Executable, Mode, Program, Topology, Transport, black_hole, eventually, namespace,
};
use parking_lot::Mutex;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use crate::scripts::{Server, acceptor};
use crate::support::*;

/// A single agent outside of any topology.
pub(crate) struct Lone {
    program: Option<Program>,
    /// Address of the health listener.
    pub health: SocketAddr,
    /// Certificates of the agent and of servers.
    pub pki: Pki,
    admin_port: u16,
    _ports: Ports,
    /// Temporary folder. Tests may add files.
    pub dir: TempDir,
}

impl Lone {
    /// Prepares folder, certificates and ports. Does not start the agent.
    pub(crate) fn new() -> Self {
        let dir = tempfile::Builder::new()
            .prefix("culvert-")
            .tempdir()
            .unwrap();
        let mut ports = Ports::default();
        Self {
            program: None,
            health: (Ipv4Addr::LOCALHOST, ports.next_port()).into(),
            pki: Pki::create(dir.path()).unwrap(),
            admin_port: ports.next_port(),
            _ports: ports,
            dir,
        }
    }

    /// Starts the agent with additional flags and environment variables.
    pub(crate) fn start(&mut self, args: &[&str], env: &[(&str, &str)]) {
        let mut all = vec![
            format!("--agent-cert={}", self.pki.agent.cert.display()),
            format!("--agent-key={}", self.pki.agent.key.display()),
            format!("--ca-cert={}", self.pki.ca.display()),
            "--proxy-server-host=127.0.0.1".into(),
            "--health-server-host=127.0.0.1".into(),
            format!("--health-server-port={}", self.health.port()),
            format!("--admin-server-port={}", self.admin_port),
            "--agent-id=agent-0".into(),
            "--sync-interval=100ms".into(),
            "--sync-interval-cap=200ms".into(),
            "--v=2".into(),
        ];
        all.extend(args.iter().copied().map(String::from));
        self.program = Some(Program::spawn("culvert-agent", all, env));
    }

    /// Returns the running agent.
    pub(crate) fn program(&mut self) -> &mut Program {
        self.program.as_mut().expect("a running agent")
    }

    /// Kills the agent.
    pub(crate) fn kill(&mut self) {
        self.program = None;
    }

    /// Waits until a metric of the agent has the value `expected`.
    pub(crate) async fn shows(&self, name: &str, expected: f64) {
        let name = agent_name(name);
        eventually(&format!("{name} is {expected}"), LIMIT, async || {
            let metrics = scrape(self.health)
                .await
                .map_err(|error| error.to_string())?;
            let shown = value(&metrics, &name, &[]);
            (shown == expected)
                .then_some(())
                .ok_or_else(|| shown.to_string())
        })
        .await;
    }
}

fn port(server: &Server) -> String {
    format!("--proxy-server-port={}", server.addr.port())
}

#[tokio::test]
async fn agent_leaves_a_duplicate_server_and_keeps_searching() {
    let mut lone = Lone::new();
    let ids = ["a", "a", "a", "b"];
    let mut server = Server::start(&lone.pki.cluster, &ids, "2").await;
    lone.start(&[&port(&server)], &[]);
    let mut first = server.call().await;
    for _ in 0..2 {
        server.call().await.hear_end().await;
    }
    // If handshakes take long, the agent has made further attempts meanwhile. One call stays open.
    let mut later = vec![server.call().await];
    lone.shows("open_server_connections", 2.0).await;
    // The agent has kept its first connection to the duplicate server.
    first.say(crate::scripts::close_request(1)).await;
    assert_eq!(
        first.hear().await,
        crate::scripts::close_response(1, "Unknown connectID")
    );
    while server.has_call() {
        later.push(server.call().await);
    }
    // The agent replaces the connection to a lost server.
    drop(later);
    server.call().await;
}

#[tokio::test]
async fn attempts_are_counted_by_outcome() {
    let mut lone = Lone::new();
    let mut server = Server::start(&lone.pki.cluster, &["a"], "2").await;
    lone.start(&[&port(&server)], &[]);
    let _call = server.call().await;
    let counted = async |outcome| {
        let metrics = scrape(lone.health).await.ok()?;
        let name = "culvert_connect_attempts_total";
        metrics.value(name, &[("outcome", outcome)])
    };
    eventually("the attempts are counted", LIMIT, async || {
        let counts = [counted("added").await, counted("duplicate").await];
        let is_counted = counts[0] == Some(1.0) && counts[1] > Some(2.0);
        is_counted
            .then_some(())
            .ok_or_else(|| format!("{counts:?}"))
    })
    .await;
    drop(server);
    eventually("a failure is counted", LIMIT, async || {
        counted("failed").await > Some(0.0)
    })
    .await;
}

/// Addresses of a name, and the server at each address. The first address has no server.
const ADDRESSES: [(&str, &str); 4] = [
    (CLUSTER_NAME, "127.0.0.5"),
    (CLUSTER_NAME, "127.0.0.6"),
    (CLUSTER_NAME, "127.0.0.7"),
    (CLUSTER_NAME, "127.0.0.8"),
];

#[test]
fn servers_at_all_addresses_of_a_name_are_found() {
    namespace::alone(async || {
        namespace::hosts(&ADDRESSES);
        let mut ports = Ports::default();
        let port = ports.next_port();
        let mut builder = Topology::builder(Mode::HttpConnect, Transport::Uds);
        for (_, address) in &ADDRESSES[1..] {
            let flags = [
                format!("--agent-port={port}"),
                format!("--agent-bind-address={address}"),
            ];
            builder = builder.server(Executable::Ours, &flags.each_ref().map(String::as_str));
        }
        let flags = [
            format!("--proxy-server-port={port}"),
            format!("--proxy-server-host={CLUSTER_NAME}"),
        ];
        let flags = flags.each_ref().map(String::as_str);
        let mut topology = builder.agent(Executable::Ours, &flags).start().await;
        topology.restart_server(1).await;
        topology.wait_for_agents().await;
    });
}

#[tokio::test]
async fn a_server_count_of_0_means_1() {
    let mut lone = Lone::new();
    let mut server = Server::start(&lone.pki.cluster, &["a"], "0").await;
    lone.start(&[&port(&server)], &[]);
    let call = server.call().await;
    lone.shows("known_server_count", 1.0).await;
    lone.shows("open_server_connections", 1.0).await;
    drop(call);
    server.call().await;
}

/// Last connection step completed by a silent server.
#[derive(Clone, Copy)]
enum Silence {
    Tcp,
    Tls,
    Preface,
}

/// Runs an agent against a server that is silent on the first connection. The agent must give up this
/// connection and open another connection.
async fn gets_past(silence: Silence) {
    let mut lone = Lone::new();
    let seen = Arc::new(AtomicUsize::new(0));
    let tls = acceptor(&lone.pki.cluster.cert, &lone.pki.cluster.key);
    let admit = {
        let seen = seen.clone();
        move |mut stream: TcpStream| {
            let is_first = seen.fetch_add(1, Ordering::Relaxed) == 0;
            let tls = tls.clone();
            async move {
                if !is_first {
                    return Some(stream);
                }
                match silence {
                    Silence::Tcp => {
                        // The server reads, but sends nothing, until the agent gives up.
                        stream.read_to_end(&mut Vec::new()).await.ok();
                    }
                    Silence::Tls => {
                        let mut stream = tls.accept(stream).await.unwrap();
                        stream.read_to_end(&mut Vec::new()).await.ok();
                    }
                    Silence::Preface => {
                        let stream = tls.accept(stream).await.unwrap();
                        // The server accepts the call and never answers.
                        let mut http = h2::server::handshake(stream).await.unwrap();
                        let mut held = Vec::new();
                        while let Some(Ok(call)) = http.accept().await {
                            held.push(call);
                        }
                    }
                }
                None
            }
        }
    };
    let mut server = Server::after(&lone.pki.cluster, &["a"], "1", admit).await;
    lone.start(&[&port(&server)], &[]);
    server.call().await;
    assert_eq!(seen.load(Ordering::Relaxed), 2);
    let step = match silence {
        Silence::Tcp => "timed out while waiting for the TLS handshake",
        Silence::Tls | Silence::Preface => "timed out while waiting for the server's answer",
    };
    lone.program().wait_for_log(step, LIMIT).await;
}

#[tokio::test]
async fn silent_server_does_not_stop_the_search() {
    tokio::join!(
        gets_past(Silence::Tcp),
        gets_past(Silence::Tls),
        gets_past(Silence::Preface),
    );
}

#[tokio::test]
async fn alpn_proto_is_offered_in_the_handshake() {
    let mut lone = Lone::new();
    let cluster = &lone.pki.cluster;
    let identity = Identity::load(&cluster.cert, &cluster.key).unwrap();
    let config = server_config(&identity, None, &[b"custom"], &TlsOptions::default()).unwrap();
    let tls = TlsAcceptor::from(config);
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let port = format!("--proxy-server-port={port}");
    let handshake = async || {
        let (stream, _) = listener.accept().await?;
        tls.accept(stream).await
    };
    lone.start(&[&port], &[]);
    assert!(timely("a handshake", handshake()).await.is_err());
    lone.program().wait_for_log("(ALPN)", LIMIT).await;
    lone.kill();
    lone.start(&[&port, "--alpn-proto=custom"], &[]);
    // The killed agent may have left connections in the queue of the listener.
    let stream = eventually("a handshake succeeds", LIMIT, handshake).await;
    let alpn = stream.get_ref().1.alpn_protocol();
    assert_eq!(alpn, Some(b"custom".as_slice()));
}

#[tokio::test]
async fn server_that_drops_packets_is_named_in_the_error() {
    let hole = black_hole().await;
    let mut lone = Lone::new();
    lone.start(
        &[&format!("--proxy-server-port={}", hole.addr().port())],
        &[],
    );
    let text = format!(
        "cannot reach the server: dial tcp {}: i/o timeout",
        hole.addr()
    );
    lone.program().wait_for_log(&text, LIMIT).await;
}

#[tokio::test]
async fn server_with_an_invalid_count_is_left() {
    let mut lone = Lone::new();
    let mut server = Server::start(&lone.pki.cluster, &["a"], "many").await;
    lone.start(&[&port(&server)], &[]);
    server.call().await.hear_end().await;
    lone.program().wait_for_log("is not a number", LIMIT).await;
    lone.shows("open_server_connections", 0.0).await;
}

#[tokio::test]
async fn token_file_is_read_again_for_every_connect() {
    let mut lone = Lone::new();
    let mut server = Server::start(&lone.pki.cluster, &["a"], "1").await;
    let path = lone.dir.path().join("token");
    std::fs::write(&path, "first\n").unwrap();
    let token = format!("--service-account-token-path={}", path.display());
    lone.start(&[&port(&server), &token], &[]);
    let call = server.call().await;
    assert_eq!(call.metadata.get("authorization").unwrap(), "Bearer first");
    std::fs::write(&path, "second").unwrap();
    drop(call);
    let call = server.call().await;
    assert_eq!(call.metadata.get("authorization").unwrap(), "Bearer second");
    // While the file is missing, the agent logs the problem and retries.
    std::fs::remove_file(&path).unwrap();
    drop(call);
    lone.program()
        .wait_for_log("cannot use the token", LIMIT)
        .await;
    std::fs::write(&path, "third").unwrap();
    let call = server.call().await;
    assert_eq!(call.metadata.get("authorization").unwrap(), "Bearer third");
}

/// An HTTP proxy with a record of its requests.
struct Proxy {
    addr: SocketAddr,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Proxy {
    async fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let addr = listener.local_addr().unwrap();
        let asked: Arc<Mutex<Vec<String>>> = Arc::default();
        let seen = asked.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(tunnel(stream, seen.clone()));
            }
        });
        Self { addr, asked }
    }
}

async fn tunnel(mut stream: TcpStream, asked: Arc<Mutex<Vec<String>>>) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    let head = String::from_utf8(head).unwrap();
    let target = head.split(' ').nth(1).unwrap().to_owned();
    asked.lock().push(head);
    let mut far = TcpStream::connect(target).await.unwrap();
    stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
    copy_bidirectional(&mut stream, &mut far).await.ok();
}

/// Creates a server certificate for 0.0.0.0. The address leads to this machine, but does not count as
/// loopback under Go's rules. Returns certificate and key, and the agent's flag for the CA.
fn wildcard_pair(lone: &Lone) -> (Pair, String) {
    let mut ca = CertificateParams::new(Vec::new()).unwrap();
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca_key = KeyPair::generate().unwrap();
    let ca_cert = ca.self_signed(&ca_key).unwrap();
    let key = KeyPair::generate().unwrap();
    let leaf = CertificateParams::new(vec!["0.0.0.0".to_owned()]).unwrap();
    let cert = leaf.signed_by(&key, &Issuer::new(ca, ca_key)).unwrap();
    let file = |name: &str, text: String| {
        let path = lone.dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let pair = Pair {
        cert: file("any.crt", cert.pem()),
        key: file("any.key", key.serialize_pem()),
    };
    let ca = file("any-ca.crt", ca_cert.pem());
    (pair, format!("--ca-cert={}", ca.display()))
}

#[tokio::test]
async fn https_proxy_is_used_unless_no_proxy_lists_the_server() {
    let proxy = Proxy::start().await;
    let url = format!("http://user:secret@{}", proxy.addr);
    let mut lone = Lone::new();
    let (pair, ca) = wildcard_pair(&lone);
    let mut server = Server::start(&pair, &["a"], "1").await;
    let args = [port(&server), ca, "--proxy-server-host=0.0.0.0".into()];
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    lone.start(&args, &[("HTTPS_PROXY", &url)]);
    server.call().await;
    let asked = std::mem::take(&mut *proxy.asked.lock());
    let line = format!("CONNECT 0.0.0.0:{} HTTP/1.1\r\n", server.addr.port());
    assert!(asked[0].starts_with(&line), "{asked:?}");
    assert!(
        asked[0]
            .to_lowercase()
            .contains("\r\nproxy-authorization: basic "),
        "{asked:?}"
    );
    assert!(!lone.program().log().contains("secret"));

    lone.program = None;
    proxy.asked.lock().clear();
    let mut server = Server::start(&pair, &["a"], "1").await;
    let port = port(&server);
    let args = [port.as_str(), args[1], args[2]];
    let mut direct = Lone::new();
    direct.start(
        &args,
        &[("HTTPS_PROXY", &url), ("NO_PROXY", "example.org,0.0.0.0")],
    );
    server.call().await;
    direct.shows("open_server_connections", 1.0).await;
    assert_eq!(*proxy.asked.lock(), Vec::<String>::new());
}

#[tokio::test]
async fn a_loopback_server_is_reached_without_the_proxy() {
    let proxy = Proxy::start().await;
    let mut lone = Lone::new();
    let mut server = Server::start(&lone.pki.cluster, &["a"], "1").await;
    let url = format!("http://{}", proxy.addr);
    lone.start(
        &[&port(&server)],
        &[("https_proxy", &url), ("HTTP_PROXY", &url)],
    );
    server.call().await;
    assert!(proxy.asked.lock().is_empty());
}

/// Returns the flag of a kubeconfig for `api` under another URL, with more fields of the cluster.
fn account(lone: &Lone, api: &KubeApi, url: &str, fields: &str) -> String {
    let path = api.kubeconfig(lone.dir.path());
    let text = std::fs::read_to_string(&path).unwrap();
    let server = format!("server: {}\n", api.url());
    assert!(text.contains(&server));
    let text = text.replace(&server, &format!("server: {url}\n{fields}"));
    std::fs::write(&path, text).unwrap();
    format!("--kubeconfig={}", path.display())
}

/// Waits until the agent has listed the leases.
async fn leases_are_listed(api: &KubeApi) {
    eventually("the agent lists leases", LIMIT, async || {
        let paths = api.requests().into_iter().map(|request| request.path);
        let paths: Vec<String> = paths.collect();
        let listed = paths.iter().any(|path| path.contains("/leases"));
        listed.then_some(()).ok_or(format!("{paths:?}"))
    })
    .await;
}

#[tokio::test]
async fn kubernetes_api_is_reached_through_the_proxy_unless_no_proxy_lists_the_api() {
    let proxy = Proxy::start().await;
    let url = format!("http://user:secret@{}", proxy.addr);
    let mut lone = Lone::new();
    let (pair, ca) = wildcard_pair(&lone);
    let identity = Identity::load(&pair.cert, &pair.key).unwrap();
    let config = server_config(&identity, None, &[], &TlsOptions::default()).unwrap();
    let api = KubeApi::start().await;
    api.use_tls(config);
    let port = api.addr().port();
    let ca = ca.trim_start_matches("--ca-cert=");
    let ca = format!("    certificate-authority: {ca}\n");
    let kubeconfig = account(&lone, &api, &format!("https://0.0.0.0:{port}"), &ca);
    let args = [
        "--proxy-server-port=1",
        "--count-server-leases",
        &kubeconfig,
    ];

    // An empty entry in NO_PROXY is common, and Go ignores the entry.
    let excluded = [("HTTPS_PROXY", url.as_str()), ("NO_PROXY", "0.0.0.0,")];
    lone.start(&args, &excluded);
    leases_are_listed(&api).await;
    assert_eq!(*proxy.asked.lock(), Vec::<String>::new());
    lone.program = None;

    lone.start(
        &args,
        &[("HTTPS_PROXY", &url), ("NO_PROXY", "example.org,")],
    );
    // The API may still count a request of the killed agent, so only the proxy shows the new agent.
    let asked = eventually("the agent asks the proxy", LIMIT, async || {
        proxy.asked.lock().first().cloned().ok_or("nothing yet")
    })
    .await;
    let before = api.requests().len();
    eventually("the agent lists leases again", LIMIT, async || {
        let count = api.requests().len();
        (count > before).then_some(()).ok_or(count.to_string())
    })
    .await;
    let line = format!("CONNECT 0.0.0.0:{port} HTTP/1.1\r\n");
    assert!(asked.starts_with(&line), "{asked:?}");
    let asked = asked.to_lowercase();
    let authorization = "\r\nproxy-authorization: basic dxnlcjpzzwnyzxq=\r\n";
    assert!(asked.contains(authorization), "{asked:?}");
    assert!(!lone.program().log().contains("secret"));
}

#[tokio::test]
async fn kubeconfig_with_a_proxy_url_overrides_the_environment() {
    let (proxy, other) = (Proxy::start().await, Proxy::start().await);
    let mut lone = Lone::new();
    let api = KubeApi::start().await;
    let fields = format!("    proxy-url: http://{}\n", proxy.addr);
    let kubeconfig = account(&lone, &api, &api.url(), &fields);
    let url = format!("http://{}", other.addr);
    let env = [("HTTPS_PROXY", url.as_str()), ("NO_PROXY", "*")];
    let args = [
        "--proxy-server-port=1",
        "--count-server-leases",
        &kubeconfig,
    ];
    lone.start(&args, &env);
    leases_are_listed(&api).await;
    let asked = proxy.asked.lock().remove(0);
    let line = format!("CONNECT {} HTTP/1.1\r\n", api.addr());
    assert!(asked.starts_with(&line), "{asked:?}");
    assert_eq!(*other.asked.lock(), Vec::<String>::new());
}

#[tokio::test]
async fn kubeconfig_with_an_unusable_proxy_url_stops_the_start_without_its_password() {
    let mut lone = Lone::new();
    let api = KubeApi::start().await;
    let fields = "    proxy-url: socks5://user:secret@proxy.example\n";
    let kubeconfig = account(&lone, &api, &api.url(), fields);
    let args = [
        "--proxy-server-port=1",
        "--count-server-leases",
        &kubeconfig,
    ];
    lone.start(&args, &[]);
    assert!(!lone.program().wait_exit(LIMIT).await.success());
    let log = lone.program().log();
    assert!(log.contains("proxy-url must be http://"), "{log}");
    assert!(!log.contains("secret"), "{log}");
}
