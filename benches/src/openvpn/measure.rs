//! Measurement of a row of a contender.

use std::time::Duration;

use anyhow::Context as _;
use culvert_tests::Program;
use tokio::time::{sleep, timeout};

use crate::load::{self, Job, Work};
use crate::measure::{LIMIT, SETTLE, warm_up};
use crate::openvpn::bursts::Bursts;
use crate::openvpn::contenders::{Contender, Pair};
use crate::openvpn::ground::Ground;
use crate::openvpn::rows::{
    BOTH_GBIT, CLIENT_AFTER, CLIENT_CPU, CLIENT_GBIT, CLIENT_START, Kind, LOST, RESENT, Row,
    SERVER_AFTER, SERVER_CPU, SERVER_GBIT, SERVER_LOAD, SERVER_START,
};
use crate::openvpn::switching;
use crate::report::Figures;
use crate::rows::{GIB, MIB, RATE};
use crate::stalled::{self, Crowd};
use crate::topology::Programs;

/// The pauses leave two cores idle for more than half of the time.
const CROWD: Crowd = Crowd {
    echoes: 200,
    stalled: 1,
    pause: Duration::from_millis(100),
    stagger: Duration::from_micros(500),
    // As long as the stalled connections need to fill every buffer.
    rest: Duration::from_secs(1),
};

/// Resolution of processor time, in seconds.
const TICK: f64 = 0.01;

/// Resources for all measurements.
pub struct Lab {
    /// The programs to start.
    pub programs: Programs,
    /// The networks to use.
    pub ground: Ground,
    /// Seconds of load per measurement.
    pub seconds: f64,
}

impl Lab {
    /// Starts a contender. Most rows use this long-lived instance.
    pub async fn start(&self, contender: Contender) -> anyhow::Result<Pair> {
        Pair::start(contender, &self.programs, &self.ground).await
    }

    /// Measures one row: on `running`, or on a contender that is started for this row.
    pub async fn measure(
        &self,
        row: &Row,
        contender: Contender,
        running: &Pair,
    ) -> anyhow::Result<Figures> {
        let time = Duration::from_secs_f64(2.0 * self.seconds);
        let measuring = async {
            match row.kind {
                Kind::Load(first) => {
                    let is_ours = !contender.needs_stock();
                    transfer(running, first, self.seconds, is_ours).await
                }
                Kind::Bursts(work) => bursts(running, work, time).await,
                Kind::Crowd => {
                    let (entry, endpoints) = (&running.entry, &running.endpoints);
                    stalled::measure(&CROWD, entry, endpoints, time).await
                }
                Kind::Switch => {
                    let pause = Duration::from_secs_f64(self.seconds.min(1.0));
                    switching::measure(&self.programs, &self.ground, pause).await
                }
            }
        };
        let measured = timeout(LIMIT, measuring).await;
        measured.with_context(|| format!("not finished within {LIMIT:?}"))?
    }
}

/// Measures a load of a given amount, with the processor time of each program.
async fn transfer(pair: &Pair, first: Job, seconds: f64, is_ours: bool) -> anyhow::Result<Figures> {
    let (entry, target) = (&pair.entry, pair.endpoints.lean());
    let work = async |job: Job| load::run(entry, target, job).await;
    let job = warm_up(first, seconds, &work).await?;
    let before = pair.ask(Program::cpu_time)?;
    let done = work(job).await?;
    sleep(SETTLE).await;
    let after = pair.ask(Program::cpu_time)?;
    let used = |after: Duration, before: Duration| (after - before).as_secs_f64().max(TICK);
    let ([server, client], [server_before, client_before]) = (after, before);
    let (server, client) = (used(server, server_before), used(client, client_before));
    let (total, elapsed) = (job.total() as f64, done.elapsed.as_secs_f64());
    let gibibytes = total / GIB;
    let mut figures = vec![
        (RATE, total / MIB / elapsed),
        (SERVER_CPU, server / gibibytes),
        (CLIENT_CPU, client / gibibytes),
        (SERVER_LOAD, 100.0 * server / elapsed),
    ];
    if is_ours {
        let gigabits = total * 8.0 / 1e9;
        figures.extend([
            (SERVER_GBIT, gigabits / server),
            (CLIENT_GBIT, gigabits / client),
            (BOTH_GBIT, gigabits / (server + client)),
        ]);
    }
    Ok(figures)
}

/// Measures bursts and the datagrams lost during the bursts.
async fn bursts(pair: &Pair, work: Work, time: Duration) -> anyhow::Result<Figures> {
    let mut flow = Bursts::open(&pair.entry, pair.endpoints.lean(), work).await?;
    let before = pair.lost()?;
    let rate = flow.rate(time).await?;
    let lost = pair.lost()?.saturating_sub(before);
    Ok(vec![(RATE, rate / MIB), (LOST, lost as f64)])
}

/// Returns the retransmitted segments of a long-running pair, and the memory of each program before any load
/// and now.
pub async fn memory(
    pair: &Pair,
    [server_start, client_start]: [u64; 2],
) -> anyhow::Result<Figures> {
    let [server, client] = pair.ask(Program::rss)?;
    let resent = pair.resent().await?.map(|segments| (RESENT, segments));
    let figures = [
        (SERVER_START, server_start),
        (SERVER_AFTER, server),
        (CLIENT_START, client_start),
        (CLIENT_AFTER, client),
    ];
    let figures = figures.map(|(metric, bytes)| (metric, bytes as f64 / MIB));
    Ok(figures.into_iter().chain(resent).collect())
}
