//! Packet loss of a path, by the counters of its connection.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::time::Duration;

use tokio::time::Instant;

use super::options::tcp_info;

/// Time for which a sample counts.
const WINDOW: Duration = Duration::from_secs(60);

/// Smallest number of packets in one direction for a judgement.
const ENOUGH_PACKETS: u64 = 1000;

/// A direction is lossy if more than one packet in this many is lost, by the counters of its sender.
const LOST_ONE_IN: u64 = 1000;

/// The loss is heavy if more than one packet in this many is lost. Even the congestion control of a link for lossy paths
/// carries little then.
const HEAVY_ONE_IN: u64 = 5;

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

/// Loss of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Loss {
    /// Too little to matter, or too few packets for a judgement.
    Little,
    /// Enough to delay all connections that share a TCP connection.
    Some,
    /// More than usual paths lose: a device mangles or drops the packets.
    Heavy,
}

/// Samples of the last minute.
#[derive(Debug, Default)]
pub struct LossMeter {
    samples: VecDeque<(Instant, Packets)>,
}

// === impl Packets ===

impl Packets {
    /// Returns the counters of sent packets.
    pub fn of_sender(sent: u64, lost: u64) -> Self {
        Self {
            sent,
            lost,
            ..Self::default()
        }
    }

    /// Returns the kernel's counters of a TCP connection. `None` if the kernel does not report them.
    pub fn of_tcp(socket: &impl AsFd) -> Option<Self> {
        let info = tcp_info(socket).ok()?;
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
    /// Adds a sample. Returns the loss within the last minute.
    pub fn sample(&mut self, now: Instant, packets: Packets) -> Loss {
        while let Some((at, _)) = self.samples.get(1)
            && now.duration_since(*at) >= WINDOW
        {
            self.samples.pop_front();
        }
        self.samples.push_back((now, packets));
        let Some((_, first)) = self.samples.front() else {
            return Loss::Little;
        };
        let exceeds = |all: u64, bad: u64, one_in: u64| {
            all >= ENOUGH_PACKETS && bad.saturating_mul(one_in) > all
        };
        let sent = packets.sent.saturating_sub(first.sent);
        let lost = packets.lost.saturating_sub(first.lost);
        let received = packets.received.saturating_sub(first.received);
        let disordered = packets.disordered.saturating_sub(first.disordered);
        if exceeds(sent, lost, HEAVY_ONE_IN) {
            return Loss::Heavy;
        }
        match exceeds(sent, lost, LOST_ONE_IN) || exceeds(received, disordered, DISORDERED_ONE_IN) {
            true => Loss::Some,
            false => Loss::Little,
        }
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
        for (sample, loss) in [
            (packets(999, 999, 999, 999), Loss::Little),
            (packets(10_000, 10, 0, 0), Loss::Little),
            (packets(10_000, 11, 0, 0), Loss::Some),
            (packets(10_000, 2000, 0, 0), Loss::Some),
            (packets(10_000, 2001, 0, 0), Loss::Heavy),
            (packets(0, 0, 10_000, 50), Loss::Little),
            (packets(0, 0, 10_000, 51), Loss::Some),
        ] {
            let mut meter = LossMeter::default();
            let now = Instant::now();
            assert_eq!(meter.sample(now, Packets::default()), Loss::Little);
            let later = now + Duration::from_secs(10);
            assert_eq!(meter.sample(later, sample), loss, "{sample:?}");
        }
    }

    #[test]
    fn loss_is_forgotten_after_a_minute() {
        let mut meter = LossMeter::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        meter.sample(at(0), Packets::default());
        assert_eq!(meter.sample(at(10), packets(5000, 100, 0, 0)), Loss::Some);
        assert_eq!(meter.sample(at(50), packets(9000, 100, 0, 0)), Loss::Some);
        for tenths in 6..20 {
            meter.sample(at(10 * tenths), packets(9000 + tenths * 1000, 100, 0, 0));
        }
        let last = meter.sample(at(200), packets(40_000, 100, 0, 0));
        assert_eq!(last, Loss::Little);
        assert!(meter.samples.len() < 10);
    }
}
