//! Echoes, dials and processor time right after bulk connections were aborted.
//!
//! The same paced load runs twice: before the bulk connections, and in the seconds after all of them were aborted at
//! once. A program that keeps receiving for connections that are gone takes time from the load.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use culvert_kit::client::BoxedStream;
use culvert_kit::pattern::{self, MAX_PIECE};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, sleep_until, timeout};

use crate::endpoint::Endpoints;
use crate::entry::Entry;
use crate::figures::{
    CPU_BY_BEFORE, DIAL_AFTER, DIAL_BY_BEFORE, DIAL_WORST, ECHO_AFTER, ECHO_BY_BEFORE, ECHO_WORST,
    Figures,
};
use crate::load::{Echo, percentiles};

/// Number of bulk connections in each direction.
const BULK: usize = 4;

/// Number of connections that echo, and the pause between two echoes of a connection.
const ECHOES: usize = 4;
const PAUSE: Duration = Duration::from_millis(2);

/// Interval of dials.
const DIAL_INTERVAL: Duration = Duration::from_millis(5);

/// Time for the bulk connections to reach their speed.
const RAMP: Duration = Duration::from_secs(1);

/// Time limit for the bulk connections to end after an abort.
const END_LIMIT: Duration = Duration::from_secs(10);

/// Cause of the aborts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum By {
    /// The clients close their connections without reading the rest.
    Client,
    /// The endpoints reset their connections.
    Endpoint,
}

/// Figures of the load.
#[derive(Debug)]
pub(crate) struct Steady {
    echo: Times,
    dial: Times,
    /// Processor time of an echo or dial, in seconds.
    cpu: Option<f64>,
}

/// Times of the echoes, or of the dials.
#[derive(Debug, Default)]
struct Times {
    /// Time of each operation.
    all: Vec<Duration>,
    /// Longest time from the intended start of an operation to its end. A standstill delays only a few operations, so
    /// the median does not show it.
    worst: Duration,
}

/// Running bulk connections. Dropping the value closes them.
#[derive(Debug)]
pub(crate) struct Transfers {
    tasks: JoinSet<()>,
    moved: Arc<AtomicU64>,
}

/// Measures a contender. `cpu` returns the processor time of its programs so far.
pub(crate) async fn measure(
    by: By,
    entry: &Entry,
    endpoints: &Endpoints,
    time: Duration,
    mut cpu: impl FnMut() -> anyhow::Result<Option<Duration>>,
) -> anyhow::Result<Figures> {
    let target = endpoints.lean();
    let before = Steady::measure(entry, target, time, &mut cpu).await?;
    let transfers = Transfers::start(entry, target).await?;
    match by {
        By::Client => drop(transfers),
        By::Endpoint => {
            endpoints.release();
            transfers.end().await?;
        }
    }
    let after = Steady::measure(entry, target, time, &mut cpu).await?;
    Ok(after.compare(&before))
}

impl Steady {
    /// Runs the paced load for `time`.
    pub(crate) async fn measure(
        entry: &Entry,
        target: SocketAddr,
        time: Duration,
        cpu: &mut impl FnMut() -> anyhow::Result<Option<Duration>>,
    ) -> anyhow::Result<Self> {
        let mut echoing = JoinSet::new();
        let (begin, used) = (Instant::now(), cpu()?);
        for _ in 0..ECHOES {
            let entry = entry.clone();
            echoing.spawn(async move {
                let mut due = begin;
                let mut echo = Echo::open(&entry, target).await?;
                let mut times = Times::default();
                loop {
                    times.add(due, echo.once().await?);
                    if begin.elapsed() >= time {
                        return anyhow::Ok(times);
                    }
                    due = Instant::now() + PAUSE;
                    sleep_until(due).await;
                }
            });
        }
        let mut dial = Times::default();
        let mut ticks = interval(DIAL_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while dial.all.is_empty() || begin.elapsed() < time {
            let due = ticks.tick().await;
            let dialed = Instant::now();
            let mut stream = entry.open(target).await?;
            stream.write_all(b"echo\nx").await.context("sending")?;
            stream.flush().await.context("sending")?;
            stream.read_u8().await.context("echo")?;
            dial.add(due, dialed.elapsed());
        }
        let mut echo = Times::default();
        while let Some(ended) = echoing.join_next().await {
            let ended = ended??;
            echo.all.extend(ended.all);
            echo.worst = echo.worst.max(ended.worst);
        }
        let used = cpu()?.zip(used);
        let count = (echo.all.len() + dial.all.len()) as f64;
        Ok(Self {
            echo,
            dial,
            cpu: used.map(|(after, before)| after.saturating_sub(before).as_secs_f64() / count),
        })
    }

    /// Returns the figures of a row: this load came after the aborts.
    pub(crate) fn compare(&self, before: &Self) -> Figures {
        let [echo, dial] = [&self.echo, &self.dial].map(Times::median);
        let mut figures = vec![
            (ECHO_AFTER, echo),
            (DIAL_AFTER, dial),
            (ECHO_WORST, self.echo.worst.as_secs_f64() * 1e3),
            (DIAL_WORST, self.dial.worst.as_secs_f64() * 1e3),
            (ECHO_BY_BEFORE, echo / before.echo.median()),
            (DIAL_BY_BEFORE, dial / before.dial.median()),
        ];
        let cpu = self.cpu.zip(before.cpu.filter(|before| *before > 0.0));
        figures.extend(cpu.map(|(after, before)| (CPU_BY_BEFORE, after / before)));
        figures
    }
}

impl Times {
    /// Adds an operation that has just ended, and that was intended to start at `due`.
    fn add(&mut self, due: Instant, took: Duration) {
        self.all.push(took);
        self.worst = self.worst.max(due.elapsed());
    }

    /// Returns the median in microseconds.
    fn median(&self) -> f64 {
        let [median, _] = percentiles(self.all.clone());
        median
    }
}

impl Transfers {
    /// Opens the connections, and waits until they have reached their speed.
    pub(crate) async fn start(entry: &Entry, target: SocketAddr) -> anyhow::Result<Self> {
        let mut this = Self {
            tasks: JoinSet::new(),
            moved: Arc::default(),
        };
        for _ in 0..BULK {
            let (down, up) = (
                open(entry, target, "download").await?,
                open(entry, target, "upload").await?,
            );
            this.tasks.spawn(download(down, Arc::clone(&this.moved)));
            this.tasks.spawn(upload(up, Arc::clone(&this.moved)));
        }
        sleep(RAMP).await;
        let ended = this.tasks.try_join_next().is_some();
        ensure!(!ended, "a bulk connection ended early");
        let moved = this.moved.load(Ordering::Relaxed);
        ensure!(moved > 0, "bulk transfers make no progress");
        Ok(this)
    }

    /// Waits until all connections have ended.
    pub(crate) async fn end(mut self) -> anyhow::Result<()> {
        let ending = async { while self.tasks.join_next().await.is_some() {} };
        let ended = timeout(END_LIMIT, ending).await;
        ended.with_context(|| format!("bulk connections are open {END_LIMIT:?} after the abort"))
    }
}

/// Opens a connection that transfers bytes until an abort.
async fn open(entry: &Entry, target: SocketAddr, way: &str) -> anyhow::Result<BoxedStream> {
    let mut stream = entry.open(target).await?;
    let command = format!("abort {way}\n");
    stream.write_all(command.as_bytes()).await?;
    stream.flush().await?;
    Ok(stream)
}

async fn download(mut stream: BoxedStream, moved: Arc<AtomicU64>) {
    let mut buffer = vec![0; MAX_PIECE];
    while let Ok(read @ 1..) = stream.read(&mut buffer).await {
        moved.fetch_add(read as u64, Ordering::Relaxed);
    }
}

/// Uploads until the connection ends. A client of the packet protocol learns of the end only if the client reads.
async fn upload(stream: BoxedStream, moved: Arc<AtomicU64>) {
    let (mut reader, mut writer) = tokio::io::split(stream);
    let uploaded = async {
        for piece in pattern::pieces(u64::MAX) {
            if writer.write_all(&piece).await.is_err() {
                return;
            }
            moved.fetch_add(piece.len() as u64, Ordering::Relaxed);
        }
    };
    tokio::select! {
        () = uploaded => {}
        _ = reader.read_u8() => {}
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]
    use super::*;

    #[tokio::test]
    async fn aborts_without_a_tunnel_end_all_transfers() {
        let endpoints = Endpoints::start().await.unwrap();
        let entry = Entry::Plain(endpoints.lean());
        let time = Duration::from_millis(50);
        for by in [By::Client, By::Endpoint] {
            let mut ticks = 0;
            // Time that grows by one, and then by two.
            let cpu = || {
                ticks += 1;
                Ok(Some(Duration::from_secs([0, 1, 5, 7][ticks - 1])))
            };
            let figures = measure(by, &entry, &endpoints, time, cpu).await.unwrap();
            assert_eq!(figures.last().unwrap().0, CPU_BY_BEFORE);
            assert!(figures.iter().all(|(_, value)| *value > 0.0), "{figures:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn standstill_shows_in_the_worst_time_and_not_in_the_median() {
        let mut times = Times::default();
        for milliseconds in [1, 1, 1000, 1, 1] {
            // The operation starts a millisecond late.
            let due = Instant::now();
            let took = Duration::from_millis(milliseconds);
            sleep(Duration::from_millis(1) + took).await;
            times.add(due, took);
        }
        assert_eq!(times.median(), 1000.0);
        assert_eq!(times.worst, Duration::from_millis(1001));
    }

    #[tokio::test]
    async fn transfers_that_do_not_start_are_an_error() {
        let endpoints = Endpoints::start().await.unwrap();
        // Nothing listens on port 1.
        let nowhere = Entry::Plain(SocketAddr::from(([127, 0, 0, 1], 1)));
        Transfers::start(&nowhere, endpoints.lean())
            .await
            .unwrap_err();
    }
}
