//! Connections of clients that are not admitted yet. Their number is limited. At the limit, a new connection
//! displaces an older connection, see [`makes_room`], so that idle connections cannot lock out other clients.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use culvert_openvpn::half_open::makes_room;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

/// All half-open connections of one listener.
pub(super) struct HalfOpens {
    limit: usize,
    waiting: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    last: u64,
    all: BTreeMap<u64, (IpAddr, CancellationToken)>,
}

/// Slot of one half-open connection. Dropping the slot frees it.
pub(super) struct HalfOpen {
    all: Arc<HalfOpens>,
    id: u64,
}

impl HalfOpens {
    /// Creates an empty set with room for `limit` connections.
    pub(super) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self {
            limit,
            waiting: Mutex::default(),
        })
    }

    /// Allocates a slot. `cut` fires when a newer connection displaces this connection.
    pub(super) fn enter(self: &Arc<Self>, from: IpAddr, cut: CancellationToken) -> HalfOpen {
        let mut waiting = self.waiting.lock();
        if waiting.all.len() >= self.limit {
            let all = waiting.all.iter().map(|(id, (from, _))| (*id, *from));
            let displaced = makes_room(all).and_then(|id| waiting.all.remove(&id));
            if let Some((_, cut)) = displaced {
                cut.cancel();
            }
        }
        waiting.last += 1;
        let id = waiting.last;
        waiting.all.insert(id, (from, cut));
        let all = self.clone();
        HalfOpen { all, id }
    }
}

impl HalfOpen {
    /// Returns true if a newer connection has displaced this connection.
    pub(super) fn is_displaced(&self) -> bool {
        !self.all.waiting.lock().all.contains_key(&self.id)
    }
}

impl Drop for HalfOpen {
    fn drop(&mut self) {
        self.all.waiting.lock().all.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]

    use super::*;

    #[test]
    fn oldest_connection_is_displaced_at_the_limit() {
        let all = HalfOpens::new(2);
        let cuts: Vec<_> = (0..4).map(|_| CancellationToken::new()).collect();
        let from = "192.0.2.1".parse().unwrap();
        let enter = |index: usize| all.enter(from, cuts[index].clone());
        let first = enter(0);
        drop(enter(1));
        let third = enter(2);
        assert!(!first.is_displaced() && !cuts[0].is_cancelled());
        let _fourth = enter(3);
        assert!(first.is_displaced() && cuts[0].is_cancelled());
        assert!(!third.is_displaced());
        assert!(cuts[1..].iter().all(|cut| !cut.is_cancelled()));
        drop(first);
        assert_eq!(all.waiting.lock().all.len(), 2);
    }
}
