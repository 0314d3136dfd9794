//! Traffic during a rolling update of all servers and agents: short dials at a fixed rate, and long streams.
//!
//! A client uses the servers whose `/readyz` answers 200, as a Service does. A stream may end only after the grace
//! of its server or of an agent.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use culvert_kit::client::{BoxedStream, FrontEnd, connect};
use parking_lot::Mutex;
use rand::RngCore as _;
use rand::seq::IndexedRandom as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::metrics::http_get;
use crate::process::Signal;
use crate::topology::{PATIENCE, Topology};

/// Interval between two looks at the readiness of a server.
const LOOK: Duration = Duration::from_millis(50);

/// Time limit of a dial and of an echo.
const LIMIT: Duration = Duration::from_secs(30);

/// Length of a chunk of a stream, in bytes.
const CHUNK_BYTES: usize = 1024;

/// Tolerance of measured times: the load and the programs start their clocks at different moments.
const TOLERANCE: Duration = Duration::from_millis(100);

/// Description of a rolling update.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Dials per second. Each echoes a few bytes.
    pub dials_per_second: u32,
    /// Number of long streams. A stream that has ended is opened again.
    pub streams: usize,
    /// Address of a raw echo service behind the agents.
    pub target: SocketAddr,
    /// Time for the connections of a stopped server or agent, as in its flags.
    pub grace: Duration,
    /// True if an agent never ends without a second signal, as the stock agent: it is killed after the grace.
    pub kill_agents: bool,
}

/// Result of a rolling update.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Number of dials.
    pub dials: usize,
    /// Errors of failed dials.
    pub failed: Vec<String>,
    /// Longest duration of a dial.
    pub slowest: Duration,
    /// Number of streams, also those opened again.
    pub streams: usize,
    /// Descriptions of streams that ended before the grace.
    pub cut_early: Vec<String>,
    /// Number of streams with other bytes than sent.
    pub wrong: usize,
    /// Duration of the whole update.
    pub took: Duration,
}

/// State shared by the clients.
struct Shared {
    plan: Plan,
    servers: Vec<Server>,
    /// Time of the last signal to an agent.
    agent_signalled: Mutex<Option<Instant>>,
    report: Mutex<Report>,
    stop: CancellationToken,
}

struct Server {
    front_end: FrontEnd,
    health: SocketAddr,
    is_ready: Mutex<bool>,
    signalled: Mutex<Option<Instant>>,
}

/// Replaces every server, then every agent, one after another, under load.
///
/// # Panics
/// If a program does not end or does not become ready again.
pub async fn roll(topology: &mut Topology, plan: Plan) -> Report {
    let (servers, agents) = (topology.server_count(), topology.agent_count());
    let server = |index| Server {
        front_end: topology.front_end_of(index).clone(),
        health: topology.server_health(index),
        is_ready: Mutex::new(true),
        signalled: Mutex::default(),
    };
    let shared = Arc::new(Shared {
        plan,
        servers: (0..servers).map(server).collect(),
        agent_signalled: Mutex::default(),
        report: Mutex::default(),
        stop: CancellationToken::new(),
    });
    let mut clients = JoinSet::new();
    for index in 0..servers {
        clients.spawn(shared.clone().watch(index));
    }
    clients.spawn(shared.clone().dial_at_rate());
    for _ in 0..plan.streams {
        clients.spawn(shared.clone().keep_stream());
    }
    let started = Instant::now();
    sleep(plan.grace / 2).await;
    for index in 0..servers {
        *shared.servers[index].signalled.lock() = Some(Instant::now());
        topology.server(index).signal(Signal::TERM);
        topology.server(index).wait_exit(PATIENCE).await;
        topology.kill_server(index);
        topology.start_server(index).await;
        topology.wait_for_agents().await;
        *shared.servers[index].signalled.lock() = None;
    }
    for index in 0..agents {
        *shared.agent_signalled.lock() = Some(Instant::now());
        topology.agent(index).signal(Signal::TERM);
        match plan.kill_agents {
            true => sleep(plan.grace).await,
            false => drop(topology.agent(index).wait_exit(PATIENCE).await),
        }
        topology.kill_agent(index);
        topology.start_agent(index).await;
        topology.wait_for_agents().await;
    }
    shared.stop.cancel();
    while let Some(ended) = clients.join_next().await {
        ended.expect("a client of the rolling update");
    }
    let mut report = shared.report.lock().clone();
    report.took = started.elapsed();
    report
}

impl Shared {
    /// Follows the readiness of a server.
    async fn watch(self: Arc<Self>, index: usize) {
        let server = &self.servers[index];
        while self.stop.run_until_cancelled(sleep(LOOK)).await.is_some() {
            let answer = timeout(LIMIT, http_get(server.health, "/readyz")).await;
            let is_ready = matches!(&answer, Ok(Ok((status, ..))) if status.as_u16() == 200);
            *server.is_ready.lock() = is_ready;
        }
    }

    /// Returns a ready server at random; any server if none is ready.
    fn choose(&self) -> usize {
        let all: Vec<usize> = (0..self.servers.len()).collect();
        let is_ready = |index: &usize| *self.servers[*index].is_ready.lock();
        let ready: Vec<usize> = all.iter().copied().filter(is_ready).collect();
        let from = if ready.is_empty() { all } else { ready };
        *from.choose(&mut rand::rng()).unwrap()
    }

    async fn connect(&self, server: usize) -> Result<BoxedStream, String> {
        let front_end = &self.servers[server].front_end;
        let target = self.plan.target.to_string();
        let connected = connect(front_end, &target, LIMIT).await;
        let mut stream = connected.map_err(|error| format!("server {server}: {error}"))?;
        let sent = stream.write_all(b"echo\n").await;
        sent.map_err(|error| format!("server {server}: {error}"))?;
        Ok(stream)
    }

    async fn dial_at_rate(self: Arc<Self>) {
        let mut ticks = interval(Duration::from_secs(1) / self.plan.dials_per_second);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
        let mut dials = JoinSet::new();
        while self.stop.run_until_cancelled(ticks.tick()).await.is_some() {
            dials.spawn(self.clone().dial());
            while dials.try_join_next().is_some() {}
        }
        dials.join_all().await;
    }

    async fn dial(self: Arc<Self>) {
        let began = Instant::now();
        let server = self.choose();
        let outcome = async {
            let mut stream = self.connect(server).await?;
            let echoed = echo(&mut stream, 16).await;
            echoed.map_err(|error| format!("server {server}: {error}"))
        };
        let outcome = outcome.await;
        let mut report = self.report.lock();
        report.dials += 1;
        report.slowest = report.slowest.max(began.elapsed());
        report.failed.extend(outcome.err());
    }

    async fn keep_stream(self: Arc<Self>) {
        while !self.stop.is_cancelled() {
            let server = self.choose();
            let opened = Instant::now();
            self.report.lock().streams += 1;
            let mut stream = match self.connect(server).await {
                Ok(stream) => stream,
                Err(error) => {
                    self.report.lock().failed.push(error);
                    continue;
                }
            };
            let ended = loop {
                if self.stop.is_cancelled() {
                    return;
                }
                if let Err(error) = echo(&mut stream, CHUNK_BYTES).await {
                    break error;
                }
                sleep(Duration::from_millis(20)).await;
            };
            self.judge(server, opened, &ended);
        }
    }

    /// Records the end of a stream, unless its server or an agent had the grace since its signal.
    fn judge(&self, server: usize, opened: Instant, error: &str) {
        if error == WRONG {
            self.report.lock().wrong += 1;
            return;
        }
        let since = |signal: &Mutex<Option<Instant>>| {
            let signalled = *signal.lock();
            signalled.map(|at| at.elapsed())
        };
        let (server_since, agent_since) = (
            since(&self.servers[server].signalled),
            since(&self.agent_signalled),
        );
        let had_grace = |since: Option<Duration>| {
            since.is_some_and(|since| since + TOLERANCE >= self.plan.grace)
        };
        if !had_grace(server_since) && !had_grace(agent_since) {
            self.report.lock().cut_early.push(format!(
                "server {server}: {error} after {:?}; signal to the server {server_since:?} ago, to an agent \
                 {agent_since:?} ago",
                opened.elapsed()
            ));
        }
    }
}

/// Error of a stream with other bytes than sent.
const WRONG: &str = "wrong bytes";

/// Sends random bytes and compares the echo.
async fn echo(stream: &mut BoxedStream, length: usize) -> Result<(), String> {
    let mut sent = vec![0; length];
    rand::rng().fill_bytes(&mut sent);
    let mut received = vec![0; length];
    let exchange = async {
        stream.write_all(&sent).await?;
        stream.read_exact(&mut received).await
    };
    match timeout(LIMIT, exchange).await {
        Err(_) => Err("no echo in time".to_owned()),
        Ok(Err(error)) => Err(error.to_string()),
        Ok(Ok(_)) if received != sent => Err(WRONG.to_owned()),
        Ok(Ok(_)) => Ok(()),
    }
}
