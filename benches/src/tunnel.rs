//! The subcommand `tunnel`: server and agent, compared with the stock pair and with the cost of TLS alone.
//!
//! | module | content |
//! |---|---|
//! | [`rows`] | front ends and rows |
//! | [`contenders`] | the contenders and their running programs |
//! | [`relay`] | contenders that are not pairs of server and agent |
//! | [`bare`] | the smallest tunnel with TLS and HTTP/2 |
//! | [`delay`] | a long path between the two halves of a contender |
//! | [`lost`] | the loss of one of two agents |
//! | [`driver`] | the load on a gRPC front end: the real client library, in the Go driver |
//! | [`targets`] | the comparison and its targets |

pub(crate) mod bare;
mod contenders;
mod delay;
mod driver;
mod lost;
mod relay;
mod rows;
mod targets;

use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, ValueEnum as _};

use self::contenders::{CONTENDERS, Contender, RELAY, Tunnel};
use self::rows::{Front, Kind, ROWS};
use crate::bulk::Bulk;
use crate::endpoint::Endpoints;
use crate::entry::Entry;
use crate::figures::{
    CPU_PER_DIAL, CPU_PER_GIB, Figures, IDLE_MEMORY, MEMORY_START, MIB, P50, P99, P99_STALLED, RATE,
};
use crate::load::{self, Job};
use crate::measure::{self, Subject as _};
use crate::names::{BULK, DIALS, ECHOES, IDLE, MEMORY, OURS, STOCK};
use crate::options::Common;
use crate::programs::Programs;
use crate::report::Comparison;
use crate::rows::Row;
use crate::runner::{self, Scenario};
use crate::stalled::{self, Crowd};
use crate::svg::{Picture, bar, panel};
use crate::{aborts, bulk, memory};

/// The picture that `--svg` draws.
static PICTURE: Picture = Picture {
    title: "Culvert and Konnectivity compared",
    panels: &[
        panel("Throughput, MiB/s", RATE, BULK),
        panel("Processor time, seconds per GiB", CPU_PER_GIB, BULK),
        panel("64-byte echo, median in us", P50, ECHOES),
        panel(
            "64-byte echo under load, 99th percentile in us",
            P99,
            &["64-byte echo beside 2 downloads"],
        ),
        panel(
            "50 echoes beside 16 stalled connections, 99th percentile in us",
            P99_STALLED,
            &["50 echoes beside 16 stalled"],
        ),
        panel("Processor time of a dial, us", CPU_PER_DIAL, DIALS),
        panel("Memory at start, MiB", MEMORY_START, &[MEMORY]),
        panel("Memory of an idle connection, KiB", IDLE_MEMORY, IDLE),
    ],
    bars: &[
        bar(OURS, "Culvert", "o"),
        bar(STOCK, "Konnectivity (stock)", "s"),
        bar(RELAY, "TLS relay pair", "r"),
    ],
    by: STOCK,
};

/// The connections that echo, and the stalled connections.
const CROWD: Crowd = Crowd {
    echoes: 50,
    stalled: 8,
    pause: Duration::from_millis(15),
    stagger: Duration::ZERO,
};

/// Number of connections from which the Go driver is not used. One process per connection would need more of the
/// machine than the tunnel does.
const DRIVERS: u64 = 32;

/// Options of the subcommand.
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(flatten)]
    common: Common,

    /// Measure only this front end
    #[arg(long, value_enum)]
    front: Option<Front>,

    /// Measure only this contender (repeatable): ours, stock, ours+stock, stock+ours (server+agent), relay,
    /// bare, rathole, direct; only if named: quic and resume, our pair with a QUIC link and with --resume-grace
    #[arg(long = "contender", value_name = "NAME")]
    contenders: Vec<String>,
}

/// Measures all rows and writes the report. Returns true if no measurement failed.
pub(crate) async fn run(options: Options) -> anyhow::Result<bool> {
    let lab = Lab {
        endpoints: Endpoints::start().await.context("endpoints")?,
        programs: Programs::find()?,
        seconds: options.common.seconds(),
        descriptors: memory::raise_limit(),
    };
    let mut fronts = options
        .front
        .map_or(Front::value_variants().to_vec(), |one| vec![one]);
    if lab.programs.stock.is_none() {
        eprintln!("gRPC rows left out: they need the Go driver");
        fronts.retain(|front| *front != Front::Grpc);
    }
    runner::run(&lab, &fronts, &options.common, &options.contenders).await
}

/// Resources for all measurements.
struct Lab {
    /// Endpoints of the loads.
    endpoints: Endpoints,
    /// The programs to start.
    programs: Programs,
    /// Seconds of load per measurement.
    seconds: f64,
    /// Limit of file descriptors of a process.
    descriptors: u64,
}

impl Scenario for Lab {
    type Front = Front;
    type Kind = Kind;
    type Contender = Contender;
    type Running = Tunnel;

    const COMPARISON: &'static Comparison = &targets::COMPARISON;
    const PICTURE: &'static Picture = &PICTURE;
    const CONTENDERS: &'static [Contender] = &CONTENDERS;

    fn front_name(front: Front) -> &'static str {
        front.name()
    }

    fn rows(_front: Front) -> &'static [Row<Kind>] {
        &ROWS
    }

    fn name(contender: Contender) -> &'static str {
        contender.name
    }

    fn is_optional(contender: Contender) -> bool {
        contender.is_optional()
    }

    fn missing(&self, contender: Contender) -> Option<&'static str> {
        contender.missing(&self.programs)
    }

    /// Contenders other than pairs have no front end and are measured together with the first one; on a long path
    /// the direct load is the reference for every front end.
    fn has(&self, front: Front, kind: Kind, contender: Contender) -> bool {
        let pairs_only = kind == Kind::LostAgent && !contender.is_pair();
        let suits = (contender.has_programs() || kind.suits_direct()) && !pairs_only;
        let far = matches!(kind, Kind::Far(_)) && !contender.has_programs();
        // The simulated path carries TCP only, and a new agent begins with TCP.
        let needs_tcp = matches!(kind, Kind::Far(_) | Kind::LostAgent);
        let suits = suits && (!needs_tcp || contender.is_over_tcp());
        suits && (contender.is_pair() || front == Front::Connect || far)
    }

    async fn start(&self, front: Front, contender: Contender) -> anyhow::Result<Tunnel> {
        let target = self.endpoints.lean();
        Tunnel::start(contender, front.mode(), &self.programs, target, None).await
    }

    async fn measure(
        &self,
        front: Front,
        kind: Kind,
        contender: Contender,
        running: &mut Tunnel,
    ) -> anyhow::Result<Figures> {
        let figures = self.measure_row(front, kind, contender, running).await?;
        running.check_link().await?;
        Ok(figures)
    }

    fn rss(running: &mut Tunnel) -> anyhow::Result<Vec<u64>> {
        Ok(running.rss()?.into_iter().collect())
    }
}

impl Lab {
    async fn measure_row(
        &self,
        front: Front,
        kind: Kind,
        contender: Contender,
        running: &mut Tunnel,
    ) -> anyhow::Result<Figures> {
        let (entry, target) = (&running.entry.clone(), self.endpoints.lean());
        let time = Duration::from_secs_f64(2.0 * self.seconds);
        match kind {
            Kind::Load(first) => {
                let work = async |job| self.work(entry, job).await;
                measure::load(running, first, self.seconds, work).await
            }
            Kind::EchoBesideBulk => {
                let bulk = Bulk::default().downloads(entry, target, bulk::BESIDE);
                bulk::echo_beside(entry, target, bulk, [bulk::RAMP, time]).await
            }
            Kind::Stalled => {
                let time = rows::crowd_time(self.seconds);
                stalled::measure(&CROWD, entry, &self.endpoints, time).await
            }
            Kind::Aborted(by) => {
                let cpu = || running.cpu_time();
                aborts::measure(by, entry, &self.endpoints, time, cpu).await
            }
            Kind::LostAgent => {
                let starting = Tunnel::with_spare(contender, front.mode(), &self.programs);
                lost::measure(starting.await?, target, time).await
            }
            Kind::Far(path) => {
                let (mode, path) = (front.mode(), Some(path));
                let starting = Tunnel::start(contender, mode, &self.programs, target, path);
                let tunnel = starting.await?;
                let times = rows::far_times(self.seconds);
                let rate = bulk::far_download(&tunnel.entry, target, times).await?;
                Ok(vec![(RATE, rate / MIB)])
            }
            Kind::Idle => {
                let each = contender.descriptors_per_connection();
                let count = memory::affordable(self.descriptors, each)?;
                let (_endpoint, target) = self.programs.endpoint().await?;
                let starting = Tunnel::start(contender, front.mode(), &self.programs, target, None);
                let mut tunnel = starting.await?;
                let figures = memory::idle(&mut tunnel, target, count).await?;
                tunnel.check_link().await?;
                Ok(figures)
            }
            Kind::AgentMemory => {
                let mut tunnel = self.start(front, contender).await?;
                let entry = tunnel.entry.clone();
                let rss = || tunnel.agent_rss();
                let figures = memory::beside_bulk(&entry, target, time, rss).await?;
                tunnel.check_link().await?;
                Ok(figures)
            }
        }
    }

    async fn work(&self, entry: &Entry, job: Job) -> anyhow::Result<load::Done> {
        match (entry, self.programs.stock) {
            (Entry::Grpc(socket), Some(stock)) if job.connections < DRIVERS => {
                driver::run(stock, socket, self.endpoints.raw(), job).await
            }
            _ => load::run(entry, self.endpoints.lean(), job).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Machine, Report};
    use crate::svg;

    #[test]
    fn every_contender_has_a_column() {
        let names: Vec<&str> = CONTENDERS.iter().map(|c| c.name).collect();
        assert_eq!(targets::COMPARISON.contenders, names);
    }

    /// Returns a report with every row of every panel, at both front ends, with these figures for ours, stock
    /// and relay.
    fn full(figures: [f64; 3]) -> Report {
        let mut report = Report::new(&targets::COMPARISON, Machine::this(), 5, 1.0);
        for front in ["CONNECT", "gRPC"] {
            for panel in PICTURE.panels {
                for row in panel.rows {
                    for (bar, value) in PICTURE.bars.iter().zip(figures) {
                        report.add(front, row, bar.contender, Ok(vec![(panel.metric, value)]));
                    }
                }
            }
        }
        report
    }

    #[test]
    fn full_report_is_small_and_self_contained() {
        let drawn = svg::draw(&full([1234.5, 234.5, 1000.0]), &PICTURE);
        assert!(drawn.len() < 40 * 1024, "{} bytes", drawn.len());
        assert!(drawn.contains("1234 (5.26\u{d7} stock)") || drawn.contains("1235 (5.26"));
        assert!(drawn.contains("prefers-color-scheme:dark"));
        // The only address is the XML namespace.
        assert_eq!(drawn.matches("http").count(), 1);
        for open in ["svg", "style", "text"] {
            let opened = drawn.matches(&format!("<{open}")).count();
            assert_eq!(opened, drawn.matches(&format!("</{open}>")).count());
        }
        let bars: usize = PICTURE.panels.iter().map(|panel| panel.rows.len()).sum();
        // Plus three in the legend.
        assert_eq!(drawn.matches("<rect").count(), 2 * 3 * bars + 3);
    }

    #[test]
    fn every_drawn_row_exists() {
        for row in PICTURE.panels.iter().flat_map(|panel| panel.rows) {
            assert!(*row == MEMORY || ROWS.iter().any(|known| known.name == *row));
        }
    }
}
