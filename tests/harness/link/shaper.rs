//! One direction of a link: decides which packets arrive, and when. No I/O and no clock.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::time::Instant;

/// Conditions of a link, for each direction.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Conditions {
    /// Time of a packet on the link: half of the round trip.
    pub delay: Duration,
    /// Longest additional delay. Packets stay in order.
    pub jitter: Duration,
    /// Share of packets that get lost, 0 to 1.
    pub loss: f64,
    /// Share of packets that overtake others, 0 to 1: they skip the delay.
    pub reorder: f64,
    /// Bytes per second. `None` sets no limit.
    pub rate: Option<f64>,
    /// Longest time that a packet waits for those before it. A packet that would wait longer is dropped. Without a rate,
    /// packets do not wait.
    pub queue: Duration,
}

impl Default for Conditions {
    /// No delay, no loss and no limit. The queue is 100 ms.
    fn default() -> Self {
        Self {
            delay: Duration::ZERO,
            jitter: Duration::ZERO,
            loss: 0.0,
            reorder: 0.0,
            rate: None,
            queue: Duration::from_millis(100),
        }
    }
}

/// One direction of a link.
#[derive(Debug)]
pub(super) struct Shaper {
    random: StdRng,
    /// Packets on the link, with the time of arrival and their number.
    packets: BinaryHeap<Reverse<(Instant, u64, Vec<u8>)>>,
    count: u64,
    /// Time at which the sender's line is free again.
    free: Option<Instant>,
    /// Arrival of the last packet that did not overtake.
    last: Option<Instant>,
}

impl Shaper {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            random: StdRng::seed_from_u64(seed),
            packets: BinaryHeap::new(),
            count: 0,
            free: None,
            last: None,
        }
    }

    /// Takes a packet. Returns false if the packet gets lost.
    pub(super) fn push(&mut self, now: Instant, packet: &[u8], conditions: &Conditions) -> bool {
        // Each packet takes three numbers, so that a change of one condition leaves the other decisions.
        let [lost, late, first] = std::array::from_fn(|_| self.random.random::<f64>());
        let start = self.free.map_or(now, |free| free.max(now));
        if lost < conditions.loss || start - now > conditions.queue {
            return false;
        }
        let time = |bytes: usize, rate: f64| Duration::from_secs_f64(bytes as f64 / rate);
        let left = start
            + conditions
                .rate
                .map_or(Duration::ZERO, |rate| time(packet.len(), rate));
        self.free = Some(left);
        let at = if first < conditions.reorder {
            left
        } else {
            let at = left + conditions.delay + conditions.jitter.mul_f64(late);
            let at = self.last.map_or(at, |last| last.max(at));
            self.last = Some(at);
            at
        };
        self.count += 1;
        self.packets
            .push(Reverse((at, self.count, packet.to_vec())));
        true
    }

    /// Removes a packet that has arrived.
    pub(super) fn due(&mut self, now: Instant) -> Option<Vec<u8>> {
        self.next().filter(|at| *at <= now)?;
        self.packets.pop().map(|Reverse((_, _, packet))| packet)
    }

    /// Returns the time of the next arrival.
    pub(super) fn next(&self) -> Option<Instant> {
        self.packets.peek().map(|Reverse((at, _, _))| *at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Sends `count` packets of 1,000 bytes, one each `gap`, and returns number and time of each arrival.
    fn arrivals(
        conditions: &Conditions,
        seed: u64,
        count: u8,
        gap: Duration,
    ) -> Vec<(u8, Duration)> {
        let mut shaper = Shaper::new(seed);
        let begin = Instant::now();
        for number in 0..count {
            let now = begin + gap * number.into();
            shaper.push(now, &[number; 1000], conditions);
        }
        let mut arrived = Vec::new();
        while let Some(at) = shaper.next() {
            assert_eq!(shaper.due(at - Duration::from_nanos(1)), None);
            arrived.push((shaper.due(at).unwrap()[0], at - begin));
        }
        arrived
    }

    #[test]
    fn delay_and_rate_decide_the_time_of_arrival() {
        let conditions = Conditions {
            delay: 10 * MS,
            rate: Some(1_000_000.0),
            ..Conditions::default()
        };
        let arrived = arrivals(&conditions, 1, 3, Duration::ZERO);
        assert_eq!(arrived, [(0, 11 * MS), (1, 12 * MS), (2, 13 * MS)]);
        // A packet that finds the line free does not wait.
        let arrived = arrivals(&conditions, 1, 2, 5 * MS);
        assert_eq!(arrived, [(0, 11 * MS), (1, 16 * MS)]);
    }

    #[test]
    fn full_queue_drops_packets() {
        let conditions = Conditions {
            rate: Some(1_000_000.0),
            queue: 4 * MS,
            ..Conditions::default()
        };
        assert_eq!(arrivals(&conditions, 1, 20, Duration::ZERO).len(), 5);
    }

    #[test]
    fn loss_is_about_its_share_and_the_same_for_the_same_seed() {
        let conditions = Conditions {
            loss: 0.25,
            ..Conditions::default()
        };
        let [one, again, other] = [3, 3, 4].map(|seed| arrivals(&conditions, seed, 200, MS));
        assert!((110..190).contains(&one.len()), "{} of 200", one.len());
        assert_eq!(one, again);
        assert_ne!(one, other);
    }

    #[test]
    fn jitter_keeps_the_order_and_reordering_does_not() {
        let numbers = |conditions: &Conditions| {
            let arrived = arrivals(conditions, 5, 100, MS);
            arrived.into_iter().map(|(n, _)| n).collect::<Vec<u8>>()
        };
        let jitter = Conditions {
            delay: 10 * MS,
            jitter: 20 * MS,
            ..Conditions::default()
        };
        let in_order: Vec<u8> = (0..100).collect();
        assert_eq!(numbers(&jitter), in_order);
        let reorder = Conditions {
            reorder: 0.1,
            ..jitter
        };
        assert_ne!(numbers(&reorder), in_order);
    }
}
