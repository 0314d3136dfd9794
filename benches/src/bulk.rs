//! A load without an end: connections that transfer bytes as fast as possible until they are dropped.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use bytes::Buf as _;
use culvert_kit::pattern::{self, MAX_PIECE};
use tokio::io::{AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::entry::Entry;
use crate::figures::{BULK_RATE, Figures, MIB, P50, P99};
use crate::load::{Echo, percentiles};

/// Time between the start of the bulk transfers and the start of the measurement, on a loopback.
pub(crate) const RAMP: Duration = Duration::from_millis(500);

/// Number of bulk connections beside an echo.
pub(crate) const BESIDE: usize = 2;

/// Running bulk connections. A download counts bytes that the client received, an upload bytes that the near end of
/// the tunnel accepted. Dropping the value closes them.
#[derive(Debug, Default)]
pub(crate) struct Bulk {
    tasks: JoinSet<anyhow::Result<()>>,
    moved: Arc<AtomicU64>,
}

impl Bulk {
    /// Adds `count` downloads.
    #[must_use]
    pub(crate) fn downloads(mut self, entry: &Entry, target: SocketAddr, count: usize) -> Self {
        for _ in 0..count {
            let (entry, moved) = (entry.clone(), Arc::clone(&self.moved));
            self.tasks.spawn(download(entry, target, moved));
        }
        self
    }

    /// Adds `count` uploads.
    #[must_use]
    pub(crate) fn uploads(mut self, entry: &Entry, target: SocketAddr, count: usize) -> Self {
        for _ in 0..count {
            let (entry, moved) = (entry.clone(), Arc::clone(&self.moved));
            self.tasks.spawn(upload(entry, target, moved));
        }
        self
    }

    /// Measures for `time` and returns the total rate in bytes per second. Fails if a connection ended or
    /// nothing moved.
    pub(crate) async fn rate(&mut self, time: Duration) -> anyhow::Result<f64> {
        let mark = self.mark();
        sleep(time).await;
        self.rate_since(mark)
    }

    /// Returns the current time and the number of bytes transferred so far.
    pub(crate) fn mark(&self) -> Mark {
        Mark {
            at: Instant::now(),
            moved: self.moved.load(Ordering::Relaxed),
        }
    }

    /// Returns the total rate since `mark`, in bytes per second. Fails if a connection ended or nothing
    /// moved.
    pub(crate) fn rate_since(&mut self, mark: Mark) -> anyhow::Result<f64> {
        let now = self.mark();
        let moved = now.moved - mark.moved;
        if let Some(ended) = self.tasks.try_join_next() {
            ended?.context("bulk")?;
        }
        if moved == 0 {
            bail!("bulk transfers make no progress");
        }
        Ok(moved as f64 / (now.at - mark.at).as_secs_f64())
    }
}

/// A point in time and the number of bytes transferred until then.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mark {
    at: Instant,
    moved: u64,
}

async fn download(entry: Entry, target: SocketAddr, moved: Arc<AtomicU64>) -> anyhow::Result<()> {
    let mut stream = entry.open(target).await?;
    let command = format!("download {}\n", u64::MAX);
    stream.write_all(command.as_bytes()).await?;
    stream.flush().await?;
    let mut buffer = vec![0; MAX_PIECE];
    loop {
        match stream.read(&mut buffer).await? {
            0 => bail!("bulk connection closed early"),
            read => moved.fetch_add(read as u64, Ordering::Relaxed),
        };
    }
}

async fn upload(entry: Entry, target: SocketAddr, moved: Arc<AtomicU64>) -> anyhow::Result<()> {
    let mut stream = entry.open(target).await?;
    let command = format!("upload {}\n", u64::MAX);
    stream.write_all(command.as_bytes()).await?;
    send(&mut stream, &moved).await
}

/// Sends the pattern. Each part counts once the tunnel accepts it: over a slow link, a whole piece takes seconds.
async fn send(stream: &mut (impl AsyncWrite + Unpin), moved: &AtomicU64) -> anyhow::Result<()> {
    for mut piece in pattern::pieces(u64::MAX) {
        while piece.has_remaining() {
            let accepted = stream.write_buf(&mut piece).await?;
            ensure!(accepted > 0, "bulk connection closed early");
            moved.fetch_add(accepted as u64, Ordering::Relaxed);
        }
    }
    Ok(())
}

/// Sends echoes on one connection for `time`, beside bulk connections that started `ramp` before.
pub(crate) async fn echo_beside(
    entry: &Entry,
    target: SocketAddr,
    mut bulk: Bulk,
    [ramp, time]: [Duration; 2],
) -> anyhow::Result<Figures> {
    sleep(ramp).await;
    let mut echo = Echo::open(entry, target).await?;
    let mut times = Vec::new();
    let mark = bulk.mark();
    while mark.at.elapsed() < time {
        times.push(echo.once().await?);
    }
    let rate = bulk.rate_since(mark)?;
    let [p50, p99] = percentiles(times);
    Ok(vec![(P50, p50), (P99, p99), (BULK_RATE, rate / MIB)])
}

/// Returns the rate of one download along a long path, in bytes per second, measured for `time` after `ramp`.
pub(crate) async fn far_download(
    entry: &Entry,
    target: SocketAddr,
    [ramp, time]: [Duration; 2],
) -> anyhow::Result<f64> {
    let mut bulk = Bulk::default().downloads(entry, target, 1);
    sleep(ramp).await;
    bulk.rate(time).await
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
    use futures_util::FutureExt as _;

    use super::*;
    use crate::endpoint::Endpoints;

    #[tokio::test]
    async fn both_directions_move_and_echoes_come_back() {
        let endpoints = Endpoints::start().await.unwrap();
        let (target, time) = (endpoints.lean(), Duration::from_millis(50));
        let entry = Entry::Plain(target);
        let mut down = Bulk::default().downloads(&entry, target, 2);
        let mut up = Bulk::default().uploads(&entry, target, 2);
        sleep(time).await;
        assert!(down.rate(time).await.unwrap() > 0.0);
        assert!(up.rate(time).await.unwrap() > 0.0);
        let bulk = Bulk::default().downloads(&entry, target, BESIDE);
        let beside = echo_beside(&entry, target, bulk, [time; 2]);
        let figures = beside.await.unwrap();
        assert!(figures.iter().all(|(_, value)| *value > 0.0), "{figures:?}");
    }

    #[test]
    fn accepted_part_of_a_piece_counts_as_upload() {
        let moved = AtomicU64::new(0);
        // The other side reads nothing.
        let (mut stream, _stalled) = tokio::io::duplex(1000);
        let sent = send(&mut stream, &moved).now_or_never();
        assert!(sent.is_none(), "{sent:?}");
        assert_eq!(moved.into_inner(), 1000);
    }

    #[tokio::test]
    async fn failed_connection_is_an_error() {
        // Nothing listens on port 1.
        let nowhere = SocketAddr::from(([127, 0, 0, 1], 1));
        let mut bulk = Bulk::default().downloads(&Entry::Plain(nowhere), nowhere, 1);
        bulk.rate(Duration::from_millis(50)).await.unwrap_err();
    }
}
