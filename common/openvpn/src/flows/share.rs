//! What flows share: the window that all who receive are told, and what all who send may have on the way.
//!
//! A stock peer reads its tun device when its link leaves it time to. Until then packets wait in the device's queue, 500 in
//! Linux, and are lost where that is full: bytes of several senders with a whole window each, and acknowledgements of
//! what came too fast. Owns the count of the flows that move.

use std::time::{Duration, Instant};

/// A flow that moved nothing for this long, or twice as long, leaves its share to others.
const SLOT: Duration = Duration::from_millis(50);

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
            slot: 1,
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

    /// What each may have, in bytes.
    pub(super) fn each(&self) -> u32 {
        let moving = self.current.max(self.before).max(1);
        u32::try_from((self.budget / moving).max(self.least)).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_that_move_share_it() {
        let start = Instant::now();
        let mut share = Share::new(1000, 100, start);
        let mut marks = [0; 20];
        assert_eq!(share.each(), 1000);
        for mark in marks.iter_mut().take(4) {
            share.moved(mark, start);
            share.moved(mark, start);
        }
        assert_eq!(share.each(), 250);
        for mark in &mut marks {
            share.moved(mark, start);
        }
        assert_eq!(share.each(), 100);
        // One goes on: the others' shares are its own in the slot after the next.
        let [first, ..] = &mut marks;
        share.moved(first, start + SLOT);
        assert_eq!(share.each(), 100);
        share.moved(first, start + 2 * SLOT);
        assert_eq!(share.each(), 1000);
        share.moved(first, start + 9 * SLOT);
        assert_eq!(share.each(), 1000);
    }
}
