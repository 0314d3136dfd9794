//! The subcommand `openvpn`: our OpenVPN server and client, compared with the stock program.
//!
//! | module | content |
//! |---|---|
//! | [`rows`] | the rows |
//! | [`contenders`] | the contenders and their running programs |
//! | [`ground`] | networks and namespaces |
//! | [`measure`] | measurements with the figures of each program |
//! | [`probe`] | queries to running programs |
//! | [`bursts`] | a flow with pauses between bursts of data |
//! | [`switching`] | switches from one tunnel to the other |
//! | [`targets`] | the comparison and its targets |

mod bursts;
mod contenders;
mod ground;
mod measure;
mod probe;
mod rows;
mod switching;
mod targets;

use std::time::Duration;

use clap::Args;
use culvert_tests::Program;
use tokio::time::sleep;

use self::contenders::{CONTENDERS, Contender, Pair};
pub(crate) use self::contenders::{Files, Proto, server_words};
pub(crate) use self::ground::Ground;
pub(crate) use self::ground::{again_with_konnectivity, again_with_stock, own_address};
pub(crate) use self::probe::connected;
use self::rows::{
    CLIENT_AFTER, CLIENT_START, FRONT, Kind, RESENT, ROWS, SERVER_AFTER, SERVER_START,
};
use crate::aborts;
use crate::figures::{Figures, Metric, P99_STALLED, RATE};
use crate::memory;
use crate::names::{BULK, MEMORY, OURS, OURS_STOCK, STOCK};
use crate::options::Common;
use crate::programs::Programs;
use crate::report::Comparison;
use crate::rows::Row;
use crate::runner::{self, Scenario};
use crate::stalled::{self, Crowd};
use crate::svg::{Picture, bar, panel};

/// The picture that `--svg` draws.
static PICTURE: Picture = Picture {
    title: "Culvert's OpenVPN and the stock program compared",
    panels: &[
        panel("Throughput, MiB/s", RATE, BULK),
        panel(
            "Processor time of the server, seconds per GiB",
            rows::SERVER_CPU,
            BULK,
        ),
        panel(
            "Processor time of the client, seconds per GiB",
            rows::CLIENT_CPU,
            BULK,
        ),
        panel(
            "200 echoes beside 2 stalled connections, 99th percentile in us",
            P99_STALLED,
            rows::CROWD,
        ),
        panel(
            "Memory of the server at start, MiB",
            SERVER_START,
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

/// The pauses of the echoes leave two cores idle for more than half of the time.
const CROWD: Crowd = Crowd {
    echoes: 200,
    stalled: 1,
    pause: Duration::from_millis(100),
    stagger: Duration::from_micros(500),
};

/// Upper bound of the interval at which a server updates its counters.
const COUNTED: Duration = Duration::from_millis(1200);

/// Options of the subcommand.
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(flatten)]
    common: Common,

    /// Measure only this contender (repeatable): ours, ours/udp, ours+stock, o+s/udp (server+client), stock
    #[arg(long = "contender", value_name = "NAME")]
    contenders: Vec<String>,
}

/// Measures all rows and writes the report. Returns true if no measurement failed.
pub(crate) async fn run(options: Options) -> anyhow::Result<bool> {
    memory::raise_limit();
    let lab = Lab {
        programs: Programs::ours()?,
        ground: Ground::find()?,
        seconds: options.common.seconds(),
    };
    runner::run(&lab, &[()], &options.common, &options.contenders).await
}

/// Resources for all measurements.
struct Lab {
    /// The programs to start.
    programs: Programs,
    /// The networks to use.
    ground: Ground,
    /// Seconds of load per measurement.
    seconds: f64,
}

impl Scenario for Lab {
    type Front = ();
    type Kind = Kind;
    type Contender = Contender;
    type Running = Pair;

    const COMPARISON: &'static Comparison = &targets::COMPARISON;
    const PICTURE: &'static Picture = &PICTURE;
    const CONTENDERS: &'static [Contender] = &CONTENDERS;
    const MEMORY: &'static [[Metric; 2]] =
        &[[SERVER_START, SERVER_AFTER], [CLIENT_START, CLIENT_AFTER]];

    fn front_name((): ()) -> &'static str {
        FRONT
    }

    fn rows((): ()) -> &'static [Row<Kind>] {
        &ROWS
    }

    fn name(contender: Contender) -> &'static str {
        contender.name
    }

    fn missing(&self, contender: Contender) -> Option<&'static str> {
        self.ground.stock.err().filter(|_| contender.needs_stock())
    }

    fn has(&self, (): (), kind: Kind, contender: Contender) -> bool {
        contender.has(kind)
    }

    async fn start(&self, (): (), contender: Contender) -> anyhow::Result<Pair> {
        Pair::start(contender, &self.programs, &self.ground).await
    }

    async fn measure(
        &self,
        (): (),
        kind: Kind,
        contender: Contender,
        running: &mut Pair,
    ) -> anyhow::Result<Figures> {
        let time = Duration::from_secs_f64(2.0 * self.seconds);
        match kind {
            Kind::Load(first) => {
                let is_ours = !contender.needs_stock();
                measure::transfer(running, first, self.seconds, is_ours).await
            }
            Kind::Bursts(work) => measure::bursts(running, work, time).await,
            Kind::Crowd => {
                let (entry, endpoints) = (&running.entry, &running.endpoints);
                stalled::measure(&CROWD, entry, endpoints, time).await
            }
            Kind::Aborted(by) => {
                let cpu = || {
                    let [server, client] = running.ask(Program::cpu_time)?;
                    Ok(Some(server + client))
                };
                let (entry, endpoints) = (&running.entry, &running.endpoints);
                aborts::measure(by, entry, endpoints, time, cpu).await
            }
            Kind::Switch => {
                let pause = Duration::from_secs_f64(self.seconds.min(1.0));
                switching::measure(&self.programs, &self.ground, pause).await
            }
        }
    }

    fn rss(running: &mut Pair) -> anyhow::Result<Vec<u64>> {
        Ok(running.ask(Program::rss)?.to_vec())
    }

    /// Returns the number of segments that our server has retransmitted.
    async fn counters(&self, running: &Pair) -> anyhow::Result<Figures> {
        sleep(COUNTED).await;
        let resent = running.resent().await?;
        Ok(resent
            .map(|segments| (RESENT, segments))
            .into_iter()
            .collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_contender_has_a_column() {
        let mut names: Vec<&str> = CONTENDERS.iter().map(|c| c.name).collect();
        names.sort_unstable();
        let mut columns = targets::COMPARISON.contenders.to_vec();
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
