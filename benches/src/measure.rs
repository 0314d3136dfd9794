//! Measurement of a row of a contender.

use std::time::Duration;

use anyhow::Context as _;
use tokio::time::{sleep, timeout};

use crate::endpoint::Endpoints;
use crate::entry::Entry;
use crate::load::{self, Job, Work};
use crate::report::Figures;
use crate::rows::{
    CPU_PER_DIAL, CPU_PER_ECHO, CPU_PER_GIB, DIAL_RATE, GIB, Kind, MIB, P50, P99, RATE, Row,
};
use crate::topology::{Contender, Programs, Tunnel};
use crate::tunnel::Front;
use crate::{bulk, delay, driver, memory, stalled};

/// Time limit of one measurement, so that a tunnel that hangs does not stop the whole run.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Time after the last byte that still counts as processor time of a job, for example for closing
/// connections.
pub const SETTLE: Duration = Duration::from_millis(100);

/// Number of connections from which the Go driver is not used. One process per connection would need more of
/// the machine than the tunnel does.
const DRIVERS: u64 = 32;

/// A running contender during a measurement.
pub trait Subject {
    /// Entry of the load.
    fn entry(&self) -> &Entry;

    /// Processor time of all programs so far, in clock ticks of 10 ms. `None` if the contender has no
    /// program.
    fn cpu_time(&mut self) -> anyhow::Result<Option<Duration>>;

    /// Resident memory of all programs, in bytes. `None` if the contender has no program.
    fn rss(&mut self) -> anyhow::Result<Option<u64>>;
}

/// Resources for all measurements.
pub struct Lab {
    /// Endpoints of the loads.
    pub endpoints: Endpoints,
    /// The programs to start.
    pub programs: Programs,
    /// Seconds of load per measurement.
    pub seconds: f64,
    /// Limit of file descriptors of a process.
    pub descriptors: u64,
}

impl Lab {
    /// Starts a contender. Most rows use this long-lived instance.
    pub async fn start(&self, front: Front, contender: &Contender) -> anyhow::Result<Tunnel> {
        let target = self.endpoints.lean();
        Tunnel::start(contender, front.mode(), &self.programs, target, None).await
    }

    /// Measures one row: on `running`, or on a contender that is started for this row.
    pub async fn measure(
        &self,
        front: Front,
        row: &Row,
        contender: &Contender,
        running: &mut Tunnel,
    ) -> anyhow::Result<Figures> {
        let measuring = async {
            let (entry, target) = (&running.entry.clone(), self.endpoints.lean());
            match row.kind {
                Kind::Load(first) => {
                    let work = async |entry: &Entry, job| self.work(entry, job).await;
                    load(running, first, self.seconds, work).await
                }
                Kind::EchoBesideBulk => bulk::echo_beside(entry, target, 2 * self.time()).await,
                Kind::Stalled => {
                    let time = Row::crowd_time(self.seconds);
                    stalled::measure(&stalled::TUNNEL, entry, &self.endpoints, time).await
                }
                Kind::Far(path) => self.far(front, contender, path).await,
                Kind::Idle => self.idle(front, contender).await,
                Kind::AgentMemory => {
                    let mut tunnel = self.start(front, contender).await?;
                    memory::beside_bulk(&mut tunnel, target, 2 * self.time()).await
                }
            }
        };
        let measured = timeout(LIMIT, measuring).await;
        measured.with_context(|| format!("not finished within {LIMIT:?}"))?
    }

    fn time(&self) -> Duration {
        Duration::from_secs_f64(self.seconds)
    }

    async fn far(
        &self,
        front: Front,
        contender: &Contender,
        path: delay::Path,
    ) -> anyhow::Result<Figures> {
        let target = self.endpoints.lean();
        let starting = Tunnel::start(contender, front.mode(), &self.programs, target, Some(path));
        let tunnel = starting.await?;
        let times = Row::far_times(self.seconds);
        let rate = bulk::far_download(&tunnel.entry, target, times).await?;
        Ok(vec![(RATE, rate / MIB)])
    }

    async fn idle(&self, front: Front, contender: &Contender) -> anyhow::Result<Figures> {
        let each = contender.descriptors_per_connection();
        let count = memory::affordable(self.descriptors, each)?;
        let (_endpoint, target) = self.programs.endpoint().await?;
        let starting = Tunnel::start(contender, front.mode(), &self.programs, target, None);
        memory::idle(&mut starting.await?, target, count).await
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

/// Warms a contender up twice; the first time estimates the speed for the second. Returns the job that should
/// take `seconds`.
pub async fn warm_up(
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
pub async fn load(
    subject: &mut impl Subject,
    first: Job,
    seconds: f64,
    work: impl AsyncFn(&Entry, Job) -> anyhow::Result<load::Done>,
) -> anyhow::Result<Figures> {
    let entry = subject.entry();
    let job = warm_up(first, seconds, async |job| work(entry, job).await).await?;
    let before = subject.cpu_time()?;
    let done = work(subject.entry(), job).await?;
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
