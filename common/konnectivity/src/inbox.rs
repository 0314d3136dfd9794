//! The inbox of a connection: bytes already delivered by a shared packet stream and not yet read by the
//! connection's receiver.
//!
//! A push never waits, because the reader of the stream serves all connections. Bytes beyond the connection's
//! own budget are borrowed from the program's [`OverflowBudget`]. A slow receiver slows the stream's reader
//! down, within bounds. A connection has to end if its inbox stays over budget for too long, or has the
//! largest loan of an empty pool. The connection's own task learns this from a [`Watch`] and ends the connection.
//! Loans are counted exactly: bytes are returned when the receiver reads, when the receiver is dropped, and
//! when the connection is evicted.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use culvert_stream::CloseReason;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::excess::{Account, Debtor, Exhausted, OverflowBudget};

/// Largest chunk, in bytes, to copy before waiting. Chunks are slices of a receive buffer that may be a
/// hundred times larger, and a waiting slice keeps the whole buffer alive.
const COPY_BYTES: usize = 512;

/// As [`COPY_BYTES`], for a chunk behind [`BACKLOG_ITEMS`] others: a quarter of the largest receive buffer. The
/// waiting chunks of a stalled receiver then cost at most four times their length.
const COPY_BEHIND_BYTES: usize = 16 * 1024;

/// Queue length, in items, of a receiver that reads more slowly than bytes arrive. A receiver that keeps up takes
/// chunks before their receive buffer would matter, and needs no copies.
const BACKLOG_ITEMS: usize = 16;

/// Memory per item besides the bytes: the allocation, and the place in a queue that grows by doubling.
const ITEM_BYTES: usize = 128;

/// Longest queue, in items, that keeps its memory when it becomes empty.
const KEEP_ITEMS: usize = 64;

/// Longest wait of the stream's reader for one connection, per packet beyond the connection's budget. A stock agent sends
/// packets of 4 KiB, so a receiver that reads 80 KiB/s gets back below its budget. With packets of 32 KiB, a receiver
/// needs 640 KiB/s.
pub const PACE: Duration = Duration::from_millis(50);

/// Time without a read after which a receiver counts as stalled. The stream's reader does not wait for a
/// stalled receiver.
const MOVING: Duration = Duration::from_secs(1);

/// Creates the inbox of a connection. Bytes beyond `budget` are borrowed from `pool`. `held` counts the bytes in all
/// inboxes of a packet stream.
pub fn inbox<T: Send + 'static>(
    budget: usize,
    pool: &Arc<OverflowBudget>,
    held: &Arc<AtomicUsize>,
) -> (Sender<T>, Receiver<T>) {
    let shared = Arc::new(Shared {
        budget,
        pool: pool.clone(),
        account: pool.account(),
        held: held.clone(),
        state: Mutex::new(State {
            items: VecDeque::new(),
            bytes: 0,
            last_taken: Instant::now(),
            moved: false,
            over_since: None,
            phase: Phase::Open,
            orphan: false,
        }),
        arrived: Notify::new(),
        over: Notify::new(),
        eased: Notify::new(),
        evicted: Notify::new(),
    });
    (Sender(shared.clone()), Receiver(shared))
}

struct Shared<T> {
    budget: usize,
    pool: Arc<OverflowBudget>,
    account: Account,
    held: Arc<AtomicUsize>,
    /// Lock this before the pool, never while the pool is locked.
    state: Mutex<State<T>>,
    /// Wakes the receiver.
    arrived: Notify,
    /// Wakes the stream's reader.
    eased: Notify,
    /// Wakes the watch when the budget is exceeded.
    over: Notify,
    evicted: Notify,
}

struct State<T> {
    /// Items with their weights.
    items: VecDeque<(T, usize)>,
    /// Sum of the weights.
    bytes: usize,
    last_taken: Instant,
    /// True if an item was read since the budget was exceeded.
    moved: bool,
    /// Time at which the inbox went over budget; `None` while within budget.
    over_since: Option<Instant>,
    phase: Phase,
    orphan: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Open,
    /// All bytes have arrived: the queue can only become shorter.
    Ended,
    /// The queued bytes are freed, and the connection must end.
    Evicted,
    /// The receiver is gone.
    ReceiverGone,
}

/// The stream's end of an inbox.
pub struct Sender<T>(Arc<Shared<T>>);

/// The connection's end of an inbox. Dropping the receiver frees all queued items.
pub struct Receiver<T>(Arc<Shared<T>>);

/// View of the receiver's progress for the connection's task. Only a single task at a time may wait on a
/// watch.
pub struct Watch<T>(Arc<Shared<T>>);

// === impl Sender ===

impl<T: Send + 'static> Sender<T> {
    /// Queues bytes. If the pool is exhausted, evicts this connection or the pool's largest borrower; only
    /// the evicted connection loses bytes. Returns true if the connection is over budget: then call
    /// [`Sender::pace`].
    #[must_use]
    pub fn push(&self, item: T, weight: usize) -> bool {
        let shared = &self.0;
        loop {
            let largest = {
                let mut state = shared.state.lock();
                if state.phase != Phase::Open {
                    return false;
                }
                let bytes = state.bytes.saturating_add(weight);
                let more = shared.excess(bytes) - shared.excess(state.bytes);
                match shared.borrow(more) {
                    Ok(()) => {
                        shared
                            .held
                            .fetch_add(bytes - state.bytes, Ordering::Relaxed);
                        state.bytes = bytes;
                        state.items.push_back((item, weight));
                        if more > 0 && state.over_since.is_none() {
                            state.over_since = Some(Instant::now());
                            state.moved = false;
                            shared.over.notify_one();
                        }
                        let over = state.over_since.is_some();
                        drop(state);
                        shared.arrived.notify_one();
                        return over;
                    }
                    Err(Exhausted::Asker) => {
                        drop(state);
                        shared.evict();
                        return false;
                    }
                    Err(Exhausted::Other(largest)) => largest,
                }
            };
            // Not under our own lock: two connections could be evicting each other.
            largest.evict();
        }
    }
}

impl<T> Sender<T> {
    /// Prepares a received chunk for [`push`](Self::push). Returns the chunk, copied if its receive buffer would
    /// be kept alive for few bytes, and its weight.
    pub fn weighed(&self, chunk: Bytes) -> (Bytes, usize) {
        let weight = chunk.len() + ITEM_BYTES;
        let is_behind = || self.0.state.lock().items.len() >= BACKLOG_ITEMS;
        let copies = chunk.len() <= COPY_BYTES || (chunk.len() <= COPY_BEHIND_BYTES && is_behind());
        match copies {
            true => (Bytes::copy_from_slice(&chunk), weight),
            false => (chunk, weight),
        }
    }

    /// Makes the stream's reader wait, at most [`PACE`], for a receiver that is over budget but still reads:
    /// the protocol has no other way to slow the peer down. The stream's reader waits only once for a stalled
    /// receiver, during the first [`PACE`] over budget.
    pub async fn pace(&self) {
        let until = Instant::now() + PACE;
        while self.0.state.lock().is_slow() {
            if timeout_at(until, self.0.eased.notified()).await.is_err() {
                return;
            }
        }
    }

    /// Queues an end behind earlier items. An end weighs nothing; the caller bounds the number of ends. Bytes
    /// pushed after an end are dropped.
    pub fn end(&self, item: T) {
        let mut state = self.0.state.lock();
        if matches!(state.phase, Phase::Open | Phase::Ended) {
            state.phase = Phase::Ended;
            state.items.push_back((item, 0));
            drop(state);
            self.0.arrived.notify_one();
        }
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        self.0.state.lock().orphan = true;
        self.0.arrived.notify_one();
    }
}

// === impl Receiver ===

impl<T> Receiver<T> {
    /// Returns the next item, or `None` once the sender is gone and nothing is queued. After an eviction the
    /// call waits forever, and the watch reports the reason. Cancel safe.
    pub async fn recv(&mut self) -> Option<T> {
        loop {
            // A notification without a waiter is kept for the next waiter, so no notification is lost.
            match self.0.take() {
                Taken::Item(item) => return Some(item),
                Taken::Orphaned => return None,
                Taken::Nothing => self.0.arrived.notified().await,
            }
        }
    }

    /// Returns the next item if one is queued.
    pub fn try_recv(&mut self) -> Option<T> {
        match self.0.take() {
            Taken::Item(item) => Some(item),
            Taken::Orphaned | Taken::Nothing => None,
        }
    }

    /// Returns a view of this receiver's progress.
    pub fn watch(&self) -> Watch<T> {
        Watch(self.0.clone())
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        self.0.clear(Phase::ReceiverGone);
    }
}

// === impl Watch ===

impl<T> Watch<T> {
    /// Resolves once the connection has to end for the sake of others: if the connection was evicted; if
    /// bytes still arrive and the connection was over budget for `within` without a pause; or if all bytes
    /// have arrived, the connection is over budget, and nothing was read for `within`.
    pub async fn overdue(&self, within: Duration) -> CloseReason {
        let shared = &self.0;
        let over = async {
            loop {
                let (due, last_taken) = {
                    let state = shared.state.lock();
                    (state.due(within), state.last_taken)
                };
                match due {
                    None => shared.over.notified().await,
                    Some(at) if at > Instant::now() => sleep_until(at).await,
                    // Kernel buffers keep filling for a while after a peer has stopped, so half of the time
                    // is enough proof of a stall.
                    Some(_) if last_taken.elapsed() >= within / 2 => return CloseReason::Stalled,
                    Some(_) => return CloseReason::BufferExceeded,
                }
            }
        };
        tokio::select! {
            biased;
            () = shared.evicted.notified() => CloseReason::BufferExceeded,
            reason = over => reason,
        }
    }

    /// Returns true if the receiver has read all items.
    pub fn is_empty(&self) -> bool {
        self.0.state.lock().items.is_empty()
    }

    /// Resolves once the receiver has read nothing for `within`, counted from this call.
    pub async fn stalled(&self, within: Duration) {
        let asked = Instant::now();
        loop {
            let at = self.0.state.lock().last_taken.max(asked) + within;
            if at <= Instant::now() {
                return;
            }
            sleep_until(at).await;
        }
    }
}

impl<T> Clone for Watch<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

// === impl Shared ===

enum Taken<T> {
    Item(T),
    Orphaned,
    Nothing,
}

impl<T> Shared<T> {
    fn excess(&self, bytes: usize) -> usize {
        bytes.saturating_sub(self.budget)
    }

    fn take(&self) -> Taken<T> {
        let mut state = self.state.lock();
        let Some((item, weight)) = state.items.pop_front() else {
            return if state.orphan && state.phase != Phase::Evicted {
                Taken::Orphaned
            } else {
                Taken::Nothing
            };
        };
        if state.items.is_empty() && state.items.capacity() > KEEP_ITEMS {
            state.items = VecDeque::new();
        }
        let left = state.bytes.saturating_sub(weight);
        let back = self.excess(state.bytes) - self.excess(left);
        self.held.fetch_sub(state.bytes - left, Ordering::Relaxed);
        state.bytes = left;
        state.last_taken = Instant::now();
        state.moved = true;
        if left <= self.budget && state.over_since.take().is_some() {
            self.eased.notify_one();
        }
        if back > 0 {
            self.pool.give_back(self.account, back);
        }
        Taken::Item(item)
    }

    /// Frees all queued items, and accepts no new items.
    fn clear(&self, phase: Phase) {
        let items = {
            let mut state = self.state.lock();
            if matches!(state.phase, Phase::Evicted | Phase::ReceiverGone) {
                return;
            }
            state.phase = phase;
            state.over_since = None;
            self.eased.notify_one();
            let back = self.excess(state.bytes);
            self.held.fetch_sub(state.bytes, Ordering::Relaxed);
            state.bytes = 0;
            if back > 0 {
                self.pool.give_back(self.account, back);
            }
            std::mem::take(&mut state.items)
        };
        // Outside the lock, because there may be many items.
        drop(items);
    }
}

impl<T: Send + 'static> Shared<T> {
    fn borrow(self: &Arc<Self>, more: usize) -> Result<(), Exhausted> {
        if more == 0 {
            return Ok(());
        }
        self.pool.borrow(self.account, more, || {
            let weak: Weak<Self> = Arc::downgrade(self);
            weak
        })
    }
}

impl<T: Send + 'static> Debtor for Shared<T> {
    fn evict(&self) {
        self.clear(Phase::Evicted);
        self.evicted.notify_one();
    }
}

// === impl State ===

impl<T> State<T> {
    fn is_slow(&self) -> bool {
        let Some(since) = self.over_since else {
            return false;
        };
        // A receiver that has not read since it went over budget still counts as slow for the first `PACE`,
        // because it may not have had time to read. After that, it counts as stalled.
        let moves = self.moved && self.last_taken.elapsed() < MOVING;
        self.phase == Phase::Open && (moves || since.elapsed() < PACE)
    }

    /// Returns the time at which the connection has to end unless items are read, or `None` if the connection
    /// is within budget.
    fn due(&self, within: Duration) -> Option<Instant> {
        let since = self.over_since?;
        Some(match self.phase {
            // The queue can only become shorter, so a slow receiver may continue.
            Phase::Ended => since.max(self.last_taken) + within,
            _ => since + within,
        })
    }
}

#[cfg(test)]
mod tests;
