//! A limit of events per time.

use std::time::{Duration, Instant};

/// Token bucket: each event takes a token.
#[derive(Debug)]
pub(crate) struct RateLimit {
    /// Tokens added per second.
    rate: u32,
    /// Largest number of tokens.
    burst: u32,
    left: u32,
    /// Time up to which added tokens are counted in `left`.
    since: Instant,
}

impl RateLimit {
    /// Creates a full bucket of `burst` tokens, which gains `rate` tokens per second. Both must be at least 1.
    pub(crate) fn new(rate: u32, burst: u32, now: Instant) -> Self {
        Self {
            rate,
            burst,
            left: burst,
            since: now,
        }
    }

    /// Takes a token. Returns false if none is left.
    pub(crate) fn allows(&mut self, now: Instant) -> bool {
        let passed = now.saturating_duration_since(self.since);
        let earned = passed.as_micros() * u128::from(self.rate) / 1_000_000;
        if earned > 0 {
            let earned = u32::try_from(earned).unwrap_or(u32::MAX);
            self.left = self.left.saturating_add(earned).min(self.burst);
            self.since = if self.left == self.burst {
                now
            } else {
                self.since + Duration::from_secs(1) * earned / self.rate
            };
        }
        let some = self.left > 0;
        self.left -= u32::from(some);
        some
    }

    /// Returns the time from which [`allows`](Self::allows) returns true; may be in the past.
    pub(crate) fn next(&self) -> Instant {
        let pause = Duration::from_secs(1) / self.rate;
        match self.left {
            0 => self.since + pause,
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
        let mut limit = RateLimit::new(100, 3, start);
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
