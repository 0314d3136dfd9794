//! What flows share: the window that all who receive are told, and what all who send may have on the way.
//!
//! A stock peer reads its tun device when its link leaves it time to. Until then packets wait in the device's queue, 500 in
//! Linux, and are lost where that is full: bytes of several senders with a whole window each, and acknowledgements of
//! what came too fast. Owns the count of the flows that move.

use std::time::{Duration, Instant};

/// A flow that moved nothing for this long, or twice as long, leaves its share to others.
const SLOT: Duration = Duration::from_millis(50);

/// What a flow may have before it has moved anything: as much as a SYN can tell.
const FIRST: usize = 64 << 10;

/// See the module.
#[derive(Debug)]
pub(super) struct Share {
    budget: usize,
    least: usize,
    slot: u64,
    until: Instant,
    /// Flows that have moved something in this slot, and in the one before.
    current: usize,
    before: usize,
}

impl Share {
    /// `budget` bytes for all, but never less than `least` for one.
    pub(super) fn new(budget: usize, least: usize, now: Instant) -> Self {
        Self {
            budget,
            least,
            // Beyond what a flow begins with, as one that rests.
            slot: 2,
            until: now + SLOT,
            current: 0,
            before: 0,
        }
    }

    /// A flow has moved something; `last` is the slot in which it did so before.
    pub(super) fn moved(&mut self, last: &mut u64, now: Instant) {
        if now >= self.until {
            let rested = now >= self.until + SLOT;
            self.before = if rested { 0 } else { self.current };
            self.current = 0;
            self.slot += 1;
            self.until = now + SLOT;
        }
        if *last != self.slot {
            *last = self.slot;
            self.current += 1;
        }
    }

    /// What a flow may have, in bytes, that has moved something in the slot `last`. One that rests, or has only begun, may
    /// be one of many that do: it gets little.
    pub(super) fn of(&self, last: u64) -> u32 {
        if self.budget == usize::MAX {
            return u32::MAX;
        }
        let mut share = self.budget / self.current.max(self.before).max(1);
        if last + 1 < self.slot {
            share = share.min(FIRST);
        }
        u32::try_from(share.max(self.least)).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_that_move_share_it() {
        let start = Instant::now();
        let mut share = Share::new(1 << 20, 50_000, start);
        let mut marks = [0; 30];
        assert_eq!(share.of(0), 65_536);
        for mark in marks.iter_mut().take(4) {
            share.moved(mark, start);
            share.moved(mark, start);
        }
        let [first, .., last] = &mut marks;
        assert_eq!((share.of(*first), share.of(*last)), (262_144, 65_536));
        for mark in &mut marks {
            share.moved(mark, start);
        }
        let [first, other, ..] = &mut marks;
        assert_eq!(share.of(*first), 50_000);
        // One goes on: the others' shares are its own in the slot after the next.
        share.moved(first, start + SLOT);
        assert_eq!(share.of(*first), 50_000);
        share.moved(first, start + 2 * SLOT);
        assert_eq!((share.of(*first), share.of(*other)), (1 << 20, 65_536));
        share.moved(first, start + 9 * SLOT);
        assert_eq!(share.of(*first), 1 << 20);
        assert_eq!(Share::new(usize::MAX, 1, start).of(0), u32::MAX);
    }
}
