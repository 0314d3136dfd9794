//! The subcommand `door`: the front door of a seed and the node tunnel, compared with Envoy and haproxy.
//!
//! | module | content |
//! |---|---|
//! | [`rows`] | entry points and rows |
//! | [`contenders`] | the contenders and their running programs |
//! | [`change`] | one Service changes among many |
//! | [`targets`] | the comparison and its targets |

mod change;
mod contenders;
mod rows;
mod targets;

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, ValueEnum as _};
use tokio::time::sleep;

use self::contenders::{CONTENDERS, Contender, Door, ENVOY, HAPROXY};
use self::rows::{Front, Kind, MANY, SERVICES_MEMORY};
use crate::aborts;
use crate::endpoint::Endpoints;
use crate::figures::{
    CPU_PER_DIAL, CPU_PER_ECHO, CPU_PER_GIB, DIAL_RATE, Figures, IDLE_MEMORY, MEMORY_START, MIB,
    P50, RATE,
};
use crate::load;
use crate::measure::{self, Subject as _};
use crate::memory::{self, REST};
use crate::names::{BULK, DIALS, ECHOES, IDLE, MEMORY, OURS};
use crate::options::Common;
use crate::programs::Programs;
use crate::report::Comparison;
use crate::rows::Row;
use crate::runner::{self, Scenario};
use crate::stalled::{self, Crowd};
use crate::svg::{Picture, bar, panel};

/// The picture that `--svg` draws.
static PICTURE: Picture = Picture {
    title: "Culvert, Envoy and haproxy compared",
    panels: &[
        panel("Throughput, MiB/s", RATE, BULK),
        panel("Processor time, seconds per GiB", CPU_PER_GIB, BULK),
        panel("New connections per second", DIAL_RATE, DIALS),
        panel(
            "Processor time of a new connection, us",
            CPU_PER_DIAL,
            DIALS,
        ),
        panel("64-byte echo, median in us", P50, ECHOES),
        panel("Processor time of an echo, us", CPU_PER_ECHO, ECHOES),
        panel("Memory at start, MiB", MEMORY_START, &[MEMORY]),
        panel(
            "Memory with 1,000 Services, MiB",
            rows::SERVICES_MEMORY,
            rows::SERVICES,
        ),
        panel("Memory of an idle connection, KiB", IDLE_MEMORY, IDLE),
    ],
    bars: &[
        bar(OURS, "Culvert", "o"),
        bar(ENVOY, "Envoy", "s"),
        bar(HAPROXY, "haproxy", "r"),
    ],
    by: ENVOY,
};

/// Clients of one node. Their pauses leave two cores idle for about half of the time.
const CROWD: Crowd = Crowd {
    echoes: 1000,
    stalled: 1,
    pause: Duration::from_millis(120),
    stagger: Duration::from_micros(120),
};

/// Options of the subcommand.
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(flatten)]
    common: Common,

    /// Measure only this entry point
    #[arg(long, value_enum)]
    front: Option<Front>,

    /// Measure only this contender (repeatable): ours, envoy, haproxy, direct
    #[arg(long = "contender", value_name = "NAME")]
    contenders: Vec<String>,
}

/// Measures all rows and writes the report. Returns true if no measurement failed.
pub(crate) async fn run(options: Options) -> anyhow::Result<bool> {
    let lab = Lab {
        programs: Programs::ours()?,
        seconds: options.common.seconds(),
        descriptors: memory::raise_limit(),
    };
    let fronts = options
        .front
        .map_or(Front::value_variants().to_vec(), |one| vec![one]);
    runner::run(&lab, &fronts, &options.common, &options.contenders).await
}

/// Resources for all measurements.
struct Lab {
    /// The programs to start.
    programs: Programs,
    /// Seconds of load per measurement.
    seconds: f64,
    /// Limit of file descriptors of a process.
    descriptors: u64,
}

/// A running contender and the endpoints of its load. Each contender has its own endpoints, because the ports of
/// closed connections stay in use for a while.
struct Running {
    door: Door,
    endpoints: Endpoints,
}

impl Scenario for Lab {
    type Front = Front;
    type Kind = Kind;
    type Contender = Contender;
    type Running = Running;

    const COMPARISON: &'static Comparison = &targets::COMPARISON;
    const PICTURE: &'static Picture = &PICTURE;
    const CONTENDERS: &'static [Contender] = &CONTENDERS;

    fn front_name(front: Front) -> &'static str {
        front.name()
    }

    fn rows(front: Front) -> &'static [Row<Kind>] {
        front.rows()
    }

    fn name(contender: Contender) -> &'static str {
        contender.name
    }

    fn missing(&self, contender: Contender) -> Option<&'static str> {
        contender.missing().then_some("it is not installed")
    }

    fn has(&self, front: Front, kind: Kind, contender: Contender) -> bool {
        contender.has(front, kind)
    }

    /// Starts a contender with one Service.
    async fn start(&self, front: Front, contender: Contender) -> anyhow::Result<Running> {
        let endpoints = Endpoints::start().await.context("endpoints")?;
        let door = self.door(front, contender, endpoints.lean(), 1).await?;
        Ok(Running { door, endpoints })
    }

    async fn measure(
        &self,
        front: Front,
        kind: Kind,
        contender: Contender,
        running: &mut Running,
    ) -> anyhow::Result<Figures> {
        let Running { door, endpoints } = running;
        let (entry, target) = (&door.entry().clone(), endpoints.lean());
        match kind {
            Kind::Load(first) => {
                let work = async |job| load::run(entry, target, job).await;
                measure::load(door, first, self.seconds, work).await
            }
            Kind::Crowd => {
                let time = Duration::from_secs_f64(2.0 * self.seconds);
                stalled::measure(&CROWD, entry, endpoints, time).await
            }
            Kind::Aborted(by) => {
                let time = Duration::from_secs_f64(2.0 * self.seconds);
                aborts::measure(by, entry, endpoints, time, || door.cpu_time()).await
            }
            Kind::Change => {
                let other = Endpoints::start().await.context("endpoints")?;
                let mut door = self.door(front, contender, target, MANY).await?;
                change::measure(&mut door, target, other.lean(), MANY).await
            }
            Kind::Services => {
                let mut door = self.door(front, contender, target, MANY).await?;
                sleep(REST).await;
                let bytes = door.rss()?.context("contender has no program")?;
                Ok(vec![(SERVICES_MEMORY, bytes as f64 / MIB)])
            }
            Kind::Idle => {
                let count = memory::affordable(self.descriptors, contender.descriptors())?;
                let (_endpoint, target) = self.programs.endpoint().await?;
                let mut door = self.door(front, contender, target, 1).await?;
                memory::idle(&mut door, target, count).await
            }
        }
    }

    fn rss(running: &mut Running) -> anyhow::Result<Vec<u64>> {
        Ok(running.door.rss()?.into_iter().collect())
    }
}

impl Lab {
    async fn door(
        &self,
        front: Front,
        contender: Contender,
        target: SocketAddr,
        services: usize,
    ) -> anyhow::Result<Door> {
        Door::start(contender, front, &self.programs, target, services).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_contender_has_a_column() {
        let names: Vec<&str> = CONTENDERS.iter().map(|c| c.name).collect();
        assert_eq!(targets::COMPARISON.contenders, names);
    }

    #[test]
    fn every_drawn_row_exists() {
        let rows = [Front::Sni, Front::Node].into_iter().flat_map(Front::rows);
        for row in PICTURE.panels.iter().flat_map(|panel| panel.rows) {
            assert!(
                *row == MEMORY || rows.clone().any(|known| known.name == *row),
                "{row}"
            );
        }
    }
}
