//! The subcommand `path`: server and agent on two sides of a link with delay, loss and a limited rate.
//!
//! Everything runs in a network of its own, with [`Link`] between agent and server. Stock programs use the kernel's
//! default, which this subcommand sets to `cubic`, the default of most distributions, or else to `reno`.

mod front_door;

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
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
use crate::bulk::{self, BESIDE, Bulk};
use crate::endpoint::Endpoints;
use crate::entry::Entry;
use crate::figures::{MIB, Metric, P50, P99};
use crate::harness::{ask, harness};
use crate::load::{self, Job, Work};
use crate::names::{AGENT, SERVER, STOCK};
use crate::programs::Programs;
use crate::ready::{PREFER_QUIC, carries, uses_quic};
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

/// Smallest rate or speed of our programs by the stock programs.
const TARGET: f64 = 0.95;

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
        Ok(Running {
            entry: Entry::Connect(front.clone()),
            topology,
            _door: door,
        })
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
    let programs = Programs::find()?;
    let set = |name: &&str| std::fs::write(DEFAULT_FILE, name).is_ok();
    let default = DEFAULTS.into_iter().find(set);
    let default = default.context("the kernel permits neither cubic nor reno as its default")?;
    ask(|| namespace::ip("link set lo up"))?.map_err(anyhow::Error::msg)?;
    ask(|| hosts(&[(CLUSTER_NAME, FAR)]))?;
    println!(
        "{}; default {default}; link of {} Mbit/s with a queue of 100 ms, {} s per measurement",
        Machine::this(),
        options.rate,
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
            let measured = measure(&options, &programs, conditions).await;
            for (metric, values) in measured? {
                let (text, is_met) = line(metric, &values);
                println!("{rtt:>6} {loss:>6}  {text}");
                clean &= values.iter().all(Option::is_some) && (is_met || !options.strict);
                lines.push(entry_of(*rtt, *loss, metric, &values));
            }
        }
    }
    if let Some(path) = &options.json {
        let machine = Machine::this().to_string();
        let report = json!({ "machine": machine, "default": default, "rate_mbit": options.rate, "seconds": options.seconds, "lines": lines });
        std::fs::write(path, format!("{report:#}\n"))
            .with_context(|| path.display().to_string())?;
    }
    Ok(clean)
}

/// The values of [`CONTENDERS`], in their order.
type Values = Vec<Option<f64>>;

/// Measures all rows under the same conditions.
async fn measure(
    options: &Options,
    programs: &Programs,
    conditions: Conditions,
) -> anyhow::Result<Vec<(Metric, Values)>> {
    let is_wanted = |metric: &Metric| metric.name.contains(&options.row);
    let mut rows = ROWS.to_vec();
    rows.retain(|row| row.metrics().iter().any(is_wanted));
    let metrics = rows.iter().flat_map(|row| row.metrics());
    let mut lines: Vec<(Metric, Values)> = metrics.map(|metric| (*metric, Values::new())).collect();
    let times = [
        RAMP + 2 * RAMP_TRIPS * conditions.delay,
        Duration::from_secs(options.seconds),
    ];
    for contender in CONTENDERS {
        // The same packets are lost for every contender.
        let _link = ask(|| Link::start(conditions, 1))?.context("cannot create the link")?;
        let running = match contender.start(programs, options.front_door).await {
            Ok(running) => running,
            Err(error) => {
                println!("FAILED {}: {error:#}", contender.name());
                lines.iter_mut().for_each(|(_, values)| values.push(None));
                continue;
            }
        };
        let endpoints = Endpoints::start().await?;
        let target = endpoints.lean();
        carries(&running.entry, target).await?;
        if contender == Contender::Quic {
            uses_quic(&running.topology, &running.entry, target).await?;
        }
        let mut values = lines.iter_mut().map(|(_, values)| values);
        for row in &rows {
            let limit = LIMIT + times.iter().sum::<Duration>();
            let measured = timeout(limit, row.measure(&running.entry, target, times)).await;
            let measured = measured.context("no result in time").flatten();
            let count = row.metrics().len();
            let measured = match measured {
                Ok(measured) => measured.into_iter().map(Some).collect(),
                Err(error) => {
                    println!("FAILED {}, {row:?}: {error:#}", contender.name());
                    vec![None; count]
                }
            };
            for (values, measured) in values.by_ref().take(count).zip(measured) {
                values.push(measured);
            }
        }
    }
    Ok(lines)
}

/// Formats a row. The second value is true if our programs with `auto` meet the target, or if there is nothing to compare.
fn line(metric: Metric, values: &[Option<f64>]) -> (String, bool) {
    let mut text = format!("{:31}", metric.name);
    for value in values {
        let value = value.map_or_else(|| "failed".to_owned(), |value| format!("{value:.2}"));
        let _ = write!(text, " {value:>13}");
    }
    let [_, Some(auto), _, Some(stock)] = *values else {
        return (text, true);
    };
    let by = match metric.higher_is_better {
        true => auto / stock,
        false => stock / auto,
    };
    let is_met = by >= TARGET;
    let verdict = if is_met { "met" } else { "MISSED" };
    let _ = write!(text, " {by:>9.2}  {verdict}");
    (text, is_met)
}

fn entry_of(rtt: u64, loss: f64, metric: Metric, values: &[Option<f64>]) -> Value {
    let samples = CONTENDERS.iter().zip(values);
    let samples: serde_json::Map<String, Value> = samples
        .map(|(contender, value)| (contender.name().to_owned(), json!(value)))
        .collect();
    json!({ "rtt_ms": rtt, "loss_percent": loss, "row": metric.name, "values": samples })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn larger_rates_and_smaller_times_meet_the_target() {
        let [rate, time] = [Metric::higher("rate"), Metric::lower("time")];
        let values = [Some(1.0), Some(2.0), None, Some(4.0)];
        let (text, is_met) = line(rate, &values);
        assert!(!is_met && text.ends_with("0.50  MISSED"), "{text}");
        let (text, is_met) = line(time, &values);
        assert!(is_met && text.ends_with("2.00  met"), "{text}");
        let (text, _) = line(time, &[None, Some(3.0), Some(2.0), None]);
        assert!(text.ends_with("2.00        failed"), "{text}");
    }
}
