//! The decision to wait for more packets of a TCP peer, so that one turn reads many packets.
//!
//! A stock peer writes packet by packet, and an otherwise idle task reads packet by packet: each packet then
//! costs a system call, an acknowledgement, and a write. While a peer sends in bulk, its socket therefore
//! wakes the task only at the mark of [`LOW_WATER`] bytes. Bulk traffic reaches the mark in a fraction of
//! [`WINDOW`], so a packet in between is delayed by at most this fraction. A whole window without a read ends
//! the bulk phase, and the task then reads the remaining bytes.

use std::time::Duration;

use super::Moment;

/// Bytes for which a socket waits during bulk traffic.
pub(super) const LOW_WATER: u16 = 16 << 10;

/// Length of the measuring window, and the longest time for which bytes wait.
const WINDOW: Duration = Duration::from_millis(1);

/// Smallest number of bytes per window that counts as bulk traffic: enough to reach the mark four times.
const BULK: usize = 4 * LOW_WATER as usize;

/// Smallest average size of reads, in bytes, for which waiting saves nothing. Culvert peers write this much at
/// once.
const LARGE: usize = LOW_WATER as usize / 2;

/// Read statistics of one peer.
#[derive(Debug)]
pub(super) struct Batching {
    /// True while the socket waits for the mark.
    waits: bool,
    /// Start of the current window.
    since: Moment,
    reads: usize,
    bytes: usize,
    /// Time of the last read.
    last: Moment,
}

impl Batching {
    pub(super) fn new(now: Moment) -> Self {
        Self {
            waits: false,
            since: now,
            reads: 0,
            bytes: 0,
            last: now,
        }
    }

    /// Counts a read. Returns `Some(true)` if the mark must be set now, and `Some(false)` if the mark must be
    /// cleared.
    pub(super) fn read(&mut self, bytes: usize, now: Moment) -> Option<bool> {
        self.last = now;
        self.reads += 1;
        self.bytes += bytes;
        let elapsed = now.saturating_duration_since(self.since);
        if elapsed < WINDOW {
            return None;
        }
        let is_bulk = self.bytes as f64 >= BULK as f64 * elapsed.div_duration_f64(WINDOW);
        let is_small = self.bytes < LARGE * self.reads;
        let waits = is_bulk && (is_small || self.waits);
        self.since = now;
        (self.reads, self.bytes) = (0, 0);
        self.change(waits)
    }

    /// Returns the time of the next call of [`expired`](Self::expired).
    pub(super) fn poll_timeout(&self) -> Option<Moment> {
        self.waits.then(|| self.last + WINDOW)
    }

    /// Returns true if the mark must be cleared because a whole window passed without a read.
    pub(super) fn expired(&mut self, now: Moment) -> bool {
        self.poll_timeout().is_some_and(|at| at <= now) && self.change(false).is_some()
    }

    fn change(&mut self, waits: bool) -> Option<bool> {
        (std::mem::replace(&mut self.waits, waits) != waits).then_some(waits)
    }
}

#[cfg(test)]
mod tests {
    use super::super::now;
    use super::*;

    /// Reads `bytes` at intervals of `apart` for eight windows, and returns the changes of the mark.
    fn reads(batching: &mut Batching, at: &mut Moment, bytes: usize, apart: Duration) -> Vec<bool> {
        let end = *at + 8 * WINDOW;
        let mut changes = Vec::new();
        while *at < end {
            *at += apart;
            changes.extend(batching.read(bytes, *at));
        }
        changes
    }

    #[test]
    fn mark_is_set_during_bulk_and_cleared_after_it() {
        let mut at = now();
        let mut batching = Batching::new(at);
        let packet = Duration::from_micros(14);
        assert_eq!(reads(&mut batching, &mut at, 1450, packet), [true]);
        let batch = Duration::from_micros(160);
        assert!(reads(&mut batching, &mut at, 16 << 10, batch).is_empty());
        let last = at;
        assert_eq!(batching.poll_timeout(), Some(last + WINDOW));
        assert!(!batching.expired(last + WINDOW / 2));
        assert!(batching.expired(last + WINDOW));
        assert_eq!(batching.poll_timeout(), None);
        assert!(!batching.expired(last + WINDOW));
        // Bulk traffic that starts again sets the mark again.
        at += WINDOW;
        assert_eq!(reads(&mut batching, &mut at, 1450, packet), [true]);
    }

    #[test]
    fn mark_stays_clear_without_small_packets_in_bulk() {
        for (what, bytes, apart) in [
            ("acknowledgements of an upload", 100, 14),
            ("data in large pieces", 64 << 10, 100),
            ("a slow transfer", 1450, 100),
        ] {
            let mut at = now();
            let mut batching = Batching::new(at);
            let apart = Duration::from_micros(apart);
            assert!(
                reads(&mut batching, &mut at, bytes, apart).is_empty(),
                "{what}"
            );
        }
    }

    #[test]
    fn mark_is_cleared_when_bulk_becomes_slow() {
        let mut at = now();
        let mut batching = Batching::new(at);
        let packet = Duration::from_micros(14);
        assert_eq!(reads(&mut batching, &mut at, 1450, packet), [true]);
        let slow = Duration::from_micros(900);
        assert_eq!(reads(&mut batching, &mut at, 16 << 10, slow), [false]);
    }
}
