//! Choice among the addresses of the server's name. Each attempt starts with the address that the fewest connected
//! servers and attempts use, so a name with an address for each server needs only one attempt for each server.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use parking_lot::Mutex;

/// Use of the addresses of one name.
#[derive(Default)]
pub(crate) struct Addresses {
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    records: HashMap<SocketAddr, Record>,
    /// Number of attempts so far.
    attempts: u64,
}

#[derive(Clone, Copy, Default)]
struct Record {
    /// Number of attempts and connected servers that use the address.
    users: usize,
    /// True if the last attempt with the address failed.
    failed: bool,
    /// Number of the last attempt that started with the address; 0 for none.
    last: u64,
}

/// Use of an address by an attempt, and then by the connected server, until dropped. An attempt that is dropped without
/// [`Via::ended`], because another attempt was faster, changes nothing else.
pub(crate) struct Via {
    addresses: Arc<Addresses>,
    /// Addresses in the order to dial. The first address is in use.
    order: Vec<SocketAddr>,
}

// === impl Addresses ===

impl Addresses {
    /// Begins an attempt with the resolved addresses.
    pub(crate) fn begin(self: &Arc<Self>, mut found: Vec<SocketAddr>) -> Via {
        let mut table = self.table.lock();
        let Table { records, attempts } = &mut *table;
        records.retain(|address, record| record.users > 0 || found.contains(address));
        // A failed address counts as used, and otherwise the addresses take turns: neither a dead nor a busy address
        // keeps the attempts from the others.
        found.sort_by_key(|address| {
            let record = records.get(address).copied().unwrap_or_default();
            (record.users + usize::from(record.failed), record.last)
        });
        *attempts += 1;
        if let Some(first) = found.first() {
            let record = records.entry(*first).or_default();
            record.users += 1;
            record.last = *attempts;
        }
        drop(table);
        Via {
            addresses: self.clone(),
            order: found,
        }
    }
}

// === impl Via ===

impl Via {
    /// Returns the addresses in the order to dial.
    pub(crate) fn order(&self) -> &[SocketAddr] {
        &self.order
    }

    /// Records the address of the open connection. Earlier addresses in the order have failed.
    pub(crate) fn reached(&mut self, address: SocketAddr) {
        let Some(place) = self.order.iter().position(|one| *one == address) else {
            return;
        };
        let mut table = self.addresses.table.lock();
        let failed: Vec<_> = self.order.drain(..place).collect();
        for failed in &failed {
            table.records.entry(*failed).or_default().failed = true;
        }
        if let Some(first) = failed.first() {
            table.release(first);
            table.records.entry(address).or_default().users += 1;
        }
        self.order.truncate(1);
    }

    /// Records the end of the attempt: a server answered at the address, or the attempt failed. Before
    /// [`Via::reached`], all addresses have failed.
    pub(crate) fn ended(&mut self, is_answered: bool) {
        let count = if is_answered { 1 } else { self.order.len() };
        let mut table = self.addresses.table.lock();
        for address in self.order.iter().take(count) {
            table.records.entry(*address).or_default().failed = !is_answered;
        }
    }
}

impl Drop for Via {
    fn drop(&mut self) {
        let mut table = self.addresses.table.lock();
        if let Some(address) = self.order.first() {
            table.release(address);
        }
    }
}

// === impl Table ===

impl Table {
    fn release(&mut self, address: &SocketAddr) {
        if let Some(record) = self.records.get_mut(address) {
            record.users = record.users.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]

    use super::*;

    fn address(last: u8) -> SocketAddr {
        ([127, 0, 0, last], 8091).into()
    }

    fn three() -> Vec<SocketAddr> {
        vec![address(1), address(2), address(3)]
    }

    fn connect(addresses: &Arc<Addresses>, found: Vec<SocketAddr>) -> Via {
        let mut via = addresses.begin(found);
        let first = via.order()[0];
        via.reached(first);
        via.ended(true);
        via
    }

    #[test]
    fn each_server_gets_an_address_of_its_own() {
        let addresses = Arc::new(Addresses::default());
        let mut vias: Vec<Via> = (0..3).map(|_| connect(&addresses, three())).collect();
        let mut used: Vec<SocketAddr> = vias.iter().map(|via| via.order()[0]).collect();
        used.sort();
        assert_eq!(used, three());
        // The address of a lost server is free again, in whatever order the resolver returns the addresses.
        let lost = vias.remove(1).order()[0];
        let mut found = three();
        found.reverse();
        assert_eq!(addresses.begin(found).order()[0], lost);
    }

    #[test]
    fn attempts_in_progress_use_different_addresses() {
        let addresses = Arc::new(Addresses::default());
        let attempts = [(); 3].map(|()| addresses.begin(three()));
        let mut used = attempts.each_ref().map(|via| via.order()[0]);
        used.sort();
        assert_eq!(used.to_vec(), three());
    }

    #[test]
    fn failed_address_takes_turns_with_used_addresses_until_it_works() {
        let addresses = Arc::new(Addresses::default());
        let found = vec![address(1), address(2)];
        let held = connect(&addresses, vec![address(1)]);
        let firsts = (0..4).map(|_| {
            let mut via = addresses.begin(found.clone());
            let first = via.order()[0];
            via.reached(first);
            via.ended(first == address(1));
            first
        });
        let firsts: Vec<_> = firsts.collect();
        assert_eq!(firsts, [2, 1, 2, 1].map(address));
        drop(connect(&addresses, vec![address(2)]));
        assert_eq!(addresses.begin(found).order()[0], address(2));
        drop(held);
    }

    #[test]
    fn attempts_without_an_outcome_change_no_order() {
        let addresses = Arc::new(Addresses::default());
        let found = vec![address(1), address(2)];
        let _held = connect(&addresses, vec![address(2)]);
        let mut reached = addresses.begin(found.clone());
        let order = reached.order().to_vec();
        assert_eq!(order, found);
        reached.reached(address(1));
        drop(reached);
        drop(addresses.begin(found.clone()));
        assert_eq!(addresses.begin(found.clone()).order(), order);
        // A failed address counts as used, and the other address is next.
        let mut failed = addresses.begin(found.clone());
        failed.reached(address(1));
        failed.ended(false);
        drop(failed);
        assert_eq!(addresses.begin(found).order(), [address(2), address(1)]);
    }

    #[test]
    fn address_after_a_dead_one_is_in_use() {
        let addresses = Arc::new(Addresses::default());
        let mut via = addresses.begin(three());
        let [dead, works] = [via.order()[0], via.order()[1]];
        via.reached(works);
        via.ended(true);
        assert_eq!(via.order(), [works]);
        let table = addresses.table.lock();
        assert!(table.records[&dead].failed && table.records[&dead].users == 0);
        assert!(!table.records[&works].failed && table.records[&works].users == 1);
    }

    #[test]
    fn addresses_that_no_longer_resolve_are_forgotten() {
        let addresses = Arc::new(Addresses::default());
        for last in 1..100 {
            drop(addresses.begin(vec![address(last)]));
        }
        assert_eq!(addresses.table.lock().records.len(), 1);
    }
}
