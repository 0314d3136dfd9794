//! The queue: a FIFO bounded by bytes, between the tasks of connections and the shared stream to the peer.
//!
//! Items with a weight wait for room. Items without weight (the end of a connection, a close) never wait, and
//! never overtake earlier items. So a destructor can send a close, and the close still arrives after the
//! data.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio::time::{Instant, timeout, timeout_at};

/// Creates a queue for up to `budget` bytes of items with a weight. A single item heavier than `budget` is
/// accepted when the queue has no other weight.
pub fn bounded<T>(budget: usize) -> (Sender<T>, Receiver<T>) {
    let (items_tx, items_rx) = mpsc::unbounded_channel();
    let budget = u32::try_from(budget.max(1)).unwrap_or(u32::MAX);
    let shared = Arc::new(Shared {
        room: Semaphore::new(budget as usize),
        answers: Semaphore::new(ANSWER_BYTES),
        budget,
        queued: AtomicU64::new(0),
        taken: AtomicU64::new(0),
        written: AtomicU64::new(0),
        progress: Notify::new(),
        blocked: Mutex::new(None),
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

/// Bytes of answers accepted beyond the budget of a full queue: about 3000 answers.
pub const ANSWER_BYTES: usize = 256 * 1024;

/// Error for a queue without a receiver.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the queue's receiver is gone")]
pub struct Closed;

/// Reason why [`Sender::send_within`] did not queue an item.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendWithinError {
    /// The receiver is gone.
    #[error("the queue's receiver is gone")]
    Closed,
    /// The receiver read nothing for the whole deadline.
    #[error("the receiver read nothing within the deadline")]
    Stalled,
}

/// Room that a queued item occupies until the receiver reads the item.
#[derive(Clone, Copy)]
enum Charge {
    Room(u32),
    Answers(u32),
    Nothing,
}

#[derive(Debug)]
struct Shared {
    room: Semaphore,
    /// Room for items, such as answers, that must neither wait nor be lost.
    answers: Semaphore,
    budget: u32,
    /// Number of items that were queued.
    queued: AtomicU64,
    /// Number of items that the receiver has read; distinguishes a slow receiver from a stalled receiver.
    taken: AtomicU64,
    /// Number of items that the reader of the queue has written. The largest number once the receiver is gone.
    written: AtomicU64,
    /// Wakes tasks that wait until items are written.
    progress: Notify,
    /// Time at which a sender first found no room, and the number of items read until then.
    blocked: Mutex<Option<(Instant, u64)>>,
}

/// The producing end of a queue; clones share one budget.
pub struct Sender<T> {
    items: mpsc::UnboundedSender<(T, Charge)>,
    shared: Arc<Shared>,
}

/// The consuming end of a queue. Dropping the receiver frees all queued items and fails every sender.
pub struct Receiver<T> {
    items: mpsc::UnboundedReceiver<(T, Charge)>,
    shared: Arc<Shared>,
}

/// Handle by which the reader of a queue reports the items that it has written.
#[derive(Clone, Debug)]
pub struct Progress(Arc<Shared>);

/// Mark behind the items that were read so far. Dropping the mark reports these items as written.
#[derive(Debug)]
pub struct Mark {
    shared: Arc<Shared>,
    taken: u64,
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
        self.push(item, Charge::Room(weight)).map_err(|_| Closed)
    }

    /// Queues an item as [`send`](Self::send) does, but gives up if the receiver reads nothing at all for
    /// `stall`. Waits for a slow receiver. The time counts from the first sender that found no room, so that many
    /// senders with less patience than `stall` also find out.
    pub async fn send_within(
        &self,
        item: T,
        weight: usize,
        stall: Duration,
    ) -> Result<(), SendWithinError> {
        let item = match self.try_send(item, weight) {
            Ok(()) => return Ok(()),
            Err(item) => item,
        };
        let weight = self.clamp(weight);
        loop {
            let (since, taken) = self.shared.blocked_since();
            match timeout_at(since + stall, self.shared.room.acquire_many(weight)).await {
                Ok(Ok(permit)) => {
                    permit.forget();
                    let sent = self.push(item, Charge::Room(weight));
                    return sent.map_err(|_| SendWithinError::Closed);
                }
                Ok(Err(_)) => return Err(SendWithinError::Closed),
                Err(_) if self.shared.taken.load(Ordering::Relaxed) != taken => {}
                Err(_) => return Err(SendWithinError::Stalled),
            }
        }
    }

    /// Queues an item if there is room now; otherwise returns the item.
    pub fn try_send(&self, item: T, weight: usize) -> Result<(), T> {
        let weight = self.clamp(weight);
        let charge = Charge::Room(weight);
        self.charged(&self.shared.room, weight, item, charge)
    }

    /// Queues an answer to the peer if there is room now, or if few enough answers are waiting beyond the
    /// budget; otherwise returns the item. A peer that sends requests without end and reads nothing costs at
    /// most [`ANSWER_BYTES`] beyond the budget.
    pub fn try_answer(&self, item: T, weight: usize) -> Result<(), T> {
        self.try_send(item, weight).or_else(|item| {
            let weight = u32::try_from(weight).unwrap_or(u32::MAX);
            let charge = Charge::Answers(weight);
            self.charged(&self.shared.answers, weight, item, charge)
        })
    }

    /// Queues an item without weight behind earlier items. Only for items of bounded number, such as a close
    /// per connection.
    pub fn send_now(&self, item: T) -> Result<(), Closed> {
        self.push(item, Charge::Nothing).map_err(|_| Closed)
    }

    /// Resolves once the receiver is gone.
    pub async fn closed(&self) {
        self.items.closed().await;
    }

    /// Waits until the items so far are written, see [`Progress`]. Gives up if the receiver is gone, or if nothing is
    /// written for `stall`.
    pub fn written(&self, stall: Duration) -> impl Future<Output = ()> + Send + use<T> {
        let shared = self.shared.clone();
        let queued = shared.queued.load(Ordering::Relaxed);
        async move {
            loop {
                let progress = shared.progress.notified();
                let is_written = shared.written.load(Ordering::Relaxed) >= queued;
                if is_written || timeout(stall, progress).await.is_err() {
                    return;
                }
            }
        }
    }

    fn push(&self, item: T, charge: Charge) -> Result<(), T> {
        // Counted first, so that the count of a sender contains all items before its own.
        self.shared.queued.fetch_add(1, Ordering::Relaxed);
        self.items.send((item, charge)).map_err(|error| error.0.0)
    }

    fn charged(&self, from: &Semaphore, weight: u32, item: T, charge: Charge) -> Result<(), T> {
        match from.try_acquire_many(weight) {
            Ok(permit) => {
                permit.forget();
                self.push(item, charge)
            }
            Err(_) => Err(item),
        }
    }

    fn clamp(&self, weight: usize) -> u32 {
        u32::try_from(weight)
            .unwrap_or(u32::MAX)
            .min(self.shared.budget)
    }
}

impl Shared {
    /// Returns since when senders have found no room and the receiver has read nothing, and the number of items
    /// read.
    fn blocked_since(&self) -> (Instant, u64) {
        let mut blocked = self.blocked.lock();
        let taken = self.taken.load(Ordering::Relaxed);
        match *blocked {
            Some(known) if known.1 == taken => known,
            _ => *blocked.insert((Instant::now(), taken)),
        }
    }

    /// Records that the first `count` items are written.
    fn report(&self, count: u64) {
        self.written.fetch_max(count, Ordering::Relaxed);
        self.progress.notify_waiters();
    }
}

impl<T> Receiver<T> {
    /// Returns the handle for reports of written items.
    pub fn progress(&self) -> Progress {
        Progress(self.shared.clone())
    }

    /// Returns the next item, or `None` once all senders are gone and the queue is empty. Cancel safe.
    pub async fn recv(&mut self) -> Option<T> {
        let (item, charge) = self.items.recv().await?;
        Some(self.took(item, charge))
    }

    /// Polls for the next item, as [`recv`](Self::recv) does.
    pub fn poll_recv(&mut self, cx: &mut std::task::Context<'_>) -> std::task::Poll<Option<T>> {
        let next = std::task::ready!(self.items.poll_recv(cx));
        std::task::Poll::Ready(next.map(|(item, charge)| self.took(item, charge)))
    }

    /// Returns the next item if one is queued.
    pub fn try_recv(&mut self) -> Option<T> {
        let (item, charge) = self.items.try_recv().ok()?;
        Some(self.took(item, charge))
    }

    fn took(&self, item: T, charge: Charge) -> T {
        self.shared.taken.fetch_add(1, Ordering::Relaxed);
        match charge {
            Charge::Room(weight) => self.shared.room.add_permits(weight as usize),
            Charge::Answers(weight) => self.shared.answers.add_permits(weight as usize),
            Charge::Nothing => {}
        }
        item
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        self.shared.room.close();
        self.shared.answers.close();
        self.shared.report(u64::MAX);
    }
}

impl Progress {
    /// Returns a mark behind the items that were read so far.
    pub fn mark(&self) -> Mark {
        Mark {
            shared: self.0.clone(),
            taken: self.0.taken.load(Ordering::Relaxed),
        }
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        self.shared.report(self.taken);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use tokio::time::timeout;

    use super::*;

    const STALL: Duration = Duration::from_secs(10);

    #[tokio::test]
    async fn items_wait_for_room_and_weightless_items_do_not() {
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
    async fn answers_find_room_in_a_full_queue_up_to_a_bound() {
        let (tx, mut rx) = bounded(10);
        tx.send(0, 10).await.unwrap();
        let half = ANSWER_BYTES / 2;
        assert_eq!(tx.try_answer(1, half), Ok(()));
        assert_eq!(tx.try_answer(2, half), Ok(()));
        assert_eq!(tx.try_answer(3, 1), Err(3));
        assert_eq!(rx.recv().await, Some(0));
        assert_eq!(rx.recv().await, Some(1));
        // An answer uses ordinary room first. Each item returns its room to the part that the room came from.
        assert_eq!(tx.try_answer(4, 10), Ok(()));
        assert_eq!(tx.try_answer(5, half), Ok(()));
        assert_eq!(tx.try_answer(6, half), Err(6));
        assert_eq!(tx.try_send(7, 1), Err(7));
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
    async fn a_slow_receiver_is_waited_for_and_a_stalled_receiver_is_not() {
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

    #[tokio::test(start_paused = true)]
    async fn senders_that_give_up_early_find_out_together_that_the_receiver_stalls() {
        let (tx, mut rx) = bounded(10);
        tx.send(1, 10).await.unwrap();
        let patience = STALL * 2 / 3;
        let impatient = || timeout(patience, tx.send_within(2, 1, STALL));
        assert!(impatient().await.is_err());
        assert_eq!(impatient().await, Ok(Err(SendWithinError::Stalled)));
        // The receiver reads, and stalls again.
        assert_eq!(rx.recv().await, Some(1));
        tx.send(3, 10).await.unwrap();
        assert!(impatient().await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn items_are_waited_for_until_they_are_written() {
        let (tx, mut rx) = bounded(10);
        let progress = rx.progress();
        tx.send_now(1).unwrap();
        let (first, second) = (tx.written(STALL), {
            tx.send_now(2).unwrap();
            tx.written(STALL)
        });
        tokio::pin!(first, second);
        assert!(timeout(STALL / 2, &mut first).await.is_err());
        rx.recv().await;
        let mark = progress.mark();
        rx.recv().await;
        assert!(timeout(STALL / 3, &mut first).await.is_err());
        drop(mark);
        timeout(STALL / 3, first).await.unwrap();
        assert!(timeout(STALL / 3, &mut second).await.is_err());
        drop(progress.mark());
        timeout(STALL / 3, second).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn items_are_not_waited_for_forever() {
        let (tx, mut rx) = bounded(10);
        for item in 0..3 {
            tx.send_now(item).unwrap();
        }
        let progress = rx.progress();
        let started = Instant::now();
        let slow = async {
            for _ in 0..2 {
                tokio::time::sleep(STALL / 2).await;
                rx.recv().await;
                drop(progress.mark());
            }
        };
        let ((), ()) = tokio::join!(tx.written(STALL), slow);
        assert_eq!(started.elapsed(), STALL * 2);
        drop(rx);
        tx.written(STALL).await;
        assert_eq!(started.elapsed(), STALL * 2);
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
