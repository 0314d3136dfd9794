//! The allowance: a bound on the bytes that all streams of one connection together keep for a peer that does
//! not read.
//!
//! Each stream has a bound of its own, but a peer with a thousand open streams multiplies the bound by a
//! thousand. So the streams of a connection share an allowance. Reads are not limited while at least half of
//! the allowance is free. Below half, a stream may read less at a time, but always [`LEAST_BYTES`], so no
//! stream starves another.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes always permitted in one read of a stream, however much is charged.
pub const LEAST_BYTES: usize = 4 * 1024;

/// Divisor of the free bytes: the result is the limit for one read of a stream.
const PARTS: usize = 32;

/// Size of the allowance, and the bytes charged to it.
#[derive(Debug)]
pub struct Allowance {
    total: usize,
    held: AtomicUsize,
}

/// Charge of bytes to an allowance. Dropping the charge releases the bytes.
#[derive(Debug)]
pub struct Held {
    allowance: Arc<Allowance>,
    bytes: usize,
}

// === impl Allowance ===

impl Allowance {
    /// Creates an allowance of `total` bytes. Every stream may use twice [`LEAST_BYTES`] on top.
    pub fn new(total: usize) -> Arc<Self> {
        Arc::new(Self {
            total,
            held: AtomicUsize::new(0),
        })
    }

    /// Returns how many bytes a stream may read at a time, or `None` while at least half of the allowance is
    /// free. A limited stream has at most the bytes of one read in its send queue.
    pub fn limit(&self) -> Option<usize> {
        let left = self.total.saturating_sub(self.held());
        (left < self.total / 2).then(|| (left / PARTS).max(LEAST_BYTES))
    }

    /// Charges `bytes`, whatever the limit, because the bytes have already been read.
    pub fn hold(self: &Arc<Self>, bytes: usize) -> Held {
        self.held.fetch_add(bytes, Ordering::Relaxed);
        Held {
            allowance: self.clone(),
            bytes,
        }
    }

    /// Returns the bytes charged now.
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
    fn reads_are_limited_beyond_half_but_never_below_the_minimum() {
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
