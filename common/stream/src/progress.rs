//! Progress of one direction of a connection, to tell a slow sink from a sink that accepts nothing.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use metrics::Counter;
use tokio::time::sleep;

/// Progress of the sink of one direction.
#[derive(Debug)]
pub struct Progress {
    /// Bytes that the sink has accepted.
    accepted: AtomicU64,
    /// Accepted bytes of all connections of the program.
    total: Counter,
    /// Accepted bytes that the peer had not acknowledged at the last report of the sink. 0 for a sink without reports.
    unacknowledged: AtomicU32,
    /// True once [`stalled`](Self::stalled) was called.
    is_watched: AtomicBool,
}

impl Progress {
    /// Creates a count at zero for one connection.
    pub fn new(total: Counter) -> Self {
        Self {
            accepted: AtomicU64::new(0),
            total,
            unacknowledged: AtomicU32::new(0),
            is_watched: AtomicBool::new(false),
        }
    }

    /// Counts bytes that the sink has accepted.
    pub fn add(&self, bytes: usize) {
        self.accepted.fetch_add(bytes as u64, Ordering::Relaxed);
        self.total.increment(bytes as u64);
    }

    /// Returns the number of bytes that the sink has accepted.
    pub fn accepted(&self) -> u64 {
        self.accepted.load(Ordering::Relaxed)
    }

    /// Returns true if a blocked sink should report its unacknowledged bytes at each poll.
    pub fn is_watched(&self) -> bool {
        self.is_watched.load(Ordering::Relaxed)
    }

    /// Sets the number of accepted bytes that the peer has not acknowledged. A full socket becomes writable only after
    /// the peer has read up to a third of its buffer (Linux `sk_stream_is_writeable`), which may be megabytes.
    pub fn set_unacknowledged(&self, bytes: u32) {
        self.unacknowledged.store(bytes, Ordering::Relaxed);
    }

    /// Returns once the sink has made no progress for at least `bound`. The check runs once per `bound`, so the function
    /// returns at most twice `bound` after the last progress, or three times if the sink is polled after the function.
    pub(crate) fn stalled(&self, bound: Duration) -> impl Future<Output = ()> {
        // Set before the first poll: a task that polls the sink first then compares two reports of the sink.
        self.is_watched.store(true, Ordering::Relaxed);
        let delivered = || {
            let unacknowledged = self.unacknowledged.load(Ordering::Relaxed);
            self.accepted().wrapping_sub(unacknowledged.into())
        };
        idle(delivered, bound)
    }
}

impl Default for Progress {
    fn default() -> Self {
        Self::new(Counter::noop())
    }
}

/// Returns once `count` has not changed for at least `bound`. The check runs once per `bound`, so the function returns at
/// most twice `bound` after the last change.
pub async fn idle(count: impl Fn() -> u64, bound: Duration) {
    loop {
        let before = count();
        sleep(bound).await;
        if count() == before {
            return;
        }
    }
}
