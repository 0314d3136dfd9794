//! The subcommand `tunnel`: its rows, and how one of them is measured.
//!
//! All contenders run all the time. Every round measures every row, and every row one contender right
//! after the other, beginning with another one each time: what the machine does besides meets all.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::{Args, ValueEnum};
use culvert_tests::Mode;
use tokio::time::{sleep, timeout};

use crate::load::{Endpoints, Job, Work};
use crate::report::{Figures, Machine, Metric, Report};
use crate::topology::{CONTENDERS, Contender, Programs, Tunnel};
use crate::{driver, load};

/// How long one job may take before its row fails; a tunnel that hangs shall not end the run.
const JOB_LIMIT: Duration = Duration::from_secs(60);

/// What closes behind the last byte, such as a dial's connections, belongs to the processor time of the
/// job. This much time after it is added.
const SETTLE: Duration = Duration::from_millis(100);

/// Bytes per MiB and per GiB.
const MIB: f64 = (1u64 << 20) as f64;
const GIB: f64 = (1u64 << 30) as f64;

/// What to measure.
#[derive(Debug, Args)]
pub struct Options {
    /// How often every row is measured; the table shows medians
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,

    /// How many seconds of load every measurement is
    #[arg(long, value_name = "S", default_value_t = 2.5, value_parser = seconds)]
    seconds: f64,

    /// One round of half a second: shows that everything runs, proves nothing else
    #[arg(long)]
    quick: bool,

    /// Write all samples to a file
    #[arg(long, value_name = "PATH")]
    json: Option<PathBuf>,

    /// Only this front end
    #[arg(long, value_enum)]
    front: Option<Front>,

    /// Only rows with this text in their names
    #[arg(long, value_name = "TEXT", default_value = "")]
    row: String,

    /// Only this pair (repeatable): ours, stock, ours+stock, stock+ours (server+agent)
    #[arg(long = "contender", value_name = "NAME")]
    contenders: Vec<String>,
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.1..=20.0).contains(&seconds) => Ok(seconds),
        _ => Err("must be a number from 0.1 to 20".to_owned()),
    }
}

/// What the load speaks to the server, over a Unix socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Front {
    /// HTTP CONNECT
    Connect,
    /// The packet protocol
    Grpc,
}

impl Front {
    fn name(self) -> &'static str {
        match self {
            Self::Connect => "CONNECT",
            Self::Grpc => "gRPC",
        }
    }

    fn mode(self) -> Mode {
        match self {
            Self::Connect => Mode::HttpConnect,
            Self::Grpc => Mode::Grpc,
        }
    }
}

/// One kind of load.
#[derive(Debug, Clone, Copy)]
struct Row {
    name: &'static str,
    work: Work,
    connections: u64,
    /// How much each connection does first, to see how fast the contender is.
    warm_up: u64,
}

const fn row(name: &'static str, work: Work, connections: u64, warm_up: u64) -> Row {
    Row {
        name,
        work,
        connections,
        warm_up,
    }
}

const ROWS: [Row; 7] = [
    row("download, 1 connection", Work::Download, 1, 32 << 20),
    row("download, 8 connections", Work::Download, 8, 8 << 20),
    row("upload, 1 connection", Work::Upload, 1, 32 << 20),
    row("upload, 8 connections", Work::Upload, 8, 8 << 20),
    row("64-byte echo, 1 connection", Work::Echo, 1, 500),
    row("64-byte echo, 8 connections", Work::Echo, 8, 100),
    row("dial + 1 byte, 8 at a time", Work::Dials, 8, 20),
];

const RATE: Metric = Metric::higher("MiB/s");
const CPU_PER_GIB: Metric = Metric::lower("CPU s/GiB");
const P50: Metric = Metric::lower("p50 us");
const P99: Metric = Metric::lower("p99 us");
const CPU_PER_ECHO: Metric = Metric::lower("CPU us/echo");
const DIAL_RATE: Metric = Metric::higher("dials/s");
const CPU_PER_DIAL: Metric = Metric::lower("CPU us/dial");
const MEMORY_START: Metric = Metric::lower("MiB at start");
const MEMORY_AFTER: Metric = Metric::lower("MiB after");

/// Measures and reports. Whether everything went well.
///
/// # Errors
/// When nothing can be measured at all, or the JSON file cannot be written.
pub async fn run(mut options: Options) -> anyhow::Result<bool> {
    if options.quick {
        (options.rounds, options.seconds) = (1, 0.5);
    }
    let programs = Programs::find()?;
    let contenders = options.contenders(&programs)?;
    let rows = options.rows()?;
    let bench = Bench {
        endpoints: Endpoints::start().await.context("endpoints")?,
        programs,
        rounds: options.rounds,
        seconds: options.seconds,
    };
    let mut report = Report::new(Machine::this(), options.rounds, options.seconds);
    let fronts = options
        .front
        .map_or(Front::value_variants().to_vec(), |one| vec![one]);
    for front in fronts {
        if front == Front::Grpc && bench.programs.stock.is_none() {
            eprintln!("gRPC rows left out: they need the Go driver");
            continue;
        }
        bench.front(front, &contenders, &rows, &mut report).await;
    }
    print!("{report}");
    if let Some(path) = &options.json {
        let text = format!("{:#}\n", report.json());
        std::fs::write(path, text).with_context(|| path.display().to_string())?;
    }
    Ok(report.is_clean())
}

impl Options {
    fn contenders(&self, programs: &Programs) -> anyhow::Result<Vec<Contender>> {
        for name in &self.contenders {
            let known = CONTENDERS.iter().any(|c| c.name == name);
            ensure!(known, "no contender is called {name:?}");
        }
        let wanted = |c: &Contender| {
            self.contenders.is_empty() || self.contenders.iter().any(|name| name == c.name)
        };
        let mut contenders = CONTENDERS.to_vec();
        contenders.retain(|c| wanted(c) && (programs.stock.is_some() || !c.needs_stock()));
        ensure!(!contenders.is_empty(), "no contender is left without Go");
        Ok(contenders)
    }

    fn rows(&self) -> anyhow::Result<Vec<Row>> {
        let mut rows = ROWS.to_vec();
        rows.retain(|row| row.name.contains(&self.row));
        ensure!(!rows.is_empty(), "no row has {:?} in its name", self.row);
        Ok(rows)
    }
}

/// What every measurement needs.
struct Bench {
    endpoints: Endpoints,
    programs: Programs,
    rounds: u32,
    seconds: f64,
}

/// A contender that runs.
struct Running {
    name: &'static str,
    tunnel: Tunnel,
    /// Its memory before any load, in bytes.
    at_start: u64,
}

impl Bench {
    /// Measures all rows through one kind of front end.
    async fn front(
        &self,
        front: Front,
        contenders: &[Contender],
        rows: &[Row],
        report: &mut Report,
    ) {
        let mut running = Vec::new();
        for contender in contenders {
            match self.start(front, contender).await {
                Ok(started) => running.push(started),
                Err(error) => report.add(front.name(), "start", contender.name, Err(error)),
            }
        }
        for round in 1..=self.rounds {
            for row in rows {
                for contender in &mut running {
                    let figures = self.measure(front, row, &mut contender.tunnel).await;
                    eprintln!(
                        "{round}/{} {} {}, {}: {}",
                        self.rounds,
                        front.name(),
                        row.name,
                        contender.name,
                        describe(&figures)
                    );
                    report.add(front.name(), row.name, contender.name, figures);
                }
                if !running.is_empty() {
                    running.rotate_left(1);
                }
            }
        }
        for contender in &mut running {
            let figures = contender.tunnel.rss().map(|after| {
                vec![
                    (MEMORY_START, contender.at_start as f64 / MIB),
                    (MEMORY_AFTER, after as f64 / MIB),
                ]
            });
            report.add(front.name(), "memory", contender.name, figures);
        }
    }

    async fn start(&self, front: Front, contender: &Contender) -> anyhow::Result<Running> {
        let mut tunnel = Tunnel::start(contender, front.mode(), &self.programs).await?;
        Ok(Running {
            name: contender.name,
            at_start: tunnel.rss()?,
            tunnel,
        })
    }

    /// Measures one row of one contender: warms it up twice, the second time knowing how fast it is
    /// by and large, and then gives it work for the wanted time.
    async fn measure(
        &self,
        front: Front,
        row: &Row,
        tunnel: &mut Tunnel,
    ) -> anyhow::Result<Figures> {
        let mut job = Job {
            work: row.work,
            connections: row.connections,
            amount: row.warm_up,
        };
        for wanted in [self.seconds / 4.0, self.seconds] {
            let done = self.work(front, tunnel, job).await.context("warm-up")?;
            let factor = wanted / done.elapsed.as_secs_f64().max(1e-6);
            job.amount = ((job.amount as f64 * factor) as u64).max(1);
        }
        let before = tunnel.cpu_time()?;
        let done = self.work(front, tunnel, job).await?;
        sleep(SETTLE).await;
        let cpu = (tunnel.cpu_time()? - before).as_secs_f64();
        let (total, elapsed) = (job.total() as f64, done.elapsed.as_secs_f64());
        Ok(match row.work {
            Work::Download | Work::Upload => vec![
                (RATE, total / MIB / elapsed),
                (CPU_PER_GIB, cpu / (total / GIB)),
            ],
            Work::Echo => vec![
                (P50, done.p50_us),
                (P99, done.p99_us),
                (CPU_PER_ECHO, cpu * 1e6 / total),
            ],
            Work::Dials => vec![
                (DIAL_RATE, total / elapsed),
                (CPU_PER_DIAL, cpu * 1e6 / total),
            ],
        })
    }

    async fn work(&self, front: Front, tunnel: &Tunnel, job: Job) -> anyhow::Result<load::Done> {
        let socket = &tunnel.socket;
        let work = async {
            match front {
                Front::Connect => load::run(socket, &self.endpoints, job).await,
                Front::Grpc => {
                    let stock = self.programs.stock.context("the driver needs Go")?;
                    driver::run(stock, socket, self.endpoints.raw(), job).await
                }
            }
        };
        let done = timeout(JOB_LIMIT, work).await;
        done.with_context(|| format!("no end within {JOB_LIMIT:?}"))?
    }
}

/// One measurement, in a line.
fn describe(figures: &anyhow::Result<Figures>) -> String {
    match figures {
        Ok(figures) => {
            let texts: Vec<String> = figures
                .iter()
                .map(|(metric, value)| format!("{value:.1} {}", metric.name))
                .collect();
            texts.join(", ")
        }
        Err(error) => format!("failed: {error:#}"),
    }
}
