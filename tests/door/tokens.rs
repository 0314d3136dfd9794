//! Agents that connect through the front door as in KKP: by server name, and with a service account token. The
//! server sends the token to the API for review.

mod unreviewed;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use culvert_host::tls::{Identity, TlsOptions, TrustBundle, server_config};
use culvert_kit::check;
use culvert_kit::client::{self, FrontEnd};
use culvert_kit::pki::Pki;
use culvert_kit::services::Services;
use culvert_proto::Packet;
use culvert_proto::agent_service_client::AgentServiceClient;
use culvert_tests::interop::Interop;
use culvert_tests::kube_api::{Fault, KubeApi, TokenStatus};
use culvert_tests::metrics::{http_get, scrape};
use culvert_tests::ports::Ports;
use culvert_tests::rotation::{Reloads, install, install_pair, read, uses};
use culvert_tests::{Program, eventually};
use futures_util::StreamExt as _;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::ServerConfig;
use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::body::Body;
use tonic::{Code, Request, Status, Streaming};
use tower::service_fn;

use crate::support::{Door, LIMIT, Upstream, timely};

const USER: &str = "system:serviceaccount:kube-system:system-konnectivity-agent";
/// Number of calls, each on a connection of its own: fewer than a listener has slots.
const CALLS: usize = 200;

/// Number of connections opened at once. The server waits 15 s for the first call on a connection. A busy machine may need
/// more time to open all connections one after the other.
const AT_ONCE: usize = 8;

const AUDIENCE: &str = "system:konnectivity-server";

/// A server behind the front door. Its arguments are those that KKP sets, except for paths, ports and the address of its
/// admin listener.
struct Cluster {
    api: KubeApi,
    server: Program,
    door: Door,
    pki: Pki,
    socket: std::path::PathBuf,
    health: SocketAddr,
    admin: SocketAddr,
    ports: Ports,
    dir: TempDir,
}

impl Cluster {
    async fn start(server: &Path, more: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let pki = Pki::create(dir.path()).unwrap();
        let api = KubeApi::start().await;
        let kubeconfig = api.kubeconfig(dir.path());
        let mut ports = Ports::default();
        let [agent, admin, health] =
            [(); 3].map(|()| SocketAddr::from(([127, 0, 0, 1], ports.next_port())));
        let socket = dir.path().join("konnectivity-server.socket");
        let mut args = vec![
            "--logtostderr=true".to_owned(),
            "-v=3".to_owned(),
            format!("--cluster-key={}", pki.cluster.key.display()),
            format!("--cluster-cert={}", pki.cluster.cert.display()),
            format!("--uds-name={}", socket.display()),
            format!("--kubeconfig={}", kubeconfig.display()),
            "--server-count=1".to_owned(),
            "--mode=grpc".to_owned(),
            "--server-port=0".to_owned(),
            format!("--agent-port={}", agent.port()),
            format!("--admin-port={}", admin.port()),
            "--admin-bind-address=127.0.0.1".to_owned(),
            format!("--health-port={}", health.port()),
            "--agent-namespace=kube-system".to_owned(),
            "--agent-service-account=system-konnectivity-agent".to_owned(),
            "--delete-existing-uds-file=true".to_owned(),
            format!("--authentication-audience={AUDIENCE}"),
            "--proxy-strategies=default".to_owned(),
            "--keepalive-time=1m".to_owned(),
            "--xfr-channel-size=150".to_owned(),
        ];
        args.extend(more.iter().copied().map(String::from));
        let server = Program::spawn(server, &args, &[]);
        eventually("the server serves", LIMIT, async || {
            http_get(health, "/healthz").await
        })
        .await;
        let upstream = Upstream::new("cluster-x/konnectivity-server-secure", agent);
        let door = Door::start(&[upstream.server_name("localhost")]).await;
        Self {
            api,
            server,
            door,
            pki,
            socket,
            health,
            admin,
            ports,
            dir,
        }
    }

    async fn ours() -> Self {
        Self::start(Path::new("culvert-server"), &[]).await
    }

    /// Starts an agent with KKP's arguments. The agent connects to the front door.
    fn agent(&mut self, program: &Path, token: &str) -> Program {
        self.agent_with_metrics(program, token).0
    }

    /// Starts an agent like [`Cluster::agent`], and also returns the address of the agent's metrics.
    fn agent_with_metrics(&mut self, program: &Path, token: &str) -> (Program, SocketAddr) {
        let health = SocketAddr::from(([127, 0, 0, 1], self.ports.next_port()));
        let path = self
            .dir
            .path()
            .join(format!("token-{}", self.ports.next_port()));
        std::fs::write(&path, token).unwrap();
        let args = [
            "--logtostderr=true".to_owned(),
            "-v=3".to_owned(),
            "--sync-forever=true".to_owned(),
            format!("--ca-cert={}", self.pki.ca.display()),
            "--proxy-server-host=localhost".to_owned(),
            format!("--proxy-server-port={}", self.door.sni.port()),
            format!("--admin-server-port={}", self.ports.next_port()),
            format!("--health-server-port={}", health.port()),
            format!("--service-account-token-path={}", path.display()),
            "--keepalive-time=1m".to_owned(),
            "--xfr-channel-size=150".to_owned(),
        ];
        (Program::spawn(program, &args, &[]), health)
    }

    async fn ready_agents(&self, count: f64) {
        let name = "konnectivity_network_proxy_server_ready_backend_connections";
        eventually("the agents are connected", LIMIT, async || {
            let metrics = scrape(self.admin)
                .await
                .map_err(|error| format!("{error:#}"))?;
            let ready = metrics.value(name, &[]).unwrap_or_default();
            (ready == count)
                .then_some(())
                .ok_or(format!("{ready} agents"))
        })
        .await;
    }

    async fn carries(&self, services: &Services) {
        let front = FrontEnd::GrpcUds(self.socket.clone());
        let stream = client::connect(&front, &services.raw.to_string(), LIMIT)
            .await
            .unwrap();
        check::echo(stream, 5, 10_000).await.unwrap();
    }

    /// Opens a TLS connection through the front door.
    async fn tls(&self) -> TlsStream<TcpStream> {
        let socket = TcpStream::connect(self.door.sni).await.unwrap();
        let tls = TlsConnector::from(self.pki.client_tls(&self.pki.agent, &["h2"]).unwrap());
        let name = "localhost".try_into().unwrap();
        let stream = timely("a TLS handshake", tls.connect(name, socket)).await;
        stream.unwrap()
    }

    /// Opens a connection through the front door for gRPC calls of the test.
    async fn caller(&self) -> Caller {
        let io = TokioIo::new(self.tls().await);
        let (sender, connection) = http2::handshake(TokioExecutor::new(), io).await.unwrap();
        tokio::spawn(connection);
        Caller(sender)
    }

    /// Opens [`CALLS`] connections, and then makes a call on each at the same time with one token, as many agents would.
    async fn calls(&self, token: &str) -> Vec<Result<Streaming<Packet>, Status>> {
        let callers = some_at_once((0..CALLS).map(|_| self.caller())).await;
        let mut calls = JoinSet::new();
        for caller in callers {
            let value = format!("Bearer {token}");
            calls.spawn(async move { caller.call(&[&value]).await });
        }
        calls.join_all().await
    }

    async fn refused(&self, reason: &str) -> f64 {
        let labels = [("listener", "agent"), ("reason", reason)];
        let metrics = scrape(self.health).await.unwrap();
        metrics
            .value("culvert_rejected_total", &labels)
            .unwrap_or_default()
    }
}

/// Runs the futures, [`AT_ONCE`] at a time.
async fn some_at_once<F: Future>(all: impl Iterator<Item = F>) -> Vec<F::Output> {
    let all = futures_util::stream::iter(all);
    all.buffer_unordered(AT_ONCE).collect().await
}

/// Returns the number of packets of one type that an agent has sent.
async fn packets(agent: SocketAddr, packet_type: &str) -> f64 {
    let name = "konnectivity_network_proxy_agent_stream_packets_total";
    let labels = [("segment", "from_agent"), ("packet_type", packet_type)];
    let metrics = scrape(agent).await.unwrap();
    metrics.value(name, &labels).unwrap_or_default()
}

/// The agent's side of a connection, for calls with any metadata.
#[derive(Clone)]
struct Caller(http2::SendRequest<Body>);

impl Caller {
    /// Calls `Connect` with these values of the metadata key `authorization`.
    async fn call(self, authorization: &[&str]) -> Result<Streaming<Packet>, Status> {
        let service = service_fn(move |request| self.0.clone().send_request(request));
        let origin = http::Uri::from_static("https://localhost");
        let mut client = AgentServiceClient::with_origin(service, origin);
        let mut request = Request::new(tokio_stream::pending());
        let metadata = request.metadata_mut();
        metadata.insert("agentid", "caller".parse().unwrap());
        for value in authorization {
            metadata.append("authorization", value.parse().unwrap());
        }
        let answer = timely("the server's answer", client.connect(request)).await;
        Ok(answer?.into_inner())
    }
}

#[tokio::test]
async fn agents_connect_through_the_door_with_their_token() {
    let services = Services::start().await.unwrap();
    let mut cluster = Cluster::ours().await;
    let token = "no-log-has-this-token";
    let status = TokenStatus::user(USER).audiences(&[AUDIENCE]);
    cluster.api.token(token, status);
    let ours = Path::new("culvert-agent");
    let (agent, metrics) = cluster.agent_with_metrics(ours, &format!("{token}\n"));
    cluster.ready_agents(1.0).await;
    cluster.carries(&services).await;
    // The agent uses the native transport, which has no DATA packets: the front door does not change ALPN.
    assert_eq!(packets(metrics, "DIAL_RSP").await, 1.0);
    assert_eq!(packets(metrics, "DATA").await, 0.0);
    let reviews = cluster.api.reviews();
    assert_eq!(reviews[0].token, token);
    assert_eq!(reviews[0].audiences, [AUDIENCE]);
    for program in [&agent, &cluster.server] {
        assert!(!program.log().contains(token), "the token is in a log");
    }
    if let Some(interop) = Interop::get() {
        let (stock, metrics) = cluster.agent_with_metrics(&interop.proxy_agent, token);
        cluster.ready_agents(2.0).await;
        agent.kill();
        cluster.ready_agents(1.0).await;
        cluster.carries(&services).await;
        assert!(packets(metrics, "DATA").await > 0.0);
        drop(stock);
    }
}

/// Returns rows of a token, the API's answer for this token, and a text that agent and server log as a result.
fn table() -> Vec<(&'static str, TokenStatus, &'static str)> {
    let user = TokenStatus::user;
    vec![
        (
            "expired",
            TokenStatus::rejected("token has expired"),
            "lookup failed: token has expired",
        ),
        (
            "unknown",
            TokenStatus::rejected(""),
            "service account jwt not valid",
        ),
        (
            "failed",
            TokenStatus {
                error: "an authenticator failed".to_owned(),
                ..user(USER)
            },
            "lookup failed: an authenticator failed",
        ),
        (
            "denied",
            TokenStatus {
                authenticated: false,
                ..user(USER)
            },
            "service account jwt not valid",
        ),
        ("human", user("jane"), "unexpected username format"),
        (
            "node",
            user("system:node:a:b"),
            "username returned is not a service account",
        ),
        (
            "long",
            user("system:serviceaccount:kube-system:system-konnectivity-agent:0"),
            "unexpected username format",
        ),
        (
            "namespace",
            user("system:serviceaccount:default:system-konnectivity-agent"),
            "incoming request from \"default\" namespace. Expected \"kube-system\"",
        ),
        (
            "name",
            user("system:serviceaccount:kube-system:other"),
            "incoming request from \"other\" service account. Expected \"system-konnectivity-agent\"",
        ),
    ]
}

#[tokio::test]
async fn every_other_token_is_refused_and_both_ends_log_the_reason() {
    let mut cluster = Cluster::ours().await;
    for (token, status, text) in table() {
        cluster.api.token(token, status);
        let wanted = text.replace('"', "\\\"");
        let lines = |program: &Program| {
            let log = program.log();
            let is_reason = |line: &&str| line.contains(text) || line.contains(&wanted);
            log.lines().filter(is_reason).count()
        };
        // Rows may share a text.
        let lines_before = lines(&cluster.server);
        let before = cluster.refused("unauthenticated").await;
        let agent = cluster.agent(Path::new("culvert-agent"), token);
        let says = async |program: &Program, who: &str, lines_before: usize| {
            let what = format!("{who} logs {text}");
            eventually(&what, LIMIT, async || {
                (lines(program) > lines_before)
                    .then_some(())
                    .ok_or("not yet")
            })
            .await;
        };
        says(&agent, "the agent", 0).await;
        says(&cluster.server, "the server", lines_before).await;
        assert!(cluster.refused("unauthenticated").await > before, "{token}");
    }
    if let Some(interop) = Interop::get() {
        let before = cluster.refused("unauthenticated").await;
        let _stock = cluster.agent(&interop.proxy_agent, "expired");
        eventually("the stock agent is refused", LIMIT, async || {
            cluster.refused("unauthenticated").await > before
        })
        .await;
    }
    cluster.ready_agents(0.0).await;
}

#[tokio::test]
async fn a_call_needs_one_bearer_token_for_the_audience_of_the_server() {
    let cluster = Cluster::ours().await;
    let elsewhere = TokenStatus::user(USER).audiences(&["https://elsewhere"]);
    cluster.api.token("elsewhere", elsewhere);
    // An API that ignores audiences returns none.
    let nowhere = TokenStatus::user(USER).audiences(&[]);
    cluster.api.token("nowhere", nowhere);
    let both = TokenStatus::user(USER).audiences(&["https://elsewhere", AUDIENCE]);
    cluster.api.token("both", both);
    let rows: [(&[&str], &str); 7] = [
        (&[], "Authentication context was not found in metadata"),
        (
            &["Bearer elsewhere", "Bearer elsewhere"],
            "too many (2) tokens are received",
        ),
        (
            &["elsewhere"],
            "received token does not have \"Bearer \" prefix",
        ),
        (
            &["bearer elsewhere"],
            "received token does not have \"Bearer \" prefix",
        ),
        (
            &["Bearer unheard of"],
            "Failed to validate authentication token, err:lookup failed: invalid bearer token",
        ),
        (
            &["Bearer elsewhere"],
            "Failed to validate authentication token, err:lookup failed: the token is valid for the audiences \
             [\"https://elsewhere\"]. Expected \"system:konnectivity-server\"",
        ),
        (
            &["Bearer nowhere"],
            "Failed to validate authentication token, err:lookup failed: the token is valid for the audiences []. \
             Expected \"system:konnectivity-server\"",
        ),
    ];
    for (count, (authorization, text)) in rows.iter().enumerate() {
        let status = cluster.caller().await.call(authorization).await;
        let status = status.expect_err(text);
        assert_eq!((status.code(), status.message()), (Code::Unknown, *text));
        assert_eq!(cluster.refused("unauthenticated").await, count as f64 + 1.0);
    }
    let asked = cluster.api.reviews();
    assert_eq!(
        asked.len(),
        3,
        "only a well-formed token is reviewed: {asked:?}"
    );
    cluster.ready_agents(0.0).await;
    let call = cluster.caller().await.call(&["Bearer both"]).await;
    cluster.ready_agents(1.0).await;
    drop(call.unwrap());
}

#[tokio::test]
async fn agents_are_refused_while_the_api_fails_and_accepted_afterwards() {
    let services = Services::start().await.unwrap();
    let mut cluster = Cluster::ours().await;
    cluster.api.token("good", TokenStatus::user(USER));
    cluster.api.fault(Fault::status(500).on("tokenreviews"));
    let agent = cluster.agent(Path::new("culvert-agent"), "good");
    agent
        .wait_for_log("Failed to authenticate request", LIMIT)
        .await;
    assert!(cluster.refused("review_failed").await >= 1.0);
    assert_eq!(cluster.refused("unauthenticated").await, 0.0);
    cluster.api.clear_faults();
    cluster.ready_agents(1.0).await;
    cluster.carries(&services).await;
}

#[tokio::test]
async fn agents_that_connect_at_once_need_few_reviews() {
    let mut cluster = Cluster::ours().await;
    cluster.api.token("good", TokenStatus::user(USER));
    cluster
        .api
        .fault(Fault::delay(Duration::from_millis(300)).on("tokenreviews"));
    let agents: Vec<Program> = (0..20)
        .map(|_| cluster.agent(Path::new("culvert-agent"), "good"))
        .collect();
    cluster.ready_agents(20.0).await;
    let reviews = cluster.api.reviews().len();
    assert!(
        reviews <= 3,
        "{reviews} reviews for {} agents",
        agents.len()
    );
}

#[tokio::test]
async fn many_calls_with_one_token_need_few_reviews() {
    let cluster = Cluster::ours().await;
    cluster.api.token("good", TokenStatus::user(USER));
    let slow = Fault::delay(Duration::from_secs(1));
    cluster.api.fault(slow.on("tokenreviews"));
    // One after the other, the calls would take 200 seconds.
    let calls = cluster.calls("refused").await;
    let text = "Failed to validate authentication token, err:lookup failed: invalid bearer token";
    for call in calls {
        assert_eq!(call.expect_err("a refusal").message(), text);
    }
    assert_eq!(cluster.refused("unauthenticated").await, CALLS as f64);
    let refused = cluster.api.reviews().len();
    assert!(refused <= 10, "{refused} reviews");
    let calls = cluster.calls("good").await;
    assert!(calls.iter().all(Result::is_ok));
    let good = cluster.api.reviews().len() - refused;
    assert!(good <= 3, "{good} reviews");
}

#[tokio::test]
async fn connection_gets_no_review_after_a_refusal() {
    let cluster = Cluster::ours().await;
    let caller = cluster.caller().await;
    for token in 0..5 {
        let value = format!("Bearer {token}");
        let call = caller.clone().call(&[&value]).await;
        call.expect_err("a refusal");
    }
    assert_eq!(cluster.api.reviews().len(), 1);
    // A connection may make another call after an accepted one.
    cluster.api.token("good", TokenStatus::user(USER));
    let caller = cluster.caller().await;
    for _ in 0..2 {
        caller.clone().call(&["Bearer good"]).await.unwrap();
    }
}

#[tokio::test]
async fn connections_of_a_pod_are_limited() {
    let cluster = Cluster::ours().await;
    for token in ["first", "renewed"] {
        let status = TokenStatus::user(USER).pod("agent-a");
        cluster.api.token(token, status);
    }
    cluster
        .api
        .token("other", TokenStatus::user(USER).pod("agent-b"));
    let mut calls = Vec::new();
    for _ in 0..64 {
        let call = cluster.caller().await.call(&["Bearer first"]).await;
        calls.push(call.unwrap());
    }
    let refused = cluster.caller().await.call(&["Bearer renewed"]).await;
    let text = "the agent already has 64 connections to this server";
    assert_eq!(refused.expect_err("a refusal").message(), text);
    let other = cluster.caller().await.call(&["Bearer other"]).await;
    calls.push(other.unwrap());
}

#[tokio::test]
async fn agent_ids_are_the_pods_of_tokens_if_the_server_requires_it() {
    let server = Path::new("culvert-server");
    let mut cluster = Cluster::start(server, &["--agent-id-from=token"]).await;
    for (token, pod) in [
        ("first", "agent-a"),
        ("renewed", "agent-a"),
        ("second", "agent-b"),
    ] {
        cluster.api.token(token, TokenStatus::user(USER).pod(pod));
    }
    cluster.api.token("unbound", TokenStatus::user(USER));
    // All callers claim the same id.
    let mut calls = Vec::new();
    for (token, agents) in [("first", 1.0), ("renewed", 1.0), ("second", 2.0)] {
        let value = format!("Bearer {token}");
        let call = cluster.caller().await.call(&[&value]).await;
        calls.push(call.unwrap());
        cluster.ready_agents(agents).await;
    }
    let refused = cluster.caller().await.call(&["Bearer unbound"]).await;
    let text = "the agent's token is not bound to a pod";
    let status = refused.expect_err(text);
    assert!(status.message().contains(text), "{}", status.message());
    assert_eq!(cluster.refused("unauthenticated").await, 1.0);
    // A native agent is refused with the same text.
    let agent = cluster.agent(Path::new("culvert-agent"), "unbound");
    agent.wait_for_log(text, LIMIT).await;
    cluster.ready_agents(2.0).await;
}

/// Returns the TLS configuration of an API that requires client certificates of its own CA.
fn api_tls(pki: &Pki) -> Arc<ServerConfig> {
    let identity = Identity::load(&pki.server.cert, &pki.server.key).unwrap();
    let trust = TrustBundle::load(&pki.ca).unwrap();
    server_config(&identity, Some(&trust), &[], &TlsOptions::default()).unwrap()
}

#[tokio::test]
async fn token_reviews_use_the_latest_kubeconfig_and_the_files_that_it_names() {
    let cluster = Cluster::ours().await;
    for token in ["first", "second", "third", "fourth"] {
        cluster.api.token(token, TokenStatus::user(USER));
    }
    let review = async |token: &str| {
        let value = format!("Bearer {token}");
        cluster.caller().await.call(&[&value]).await.unwrap();
        let requests = cluster.api.requests().into_iter().rev();
        let mut reviews = requests.filter(|request| request.path.contains("tokenreviews"));
        reviews.next().unwrap().authorization
    };
    let sets = [(cluster.health, "kubeconfig")];
    let kubeconfig = cluster.dir.path().join("kubeconfig");
    let account = format!("Bearer {}", culvert_tests::kube_api::TOKEN);
    assert_eq!(review("first").await, Some(account));

    let reloads = Reloads::before(&sets).await;
    let text = String::from_utf8(read(&kubeconfig)).unwrap();
    let text = text.replace(culvert_tests::kube_api::TOKEN, "renewed");
    install(text.as_bytes(), &kubeconfig);
    reloads.happen().await;
    assert_eq!(review("second").await.as_deref(), Some("Bearer renewed"));

    // The API starts to use TLS with client certificates, in files that the kubeconfig names.
    let files = cluster.dir.path().join("account");
    std::fs::create_dir(&files).unwrap();
    let old = Pki::create(&files).unwrap();
    cluster.api.use_tls(api_tls(&old));
    let text = format!(
        "{{current-context: c, contexts: [{{name: c, context: {{cluster: c, user: u}}}}], clusters: [{{name: c, \
         cluster: {{server: '{}', certificate-authority: account/ca.crt}}}}], users: [{{name: u, user: \
         {{client-certificate: account/client.crt, client-key: account/client.key}}}}]}}",
        cluster.api.url()
    );
    install(text.as_bytes(), &kubeconfig);
    let client = Some(old.client.cert.as_path());
    uses(cluster.health, "kubeconfig", client, Some(&old.ca)).await;
    assert_eq!(review("third").await, None);

    // The CA and the certificates of both sides rotate; the kubeconfig stays as it is.
    let later = cluster.dir.path().join("later");
    std::fs::create_dir(&later).unwrap();
    let new = Pki::create_valid_for(&later, 60).unwrap();
    cluster.api.use_tls(api_tls(&new));
    install_pair(&new.client, &old.client);
    install(&read(&new.ca), &old.ca);
    let client = Some(new.client.cert.as_path());
    uses(cluster.health, "kubeconfig", client, Some(&new.ca)).await;
    assert_eq!(review("fourth").await, None);
}
