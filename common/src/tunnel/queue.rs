//! A FIFO bounded by bytes, between a task that demultiplexes a shared stream and the tasks that
//! own its connections.
//!
//! Weighed items wait for room; weightless ones (the end of a connection, a close) never wait and
//! never overtake what was queued before them, so a close can be sent from a destructor and still
//! arrives after the data.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::timeout;

/// Makes a queue that holds up to `budget` bytes of weighed items. A single item heavier than
/// that is taken when the queue is otherwise empty.
pub fn bounded<T>(budget: usize) -> (Sender<T>, Receiver<T>) {
    let (items_tx, items_rx) = mpsc::unbounded_channel();
    let budget = u32::try_from(budget.max(1)).unwrap_or(u32::MAX);
    let shared = Arc::new(Shared {
        room: Semaphore::new(budget as usize),
        budget,
        taken: AtomicU64::new(0),
    });
    (
        Sender {
            items: items_tx,
            shared: shared.clone(),
        },
        Receiver {
            items: items_rx,
            shared,
        },
    )
}

/// Chunks up to this size are copied before they wait: they are slices of a receive buffer that
/// may be a hundred times larger, and would keep all of it.
const COPY_BYTES: usize = 512;

/// What one item costs beside its bytes.
const ITEM_BYTES: usize = 64;

/// A received chunk as it may wait in a queue, and its weight there.
pub fn weighed(chunk: Bytes) -> (Bytes, usize) {
    let weight = chunk.len() + ITEM_BYTES;
    if chunk.len() <= COPY_BYTES {
        (Bytes::copy_from_slice(&chunk), weight)
    } else {
        (chunk, weight)
    }
}

/// The queue's other end is gone.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the queue's receiver is gone")]
pub struct Closed;

/// Why [`Sender::send_within`] did not take an item.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendWithinError {
    /// The receiver is gone.
    #[error("the queue's receiver is gone")]
    Closed,
    /// The receiver took nothing for the whole deadline.
    #[error("the receiver took nothing within the deadline")]
    Stalled,
}

struct Shared {
    room: Semaphore,
    budget: u32,
    /// How many items the receiver took; tells a slow receiver from a stalled one.
    taken: AtomicU64,
}

/// The producing end; clones share one budget.
pub struct Sender<T> {
    items: mpsc::UnboundedSender<(T, u32)>,
    shared: Arc<Shared>,
}

/// The consuming end. Dropping it frees what is queued and fails every sender.
pub struct Receiver<T> {
    items: mpsc::UnboundedReceiver<(T, u32)>,
    shared: Arc<Shared>,
}

/// Tells whether the receiver still takes items.
pub struct Progress(Arc<Shared>);

impl Progress {
    /// Resolves once the receiver has taken nothing for `within`.
    pub async fn stalled(&self, within: Duration) {
        loop {
            let taken = self.0.taken.load(Ordering::Relaxed);
            tokio::time::sleep(within).await;
            if self.0.taken.load(Ordering::Relaxed) == taken {
                return;
            }
        }
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Self {
            items: self.items.clone(),
            shared: self.shared.clone(),
        }
    }
}

impl<T> Sender<T> {
    /// Queues an item once there is room for `weight` bytes.
    pub async fn send(&self, item: T, weight: usize) -> Result<(), Closed> {
        let weight = self.clamp(weight);
        let permit = self.shared.room.acquire_many(weight).await;
        permit.map_err(|_| Closed)?.forget();
        self.items.send((item, weight)).map_err(|_| Closed)
    }

    /// As [`send`](Self::send), but gives up when the receiver takes nothing at all for `stall`.
    /// A receiver that is slow but moves is waited for.
    pub async fn send_within(
        &self,
        item: T,
        weight: usize,
        stall: Duration,
    ) -> Result<(), SendWithinError> {
        let weight = self.clamp(weight);
        loop {
            let taken = self.shared.taken.load(Ordering::Relaxed);
            match timeout(stall, self.shared.room.acquire_many(weight)).await {
                Ok(Ok(permit)) => {
                    permit.forget();
                    let sent = self.items.send((item, weight));
                    return sent.map_err(|_| SendWithinError::Closed);
                }
                Ok(Err(_)) => return Err(SendWithinError::Closed),
                Err(_) if self.shared.taken.load(Ordering::Relaxed) != taken => {}
                Err(_) => return Err(SendWithinError::Stalled),
            }
        }
    }

    /// Queues an item if there is room for it now; gives it back otherwise.
    pub fn try_send(&self, item: T, weight: usize) -> Result<(), T> {
        let weight = self.clamp(weight);
        match self.shared.room.try_acquire_many(weight) {
            Ok(permit) => {
                permit.forget();
                self.items.send((item, weight)).map_err(|error| error.0.0)
            }
            Err(_) => Err(item),
        }
    }

    /// Queues an item of no weight behind everything queued so far. For items whose number is
    /// bounded by something else, such as one close for each connection.
    pub fn send_now(&self, item: T) -> Result<(), Closed> {
        self.items.send((item, 0)).map_err(|_| Closed)
    }

    /// Resolves when the receiver is gone.
    pub async fn closed(&self) {
        self.items.closed().await;
    }

    fn clamp(&self, weight: usize) -> u32 {
        u32::try_from(weight)
            .unwrap_or(u32::MAX)
            .min(self.shared.budget)
    }
}

impl<T> Receiver<T> {
    /// The next item; `None` once all senders are gone and the queue is empty. Cancel safe.
    pub async fn recv(&mut self) -> Option<T> {
        let (item, weight) = self.items.recv().await?;
        Some(self.took(item, weight))
    }

    /// As [`recv`](Self::recv), for poll-based callers.
    pub fn poll_recv(&mut self, cx: &mut std::task::Context<'_>) -> std::task::Poll<Option<T>> {
        let next = std::task::ready!(self.items.poll_recv(cx));
        std::task::Poll::Ready(next.map(|(item, weight)| self.took(item, weight)))
    }

    /// The next item if one is queued.
    pub fn try_recv(&mut self) -> Option<T> {
        let (item, weight) = self.items.try_recv().ok()?;
        Some(self.took(item, weight))
    }

    /// A view on how this receiver moves.
    pub fn progress(&self) -> Progress {
        Progress(self.shared.clone())
    }

    fn took(&self, item: T, weight: u32) -> T {
        self.shared.taken.fetch_add(1, Ordering::Relaxed);
        self.shared.room.add_permits(weight as usize);
        item
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        self.shared.room.close();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const STALL: Duration = Duration::from_secs(10);

    #[tokio::test]
    async fn items_wait_for_room_and_weightless_ones_do_not() {
        let (tx, mut rx) = bounded(10);
        tx.send(1, 6).await.unwrap();
        assert_eq!(tx.try_send(2, 6), Err(2));
        tx.send_now(3).unwrap();
        assert_eq!(rx.recv().await, Some(1));
        tx.send(4, 6).await.unwrap();
        assert_eq!(rx.recv().await, Some(3));
        assert_eq!(rx.try_recv(), Some(4));
        assert_eq!(rx.try_recv(), None);
    }

    #[tokio::test]
    async fn an_item_heavier_than_the_budget_passes_alone() {
        let (tx, mut rx) = bounded(10);
        tx.send(1, 1000).await.unwrap();
        assert!(tx.try_send(2, 1).is_err());
        assert_eq!(rx.recv().await, Some(1));
        assert!(tx.try_send(2, 1).is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_stalled_receiver_is_told_from_a_slow_one() {
        let (tx, mut rx) = bounded(10);
        tx.send(1, 5).await.unwrap();
        tx.send(2, 5).await.unwrap();
        let slow = async {
            tokio::time::sleep(STALL * 2 / 3).await;
            assert_eq!(rx.recv().await, Some(1));
            tokio::time::sleep(STALL * 2 / 3).await;
            assert_eq!(rx.recv().await, Some(2));
        };
        let (sent, ()) = tokio::join!(tx.send_within(3, 10, STALL), slow);
        assert_eq!(sent, Ok(()));
        assert_eq!(
            tx.send_within(4, 1, STALL).await,
            Err(SendWithinError::Stalled)
        );
    }

    #[tokio::test]
    async fn a_dropped_receiver_fails_waiting_senders() {
        let (tx, rx) = bounded(1);
        tx.send(1, 1).await.unwrap();
        let (sent, ()) = tokio::join!(tx.send(2, 1), async { drop(rx) });
        assert_eq!(sent, Err(Closed));
        assert_eq!(tx.send_now(3), Err(Closed));
        tx.closed().await;
    }
}
