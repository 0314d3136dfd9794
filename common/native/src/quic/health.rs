//! The health of a QUIC link: a link is unhealthy while its peer answers nothing.
//!
//! TCP retransmits and QUIC probes for a long time before either gives up, but dials have another link. So a link
//! counts as unhealthy soon after the first unanswered packet, and as healthy again with the next packet of the peer.

use std::time::Duration;

use tokio::time::Instant;

/// Interval between two looks at a link that carries streams.
pub(crate) const LOOK: Duration = Duration::from_millis(200);

/// Shortest time without an answer until a link is unhealthy. A dial on a dead link moves to the other link within a
/// second.
const SHORTEST: Duration = Duration::from_millis(600);

/// Longest time for a peer to delay its acknowledgement (RFC 9000, 18.2), and some time for its timers.
const ACK_DELAY: Duration = Duration::from_millis(50);

/// Number of probe timeouts (RFC 9002, 6.2) without an answer until a link is unhealthy.
const PROBE_TIMEOUTS: u32 = 3;

/// Counters of a QUIC connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counters {
    /// Datagrams received.
    pub received: u64,
    /// Datagrams sent.
    pub sent: u64,
    /// Smoothed round trip.
    pub round_trip: Duration,
}

/// Result of a look at the counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// A packet of the peer has arrived.
    Heard,
    /// No packet was sent, or the peer still has time to answer.
    Quiet,
    /// Packets were sent since the peer's last packet. They may be acknowledgements only, so the caller asks for a
    /// packet.
    Unanswered,
    /// The peer has not answered for this time.
    Silent(Duration),
}

/// Observation of the counters, without I/O.
#[derive(Debug, Default)]
pub(crate) struct Health {
    received: u64,
    /// Datagrams sent when the peer's last datagram was noticed.
    sent: u64,
    /// Time since which a packet is unanswered.
    unanswered: Option<Instant>,
}

impl Health {
    /// Records the counters, without a judgement: a link without streams is not watched.
    pub(crate) fn begin(&mut self, counters: Counters) {
        (self.received, self.sent) = (counters.received, counters.sent);
        self.unanswered = None;
    }

    /// Judges the link by its counters.
    pub(crate) fn look(&mut self, now: Instant, counters: Counters) -> Look {
        if counters.received != self.received {
            self.begin(counters);
            return Look::Heard;
        }
        if counters.sent == self.sent {
            return Look::Quiet;
        }
        let Some(since) = self.unanswered else {
            self.unanswered = Some(now);
            return Look::Unanswered;
        };
        let silent = now.duration_since(since);
        // Twice the round trip allows for a varying path.
        let limit = PROBE_TIMEOUTS * (2 * counters.round_trip + ACK_DELAY);
        match silent >= limit.max(SHORTEST) {
            true => Look::Silent(silent),
            false => Look::Quiet,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counters(received: u64, sent: u64, round_trip: u64) -> Counters {
        let round_trip = Duration::from_millis(round_trip);
        Counters {
            received,
            sent,
            round_trip,
        }
    }

    #[test]
    fn link_is_silent_only_after_unanswered_packets() {
        let mut health = Health::default();
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        health.begin(counters(5, 5, 1));
        assert_eq!(health.look(at(9000), counters(5, 5, 1)), Look::Quiet);
        assert_eq!(health.look(at(9200), counters(5, 6, 1)), Look::Unanswered);
        assert_eq!(health.look(at(9700), counters(5, 7, 1)), Look::Quiet);
        let silent = Look::Silent(Duration::from_millis(600));
        assert_eq!(health.look(at(9800), counters(5, 8, 1)), silent);
        assert_eq!(health.look(at(9900), counters(6, 8, 1)), Look::Heard);
        assert_eq!(health.look(at(20000), counters(6, 8, 1)), Look::Quiet);
    }

    #[test]
    fn long_round_trip_gets_more_patience() {
        let mut health = Health::default();
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        assert_eq!(health.look(at(0), counters(0, 1, 500)), Look::Unanswered);
        assert_eq!(health.look(at(3000), counters(0, 1, 500)), Look::Quiet);
        let silent = Look::Silent(Duration::from_millis(3150));
        assert_eq!(health.look(at(3150), counters(0, 1, 500)), silent);
    }
}
