//! A limit of events per time.

use std::time::{Duration, Instant};

/// Token bucket: each event takes a token.
#[derive(Debug)]
pub(crate) struct RateLimit {
    /// Time in which one token is added.
    interval: Duration,
    /// Largest number of tokens.
    burst: u32,
    left: u32,
    /// Time up to which added tokens are counted in `left`.
    since: Instant,
}

impl RateLimit {
    /// Creates a full bucket of `burst` tokens, at least 1, which gains a token per `interval`.
    pub(crate) fn new(interval: Duration, burst: u32, now: Instant) -> Self {
        Self {
            interval,
            burst,
            left: burst,
            since: now,
        }
    }

    /// Takes a token. Returns false if none is left.
    pub(crate) fn allows(&mut self, now: Instant) -> bool {
        let passed = now.saturating_duration_since(self.since);
        let earned = passed.as_nanos() / self.interval.as_nanos().max(1);
        if earned > 0 {
            let earned = u32::try_from(earned).unwrap_or(u32::MAX);
            self.left = self.left.saturating_add(earned).min(self.burst);
            self.since = if self.left == self.burst {
                now
            } else {
                self.since + self.interval * earned
            };
        }
        let some = self.left > 0;
        self.left -= u32::from(some);
        some
    }

    /// Returns the time from which [`allows`](Self::allows) returns true; may be in the past.
    pub(crate) fn next(&self) -> Instant {
        match self.left {
            0 => self.since + self.interval,
            _ => self.since,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn burst_is_followed_by_one_event_per_interval() {
        let start = Instant::now();
        let mut limit = RateLimit::new(Duration::from_millis(10), 3, start);
        let taken = |limit: &mut RateLimit, now| (0..10).filter(|_| limit.allows(now)).count();
        assert_eq!(taken(&mut limit, start), 3);
        let next = limit.next();
        assert_eq!(next, start + Duration::from_millis(10));
        assert!(!limit.allows(start + Duration::from_millis(9)));
        assert_eq!(taken(&mut limit, next), 1);
        // The bucket is full again, and not fuller, after a long pause.
        assert_eq!(taken(&mut limit, start + Duration::from_secs(9)), 3);
    }
}
