//! The subcommand `tunnel`: options, and the order of measurements.
//!
//! All contenders run all the time; some rows start another instance. Every round measures every row, and
//! every row measures one contender right after the other. Each row starts with another contender, so that
//! other activity of the machine affects all of them.

use anyhow::{Context as _, ensure};
use clap::{Args, ValueEnum};
use culvert_tests::Mode;

use crate::endpoint::Endpoints;
use crate::measure::{Lab, Subject as _};
use crate::options::{Common, chosen};
use crate::report::{Comparison, Figures, Report, is_usable, tell};
use crate::rows::{Kind, MEMORY, ROWS, Row};
use crate::topology::{
    CONTENDERS, Contender, DIRECT, OURS, OURS_STOCK, Programs, RATHOLE, RELAY, STOCK, STOCK_OURS,
    Tunnel,
};
use crate::{memory, svg, targets};

/// Server and agent, compared with the stock pair and with the cost of TLS alone.
pub static COMPARISON: Comparison = Comparison {
    contenders: &[OURS, STOCK, OURS_STOCK, STOCK_OURS, RELAY, RATHOLE, DIRECT],
    everyone_by: STOCK,
    ours_by: RELAY,
    ratios: &[
        ("ours/st", OURS, STOCK),
        ("o+s/st", OURS_STOCK, STOCK),
        ("s+o/st", STOCK_OURS, STOCK),
        ("ours/relay", OURS, RELAY),
    ],
    targets: &targets::TUNNEL,
    notes: &[],
};

/// Options of the subcommand.
#[derive(Debug, Args)]
pub struct Options {
    #[command(flatten)]
    common: Common,

    /// Measure only this front end
    #[arg(long, value_enum)]
    front: Option<Front>,

    /// Measure only this contender (repeatable): ours, stock, ours+stock, stock+ours (server+agent), relay,
    /// rathole, direct
    #[arg(long = "contender", value_name = "NAME")]
    contenders: Vec<String>,
}

/// Protocol between the load and the server, over a Unix socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Front {
    /// HTTP CONNECT
    Connect,
    /// The packet protocol
    Grpc,
}

impl Front {
    /// Name of the front end in the table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Connect => "CONNECT",
            Self::Grpc => "gRPC",
        }
    }

    /// Returns the server mode that has this front end.
    pub fn mode(self) -> Mode {
        match self {
            Self::Connect => Mode::HttpConnect,
            Self::Grpc => Mode::Grpc,
        }
    }
}

/// Measures all rows and writes the report. Returns true if no measurement failed.
pub async fn run(mut options: Options) -> anyhow::Result<bool> {
    options.common.settle();
    let descriptors = memory::raise_limit();
    let common = &options.common;
    let lab = Lab {
        endpoints: Endpoints::start().await.context("endpoints")?,
        programs: Programs::find()?,
        seconds: common.seconds,
        descriptors,
    };
    let plan = Plan {
        contenders: options.contenders(&lab.programs)?,
        rows: options.rows()?,
        fronts: options.fronts(&lab.programs),
        rounds: common.rounds,
    };
    let mut report = common.begin(&COMPARISON, plan.estimate(common.seconds));
    for front in &plan.fronts {
        plan.front(&lab, *front, &mut report).await;
    }
    common.end(&report, &svg::TUNNEL)
}

impl Options {
    fn contenders(&self, programs: &Programs) -> anyhow::Result<Vec<Contender>> {
        let chosen = chosen(&self.contenders, &COMPARISON)?;
        let mut contenders = CONTENDERS.to_vec();
        contenders.retain(|contender| chosen(contender.name));
        contenders.retain(|contender| {
            let missing = contender.missing(programs);
            if let Some(why) = missing {
                eprintln!("{} left out: {why}", contender.name);
            }
            missing.is_none()
        });
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

/// The rows and contenders to measure.
struct Plan {
    contenders: Vec<Contender>,
    rows: Vec<Row>,
    fronts: Vec<Front>,
    rounds: u32,
}

/// A running contender.
struct Running {
    contender: Contender,
    tunnel: Tunnel,
    /// Memory before any load, in bytes. `None` if the contender has no program.
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
        Ok(memory::figures(self.at_start, self.tunnel.rss()?))
    }
}

impl Plan {
    /// Returns true if the row applies to the contender at this front end. Contenders other than pairs have
    /// no front end and are measured together with the first one; on a long path the direct load is the
    /// reference for every front end.
    fn has(front: Front, row: &Row, contender: &Contender) -> bool {
        let suits = contender.has_programs() || row.suits_direct();
        let far = matches!(row.kind, Kind::Far(_)) && !contender.has_programs();
        suits && (contender.is_pair() || front == Front::Connect || far)
    }

    /// Returns the approximate duration of all measurements, in seconds.
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

    /// Measures all rows of one front end.
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

    /// Measures one row of one contender, and restarts the contender if it hangs or fails.
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
        let turn = [round, row.rounds(self.rounds)];
        tell(turn, [front.name(), row.name, contender.name], &figures);
        let usable = is_usable(&figures);
        report.add(front.name(), row.name, contender.name, figures);
        if !usable && !row.is_fresh() {
            match lab.start(front, &contender).await {
                Ok(tunnel) => running.tunnel = tunnel,
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
}
