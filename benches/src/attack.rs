//! The subcommand `attack`: attacks on every listener of our programs and of the stock programs.
//!
//! | module | content |
//! |---|---|
//! | [`rows`] | listeners, attacks and figures |
//! | [`attackers`] | the attacks |
//! | [`honest`] | honest clients and health checks |
//! | [`stage`] | the attacked programs |
//! | [`networks`] | network namespaces, or addresses on loopback |
//! | [`party`] | work in one of the networks, on a thread of its own |
//! | [`trial`] | one measurement |
//! | [`targets`] | the comparison and its targets |
//! | [`text`] | the report as text |
//!
//! Each measurement starts programs of its own. Honest clients connect every 100 ms, from another address than the
//! attacker. With root, the whole command runs inside private namespaces, which end with the command.

pub(crate) mod attackers;
mod honest;
mod networks;
mod party;
mod rows;
mod stage;
mod targets;
mod text;
mod trial;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum as _};
use culvert_tests::envoy::Envoy;
use culvert_tests::namespace;
use culvert_tests::openvpn::OpenVpn;

use self::networks::Networks;
use self::party::Party;
use self::rows::{ATTACK, CLIENT_P99, GROWTH, Kind, Listener, Setting};
use self::stage::{Make, Stage};
use crate::figures::Figures;
use crate::memory;
use crate::names::{OURS, STOCK};
use crate::openvpn::again_with_konnectivity;
use crate::options::Common;
use crate::programs::Programs;
use crate::report::{Comparison, Report};
use crate::rows::Row;
use crate::runner::{self, Scenario};
use crate::svg::{Picture, bar, panel};

/// The picture that `--svg` draws.
static PICTURE: Picture = Picture {
    title: "Attacks on Culvert and on the programs that it replaces",
    panels: &[
        panel("Growth of memory, MiB", GROWTH, rows::ALL),
        panel(
            "New honest client, 99th percentile in ms",
            CLIENT_P99,
            rows::ALL,
        ),
    ],
    bars: &[bar(OURS, "Culvert", "o"), bar(STOCK, "stock", "s")],
    by: STOCK,
};

/// Options of the subcommand.
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(flatten)]
    common: Common,

    /// Attack only this listener
    #[arg(long, value_enum)]
    front: Option<Listener>,

    /// Attack only this contender (repeatable): ours, stock
    #[arg(long = "contender", value_name = "NAME")]
    contenders: Vec<String>,
}

/// Runs the whole command again inside namespaces, as [`again_with_konnectivity`]. Installs Envoy first, too.
pub(crate) async fn again() -> anyhow::Result<Option<ExitCode>> {
    if !namespace::is_inside() {
        Envoy::get();
    }
    again_with_konnectivity().await
}

/// Makes all attacks and writes the report. Returns true if no measurement failed, and, with `--strict`, no target
/// is missed.
pub(crate) async fn run(options: Options) -> anyhow::Result<bool> {
    memory::raise_limit();
    let lab = Lab::new(Programs::find()?, options.common.seconds());
    let fronts = options
        .front
        .map_or(Listener::value_variants().to_vec(), |one| vec![one]);
    runner::run(&lab, &fronts, &options.common, &options.contenders).await
}

/// Resources for all measurements.
struct Lab {
    /// The programs to start.
    programs: Arc<Programs>,
    /// Listeners with a stock program on this machine.
    stock: Vec<Listener>,
    /// Value of `--seconds`.
    seconds: f64,
}

impl Lab {
    /// Finds the stock programs. Prints each missing program to stderr.
    fn new(programs: Programs, seconds: f64) -> Self {
        let mut stock = Vec::new();
        if programs.stock.is_some() {
            stock.extend([
                Listener::Agents,
                Listener::FrontEnd,
                Listener::Health,
                Listener::Admin,
            ]);
        }
        if Envoy::get().is_some() {
            stock.extend([
                Listener::Sni,
                Listener::Connect,
                Listener::NodePort,
                Listener::Stats,
            ]);
        }
        match (OpenVpn::look(), namespace::is_inside()) {
            (Ok(_), true) => stock.extend([Listener::OpenvpnTcp, Listener::OpenvpnUdp]),
            (Ok(_), false) => eprintln!("stock OpenVPN left out: no network namespaces"),
            (Err(why), _) => eprintln!("stock OpenVPN left out: {why}"),
        }
        Self {
            programs: Arc::new(programs),
            stock,
            seconds,
        }
    }

    /// Duration of an attack.
    fn time(&self) -> Duration {
        Duration::from_secs_f64(ATTACK * self.seconds)
    }
}

impl Scenario for Lab {
    type Front = Listener;
    type Kind = Kind;
    type Contender = Make;
    /// Each measurement starts its own programs.
    type Running = ();

    const COMPARISON: &'static Comparison = &targets::COMPARISON;
    const PICTURE: &'static Picture = &PICTURE;
    const CONTENDERS: &'static [Make] = &[Make::Ours, Make::Stock];

    fn front_name(front: Listener) -> &'static str {
        front.name()
    }

    fn rows(front: Listener) -> &'static [Row<Kind>] {
        front.rows()
    }

    fn name(make: Make) -> &'static str {
        match make {
            Make::Ours => OURS,
            Make::Stock => STOCK,
        }
    }

    fn missing(&self, make: Make) -> Option<&'static str> {
        let is_missing = make == Make::Stock && self.stock.is_empty();
        is_missing.then_some("no stock program is available")
    }

    fn has(&self, front: Listener, kind: Kind, make: Make) -> bool {
        // The stock programs have no QUIC.
        let has_stock = kind.setting != Setting::Quic && self.stock.contains(&front);
        make == Make::Ours || has_stock
    }

    fn text(report: &Report) -> String {
        text::table(report)
    }

    async fn start(&self, _front: Listener, _make: Make) -> anyhow::Result<()> {
        Ok(())
    }

    async fn measure(
        &self,
        front: Listener,
        kind: Kind,
        make: Make,
        (): &mut (),
    ) -> anyhow::Result<Figures> {
        let networks = Arc::new(Networks::create());
        let (programs, time) = (Arc::clone(&self.programs), self.time());
        let inside = Arc::clone(&networks);
        let trial = Party::start(networks.attacked(), move || async move {
            let stage = Stage::start(make, front, kind.setting, &programs, &inside).await?;
            trial::measure(stage, front, kind, time, &inside).await
        });
        trial.finish().await
    }

    fn rss((): &mut ()) -> anyhow::Result<Vec<u64>> {
        Ok(Vec::new())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
    use super::*;
    use crate::attack::attackers::Crowd;
    use crate::attack::rows::{CONNECTIONS, RECOVERY};
    use crate::rows::Kind as _;

    /// Attacks debug builds of our programs for a second, and returns the figures.
    async fn attacked(
        front: Listener,
        attack: rows::Attack,
        crowd: Crowd,
        setting: Setting,
    ) -> anyhow::Result<Figures> {
        let server = culvert_tests::process::ours(crate::names::SERVER);
        let programs = Programs::at(server.parent().unwrap().to_owned()).unwrap();
        let lab = Lab {
            programs: Arc::new(programs),
            stock: Vec::new(),
            seconds: 0.2,
        };
        let kind = Kind {
            attack,
            crowd,
            addresses: 3,
            setting,
        };
        assert!(kind.is_fresh());
        lab.measure(front, kind, Make::Ours, &mut ()).await
    }

    fn figure(figures: &Figures, metric: crate::figures::Metric) -> f64 {
        figures
            .iter()
            .find(|(known, _)| *known == metric)
            .unwrap()
            .1
    }

    #[tokio::test]
    async fn attacks_on_our_programs_are_measured() {
        let crowd = Crowd {
            held: 100,
            rate: 50.0,
        };
        for (front, attack, setting) in [
            (Listener::Agents, rows::Attack::Slow, Setting::Usual),
            (Listener::Connect, rows::Attack::Noise, Setting::Usual),
            (Listener::Agents, rows::Attack::Initials, Setting::Quic),
            (Listener::Sni, rows::Attack::Initials, Setting::Quic),
        ] {
            let crowd = match attack {
                rows::Attack::Initials => Crowd {
                    rate: 500.0,
                    ..crowd
                },
                _ => crowd,
            };
            let figures = attacked(front, attack, crowd, setting).await.unwrap();
            assert!(figure(&figures, CONNECTIONS) >= 100.0, "{figures:?}");
            assert!(figure(&figures, CLIENT_P99) > 0.0, "{figures:?}");
            assert!(figure(&figures, RECOVERY).is_finite(), "{figures:?}");
        }
    }

    #[tokio::test]
    async fn attack_without_a_connection_fails() {
        let crowd = Crowd {
            held: 0,
            rate: 0.001,
        };
        let attacking = attacked(
            Listener::Health,
            rows::Attack::Silent,
            crowd,
            Setting::Usual,
        );
        let error = attacking.await.unwrap_err().to_string();
        assert_eq!(error, "the attack made no connection: no error");
    }

    #[test]
    fn every_drawn_row_exists() {
        let fronts = Listener::value_variants();
        let rows: Vec<&str> = fronts
            .iter()
            .flat_map(|f| f.rows())
            .map(|r| r.name)
            .collect();
        for row in rows::ALL {
            assert!(rows.contains(row), "{row}");
        }
    }
}
