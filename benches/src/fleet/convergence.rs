//! The time until an agent is connected to all servers behind a random balancer, and handshakes in the steady state.

use std::time::Duration;

use anyhow::ensure;
use culvert_tests::metrics::scrape;
use culvert_tests::{Executable, Mode, Topology, Transport};
use tokio::time::{Instant, sleep};

use super::table::{Line, Lines};
use super::{Lab, Pair};
use crate::harness::{ask, harness};

/// Flags of production, as in `tunnel`.
const AGENT_FLAGS: [&str; 3] = ["--v=1", "--sync-interval=1s", "--sync-interval-cap=10s"];
const FOREVER: &str = "--sync-forever";

/// Metric of an agent with its number of connected servers.
const OPEN_SERVERS: &str = "konnectivity_network_proxy_agent_open_server_connections";

/// Interval of looks at the metric.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// Time limit for an agent to connect to all servers.
const LIMIT: Duration = Duration::from_secs(120);

/// Time before the handshakes of the steady state are counted. Our agent's gap between probes reaches its largest value
/// within that time.
const SETTLE: Duration = Duration::from_secs(60);

/// Targets of our pair: seconds, and handshakes per hour. The stock agent makes about 3,400 handshakes per hour.
const SECONDS: f64 = 2.0;
const HANDSHAKES: f64 = 342.0;

/// A change of the servers whose end is awaited.
#[derive(Debug, Clone, Copy)]
enum Change {
    /// The agent starts.
    Start(usize),
    /// One of three servers was killed, and its successor is ready.
    Replaced,
    /// Two servers join one that does not announce them.
    Joined,
}

const CHANGES: [(&str, Change); 4] = [
    ("3 servers", Change::Start(3)),
    ("5 servers", Change::Start(5)),
    ("1 of 3 replaced", Change::Replaced),
    ("1 to 3, --sync-forever", Change::Joined),
];

/// Measures a pair of programs.
pub(super) async fn measure(lab: &Lab, pair: Pair, lines: &mut Lines) {
    for (row, change) in CHANGES {
        let mut results = Vec::new();
        for _ in 0..lab.rounds {
            let result = harness(time(lab, pair, change)).await.flatten();
            results.push(result.map(|time| time.as_secs_f64()));
        }
        // The successor and joining servers are behind the balancer at a time that the agent does not know.
        let is_ours = pair.server && pair.agent;
        let target = (is_ours && matches!(change, Change::Start(_))).then_some(SECONDS);
        lines.add(Line::new(pair.name, row, "s", results, target));
    }
    let steady = harness(handshakes(lab, pair)).await.flatten();
    let target = pair.agent.then_some(HANDSHAKES);
    let row = "steady, --sync-forever";
    lines.add(Line::new(pair.name, row, "handshakes/h", [steady], target));
}

/// Starts servers, and later an agent of `pair`.
struct Stage {
    topology: Topology,
    agent: Executable,
    servers: usize,
}

impl Stage {
    async fn start(lab: &Lab, pair: Pair, counts: &[usize]) -> anyhow::Result<Self> {
        let (server, agent) = lab.executables(pair)?;
        let mut builder = Topology::builder(Mode::HttpConnect, Transport::Uds);
        for count in counts {
            let count = format!("--server-count={count}");
            builder = builder.server(server.clone(), &["--v=1", &count]);
        }
        Ok(Self {
            topology: builder.start().await,
            agent,
            servers: counts.len(),
        })
    }

    /// Sends new connections to these servers.
    fn balance(&self, servers: impl IntoIterator<Item = usize>) -> anyhow::Result<()> {
        ask(|| {
            let addresses = servers.into_iter();
            let addresses = addresses.map(|server| self.topology.agent_address(server));
            self.topology.balancer().set(addresses.collect());
        })
    }

    async fn add_agent(&mut self, flags: &[&str]) {
        let flags = [&AGENT_FLAGS, flags].concat();
        self.topology.add_agent(self.agent.clone(), &flags).await;
    }

    /// Waits until the agent is connected to `count` servers.
    async fn connected(&self, count: usize) -> anyhow::Result<()> {
        let begin = Instant::now();
        loop {
            // The agent does not answer while it starts.
            let open = self.open().await.unwrap_or_default();
            if open >= count as f64 {
                return Ok(());
            }
            ensure!(
                begin.elapsed() < LIMIT,
                "the agent has {open} of {count} servers after {LIMIT:?}"
            );
            sleep(LOOK_INTERVAL).await;
        }
    }

    /// Returns the number of servers that the agent is connected to.
    async fn open(&self) -> anyhow::Result<f64> {
        let metrics = scrape(self.topology.agent_health(0)).await?;
        Ok(metrics.value(OPEN_SERVERS, &[]).unwrap_or_default())
    }
}

/// Returns the time until the agent is connected to all servers after a change.
async fn time(lab: &Lab, pair: Pair, change: Change) -> anyhow::Result<Duration> {
    let counts: &[usize] = match change {
        Change::Start(5) => &[5; 5],
        Change::Start(_) | Change::Replaced => &[3; 3],
        Change::Joined => &[1, 3, 3],
    };
    let mut stage = Stage::start(lab, pair, counts).await?;
    let begin = match change {
        Change::Start(_) => {
            let begin = Instant::now();
            stage.add_agent(&[]).await;
            begin
        }
        Change::Replaced => {
            stage.add_agent(&[]).await;
            stage.connected(3).await?;
            // Like a Service, the balancer has no endpoint for a server that is not ready.
            stage.balance([0, 2])?;
            stage.topology.kill_server(1);
            stage.topology.start_server(1).await;
            // The agent has noticed the loss: the kernel reset its connection.
            ensure!(
                stage.open().await? < 3.0,
                "the agent has not noticed the loss"
            );
            stage.balance(0..3)?;
            Instant::now()
        }
        Change::Joined => {
            stage.balance([0])?;
            stage.add_agent(&[FOREVER]).await;
            stage.connected(1).await?;
            // Our agent's gap between probes has its largest value by then. The servers join at a random time of the gap.
            sleep(Duration::from_millis(rand::random_range(25_000..37_000))).await;
            stage.balance(0..3)?;
            Instant::now()
        }
    };
    stage.connected(stage.servers).await?;
    Ok(begin.elapsed())
}

/// Returns the number of handshakes per hour in the steady state, as the balancer counts connections.
async fn handshakes(lab: &Lab, pair: Pair) -> anyhow::Result<f64> {
    let mut stage = Stage::start(lab, pair, &[3; 3]).await?;
    stage.add_agent(&[FOREVER]).await;
    stage.connected(3).await?;
    sleep(SETTLE).await;
    let (before, begin) = (stage.topology.balancer().accepted(), Instant::now());
    sleep(lab.window).await;
    let made = stage.topology.balancer().accepted() - before;
    Ok(made as f64 * 3600.0 / begin.elapsed().as_secs_f64())
}
