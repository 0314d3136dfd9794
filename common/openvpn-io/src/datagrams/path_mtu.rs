//! The lengths of datagrams that exceed the path MTU of their destinations.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use crate::Moment;

/// Time after which a batch is tried again, as for the path MTUs that the kernel remembers
/// (`net.ipv4.route.mtu_expires`, ip-sysctl.rst).
const EXPIRES: Duration = Duration::from_secs(600);

/// Largest number of destinations, about 48 bytes each. A further destination displaces the oldest.
const CAPACITY: usize = 1024;

/// Length by destination from which the kernel refuses to split batches of datagrams, because they exceed the path MTU.
#[derive(Debug, Default)]
pub(super) struct PathMtus {
    refused: HashMap<SocketAddr, Refused>,
}

#[derive(Clone, Copy, Debug)]
struct Refused {
    length: usize,
    at: Moment,
}

impl Refused {
    fn is_recent(&self, now: Moment) -> bool {
        now.saturating_duration_since(self.at) < EXPIRES
    }
}

impl PathMtus {
    /// Returns true if datagrams of this length may be sent as a batch.
    pub(super) fn permits_batch(&self, to: SocketAddr, length: usize, now: Moment) -> bool {
        // Most paths permit all lengths, and then nothing is searched.
        self.refused.is_empty()
            || self
                .refused
                .get(&to)
                .is_none_or(|refused| length < refused.length || !refused.is_recent(now))
    }

    /// Records that the kernel has refused a batch of datagrams of this length.
    pub(super) fn refused(&mut self, to: SocketAddr, length: usize, now: Moment) {
        if self.refused.len() >= CAPACITY && !self.refused.contains_key(&to) {
            let oldest = self.refused.iter().min_by_key(|(_, refused)| refused.at);
            if let Some(oldest) = oldest.map(|(to, _)| *to) {
                self.refused.remove(&oldest);
            }
        }
        let before = self.refused.get(&to).filter(|before| before.is_recent(now));
        let length = before.map_or(length, |before| before.length.min(length));
        self.refused.insert(to, Refused { length, at: now });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusal_is_forgotten_after_ten_minutes() {
        let (to, now) = (SocketAddr::from(([192, 0, 2, 1], 1194)), crate::now());
        let mut mtus = PathMtus::default();
        mtus.refused(to, 1400, now);
        mtus.refused(to, 1450, now);
        let permits = |mtus: &PathMtus, length, seconds| {
            mtus.permits_batch(to, length, now + Duration::from_secs(seconds))
        };
        assert!(permits(&mtus, 1399, 0));
        assert!(!permits(&mtus, 1400, 599));
        assert!(permits(&mtus, 1400, 600));
        // After this time, a new refusal counts alone.
        mtus.refused(to, 1450, now + EXPIRES);
        assert!(permits(&mtus, 1400, 601));
        assert!(!permits(&mtus, 1450, 601));
    }

    #[test]
    fn number_of_destinations_is_bounded() {
        let now = crate::now();
        let to = |number: usize| SocketAddr::from(([192, 0, 2, 1], number as u16));
        let at = |number: usize| now + Duration::from_millis(number as u64);
        let mut mtus = PathMtus::default();
        for number in 0..CAPACITY + 10 {
            mtus.refused(to(number), 1400, at(number));
        }
        assert_eq!(mtus.refused.len(), CAPACITY);
        assert!(mtus.permits_batch(to(9), 1400, at(2000)));
        assert!(!mtus.permits_batch(to(10), 1400, at(2000)));
    }
}
