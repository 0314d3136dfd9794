//! The pool of bytes that connections may queue beyond their own budgets, all of one program
//! together.
//!
//! A reader of a shared packet stream can not slow one connection down without the others, and may
//! do that for a moment only. So a connection whose receiver is slow may borrow from this pool; when the pool is
//! empty, the connection that has borrowed most is closed, and no other. Its bytes are freed
//! before the next one gets any: the limit holds at every moment. A fixed share for each would be
//! simpler, but then many slow connections empty the pool together and the next one to ask is
//! closed, however little it needs.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use metrics::Gauge;
use parking_lot::Mutex;

/// Bytes beyond budgets; shared by all connections of a program.
pub struct Pool {
    limit: usize,
    next: AtomicU64,
    state: Mutex<State>,
    /// Bytes in use, for the metrics page.
    bytes: Gauge,
    /// How many connections use any.
    borrowers: Gauge,
}

#[derive(Default)]
struct State {
    used: usize,
    /// Only those that have borrowed.
    loans: HashMap<Account, Loan>,
}

struct Loan {
    bytes: usize,
    debtor: Weak<dyn Debtor>,
}

/// Names a connection's loan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Account(u64);

/// A queue that may have to give back all that it has borrowed.
pub(super) trait Debtor: Send + Sync {
    /// Frees everything that is queued, gives the loan back, and ends the connection.
    fn evict(&self);
}

/// There is no room for a loan.
pub(super) enum Exhausted {
    /// The one that asked would be the largest debtor.
    Asker,
    /// This one is; once it is evicted it is worth asking again.
    Other(Arc<dyn Debtor>),
}

// === impl Pool ===

impl Pool {
    /// A pool of `limit` bytes. Too small closes connections over short bursts, too large costs
    /// memory when receivers are slow. Shows in the gauges what is borrowed, and by how many.
    pub fn new(limit: usize, bytes: Gauge, borrowers: Gauge) -> Arc<Self> {
        Arc::new(Self {
            limit,
            next: AtomicU64::new(1),
            state: Mutex::default(),
            bytes,
            borrowers,
        })
    }

    /// Bytes that are borrowed now.
    pub fn used(&self) -> usize {
        self.state.lock().used
    }

    pub(super) fn account(&self) -> Account {
        Account(self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// Lends `more` bytes to an account.
    pub(super) fn borrow(
        &self,
        account: Account,
        more: usize,
        debtor: impl FnOnce() -> Weak<dyn Debtor>,
    ) -> Result<(), Exhausted> {
        let mut state = self.state.lock();
        if state.used.saturating_add(more) > self.limit {
            return Err(state.largest_beside(account, more));
        }
        state.used += more;
        let loan = state.loans.entry(account).or_insert_with(|| Loan {
            bytes: 0,
            debtor: debtor(),
        });
        loan.bytes += more;
        self.show(&state);
        Ok(())
    }

    /// Takes back `bytes` of what an account has borrowed.
    pub(super) fn give_back(&self, account: Account, bytes: usize) {
        let mut state = self.state.lock();
        let Some(loan) = state.loans.get_mut(&account) else {
            return;
        };
        let returned = bytes.min(loan.bytes);
        loan.bytes -= returned;
        if loan.bytes == 0 {
            state.loans.remove(&account);
        }
        state.used -= returned;
        self.show(&state);
    }

    fn show(&self, state: &State) {
        self.bytes.set(state.used as f64);
        self.borrowers.set(state.loans.len() as f64);
    }
}

impl State {
    fn largest_beside(&self, asker: Account, more: usize) -> Exhausted {
        let own = self.loans.get(&asker).map_or(0, |loan| loan.bytes) + more;
        let others = self.loans.iter().filter(|(account, _)| **account != asker);
        let largest = others
            .filter(|(_, loan)| loan.bytes > own)
            .max_by_key(|(_, loan)| loan.bytes);
        largest
            .and_then(|(_, loan)| loan.debtor.upgrade())
            .map_or(Exhausted::Asker, Exhausted::Other)
    }
}
