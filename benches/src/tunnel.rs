//! The subcommand `tunnel`: its options, and whose turn it is.
//!
//! All contenders run all the time; some rows start another one of each. Every round measures every row, and every row one contender right
//! after the other, beginning with another one each time: what the machine does besides meets all.

use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use clap::{Args, ValueEnum};
use culvert_tests::Mode;

use crate::endpoint::Endpoints;
use crate::measure::Lab;
use crate::report::{Figures, HUNG, Machine, Report, number};
use crate::rows::{Kind, MEMORY, MEMORY_AFTER, MEMORY_START, MIB, ROWS, Row};
use crate::topology::{CONTENDERS, Contender, Programs, Tunnel};
use crate::{memory, svg};

/// What to measure.
#[derive(Debug, Args)]
pub struct Options {
    /// How often every row is measured; the table shows medians
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,

    /// How many seconds of load every measurement is
    #[arg(long, value_name = "S", default_value_t = 1.2, value_parser = seconds)]
    seconds: f64,

    /// One round of half a second: shows that everything runs, proves nothing else
    #[arg(long)]
    quick: bool,

    /// Write all samples to a file
    #[arg(long, value_name = "PATH")]
    json: Option<PathBuf>,

    /// Draw the comparison as an SVG file
    #[arg(long, value_name = "PATH")]
    svg: Option<PathBuf>,

    /// Only this front end
    #[arg(long, value_enum)]
    front: Option<Front>,

    /// Only rows with this text in their names
    #[arg(long, value_name = "TEXT", default_value = "")]
    row: String,

    /// Only this one (repeatable): ours, stock, ours+stock, stock+ours (server+agent), relay,
    /// rathole, direct
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
pub enum Front {
    /// HTTP CONNECT
    Connect,
    /// The packet protocol
    Grpc,
}

impl Front {
    /// What the table calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Connect => "CONNECT",
            Self::Grpc => "gRPC",
        }
    }

    /// The mode in which a server has it.
    pub fn mode(self) -> Mode {
        match self {
            Self::Connect => Mode::HttpConnect,
            Self::Grpc => Mode::Grpc,
        }
    }
}

/// Measures and reports. Whether everything went well.
///
/// # Errors
/// When nothing can be measured at all, or the JSON file cannot be written.
pub async fn run(mut options: Options) -> anyhow::Result<bool> {
    if options.quick {
        (options.rounds, options.seconds) = (1, 0.5);
    }
    let descriptors = memory::raise_limit();
    let lab = Lab {
        endpoints: Endpoints::start().await.context("endpoints")?,
        programs: Programs::find()?,
        seconds: options.seconds,
        descriptors,
    };
    let plan = Plan {
        contenders: options.contenders(&lab.programs)?,
        rows: options.rows()?,
        fronts: options.fronts(&lab.programs),
        rounds: options.rounds,
    };
    match plan.estimate(options.seconds) {
        seconds @ ..120.0 => eprintln!("this takes about {seconds:.0} seconds"),
        seconds => eprintln!("this takes about {:.0} minutes", seconds / 60.0),
    }
    let mut report = Report::new(Machine::this(), options.rounds, options.seconds);
    for front in &plan.fronts {
        plan.front(&lab, *front, &mut report).await;
    }
    print!("{report}");
    if let Some(path) = &options.json {
        let text = format!("{:#}\n", report.json());
        std::fs::write(path, text).with_context(|| path.display().to_string())?;
    }
    if let Some(path) = &options.svg {
        let text = svg::draw(&report);
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
        let mut contenders = CONTENDERS.to_vec();
        contenders.retain(|c| {
            self.contenders.is_empty() || self.contenders.iter().any(|name| name == c.name)
        });
        contenders.retain(|contender| {
            let missing = contender.missing(programs);
            if let Some(why) = missing {
                eprintln!("{} left out: {why}", contender.name);
            }
            missing.is_none()
        });
        ensure!(!contenders.is_empty(), "no contender is left");
        Ok(contenders)
    }

    fn rows(&self) -> anyhow::Result<Vec<Row>> {
        let mut rows = ROWS.to_vec();
        rows.retain(|row| row.name.contains(&self.row));
        let wanted = !rows.is_empty() || MEMORY.contains(&self.row);
        ensure!(wanted, "no row has {:?} in its name", self.row);
        Ok(rows)
    }

    fn fronts(&self, programs: &Programs) -> Vec<Front> {
        let mut fronts = self
            .front
            .map_or(Front::value_variants().to_vec(), |one| vec![one]);
        if programs.stock.is_none() {
            eprintln!("gRPC rows left out: they need the Go driver");
            fronts.retain(|front| *front != Front::Grpc);
        }
        fronts
    }
}

/// What is to be measured.
struct Plan {
    contenders: Vec<Contender>,
    rows: Vec<Row>,
    fronts: Vec<Front>,
    rounds: u32,
}

/// A contender that runs.
struct Running {
    contender: Contender,
    tunnel: Tunnel,
    /// Its memory before any load, in bytes; none without a program.
    at_start: Option<u64>,
}

impl Running {
    async fn start(lab: &Lab, front: Front, contender: Contender) -> anyhow::Result<Self> {
        let mut tunnel = lab.start(front, &contender).await?;
        Ok(Self {
            contender,
            at_start: tunnel.rss()?,
            tunnel,
        })
    }

    fn memory(&mut self) -> anyhow::Result<Figures> {
        let after = self.tunnel.rss()?;
        let figures = [(MEMORY_START, self.at_start), (MEMORY_AFTER, after)];
        let figures = figures.iter();
        Ok(figures
            .filter_map(|(metric, bytes)| Some((*metric, (*bytes)? as f64 / MIB)))
            .collect())
    }
}

impl Plan {
    /// Whether a contender has a row at a front end. What is no pair has no front end, and is
    /// measured with the first one; along a long path every front end is compared with nothing at all.
    fn has(front: Front, row: &Row, contender: &Contender) -> bool {
        let suits = contender.has_programs() || row.suits_direct();
        let far = matches!(row.kind, Kind::Far(_)) && !contender.has_programs();
        suits && (contender.is_pair() || front == Front::Connect || far)
    }

    /// About how many seconds all of it takes.
    fn estimate(&self, seconds: f64) -> f64 {
        let mut total = 0.0;
        for front in &self.fronts {
            for row in &self.rows {
                let contenders = self.contenders.iter();
                let count = contenders.filter(|c| Self::has(*front, row, c)).count();
                let times = f64::from(row.rounds(self.rounds)) * count as f64;
                total += times * row.estimate(seconds);
            }
        }
        total
    }

    /// Measures all rows through one kind of front end.
    async fn front(&self, lab: &Lab, front: Front, report: &mut Report) {
        let mut running = Vec::new();
        for contender in &self.contenders {
            if !self.rows.iter().any(|row| Self::has(front, row, contender)) {
                continue;
            }
            match Running::start(lab, front, *contender).await {
                Ok(started) => running.push(started),
                Err(error) => report.add(front.name(), "start", contender.name, Err(error)),
            }
        }
        for round in 1..=self.rounds {
            for row in self.rows.iter().filter(|r| round <= r.rounds(self.rounds)) {
                for contender in &mut running {
                    if Self::has(front, row, &contender.contender) {
                        self.measure(lab, (front, row, round), contender, report)
                            .await;
                    }
                }
                if !running.is_empty() {
                    running.rotate_left(1);
                }
            }
        }
        for contender in &mut running {
            if contender.at_start.is_some() {
                let name = contender.contender.name;
                report.add(front.name(), MEMORY, name, contender.memory());
            }
        }
    }

    /// Measures one row of one contender, and gives it new programs if it hangs or fails.
    async fn measure(
        &self,
        lab: &Lab,
        (front, row, round): (Front, &Row, u32),
        running: &mut Running,
        report: &mut Report,
    ) {
        let contender = running.contender;
        let figures = lab
            .measure(front, row, &contender, &mut running.tunnel)
            .await;
        eprintln!(
            "{round}/{} {} {}, {}: {}",
            row.rounds(self.rounds),
            front.name(),
            row.name,
            contender.name,
            describe(&figures)
        );
        let usable = figures
            .as_ref()
            .is_ok_and(|figures| figures.iter().all(|(_, value)| *value != HUNG));
        report.add(front.name(), row.name, contender.name, figures);
        if !usable && !row.is_fresh() {
            match lab.start(front, &contender).await {
                Ok(tunnel) => running.tunnel = tunnel,
                // It stays as it is, and its next row fails.
                Err(error) => report.add(front.name(), "restart", contender.name, Err(error)),
            }
        }
    }
}

/// One measurement, in a line.
fn describe(figures: &anyhow::Result<Figures>) -> String {
    match figures {
        Ok(figures) => {
            let texts: Vec<String> = figures
                .iter()
                .map(|(metric, value)| format!("{} {}", number(Some(*value), 1), metric.name))
                .collect();
            texts.join(", ")
        }
        Err(error) => format!("failed: {error:#}"),
    }
}
