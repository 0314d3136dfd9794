//! What flows share: the window that all who receive are told, and what all who send may have on the way.
//!
//! A stock peer reads its tun device when its link leaves it time to. Until then packets wait in the device's queue, 500 in
//! Linux, and are lost where that is full: bytes of several senders with a whole window each, and acknowledgements of
//! what came too fast. Owns the count of the flows that move.
//!
//! A flow between two programs of ours that have agreed on large packets passes no such queue, and takes no share.

use std::time::{Duration, Instant};

/// A flow that moved nothing for this long, or twice as long, leaves its share to others.
const SLOT: Duration = Duration::from_millis(50);

/// What a flow may have before it has moved anything: as much as a SYN can tell.
const FIRST: usize = 64 << 10;

/// What a flow may have in any case: four segments of a path of 1500 bytes.
const LEAST: usize = 4 * 1460;

/// In place of the slot of a flow that takes no share.
pub(crate) const APART: u64 = u64::MAX;

/// See the module.
#[derive(Debug)]
pub(super) struct Share {
    budget: usize,
    slot: u64,
    until: Instant,
    /// Flows that have moved something in this slot, and in the one before.
    current: usize,
    before: usize,
}

impl Share {
    /// `budget` bytes for all.
    pub(super) fn new(budget: usize, now: Instant) -> Self {
        Self {
            budget,
            // Beyond what a flow begins with, as one that rests.
            slot: 2,
            until: now + SLOT,
            current: 0,
            before: 0,
        }
    }

    /// A flow has moved something; `last` is the slot in which it did so before.
    pub(super) fn moved(&mut self, last: &mut u64, now: Instant) {
        if *last == APART {
            return;
        }
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
        if last == APART {
            return u32::MAX;
        }
        let mut share = self.budget / self.current.max(self.before).max(1);
        if last + 1 < self.slot {
            share = share.min(FIRST);
        }
        u32::try_from(share.max(LEAST)).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_that_move_share_it() {
        let start = Instant::now();
        let mut share = Share::new(1 << 20, start);
        let mut marks = [0; 300];
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
        assert_eq!(share.of(*first), LEAST as u32);
        // One goes on: the others' shares are its own in the slot after the next.
        share.moved(first, start + SLOT);
        assert_eq!(share.of(*first), LEAST as u32);
        share.moved(first, start + 2 * SLOT);
        assert_eq!((share.of(*first), share.of(*other)), (1 << 20, 65_536));
        share.moved(first, start + 9 * SLOT);
        assert_eq!(share.of(*first), 1 << 20);
        let mut apart = APART;
        share.moved(&mut apart, start + 9 * SLOT);
        assert_eq!((apart, share.of(apart)), (APART, u32::MAX));
        assert_eq!(share.of(*first), 1 << 20);
    }
}
