//! What a shared packet stream has brought for one connection and its receiver has not taken yet.
//!
//! Putting something in never waits: the stream's reader serves all connections. What exceeds the
//! connection's own budget is borrowed from the program's [`Pool`]. A receiver that takes bytes
//! more slowly than they come slows the reader down, within bounds; a connection that never gets
//! back below its budget, or that is the largest debtor of an empty pool, has to end. Its own task
//! learns that from its [`Watch`] and ends it. Bytes are counted exactly: they are given back when
//! they are taken, when the receiver is dropped and when the connection is evicted.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use culvert_stream::CloseReason;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::excess::{Account, Debtor, Exhausted, Pool};

/// Chunks up to this size are copied before they wait: they are slices of a receive buffer that
/// may be a hundred times larger, and would keep all of it.
const COPY_BYTES: usize = 512;

/// What one item costs beside its bytes: its allocation, and its place in a queue that grows by
/// doubling.
const ITEM_BYTES: usize = 128;

/// A queue that was longer than this gives its memory back once it is empty.
const KEEP_ITEMS: usize = 64;

/// How long the stream's reader waits for one connection, each time that it brings bytes beyond the
/// budget. With packets of 32 KiB, what stock programs send, a receiver that takes 640 KiB/s gets
/// back below its budget.
pub const PACE: Duration = Duration::from_millis(50);

/// A receiver that has taken nothing for so long stands still, and is not waited for.
const MOVING: Duration = Duration::from_secs(1);

/// A received chunk as it may wait in an inbox, and its weight there.
pub fn weighed(chunk: Bytes) -> (Bytes, usize) {
    let weight = chunk.len() + ITEM_BYTES;
    if chunk.len() <= COPY_BYTES {
        (Bytes::copy_from_slice(&chunk), weight)
    } else {
        (chunk, weight)
    }
}

/// Makes the inbox of one connection, which holds up to `budget` bytes of its own.
pub fn inbox<T: Send + 'static>(budget: usize, pool: &Arc<Pool>) -> (Sender<T>, Receiver<T>) {
    let shared = Arc::new(Shared {
        budget,
        pool: pool.clone(),
        account: pool.account(),
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
    pool: Arc<Pool>,
    account: Account,
    /// Locked before the pool, never while the pool is.
    state: Mutex<State<T>>,
    /// Wakes the receiver.
    arrived: Notify,
    /// Wakes the stream's reader.
    eased: Notify,
    /// Wake the watch.
    over: Notify,
    evicted: Notify,
}

struct State<T> {
    /// With their weights.
    items: VecDeque<(T, usize)>,
    /// The sum of the weights.
    bytes: usize,
    last_taken: Instant,
    /// Something was taken since the budget is exceeded.
    moved: bool,
    /// Since when the budget is exceeded without a pause.
    over_since: Option<Instant>,
    phase: Phase,
    orphan: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Open,
    /// No more bytes come: what is queued can only become less.
    Ended,
    /// The bytes are gone, and so must the connection.
    Evicted,
    /// Nobody takes anything any more.
    Deaf,
}

/// The stream's end.
pub struct Sender<T>(Arc<Shared<T>>);

/// The connection's end. Dropping it frees what is queued.
pub struct Receiver<T>(Arc<Shared<T>>);

/// Tells the connection's task how the receiver keeps up. One task at a time may wait on it.
pub struct Watch<T>(Arc<Shared<T>>);

// === impl Sender ===

impl<T: Send + 'static> Sender<T> {
    /// Queues bytes. If there is no room for them, either this connection or the pool's largest
    /// debtor is evicted; only the latter's bytes, or these, are lost. Says whether the connection
    /// is beyond its budget: then [`Sender::pace`] is due.
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
            // Without a lock of our own: two connections could be evicting each other.
            largest.evict();
        }
    }
}

impl<T> Sender<T> {
    /// Slows the stream's reader down to a receiver that is beyond its budget but takes bytes, at
    /// most by [`PACE`]: the protocol knows no other way to slow the sender down. One that stands
    /// still is waited for once and so long, not again.
    pub async fn pace(&self) {
        let until = Instant::now() + PACE;
        while self.0.state.lock().is_slow() {
            if timeout_at(until, self.0.eased.notified()).await.is_err() {
                return;
            }
        }
    }

    /// Queues an end behind everything that was put in before. It weighs nothing; the caller
    /// bounds the number of ends. Bytes that follow one are dropped.
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
    /// The next item; `None` once the sender is gone and nothing is queued. After an eviction it
    /// waits for ever: the watch says what happens. Cancel safe.
    pub async fn recv(&mut self) -> Option<T> {
        loop {
            // Notifications are kept for the next one who asks: none is lost in between.
            match self.0.take() {
                Taken::Item(item) => return Some(item),
                Taken::Orphaned => return None,
                Taken::Nothing => self.0.arrived.notified().await,
            }
        }
    }

    /// The next item if one is queued.
    pub fn try_recv(&mut self) -> Option<T> {
        match self.0.take() {
            Taken::Item(item) => Some(item),
            Taken::Orphaned | Taken::Nothing => None,
        }
    }

    /// A view on how this receiver keeps up.
    pub fn watch(&self) -> Watch<T> {
        Watch(self.0.clone())
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        self.0.clear(Phase::Deaf);
    }
}

// === impl Watch ===

impl<T> Watch<T> {
    /// Resolves once the connection has to end for the sake of others: it was evicted; or its
    /// budget has been exceeded for `within` without a pause while bytes kept coming; or nothing
    /// was taken for `within` since the last of them.
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
                    // Kernel buffers go on filling for a while after a peer has stopped.
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

    /// Resolves once the receiver has taken nothing for `within`, counted from this call.
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

    /// Frees what is queued, and takes nothing in any more.
    fn clear(&self, phase: Phase) {
        let items = {
            let mut state = self.state.lock();
            if matches!(state.phase, Phase::Evicted | Phase::Deaf) {
                return;
            }
            state.phase = phase;
            state.over_since = None;
            self.eased.notify_one();
            let back = self.excess(state.bytes);
            state.bytes = 0;
            if back > 0 {
                self.pool.give_back(self.account, back);
            }
            std::mem::take(&mut state.items)
        };
        // Outside of the lock: there may be many.
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
        // One that has had no time yet to show that it moves gets that once.
        let moves = self.moved && self.last_taken.elapsed() < MOVING;
        self.phase == Phase::Open && (moves || since.elapsed() < PACE)
    }

    /// When the connection has to end unless something is taken.
    fn due(&self, within: Duration) -> Option<Instant> {
        let since = self.over_since?;
        Some(match self.phase {
            // What is queued can only become less: a slow receiver may take its time.
            Phase::Ended => since.max(self.last_taken) + within,
            _ => since + within,
        })
    }
}

#[cfg(test)]
mod tests;
