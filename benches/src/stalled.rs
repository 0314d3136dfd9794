//! Echoes of many connections, alone and beside connections that nobody reads.
//!
//! All of them share one tunnel. What stands still must not hold up what moves: neither a client
//! that does not read a download nor an endpoint that does not read an upload. A contender that
//! lets them do so hangs; that is a figure, not a failure, and costs a bounded time.

use std::net::SocketAddr;
use std::time::Duration;

use culvert_kit::client::BoxedStream;
use culvert_kit::pattern;
use futures_util::future::try_join_all;
use tokio::io::AsyncWriteExt as _;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::endpoint::Endpoints;
use crate::entry::Entry;
use crate::load::{Echo, percentiles};
use crate::report::{Figures, HUNG};
use crate::rows::{P99, P99_STALLED, RATIO_STALLED};

/// Who echoes beside whom. The load is to be one that leaves the machine idle for half of the time, so
/// that only what stands in the way shows.
#[derive(Debug)]
pub struct Crowd {
    /// How many connections echo.
    pub echoes: usize,
    /// How many stand still: downloads that nobody reads, and as many uploads.
    pub stalled: usize,
    /// How long an echo waits before the next one.
    pub pause: Duration,
    /// How long after one connection the next one begins.
    pub stagger: Duration,
    /// How long they rest once they are open, before they echo alone.
    pub rest: Duration,
}

/// What `tunnel` measures.
pub const TUNNEL: Crowd = Crowd {
    echoes: 50,
    stalled: 8,
    pause: Duration::from_millis(15),
    stagger: Duration::ZERO,
    // As long as beside the stalled ones, so that only these differ.
    rest: FILL,
};

/// How long the stalled connections get to fill every buffer.
const FILL: Duration = Duration::from_secs(1);

/// How much longer than planned the echoes may take before the contender counts as hung. Three orders
/// of magnitude above what they take otherwise; longer would only cost time in every round.
const HANG: Duration = Duration::from_secs(5);

/// Measures a contender. With a p99 of [`HUNG`] it is of no more use.
///
/// # Errors
/// When an echo fails in another way than by not coming back.
pub async fn measure(
    crowd: &Crowd,
    entry: &Entry,
    endpoints: &Endpoints,
    time: Duration,
) -> anyhow::Result<Figures> {
    let target = endpoints.lean();
    let echoes = crowd.open(entry, target).await?;
    sleep(crowd.rest).await;
    let alone = crowd.p99(echoes, time).await?;
    let beside = timeout(HANG + FILL + time, async {
        // All are dialled before anything stands still: a dial that waits until the tunnel has closed
        // what stalls would find nothing in its way, and tell nothing.
        let echoes = crowd.open(entry, target).await?;
        let _stalled = Stalled::open(entry, target, crowd.stalled).await?;
        sleep(FILL).await;
        crowd.p99(echoes, time).await
    })
    .await;
    endpoints.release();
    let beside = match beside {
        Ok(p99) => p99?,
        Err(_) => HUNG,
    };
    Ok(vec![
        (P99, alone),
        (P99_STALLED, beside),
        (RATIO_STALLED, beside / alone),
    ])
}

impl Crowd {
    /// Opens the connections that echo, and has each do so once: dials are a load of their own, above all
    /// where each is a TLS handshake that begins with the first byte.
    async fn open(&self, entry: &Entry, target: SocketAddr) -> anyhow::Result<Vec<Echo>> {
        try_join_all((0..self.echoes).map(|_| Echo::proven(entry, target))).await
    }

    /// The 99th percentile of their echoes, in microseconds.
    async fn p99(&self, echoes: Vec<Echo>, time: Duration) -> anyhow::Result<f64> {
        let mut connections = JoinSet::new();
        let (pause, mut first) = (self.pause, Instant::now());
        for mut echo in echoes {
            connections.spawn(async move {
                sleep_until(first).await;
                let mut times = Vec::new();
                let begin = Instant::now();
                while begin.elapsed() < time {
                    times.push(echo.once().await?);
                    sleep(pause).await;
                }
                anyhow::Ok(times)
            });
            first += self.stagger;
        }
        let mut times = Vec::new();
        while let Some(ended) = connections.join_next().await {
            times.append(&mut ended??);
        }
        let [_, p99] = percentiles(times);
        Ok(p99)
    }
}

/// Connections that stand still; dropping it ends them.
struct Stalled {
    /// Downloads that are not read.
    _unread: Vec<BoxedStream>,
    /// Uploads whose endpoint does not read.
    _unheard: JoinSet<()>,
}

impl Stalled {
    /// As many of each kind.
    async fn open(entry: &Entry, target: SocketAddr, count: usize) -> anyhow::Result<Self> {
        let dials = (0..2 * count).map(|_| entry.open(target));
        let mut unread = try_join_all(dials).await?;
        let heard = unread.split_off(count);
        let command = format!("download {}\n", u64::MAX);
        for stream in &mut unread {
            stream.write_all(command.as_bytes()).await?;
            stream.flush().await?;
        }
        let mut unheard = JoinSet::new();
        for mut stream in heard {
            unheard.spawn(async move {
                let begun = stream.write_all(b"hold\n").await;
                for piece in pattern::pieces(u64::MAX) {
                    // The tunnel may close what does not move.
                    if begun.is_err() || stream.write_all(&piece).await.is_err() {
                        return;
                    }
                }
            });
        }
        Ok(Self {
            _unread: unread,
            _unheard: unheard,
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn what_stands_still_does_not_hang_what_needs_no_tunnel() {
        let endpoints = Endpoints::start().await.unwrap();
        let entry = Entry::Plain(endpoints.lean());
        let time = Duration::from_millis(50);
        let figures = measure(&TUNNEL, &entry, &endpoints, time).await.unwrap();
        assert!(
            figures.iter().all(|(_, value)| value.is_finite()),
            "{figures:?}"
        );
    }

    #[tokio::test]
    async fn echoes_that_stay_away_do_not_end() {
        // Accepts, by the kernel's hand, and answers nothing.
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = silent.local_addr().unwrap();
        let entry = Entry::Plain(address);
        let echo = Echo::open(&entry, address).await.unwrap();
        let waiting = TUNNEL.p99(vec![echo], Duration::from_millis(1));
        let waiting = timeout(Duration::from_millis(200), waiting);
        waiting.await.unwrap_err();
    }
}
