//! The detector of small traffic on one connection of a packet stream: interactive sessions and short requests, which
//! must not wait behind bulk.
//!
//! The size of HTTP/2 frames says nothing about the size of messages: a window cuts frames anywhere. The size of one
//! message says little: a bulk transfer begins and ends with small ones. So a message is small traffic if the message
//! is small and its connection has carried little during the last second.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Smallest size of a message that is not small, in bytes.
const SMALL_MESSAGE_BYTES: usize = 1024;

/// Bytes of a connection during a period from which the connection counts as bulk.
const BULK_BYTES: usize = 64 * 1024;

/// Length of a period.
const PERIOD: Duration = Duration::from_secs(1);

/// Recent traffic of one connection.
#[derive(Debug)]
pub struct TrafficMeter(Mutex<Recent>);

#[derive(Debug)]
struct Recent {
    /// Start of the current period.
    since: Instant,
    /// Bytes of the current period.
    now: usize,
    /// Bytes of the period before.
    before: usize,
}

impl Default for TrafficMeter {
    fn default() -> Self {
        Self(Mutex::new(Recent {
            since: Instant::now(),
            now: 0,
            before: 0,
        }))
    }
}

impl TrafficMeter {
    /// Counts a message of `bytes` payload bytes. Returns true if the message is small traffic.
    pub fn is_small(&self, bytes: usize) -> bool {
        let mut recent = self.0.lock();
        let (now, since) = (Instant::now(), recent.since);
        if now - since >= PERIOD {
            let is_next = now - since < 2 * PERIOD;
            *recent = Recent {
                since: now,
                now: 0,
                before: if is_next { recent.now } else { 0 },
            };
        }
        recent.now = recent.now.saturating_add(bytes);
        let is_bulk = recent.now >= BULK_BYTES || recent.before >= BULK_BYTES;
        bytes < SMALL_MESSAGE_BYTES && !is_bulk
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    /// Number of messages of `bytes` bytes per second that count as small, over some seconds.
    async fn small_per_second(meter: &TrafficMeter, bytes: usize, rate: u32) -> u32 {
        let mut small = 0;
        for _ in 0..4 * rate {
            small += u32::from(meter.is_small(bytes));
            advance(Duration::from_secs(1) / rate).await;
        }
        small / 4
    }

    #[tokio::test(start_paused = true)]
    async fn echoes_are_small_traffic_and_large_messages_are_not() {
        assert_eq!(
            small_per_second(&TrafficMeter::default(), 64, 500).await,
            500
        );
        assert_eq!(
            small_per_second(&TrafficMeter::default(), 1023, 60).await,
            60
        );
        assert_eq!(
            small_per_second(&TrafficMeter::default(), 1024, 60).await,
            0
        );
    }

    #[tokio::test(start_paused = true)]
    async fn small_messages_of_a_bulk_transfer_do_not_count() {
        let meter = TrafficMeter::default();
        for _ in 0..100 {
            assert!(!meter.is_small(32 * 1024));
            assert!(!meter.is_small(100) || meter.0.lock().now < BULK_BYTES);
            advance(Duration::from_millis(100)).await;
        }
        assert!(!meter.is_small(100));
        // The connection is bulk until a second has passed without bulk.
        advance(Duration::from_millis(900)).await;
        assert!(!meter.is_small(100));
        advance(2 * PERIOD).await;
        assert!(meter.is_small(100));
    }

    #[tokio::test(start_paused = true)]
    async fn many_small_messages_are_bulk() {
        let small = small_per_second(&TrafficMeter::default(), 512, 4000).await;
        assert!(small < 40, "{small} small messages per second");
    }
}
