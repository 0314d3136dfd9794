//! The subcommand `openvpn`: our OpenVPN server and client, compared with the stock program.
//!
//! | module | content |
//! |---|---|
//! | [`rows`] | the rows |
//! | [`contenders`] | the contenders and their running programs |
//! | [`ground`] | networks and namespaces |
//! | [`measure`] | measurement of a row of a contender |
//! | [`probe`] | queries to running programs |
//! | [`bursts`] | a flow with pauses between bursts of data |
//! | [`switching`] | switches from one tunnel to the other |
//! | [`targets`] | the targets for our programs |
//!
//! Contenders take turns as in `tunnel`: every round measures every row, and every row measures one contender
//! right after the other. Each row starts with another contender.

mod bursts;
mod contenders;
mod ground;
mod measure;
mod probe;
mod rows;
mod switching;
mod targets;

use std::time::Duration;

use anyhow::ensure;
use clap::Args;
use culvert_tests::Program;
use tokio::time::sleep;

use self::contenders::{CONTENDERS, Contender, OURS_STOCK_UDP, OURS_UDP, Pair};
use self::ground::Ground;
pub use self::ground::again;
use self::measure::Lab;
use self::rows::{ROWS, Row};
use crate::memory;
use crate::options::{Common, chosen};
use crate::report::{Comparison, Figures, Report, is_usable, tell};
use crate::rows::{MEMORY, P99_STALLED, RATE};
use crate::svg::{Picture, bar, panel};
use crate::topology::{OURS, OURS_STOCK, Programs, STOCK};

/// Our pair and our server with the stock client, compared with the stock pair.
pub static COMPARISON: Comparison = Comparison {
    contenders: &[OURS, OURS_UDP, OURS_STOCK, OURS_STOCK_UDP, STOCK],
    everyone_by: STOCK,
    ours_by: OURS_STOCK,
    ratios: &[
        ("o+s/st", OURS_STOCK, STOCK),
        ("ours u/t", OURS_UDP, OURS),
        ("o+s u/t", OURS_STOCK_UDP, OURS_STOCK),
    ],
    targets: &targets::TARGETS,
    notes: &[(
        rows::SERVER_GBIT,
        "Gbit/CPU-s: the targets are per process, the server by its own processor time and the client by its own; \
         what both reach together stands beside them, without a target",
    )],
};

/// The picture that `--svg` draws.
static PICTURE: Picture = Picture {
    title: "Culvert's OpenVPN and the stock program compared",
    panels: &[
        panel("Throughput, MiB/s", RATE, rows::BULK),
        panel(
            "Processor time of the server, seconds per GiB",
            rows::SERVER_CPU,
            rows::BULK,
        ),
        panel(
            "Processor time of the client, seconds per GiB",
            rows::CLIENT_CPU,
            rows::BULK,
        ),
        panel(
            "200 echoes beside 2 stalled connections, 99th percentile in us",
            P99_STALLED,
            rows::CROWD,
        ),
        panel(
            "Memory of the server at start, MiB",
            rows::SERVER_START,
            &[MEMORY],
        ),
    ],
    bars: &[
        bar(OURS, "Culvert at both ends", "o"),
        bar(OURS_STOCK, "Culvert, stock client", "r"),
        bar(STOCK, "stock", "s"),
    ],
    by: STOCK,
};

/// Name of the only entry point, for the table.
pub const FRONT: &str = "CONNECT";

/// Upper bound of the interval at which a server updates its counters.
const COUNTED: Duration = Duration::from_millis(1200);

/// Options of the subcommand.
#[derive(Debug, Args)]
pub struct Options {
    #[command(flatten)]
    common: Common,

    /// Measure only this contender (repeatable): ours, ours/udp, ours+stock, o+s/udp (server+client), stock
    #[arg(long = "contender", value_name = "NAME")]
    contenders: Vec<String>,
}

/// Measures all rows and writes the report. Returns true if no measurement failed.
pub async fn run(mut options: Options) -> anyhow::Result<bool> {
    options.common.settle();
    let common = &options.common;
    memory::raise_limit();
    let lab = Lab {
        programs: Programs::ours()?,
        ground: Ground::find()?,
        seconds: common.seconds,
    };
    let plan = Plan {
        contenders: options.contenders(&lab.ground)?,
        rows: options.rows()?,
        rounds: common.rounds,
    };
    let mut report = common.begin(&COMPARISON, plan.estimate(common.seconds));
    plan.measure_all(&lab, &mut report).await;
    common.end(&report, &PICTURE)
}

impl Options {
    fn contenders(&self, ground: &Ground) -> anyhow::Result<Vec<Contender>> {
        let chosen = chosen(&self.contenders, &COMPARISON)?;
        let mut contenders = CONTENDERS.to_vec();
        contenders.retain(|contender| chosen(contender.name));
        if let Err(why) = ground.stock {
            let missing = contenders.extract_if(.., |contender| contender.needs_stock());
            let missing: Vec<&str> = missing.map(|contender| contender.name).collect();
            if !missing.is_empty() {
                eprintln!("{} left out: {why}", missing.join(", "));
            }
        }
        ensure!(!contenders.is_empty(), "no contender can be measured");
        Ok(contenders)
    }

    fn rows(&self) -> anyhow::Result<Vec<Row>> {
        let mut rows = ROWS.to_vec();
        rows.retain(|row| row.name.contains(&self.common.row));
        let wanted = !rows.is_empty() || MEMORY.contains(&self.common.row);
        ensure!(wanted, "no row name contains {:?}", self.common.row);
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
    pair: Pair,
    /// Memory of server and client before any load, in bytes.
    at_start: [u64; 2],
}

impl Running {
    async fn start(lab: &Lab, contender: Contender) -> anyhow::Result<Self> {
        let pair = lab.start(contender).await?;
        Ok(Self {
            contender,
            at_start: pair.ask(Program::rss)?,
            pair,
        })
    }

    async fn memory(&self) -> anyhow::Result<Figures> {
        measure::memory(&self.pair, self.at_start).await
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
        let measuring: f64 = rows.map(|row| times(row) * row.estimate(seconds)).sum();
        // Starting a contender takes about a second.
        measuring + self.contenders.len() as f64
    }

    async fn measure_all(&self, lab: &Lab, report: &mut Report) {
        let mut running = Vec::new();
        for contender in &self.contenders {
            // Without rows, contenders are started for their memory only.
            let wanted = self.rows.is_empty() || self.rows.iter().any(|row| contender.has(row));
            if !wanted {
                continue;
            }
            match Running::start(lab, *contender).await {
                Ok(started) => running.push(started),
                Err(error) => report.add(FRONT, "start", contender.name, Err(error)),
            }
        }
        for round in 1..=self.rounds {
            for row in self.rows.iter().filter(|r| round <= r.rounds(self.rounds)) {
                for one in running.iter_mut().filter(|one| one.contender.has(row)) {
                    self.measure(lab, row, round, one, report).await;
                }
                if !running.is_empty() {
                    running.rotate_left(1);
                }
            }
        }
        // Servers count retransmissions once per second.
        sleep(COUNTED).await;
        for one in &running {
            report.add(FRONT, MEMORY, one.contender.name, one.memory().await);
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
        let contender = running.contender;
        let figures = lab.measure(row, contender, &running.pair).await;
        let turn = [round, row.rounds(self.rounds)];
        tell(turn, [FRONT, row.name, contender.name], &figures);
        let usable = is_usable(&figures);
        report.add(FRONT, row.name, contender.name, figures);
        if !usable && !row.is_fresh() {
            match lab.start(contender).await {
                Ok(pair) => running.pair = pair,
                // The old programs stay, so that the next row fails, too.
                Err(error) => report.add(FRONT, "restart", contender.name, Err(error)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_contender_has_a_column() {
        let mut names: Vec<&str> = CONTENDERS.iter().map(|c| c.name).collect();
        names.sort_unstable();
        let mut columns = COMPARISON.contenders.to_vec();
        columns.sort_unstable();
        assert_eq!(columns, names);
    }

    #[test]
    fn every_drawn_row_exists() {
        for row in PICTURE.panels.iter().flat_map(|panel| panel.rows) {
            let known = ROWS.iter().any(|known| known.name == *row);
            assert!(known || *row == MEMORY, "{row}");
        }
    }
}
