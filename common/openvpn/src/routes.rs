//! The routes of a server: which peer owns an address inside the VPN, and which source addresses a peer may
//! use.
//!
//! Owns the peers' own addresses and their iroutes. The longest prefix wins. Among equal prefixes the newest
//! peer wins; when the newest peer is removed, the one before is used again. During a rolling update, two
//! `user-cluster-client`s are connected at the same time.

#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap};
use std::net::Ipv4Addr;

use ipnet::Ipv4Net;

/// Identifier of a peer, assigned by the owner of the routes. A newer peer must have a larger id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerId(pub u64);

/// The routes to all peers.
#[derive(Debug)]
pub struct Routes {
    /// Peers of each network, the newest last. No set is empty.
    owners: HashMap<Ipv4Net, BTreeSet<PeerId>>,
    /// Number of networks of each prefix length. A lookup skips lengths without networks.
    lengths: [usize; 33],
    /// Networks of each peer, including its own address.
    peers: HashMap<PeerId, Vec<Ipv4Net>>,
}

impl Default for Routes {
    fn default() -> Self {
        Self::new()
    }
}

impl Routes {
    /// Creates an empty table.
    pub fn new() -> Self {
        Self {
            owners: HashMap::new(),
            lengths: [0; 33],
            peers: HashMap::new(),
        }
    }

    /// Adds a peer's own address and the networks behind the peer. An existing peer is replaced.
    pub fn add(&mut self, peer: PeerId, address: Ipv4Addr, iroutes: &[Ipv4Net]) {
        self.remove(peer);
        let mut networks: Vec<_> = iroutes.iter().map(Ipv4Net::trunc).collect();
        networks.push(Ipv4Net::from(address));
        networks.sort_unstable();
        networks.dedup();
        for network in &networks {
            let owners = self.owners.entry(*network).or_default();
            if owners.is_empty()
                && let Some(count) = self.lengths.get_mut(usize::from(network.prefix_len()))
            {
                *count += 1;
            }
            owners.insert(peer);
        }
        self.peers.insert(peer, networks);
    }

    /// Removes a peer and its routes.
    pub fn remove(&mut self, peer: PeerId) {
        for network in self.peers.remove(&peer).unwrap_or_default() {
            let Some(owners) = self.owners.get_mut(&network) else {
                continue;
            };
            owners.remove(&peer);
            if owners.is_empty() {
                self.owners.remove(&network);
                if let Some(count) = self.lengths.get_mut(usize::from(network.prefix_len())) {
                    *count -= 1;
                }
            }
        }
    }

    /// Returns the peer that owns an address.
    pub fn lookup(&self, destination: Ipv4Addr) -> Option<PeerId> {
        (0..=32_u8)
            .rev()
            .zip(self.lengths.iter().rev())
            .filter(|(_, count)| **count > 0)
            .find_map(|(length, _)| {
                let network = Ipv4Net::new(destination, length).ok()?.trunc();
                self.owners.get(&network)?.last().copied()
            })
    }

    /// True if `peer` may send from this address: its own address, or an address inside its iroutes, even if
    /// another peer's route wins.
    pub fn permits(&self, peer: PeerId, source: Ipv4Addr) -> bool {
        self.peers
            .get(&peer)
            .is_some_and(|networks| networks.iter().any(|network| network.contains(&source)))
    }

    /// Returns a peer's networks, including its own address.
    #[cfg(test)]
    pub(crate) fn networks(&self, peer: PeerId) -> &[Ipv4Net] {
        self.peers.get(&peer).map_or(&[], Vec::as_slice)
    }
}
