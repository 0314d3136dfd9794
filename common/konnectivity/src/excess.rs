//! The pool of bytes that connections may queue beyond their own budgets, shared by all connections of a
//! program.
//!
//! The reader of a shared packet stream cannot slow down one connection alone, and may slow down all of them
//! only for a moment. So a connection with a slow receiver may borrow from this pool. When the pool is empty,
//! the connection with the largest loan is closed, and no other. The bytes of the closed connection are freed
//! before the next loan, so the pool never exceeds its limit. A fixed share per connection would be simpler,
//! but then many slow connections empty the pool together, and the next borrower is closed, however small its
//! loan.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use metrics::Gauge;
use parking_lot::Mutex;

/// Budget of bytes beyond budgets, shared by the connections of a program.
pub struct OverflowBudget {
    limit: usize,
    next: AtomicU64,
    state: Mutex<State>,
    /// Bytes in use, for the metrics page.
    bytes: Gauge,
    /// Number of connections with a loan.
    borrowers: Gauge,
}

#[derive(Default)]
struct State {
    used: usize,
    /// Loans by account; an account without a loan has no entry.
    loans: HashMap<Account, Loan>,
}

struct Loan {
    bytes: usize,
    debtor: Weak<dyn Debtor>,
}

/// Identifier of a connection's loan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Account(u64);

/// Queue with a loan, which may have to be returned at once.
pub(super) trait Debtor: Send + Sync {
    /// Frees all queued items, returns the loan and ends the connection.
    fn evict(&self);
}

/// Error for a loan larger than the free part of the pool.
pub(super) enum Exhausted {
    /// The borrower itself would have the largest loan.
    Asker,
    /// Another queue has the largest loan: evict that queue, then try again.
    Other(Arc<dyn Debtor>),
}

// === impl OverflowBudget ===

impl OverflowBudget {
    /// Creates a pool of `limit` bytes. A pool that is too small closes connections because of short bursts;
    /// a pool that is too large costs memory when receivers are slow. The gauges show the borrowed bytes and
    /// the number of borrowers.
    pub fn new(limit: usize, bytes: Gauge, borrowers: Gauge) -> Arc<Self> {
        Arc::new(Self {
            limit,
            next: AtomicU64::new(1),
            state: Mutex::default(),
            bytes,
            borrowers,
        })
    }

    /// Returns the bytes borrowed now.
    pub fn used(&self) -> usize {
        self.state.lock().used
    }

    pub(super) fn account(&self) -> Account {
        Account(self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// Adds `more` bytes to the loan of an account.
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

    /// Returns `bytes` of an account's loan to the pool.
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
