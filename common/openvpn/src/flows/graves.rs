//! Flows that are gone but not yet forgotten: TIME-WAIT, without the buffers.
//!
//! Owns the tuples that a dial must not use again for a while, and what repeated
//! segments are answered with.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::tuple::{Key, Keyed, Table};

/// As long as Linux keeps its TIME-WAIT at the other end.
const KEPT_FOR: Duration = Duration::from_secs(60);
/// Beyond it the oldest is forgotten earlier. Less than there are ports, so that there always is
/// one for a destination with few open flows.
const MAX_GRAVES: usize = 16 << 10;

/// The last words: own sequence number, and the next that was expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Last {
    pub(crate) sequence: u32,
    pub(crate) expected: u32,
}

#[derive(Debug)]
pub(crate) struct Graves {
    table: Table<Key, (Instant, Option<Last>)>,
    oldest: VecDeque<(Instant, Key)>,
}

impl Graves {
    pub(crate) fn new(keyed: Keyed) -> Self {
        Self {
            table: Table::with_hasher(keyed),
            oldest: VecDeque::new(),
        }
    }

    pub(crate) fn add(&mut self, key: Key, last: Option<Last>, now: Instant) {
        while self.oldest.len() >= MAX_GRAVES {
            self.forget_oldest();
        }
        let until = now + KEPT_FOR;
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

    /// What a flow that ended well says to those who have not heard it.
    pub(crate) fn last(&self, key: Key) -> Option<Last> {
        self.table.get(&key).and_then(|(_, last)| *last)
    }

    /// The tuple is used again.
    pub(crate) fn remove(&mut self, key: Key) {
        self.table.remove(&key);
    }

    fn forget_oldest(&mut self) {
        // The tuple may have been used, and buried, once more since.
        if let Some((until, key)) = self.oldest.pop_front()
            && self.table.get(&key).is_some_and(|(at, _)| *at == until)
        {
            self.table.remove(&key);
        }
    }
}
