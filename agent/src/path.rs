//! The choice between the TCP connection and the QUIC link to a server; no I/O.
//!
//! Without loss, TCP needs less processor time and carries more on one connection. With loss, all connections of a TCP
//! connection wait for each lost segment. A path that cuts TCP connections may let UDP pass.

use std::collections::VecDeque;
use std::time::Duration;

use culvert_host::net::loss::{Loss, LossMeter, Packets};
use tokio::time::Instant;

/// Time for which the path must stay clean before new dials use TCP again.
const CLEAN: Duration = Duration::from_secs(600);

/// Time for which a cut of the TCP connection counts, and the number of cuts that matter.
const CUT_COUNTS: Duration = Duration::from_secs(3600);
const CUTS: usize = 2;

/// Times at which the TCP connection to one server was cut although the server lived.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cuts(VecDeque<Instant>);

/// Observation of the path to one server.
#[derive(Debug)]
pub(crate) struct Path {
    /// Meter of the TCP connection with this generation.
    tcp: (u64, LossMeter),
    quic: LossMeter,
    cuts: Cuts,
    /// Time until which the path counts as lossy.
    lossy_until: Option<Instant>,
    /// Time until which QUIC counts as slow although the path is not.
    slow_until: Option<Instant>,
}

// === impl Cuts ===

impl Cuts {
    /// Adds a cut.
    pub(crate) fn add(&mut self, now: Instant) {
        self.0.push_back(now);
        if self.0.len() > CUTS {
            self.0.pop_front();
        }
    }

    /// Returns true if no cut counts anymore.
    pub(crate) fn is_over(&self, now: Instant) -> bool {
        self.recent(now) == 0
    }

    fn recent(&self, now: Instant) -> usize {
        let recent = |at: &&Instant| now.duration_since(**at) < CUT_COUNTS;
        self.0.iter().filter(recent).count()
    }
}

// === impl Path ===

impl Path {
    /// Creates the observation of a path with earlier cuts.
    pub(crate) fn new(cuts: Cuts) -> Self {
        Self {
            tcp: Default::default(),
            quic: LossMeter::default(),
            cuts,
            lossy_until: None,
            slow_until: None,
        }
    }

    /// Records that many packets of a QUIC link are lost, in either direction.
    pub(crate) fn slow(&mut self, now: Instant) {
        self.slow_until = Some(now + CLEAN);
    }

    /// Forgets the counters of the last QUIC link.
    pub(crate) fn new_link(&mut self) {
        self.quic = LossMeter::default();
    }

    /// Records the counters of both connections, for TCP with the generation of its socket. Returns true if new dials
    /// should use QUIC.
    pub(crate) fn prefers_quic(
        &mut self,
        now: Instant,
        tcp: Option<(u64, Packets)>,
        quic: Packets,
    ) -> bool {
        let by_tcp = tcp.map_or(Loss::Little, |(generation, packets)| {
            if self.tcp.0 != generation {
                self.tcp = (generation, LossMeter::default());
            }
            self.tcp.1.sample(now, packets)
        });
        let by_quic = self.quic.sample(now, quic);
        if by_tcp > Loss::Little || by_quic > Loss::Little {
            self.lossy_until = Some(now + CLEAN);
        }
        if by_quic == Loss::Heavy {
            self.slow(now);
        }
        if by_tcp > Loss::Little {
            // TCP has the same problem.
            self.slow_until = None;
        }
        let lasts = |until: Option<Instant>| until.is_some_and(|until| now < until);
        (lasts(self.lossy_until) || self.cuts.recent(now) >= CUTS) && !lasts(self.slow_until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lost(sent: u64, lost: u64) -> Packets {
        Packets {
            sent,
            lost,
            ..Packets::default()
        }
    }

    #[test]
    fn loss_on_either_connection_prefers_quic_until_the_path_was_clean_for_ten_minutes() {
        for over_tcp in [true, false] {
            let mut path = Path::new(Cuts::default());
            let start = Instant::now();
            let mut look = |seconds, packets| {
                let now = start + Duration::from_secs(seconds);
                match over_tcp {
                    true => path.prefers_quic(now, Some((0, packets)), Packets::default()),
                    false => path.prefers_quic(now, None, packets),
                }
            };
            assert!(!look(0, lost(0, 0)));
            assert!(!look(10, lost(2000, 1)));
            assert!(look(20, lost(4000, 50)));
            assert!(look(600, lost(4000, 50)));
            assert!(!look(621, lost(4000, 50)));
        }
    }

    #[test]
    fn heavy_loss_of_quic_alone_prefers_tcp_until_tcp_loses_packets_too() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        for is_reported in [false, true] {
            let mut path = Path::new(Cuts::default());
            let mut look =
                |seconds, tcp, quic| path.prefers_quic(at(seconds), Some((0, tcp)), quic);
            let (tcp, none) = (lost(4000, 50), lost(0, 0));
            assert!(!look(0, lost(0, 0), none));
            assert!(look(5, tcp, none));
            // The loss of the TCP connection is older than a minute when QUIC loses packets.
            for seconds in (65..130).step_by(5) {
                assert!(look(seconds, tcp, none));
            }
            let quic = match is_reported {
                true => lost(4000, 10),
                false => lost(4000, 1000),
            };
            if is_reported {
                path.slow(at(130));
            }
            let mut look =
                |seconds, tcp, quic| path.prefers_quic(at(seconds), Some((0, tcp)), quic);
            assert!(!look(130, tcp, quic));
            assert!(!look(200, lost(9000, 50), quic));
            assert!(look(205, lost(19_000, 200), quic));
        }
    }

    #[test]
    fn counters_of_another_tcp_connection_are_not_compared_with_those_before() {
        let mut path = Path::new(Cuts::default());
        let start = Instant::now();
        let mut look = |seconds, generation, packets| {
            let now = start + Duration::from_secs(seconds);
            path.prefers_quic(now, Some((generation, packets)), Packets::default())
        };
        assert!(!look(0, 0, lost(100_000, 10)));
        // The next connection has lost packets before its first look, and loses no more.
        assert!(!look(10, 1, lost(2000, 1000)));
        assert!(!look(20, 1, lost(102_000, 1000)));
        assert!(look(30, 1, lost(104_000, 1200)));
    }

    #[test]
    fn two_cuts_within_an_hour_prefer_quic() {
        let start = Instant::now();
        let at = |minutes: u64| start + Duration::from_secs(60 * minutes);
        let mut cuts = Cuts::default();
        assert!(cuts.is_over(at(0)));
        cuts.add(at(0));
        let prefers =
            |cuts: &Cuts, now| Path::new(cuts.clone()).prefers_quic(now, None, Packets::default());
        assert!(!prefers(&cuts, at(1)) && !cuts.is_over(at(1)));
        cuts.add(at(30));
        assert!(prefers(&cuts, at(59)));
        assert!(!prefers(&cuts, at(61)));
        cuts.add(at(80));
        assert!(prefers(&cuts, at(85)));
        assert!(cuts.is_over(at(141)));
    }
}
