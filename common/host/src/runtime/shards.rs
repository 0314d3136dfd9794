//! Shards: threads that carry connections, each with its own runtime.
//!
//! One thread serves a connection and everything that exchanges bytes with the connection, because a
//! hand-over between threads costs a wake-up and cold caches for each chunk (docs/decisions/0001). A new
//! agent connection or OpenVPN client goes to the shard with the fewest agent connections and OpenVPN clients
//! in total. A proxied connection goes to the shard of its agent connection or OpenVPN client. In the node
//! tunnel, a proxied connection goes to the shard of its HTTP/2 connection to the seed's nodeport-proxy.
//!
//! At the front door, no such shard exists for a connection, and most connections are short. A front-door
//! connection stays on the shard that accepts it, unless this shard has many more connections than another
//! shard. A front-door connection that carries much data changes its shard once, to the shard with the fewest
//! bulk connections.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::runtime::{Builder, Handle, Id};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use tracing::warn;

use crate::net::listen::Accepted;

/// Maximum default number of shards. One shard carries about 10 Gbit/s.
const DEFAULT_MAX: usize = 4;

/// Number of seats that the caller's shard may have in excess of another shard before a possibly short
/// connection goes to the other shard. A hand-over costs a short connection an eighth of its processor time,
/// and this many connections with little data do not saturate a thread.
const SLACK: usize = 16;

/// Identity of a shard: the id of its runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardId(Id);

/// The shards of one program. Shard 0 is the runtime that created the shards.
pub struct Shards {
    handles: Vec<Handle>,
    /// Number of seats in use on each shard.
    seats: Taken,
    /// Number of seats of possibly short connections on each shard.
    nearby: Taken,
    /// Number of seats of bulk connections on each shard.
    bulk: Taken,
    _stop: DropGuard,
}

type Taken = Arc<[AtomicUsize]>;

/// A connection's place on a shard. Dropping the seat frees the place.
pub struct Seat {
    seats: Taken,
    /// Position of the shard in `seats`.
    index: usize,
    shard: ShardId,
}

impl Shards {
    /// Starts threads until there are `count` shards, including the caller's runtime. 0 means
    /// [`Shards::default_count`]. The threads end when the value is dropped.
    ///
    /// # Errors
    /// Fails if a thread cannot be started.
    pub fn start(count: usize) -> io::Result<Self> {
        let count = match count {
            0 => Self::default_count()?,
            count => count,
        };
        let stop = CancellationToken::new();
        let mut handles = vec![Handle::current()];
        for index in 1..count {
            let runtime = Builder::new_current_thread().enable_all().build()?;
            handles.push(runtime.handle().clone());
            let stop = stop.clone();
            std::thread::Builder::new()
                .name(format!("shard-{index}"))
                .spawn(move || {
                    runtime.block_on(stop.cancelled());
                    // A name lookup that hangs must not delay the end of the thread.
                    runtime.shutdown_background();
                })?;
        }
        let none_taken = || handles.iter().map(|_| AtomicUsize::new(0)).collect();
        Ok(Self {
            seats: none_taken(),
            nearby: none_taken(),
            bulk: none_taken(),
            handles,
            _stop: stop.drop_guard(),
        })
    }

    /// Returns the default number of shards: the number of processors that this process may use, but at most
    /// four.
    ///
    /// # Errors
    /// Fails if the number of processors cannot be determined.
    pub fn default_count() -> io::Result<usize> {
        Ok(std::thread::available_parallelism()?.get().min(DEFAULT_MAX))
    }

    /// Returns the number of shards.
    pub fn count(&self) -> usize {
        self.handles.len()
    }

    /// Returns the shards, in order.
    pub fn ids(&self) -> impl Iterator<Item = ShardId> {
        self.handles.iter().map(|handle| ShardId(handle.id()))
    }

    /// Returns the runtime of the calling task as a shard; `None` outside a runtime.
    pub fn current() -> Option<ShardId> {
        Some(ShardId(Handle::try_current().ok()?.id()))
    }

    /// Assigns a seat on the shard with the fewest seats in use. The caller's shard wins a tie, because a
    /// seat there needs no hand-over.
    pub fn seat(&self) -> Seat {
        self.take(&self.seats, 0)
    }

    /// Assigns a seat to a possibly short connection: on the caller's shard, unless this shard has many more
    /// such connections than another shard.
    pub fn seat_nearby(&self) -> Seat {
        self.take(&self.nearby, SLACK)
    }

    /// Assigns a seat on the shard with the fewest bulk connections.
    pub fn bulk_seat(&self) -> Seat {
        self.take(&self.bulk, 0)
    }

    /// Takes a seat on the caller's shard, unless another shard has more than `slack` seats fewer.
    fn take(&self, seats: &Taken, slack: usize) -> Seat {
        let here = Self::current();
        let load = |index: &usize| seats.get(*index).map(|taken| taken.load(Ordering::Relaxed));
        let own = self.ids().position(|id| Some(id) == here);
        let emptiest = (0..seats.len()).min_by_key(load).unwrap_or(0);
        let index = match own {
            Some(own) if load(&emptiest).map(|taken| taken + slack) >= load(&own) => own,
            _ => emptiest,
        };
        let seat = Seat {
            seats: seats.clone(),
            index,
            shard: self
                .ids()
                .nth(index)
                .unwrap_or_else(|| ShardId(Handle::current().id())),
        };
        seat.count(|taken| taken.fetch_add(1, Ordering::Relaxed));
        seat
    }

    fn handle(&self, shard: ShardId) -> Option<&Handle> {
        self.handles.iter().find(|handle| handle.id() == shard.0)
    }

    /// Runs a part of the caller's task on a shard. Dropping the returned handle ends the part. A shard that
    /// does not exist means the caller's runtime.
    pub fn run_on<F>(&self, shard: ShardId, part: F) -> AbortOnDropHandle<F::Output>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        let handle = self.handle(shard).cloned();
        AbortOnDropHandle::new(handle.unwrap_or_else(Handle::current).spawn(part))
    }

    /// Runs a task on a shard. A shard that does not exist means shard 0.
    pub fn spawn<F>(&self, shard: ShardId, tasks: &TaskTracker, task: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        match self.handle(shard).or(self.handles.first()) {
            Some(handle) => drop(tasks.spawn_on(task, handle)),
            None => drop(tasks.spawn(task)),
        }
    }
}

impl Seat {
    /// Returns the shard.
    pub fn shard(&self) -> ShardId {
        self.shard
    }

    fn count(&self, change: impl FnOnce(&AtomicUsize) -> usize) {
        self.seats.get(self.index).map(change);
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.count(|taken| taken.fetch_sub(1, Ordering::Relaxed));
    }
}

/// Serves an accepted connection on a shard, from its first byte on.
pub fn on_shard<F, T>(
    shards: &Shards,
    shard: ShardId,
    tasks: &TaskTracker,
    mut accepted: Accepted,
    serve: F,
) where
    F: FnOnce(Accepted) -> T + Send + 'static,
    T: Future<Output = ()> + Send + 'static,
{
    let moves = Some(shard) != Shards::current();
    shards.spawn(shard, tasks, async move {
        if moves {
            accepted = match accepted.rebind() {
                Ok(accepted) => accepted,
                Err(error) => return warn!(%error, "cannot serve an accepted connection"),
            };
        }
        serve(accepted).await;
    });
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]

    use tokio::sync::oneshot;

    use super::*;

    /// Returns the positions of the seats' shards.
    fn positions<'a>(shards: &Shards, seats: impl IntoIterator<Item = &'a Seat>) -> Vec<usize> {
        let position = |seat: &Seat| shards.ids().position(|id| id == seat.shard());
        seats.into_iter().filter_map(position).collect()
    }

    #[tokio::test]
    async fn a_task_stays_on_its_shard() {
        let shards = Shards::start(3).unwrap();
        let tasks = TaskTracker::new();
        let ids: Vec<_> = shards.ids().collect();
        assert_eq!((shards.count(), Shards::current()), (3, Some(ids[0])));
        for shard in [0, 1, 2, 1].map(|position| ids[position]) {
            let (tx, rx) = oneshot::channel();
            let task = async move {
                tokio::task::yield_now().await;
                let nested = tokio::spawn(async { Shards::current() }).await;
                tx.send((Shards::current(), nested.unwrap())).unwrap();
            };
            shards.spawn(shard, &tasks, task);
            assert_eq!(rx.await.unwrap(), (Some(shard), Some(shard)));
        }
        tasks.close();
        tasks.wait().await;
    }

    #[tokio::test]
    async fn seat_is_on_the_shard_with_the_fewest_seats() {
        let shards = Shards::start(3).unwrap();
        let mut seats = Vec::from([(); 4].map(|()| shards.seat()));
        assert_eq!(positions(&shards, &seats), [0, 1, 2, 0]);
        seats.remove(2);
        assert_eq!(positions(&shards, [&shards.seat()]), [2]);
    }

    #[tokio::test]
    async fn short_connection_stays_until_its_shard_has_many_more_than_another() {
        let shards = Shards::start(2).unwrap();
        let seats: Vec<_> = (0..SLACK + 3).map(|_| shards.seat_nearby()).collect();
        let order = positions(&shards, &seats);
        assert!(order[..=SLACK].iter().all(|shard| *shard == 0), "{order:?}");
        assert_eq!(order[SLACK + 1..], [1, 0]);
        // Bulk connections are counted separately, and stay on their shard if a move gains nothing.
        let bulk = Vec::from([(); 4].map(|()| shards.bulk_seat()));
        assert_eq!(positions(&shards, &bulk), [0, 1, 0, 1]);
        // Ordinary seats are counted separately too.
        assert_eq!(positions(&shards, [&shards.seat()]), [0]);
        let second = shards.ids().nth(1).unwrap();
        let there = shards.run_on(second, async { Shards::current() });
        assert_eq!(there.await.unwrap(), Some(second));
    }

    #[tokio::test]
    async fn dropping_the_handle_ends_the_part() {
        let shards = Shards::start(2).unwrap();
        let (dropped, drops) = oneshot::channel::<()>();
        let second = shards.ids().nth(1).unwrap();
        let part = shards.run_on(second, async move {
            let _dropped = dropped;
            std::future::pending::<()>().await;
        });
        tokio::task::yield_now().await;
        drop(part);
        drops.await.unwrap_err();
    }
}
