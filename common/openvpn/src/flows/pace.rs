//! The pacer: limits the data in flight to a peer over a datagram transport, and the sending rate.
//!
//! The pacer owns the cap for the bytes in flight and the token bucket. The cap grows while it limits the
//! flows and nothing is lost, up to the amount that the rate needs at the shortest round trip. After a loss
//! the cap stays below the value at which the loss happened for a while, and for longer after each further
//! loss. With smoltcp each loss may cost a second, so frequent attempts would cost more than a smaller cap.

use std::time::{Duration, Instant};

use super::Pace;

/// Losses lower the cap to this value, in bytes, or to the initial limit, if that limit is smaller, and no
/// further. The socket of a stock peer accepts this many bytes.
const LEAST: usize = 64 << 10;
/// Initial and longest time for which the cap stays below the value at which a loss happened. Each loss
/// doubles the time.
const CEILING_TIME: Duration = Duration::from_secs(30);
const MAX_CEILING_TIME: Duration = Duration::from_secs(600);
/// Retransmissions within this time belong to the same loss: smoltcp starts again a second after a loss.
const SAME_LOSS: Duration = Duration::from_secs(3);
/// Validity of the shortest round trip.
const SHORTEST_FOR: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(crate) struct Pacer {
    settings: Pace,
    cap: usize,
    ceiling: Option<(usize, Instant)>,
    ceiling_time: Duration,
    lost: Option<Instant>,
    shortest: Option<(Duration, Instant)>,
    /// Bytes that may be sent now; negative after a packet larger than the balance.
    tokens: i64,
    filled: Instant,
}

impl Pacer {
    pub(crate) fn new(settings: Pace, now: Instant) -> Self {
        Self {
            cap: settings.in_flight,
            tokens: settings.burst as i64,
            settings,
            ceiling: None,
            ceiling_time: CEILING_TIME,
            lost: None,
            shortest: None,
            filled: now,
        }
    }

    /// Returns how many bytes may be queued in addition to `in_flight`.
    pub(crate) fn room(&self, in_flight: usize) -> usize {
        self.cap.saturating_sub(in_flight)
    }

    pub(crate) fn cap(&self) -> usize {
        self.cap
    }

    pub(crate) fn round_trip(&mut self, measured: Duration, now: Instant) {
        let keep = self.shortest.is_some_and(|(shortest, since)| {
            shortest <= measured && now.saturating_duration_since(since) < SHORTEST_FOR
        });
        if !keep {
            self.shortest = Some((measured, now));
        }
    }

    /// Raises the cap after `bytes` were acknowledged. `in_flight` is the number of bytes still in flight.
    pub(crate) fn acknowledged(&mut self, bytes: usize, in_flight: usize, now: Instant) {
        if in_flight.saturating_add(bytes) < self.cap / 4 * 3 {
            return; // The cap does not limit the flows.
        }
        let Some((shortest, _)) = self.shortest else {
            return;
        };
        let needed = u128::from(self.settings.rate) * shortest.as_micros() / 1_000_000;
        let mut most = usize::try_from(needed)
            .unwrap_or(usize::MAX)
            .saturating_add(self.settings.in_flight)
            .min(self.settings.max_in_flight);
        if let Some((ceiling, until)) = self.ceiling {
            if now < until {
                most = most.min(ceiling / 8 * 7);
            } else {
                self.ceiling = None;
            }
        }
        // Growth by an eighth per round trip.
        let grown = self.cap.saturating_add(bytes / 8).min(most);
        self.cap = self.cap.max(grown);
    }

    /// Lowers the cap after a retransmitted segment was acknowledged.
    pub(crate) fn lost(&mut self, now: Instant) {
        let same = self
            .lost
            .is_some_and(|at| now.saturating_duration_since(at) < SAME_LOSS);
        self.lost = Some(now);
        if same {
            return;
        }
        self.ceiling = Some((self.cap, now + self.ceiling_time));
        self.ceiling_time = (self.ceiling_time * 2).min(MAX_CEILING_TIME);
        self.cap = (self.cap / 8 * 5).max(LEAST.min(self.settings.in_flight));
    }

    /// Returns how many full packets may be sent now.
    pub(crate) fn packets(&mut self, mtu: usize, now: Instant) -> usize {
        let passed = now.saturating_duration_since(self.filled);
        self.filled = now;
        let earned = passed.as_nanos() * u128::from(self.settings.rate) / 1_000_000_000;
        let earned = i64::try_from(earned).unwrap_or(i64::MAX);
        self.tokens = self
            .tokens
            .saturating_add(earned)
            .min(self.settings.burst as i64);
        let tokens = usize::try_from(self.tokens).unwrap_or(0);
        tokens.div_ceil(mtu)
    }

    /// Records sent bytes.
    pub(crate) fn spend(&mut self, bytes: u64) {
        self.tokens = self
            .tokens
            .saturating_sub(i64::try_from(bytes).unwrap_or(i64::MAX));
    }

    /// Returns the time at which a quarter of the burst may be sent again.
    pub(crate) fn ready_at(&self) -> Instant {
        let missing = (self.settings.burst / 4) as i64 - self.tokens;
        let missing = u128::try_from(missing).unwrap_or(0);
        let nanos = missing * 1_000_000_000 / u128::from(self.settings.rate.max(1));
        self.filled + Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX / 4))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_lower_the_cap_to_what_a_stock_socket_accepts_and_no_further() {
        let mut now = Instant::now();
        let mut pacer = Pacer::new(Pace::to_own_client(), now);
        let mut caps = vec![pacer.cap()];
        for _ in 0..4 {
            now += SAME_LOSS;
            pacer.lost(now);
            caps.push(pacer.cap());
        }
        assert_eq!(caps, [192, 120, 75, 64, 64].map(|kib| kib << 10));
    }

    #[test]
    fn repetitions_of_one_loss_count_once() {
        let mut now = Instant::now();
        let mut pacer = Pacer::new(Pace::to_own_client(), now);
        for _ in 0..5 {
            now += SAME_LOSS / 2;
            pacer.lost(now);
        }
        assert_eq!(pacer.cap(), 120 << 10);
    }

    #[test]
    fn cap_stays_below_the_last_loss_for_the_ceiling_time_and_then_grows() {
        let start = Instant::now();
        let mut pacer = Pacer::new(Pace::to_own_client(), start);
        pacer.lost(start);
        let after = |pacer: &mut Pacer, seconds| {
            let now = start + Duration::from_secs(seconds);
            pacer.round_trip(Duration::from_millis(2), now);
            for _ in 0..100 {
                pacer.acknowledged(pacer.cap() / 2, pacer.cap() / 2, now);
            }
            pacer.cap()
        };
        assert_eq!(after(&mut pacer, 29), (192 << 10) / 8 * 7);
        // Bytes that 1 GB/s needs at this round trip, plus the initial limit.
        assert_eq!(after(&mut pacer, 31), 2_000_000 + (192 << 10));
    }

    #[test]
    fn cap_that_does_not_limit_the_flows_does_not_grow() {
        let now = Instant::now();
        let mut pacer = Pacer::new(Pace::to_own_client(), now);
        pacer.round_trip(Duration::from_millis(2), now);
        for _ in 0..100 {
            pacer.acknowledged(1400, 64 << 10, now);
        }
        assert_eq!(pacer.cap(), 192 << 10);
    }
}
