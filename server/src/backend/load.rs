//! The load of agent connections and threads: dials, connections, and clients.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use culvert_host::runtime::shards::ShardId;

/// Number of dials and connections of an agent connection, or of clients on a thread.
#[derive(Default)]
pub(crate) struct Load(Arc<AtomicUsize>);

/// Counts a dial and its connection, or a client, until dropped.
pub(crate) struct LoadGuard(Arc<AtomicUsize>);

/// Place of a client on a thread, until dropped.
pub struct ClientSeat {
    /// The thread.
    pub shard: ShardId,
    /// Counts the client among the clients of the thread. `None` if the tunnel does not count clients.
    _counted: Option<LoadGuard>,
}

impl Load {
    pub(crate) fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn enter(&self) -> LoadGuard {
        self.0.fetch_add(1, Ordering::Relaxed);
        LoadGuard(self.0.clone())
    }
}

impl Drop for LoadGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl ClientSeat {
    /// Creates a seat that no tunnel counts.
    pub(crate) fn on(shard: ShardId) -> Self {
        Self {
            shard,
            _counted: None,
        }
    }

    /// Creates a seat that counts until it is dropped.
    pub(crate) fn counted(shard: ShardId, guard: LoadGuard) -> Self {
        Self {
            shard,
            _counted: Some(guard),
        }
    }
}
