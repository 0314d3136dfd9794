//! Sequence numbers and windows of both directions of a flow, as seen on the wire. smoltcp has the same state
//! but does not expose it.

use std::time::{Duration, Instant};

use crate::ip::{self, HEADER, Segment, flags};

/// MSS of a remote end that does not send the option (RFC 9293, 3.7.1).
pub(crate) const DEFAULT_MSS: u16 = 536;

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Track {
    syn_sent: bool,
    /// Sequence numbers of the first unacknowledged byte and of the first byte never sent.
    unacknowledged: u32,
    sent: u32,
    acknowledged: u64,
    remote_window: u32,
    /// Window of the remote end as smoltcp knows it, see [`Self::window_for_repeats`].
    shown_window: u32,
    remote_shift: u8,
    /// Largest segment payload that the remote end accepts; 0 until known.
    remote_mss: u16,
    /// Last acknowledgement sent to the remote end, and the end of the window advertised with it.
    expected: u32,
    allowed: Option<u32>,
    local_shift: u8,
    /// Sequence number of the remote end's first byte, once known.
    first: Option<u32>,
    /// Set when a segment was repeated and nothing was acknowledged since.
    repeating: bool,
    /// Sequence number after the remote end's FIN.
    remote_end: Option<u32>,
    /// The segment used to measure a round trip: the sequence number after the segment, and the time when it
    /// was sent.
    sample: Option<(u32, Instant)>,
}

/// Limit for the window that a segment may advertise, and the sequence number of an acknowledgement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offer {
    sent: u32,
    share: u32,
    allowed: Option<u32>,
    shift: u8,
}

impl Offer {
    /// Returns the sequence number of an acknowledgement without data, when smoltcp would use `sequence`: at least the
    /// first byte never sent (RFC 9293, 3.10.7.4). During a repetition, smoltcp uses the next byte to
    /// repeat. The remote end may have this byte already, and then ignores the acknowledgement. If both ends repeat,
    /// neither ever accepts an acknowledgement of the other.
    pub(crate) fn sequence(self, sequence: u32) -> u32 {
        match before(sequence, self.sent) {
            true => self.sent,
            false => sequence,
        }
    }

    /// Returns the window to advertise in a segment with this `acknowledgement`, when smoltcp would advertise
    /// `window`. An advertised window shrinks by less than a unit of the window scale (RFC 9293, 3.8.6).
    ///
    /// smoltcp rounds its window down to a unit, so the end of its window may move back by less than a unit, and smoltcp
    /// discards bytes behind its end. The offer is one unit smaller, so smoltcp accepts every byte that was ever offered.
    pub(crate) fn window(self, acknowledgement: u32, window: u16) -> u16 {
        let kept = self.allowed.filter(|end| before(acknowledgement, *end));
        let kept = kept.map_or(0, |end| end.wrapping_sub(acknowledgement));
        let most = self.share.max(kept).div_ceil(1 << self.shift);
        window
            .saturating_sub(1)
            .min(u16::try_from(most).unwrap_or(u16::MAX))
    }
}

/// Header fields of a packet that smoltcp has emitted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Emitted {
    pub(crate) sequence: u32,
    pub(crate) acknowledgement: u32,
    pub(crate) flags: u8,
    pub(crate) window: u16,
    pub(crate) data: u32,
    /// Window scale of a SYN; 0 without the option.
    pub(crate) shift: u8,
}

impl Emitted {
    pub(super) fn of(packet: &[u8]) -> Option<Self> {
        let (_, tcp) = packet.split_first_chunk::<HEADER>()?;
        let (head, after) = tcp.split_first_chunk::<HEADER>()?;
        let options_len = (usize::from(head[12] >> 4) * 4).checked_sub(HEADER)?;
        let (options, data) = after.split_at_checked(options_len)?;
        Some(Self {
            sequence: u32::from_be_bytes([head[4], head[5], head[6], head[7]]),
            acknowledgement: u32::from_be_bytes([head[8], head[9], head[10], head[11]]),
            flags: head[13],
            window: u16::from_be_bytes([head[14], head[15]]),
            data: u32::try_from(data.len()).unwrap_or(u32::MAX),
            shift: ip::window_scale(options).unwrap_or(0),
        })
    }
}

/// True if sequence number `a` comes before `b`.
fn before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}

impl Track {
    /// Records a received segment. Returns the number of newly acknowledged bytes. Segments have at most `mss` bytes.
    pub(crate) fn input(&mut self, segment: &Segment<'_>, mss: usize) -> u32 {
        let mss = u32::try_from(mss).unwrap_or(u32::MAX);
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
            if syn {
                self.remote_window = segment.window().into();
                self.shown_window = self.remote_window;
            }
            return 0;
        }
        let acknowledgement = segment.acknowledgement();
        // A window probe, perhaps with a FIN, does not count as sent until it is acknowledged.
        let ahead = acknowledgement.wrapping_sub(self.sent);
        if self.shown_window == 0 && (1..=2).contains(&ahead) {
            self.sent = acknowledgement;
        }
        if before(self.sent, acknowledgement) || before(acknowledgement, self.unacknowledged) {
            return 0;
        }
        let shift = if syn { 0 } else { self.remote_shift };
        self.remote_window = u32::from(segment.window()) << shift;
        let newly = acknowledgement.wrapping_sub(self.unacknowledged);
        self.unacknowledged = acknowledgement;
        self.acknowledged += u64::from(newly);
        let repeats = self.in_flight().min(mss);
        self.shown_window = match self.remote_window < repeats {
            true => (repeats >> shift).max(1) << shift,
            false => self.remote_window,
        };
        self.repeating &= newly == 0;
        newly
    }

    /// True if the segment acknowledges only what was acknowledged before.
    pub(crate) fn acknowledges_nothing(&self, segment: &Segment<'_>) -> bool {
        segment.acknowledgement() == self.unacknowledged
    }

    /// Returns the round trip that an acknowledgement has completed, once per sample.
    pub(crate) fn round_trip(&mut self, now: Instant) -> Option<Duration> {
        let (end, sent_at) = self.sample?;
        if before(self.unacknowledged, end) {
            return None;
        }
        self.sample = None;
        Some(now.saturating_duration_since(sent_at))
    }

    /// True if the segment lies outside the window advertised to the remote end.
    pub(crate) fn outside_window(&self, segment: &Segment<'_>) -> bool {
        let first = segment.sequence();
        let end = first.wrapping_add(segment.length());
        self.allowed.is_some_and(|allowed| before(allowed, first))
            || (segment.length() > 0 && !before(self.expected, end) && !segment.has(flags::SYN))
    }

    /// True if the segment has bytes that a buffer of `capacity` bytes cannot store, after `read` bytes were read.
    pub(crate) fn is_beyond_buffer(
        &self,
        segment: &Segment<'_>,
        read: u32,
        capacity: usize,
    ) -> bool {
        let Some(first) = self.first.filter(|_| !segment.payload().is_empty()) else {
            return false;
        };
        let end = segment
            .sequence()
            .wrapping_add(segment.payload().len() as u32);
        let limit = first.wrapping_add(read).wrapping_add(capacity as u32);
        before(limit, end)
    }

    /// Returns the limit for the next advertised window.
    pub(crate) fn offer(&self, share: u32) -> Offer {
        Offer {
            sent: self.sent,
            share,
            allowed: self.allowed,
            shift: self.local_shift,
        }
    }

    /// Records an emitted segment. Returns true if the segment is a retransmission.
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
            self.expected = emitted.acknowledgement;
            let shift = if syn { 0 } else { self.local_shift };
            let window = u32::from(emitted.window) << shift;
            self.allowed = Some(emitted.acknowledgement.wrapping_add(window));
        }
        let fin = emitted.flags & flags::FIN != 0;
        let length = emitted.data + u32::from(syn || fin);
        // A keepalive's sequence number lies before the acknowledged bytes. A window probe is one byte
        // outside the window.
        let keepalive = before(emitted.sequence, self.unacknowledged);
        let probe = emitted.data == 1 && self.shown_window == 0;
        if length == 0 || keepalive || probe {
            return false;
        }
        let end = emitted.sequence.wrapping_add(length);
        // A repeated SYN does not count as a loss: the remote end may have to dial before it answers.
        let repeated = before(emitted.sequence, self.sent) && !syn;
        if before(self.sent, end) {
            self.sent = end;
        }
        if repeated {
            self.repeating = true;
            self.sample = None;
        } else if self.sample.is_none() && !syn {
            self.sample = Some((end, now));
        }
        repeated
    }

    pub(crate) fn syn_sent(&self) -> bool {
        self.syn_sent
    }

    /// Returns the first sequence number that was never sent.
    pub(crate) fn sent(&self) -> u32 {
        self.sent
    }

    /// Returns the sequence number of the remote end's first byte, once known.
    pub(crate) fn first(&self) -> Option<u32> {
        self.first
    }

    /// Returns the sequence number acknowledged last to the remote end.
    pub(crate) fn expected(&self) -> u32 {
        self.expected
    }

    /// True if the remote end's FIN was acknowledged.
    pub(crate) fn end_is_acknowledged(&self) -> bool {
        self.remote_end == Some(self.expected)
    }

    pub(crate) fn is_repeating(&self) -> bool {
        self.repeating
    }

    pub(crate) fn in_flight(&self) -> u32 {
        self.sent.wrapping_sub(self.unacknowledged)
    }

    /// True if `sequence` is in flight. An ICMP error is trusted only if it quotes such a sequence number.
    pub(crate) fn is_in_flight(&self, sequence: u32) -> bool {
        sequence.wrapping_sub(self.unacknowledged) < self.in_flight()
    }

    pub(crate) fn acknowledged(&self) -> u64 {
        self.acknowledged
    }

    /// Returns the largest segment payload that the remote end accepts; 0 until known.
    pub(super) fn remote_mss(&self) -> u16 {
        self.remote_mss
    }

    /// Returns the window that smoltcp must see in a segment, if the segment's own window is smaller than the bytes in
    /// flight: room for one segment of these bytes, in whole units of the window scale. smoltcp stops its retransmission
    /// timer at a window of 0, also with bytes in flight, and might never send them again. RFC 9293, 3.8.6, permits a
    /// sender to repeat what it has sent before the window shrank. Call after [`Self::input`].
    pub(crate) fn window_for_repeats(&self, segment: &Segment<'_>) -> Option<u16> {
        let is_latest = segment.has(flags::ACK)
            && !segment.has(flags::SYN | flags::RST)
            && segment.acknowledgement() == self.unacknowledged;
        let window = u16::try_from(self.shown_window >> self.remote_shift).unwrap_or(u16::MAX);
        (is_latest && self.shown_window > self.remote_window).then_some(window)
    }

    pub(crate) fn remote_window(&self) -> usize {
        usize::try_from(self.remote_window).unwrap_or(usize::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_acknowledgement_follows_all_sent_bytes() {
        let sent = 5_u32;
        let offer = Track {
            sent,
            ..Track::default()
        }
        .offer(0);
        for (sequence, expected) in [(sent.wrapping_sub(9), sent), (sent, sent), (6, 6)] {
            assert_eq!(offer.sequence(sequence), expected);
        }
    }

    #[test]
    fn a_window_is_no_larger_than_the_share_and_never_shrinks() {
        let offer = |share, allowed| Offer {
            sent: 0,
            share,
            allowed,
            shift: 4,
        };
        // Without an earlier window only the share counts, for any acknowledgement number.
        for acknowledgement in [0, 5, 1 << 31, u32::MAX] {
            let window = offer(16_000, None).window(acknowledgement, 32_768);
            assert_eq!(window, 1000);
        }
        // Half of the advertised window is used.
        let end = 100_u32;
        let acknowledgement = end.wrapping_sub(32_000);
        assert_eq!(offer(16_000, Some(end)).window(acknowledgement, 9000), 2000);
        assert_eq!(offer(48_000, Some(end)).window(acknowledgement, 9000), 3000);
        // The whole window is used, and then exceeded.
        assert_eq!(offer(16_000, Some(end)).window(end, 9000), 1000);
        assert_eq!(offer(16_000, Some(end)).window(end + 1000, 9000), 1000);
        // smoltcp's buffer has less room than the share.
        assert_eq!(offer(u32::MAX, None).window(end, 9), 8);
        assert_eq!(offer(u32::MAX, None).window(end, 0), 0);
    }
}
