//! Connections whose client has not shown a certificate yet. There may be only so many: a new one
//! takes the place of the oldest, so that those who only connect can not keep others out.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

/// All of them.
pub struct HalfOpens {
    limit: usize,
    waiting: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    last: u64,
    all: BTreeMap<u64, CancellationToken>,
}

/// A place, free again when dropped.
pub struct HalfOpen {
    all: Arc<HalfOpens>,
    id: u64,
}

impl HalfOpens {
    /// Room for so many.
    pub fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self {
            limit,
            waiting: Mutex::default(),
        })
    }

    /// Takes a place; `cut` fires when another one needs it.
    pub fn enter(self: &Arc<Self>, cut: CancellationToken) -> HalfOpen {
        let mut waiting = self.waiting.lock();
        if waiting.all.len() >= self.limit
            && let Some((_, oldest)) = waiting.all.pop_first()
        {
            oldest.cancel();
        }
        waiting.last += 1;
        let id = waiting.last;
        waiting.all.insert(id, cut);
        let all = self.clone();
        HalfOpen { all, id }
    }
}

impl HalfOpen {
    /// Whether another one has taken the place.
    pub fn is_displaced(&self) -> bool {
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
    #![allow(clippy::indexing_slicing)]

    use super::*;

    #[test]
    fn the_oldest_goes_when_there_are_too_many() {
        let all = HalfOpens::new(2);
        let cuts: Vec<_> = (0..4).map(|_| CancellationToken::new()).collect();
        let enter = |index: usize| all.enter(cuts[index].clone());
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
