//! What both directions of a flow look like on the wire. smoltcp knows it, too, but keeps it to
//! itself. Owns sequence numbers and windows.

use std::time::{Duration, Instant};

use super::device::Emitted;
use crate::ip::{Segment, flags};

/// What one takes in a segment who does not say (RFC 9293, 3.7.1).
pub(crate) const DEFAULT_MSS: u16 = 536;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Track {
    syn_sent: bool,
    /// The first byte that is not acknowledged, and the first that was never sent.
    unacknowledged: u32,
    sent: u32,
    acknowledged: u64,
    remote_window: u32,
    remote_shift: u8,
    /// The largest payload that the other side takes in a segment; 0 until it is known.
    remote_mss: u16,
    /// What was acknowledged to the other side, and the end of the window that it was given with it.
    expected: u32,
    allowed: Option<u32>,
    local_shift: u8,
    /// The other side's first byte, once it is known.
    first: Option<u32>,
    /// It was told a window in a segment other than a SYN.
    window_told: bool,
    /// Something was repeated since bytes were acknowledged last.
    repeating: bool,
    /// The sequence number behind the other side's FIN.
    remote_end: Option<u32>,
    /// A segment whose round trip is measured: the sequence number behind it, and when it left.
    sample: Option<(u32, Instant)>,
}

/// The largest window that a segment may tell.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offer {
    share: u32,
    allowed: Option<u32>,
    shift: u8,
}

impl Offer {
    /// The window to tell in a segment that acknowledges `acknowledgement`, where smoltcp wants to tell `window`. What was
    /// told before is not taken back (RFC 9293, 3.8.6).
    pub(crate) fn window(self, acknowledgement: u32, window: u16) -> u16 {
        let kept = self.allowed.filter(|end| before(acknowledgement, *end));
        let kept = kept.map_or(0, |end| end.wrapping_sub(acknowledgement));
        let most = self.share.max(kept).div_ceil(1 << self.shift);
        window.min(u16::try_from(most).unwrap_or(u16::MAX))
    }
}

/// `a` comes before `b`.
fn before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}

impl Track {
    pub(crate) fn new() -> Self {
        Self {
            syn_sent: false,
            unacknowledged: 0,
            sent: 0,
            acknowledged: 0,
            remote_window: 0,
            remote_shift: 0,
            remote_mss: 0,
            expected: 0,
            allowed: None,
            local_shift: 0,
            first: None,
            window_told: false,
            repeating: false,
            remote_end: None,
            sample: None,
        }
    }

    /// Notes a segment that came. Returns how many bytes it newly acknowledges.
    pub(crate) fn input(&mut self, segment: &Segment<'_>) -> u32 {
        if segment.has(flags::RST) {
            return 0;
        }
        if segment.has(flags::FIN) {
            self.remote_end = Some(segment.sequence().wrapping_add(segment.length()));
        }
        let syn = segment.has(flags::SYN);
        if syn {
            let first = segment.sequence().wrapping_add(1);
            self.first.get_or_insert(first);
            self.remote_shift = segment.window_scale().unwrap_or(0);
            self.remote_mss = segment.mss().unwrap_or(DEFAULT_MSS);
            if segment.window_scale().is_none() {
                self.local_shift = 0;
            }
        }
        if !segment.has(flags::ACK) {
            self.remote_window = segment.window().into();
            return 0;
        }
        let acknowledgement = segment.acknowledgement();
        if before(self.sent, acknowledgement) || before(acknowledgement, self.unacknowledged) {
            return 0;
        }
        let shift = if syn { 0 } else { self.remote_shift };
        self.remote_window = u32::from(segment.window()) << shift;
        let newly = acknowledgement.wrapping_sub(self.unacknowledged);
        self.unacknowledged = acknowledgement;
        self.acknowledged += u64::from(newly);
        self.repeating &= newly == 0;
        newly
    }

    /// The round trip that an acknowledgement has completed, once.
    pub(crate) fn round_trip(&mut self, now: Instant) -> Option<Duration> {
        let (behind, left) = self.sample?;
        if before(self.unacknowledged, behind) {
            return None;
        }
        self.sample = None;
        Some(now.saturating_duration_since(left))
    }

    /// Whether a segment lies outside of the window that the other side was given.
    pub(crate) fn outside_window(&self, segment: &Segment<'_>) -> bool {
        let first = segment.sequence();
        let behind = first.wrapping_add(segment.length());
        self.allowed.is_some_and(|end| before(end, first))
            || (segment.length() > 0 && !before(self.expected, behind) && !segment.has(flags::SYN))
    }

    /// Whether a segment ends behind the window of the own SYN while no other was told. smoltcp scales that one, too,
    /// and would take more than its buffer holds.
    pub(crate) fn is_behind_first_window(&self, segment: &Segment<'_>) -> bool {
        let behind = segment.sequence().wrapping_add(segment.length());
        let end = self.first.map(|first| first.wrapping_add(u16::MAX.into()));
        !self.window_told && end.is_some_and(|end| before(end, behind))
    }

    /// What the other side is told at most.
    pub(crate) fn offer(&self, share: u32) -> Offer {
        Offer {
            share,
            allowed: self.allowed,
            shift: self.local_shift,
        }
    }

    /// Notes a segment that was made. Returns whether it repeats another one.
    pub(crate) fn output(&mut self, emitted: &Emitted, now: Instant) -> bool {
        if emitted.flags & flags::RST != 0 {
            return false;
        }
        let syn = emitted.flags & flags::SYN != 0;
        if syn {
            if !self.syn_sent {
                self.syn_sent = true;
                self.unacknowledged = emitted.sequence;
                self.sent = emitted.sequence;
            }
            self.local_shift = emitted.shift;
        }
        if emitted.flags & flags::ACK != 0 {
            self.window_told |= !syn;
            self.expected = emitted.acknowledgement;
            let shift = if syn { 0 } else { self.local_shift };
            let window = u32::from(emitted.window) << shift;
            self.allowed = Some(emitted.acknowledgement.wrapping_add(window));
        }
        let fin = emitted.flags & flags::FIN != 0;
        let length = emitted.data + u32::from(syn || fin);
        // Keepalives lie before what is acknowledged, window probes are a byte that does not fit.
        let keepalive = before(emitted.sequence, self.unacknowledged);
        let probe = emitted.data == 1 && self.remote_window == 0;
        if length == 0 || keepalive || probe {
            return false;
        }
        let behind = emitted.sequence.wrapping_add(length);
        // A SYN is repeated because the other side takes its time, too: it may have to dial first.
        let repeated = before(emitted.sequence, self.sent) && !syn;
        if before(self.sent, behind) {
            self.sent = behind;
        }
        if repeated {
            self.repeating = true;
            self.sample = None;
        } else if self.sample.is_none() && !syn {
            self.sample = Some((behind, now));
        }
        repeated
    }

    pub(crate) fn syn_sent(&self) -> bool {
        self.syn_sent
    }

    /// The first sequence number that was never sent.
    pub(crate) fn sent(&self) -> u32 {
        self.sent
    }

    /// The next byte that is expected of the other side, as it was told.
    pub(crate) fn expected(&self) -> u32 {
        self.expected
    }

    /// The other side knows that its end has arrived.
    pub(crate) fn end_is_acknowledged(&self) -> bool {
        self.remote_end == Some(self.expected)
    }

    pub(crate) fn is_repeating(&self) -> bool {
        self.repeating
    }

    pub(crate) fn in_flight(&self) -> u32 {
        self.sent.wrapping_sub(self.unacknowledged)
    }

    /// A sequence number that is on its way: what an ICMP error has to quote to be believed.
    pub(crate) fn is_in_flight(&self, sequence: u32) -> bool {
        sequence.wrapping_sub(self.unacknowledged) < self.in_flight()
    }

    pub(crate) fn acknowledged(&self) -> u64 {
        self.acknowledged
    }

    /// The largest payload that the other side takes in a segment; 0 until it is known.
    pub(super) fn remote_mss(&self) -> u16 {
        self.remote_mss
    }

    pub(crate) fn remote_window(&self) -> usize {
        usize::try_from(self.remote_window).unwrap_or(usize::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_no_larger_than_the_share_and_never_taken_back() {
        let offer = |share, allowed| Offer {
            share,
            allowed,
            shift: 4,
        };
        // Nothing was told before, whatever the numbers are.
        for acknowledgement in [0, 5, 1 << 31, u32::MAX] {
            let window = offer(16_000, None).window(acknowledgement, 32_768);
            assert_eq!(window, 1000);
        }
        // Half of what was told is used.
        let end = 100_u32;
        let acknowledgement = end.wrapping_sub(32_000);
        assert_eq!(offer(16_000, Some(end)).window(acknowledgement, 9000), 2000);
        assert_eq!(offer(48_000, Some(end)).window(acknowledgement, 9000), 3000);
        // All of it is, and more.
        assert_eq!(offer(16_000, Some(end)).window(end, 9000), 1000);
        assert_eq!(offer(16_000, Some(end)).window(end + 1000, 9000), 1000);
        // The buffer has no room for more.
        assert_eq!(offer(u32::MAX, None).window(end, 9), 9);
    }
}
