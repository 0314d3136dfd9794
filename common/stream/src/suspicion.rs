//! The detection of peers that do not answer although their connection is still open.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::sleep;

/// Time from a request to the probe, if the peer sends nothing meanwhile. Most requests are answered earlier.
const PROBE_AFTER: Duration = Duration::from_millis(500);

/// Time for a peer to send a byte after the probe. Longer than a round trip on any usable path.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

/// Number of looks for a byte of the peer during [`PROBE_TIMEOUT`].
const CHECKS: u32 = 10;

/// Suspicion that a peer is gone although its connection is still open. An unanswered probe raises the
/// suspicion, and the next byte from the peer removes it.
pub struct Suspicion {
    /// Number of bytes or packets from the peer when the suspicion was raised; `u64::MAX` without suspicion.
    heard: AtomicU64,
}

impl Suspicion {
    /// Creates the state of a peer without suspicion.
    pub fn none() -> Self {
        Self {
            heard: AtomicU64::new(u64::MAX),
        }
    }

    /// Returns true if the peer is suspect. `heard` counts the bytes or packets from the peer.
    pub fn is_raised(&self, heard: u64) -> bool {
        self.heard.load(Ordering::Relaxed) == heard
    }

    /// Makes the peer suspect until `heard` grows. Returns false if the peer is already suspect.
    pub fn raise(&self, heard: u64) -> bool {
        self.heard.swap(heard, Ordering::Relaxed) != heard
    }

    /// Waits while the peer sends something from time to time. `probe` asks the peer for an answer after a
    /// short silence, or returns false if no request could be sent: another attempt follows. Without an answer, the
    /// peer becomes suspect, and the function returns. Returns false if another call has already made the peer suspect.
    pub async fn wait(&self, heard: impl Fn() -> u64, probe: impl Fn() -> bool) -> bool {
        loop {
            let before = heard();
            sleep(PROBE_AFTER).await;
            if heard() == before {
                if !probe() {
                    continue;
                }
                // A byte ends the wait early, so that a peer that falls silent afterwards is not found later than others.
                for _ in 0..CHECKS {
                    sleep(PROBE_TIMEOUT / CHECKS).await;
                    if heard() != before {
                        break;
                    }
                }
            }
            if heard() == before {
                return self.raise(before);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn silent_peer_is_probed_once_and_suspect_until_its_next_byte() {
        let (suspicion, probes) = (Suspicion::none(), AtomicU64::new(0));
        let started = Instant::now();
        let probe = || {
            probes.fetch_add(1, Ordering::Relaxed);
            true
        };
        assert!(suspicion.wait(|| 7, probe).await);
        assert_eq!(started.elapsed(), PROBE_AFTER + PROBE_TIMEOUT);
        assert_eq!(probes.load(Ordering::Relaxed), 1);
        assert!(suspicion.is_raised(7) && !suspicion.is_raised(8));
        assert!(!suspicion.wait(|| 7, || true).await);
    }

    #[tokio::test(start_paused = true)]
    async fn peer_is_not_suspect_before_a_probe_was_sent() {
        let (suspicion, attempts) = (Suspicion::none(), AtomicU64::new(0));
        let started = Instant::now();
        let probe = || attempts.fetch_add(1, Ordering::Relaxed) == 3;
        assert!(suspicion.wait(|| 7, probe).await);
        assert_eq!(started.elapsed(), 4 * PROBE_AFTER + PROBE_TIMEOUT);
    }

    #[tokio::test(start_paused = true)]
    async fn peer_is_suspect_soon_after_its_last_byte() {
        let (suspicion, heard) = (Suspicion::none(), AtomicU64::new(0));
        let started = Instant::now();
        let last = PROBE_AFTER + Duration::from_millis(50);
        let waiting = suspicion.wait(|| heard.load(Ordering::Relaxed), || true);
        let byte = async {
            sleep(last).await;
            heard.fetch_add(1, Ordering::Relaxed);
        };
        assert!(tokio::join!(waiting, byte).0);
        let silence = started.elapsed() - last;
        assert!(
            silence <= PROBE_AFTER + PROBE_TIMEOUT + PROBE_TIMEOUT / CHECKS,
            "{silence:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn peer_that_answers_probes_is_never_suspect() {
        let (suspicion, heard) = (Suspicion::none(), AtomicU64::new(0));
        let answer = || {
            heard.fetch_add(1, Ordering::Relaxed);
            true
        };
        let count = || heard.load(Ordering::Relaxed);
        let waiting = suspicion.wait(count, answer);
        let limit = 10 * PROBE_TIMEOUT;
        assert!(tokio::time::timeout(limit, waiting).await.is_err());
        assert!(!suspicion.is_raised(count()) && count() > 3);
    }
}
