//! Links between our own server and agent that break and resume.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use culvert_kit::client::BoxedStream;
use culvert_kit::pattern::Verifier;
use culvert_kit::pki::CLUSTER_NAME;
use culvert_kit::services::Services;
use culvert_tests::balancer::Balancer;
use culvert_tests::kube_api::{Fault, KubeApi, Recorded, TokenStatus};
use culvert_tests::link::{self, Conditions, FAR, Link};
use culvert_tests::metrics::{Metrics, http_get};
use culvert_tests::namespace::{alone, hosts};
use culvert_tests::{Executable, Mode, Signal, Topology, Transport, eventually};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::introductions::answer_to;
use crate::support::*;

/// Number of streams under a broken link.
const STREAMS: usize = 100;

/// The default, which the harness shortens.
pub(crate) const GRACE: &str = "--resume-grace=30s";

/// Size of an endless download, in bytes.
pub(crate) const BULK: u64 = 1 << 40;

/// Starts servers, a balancer before them, and an agent that reaches the servers through the balancer.
pub(crate) async fn start(
    servers: usize,
    server_args: &[&str],
    agent_args: &[&str],
) -> (Topology, Balancer) {
    let builder = Topology::builder(Mode::HttpConnect, Transport::Uds).servers(servers);
    let builder = builder.server_args(&[GRACE]).server_args(server_args);
    let mut topology = builder.start().await;
    let backends: Vec<SocketAddr> = (0..servers).map(|at| topology.agent_address(at)).collect();
    let balancer = Balancer::start(backends).await;
    let port = format!("--proxy-server-port={}", balancer.addr().port());
    let args = [&[port.as_str(), GRACE], agent_args].concat();
    topology.add_agent(Executable::Ours, &args).await;
    topology.wait_for_agents().await;
    (topology, balancer)
}

pub(crate) fn resumes(metrics: &Metrics, outcome: &str) -> f64 {
    value(
        metrics,
        "culvert_agent_resumes_total",
        &[("outcome", outcome)],
    )
}

/// Waits until the first server has counted `count` requests with the outcome.
pub(crate) async fn resumed(topology: &Topology, outcome: &str, count: f64) {
    eventually(&format!("{count} links {outcome}"), LIMIT, async || {
        let seen = resumes(&topology.server_metrics(0).await, outcome);
        (seen >= count).then_some(()).ok_or(seen)
    })
    .await;
}

pub(crate) async fn away(topology: &Topology, count: f64) {
    eventually(&format!("{count} agents are away"), LIMIT, async || {
        let seen = value(
            &topology.server_metrics(0).await,
            "culvert_agents_away",
            &[],
        );
        (seen == count).then_some(()).ok_or(seen)
    })
    .await;
}

pub(crate) fn closed(metrics: &Metrics) -> f64 {
    let of_reason = |reason| {
        let name = "culvert_connections_closed_total";
        value(metrics, name, &[("reason", reason)])
    };
    of_reason("agent_lost") + of_reason("server_lost")
}

/// Streams with traffic in both directions whose every byte is verified, until the end of the load.
pub(crate) struct Load {
    stop: Arc<AtomicBool>,
    tasks: JoinSet<(u64, Duration)>,
}

impl Load {
    /// Opens [`STREAMS`] streams: every tenth is a download, the others are echoes.
    pub(crate) async fn start(topology: &Topology, services: &Services) -> Self {
        let (stop, mut tasks) = (Arc::new(AtomicBool::new(false)), JoinSet::new());
        for stream in 0..STREAMS {
            let opened = open(topology, &services.raw.to_string()).await;
            match stream % 10 {
                0 => tasks.spawn(download(opened, stop.clone())),
                _ => tasks.spawn(echo(opened, stop.clone())),
            };
        }
        Self { stop, tasks }
    }

    /// Ends the load, and returns the longest time without an answer.
    pub(crate) async fn finish(self) -> Duration {
        self.stop.store(true, Ordering::Relaxed);
        let ended = timely("the end of the load", self.tasks.join_all()).await;
        assert_eq!(ended.len(), STREAMS);
        assert!(ended.iter().all(|(bytes, _)| *bytes > 0));
        ended.into_iter().map(|(_, gap)| gap).max().unwrap()
    }
}

async fn download(mut stream: BoxedStream, stop: Arc<AtomicBool>) -> (u64, Duration) {
    let command = format!("download {BULK}\n");
    stream.write_all(command.as_bytes()).await.unwrap();
    stream.flush().await.unwrap();
    let (mut verifier, mut buffer, mut gap) =
        (Verifier::default(), vec![0; 65_536], Duration::ZERO);
    while !stop.load(Ordering::Relaxed) {
        let started = Instant::now();
        let count = stream.read(&mut buffer).await.unwrap();
        assert_ne!(count, 0, "a download was cut");
        gap = gap.max(started.elapsed());
        assert_eq!(verifier.feed(&buffer[..count]), Ok(()));
    }
    (verifier.verified(), gap)
}

async fn echo(mut stream: BoxedStream, stop: Arc<AtomicBool>) -> (u64, Duration) {
    stream.write_all(b"echo\n").await.unwrap();
    let (mut rounds, mut gap) = (0_u64, Duration::ZERO);
    while !stop.load(Ordering::Relaxed) {
        let started = Instant::now();
        let sent: Vec<u8> = (0..2000_u64).map(|at| (at * 7 + rounds) as u8).collect();
        stream.write_all(&sent).await.unwrap();
        stream.flush().await.unwrap();
        let mut back = vec![0; sent.len()];
        stream.read_exact(&mut back).await.unwrap();
        assert!(back == sent, "wrong bytes in round {rounds}");
        gap = gap.max(started.elapsed());
        rounds += 1;
        sleep(Duration::from_millis(20)).await;
    }
    (rounds, gap)
}

#[tokio::test]
async fn reset_links_cut_no_stream_and_change_no_byte() {
    let services = Services::start().await.unwrap();
    let (topology, balancer) = start(1, &[], &[]).await;
    let load = Load::start(&topology, &services).await;
    for count in 1..=10 {
        balancer.reset();
        resumed(&topology, "resumed", f64::from(count)).await;
    }
    let gap = load.finish().await;
    println!("longest gap after a reset: {gap:?}");
    assert!(gap < Duration::from_secs(6), "{gap:?}");
    for metrics in [
        topology.server_metrics(0).await,
        topology.agent_metrics(0).await,
    ] {
        assert_eq!(closed(&metrics), 0.0, "{}", metrics.text());
    }
    server_shows(&topology, "ready_backends", &[], 1.0).await;
}

#[tokio::test]
async fn link_to_one_of_several_servers_finds_the_server_again() {
    let services = Services::start().await.unwrap();
    let (topology, balancer) = start(3, &[], &[]).await;
    let load = Load::start(&topology, &services).await;
    for _ in 0..3 {
        balancer.reset();
        eventually("all links have resumed", LIMIT, async || {
            let metrics = topology.agent_metrics(0).await;
            let links = value(&metrics, &agent_name("open_server_connections"), &[]);
            let missing = value(&metrics, "culvert_servers_away", &[]);
            (links == 3.0 && missing == 0.0)
                .then_some(())
                .ok_or_else(|| format!("{links} links, {missing} away"))
        })
        .await;
    }
    load.finish().await;
    assert_eq!(closed(&topology.agent_metrics(0).await), 0.0);
}

#[test]
fn silence_of_the_link_ends_with_another_connection() {
    if !link::is_possible() {
        return;
    }
    alone(async || {
        let link = Link::start(Conditions::default(), 1).unwrap();
        let services = Services::start().await.unwrap();
        hosts(&[(CLUSTER_NAME, FAR)]);
        let host = format!("--proxy-server-host={CLUSTER_NAME}");
        let topology = Topology::builder(Mode::HttpConnect, Transport::Uds)
            .servers(1)
            .server_args(&["--agent-bind-address=0.0.0.0", GRACE])
            .agent_args(&[&host, GRACE])
            .agents(1)
            .start()
            .await;
        let load = Load::start(&topology, &services).await;
        link.set_dark(true);
        let outage = Duration::from_secs(5);
        sleep(outage).await;
        link.set_dark(false);
        resumed(&topology, "resumed", 1.0).await;
        let gap = load.finish().await;
        println!("longest gap after {outage:?} of silence: {gap:?}");
        assert!(gap < outage + Duration::from_secs(6), "{gap:?}");
        assert_eq!(closed(&topology.server_metrics(0).await), 0.0);
    });
}

#[tokio::test]
async fn dial_during_a_break_waits_for_the_only_agent() {
    let services = Services::start().await.unwrap();
    let (topology, balancer) = start(1, &[], &[]).await;
    let mut innocent = Innocent::open(&topology, services.raw).await;
    balancer.set(Vec::new());
    balancer.reset();
    away(&topology, 1.0).await;
    let front = topology.front_end().clone();
    let target = services.raw.to_string();
    let dial = tokio::spawn(async move {
        let dialed = culvert_kit::client::connect(&front, &target, LIMIT).await;
        dialed.map(|_| ()).map_err(|error| error.to_string())
    });
    server_shows(&topology, "pending_backend_dials", &[], 1.0).await;
    server_shows(&topology, "ready_backends", &[], 1.0).await;
    balancer.set(vec![topology.agent_address(0)]);
    timely("the dial", dial).await.unwrap().unwrap();
    innocent.still_echoes("a break").await;
    away(&topology, 0.0).await;
}

#[tokio::test]
async fn dials_do_not_wait_for_an_agent_that_stays_away() {
    let services = Services::start().await.unwrap();
    let (topology, balancer) = start(1, &[], &[]).await;
    let mut innocent = Innocent::open(&topology, services.raw).await;
    balancer.set(Vec::new());
    balancer.reset();
    away(&topology, 1.0).await;
    let target = services.raw.to_string();
    let started = Instant::now();
    refusal(&topology, &target).await;
    assert!(started.elapsed() < Duration::from_secs(15));
    let error = refusal(&topology, &target).await;
    assert_refused(&error, 500, "No agent available", "");
    let (status, ..) = http_get(topology.server_health(0), "/readyz")
        .await
        .unwrap();
    assert_eq!(status, 500);
    // The agent's connections wait on.
    balancer.set(vec![topology.agent_address(0)]);
    innocent.still_echoes("a long break").await;
    Innocent::open(&topology, services.raw).await;
}

#[tokio::test]
async fn strategies_pass_over_an_agent_that_stays_away() {
    let services = Services::start().await.unwrap();
    let strategies = ["--proxy-strategies=destHost,default"];
    let identifiers = ["--agent-identifiers=host=127.0.0.1"];
    let (mut topology, balancer) = start(1, &strategies, &identifiers).await;
    let port = format!("--proxy-server-port={}", topology.agent_address(0).port());
    topology.add_agent(Executable::Ours, &[&port]).await;
    server_shows(
        &topology,
        "ready_backends",
        &[("proxy_strategy", "default")],
        2.0,
    )
    .await;
    balancer.set(Vec::new());
    balancer.reset();
    away(&topology, 1.0).await;
    // This dial waits for the agent of its host.
    refusal(&topology, &services.raw.to_string()).await;
    Innocent::open(&topology, services.raw).await;
    let metrics = topology.agent_metrics(1).await;
    let open = value(&metrics, &agent_name("open_endpoint_connections"), &[]);
    assert_eq!(open, 1.0);
}

#[tokio::test]
async fn dial_during_a_break_goes_to_another_agent() {
    let services = Services::start().await.unwrap();
    let (mut topology, balancer) = start(1, &[], &[]).await;
    let port = format!("--proxy-server-port={}", topology.agent_address(0).port());
    topology.add_agent(Executable::Ours, &[&port]).await;
    topology.wait_for_agents().await;
    balancer.set(Vec::new());
    balancer.reset();
    away(&topology, 1.0).await;
    let mut later = Vec::new();
    for _ in 0..5 {
        later.push(Innocent::open(&topology, services.raw).await);
    }
    let metrics = topology.agent_metrics(1).await;
    let open = value(&metrics, &agent_name("open_endpoint_connections"), &[]);
    assert_eq!(open, 5.0);
}

#[tokio::test]
async fn agent_that_is_away_gives_its_place_to_a_new_agent() {
    let services = Services::start().await.unwrap();
    let (mut topology, balancer) = start(1, &["--max-agents=1"], &[]).await;
    let mut stream = open(&topology, &services.raw.to_string()).await;
    let port = format!("--proxy-server-port={}", topology.agent_address(0).port());
    topology.add_agent(Executable::Ours, &[&port]).await;
    let refused = "the server already has 1 agent connections";
    topology.agent(1).wait_for_log(refused, LIMIT).await;
    let named = "\"agent refused\" agent=\"agent-1\" peer=\"";
    let line = topology.server(0).wait_for_log(named, LIMIT).await;
    let reason = format!("reason=\"too_many_connections\" error=\"{refused}");
    assert!(line.contains(&reason), "{line}");
    balancer.set(Vec::new());
    balancer.reset();
    let displaced = "the agent is away, and a new agent needs its place";
    topology.server(0).wait_for_log(displaced, LIMIT).await;
    read_rest(&mut stream).await;
    eventually("the new agent is connected", LIMIT, async || {
        let metrics = topology.agent_metrics(1).await;
        let open = value(&metrics, &agent_name("open_server_connections"), &[]);
        (open == 1.0).then_some(()).ok_or(open)
    })
    .await;
    Innocent::open(&topology, services.raw).await;
}

#[tokio::test]
async fn link_that_does_not_resume_in_time_ends_its_connections_once() {
    let services = Services::start().await.unwrap();
    let grace = "--resume-grace=2s";
    let (topology, balancer) = start(1, &[grace], &[grace]).await;
    let mut stream = open(&topology, &services.raw.to_string()).await;
    balancer.set(Vec::new());
    let started = Instant::now();
    balancer.reset();
    read_rest(&mut stream).await;
    assert!(started.elapsed() >= Duration::from_secs(2));
    server_is_idle(&topology).await;
    resumed(&topology, "expired", 1.0).await;
    agent_shows(&topology, "open_endpoint_connections", &[], 0.0).await;
    for metrics in [
        topology.server_metrics(0).await,
        topology.agent_metrics(0).await,
    ] {
        assert_eq!(closed(&metrics), 1.0, "{}", metrics.text());
    }
    away(&topology, 0.0).await;
    balancer.set(vec![topology.agent_address(0)]);
    server_shows(&topology, "ready_backends", &[], 1.0).await;
    Innocent::open(&topology, services.raw).await;
}

#[tokio::test]
async fn grace_of_zero_on_either_side_cuts_at_once() {
    let services = Services::start().await.unwrap();
    let (off, none) = ("--resume-grace=0", "--resume-grace=30s");
    for (server, agent) in [(off, none), (none, off)] {
        let (topology, balancer) = start(1, &[server], &[agent]).await;
        let mut stream = open(&topology, &services.raw.to_string()).await;
        let started = Instant::now();
        balancer.reset();
        read_rest(&mut stream).await;
        assert!(started.elapsed() < Duration::from_secs(20));
        assert_eq!(closed(&topology.server_metrics(0).await), 1.0);
        eventually("the agent has a new link", LIMIT, async || {
            let metrics = topology.agent_metrics(0).await;
            let name = "culvert_connect_attempts_total";
            let added = value(&metrics, name, &[("outcome", "added")]);
            (added == 2.0).then_some(()).ok_or(added)
        })
        .await;
        server_shows(&topology, "ready_backends", &[], 1.0).await;
        let metrics = topology.server_metrics(0).await;
        assert_eq!(resumes(&metrics, "resumed"), 0.0);
    }
}

#[tokio::test]
async fn stopped_programs_end_their_sessions_at_once() {
    let services = Services::start().await.unwrap();
    let (mut topology, _balancer) = start(1, &["--graceful-shutdown-timeout=0"], &[]).await;
    let mut stream = open(&topology, &services.raw.to_string()).await;
    let started = Instant::now();
    topology.server(0).signal(Signal::TERM);
    agent_shows(&topology, "open_endpoint_connections", &[], 0.0).await;
    agent_shows(&topology, "open_server_connections", &[], 0.0).await;
    read_rest(&mut stream).await;
    assert!(started.elapsed() < Duration::from_secs(20));
}

#[tokio::test]
async fn agent_drains_although_its_link_is_broken() {
    let services = Services::start().await.unwrap();
    let (mut topology, balancer) = start(1, &[], &["--drain-linger=0"]).await;
    let mut innocent = Innocent::open(&topology, services.raw).await;
    balancer.set(Vec::new());
    balancer.reset();
    away(&topology, 1.0).await;
    topology.agent(0).signal(Signal::TERM);
    topology.agent(0).wait_for_log("draining", LIMIT).await;
    balancer.set(vec![topology.agent_address(0)]);
    innocent.still_echoes("a drain during a break").await;
    let drains = [("segment", "from_agent"), ("packet_type", "DRAIN")];
    server_shows(&topology, "stream_packets_total", &drains, 1.0).await;
    drop(innocent);
    server_shows(&topology, "ready_backends", &[], 0.0).await;
    assert_eq!(closed(&topology.server_metrics(0).await), 0.0);
}

/// A server that reviews the tokens of its agent.
struct Reviewed {
    topology: Topology,
    balancer: Balancer,
    api: KubeApi,
    files: tempfile::TempDir,
}

impl Reviewed {
    /// Starts the programs; the agent has the token `good`.
    async fn start() -> Self {
        let api = KubeApi::start().await;
        let files = tempfile::tempdir().unwrap();
        let token = files.path().join("token");
        std::fs::write(&token, "good").unwrap();
        let user = TokenStatus::user("system:serviceaccount:kube-system:konnectivity-agent");
        let user = user.audiences(&["audience"]);
        api.token("good", user.clone().pod("agent"));
        api.token("rotated", user.clone().pod("agent"));
        api.token("foreign", user.pod("other"));
        api.token("revoked", TokenStatus::rejected("revoked"));
        let server_args = [
            "--agent-namespace=kube-system".to_owned(),
            "--agent-service-account=konnectivity-agent".to_owned(),
            "--authentication-audience=audience".to_owned(),
            format!("--kubeconfig={}", api.kubeconfig(files.path()).display()),
            "--resume-grace=5s".to_owned(),
            // Agents prove who they are by their tokens.
            "--cluster-ca-cert=".to_owned(),
        ];
        let server_args: Vec<&str> = server_args.iter().map(String::as_str).collect();
        let token_flag = format!("--service-account-token-path={}", token.display());
        let (topology, balancer) =
            start(1, &server_args, &[&token_flag, "--resume-grace=5s"]).await;
        Self {
            topology,
            balancer,
            api,
            files,
        }
    }

    /// Gives the agent another token, and breaks its link.
    fn reset_with(&self, token: &str) {
        std::fs::write(self.files.path().join("token"), token).unwrap();
        self.balancer.reset();
    }
}

#[tokio::test]
async fn agent_whose_token_is_no_longer_accepted_does_not_resume() {
    let services = Services::start().await.unwrap();
    for token in ["revoked", "foreign"] {
        let mut server = Reviewed::start().await;
        let mut stream = open(&server.topology, &services.raw.to_string()).await;
        server.reset_with(token);
        resumed(&server.topology, "refused", 1.0).await;
        let named = "\"agent refused\" agent=\"agent-0\"";
        let program = server.topology.server(0);
        let line = program.wait_for_log(named, LIMIT).await;
        assert!(line.contains("reason=\"unauthenticated\""), "{line}");
        read_rest(&mut stream).await;
        let topology = &server.topology;
        let metrics = topology.server_metrics(0).await;
        assert_eq!(resumes(&metrics, "resumed"), 0.0);
        if token == "revoked" {
            server_shows(topology, "ready_backends", &[], 0.0).await;
        }
    }
}

#[tokio::test]
async fn link_resumes_although_the_api_does_not_answer() {
    let services = Services::start().await.unwrap();
    let mut server = Reviewed::start().await;
    let mut innocent = Innocent::open(&server.topology, services.raw).await;
    let reviews = || {
        let requests = server.api.requests();
        let of_tokens = |request: &&Recorded| request.path.contains("/tokenreviews");
        requests.iter().filter(of_tokens).count()
    };
    let before = reviews();
    // The answers would come after the end of the test.
    let silent = Fault::delay(10 * LIMIT).on("/tokenreviews");
    server.api.fault(silent);
    server.reset_with("rotated");
    innocent.still_echoes("a break of the link").await;
    eventually("a review", LIMIT, async || reviews() > before).await;
    server.balancer.reset();
    innocent
        .still_echoes("another break during the review")
        .await;
    server.api.clear_faults();
    server.api.fault(Fault::status(500).on("/tokenreviews"));
    server.reset_with("revoked");
    resumed(&server.topology, "unreviewed", 2.0).await;
    innocent.still_echoes("failed reviews").await;
    assert_eq!(closed(&server.topology.server_metrics(0).await), 0.0);
    drop(innocent);
    assert_unharmed(&mut server.topology).await;
}

#[tokio::test]
async fn request_for_an_unknown_session_causes_no_review() {
    let server = Reviewed::start().await;
    let before = server.api.reviews().len();
    let (id, proof) = ("00".repeat(16), "00".repeat(32));
    let request = introduction(&format!(
        "authorization: Bearer other\r\nculvert-server: server-0\r\nculvert-resume: {id}.{proof}.0\r\n"
    ));
    let answer = answer_to(&server.topology, &request).await;
    assert!(answer.starts_with("HTTP/1.1 409 "), "{answer}");
    resumed(&server.topology, "unknown", 1.0).await;
    assert_eq!(server.api.reviews().len(), before);
}

/// Returns the introduction of an agent with these additional lines.
fn introduction(lines: &str) -> Vec<u8> {
    // Recorded from an agent of the previous version.
    let recorded = "GET /agent HTTP/1.1\r\nhost: culvert\r\nconnection: upgrade\r\nupgrade: culvert/1\r\n\
        agentid: stranger\r\nagentidentifiers: \r\nculvert-half-close: 1\r\n";
    format!("{recorded}{lines}\r\n").into_bytes()
}

#[tokio::test]
async fn requests_without_a_session_are_refused_and_disturb_no_session() {
    let services = Services::start().await.unwrap();
    let mut topology = Topology::simple(Mode::HttpConnect, Transport::Uds).await;
    let mut innocent = Innocent::open(&topology, services.raw).await;
    let (id, proof) = ("00".repeat(16), "00".repeat(32));
    let request = |server: &str, value: &str| {
        introduction(&format!(
            "culvert-server: {server}\r\nculvert-resume: {value}\r\n"
        ))
    };
    let valid = format!("{id}.{proof}.0");
    let cases = [
        (request("server-0", &valid), "HTTP/1.1 409 "),
        (request("server-1", &valid), "HTTP/1.1 421 "),
        (request("server-0", "a.b.c"), ""),
        (introduction(&format!("culvert-resume: {valid}\r\n")), ""),
    ];
    for (request, expected) in cases {
        let answer = answer_to(&topology, &request).await;
        let is_expected = answer.starts_with(expected) && answer.is_empty() == expected.is_empty();
        assert!(is_expected, "{answer}");
        innocent.still_echoes("a request to resume").await;
    }
    resumed(&topology, "unknown", 1.0).await;
    server_shows(&topology, "ready_backends", &[], 1.0).await;
    assert_unharmed(&mut topology).await;
}
