//! Echoes on many connections, alone and beside connections that nobody reads.
//!
//! All connections share one tunnel. Stalled connections must not block the others: neither a client that
//! does not read its download nor an endpoint that does not read its upload. A contender that blocks is
//! reported as hung. That is a figure, not a failure, and takes a bounded time.

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
use crate::figures::{Figures, HUNG, P99, P99_STALLED, RATIO_STALLED};
use crate::load::{Echo, percentiles};

/// Numbers and times of the connections. The load should leave the machine idle for half of the time, so that
/// only the effect of stalled connections shows.
#[derive(Debug)]
pub(crate) struct Crowd {
    /// Number of connections that echo.
    pub echoes: usize,
    /// Number of stalled downloads, and of stalled uploads.
    pub stalled: usize,
    /// Pause between two echoes of a connection.
    pub pause: Duration,
    /// Time between the starts of two connections.
    pub stagger: Duration,
}

/// Time for the stalled connections to fill every buffer. The same pause before the echoes without stalled
/// connections, so that only the stalled connections differ.
const FILL: Duration = Duration::from_secs(1);

/// Time beyond the plan after which the contender counts as hung. Echoes usually take a thousandth of this; a
/// longer limit would only prolong every round.
const HANG: Duration = Duration::from_secs(5);

/// Measures a contender. After a p99 of [`HUNG`] the contender is unusable. Echoes that do not return are not
/// an error; other failures are.
pub(crate) async fn measure(
    crowd: &Crowd,
    entry: &Entry,
    endpoints: &Endpoints,
    time: Duration,
) -> anyhow::Result<Figures> {
    let target = endpoints.lean();
    let echoes = crowd.open(entry, target).await?;
    sleep(FILL).await;
    let alone = crowd.p99(echoes, time).await?;
    let beside = timeout(HANG + FILL + time, async {
        // All connections are opened before any of them stalls. A dial might otherwise wait until the tunnel
        // has closed the stalled connections, and the row would show nothing.
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
    /// Opens the connections and sends one echo on each. Dials are a load of their own, above all if the
    /// first byte starts a TLS handshake.
    async fn open(&self, entry: &Entry, target: SocketAddr) -> anyhow::Result<Vec<Echo>> {
        try_join_all((0..self.echoes).map(|_| Echo::proven(entry, target))).await
    }

    /// Returns the 99th percentile of the echoes, in microseconds.
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

/// Stalled connections. Dropping the value closes them.
struct Stalled {
    /// Downloads without a reader.
    _unread: Vec<BoxedStream>,
    /// Uploads to an endpoint that does not read.
    _unheard: JoinSet<()>,
}

impl Stalled {
    /// Opens `count` downloads and `count` uploads.
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
                    // The tunnel may close a connection that makes no progress.
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

    const CROWD: Crowd = Crowd {
        echoes: 50,
        stalled: 8,
        pause: Duration::from_millis(15),
        stagger: Duration::ZERO,
    };

    #[tokio::test]
    async fn stalled_connections_do_not_block_direct_echoes() {
        let endpoints = Endpoints::start().await.unwrap();
        let entry = Entry::Plain(endpoints.lean());
        let time = Duration::from_millis(50);
        let figures = measure(&CROWD, &entry, &endpoints, time).await.unwrap();
        assert!(
            figures.iter().all(|(_, value)| value.is_finite()),
            "{figures:?}"
        );
    }

    #[tokio::test]
    async fn missing_echo_times_out() {
        // The kernel accepts connections, but no answer follows.
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = silent.local_addr().unwrap();
        let entry = Entry::Plain(address);
        let echo = Echo::open(&entry, address).await.unwrap();
        let waiting = CROWD.p99(vec![echo], Duration::from_millis(1));
        let waiting = timeout(Duration::from_millis(200), waiting);
        waiting.await.unwrap_err();
    }
}
