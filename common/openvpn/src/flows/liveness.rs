//! A clock that stands still while nothing is heard of the peer.
//!
//! An outer connection that stalls must not end the flows inside of it: whether the peer is dead
//! is for the session to say. Owns when the peer was heard last.

use std::time::{Duration, Instant};

/// Silence that still counts as time. Stock servers send a ping every 5 s in KKP, 10 s is usual.
const GRACE: Duration = Duration::from_secs(15);

#[derive(Debug)]
pub(crate) struct Liveness {
    heard: Instant,
    stalled: Duration,
}

impl Liveness {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            heard: now,
            stalled: Duration::ZERO,
        }
    }

    pub(crate) fn heard(&mut self, now: Instant) {
        let silence = now.saturating_duration_since(self.heard);
        self.stalled += silence.saturating_sub(GRACE);
        self.heard = self.heard.max(now);
    }

    /// What the clock shows.
    pub(crate) fn now(&self, now: Instant) -> Instant {
        let shown = now.min(self.heard + GRACE);
        shown.checked_sub(self.stalled).unwrap_or(shown)
    }

    /// When it may show `at` at the earliest.
    pub(crate) fn when(&self, at: Instant, now: Instant) -> Instant {
        now + at.saturating_duration_since(self.now(now))
    }
}
