//! The errors of a dial, and the detection of peers that do not answer.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::sleep;

/// Time for a peer to answer a dial if another peer could take the dial. Agents end a dial after 5 s; the
/// rest is time on the network.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(7);

/// Time from a dial to the probe, if the peer sends nothing meanwhile. Most dials are answered earlier.
const PROBE_AFTER: Duration = Duration::from_millis(500);

/// Time for a peer to send a byte after the probe. Longer than a round trip on any usable path.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum number of peers of one tunnel that a dial tries.
const MAX_ATTEMPTS: usize = 3;

/// Reason for a failed dial on a stream.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StreamDialError {
    /// The agent could not reach the endpoint; the text is the agent's, verbatim.
    #[error("{0}")]
    Refused(String),
    /// The agent abandoned the dial.
    #[error("the agent abandoned the dial")]
    Abandoned,
    /// The stream ended before the agent answered.
    #[error("the agent's stream ended while the dial was pending")]
    AgentLost,
    /// The agent accepted no packet before the deadline.
    #[error("timed out waiting for backend dial")]
    NotSent,
    /// The agent did not answer before the deadline.
    #[error("timed out waiting for backend dial")]
    TimedOut,
}

/// Reason why no tunnel could open a connection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DialError {
    /// No agent is connected.
    #[error("No agent available")]
    NoAgent,
    /// No connected OpenVPN client has a route to the address.
    #[error("No OpenVPN client available")]
    NoClient,
    /// OpenVPN cannot carry the dial: the address is IPv6 or a name unknown to this server. An agent may
    /// succeed.
    #[error("{0}")]
    Uncarried(String),
    /// The dial failed at a peer.
    #[error(transparent)]
    Stream(#[from] StreamDialError),
}

/// Suspicion that a peer is gone although its connection is still open. An unanswered probe raises the
/// suspicion, and the next byte from the peer removes it.
pub(crate) struct Suspicion {
    /// Number of bytes or packets from the peer when the suspicion was raised; `u64::MAX` without suspicion.
    heard: AtomicU64,
}

/// Peers of one tunnel that a dial has tried, by their identifiers.
pub(crate) struct Attempts<I> {
    tried: Vec<I>,
    /// Error of the last peer.
    last: DialError,
}

/// Returns a number for a new stream of any transport, unique in this process.
pub(crate) fn next_serial() -> u64 {
    static SERIAL: AtomicU64 = AtomicU64::new(1);
    SERIAL.fetch_add(1, Ordering::Relaxed)
}

// === impl Suspicion ===

impl Suspicion {
    /// Creates the state of a peer without suspicion.
    pub(crate) fn none() -> Self {
        Self {
            heard: AtomicU64::new(u64::MAX),
        }
    }

    /// Returns true if the peer is suspect. `heard` counts the bytes or packets from the peer.
    pub(crate) fn is_raised(&self, heard: u64) -> bool {
        self.heard.load(Ordering::Relaxed) == heard
    }

    /// Makes the peer suspect until `heard` grows.
    pub(crate) fn raise(&self, heard: u64) {
        self.heard.store(heard, Ordering::Relaxed);
    }

    /// Waits while the peer sends something from time to time. `probe` asks the peer for an answer after a
    /// short silence. Without an answer, the peer becomes suspect, and the function returns.
    pub(crate) async fn wait(&self, heard: impl Fn() -> u64, probe: impl Fn()) {
        loop {
            let before = heard();
            sleep(PROBE_AFTER).await;
            if heard() == before {
                probe();
                sleep(PROBE_TIMEOUT).await;
            }
            if heard() == before {
                return self.raise(before);
            }
        }
    }
}

// === impl Attempts ===

impl<I> Attempts<I> {
    /// Creates the attempts of a dial that fails with `no_peer` if no peer can be tried.
    pub(crate) fn new(no_peer: DialError) -> Self {
        Self {
            tried: Vec::new(),
            last: no_peer,
        }
    }

    /// Returns the next peer to try. `choose` chooses a peer that was not tried yet; `id` identifies the peer.
    ///
    /// # Errors
    /// Returns the error of the last peer if no peer is left or too many peers failed.
    pub(crate) fn next<P>(
        &mut self,
        choose: impl FnOnce(&[I]) -> Option<P>,
        id: impl FnOnce(&P) -> I,
    ) -> Result<P, DialError> {
        if self.tried.len() < MAX_ATTEMPTS
            && let Some(peer) = choose(&self.tried)
        {
            self.tried.push(id(&peer));
            return Ok(peer);
        }
        Err(self.last.clone())
    }

    /// Returns the peers tried so far, including the current peer.
    pub(crate) fn tried(&self) -> &[I] {
        &self.tried
    }

    /// Records the error of the current peer.
    pub(crate) fn failed(&mut self, error: DialError) {
        self.last = error;
    }
}

// === impl DialError ===

impl DialError {
    /// Returns true if a peer tried the endpoint and failed: another tunnel would not help.
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Stream(StreamDialError::Refused(_)))
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
        };
        suspicion.wait(|| 7, probe).await;
        assert_eq!(started.elapsed(), PROBE_AFTER + PROBE_TIMEOUT);
        assert_eq!(probes.load(Ordering::Relaxed), 1);
        assert!(suspicion.is_raised(7) && !suspicion.is_raised(8));
    }

    #[tokio::test(start_paused = true)]
    async fn peer_that_answers_probes_is_never_suspect() {
        let (suspicion, heard) = (Suspicion::none(), AtomicU64::new(0));
        let answer = || {
            heard.fetch_add(1, Ordering::Relaxed);
        };
        let count = || heard.load(Ordering::Relaxed);
        let waiting = suspicion.wait(count, answer);
        let limit = 10 * PROBE_TIMEOUT;
        assert!(tokio::time::timeout(limit, waiting).await.is_err());
        assert!(!suspicion.is_raised(count()) && count() > 3);
    }
}
