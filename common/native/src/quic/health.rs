//! The health of a QUIC link: a link is unhealthy while its peer answers nothing.
//!
//! TCP retransmits and QUIC probes for a long time before either gives up, but dials have another link. So a link
//! counts as unhealthy soon after the first unanswered ping, and as healthy again with the next answer: the answer to a
//! ping, or a change of the round trip, which quinn measures by new acknowledgements. Other packets of the peer prove
//! nothing: a path may carry packets in one direction only, and quinn repeats old acknowledgements.

use std::time::Duration;

use tokio::time::Instant;

/// Interval between two looks at a link that carries streams.
pub(crate) const LOOK: Duration = Duration::from_millis(200);

/// Interval between two looks while a dial waits for its answer. Two looks, [`SHORTEST`] and the dial over the other link
/// take less than a second on a path with a round trip of 100 ms.
pub(crate) const DIAL_LOOK: Duration = Duration::from_millis(50);

/// Shortest time without an answer until a link is unhealthy.
const SHORTEST: Duration = Duration::from_millis(600);

/// Longest time for a peer to delay its acknowledgement (RFC 9000, 18.2), and some time for its timers.
const ACK_DELAY: Duration = Duration::from_millis(50);

/// Number of probe timeouts (RFC 9002, 6.2) without an answer until a link is unhealthy.
const PROBE_TIMEOUTS: u32 = 3;

/// Round trip that quinn assumes for a new address of the peer until the first measurement (RFC 9002, 6.2.2).
pub(super) const ASSUMED_ROUND_TRIP: Duration = Duration::from_millis(333);

/// Counters of a QUIC connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counters {
    /// Datagrams received.
    pub received: u64,
    /// Answers to pings received.
    pub answers: u64,
    /// Datagrams sent.
    pub sent: u64,
    /// Smoothed round trip. Each measurement changes some of its nanoseconds.
    pub round_trip: Duration,
}

/// Result of a look at the counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// The peer has answered.
    Answered,
    /// No answer is due, or the peer still has time to answer.
    Quiet,
    /// Packets were sent since the peer's last answer, or a dial waits. The caller sends a ping.
    Unanswered,
    /// The peer has not answered for this time.
    Silent(Duration),
    /// As [`Self::Silent`], but packets of the peer have arrived: the path may work again, and the caller sends another
    /// ping, because the next retransmission may be far away.
    Waking(Duration),
}

/// Observation of the counters, without I/O.
#[derive(Debug, Default)]
pub(crate) struct Health {
    received: u64,
    answers: u64,
    /// Last measured round trip.
    round_trip: Duration,
    /// Datagrams sent when the peer's last answer was noticed.
    sent: u64,
    /// Time since which a packet is unanswered.
    unanswered: Option<Instant>,
}

impl Health {
    /// Judges the link by its counters. `is_dialing`: a dial waits for its answer, so an answer is always due.
    pub(crate) fn look(&mut self, now: Instant, counters: Counters, is_dialing: bool) -> Look {
        let is_heard = counters.received != self.received;
        self.received = counters.received;
        let measured = Some(counters.round_trip)
            .filter(|&now| now != self.round_trip && now != ASSUMED_ROUND_TRIP);
        if measured.is_some() || self.answers != counters.answers {
            self.round_trip = measured.unwrap_or(self.round_trip);
            (self.answers, self.sent) = (counters.answers, counters.sent);
            self.unanswered = None;
            return Look::Answered;
        }
        if counters.sent == self.sent && !is_dialing {
            return Look::Quiet;
        }
        let Some(since) = self.unanswered else {
            self.unanswered = Some(now);
            return Look::Unanswered;
        };
        let silent = now.duration_since(since);
        // The addition of a half allows for a varying path.
        let limit = PROBE_TIMEOUTS * (self.round_trip * 3 / 2 + ACK_DELAY);
        match (silent >= limit.max(SHORTEST), is_heard) {
            (true, false) => Look::Silent(silent),
            (true, true) => Look::Waking(silent),
            (false, _) => Look::Quiet,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A link in a test.
    struct Test {
        health: Health,
        start: Instant,
        counters: Counters,
    }

    impl Test {
        fn new(round_trip: u64) -> Self {
            let round_trip = Duration::from_millis(round_trip);
            Self {
                health: Health {
                    round_trip,
                    ..Health::default()
                },
                start: Instant::now(),
                counters: Counters {
                    round_trip,
                    ..Counters::default()
                },
            }
        }

        /// Sends a datagram.
        fn send(&mut self) {
            self.counters.sent += 1;
        }

        /// Receives a datagram with this number of answers.
        fn receive(&mut self, answers: u64) {
            self.counters.received += 1;
            self.counters.answers += answers;
        }

        /// Looks at a time in ms.
        fn look(&mut self, millis: u64, is_dialing: bool) -> Look {
            let now = self.start + Duration::from_millis(millis);
            self.health.look(now, self.counters, is_dialing)
        }
    }

    fn silent(millis: u64) -> Look {
        Look::Silent(Duration::from_millis(millis))
    }

    #[test]
    fn link_is_silent_only_after_unanswered_packets() {
        let mut link = Test::new(1);
        assert_eq!(link.look(9000, false), Look::Quiet);
        link.send();
        assert_eq!(link.look(9200, false), Look::Unanswered);
        link.send();
        assert_eq!(link.look(9700, false), Look::Quiet);
        assert_eq!(link.look(9800, false), silent(600));
        link.receive(1);
        assert_eq!(link.look(9900, false), Look::Answered);
        assert_eq!(link.look(20000, false), Look::Quiet);
    }

    #[test]
    fn waiting_dial_needs_an_answer_although_nothing_is_sent() {
        let mut link = Test::new(100);
        link.send();
        link.receive(1);
        assert_eq!(link.look(0, true), Look::Answered);
        assert_eq!(link.look(50, true), Look::Unanswered);
        link.send();
        assert_eq!(link.look(649, true), Look::Quiet);
        assert_eq!(link.look(650, true), silent(600));
        // The dial has moved, and the ping is still unanswered.
        assert_eq!(link.look(700, false), silent(650));
    }

    #[test]
    fn packets_without_an_answer_do_not_make_a_link_healthy() {
        let mut link = Test::new(1);
        link.send();
        assert_eq!(link.look(0, false), Look::Unanswered);
        link.receive(0);
        assert_eq!(link.look(200, false), Look::Quiet);
        assert_eq!(link.look(600, false), silent(600));
        link.receive(0);
        let waking = Look::Waking(Duration::from_millis(800));
        assert_eq!(link.look(800, false), waking);
        assert_eq!(link.look(1000, false), silent(1000));
    }

    #[test]
    fn measured_round_trip_is_an_answer() {
        let mut link = Test::new(1);
        link.send();
        assert_eq!(link.look(0, false), Look::Unanswered);
        link.receive(0);
        link.counters.round_trip += Duration::from_nanos(1);
        assert_eq!(link.look(600, false), Look::Answered);
        assert_eq!(link.look(800, false), Look::Quiet);
    }

    #[test]
    fn new_address_of_the_peer_is_no_answer() {
        let mut link = Test::new(1);
        link.send();
        assert_eq!(link.look(0, false), Look::Unanswered);
        assert_eq!(link.look(600, false), silent(600));
        link.receive(0);
        link.counters.round_trip = ASSUMED_ROUND_TRIP;
        assert_eq!(
            link.look(800, false),
            Look::Waking(Duration::from_millis(800))
        );
        assert_eq!(link.look(1000, false), silent(1000));
        // A ping that is answered, and then the first measurement of the new path.
        link.receive(1);
        assert_eq!(link.look(1200, false), Look::Answered);
        assert_eq!(link.look(1400, false), Look::Quiet);
        link.receive(0);
        link.counters.round_trip = Duration::from_millis(2);
        assert_eq!(link.look(1600, false), Look::Answered);
    }

    #[test]
    fn long_round_trip_gets_more_patience() {
        let mut link = Test::new(500);
        link.send();
        assert_eq!(link.look(0, false), Look::Unanswered);
        // Two lost packets, with probe timeouts of at most 0.7 s and 1.4 s.
        assert_eq!(link.look(2399, false), Look::Quiet);
        assert_eq!(link.look(2400, false), silent(2400));
    }
}
