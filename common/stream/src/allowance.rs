//! The allowance: a bound on the bytes that all streams of one connection together keep for a peer that does
//! not read.
//!
//! Each stream has a bound of its own, but a peer with a thousand open streams multiplies the bound by a
//! thousand. So the streams of a connection share an allowance. Reads are not limited while at least half of
//! the allowance is free. Below half, a stream may read less at a time, but always [`LEAST_BYTES`], so no
//! stream starves another.
//!
//! The allowances of many connections may be parts of a larger one. The bytes count in both, and the smaller limit
//! applies, so that peers with many connections cannot use up the memory of a program either.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::Notify;

/// Bytes always permitted in one read of a stream, however much is charged.
pub const LEAST_BYTES: usize = 4 * 1024;

/// Divisor of the free bytes: the result is the limit for one read of a stream.
const PARTS: usize = 32;

/// Size of the allowance, and the bytes charged to it.
#[derive(Debug)]
pub struct Allowance {
    total: usize,
    held: AtomicUsize,
    /// Notified when [`Held::grow`] charges bytes beyond the total.
    exceeded: Notify,
    /// Larger allowance that contains this allowance; `None` for an independent allowance.
    whole: Option<Arc<Allowance>>,
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
            exceeded: Notify::new(),
            whole: None,
        })
    }

    /// Creates an allowance of `total` bytes, which are charged to `self` as well.
    #[must_use]
    pub fn part(self: &Arc<Self>, total: usize) -> Arc<Self> {
        Arc::new(Self {
            total,
            held: AtomicUsize::new(0),
            exceeded: Notify::new(),
            whole: Some(self.clone()),
        })
    }

    /// Returns how many bytes a stream may read at a time, or `None` while at least half of the allowance is
    /// free. A limited stream has at most the bytes of one read in its send queue.
    pub fn limit(&self) -> Option<usize> {
        let left = self.total.saturating_sub(self.held());
        let own = (left < self.total / 2).then(|| (left / PARTS).max(LEAST_BYTES));
        let whole = self.whole.as_ref().and_then(|whole| whole.limit());
        own.into_iter().chain(whole).min()
    }

    /// Charges `bytes`, whatever the limit, because the bytes have already been read.
    pub fn hold(self: &Arc<Self>, bytes: usize) -> Held {
        self.charge(bytes);
        Held {
            allowance: self.clone(),
            bytes,
        }
    }

    /// Waits until [`Held::grow`] has charged bytes beyond the total, here or in a part.
    pub async fn exceeded(&self) {
        self.exceeded.notified().await;
    }

    /// Returns true if the charged bytes exceed the total, also without `bytes` of them.
    pub fn is_exceeded_without(&self, bytes: usize) -> bool {
        self.held().saturating_sub(bytes) > self.total
    }

    fn charge(&self, bytes: usize) {
        self.held.fetch_add(bytes, Ordering::Relaxed);
        if let Some(whole) = &self.whole {
            whole.charge(bytes);
        }
    }

    fn release(&self, bytes: usize) {
        self.held.fetch_sub(bytes, Ordering::Relaxed);
        if let Some(whole) = &self.whole {
            whole.release(bytes);
        }
    }

    /// Returns the bytes charged now.
    pub fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }
}

// === impl Held ===

impl Held {
    /// Charges `bytes` more. Wakes [`Allowance::exceeded`] if the bytes exceed a total.
    pub fn grow(&mut self, bytes: usize) {
        self.bytes += bytes;
        self.allowance.charge(bytes);
        let mut next = Some(&self.allowance);
        while let Some(allowance) = next {
            if allowance.is_exceeded_without(0) {
                allowance.exceeded.notify_one();
            }
            next = allowance.whole.as_ref();
        }
    }

    /// Releases `bytes` of the charge, which must be charged.
    pub fn shrink(&mut self, bytes: usize) {
        self.bytes -= bytes;
        self.allowance.release(bytes);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.allowance.release(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::time::Duration;

    use tokio::time::timeout;

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

    #[tokio::test(start_paused = true)]
    async fn growth_beyond_the_whole_is_reported_and_a_dropped_charge_is_released() {
        let whole = Allowance::new(1 << 20);
        let part = whole.part(usize::MAX);
        let is_reported = async || timeout(Duration::ZERO, whole.exceeded()).await.is_ok();
        let mut charge = part.hold(0);
        charge.grow(1 << 20);
        assert!(!is_reported().await && !whole.is_exceeded_without(0));
        charge.grow(2);
        assert!(is_reported().await && whole.is_exceeded_without(1));
        assert!(!whole.is_exceeded_without(2));
        charge.shrink(1 << 20);
        assert_eq!((part.held(), whole.held()), (2, 2));
        drop(charge);
        assert_eq!((part.held(), whole.held()), (0, 0));
    }

    #[test]
    fn bytes_of_one_connection_limit_the_others_once_the_whole_is_short() {
        let whole = Allowance::new(1 << 20);
        let (one, other) = (whole.part(1 << 20), whole.part(1 << 16));
        let held = one.hold(1 << 20);
        assert_eq!(other.limit(), Some(LEAST_BYTES));
        assert_eq!((other.held(), whole.held()), (0, 1 << 20));
        drop(held);
        assert_eq!((whole.limit(), whole.held()), (None, 0));
        let _held = other.hold(1 << 16);
        assert_eq!((other.limit(), one.limit()), (Some(LEAST_BYTES), None));
    }
}
