//! Echoes of many connections, alone and beside connections that nobody reads.
//!
//! All of them share one agent. What stands still must not hold up what moves: neither a client
//! that does not read a download nor an endpoint that does not read an upload. A contender that
//! lets them do so hangs; that is a figure, not a failure, and costs a bounded time.

use std::net::SocketAddr;
use std::time::Duration;

use culvert::lab::client::BoxedStream;
use culvert::lab::pattern;
use futures_util::future::try_join_all;
use tokio::io::AsyncWriteExt as _;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::door::Door;
use crate::endpoint::Endpoints;
use crate::load::{Echo, percentiles};
use crate::report::{Figures, HUNG};
use crate::rows::{P99, P99_STALLED, RATIO_STALLED};

/// How many connections echo.
const ECHOES: usize = 50;

/// How many connections stand still, of each kind.
const STALLED: usize = 8;

/// How long an echo waits before the next one: the load is to be one that leaves the machine idle
/// for half of the time, so that only what stands in the way shows.
const PAUSE: Duration = Duration::from_millis(15);

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
    door: &Door,
    endpoints: &Endpoints,
    time: Duration,
) -> anyhow::Result<Figures> {
    let target = endpoints.lean();
    let alone = p99(open(door, target).await?, time).await?;
    let beside = timeout(HANG + FILL + time, async {
        // All are dialled before anything stands still: a dial that waits until the tunnel has closed
        // what stalls would find nothing in its way, and tell nothing.
        let echoes = open(door, target).await?;
        let _stalled = Stalled::open(door, target).await?;
        sleep(FILL).await;
        p99(echoes, time).await
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

/// Opens the connections that echo, and has each do so once: dials are a load of their own, above all
/// where each is a TLS handshake that begins with the first byte.
async fn open(door: &Door, target: SocketAddr) -> anyhow::Result<Vec<Echo>> {
    let opening = (0..ECHOES).map(|_| async {
        let mut echo = Echo::open(door, target).await?;
        echo.once().await?;
        anyhow::Ok(echo)
    });
    try_join_all(opening).await
}

/// The 99th percentile of their echoes, in microseconds.
async fn p99(echoes: Vec<Echo>, time: Duration) -> anyhow::Result<f64> {
    let mut connections = JoinSet::new();
    for mut echo in echoes {
        connections.spawn(async move {
            let mut times = Vec::new();
            let begin = Instant::now();
            while begin.elapsed() < time {
                times.push(echo.once().await?);
                sleep(PAUSE).await;
            }
            anyhow::Ok(times)
        });
    }
    let mut times = Vec::new();
    while let Some(ended) = connections.join_next().await {
        times.append(&mut ended??);
    }
    let [_, p99] = percentiles(times);
    Ok(p99)
}

/// Connections that stand still; dropping it ends them.
struct Stalled {
    /// Downloads that are not read.
    _unread: Vec<BoxedStream>,
    /// Uploads whose endpoint does not read.
    _unheard: JoinSet<()>,
}

impl Stalled {
    async fn open(door: &Door, target: SocketAddr) -> anyhow::Result<Self> {
        let dials = (0..2 * STALLED).map(|_| door.open(target));
        let mut unread = try_join_all(dials).await?;
        let heard = unread.split_off(STALLED);
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
        let door = Door::Plain(endpoints.lean());
        let time = Duration::from_millis(50);
        let figures = measure(&door, &endpoints, time).await.unwrap();
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
        let door = Door::Plain(address);
        let echo = Echo::open(&door, address).await.unwrap();
        let waiting = p99(vec![echo], Duration::from_millis(1));
        let waiting = timeout(Duration::from_millis(200), waiting);
        waiting.await.unwrap_err();
    }
}
