//! Whether a TCP peer's packets are worth waiting for, so that one turn takes many.
//!
//! A stock peer writes packet by packet, and a task that has nothing else to do takes them one by one:
//! a system call for each packet, its acknowledgement and its bytes. While a peer sends in bulk its
//! socket wakes the task at [`LOW_WATER`] instead. That bulk fills it in a fraction of [`WINDOW`], and
//! that is how much later anything between it is taken. Once nothing is taken for a whole window, the
//! bulk has ended, and what it left is taken.

use std::time::Duration;

use super::Moment;

/// Bytes that a socket waits for.
pub(super) const LOW_WATER: u16 = 16 << 10;

/// Over which time a peer is judged, and the longest time for which bytes wait.
const WINDOW: Duration = Duration::from_millis(1);

/// Bytes in a window that are bulk: they reach the mark four times in it.
const BULK: usize = 4 * LOW_WATER as usize;

/// Bytes in a read that saves nothing if it waits: our own peers write that much at once.
const LARGE: usize = LOW_WATER as usize / 2;

/// One peer's reads.
#[derive(Debug)]
pub(super) struct Batching {
    /// The mark is set.
    waits: bool,
    /// When this window began.
    since: Moment,
    reads: usize,
    bytes: usize,
    /// Of the last read.
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

    /// Counts a read. Says whether the mark is to be set or lowered, if that changes.
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

    /// When [`expired`](Self::expired) is to be asked.
    pub(super) fn poll_timeout(&self) -> Option<Moment> {
        self.waits.then(|| self.last + WINDOW)
    }

    /// Whether the mark is to be lowered: nothing was read for a window.
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

    /// Reads of that size, that far apart, for some windows: the changes.
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
    fn packets_in_bulk_are_waited_for_until_they_stop() {
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
        // And again.
        at += WINDOW;
        assert_eq!(reads(&mut batching, &mut at, 1450, packet), [true]);
    }

    #[test]
    fn nothing_else_is_waited_for() {
        for (what, bytes, apart) in [
            ("acknowledgements of an upload", 100, 14),
            ("what comes in large pieces anyway", 64 << 10, 100),
            ("a transfer that takes its time", 1450, 100),
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
    fn a_bulk_that_becomes_slow_is_not_waited_for() {
        let mut at = now();
        let mut batching = Batching::new(at);
        let packet = Duration::from_micros(14);
        assert_eq!(reads(&mut batching, &mut at, 1450, packet), [true]);
        let slow = Duration::from_micros(900);
        assert_eq!(reads(&mut batching, &mut at, 16 << 10, slow), [false]);
    }
}
