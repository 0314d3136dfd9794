//! Threads that carry connections, each with a runtime of its own.
//!
//! A connection is served by one thread, and so is everything that it exchanges bytes with: a hand-over
//! between threads costs a wake-up and cold caches for each chunk (docs/tuning.md). New connections go
//! where their peer is, and the peers sit where the fewest are; clients of a node go where their connection
//! to the proxy is. Where connections have no peer and most are short, they stay on the thread that accepts
//! them, if that has few more than another; those that move much go to where the fewest of their kind are,
//! once.

use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::runtime::{Builder, Handle};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use tracing::warn;

use crate::net::listen::Accepted;

/// The most shards that are made without being asked for. One carries about 10 Gbit/s.
const DEFAULT_MAX: usize = 4;

/// How many more seats than another shard's the caller's may have before a connection that may be short
/// goes there: a hand-over costs a short one an eighth of its processor time, and so few that move little do
/// not fill a thread.
const SLACK: usize = 16;

thread_local! {
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

/// The shards of one program. Shard 0 is the runtime that made them.
pub struct Shards {
    handles: Vec<Handle>,
    /// How many seats are taken on each.
    seats: Taken,
    /// The same of connections that may be short.
    nearby: Taken,
    /// The same of connections that move bytes in bulk.
    bulk: Taken,
    _stop: DropGuard,
}

type Taken = Arc<[AtomicUsize]>;

/// A connection's place on a shard, free again when dropped.
pub struct Seat {
    seats: Taken,
    shard: usize,
}

impl Shards {
    /// Starts threads until there are `count` shards, the caller's runtime included; 0 goes by the
    /// processors that this process may use. The threads end when the value is dropped.
    ///
    /// # Errors
    /// When a thread can not be started.
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
                    CURRENT.set(index);
                    runtime.block_on(stop.cancelled());
                    // A name lookup that hangs must not hold up the end.
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

    /// How many are made without being asked for: as many as this process may use processors, four at most.
    ///
    /// # Errors
    /// When that cannot be found out.
    pub fn default_count() -> io::Result<usize> {
        Ok(std::thread::available_parallelism()?.get().min(DEFAULT_MAX))
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.handles.len()
    }

    /// The shard that runs the calling task; 0 outside of all shards.
    pub fn current() -> usize {
        CURRENT.get()
    }

    /// Takes a place on the shard with the fewest; the caller's, if it is one of those, has no hand-over
    /// to itself to pay for.
    pub fn seat(&self) -> Seat {
        Self::take(&self.seats, 0)
    }

    /// Takes a place for a connection that may be short: on the caller's shard, unless that has many more
    /// of these than another.
    pub fn seat_nearby(&self) -> Seat {
        Self::take(&self.nearby, SLACK)
    }

    /// Takes a place on the shard with the fewest connections that move bytes in bulk.
    pub fn bulk_seat(&self) -> Seat {
        Self::take(&self.bulk, 0)
    }

    fn take(seats: &Taken, slack: usize) -> Seat {
        let taken = seats.iter().map(|taken| taken.load(Ordering::Relaxed));
        let own = seats.get(Self::current());
        let own = own.map_or(usize::MAX, |taken| taken.load(Ordering::Relaxed));
        let emptiest = taken.enumerate().min_by_key(|(_, taken)| *taken);
        let seat = Seat {
            seats: seats.clone(),
            shard: match emptiest {
                Some((shard, taken)) if taken + slack < own => shard,
                _ => Self::current(),
            },
        };
        seat.count(|taken| taken.fetch_add(1, Ordering::Relaxed));
        seat
    }

    /// Runs a part of the caller's task on a shard; it ends with the handle. A shard that is not there is
    /// the caller's.
    pub fn run_on<F>(&self, shard: usize, part: F) -> AbortOnDropHandle<F::Output>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        let handle = self.handles.get(shard).cloned();
        AbortOnDropHandle::new(handle.unwrap_or_else(Handle::current).spawn(part))
    }

    /// Runs a task on a shard; one that is not there is shard 0.
    pub fn spawn<F>(&self, shard: usize, tasks: &TaskTracker, task: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        match self.handles.get(shard).or(self.handles.first()) {
            Some(handle) => drop(tasks.spawn_on(task, handle)),
            None => drop(tasks.spawn(task)),
        }
    }
}

impl Seat {
    /// The shard's number.
    pub fn shard(&self) -> usize {
        self.shard
    }

    fn count(&self, change: impl FnOnce(&AtomicUsize) -> usize) {
        self.seats.get(self.shard).map(change);
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.count(|taken| taken.fetch_sub(1, Ordering::Relaxed));
    }
}

/// Serves a connection on a shard, from its first byte on.
pub fn on_shard<F, T>(
    shards: &Shards,
    shard: usize,
    tasks: &TaskTracker,
    accepted: Accepted,
    serve: F,
) where
    F: FnOnce(Accepted) -> T + Send + 'static,
    T: Future<Output = ()> + Send + 'static,
{
    let moves = shard != Shards::current();
    shards.spawn(shard, tasks, async move {
        let accepted = if moves {
            accepted.rebind()
        } else {
            Ok(accepted)
        };
        match accepted {
            Ok(accepted) => serve(accepted).await,
            Err(error) => warn!(%error, "cannot serve an accepted connection"),
        }
    });
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]

    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn a_task_stays_on_its_shard() {
        let shards = Shards::start(3).unwrap();
        let tasks = TaskTracker::new();
        assert_eq!((shards.count(), Shards::current()), (3, 0));
        for shard in [0, 1, 2, 1] {
            let (tx, rx) = oneshot::channel();
            let task = async move {
                tokio::task::yield_now().await;
                let nested = tokio::spawn(async { Shards::current() }).await;
                tx.send((Shards::current(), nested.unwrap())).unwrap();
            };
            shards.spawn(shard, &tasks, task);
            assert_eq!(rx.await.unwrap(), (shard, shard));
        }
        tasks.close();
        tasks.wait().await;
    }

    #[tokio::test]
    async fn a_seat_is_where_the_fewest_are() {
        let shards = Shards::start(3).unwrap();
        let mut seats = Vec::from([(); 4].map(|()| shards.seat()));
        let order: Vec<_> = seats.iter().map(Seat::shard).collect();
        assert_eq!(order, [0, 1, 2, 0]);
        seats.remove(2);
        assert_eq!(shards.seat().shard(), 2);
    }

    #[tokio::test]
    async fn what_may_be_short_stays_where_it_is_until_that_is_much_fuller() {
        let shards = Shards::start(2).unwrap();
        let seats: Vec<_> = (0..SLACK + 3).map(|_| shards.seat_nearby()).collect();
        let order: Vec<_> = seats.iter().map(Seat::shard).collect();
        assert!(order[..=SLACK].iter().all(|shard| *shard == 0), "{order:?}");
        assert_eq!(order[SLACK + 1..], [1, 0]);
        // What moves much is counted by itself, and stays where it is if there is nothing to gain.
        let bulk = Vec::from([(); 4].map(|()| shards.bulk_seat()));
        let order: Vec<_> = bulk.iter().map(Seat::shard).collect();
        assert_eq!(order, [0, 1, 0, 1]);
        // As are those that are spread from the start.
        assert_eq!(shards.seat().shard(), 0);
        let there = shards.run_on(1, async { Shards::current() });
        assert_eq!(there.await.unwrap(), 1);
    }

    #[tokio::test]
    async fn a_part_ends_with_its_handle() {
        let shards = Shards::start(2).unwrap();
        let (dropped, drops) = oneshot::channel::<()>();
        let part = shards.run_on(1, async move {
            let _dropped = dropped;
            std::future::pending::<()>().await;
        });
        tokio::task::yield_now().await;
        drop(part);
        drops.await.unwrap_err();
    }
}
