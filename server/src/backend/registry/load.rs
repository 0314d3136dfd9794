//! The load of an agent connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Number of dials and connections of an agent connection.
#[derive(Default)]
pub(super) struct Load(Arc<AtomicUsize>);

/// Counts a dial and its connection until dropped.
pub(crate) struct LoadGuard(Arc<AtomicUsize>);

impl Load {
    pub(super) fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    pub(super) fn enter(&self) -> LoadGuard {
        self.0.fetch_add(1, Ordering::Relaxed);
        LoadGuard(self.0.clone())
    }
}

impl Drop for LoadGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
