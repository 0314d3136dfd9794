//! The subcommand `soak`: checked traffic through every tunnel, beside ends, freezes, rotations and attacks.
//!
//! | module | content |
//! |---|---|
//! | [`flow`], [`plan`] | connections, whose seeds determine every byte |
//! | [`ledger`] | results, and the events that explain failures |
//! | [`konnectivity`], [`openvpn`], [`door`] | the programs and their events |
//! | [`mod@unit`] | one program that ends and starts again |
//! | [`attackers`] | strangers beside the load |
//! | [`lives`] | memory and descriptors of every program |
//! | [`report`] | the result |
//! | [`random`] | numbers and bytes of a seed |
//!
//! The seed determines the connections and the sequence of events of each tunnel. Times differ from run to run.

mod attackers;
mod door;
mod flow;
mod konnectivity;
mod ledger;
mod lives;
mod openvpn;
mod plan;
mod random;
mod report;
mod unit;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, ensure};
use clap::Args;
use culvert_kit::pki::Pki;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use self::attackers::{Attackers, Victims};
use self::door::Door;
use self::flow::Endpoint;
use self::konnectivity::Konnectivity;
use self::ledger::{Ledger, Path};
use self::lives::Lives;
use self::openvpn::OpenVpn;
use self::random::{Random, mix};
use self::report::Outcome;
use crate::entry::Entry;
use crate::memory::{self, REST};
use crate::openvpn::Ground;
use crate::programs::Programs;

/// Number of concurrent connections of each path.
const WORKERS: u64 = 4;

/// Time before the end of a run without new events.
const QUIET: Duration = Duration::from_secs(8);

/// Time before the end of a long run in which programs do not end, so that slopes of memory and descriptors come from
/// long lives. All other events go on.
const STEADY: Duration = Duration::from_mins(5);

/// Time limit for the last connections to end at the endpoints.
const LEAVE_LIMIT: Duration = Duration::from_secs(30);

/// Options of the subcommand.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Minutes of load; starting programs and the last connections take longer
    #[arg(long, value_name = "N", default_value_t = 10.0, value_parser = minutes)]
    minutes: f64,

    /// Repeat the events and connections of an earlier run; without this option, the seed is new
    #[arg(long, value_name = "SEED")]
    seed: Option<u64>,

    /// Write the result to a file
    #[arg(long, value_name = "PATH")]
    json: Option<PathBuf>,
}

fn minutes(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(minutes) if (0.2..=10_000.0).contains(&minutes) => Ok(minutes),
        _ => Err("must be a number from 0.2 to 10000".to_owned()),
    }
}

/// Records of a run, shared by all of its parts.
#[derive(Debug, Clone)]
struct Run {
    ledger: Arc<Ledger>,
    lives: Arc<Lives>,
    /// [`STEADY`], or zero for a short run.
    steady: Duration,
}

impl Run {
    /// Returns true if a program may end now, in a run until `end`.
    fn may_end(&self, end: Instant) -> bool {
        Instant::now() + self.steady < end
    }

    /// Records the failure of a tunnel before its programs end.
    fn lived<T>(&self, tunnel: &'static str, lived: anyhow::Result<T>) -> anyhow::Result<T> {
        lived
            .context(tunnel)
            .inspect_err(|error| self.ledger.fails(format_args!("{error:#}")))
    }

    /// Waits for the time of the next event. Waits until the end, and returns false, if the end is near.
    async fn pause(&self, random: &mut Random, end: Instant) -> bool {
        let next = Instant::now() + random.millis(500, 3000);
        let is_time = next + QUIET < end;
        sleep_until(if is_time { next } else { end }).await;
        is_time
    }
}

/// Runs the load and prints the result. Returns true if the result is clean, see [`Outcome::is_clean`].
pub(crate) async fn run(options: Options) -> anyhow::Result<bool> {
    let programs = Programs::find()?;
    if programs.stock.is_none() {
        leave_out("packet transport left out: the stock agent needs Go")?;
    }
    let seed = options.seed.unwrap_or_else(new_seed);
    let time = Duration::from_secs_f64(60.0 * options.minutes);
    let outcome = Box::pin(soak(&programs, seed, time)).await?;
    print!("{outcome}");
    if let Some(path) = &options.json {
        let text = format!("{:#}\n", outcome.json());
        std::fs::write(path, text).with_context(|| path.display().to_string())?;
    }
    Ok(outcome.is_clean())
}

/// Returns a seed that people can type.
fn new_seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    mix(
        now.map_or(0, |now| now.as_nanos() as u64),
        u64::from(std::process::id()),
    ) % 1_000_000_000
}

/// Prints the part of the soak that does not run. In CI every part must run.
fn leave_out(why: &str) -> anyhow::Result<()> {
    let is_ci = std::env::var("CI").is_ok_and(|ci| ci == "true");
    ensure!(!is_ci, "{why}, though CI=true");
    eprintln!("{why}");
    Ok(())
}

async fn soak(programs: &Programs, seed: u64, time: Duration) -> anyhow::Result<Outcome> {
    memory::raise_limit();
    // In a network of its own, the soak has no loopback interface before.
    let ground = Ground::find();
    eprintln!("seed {seed}; {:.1} minutes", time.as_secs_f64() / 60.0);
    let run = Run {
        ledger: Ledger::new(seed),
        lives: Arc::default(),
        steady: if time < 2 * STEADY {
            Duration::ZERO
        } else {
            STEADY
        },
    };
    let mut seeds = Random::new(seed);
    let mut random = || Random::new(seeds.next());
    let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let endpoint = Endpoint::on(loopback, Arc::clone(&run.ledger)).context("endpoint")?;
    let target = endpoint.address;
    let konnectivity = Konnectivity::start(programs, run.clone(), random()).await;
    let konnectivity = konnectivity.context("Konnectivity")?;
    let door = Door::start(programs, target, run.clone(), random()).await;
    let door = door.context("front door")?;
    let openvpn_random = random();
    let openvpn = match ground {
        Ok(ground) => {
            let openvpn = OpenVpn::start(programs, &ground, run.clone(), openvpn_random);
            Some(run.lived("OpenVPN", openvpn.await)?)
        }
        Err(error) => {
            leave_out(&format!("OpenVPN left out: {error:#}"))?;
            None
        }
    };

    let mut entries: Vec<(Path, Entry, SocketAddr)> = Vec::new();
    for (path, entry) in konnectivity.entries()?.into_iter().chain(door.entries()) {
        entries.push((path, entry, target));
    }
    entries.extend(openvpn.as_ref().map(|openvpn| {
        let (path, entry) = openvpn.entry();
        (path, entry, openvpn.endpoint().address)
    }));
    let paths = entries.iter().map(|(path, ..)| *path).collect();
    let attackers = attack(&konnectivity, &door, openvpn.as_ref(), random())?;
    let (stop, stopped) = watch::channel(false);
    let mut workers = JoinSet::new();
    for (path, entry, target) in entries {
        for _ in 0..WORKERS {
            let (entry, ledger) = (entry.clone(), Arc::clone(&run.ledger));
            let work = flow::work(path, entry, target, ledger, stopped.clone(), random());
            workers.spawn(work);
        }
    }
    let mut sampling = JoinSet::new();
    sampling.spawn(Arc::clone(&run.lives).sample());

    let begin = Instant::now();
    let end = begin + time;
    let openvpn = async {
        match openvpn {
            Some(openvpn) => run.lived("OpenVPN", openvpn.live(end).await).map(Some),
            None => Ok(None),
        }
    };
    let lived = tokio::try_join!(
        async { run.lived("Konnectivity", konnectivity.live(end).await) },
        async { run.lived("front door", door.live(end).await) },
        openvpn,
    );
    let elapsed = begin.elapsed();
    let attacks = attackers.connections();
    let account = match &lived {
        Ok((_, _, openvpn)) => {
            // The workers end after their current connections. The send fails if all of them have panicked.
            stop.send(true).ok();
            while let Some(worker) = workers.join_next().await {
                worker.context("a worker")?;
            }
            drop(attackers);
            let endpoints = [Some(&endpoint), openvpn.as_ref().map(OpenVpn::endpoint)];
            leaves(&run, endpoints).await;
            sleep(REST).await;
            run.lives.sample_once();
            run.ledger.account()
        }
        Err(_) => run.ledger.account(),
    };
    Ok(Outcome {
        seed,
        time: elapsed,
        paths,
        account,
        trends: run.lives.trends(),
        attacks,
    })
}

fn attack(
    konnectivity: &Konnectivity,
    door: &Door,
    openvpn: Option<&OpenVpn>,
    random: Random,
) -> anyhow::Result<Attackers> {
    let [agents, health] = konnectivity.listeners();
    let [sni, tunnel, stats] = door.listeners();
    let victims = Victims {
        tls: vec![agents, sni],
        http: vec![health, tunnel, stats],
        openvpn: openvpn.map(OpenVpn::listeners),
    };
    let pki = konnectivity.pki();
    let dir = tempfile::tempdir()?;
    let foreign = Pki::create_other(dir.path())?;
    Attackers::start(&victims, agents, pki, &foreign.client, random)
}

/// Waits until no connection is open at the endpoints. Open connections are a failure.
async fn leaves(run: &Run, endpoints: [Option<&Endpoint>; 2]) {
    let begin = Instant::now();
    loop {
        let open: usize = endpoints
            .iter()
            .flatten()
            .map(|endpoint| endpoint.open())
            .sum();
        if open == 0 {
            return;
        }
        if begin.elapsed() > LEAVE_LIMIT {
            run.ledger.fails(format_args!(
                "{open} connections are open at the endpoints {LEAVE_LIMIT:?} after their clients have closed"
            ));
            return;
        }
        sleep(Duration::from_millis(100)).await;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use culvert_tests::namespace::alone;

    use super::*;
    use crate::names::SERVER;

    #[test]
    fn short_run_is_clean() {
        alone(async || {
            let server = culvert_tests::process::ours(SERVER);
            let programs = Programs::at(server.parent().unwrap().to_owned()).unwrap();
            let outcome = Box::pin(soak(&programs, 1, Duration::from_secs(15)))
                .await
                .unwrap();
            assert!(outcome.is_clean(), "{outcome}");
            assert_eq!(outcome.paths.len(), 5, "{outcome}");
        });
    }

    #[tokio::test(start_paused = true)]
    async fn events_stop_before_the_end() {
        let run = Run {
            ledger: Ledger::new(1),
            lives: Arc::default(),
            steady: Duration::ZERO,
        };
        let (begin, mut random) = (Instant::now(), Random::new(1));
        let end = begin + 2 * QUIET;
        let mut events = 0;
        while run.pause(&mut random, end).await {
            assert!(begin.elapsed() <= QUIET);
            events += 1;
        }
        assert!(events > 1 && begin.elapsed() >= 2 * QUIET);
    }
}
