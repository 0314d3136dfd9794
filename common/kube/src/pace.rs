//! A limit of requests per time, as the flags `qps` and `burst` of Kubernetes' own clients.

use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::{Instant, sleep_until};

/// Rate of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Average time between two requests; at most some minutes.
    pub interval: Duration,
    /// Number of requests that may follow each other at once after a pause; at least 1.
    pub burst: u32,
}

/// Delays requests to keep a [`Pace`].
#[derive(Debug)]
pub(crate) struct Pacer {
    pace: Pace,
    /// Time at which the requests so far are paid for, at one per interval.
    paid: Mutex<Instant>,
}

impl Pacer {
    pub(crate) fn new(pace: Pace) -> Self {
        let paid = Mutex::new(Instant::now());
        Self { pace, paid }
    }

    /// Waits until the next request may start, in the order of the calls. A dropped call does not count as a request.
    pub(crate) async fn wait(&self) {
        let Pace { interval, burst } = self.pace;
        let mut paid = self.paid.lock().await;
        let credit = interval.saturating_mul(burst.saturating_sub(1));
        if let Some(allowed) = paid.checked_sub(credit) {
            sleep_until(allowed).await;
        }
        let now = Instant::now();
        *paid = (*paid).max(now).checked_add(interval).unwrap_or(now);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use tokio::time::sleep;

    use super::*;

    fn pacer() -> Pacer {
        Pacer::new(Pace {
            interval: Duration::from_secs(1),
            burst: 3,
        })
    }

    #[tokio::test(start_paused = true)]
    async fn requests_beyond_the_burst_wait_for_one_interval_each() {
        let pacer = pacer();
        for round in 0..2 {
            let started = Instant::now();
            let mut waits = Vec::new();
            for _ in 0..6 {
                pacer.wait().await;
                waits.push(started.elapsed().as_secs());
            }
            assert_eq!(waits, [0, 0, 0, 1, 2, 3], "round {round}");
            // A long pause earns no more than the burst.
            sleep(Duration::from_secs(100)).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn dropped_calls_do_not_delay_others() {
        let pacer = pacer();
        for _ in 0..3 {
            pacer.wait().await;
        }
        for _ in 0..50 {
            assert!(pacer.wait().now_or_never().is_none());
        }
        let started = Instant::now();
        pacer.wait().await;
        assert_eq!(started.elapsed(), Duration::from_secs(1));
    }
}
