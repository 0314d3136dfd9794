//! Flows that have ended but stay reserved for a while: TIME-WAIT without the buffers.
//!
//! Owns the tuples that a dial must not reuse yet, and the sequence numbers for answers to repeated segments.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::tuple::{Key, Keyed, Table};

/// Reservation time: as long as Linux keeps TIME-WAIT at the remote end.
const RESERVED_FOR: Duration = Duration::from_secs(60);
/// Largest number of entries; beyond this number the oldest entry is dropped early. Smaller than the number
/// of ports, so that a destination with few open flows always has a free port.
const MAX_ENTRIES: usize = 16 << 10;

/// Sequence numbers of the last segment: the flow's own number, and the next expected number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Last {
    pub(crate) sequence: u32,
    pub(crate) expected: u32,
}

#[derive(Debug)]
pub(crate) struct TimeWait {
    table: Table<Key, (Instant, Option<Last>)>,
    oldest: VecDeque<(Instant, Key)>,
}

impl TimeWait {
    pub(crate) fn new(keyed: Keyed) -> Self {
        Self {
            table: Table::with_hasher(keyed),
            oldest: VecDeque::new(),
        }
    }

    pub(crate) fn add(&mut self, key: Key, last: Option<Last>, now: Instant) {
        while self.oldest.len() >= MAX_ENTRIES {
            self.forget_oldest();
        }
        let until = now + RESERVED_FOR;
        self.table.insert(key, (until, last));
        self.oldest.push_back((until, key));
    }

    pub(crate) fn expire(&mut self, now: Instant) {
        while self.oldest.front().is_some_and(|(until, _)| *until <= now) {
            self.forget_oldest();
        }
    }

    pub(crate) fn contains(&self, key: Key) -> bool {
        self.table.contains_key(&key)
    }

    /// Returns the last sequence numbers, if the flow ended normally. The numbers are needed to answer a
    /// remote end that missed the last acknowledgement.
    pub(crate) fn last(&self, key: Key) -> Option<Last> {
        self.table.get(&key).and_then(|(_, last)| *last)
    }

    /// Removes a tuple that is used again.
    pub(crate) fn remove(&mut self, key: Key) {
        self.table.remove(&key);
    }

    fn forget_oldest(&mut self) {
        // Another flow with this tuple may have ended later; its entry stays.
        if let Some((until, key)) = self.oldest.pop_front()
            && self.table.get(&key).is_some_and(|(at, _)| *at == until)
        {
            self.table.remove(&key);
        }
    }
}
