//! Measurement of a load of a given amount.

use std::time::Duration;

use anyhow::Context as _;
use tokio::time::sleep;

use crate::entry::Entry;
use crate::figures::{
    CPU_PER_DIAL, CPU_PER_ECHO, CPU_PER_GIB, DIAL_RATE, Figures, GIB, MIB, P50, P99, RATE,
};
use crate::load::{self, Job, Work};

/// Time after the last byte that still counts as processor time of a job, for example for closing connections.
pub(crate) const SETTLE: Duration = Duration::from_millis(100);

/// A running contender during a measurement.
pub(crate) trait Subject {
    /// Entry of the load.
    fn entry(&self) -> &Entry;

    /// Processor time of all programs so far, in clock ticks of 10 ms. `None` if the contender has no
    /// program.
    fn cpu_time(&mut self) -> anyhow::Result<Option<Duration>>;

    /// Resident memory of all programs, in bytes. `None` if the contender has no program.
    fn rss(&mut self) -> anyhow::Result<Option<u64>>;
}

/// Warms a contender up twice; the first time estimates the speed for the second. Returns the job that should
/// take `seconds`.
pub(crate) async fn warm_up(
    first: Job,
    seconds: f64,
    work: impl AsyncFn(Job) -> anyhow::Result<load::Done>,
) -> anyhow::Result<Job> {
    let mut job = first;
    for wanted in [seconds / 4.0, seconds] {
        let elapsed = work(job).await.context("warm-up")?.elapsed.as_secs_f64();
        job.amount = ((job.amount as f64 * wanted / elapsed.max(1e-6)) as u64).max(1);
    }
    Ok(job)
}

/// Measures a load of a given amount: warms the contender up, and then runs a job of about `seconds`.
pub(crate) async fn load(
    subject: &mut impl Subject,
    first: Job,
    seconds: f64,
    work: impl AsyncFn(Job) -> anyhow::Result<load::Done>,
) -> anyhow::Result<Figures> {
    let job = warm_up(first, seconds, &work).await?;
    let before = subject.cpu_time()?;
    let done = work(job).await?;
    sleep(SETTLE).await;
    let used = subject.cpu_time()?.zip(before);
    let cpu = used.map(|(after, before)| (after - before).as_secs_f64());
    let (total, elapsed) = (job.total() as f64, done.elapsed.as_secs_f64());
    let (mut figures, cost) = match job.work {
        Work::Download | Work::Fetch | Work::Upload => (
            vec![(RATE, total / MIB / elapsed)],
            cpu.map(|cpu| (CPU_PER_GIB, cpu / (total / GIB))),
        ),
        Work::Echo => (
            vec![(P50, done.p50_us), (P99, done.p99_us)],
            cpu.map(|cpu| (CPU_PER_ECHO, cpu * 1e6 / total)),
        ),
        Work::Dials => (
            vec![(DIAL_RATE, total / elapsed)],
            cpu.map(|cpu| (CPU_PER_DIAL, cpu * 1e6 / total)),
        ),
    };
    figures.extend(cost);
    Ok(figures)
}
