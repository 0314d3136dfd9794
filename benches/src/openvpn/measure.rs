//! Measurements with the figures of each program.

use std::time::Duration;

use culvert_tests::Program;
use tokio::time::sleep;

use crate::figures::{Figures, GIB, MIB, RATE};
use crate::load::{self, Job, Work};
use crate::measure::{SETTLE, warm_up};
use crate::openvpn::bursts::Bursts;
use crate::openvpn::contenders::Pair;
use crate::openvpn::rows::{
    BOTH_GBIT, CLIENT_CPU, CLIENT_GBIT, LOST, SERVER_CPU, SERVER_GBIT, SERVER_LOAD,
};

/// Resolution of processor time, in seconds.
const TICK: f64 = 0.01;

/// Measures a load of a given amount, with the processor time of each program.
pub(super) async fn transfer(
    pair: &Pair,
    first: Job,
    seconds: f64,
    is_ours: bool,
) -> anyhow::Result<Figures> {
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
pub(super) async fn bursts(pair: &Pair, work: Work, time: Duration) -> anyhow::Result<Figures> {
    let mut flow = Bursts::open(&pair.entry, pair.endpoints.lean(), work).await?;
    let before = pair.lost()?;
    let rate = flow.rate(time).await?;
    let lost = pair.lost()?.saturating_sub(before);
    Ok(vec![(RATE, rate / MIB), (LOST, lost as f64)])
}
