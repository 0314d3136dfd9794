//! Packet loss of a path, by the counters of its connection.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::time::Duration;

use nix::sys::socket::getsockopt;
use tokio::time::Instant;

use super::options::TcpInfo;

/// Time for which a sample counts.
const WINDOW: Duration = Duration::from_secs(60);

/// Smallest number of packets in one direction for a judgement.
const ENOUGH_PACKETS: u64 = 1000;

/// A direction is lossy if more than one packet in this many is lost, by the counters of its sender.
const LOST_ONE_IN: u64 = 1000;

/// A direction is lossy if more than one packet in this many arrives out of order, by the counters of its receiver. A
/// lost packet puts all packets out of order that arrive before its retransmission.
const DISORDERED_ONE_IN: u64 = 200;

/// Counters of a connection since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Packets {
    /// Packets with data that were sent.
    pub sent: u64,
    /// Packets that were sent and lost.
    pub lost: u64,
    /// Packets with data that were received.
    pub received: u64,
    /// Packets that arrived out of order.
    pub disordered: u64,
}

/// Samples of the last minute.
#[derive(Debug, Default)]
pub struct LossMeter {
    samples: VecDeque<(Instant, Packets)>,
}

// === impl Packets ===

impl Packets {
    /// Returns the kernel's counters of a TCP connection. `None` if the kernel does not report them.
    pub fn of_tcp(socket: &impl AsFd) -> Option<Self> {
        let info = getsockopt(socket, TcpInfo).ok()?;
        Some(Self {
            sent: info.tcpi_data_segs_out.into(),
            lost: info.tcpi_total_retrans.into(),
            received: info.tcpi_data_segs_in.into(),
            disordered: info.tcpi_rcv_ooopack.into(),
        })
    }
}

// === impl LossMeter ===

impl LossMeter {
    /// Adds a sample. Returns true if the path has lost packets within the last minute.
    pub fn sample(&mut self, now: Instant, packets: Packets) -> bool {
        while let Some((at, _)) = self.samples.get(1)
            && now.duration_since(*at) >= WINDOW
        {
            self.samples.pop_front();
        }
        self.samples.push_back((now, packets));
        let Some((_, first)) = self.samples.front() else {
            return false;
        };
        let exceeds = |all: u64, bad: u64, one_in: u64| {
            all >= ENOUGH_PACKETS && bad.saturating_mul(one_in) > all
        };
        let sent = packets.sent.saturating_sub(first.sent);
        let lost = packets.lost.saturating_sub(first.lost);
        let received = packets.received.saturating_sub(first.received);
        let disordered = packets.disordered.saturating_sub(first.disordered);
        exceeds(sent, lost, LOST_ONE_IN) || exceeds(received, disordered, DISORDERED_ONE_IN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packets(sent: u64, lost: u64, received: u64, disordered: u64) -> Packets {
        Packets {
            sent,
            lost,
            received,
            disordered,
        }
    }

    #[test]
    fn path_is_lossy_in_either_direction_beyond_its_threshold() {
        for (sample, is_lossy) in [
            (packets(999, 999, 999, 999), false),
            (packets(10_000, 10, 0, 0), false),
            (packets(10_000, 11, 0, 0), true),
            (packets(0, 0, 10_000, 50), false),
            (packets(0, 0, 10_000, 51), true),
        ] {
            let mut meter = LossMeter::default();
            let now = Instant::now();
            assert!(!meter.sample(now, Packets::default()));
            let later = now + Duration::from_secs(10);
            assert_eq!(meter.sample(later, sample), is_lossy, "{sample:?}");
        }
    }

    #[test]
    fn loss_is_forgotten_after_a_minute() {
        let mut meter = LossMeter::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        meter.sample(at(0), Packets::default());
        assert!(meter.sample(at(10), packets(5000, 100, 0, 0)));
        assert!(meter.sample(at(50), packets(9000, 100, 0, 0)));
        for tenths in 6..20 {
            meter.sample(at(10 * tenths), packets(9000 + tenths * 1000, 100, 0, 0));
        }
        assert!(!meter.sample(at(200), packets(40_000, 100, 0, 0)));
        assert!(meter.samples.len() < 10);
    }
}
