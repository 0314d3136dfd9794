//! The subcommand `door`: the front door of a seed and the node tunnel, compared with Envoy and haproxy.
//!
//! | module | content |
//! |---|---|
//! | [`rows`] | the rows |
//! | [`contenders`] | the contenders and their running programs |
//! | [`measure`] | measurement of a row of a contender |
//! | [`change`] | one Service changes among many |
//! | [`targets`] | the targets for our programs |
//!
//! Contenders take turns as in `tunnel`: every round measures every row, and every row measures one contender
//! right after the other. Each row starts with another contender.

mod change;
mod contenders;
mod measure;
mod rows;
mod targets;

use anyhow::ensure;
use clap::{Args, ValueEnum};

use self::contenders::{CONTENDERS, Contender, ENVOY, HAPROXY};
use self::measure::{Lab, Started};
use self::rows::{ROWS, Row};
use crate::measure::Subject as _;
use crate::memory;
use crate::options::{Common, chosen};
use crate::report::{Comparison, Figures, Report, is_usable, tell};
use crate::rows::{
    CPU_PER_DIAL, CPU_PER_ECHO, CPU_PER_GIB, DIAL_RATE, IDLE_MEMORY, MEMORY, MEMORY_START, P50,
    RATE,
};
use crate::svg::{Picture, bar, panel};
use crate::topology::{DIRECT, OURS, Programs};

/// Our front door, compared with Envoy at both ends and with haproxy.
pub static COMPARISON: Comparison = Comparison {
    contenders: &[OURS, ENVOY, HAPROXY, DIRECT],
    everyone_by: ENVOY,
    ours_by: HAPROXY,
    ratios: &[
        ("ours/envoy", OURS, ENVOY),
        ("ours/hapr.", OURS, HAPROXY),
        ("hapr./envoy", HAPROXY, ENVOY),
    ],
    targets: &targets::TARGETS,
    notes: &[],
};

/// The picture that `--svg` draws.
static PICTURE: Picture = Picture {
    title: "Culvert, Envoy and haproxy compared",
    panels: &[
        panel("Throughput, MiB/s", RATE, rows::BULK),
        panel("Processor time, seconds per GiB", CPU_PER_GIB, rows::BULK),
        panel("New connections per second", DIAL_RATE, rows::DIALS),
        panel(
            "Processor time of a new connection, us",
            CPU_PER_DIAL,
            rows::DIALS,
        ),
        panel("64-byte echo, median in us", P50, rows::ECHOES),
        panel("Processor time of an echo, us", CPU_PER_ECHO, rows::ECHOES),
        panel("Memory at start, MiB", MEMORY_START, &[MEMORY]),
        panel(
            "Memory with 1,000 Services, MiB",
            rows::SERVICES_MEMORY,
            rows::SERVICES,
        ),
        panel("Memory of an idle connection, KiB", IDLE_MEMORY, rows::IDLE),
    ],
    bars: &[
        bar(OURS, "Culvert", "o"),
        bar(ENVOY, "Envoy", "s"),
        bar(HAPROXY, "haproxy", "r"),
    ],
    by: ENVOY,
};

/// Options of the subcommand.
#[derive(Debug, Args)]
pub struct Options {
    #[command(flatten)]
    common: Common,

    /// Measure only this entry point
    #[arg(long, value_enum)]
    front: Option<Front>,

    /// Measure only this contender (repeatable): ours, envoy, haproxy, direct
    #[arg(long = "contender", value_name = "NAME")]
    contenders: Vec<String>,
}

/// The place where the load enters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Front {
    /// The TLS port of the front door
    Sni,
    /// A listener on a node, connected to the CONNECT port of the front door
    Node,
}

impl Front {
    /// Name of the entry point in the table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sni => "SNI",
            Self::Node => "node",
        }
    }
}

/// Measures all rows and writes the report. Returns true if no measurement failed.
pub async fn run(mut options: Options) -> anyhow::Result<bool> {
    options.common.settle();
    let (common, descriptors) = (&options.common, memory::raise_limit());
    let lab = Lab {
        programs: Programs::ours()?,
        seconds: common.seconds,
        descriptors,
    };
    let plan = Plan {
        contenders: options.contenders()?,
        rows: options.rows()?,
        rounds: common.rounds,
    };
    let mut report = common.begin(&COMPARISON, plan.estimate(common.seconds));
    for front in Front::value_variants() {
        plan.front(&lab, *front, &mut report).await;
    }
    common.end(&report, &PICTURE)
}

impl Options {
    fn contenders(&self) -> anyhow::Result<Vec<Contender>> {
        let chosen = chosen(&self.contenders, &COMPARISON)?;
        let mut contenders = CONTENDERS.to_vec();
        contenders.retain(|contender| chosen(contender.name));
        contenders.retain(|contender| {
            let missing = contender.missing();
            if missing {
                eprintln!("{} left out: it is not installed", contender.name);
            }
            !missing
        });
        ensure!(!contenders.is_empty(), "no contender can be measured");
        Ok(contenders)
    }

    fn rows(&self) -> anyhow::Result<Vec<Row>> {
        let mut rows = ROWS.to_vec();
        rows.retain(|row| {
            row.name.contains(&self.common.row) && self.front.is_none_or(|it| it == row.front)
        });
        ensure!(
            !rows.is_empty(),
            "no row name contains {:?}",
            self.common.row
        );
        Ok(rows)
    }
}

/// The rows and contenders to measure.
struct Plan {
    contenders: Vec<Contender>,
    rows: Vec<Row>,
    rounds: u32,
}

/// A running contender.
struct Running {
    contender: Contender,
    started: Started,
    /// Memory before any load, in bytes. `None` if the contender has no program.
    at_start: Option<u64>,
}

impl Running {
    async fn start(lab: &Lab, contender: Contender, front: Front) -> anyhow::Result<Self> {
        let mut started = lab.start(contender, front).await?;
        Ok(Self {
            contender,
            at_start: started.door.rss()?,
            started,
        })
    }

    fn memory(&mut self) -> anyhow::Result<Figures> {
        Ok(memory::figures(self.at_start, self.started.door.rss()?))
    }
}

impl Plan {
    /// Returns the approximate duration of all measurements, in seconds.
    fn estimate(&self, seconds: f64) -> f64 {
        let times = |row: &Row| {
            let count = self.contenders.iter().filter(|c| c.has(row)).count();
            f64::from(row.rounds(self.rounds)) * count as f64
        };
        let rows = self.rows.iter();
        rows.map(|row| times(row) * row.estimate(seconds)).sum()
    }

    /// Measures all rows of one entry point.
    async fn front(&self, lab: &Lab, front: Front, report: &mut Report) {
        let rows: Vec<&Row> = self.rows.iter().filter(|row| row.front == front).collect();
        let mut running = Vec::new();
        for contender in &self.contenders {
            if !rows.iter().any(|row| contender.has(row)) {
                continue;
            }
            match Running::start(lab, *contender, front).await {
                Ok(started) => running.push(started),
                Err(error) => report.add(front.name(), "start", contender.name, Err(error)),
            }
        }
        for round in 1..=self.rounds {
            for row in rows.iter().filter(|r| round <= r.rounds(self.rounds)) {
                for one in running.iter_mut().filter(|one| one.contender.has(row)) {
                    self.measure(lab, row, round, one, report).await;
                }
                if !running.is_empty() {
                    running.rotate_left(1);
                }
            }
        }
        for one in &mut running {
            if one.at_start.is_some() {
                report.add(front.name(), MEMORY, one.contender.name, one.memory());
            }
        }
    }

    /// Measures one row of one contender, and restarts the contender if it hangs or fails.
    async fn measure(
        &self,
        lab: &Lab,
        row: &Row,
        round: u32,
        running: &mut Running,
        report: &mut Report,
    ) {
        let (front, contender) = (row.front, running.contender);
        let figures = lab.measure(row, contender, &mut running.started).await;
        let turn = [round, row.rounds(self.rounds)];
        tell(turn, [front.name(), row.name, contender.name], &figures);
        let usable = is_usable(&figures);
        report.add(front.name(), row.name, contender.name, figures);
        if !usable && !row.is_fresh() {
            match lab.start(contender, front).await {
                Ok(started) => running.started = started,
                // The old programs stay, so that the next row fails, too.
                Err(error) => report.add(front.name(), "restart", contender.name, Err(error)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_contender_has_a_column() {
        let names: Vec<&str> = CONTENDERS.iter().map(|c| c.name).collect();
        assert_eq!(COMPARISON.contenders, names);
    }

    #[test]
    fn every_drawn_row_exists() {
        for row in PICTURE.panels.iter().flat_map(|panel| panel.rows) {
            assert!(
                *row == MEMORY || ROWS.iter().any(|known| known.name == *row),
                "{row}"
            );
        }
    }
}
