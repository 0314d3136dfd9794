//! Budgets shared by flows: the receive windows of all receiving flows, and the bytes in flight of all
//! sending flows.
//!
//! A stock peer reads its tun device only when the peer is not busy with its link. Until then packets wait in
//! the device's queue, 500 packets in Linux, and are lost when the queue is full. The queue fills with data of
//! several senders that each use a whole window, or with acknowledgements for data that arrived too fast.
//! `Share` owns the count of active flows.
//!
//! A flow between two Culvert programs with large packets passes no such queue, and is exempt.

use std::time::{Duration, Instant};

/// Length of a slot. A flow that moves no data for one to two slots leaves its share to other flows.
const SLOT: Duration = Duration::from_millis(50);

/// Largest share of a flow that has not moved data recently, in bytes: the window limit of a SYN.
const FIRST: usize = 64 << 10;

/// Smallest share of a flow, in bytes: four segments of a path of 1500 bytes.
const LEAST: usize = 4 * 1460;

/// Marker in place of the slot number for a flow that is exempt.
pub(crate) const NO_SHARE: u64 = u64::MAX;

/// A budget and the number of active flows; see the module documentation.
#[derive(Debug)]
pub(super) struct Share {
    budget: usize,
    slot: u64,
    until: Instant,
    /// Flows that moved data in the current slot, and in the slot before.
    current: usize,
    before: usize,
}

impl Share {
    /// Creates a budget of `budget` bytes for all flows.
    pub(super) fn new(budget: usize, now: Instant) -> Self {
        Self {
            budget,
            // Flows start with slot 0; two slots later they count as resting.
            slot: 2,
            until: now + SLOT,
            current: 0,
            before: 0,
        }
    }

    /// Records that a flow has moved data. `last` is the flow's last active slot.
    pub(super) fn moved(&mut self, last: &mut u64, now: Instant) {
        if *last == NO_SHARE {
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

    /// Returns the share of a flow in bytes; `last` is the flow's last active slot. A resting or new flow
    /// gets little, because many such flows may become active at once.
    pub(super) fn of(&self, last: u64) -> u32 {
        if last == NO_SHARE {
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
    fn active_flows_share_the_budget() {
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
        // Only one flow continues: after a full idle slot the shares of the other flows are free.
        share.moved(first, start + SLOT);
        assert_eq!(share.of(*first), LEAST as u32);
        share.moved(first, start + 2 * SLOT);
        assert_eq!((share.of(*first), share.of(*other)), (1 << 20, 65_536));
        share.moved(first, start + 9 * SLOT);
        assert_eq!(share.of(*first), 1 << 20);
        let mut exempt = NO_SHARE;
        share.moved(&mut exempt, start + 9 * SLOT);
        assert_eq!((exempt, share.of(exempt)), (NO_SHARE, u32::MAX));
        assert_eq!(share.of(*first), 1 << 20);
    }
}
