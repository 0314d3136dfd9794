//! A clock that stops while the peer is silent.
//!
//! A stalled outer connection must not end its flows: only the session decides if the peer is dead. The clock
//! owns the time of the peer's last packet.

use std::time::{Duration, Instant};

/// Silence after which the clock stops. Stock servers send a ping every 5 s in KKP; 10 s is usual.
const GRACE: Duration = Duration::from_secs(15);

#[derive(Debug)]
pub(crate) struct Liveness {
    last_received: Instant,
    stalled: Duration,
}

impl Liveness {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            last_received: now,
            stalled: Duration::ZERO,
        }
    }

    pub(crate) fn received(&mut self, now: Instant) {
        let silence = now.saturating_duration_since(self.last_received);
        self.stalled += silence.saturating_sub(GRACE);
        self.last_received = self.last_received.max(now);
    }

    /// Returns the clock's time.
    pub(crate) fn now(&self, now: Instant) -> Instant {
        let shown = now.min(self.last_received + GRACE);
        shown.checked_sub(self.stalled).unwrap_or(shown)
    }

    /// Returns the earliest time at which the clock may reach `at`.
    pub(crate) fn when(&self, at: Instant, now: Instant) -> Instant {
        now + at.saturating_duration_since(self.now(now))
    }
}
