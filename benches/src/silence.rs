//! The subcommand `silence`: dials beside a peer that no longer answers, for every tunnel with two peers.
//!
//! | module | content |
//! |---|---|
//! | [`pairs`] | the tunnels and their peers |
//!
//! Everything runs in a network of its own, in which packets from and to one peer can be dropped.

mod pairs;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::Args;
use culvert_tests::namespace::{self, Direction, cut_off, restore};
use culvert_tests::{Program, Signal};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

use self::pairs::{ADDRESSES, Pair, SUBJECTS, Subject};
use crate::harness::ask;
use crate::openvpn::Ground;
use crate::programs::Programs;
use crate::report::Machine;

/// Interval of dials.
const DIAL_INTERVAL: Duration = Duration::from_millis(200);

/// Duration from which a dial counts as slow.
const SLOW: Duration = Duration::from_secs(1);

/// Targets: number of slow dials, and the slowest dial.
const MOST_SLOW: usize = 1;
const SLOWEST: Duration = Duration::from_secs(2);

/// Time limit of a dial. Longer than the 35 s after which the server ends every dial.
const DIAL_LIMIT: Duration = Duration::from_secs(40);

/// Time limit for the silent peer to be used again.
const AGAIN_LIMIT: Duration = Duration::from_secs(90);

/// Options of the subcommand.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Seconds of silence per measurement
    #[arg(long, value_name = "S", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=300))]
    seconds: u64,

    /// Measure only this tunnel (repeatable): ours, ours+stock, stock+ours, stock (server+agent), openvpn, door
    #[arg(long = "tunnel", value_name = "NAME")]
    tunnels: Vec<String>,

    /// Exit with code 1 if our programs miss a target
    #[arg(long)]
    strict: bool,

    /// Write the result to a file
    #[arg(long, value_name = "PATH")]
    json: Option<PathBuf>,
}

/// Cause of the silence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cause {
    /// The peer is stopped.
    Frozen,
    /// Packets from and to the peer are dropped.
    Dropped,
    /// Packets to the peer are dropped.
    Deaf,
    /// Packets from the peer are dropped.
    Mute,
}

const CAUSES: [Cause; 4] = [Cause::Frozen, Cause::Dropped, Cause::Deaf, Cause::Mute];

/// Figures of a measurement.
#[derive(Debug)]
struct Figures {
    dials: usize,
    failed: usize,
    slow: usize,
    slowest: Duration,
    /// Time from the end of the silence to the first dial through the peer. `None` if no dial used the peer in time.
    again: Option<Duration>,
}

impl Cause {
    fn name(self) -> &'static str {
        match self {
            Self::Frozen => "frozen",
            Self::Dropped => "network dropped",
            Self::Deaf => "receives nothing",
            Self::Mute => "sends nothing",
        }
    }

    /// Returns the dropped packets, seen from the address at which the peer finds the other side.
    fn directions(self) -> &'static [Direction] {
        match self {
            Self::Frozen => &[],
            Self::Dropped => &[Direction::From, Direction::To],
            Self::Deaf => &[Direction::From],
            Self::Mute => &[Direction::To],
        }
    }
}

/// Measures all tunnels and prints the table. Returns true if every measurement was possible and,
/// with `--strict`, our programs meet the target.
pub(crate) async fn run(options: Options) -> anyhow::Result<bool> {
    ensure!(
        namespace::is_inside(),
        "needs network namespaces: run as root"
    );
    let names = SUBJECTS.map(Subject::name);
    for name in &options.tunnels {
        ensure!(
            names.contains(&name.as_str()),
            "unknown tunnel {name:?}; --help lists all"
        );
    }
    let programs = Programs::find()?;
    for subject in SUBJECTS.iter().filter(|subject| subject.needs_stock()) {
        let is_named = options.tunnels.iter().any(|name| name == subject.name());
        ensure!(
            !is_named || programs.stock.is_some(),
            "tunnel {:?} needs the stock programs, which need Go",
            subject.name()
        );
    }
    let ground = Ground::find()?;
    pairs::prepare();
    let time = Duration::from_secs(options.seconds);
    let (mut lines, mut failures, mut clean) = (Vec::new(), Vec::new(), true);
    println!(
        "{}; {} s of silence, 5 dials/s",
        Machine::this(),
        options.seconds
    );
    println!(
        "{:12} {:16} {:>6} {:>7} {:>9} {:>10} {:>12}  target",
        "tunnel", "peer", "dials", "failed", "over 1 s", "slowest s", "again s"
    );
    for subject in SUBJECTS {
        let name = subject.name();
        let is_wanted = options.tunnels.is_empty() || options.tunnels.iter().any(|one| one == name);
        if !is_wanted || (subject.needs_stock() && programs.stock.is_none()) {
            continue;
        }
        for cause in CAUSES.into_iter().filter(|cause| subject.has(*cause)) {
            match measure(subject, cause, &programs, &ground, time).await {
                Ok(figures) => {
                    println!("{name:12} {:16} {}", cause.name(), figures.line());
                    lines.push(figures.json(name, cause));
                    clean &= !options.strict || figures.is_met() || subject.has_stock_server();
                }
                Err(error) => {
                    clean = false;
                    let (peer, error) = (cause.name(), format!("{error:#}"));
                    println!("FAILED {name}, {peer}: {error}");
                    failures.push(json!({ "tunnel": name, "peer": peer, "error": error }));
                }
            }
        }
    }
    if let Some(path) = &options.json {
        let machine = Machine::this().to_string();
        let report = json!({
            "machine": machine,
            "seconds": options.seconds,
            "lines": lines,
            "failures": failures,
        });
        std::fs::write(path, format!("{report:#}\n"))
            .with_context(|| path.display().to_string())?;
    }
    Ok(clean)
}

async fn measure(
    subject: Subject,
    cause: Cause,
    programs: &Programs,
    ground: &Ground,
    time: Duration,
) -> anyhow::Result<Figures> {
    let mut pair = Pair::start(subject, programs, ground).await?;
    // Both peers are in use before.
    for peer in 0..ADDRESSES.len() {
        if subject.uses_both() {
            used(&mut pair, peer).await?;
        }
    }
    let silent = match subject.uses_both() {
        true => 0,
        false => current(&mut pair).await?,
    };
    let address = ADDRESSES.get(silent).map(|(_, address)| *address);
    let address = address.context("no such peer")?;
    let signal =
        |pair: &mut Pair, signal| pair.with_peer(silent, |peer: &Program| peer.signal(signal));
    match cause {
        Cause::Frozen => signal(&mut pair, Signal::STOP)?,
        _ => ask(|| cut_off(address, subject.seen_from_peer(cause.directions())))?,
    }
    let (begin, mut times, mut failed) = (Instant::now(), Vec::new(), 0);
    let mut ticks = interval(DIAL_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while begin.elapsed() < time {
        ticks.tick().await;
        let dialed = Instant::now();
        match timeout(DIAL_LIMIT, dial(&pair)).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) | Err(_) => failed += 1,
        }
        times.push(dialed.elapsed());
    }
    match cause {
        Cause::Frozen => signal(&mut pair, Signal::CONT)?,
        _ => ask(restore)?,
    }
    let restored = Instant::now();
    let again = used(&mut pair, silent)
        .await
        .is_ok()
        .then(|| restored.elapsed());
    Ok(Figures {
        dials: times.len(),
        failed,
        slow: times.iter().filter(|time| **time > SLOW).count(),
        slowest: times.iter().copied().max().unwrap_or_default(),
        again,
    })
}

/// Dials, and waits for the echo of one byte.
async fn dial(pair: &Pair) -> anyhow::Result<()> {
    let mut stream = pair.entry.open(pair.target).await?;
    stream.write_all(b"echo\nx").await?;
    stream.flush().await?;
    ensure!(stream.read_u8().await? == b'x', "another byte came back");
    Ok(())
}

/// Returns the peer that carries the next dial.
async fn current(pair: &mut Pair) -> anyhow::Result<usize> {
    let mut stream = pair.entry.open(pair.target).await?;
    stream.write_all(pair.question().as_bytes()).await?;
    stream.flush().await?;
    let port = stream.read_u16().await?;
    pair.peer_with(port)
}

/// Dials until a dial uses the peer.
async fn used(pair: &mut Pair, peer: usize) -> anyhow::Result<()> {
    let using = async {
        loop {
            let current = timeout(DIAL_LIMIT, current(pair)).await;
            if current.is_ok_and(|current| current.is_ok_and(|current| current == peer)) {
                return;
            }
            sleep(DIAL_INTERVAL / 10).await;
        }
    };
    timeout(AGAIN_LIMIT, using)
        .await
        .context("the peer gets no dials")
}

impl Figures {
    fn line(&self) -> String {
        let again = self
            .again
            .map(|again| format!("{:.1}", again.as_secs_f64()));
        format!(
            "{:>6} {:>7} {:>9} {:>10.2} {:>12}  {}",
            self.dials,
            self.failed,
            self.slow,
            self.slowest.as_secs_f64(),
            again.unwrap_or_else(|| "never".to_owned()),
            if self.is_met() { "met" } else { "MISSED" }
        )
    }

    /// Returns true if all dials succeeded, at most one was slow, and the peer was used again.
    fn is_met(&self) -> bool {
        let is_fast = self.slow <= MOST_SLOW && self.slowest <= SLOWEST;
        self.failed == 0 && is_fast && self.again.is_some()
    }

    fn json(&self, tunnel: &str, cause: Cause) -> Value {
        json!({
            "tunnel": tunnel,
            "peer": cause.name(),
            "dials": self.dials,
            "failed": self.failed,
            "dials_over_1_s": self.slow,
            "slowest_s": self.slowest.as_secs_f64(),
            "again_s": self.again.map(|again| again.as_secs_f64()),
            "met": self.is_met(),
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::indexing_slicing)]
    use super::*;

    #[test]
    fn one_slow_dial_meets_the_target_but_failed_dials_and_lost_peers_do_not() {
        let figures = |failed, slow, slowest| Figures {
            dials: 100,
            failed,
            slow,
            slowest: Duration::from_millis(slowest),
            again: Some(Duration::from_secs(3)),
        };
        assert!(figures(0, 1, 1600).line().ends_with("3.0  met"));
        assert!(figures(0, 0, 10).is_met());
        for missed in [figures(1, 0, 10), figures(0, 2, 1600), figures(0, 1, 7000)] {
            assert!(missed.line().ends_with("MISSED"), "{missed:?}");
        }
        assert_eq!(figures(0, 2, 1600).json("ours", Cause::Mute)["met"], false);
        let never = Figures {
            again: None,
            ..figures(0, 0, 10)
        };
        assert!(never.line().ends_with("never  MISSED"), "{never:?}");
    }
}
