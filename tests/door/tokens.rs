//! Agents that come through the door as KKP runs them: by server name, with a service account
//! token that the server has reviewed.

use std::net::SocketAddr;
use std::path::Path;

use culvert::lab::check;
use culvert::lab::client::{self, FrontEnd};
use culvert::lab::pki::Pki;
use culvert::lab::services::Services;
use culvert_tests::interop::Interop;
use culvert_tests::kube_api::{Fault, KubeApi, TokenStatus};
use culvert_tests::metrics::{http_get, scrape};
use culvert_tests::ports::Ports;
use culvert_tests::{Program, eventually};
use tempfile::TempDir;

use crate::support::{Door, LIMIT, Upstream};

const USER: &str = "system:serviceaccount:kube-system:system-konnectivity-agent";
const AUDIENCE: &str = "system:konnectivity-server";

/// A server behind the door, with the arguments that KKP gives it but for paths and ports.
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
    async fn start(server: &Path) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let pki = Pki::create(dir.path()).unwrap();
        let api = KubeApi::start().await;
        let kubeconfig = api.kubeconfig(dir.path());
        let mut ports = Ports::default();
        let [agent, admin, health] =
            [(); 3].map(|()| SocketAddr::from(([127, 0, 0, 1], ports.next_port())));
        let socket = dir.path().join("konnectivity-server.socket");
        let args = [
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
            "--admin-bind-address=0.0.0.0".to_owned(),
            format!("--health-port={}", health.port()),
            "--agent-namespace=kube-system".to_owned(),
            "--agent-service-account=system-konnectivity-agent".to_owned(),
            "--delete-existing-uds-file=true".to_owned(),
            format!("--authentication-audience={AUDIENCE}"),
            "--proxy-strategies=default".to_owned(),
            "--keepalive-time=1m".to_owned(),
            "--xfr-channel-size=150".to_owned(),
        ];
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
        Self::start(Path::new("culvert-server")).await
    }

    /// An agent with the arguments that KKP gives it, which connects to the door.
    fn agent(&mut self, program: &Path, token: &str) -> Program {
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
            format!("--health-server-port={}", self.ports.next_port()),
            format!("--service-account-token-path={}", path.display()),
            "--keepalive-time=1m".to_owned(),
            "--xfr-channel-size=150".to_owned(),
        ];
        Program::spawn(program, &args, &[])
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

    async fn refused(&self) -> f64 {
        let labels = [("listener", "agent"), ("reason", "unauthenticated")];
        let metrics = scrape(self.health).await.unwrap();
        metrics
            .value("culvert_rejected_total", &labels)
            .unwrap_or_default()
    }
}

#[tokio::test]
async fn agents_come_through_the_door_with_their_token() {
    let services = Services::start().await.unwrap();
    let mut cluster = Cluster::ours().await;
    cluster
        .api
        .token("good", TokenStatus::user(USER).audiences(&[AUDIENCE]));
    let agent = cluster.agent(Path::new("culvert-agent"), "good\n");
    cluster.ready_agents(1.0).await;
    cluster.carries(&services).await;
    // The native transport came through: the door passes ALPN on untouched.
    let reviews = cluster.api.reviews();
    assert_eq!(reviews[0].token, "good");
    assert_eq!(reviews[0].audiences, [AUDIENCE]);
    assert!(!agent.log().contains("good\""), "a token in a log");
    assert!(!cluster.server.log().contains("good"), "a token in a log");
    if let Some(interop) = Interop::get() {
        let stock = cluster.agent(&interop.proxy_agent, "good");
        cluster.ready_agents(2.0).await;
        agent.kill();
        cluster.ready_agents(1.0).await;
        cluster.carries(&services).await;
        drop(stock);
    }
}

/// What the API says of a token, and a part of what agent and server say then.
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
        ("human", user("jane"), "unexpected username format"),
        (
            "node",
            user("system:node:a:b"),
            "username returned is not a service account",
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
async fn every_other_token_is_refused_and_both_ends_say_why() {
    let mut cluster = Cluster::ours().await;
    for (token, status, text) in table() {
        cluster.api.token(token, status);
        let before = cluster.refused().await;
        let agent = cluster.agent(Path::new("culvert-agent"), token);
        let wanted = text.replace('"', "\\\"");
        let says = async |program: &Program, who: &str| {
            let what = format!("{who} says {text}");
            eventually(&what, LIMIT, async || {
                let log = program.log();
                (log.contains(text) || log.contains(&wanted))
                    .then_some(())
                    .ok_or("not yet")
            })
            .await;
        };
        says(&agent, "the agent").await;
        says(&cluster.server, "the server").await;
        assert!(cluster.refused().await > before, "{token}");
    }
    if let Some(interop) = Interop::get() {
        let before = cluster.refused().await;
        let _stock = cluster.agent(&interop.proxy_agent, "expired");
        eventually("the stock agent is refused", LIMIT, async || {
            cluster.refused().await > before
        })
        .await;
    }
    cluster.ready_agents(0.0).await;
}

#[tokio::test]
async fn without_an_answer_nobody_is_let_in_and_later_everybody() {
    let services = Services::start().await.unwrap();
    let mut cluster = Cluster::ours().await;
    cluster.api.token("good", TokenStatus::user(USER));
    cluster.api.fault(Fault::status(500).on("tokenreviews"));
    let agent = cluster.agent(Path::new("culvert-agent"), "good");
    agent
        .wait_for_log("Failed to authenticate request", LIMIT)
        .await;
    assert!(cluster.refused().await >= 1.0);
    cluster.api.clear_faults();
    cluster.ready_agents(1.0).await;
    cluster.carries(&services).await;
}

#[tokio::test]
async fn agents_that_come_together_cost_few_reviews() {
    let mut cluster = Cluster::ours().await;
    cluster.api.token("good", TokenStatus::user(USER));
    cluster
        .api
        .fault(Fault::delay(std::time::Duration::from_millis(300)).on("tokenreviews"));
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
