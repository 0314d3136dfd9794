//! The end of a link that could resume: programs that stop, crash, restart or freeze, and agents that need its place.

use std::net::Ipv4Addr;
use std::time::Duration;

use culvert_kit::pki::CLUSTER_NAME;
use culvert_kit::services::Services;
use culvert_tests::balancer::Balancer;
use culvert_tests::link::{self, Conditions, FAR, Link};
use culvert_tests::metrics::Metrics;
use culvert_tests::namespace::{alone, hosts};
use culvert_tests::{Executable, Mode, Signal, Topology, Transport, eventually};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy, sink};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::resumes::{BULK, GRACE, Load, away, closed, resumed, resumes, start};
use crate::searching::Lone;
use crate::support::*;

/// Time for an end that does not wait for the grace time of 30 s. Generous, because two cores run many tests.
const PROMPT: Duration = Duration::from_secs(15);

/// Streams with bulk in both directions until their ends, which are no failures.
struct Bulk(JoinSet<()>);

impl Bulk {
    async fn start(topology: &Topology, services: &Services) -> Self {
        let mut tasks = JoinSet::new();
        for _ in 0..2 {
            let mut down = open(topology, &services.raw.to_string()).await;
            let command = format!("download {BULK}\n");
            down.write_all(command.as_bytes()).await.unwrap();
            down.flush().await.unwrap();
            let mut first = vec![0; 1 << 20];
            let read = timely("a download", down.read_exact(&mut first)).await;
            read.unwrap();
            tasks.spawn(async move { drop(copy(&mut down, &mut sink()).await) });
            let mut up = open(topology, &services.raw.to_string()).await;
            let command = format!("upload {BULK}\n");
            up.write_all(command.as_bytes()).await.unwrap();
            let piece = vec![7; 1 << 20];
            let write = timely("an upload", up.write_all(&piece)).await;
            write.unwrap();
            tasks.spawn(async move { while up.write_all(&piece).await.is_ok() {} });
        }
        Self(tasks)
    }

    /// Waits until all streams have ended.
    async fn ended(self) {
        timely("the end of the bulk", self.0.join_all()).await;
    }
}

/// Asserts that no link broke: the message of its end arrived.
fn assert_no_break(metrics: &Metrics) {
    for name in [
        "culvert_agent_resumes_total",
        "culvert_server_resumes_total",
    ] {
        for outcome in ["resumed", "expired", "over", "replaced"] {
            assert_eq!(
                value(metrics, name, &[("outcome", outcome)]),
                0.0,
                "{name} {outcome}"
            );
        }
    }
}

async fn stop_server_in_bulk(mut topology: Topology, services: &Services) {
    let bulk = Bulk::start(&topology, services).await;
    let started = Instant::now();
    topology.server(0).signal(Signal::TERM);
    for agent in 0..topology.agent_count() {
        for name in ["open_server_connections", "open_endpoint_connections"] {
            agent_at_shows(&topology, agent, name, &[], 0.0).await;
        }
        println!("agent {agent} knows after {:?}", started.elapsed());
        assert!(started.elapsed() < PROMPT, "{:?}", started.elapsed());
        assert_no_break(&topology.agent_metrics(agent).await);
    }
    let status = topology.server(0).wait_exit(LIMIT).await;
    assert!(status.success(), "{status}");
    bulk.ended().await;
}

async fn stop_agent_in_bulk(mut topology: Topology, services: &Services) {
    let bulk = Bulk::start(&topology, services).await;
    let started = Instant::now();
    // The second signal ends the drain.
    topology.agent(0).signal(Signal::TERM);
    topology.agent(0).wait_for_log("draining", LIMIT).await;
    topology.agent(0).signal(Signal::TERM);
    server_shows(&topology, "ready_backends", &[], 0.0).await;
    server_shows(&topology, "established_connections", &[], 0.0).await;
    println!("the server knows after {:?}", started.elapsed());
    assert!(started.elapsed() < PROMPT, "{:?}", started.elapsed());
    assert_no_break(&topology.server_metrics(0).await);
    let status = topology.agent(0).wait_exit(LIMIT).await;
    assert!(status.success(), "{status}");
    bulk.ended().await;
}

#[tokio::test]
async fn server_that_stops_in_the_middle_of_bulk_ends_its_links() {
    let services = Services::start().await.unwrap();
    let (topology, _balancer) = start(1, &["--graceful-shutdown-timeout=0"], &[]).await;
    stop_server_in_bulk(topology, &services).await;
}

/// The server serves each agent on a thread of its own.
#[tokio::test]
async fn server_that_stops_ends_the_links_of_all_threads() {
    let services = Services::start().await.unwrap();
    let args = ["--graceful-shutdown-timeout=0", "--worker-threads=2"];
    let (mut topology, balancer) = start(1, &args, &[]).await;
    let port = format!("--proxy-server-port={}", balancer.addr().port());
    topology.add_agent(Executable::Ours, &[&port, GRACE]).await;
    topology.wait_for_agents().await;
    let bulk = [
        Bulk::start(&topology, &services).await,
        Bulk::start(&topology, &services).await,
    ];
    for agent in 0..2 {
        let metrics = topology.agent_metrics(agent).await;
        let name = agent_name("open_endpoint_connections");
        assert!(value(&metrics, &name, &[]) > 0.0, "agent {agent}");
    }
    stop_server_in_bulk(topology, &services).await;
    for bulk in bulk {
        bulk.ended().await;
    }
}

#[tokio::test]
async fn agent_that_stops_in_the_middle_of_bulk_ends_its_links() {
    let services = Services::start().await.unwrap();
    let (topology, _balancer) = start(1, &[], &[]).await;
    stop_agent_in_bulk(topology, &services).await;
}

/// Starts a server, and an agent that reaches the server over the link.
async fn start_far(server_args: &[&str]) -> Topology {
    hosts(&[(CLUSTER_NAME, FAR)]);
    let host = format!("--proxy-server-host={CLUSTER_NAME}");
    let builder = Topology::builder(Mode::HttpConnect, Transport::Uds).servers(1);
    let builder = builder.server_args(&["--agent-bind-address=0.0.0.0", GRACE]);
    let builder = builder.server_args(server_args);
    builder.agent_args(&[&host, GRACE]).agents(1).start().await
}

/// A path on which the bytes in the sockets take a second.
const SLOW: Conditions = Conditions {
    delay: Duration::from_millis(20),
    jitter: Duration::ZERO,
    loss: 0.0,
    reorder: 0.0,
    rate: Some(2e6),
    queue: Duration::from_millis(500),
};

#[test]
fn server_that_stops_behind_a_slow_path_ends_its_links() {
    if !link::is_possible() {
        return;
    }
    alone(async || {
        let _link = Link::start(SLOW, 1).unwrap();
        let services = Services::start().await.unwrap();
        let topology = start_far(&["--graceful-shutdown-timeout=0"]).await;
        stop_server_in_bulk(topology, &services).await;
    });
}

#[test]
fn agent_that_stops_behind_a_slow_path_ends_its_links() {
    if !link::is_possible() {
        return;
    }
    alone(async || {
        let _link = Link::start(SLOW, 2).unwrap();
        let services = Services::start().await.unwrap();
        let topology = start_far(&[]).await;
        stop_agent_in_bulk(topology, &services).await;
    });
}

#[tokio::test]
async fn restarted_agent_ends_the_link_of_its_killed_process() {
    let services = Services::start().await.unwrap();
    let (mut topology, _balancer) = start(1, &[], &[]).await;
    let bulk = Bulk::start(&topology, &services).await;
    topology.kill_agent(0);
    away(&topology, 1.0).await;
    let started = Instant::now();
    topology.start_agent(0).await;
    let _innocent = Innocent::open(&topology, services.raw).await;
    println!("a dial succeeds {:?} after the restart", started.elapsed());
    resumed(&topology, "replaced", 1.0).await;
    server_shows(&topology, "established_connections", &[], 1.0).await;
    away(&topology, 0.0).await;
    println!(
        "the earlier link ends {:?} after the restart",
        started.elapsed()
    );
    assert!(started.elapsed() < PROMPT, "{:?}", started.elapsed());
    bulk.ended().await;
    let metrics = topology.server_metrics(0).await;
    assert_eq!(resumes(&metrics, "expired"), 0.0);
    assert_eq!(closed(&metrics), 4.0, "{}", metrics.text());
}

/// Starts another agent with the id of the first agent. Its health listener has another address, so it has not taken the
/// place of the first agent.
async fn start_namesake(topology: &Topology) -> Lone {
    let mut namesake = Lone::new();
    namesake.pki = topology.pki().clone();
    let port = format!("--proxy-server-port={}", topology.agent_address(0).port());
    namesake.start(&[&port, "--agent-id=agent-0", GRACE], &[]);
    namesake
}

#[tokio::test]
async fn another_agent_with_the_same_id_does_not_end_a_broken_link() {
    let services = Services::start().await.unwrap();
    let (topology, balancer) = start(1, &[], &[]).await;
    let mut innocent = Innocent::open(&topology, services.raw).await;
    balancer.set(Vec::new());
    balancer.reset();
    away(&topology, 1.0).await;
    let namesake = start_namesake(&topology).await;
    namesake.shows("open_server_connections", 1.0).await;
    let _of_namesake = Innocent::open(&topology, services.raw).await;
    balancer.set(vec![topology.agent_address(0)]);
    innocent.still_echoes("a break").await;
    resumed(&topology, "resumed", 1.0).await;
    let metrics = topology.server_metrics(0).await;
    assert_eq!(
        (resumes(&metrics, "replaced"), closed(&metrics)),
        (0.0, 0.0)
    );
}

#[tokio::test]
async fn newcomer_gets_the_place_of_an_agent_that_is_away() {
    let services = Services::start().await.unwrap();
    let (topology, balancer) = start(1, &["--max-agents=1"], &[]).await;
    let mut stream = open(&topology, &services.raw.to_string()).await;
    balancer.set(Vec::new());
    let started = Instant::now();
    balancer.reset();
    away(&topology, 1.0).await;
    let newcomer = start_namesake(&topology).await;
    newcomer.shows("open_server_connections", 1.0).await;
    read_rest(&mut stream).await;
    assert!(started.elapsed() < PROMPT, "{:?}", started.elapsed());
    away(&topology, 0.0).await;
    Innocent::open(&topology, services.raw).await;
    // The place is taken again: the first agent does not displace an agent that is present.
    balancer.set(vec![topology.agent_address(0)]);
    let refused = [("listener", "agent"), ("reason", "too_many_connections")];
    eventually("the first agent is refused", LIMIT, async || {
        let metrics = topology.server_metrics(0).await;
        value(&metrics, "culvert_rejected_total", &refused) > 0.0
    })
    .await;
    newcomer.shows("open_server_connections", 1.0).await;
}

/// Waits until the agent has counted `count` links that did not resume in time.
async fn expired_at_agent(topology: &Topology, count: f64) {
    eventually(&format!("{count} expired links"), LIMIT, async || {
        let metrics = topology.agent_metrics(0).await;
        let seen = of_agent(&metrics, "expired");
        (seen == count).then_some(()).ok_or(seen)
    })
    .await;
}

/// Returns the number of the agent's links with the outcome.
fn of_agent(metrics: &Metrics, outcome: &str) -> f64 {
    let labels = [("outcome", outcome)];
    value(metrics, "culvert_server_resumes_total", &labels)
}

#[tokio::test]
async fn link_that_expires_at_the_agent_ends_its_connections_once() {
    const STREAMS: usize = 3;
    let services = Services::start().await.unwrap();
    let (server_grace, agent_grace) = ("--resume-grace=8s", "--resume-grace=2s");
    let (topology, balancer) = start(1, &[server_grace], &[agent_grace]).await;
    let mut streams = Vec::new();
    for _ in 0..STREAMS {
        streams.push(open(&topology, &services.raw.to_string()).await);
    }
    agent_shows(&topology, "open_endpoint_connections", &[], STREAMS as f64).await;
    balancer.set(Vec::new());
    let started = Instant::now();
    balancer.reset();
    expired_at_agent(&topology, 1.0).await;
    assert!(started.elapsed() >= Duration::from_secs(2));
    agent_shows(&topology, "open_endpoint_connections", &[], 0.0).await;
    agent_shows(&topology, "open_server_connections", &[], 0.0).await;
    // The server waits for its own grace time, and refuses no new link meanwhile.
    assert_eq!(closed(&topology.server_metrics(0).await), 0.0);
    balancer.set(vec![topology.agent_address(0)]);
    agent_shows(&topology, "open_server_connections", &[], 1.0).await;
    let mut innocent = Innocent::open(&topology, services.raw).await;
    for stream in &mut streams {
        read_rest(stream).await;
    }
    resumed(&topology, "expired", 1.0).await;
    away(&topology, 0.0).await;
    innocent.still_echoes("the end of the earlier link").await;
    let agent = topology.agent_metrics(0).await;
    assert_eq!(value(&agent, "culvert_servers_away", &[]), 0.0);
    assert_eq!(of_agent(&agent, "expired"), 1.0);
    for outcome in ["resumed", "over"] {
        assert_eq!(of_agent(&agent, outcome), 0.0, "{outcome}");
    }
    for metrics in [agent, topology.server_metrics(0).await] {
        assert_eq!(closed(&metrics), STREAMS as f64, "{}", metrics.text());
        let of_all = metrics.samples("culvert_connections_closed_total");
        let of_all: f64 = of_all.map(|sample| sample.value).sum();
        assert_eq!(of_all, STREAMS as f64, "{}", metrics.text());
    }
}

/// The agent learns that its server has forgotten the session, which counts as one end and no expiry.
#[tokio::test]
async fn link_that_expires_at_the_server_ends_the_agents_connections_once() {
    let services = Services::start().await.unwrap();
    let (server_grace, agent_grace) = ("--resume-grace=2s", "--resume-grace=30s");
    let (topology, balancer) = start(1, &[server_grace], &[agent_grace]).await;
    let mut stream = open(&topology, &services.raw.to_string()).await;
    balancer.set(Vec::new());
    balancer.reset();
    read_rest(&mut stream).await;
    resumed(&topology, "expired", 1.0).await;
    let agent = topology.agent_metrics(0).await;
    assert_eq!(value(&agent, "culvert_servers_away", &[]), 1.0);
    assert_eq!(closed(&agent), 0.0);
    balancer.set(vec![topology.agent_address(0)]);
    agent_shows(&topology, "open_endpoint_connections", &[], 0.0).await;
    server_shows(&topology, "ready_backends", &[], 1.0).await;
    Innocent::open(&topology, services.raw).await;
    let agent = topology.agent_metrics(0).await;
    assert_eq!(
        (of_agent(&agent, "over"), of_agent(&agent, "expired")),
        (1.0, 0.0)
    );
    assert_eq!(value(&agent, "culvert_servers_away", &[]), 0.0);
    assert_eq!(closed(&agent), 1.0, "{}", agent.text());
}

#[tokio::test]
async fn frozen_agent_is_given_up_after_twenty_seconds() {
    let services = Services::start().await.unwrap();
    let (mut topology, _balancer) = start(1, &["--keepalive-time=1s"], &[]).await;
    let mut stream = open(&topology, &services.raw.to_string()).await;
    topology.agent(0).signal(Signal::STOP);
    let started = Instant::now();
    read_rest(&mut stream).await;
    server_shows(&topology, "ready_backends", &[], 0.0).await;
    let after = started.elapsed();
    topology.agent(0).signal(Signal::CONT);
    println!("given up after {after:?}");
    let expected = Duration::from_secs(18)..Duration::from_secs(29);
    assert!(expected.contains(&after), "{after:?}");
    // The agent that continues connects again.
    server_shows(&topology, "ready_backends", &[], 1.0).await;
}

/// On a long path, several attempts to resume are under way at the same time. Only one of them may reach the session:
/// each further request would break the connection of the request before.
#[test]
fn attempts_on_a_long_path_do_not_disturb_each_other() {
    const CUTS: u32 = 5;
    if !link::is_possible() {
        return;
    }
    alone(async || {
        let conditions = Conditions {
            delay: Duration::from_millis(125),
            ..Conditions::default()
        };
        let _link = Link::start(conditions, 3).unwrap();
        let services = Services::start().await.unwrap();
        hosts(&[(CLUSTER_NAME, FAR)]);
        let builder = Topology::builder(Mode::HttpConnect, Transport::Uds);
        let mut topology = builder.servers(1).server_args(&[GRACE]).start().await;
        let backends = vec![topology.agent_address(0)];
        let balancer = Balancer::at(Ipv4Addr::UNSPECIFIED, backends).await;
        let flags = [
            &format!("--proxy-server-host={CLUSTER_NAME}"),
            &format!("--proxy-server-port={}", balancer.addr().port()),
            GRACE,
        ];
        topology.add_agent(Executable::Ours, &flags).await;
        topology.wait_for_agents().await;
        let load = Load::start(&topology, &services).await;
        let mut innocent = Innocent::open(&topology, services.raw).await;
        for cut in 1..=CUTS {
            let started = Instant::now();
            balancer.reset();
            resumed(&topology, "resumed", f64::from(cut)).await;
            away(&topology, 0.0).await;
            let after = started.elapsed();
            // The bytes that the bulk has lost are sent again before the echo.
            innocent.still_echoes("a cut").await;
            println!(
                "resumed with a round trip of 250ms after {after:?}, and an echo after {:?}",
                started.elapsed()
            );
        }
        let gap = load.finish().await;
        println!("longest gap with a round trip of 250ms: {gap:?}");
        assert!(gap < PROMPT, "{gap:?}");
        let metrics = topology.server_metrics(0).await;
        assert_eq!(resumes(&metrics, "resumed"), f64::from(CUTS));
        assert_eq!(closed(&metrics), 0.0);
    });
}
