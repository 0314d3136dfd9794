//! The subcommand `path`: server and agent on two sides of a link with delay, loss and a limited rate.
//!
//! Everything runs in a network of its own, with [`Link`] between agent and server. Stock programs use the kernel's
//! default, which this subcommand sets to `cubic`, the default of most distributions, or else to `reno`.

mod front_door;
mod table;

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use clap::{Args, value_parser};
use culvert_kit::client::FrontEnd;
use culvert_kit::pki::CLUSTER_NAME;
use culvert_tests::link::{Conditions, FAR, Link};
use culvert_tests::namespace::{self, hosts};
use culvert_tests::{Executable, Mode, Topology, Transport};
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};

use self::front_door::FrontDoor;
use self::table::{Line, Sample};
use crate::bulk::{self, BESIDE, Bulk};
use crate::endpoint::Endpoints;
use crate::entry::Entry;
use crate::figures::{MIB, Metric, P50, P99};
use crate::harness::{ask, harness};
use crate::load::{self, Job, Work};
use crate::names::{AGENT, SERVER, STOCK};
use crate::programs::Programs;
use crate::ready::{OverQuic, PREFER_QUIC, carries};
use crate::report::Machine;

/// Defaults of the kernel that halve their rate at a loss. A network of its own accepts only those that the machine
/// permits to every process.
const DEFAULTS: [&str; 2] = ["cubic", "reno"];

/// File with the kernel's default for new sockets of this network.
const DEFAULT_FILE: &str = "/proc/sys/net/ipv4/tcp_congestion_control";

/// Flags of production, as in `tunnel`.
const AGENT_FLAGS: [&str; 3] = ["--v=1", "--sync-interval=1s", "--sync-interval-cap=10s"];

/// Time between the start of bulk transfers and their measurement: fixed, and for each round trip.
const RAMP: Duration = Duration::from_secs(1);
const RAMP_TRIPS: u32 = 20;

/// Time limit of a measurement without its load.
const LIMIT: Duration = Duration::from_secs(60);

/// Number of dials, one after another.
const DIALS: u64 = 10;

/// Options of the subcommand.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Round trips of the link, in milliseconds
    #[arg(long, value_name = "MS,...", value_delimiter = ',', default_values_t = [1, 30, 100], value_parser = value_parser!(u64).range(1..=1000))]
    rtt: Vec<u64>,

    /// Lost packets in each direction, in percent
    #[arg(long, value_name = "PERCENT,...", value_delimiter = ',', default_values_t = [0.0, 0.1, 1.0, 3.0])]
    loss: Vec<f64>,

    /// Rate of the link in each direction, in Mbit/s
    #[arg(long, value_name = "MBIT", default_value_t = 100, value_parser = value_parser!(u64).range(1..=1000))]
    rate: u64,

    /// Seconds of load per measurement
    #[arg(long, value_name = "S", default_value_t = 4, value_parser = value_parser!(u64).range(1..=300))]
    seconds: u64,

    /// Number of measurements per row; the table shows medians
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u32).range(1..=1000))]
    rounds: u32,

    /// Put a front door between the link and the server: ours for our programs, Envoy for the stock programs
    #[arg(long)]
    front_door: bool,

    /// Measure only rows with this text in their names
    #[arg(long, value_name = "TEXT", default_value = "")]
    row: String,

    /// Exit with code 1 if a target is missed
    #[arg(long)]
    strict: bool,

    /// Write the result to a file
    #[arg(long, value_name = "PATH")]
    json: Option<PathBuf>,
}

/// A pair of server and agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Contender {
    /// The stock programs.
    Stock,
    /// Our programs with this `--link-congestion`.
    Ours(&'static str),
    /// Our programs with `--transport=quic`.
    Quic,
}

const CONTENDERS: [Contender; 4] = [
    Contender::Ours("system"),
    Contender::Ours("auto"),
    Contender::Quic,
    Contender::Stock,
];

/// UDP port of [`Contender::Quic`]. Any port: the network belongs to this subcommand.
const QUIC_PORT: u16 = 18443;

/// A measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Row {
    Downloads(usize),
    Uploads(usize),
    EchoBesideDownloads,
    EchoBesideUploads,
    Dials,
}

const ROWS: [Row; 7] = [
    Row::Downloads(1),
    Row::Downloads(8),
    Row::Uploads(1),
    Row::Uploads(8),
    Row::EchoBesideDownloads,
    Row::EchoBesideUploads,
    Row::Dials,
];

/// The running programs of a contender. Dropping the value kills them.
struct Running {
    entry: Entry,
    endpoints: Endpoints,
    /// Check of the dials; `None` if they need not use QUIC.
    over_quic: Option<OverQuic>,
    topology: Topology,
    _door: Option<FrontDoor>,
}

// === impl Contender ===

impl Contender {
    fn name(self) -> &'static str {
        match self {
            Self::Stock => STOCK,
            Self::Ours("system") => "ours, system",
            Self::Ours(_) => "ours, auto",
            Self::Quic => "ours, QUIC",
        }
    }

    /// Measures rows. Returns a sample for each metric of the rows.
    async fn measure(
        self,
        programs: &Programs,
        has_door: bool,
        rows: &[Row],
        times: [Duration; 2],
    ) -> Vec<Sample> {
        let mut running = match self.start(programs, has_door).await {
            Ok(running) => running,
            Err(error) => return self.failures(rows, &error),
        };
        let mut samples = Vec::new();
        for row in rows {
            match running.measure(*row, times).await {
                Ok(measured) => samples.extend(measured.into_iter().map(Ok)),
                Err(error) => samples.extend(self.failures(&[*row], &error)),
            }
        }
        samples
    }

    /// Prints the error of a measurement of these rows, and returns a failure for each of their metrics.
    fn failures(self, rows: &[Row], error: &anyhow::Error) -> Vec<Sample> {
        println!("FAILED {}, {rows:?}: {error:#}", self.name());
        let metrics = rows.iter().flat_map(|row| row.metrics());
        metrics.map(|_| Err(format!("{error:#}"))).collect()
    }

    /// Starts the programs, and waits until they carry data, over QUIC for [`Self::Quic`].
    async fn start(self, programs: &Programs, has_door: bool) -> anyhow::Result<Running> {
        let door = match self {
            _ if !has_door => None,
            Self::Stock => Some(FrontDoor::envoy().await?),
            Self::Ours(choice) => Some(FrontDoor::ours(programs, choice).await?),
            Self::Quic => Some(FrontDoor::ours(programs, "auto").await?),
        };
        let [server, agent] = match (self, programs.stock) {
            (Self::Ours(_) | Self::Quic, _) => [SERVER, AGENT].map(|name| programs.path(name)),
            (Self::Stock, Some(stock)) => {
                [&stock.proxy_server, &stock.proxy_agent].map(Clone::clone)
            }
            (Self::Stock, None) => bail!("needs Go"),
        }
        .map(Executable::At);
        let mut of_server = vec!["--v=1".to_owned()];
        let mut of_agent = vec![format!("--proxy-server-host={CLUSTER_NAME}")];
        if has_door {
            of_server.push(format!("--agent-port={}", front_door::PORT));
            of_agent.push(format!("--proxy-server-port={}", front_door::PORT));
        } else {
            of_server.push("--agent-bind-address=0.0.0.0".to_owned());
        }
        match self {
            Self::Ours(choice) => {
                for flags in [&mut of_server, &mut of_agent] {
                    flags.push(format!("--link-congestion={choice}"));
                }
            }
            Self::Quic => {
                of_server.push(format!("--agent-quic-port={QUIC_PORT}"));
                of_agent.push(PREFER_QUIC.to_owned());
            }
            Self::Stock => {}
        }
        let [of_server, of_agent] = [&of_server, &of_agent]
            .map(|flags| flags.iter().map(String::as_str).collect::<Vec<_>>());
        let builder = Topology::builder(Mode::HttpConnect, Transport::Uds)
            .server(server, &of_server)
            .agent_args(&AGENT_FLAGS)
            .agent(agent, &of_agent);
        let topology = harness(builder.start()).await?;
        let FrontEnd::ConnectUds(front) = topology.front_end() else {
            bail!("the front end is not a Unix socket");
        };
        let entry = Entry::Connect(front.clone());
        let endpoints = Endpoints::start().await?;
        let target = endpoints.lean();
        let over_quic = match self {
            Self::Quic => Some(OverQuic::begin(&topology, &entry, target).await?),
            _ => {
                carries(&entry, target).await?;
                None
            }
        };
        Ok(Running {
            entry,
            endpoints,
            over_quic,
            topology,
            _door: door,
        })
    }
}

// === impl Running ===

impl Running {
    /// Measures a row. Fails if dials used TCP although they are to use QUIC.
    async fn measure(&mut self, row: Row, times: [Duration; 2]) -> anyhow::Result<Vec<f64>> {
        let limit = LIMIT + times.iter().sum::<Duration>();
        let measuring = row.measure(&self.entry, self.endpoints.lean(), times);
        let measured = timeout(limit, measuring).await;
        if let Some(over_quic) = &mut self.over_quic {
            over_quic.check(&self.topology).await?;
        }
        measured.context("no result in time")?
    }
}

// === impl Row ===

impl Row {
    /// Returns the metrics of the row: rates in MiB/s, times in ms.
    fn metrics(self) -> &'static [Metric] {
        const DOWNLOAD: &[Metric] = &[Metric::higher("download, 1 connection, MiB/s")];
        const DOWNLOADS: &[Metric] = &[Metric::higher("download, 8 connections, MiB/s")];
        const UPLOAD: &[Metric] = &[Metric::higher("upload, 1 connection, MiB/s")];
        const UPLOADS: &[Metric] = &[Metric::higher("upload, 8 connections, MiB/s")];
        const BESIDE_DOWNLOADS: &[Metric] = &[
            Metric::lower("echo beside 2 downloads, p50 ms"),
            Metric::lower("echo beside 2 downloads, p99 ms"),
            Metric::higher("2 downloads beside echo, MiB/s"),
        ];
        const BESIDE_UPLOADS: &[Metric] = &[
            Metric::lower("echo beside 2 uploads, p50 ms"),
            Metric::lower("echo beside 2 uploads, p99 ms"),
            Metric::higher("2 uploads beside echo, MiB/s"),
        ];
        const DIAL: &[Metric] = &[Metric::lower("dial + 1 byte, ms")];
        match self {
            Self::Downloads(1) => DOWNLOAD,
            Self::Downloads(_) => DOWNLOADS,
            Self::Uploads(1) => UPLOAD,
            Self::Uploads(_) => UPLOADS,
            Self::EchoBesideDownloads => BESIDE_DOWNLOADS,
            Self::EchoBesideUploads => BESIDE_UPLOADS,
            Self::Dials => DIAL,
        }
    }

    /// Returns a value for each of [`Self::metrics`].
    async fn measure(
        self,
        entry: &Entry,
        target: SocketAddr,
        [ramp, time]: [Duration; 2],
    ) -> anyhow::Result<Vec<f64>> {
        let bulk = Bulk::default();
        let (mut load, has_echo) = match self {
            Self::Downloads(count) => (bulk.downloads(entry, target, count), false),
            Self::Uploads(count) => (bulk.uploads(entry, target, count), false),
            Self::EchoBesideDownloads => (bulk.downloads(entry, target, BESIDE), true),
            Self::EchoBesideUploads => (bulk.uploads(entry, target, BESIDE), true),
            Self::Dials => {
                let done = load::run(entry, target, Job::new(Work::Dials, 1, DIALS)).await?;
                return Ok(vec![done.elapsed.as_secs_f64() * 1000.0 / DIALS as f64]);
            }
        };
        if has_echo {
            let figures = bulk::echo_beside(entry, target, load, [ramp, time]).await?;
            let scaled = figures.into_iter().map(|(metric, value)| match metric {
                P50 | P99 => value / 1000.0,
                _ => value,
            });
            return Ok(scaled.collect());
        }
        sleep(ramp).await;
        Ok(vec![load.rate(time).await? / MIB])
    }
}

/// Measures all rows and prints the table. Returns true if every measurement was possible and, with `--strict`, our
/// programs meet the target.
pub(crate) async fn run(options: Options) -> anyhow::Result<bool> {
    ensure!(
        namespace::is_inside(),
        "needs network namespaces: run as root"
    );
    for loss in &options.loss {
        ensure!(
            (0.0..100.0).contains(loss),
            "--loss must be 0 to 100, got {loss}"
        );
    }
    let is_wanted = |metric: &Metric| metric.name.contains(&options.row);
    let mut rows = ROWS.to_vec();
    rows.retain(|row| row.metrics().iter().any(is_wanted));
    ensure!(!rows.is_empty(), "no row name contains {:?}", options.row);
    let programs = Programs::find()?;
    let set = |name: &&str| std::fs::write(DEFAULT_FILE, name).is_ok();
    let default = DEFAULTS.into_iter().find(set);
    let default = default.context("the kernel permits neither cubic nor reno as its default")?;
    ask(|| namespace::ip("link set lo up"))?.map_err(anyhow::Error::msg)?;
    ask(|| hosts(&[(CLUSTER_NAME, FAR)]))?;
    println!(
        "{}; default {default}; link of {} Mbit/s with a queue of 100 ms, {} x {} s per row",
        Machine::this(),
        options.rate,
        options.rounds,
        options.seconds
    );
    let mut head = format!("{:>6} {:>6}  {:31}", "rtt ms", "loss %", "");
    for contender in CONTENDERS {
        let _ = write!(head, " {:>13}", contender.name());
    }
    println!("{head} {:>9}  target", "by stock");
    let (mut lines, mut clean) = (Vec::new(), true);
    for rtt in &options.rtt {
        for loss in &options.loss {
            let conditions = Conditions {
                delay: Duration::from_micros(rtt * 500),
                loss: loss / 100.0,
                rate: Some(options.rate as f64 * 1e6 / 8.0),
                ..Conditions::default()
            };
            for line in measure(&options, &rows, &programs, conditions).await {
                println!("{rtt:>6} {loss:>6}  {line}");
                clean &= line.is_clean() && (line.is_met() != Some(false) || !options.strict);
                lines.push(line.json(*rtt, *loss));
            }
            // After each link, so that an interrupted run leaves the lines so far.
            if let Some(path) = &options.json {
                write(path, &options, default, &lines)?;
            }
        }
    }
    Ok(clean)
}

/// Writes the lines measured so far to a file.
fn write(path: &Path, options: &Options, default: &str, lines: &[Value]) -> anyhow::Result<()> {
    let report = json!({
        "machine": Machine::this().to_string(),
        "default": default,
        "rate_mbit": options.rate,
        "rounds": options.rounds,
        "seconds": options.seconds,
        "lines": lines,
    });
    std::fs::write(path, format!("{report:#}\n")).with_context(|| path.display().to_string())
}

/// Measures all rows under the same conditions. Each round measures one contender after another, and begins with another
/// contender than the round before.
async fn measure(
    options: &Options,
    rows: &[Row],
    programs: &Programs,
    conditions: Conditions,
) -> Vec<Line> {
    let metrics = rows.iter().flat_map(|row| row.metrics());
    let mut lines: Vec<Line> = metrics.map(|metric| Line::new(*metric)).collect();
    let mut order: Vec<(usize, Contender)> = CONTENDERS.into_iter().enumerate().collect();
    for round in 1..=options.rounds {
        for (index, contender) in &order {
            // The same packets are lost for every contender of a round.
            let link = ask(|| Link::start(conditions, round.into()));
            let link = link.and_then(|link| link.context("cannot create the link"));
            let times = [
                RAMP + 2 * RAMP_TRIPS * conditions.delay,
                Duration::from_secs(options.seconds),
            ];
            let samples = match &link {
                Ok(_) => {
                    let has_door = options.front_door;
                    contender.measure(programs, has_door, rows, times).await
                }
                Err(error) => contender.failures(rows, error),
            };
            for (line, sample) in lines.iter_mut().zip(samples) {
                line.add(*index, sample);
            }
        }
        order.rotate_left(1);
    }
    lines
}
