//! What all streams of one connection together may hold for a peer that does not read.
//!
//! Each stream has bounds of its own, but a peer that opens a thousand streams makes a thousand times
//! that. So streams draw on an amount for all of them. Nobody notices it while half of it is left;
//! from then on each may take less at a time, and a little always: none starves another.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What a stream may take at a time however much is held.
pub const LEAST_BYTES: usize = 4 * 1024;

/// The part of what is left that one stream may take at a time.
const PARTS: usize = 32;

/// The amount, and how much of it is held.
#[derive(Debug)]
pub struct Allowance {
    total: usize,
    held: AtomicUsize,
}

/// Bytes that are held until this is dropped.
#[derive(Debug)]
pub struct Held {
    allowance: Arc<Allowance>,
    bytes: usize,
}

// === impl Allowance ===

impl Allowance {
    /// Of `total` bytes, and twice [`LEAST_BYTES`] beyond them for each stream.
    pub fn new(total: usize) -> Arc<Self> {
        Arc::new(Self {
            total,
            held: AtomicUsize::new(0),
        })
    }

    /// How many bytes a stream may take at a time; `None` while there is plenty. A stream that may
    /// not take what it likes has one part in its queue at most.
    pub fn limit(&self) -> Option<usize> {
        let left = self.total.saturating_sub(self.held());
        (left < self.total / 2).then(|| (left / PARTS).max(LEAST_BYTES))
    }

    /// Holds `bytes`, whatever the limit is: they were read already.
    pub fn hold(self: &Arc<Self>, bytes: usize) -> Held {
        self.held.fetch_add(bytes, Ordering::Relaxed);
        Held {
            allowance: self.clone(),
            bytes,
        }
    }

    /// Bytes held at this moment.
    pub fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.allowance.held.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn nobody_is_limited_before_half_is_held_and_everybody_gets_a_little() {
        let allowance = Allowance::new(1 << 20);
        let first = allowance.hold(1 << 19);
        assert_eq!(allowance.limit(), None);
        let second = allowance.hold(1);
        assert_eq!(allowance.limit(), Some((1 << 14) - 1));
        let third = allowance.hold(1 << 20);
        assert_eq!(allowance.limit(), Some(LEAST_BYTES));
        drop((first, second));
        assert_eq!(allowance.limit(), Some(LEAST_BYTES));
        drop(third);
        assert_eq!((allowance.limit(), allowance.held()), (None, 0));
    }
}
