//! The shares of source addresses in a limited resource, such as the descriptors of the process: one source cannot
//! use all of it.
//!
//! A source may have at most as many connections as descriptors are free, or a multiple of this number. With two
//! descriptors for each connection, a single source may thus use two thirds of the descriptors, the next source two thirds
//! of the rest, and so on: every source finds a part free. While few descriptors are in use, the rule has no effect.
//! Network switches share buffers between ports in the same way (A. K. Choudhury and E. L. Hahne, "Dynamic Queue Length
//! Thresholds for Shared-Memory Packet Switches", 1998).

use std::collections::HashMap;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd as _};
use std::sync::Arc;

use parking_lot::Mutex;

use super::admission::host_key;
use super::listen::usable_descriptors;

/// The connections of all sources.
#[derive(Debug)]
pub struct Shares {
    /// Number of descriptors or places for connections.
    usable: u64,
    /// Connections that a source may have for each free place.
    factor: u64,
    /// Number of connections by host. IPv6 hosts are counted by /64 network.
    hosts: Mutex<HashMap<u64, u64>>,
}

/// A connection in the share of its source, until dropped.
#[derive(Debug)]
pub struct Share {
    shares: Arc<Shares>,
    host: u64,
}

impl Shares {
    /// Creates the shares in the descriptors that the process may open.
    pub fn new() -> Arc<Self> {
        Self::of(usable_descriptors(), 1)
    }

    /// Creates the shares in `usable` places. A source may have `factor` connections for each free place. A single
    /// source leaves one place of `factor + 1` free.
    pub fn of(usable: u64, factor: u64) -> Arc<Self> {
        Arc::new(Self {
            usable,
            factor,
            hosts: Mutex::default(),
        })
    }

    /// Counts a new connection from `source`; returns `None` if the source has used up its share. `socket` is the
    /// newest socket, whose number shows how many descriptors are in use.
    pub fn take(self: &Arc<Self>, source: IpAddr, socket: &impl AsFd) -> Option<Share> {
        let number = socket.as_fd().as_raw_fd();
        self.take_at(source, u64::try_from(number).unwrap_or_default())
    }

    /// Counts a new connection from `source` if the places are used by nothing but counted connections; returns `None` if
    /// the source has used up its share.
    pub fn take_place(self: &Arc<Self>, source: IpAddr) -> Option<Share> {
        let mut hosts = self.hosts.lock();
        let in_use = hosts.values().sum();
        self.take_in(&mut hosts, source, in_use)
    }

    /// Counts a new connection from `source` while `in_use` places are in use; returns `None` if the source has used
    /// up its share.
    pub fn take_at(self: &Arc<Self>, source: IpAddr, in_use: u64) -> Option<Share> {
        self.take_in(&mut self.hosts.lock(), source, in_use)
    }

    fn take_in(
        self: &Arc<Self>,
        hosts: &mut HashMap<u64, u64>,
        source: IpAddr,
        in_use: u64,
    ) -> Option<Share> {
        let host = host_key(source);
        let free = self
            .usable
            .saturating_sub(in_use)
            .saturating_mul(self.factor);
        let count = hosts.entry(host).or_default();
        if *count >= free {
            if *count == 0 {
                hosts.remove(&host);
            }
            return None;
        }
        *count += 1;
        Some(Share {
            shares: self.clone(),
            host,
        })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut hosts = self.shares.hosts.lock();
        if let Some(count) = hosts.get_mut(&self.host) {
            *count -= 1;
            if *count == 0 {
                hosts.remove(&self.host);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// Opens connections from `source` until one is refused. Each connection uses two descriptors.
    fn fill(shares: &Arc<Shares>, open: &mut Vec<Share>, source: &str) -> usize {
        let before = open.len();
        let in_use = |open: &Vec<Share>| 2 * open.len() as u64;
        while let Some(share) = shares.take_at(source.parse().unwrap(), in_use(open)) {
            open.push(share);
        }
        open.len() - before
    }

    #[test]
    fn each_source_leaves_descriptors_for_the_next_source() {
        let shares = Shares::of(9_000, 1);
        let mut open = Vec::new();
        assert_eq!(fill(&shares, &mut open, "192.0.2.1"), 3_000);
        assert_eq!(fill(&shares, &mut open, "192.0.2.2"), 1_000);
        assert_eq!(fill(&shares, &mut open, "::ffff:192.0.2.2"), 0);
        assert_eq!(fill(&shares, &mut open, "2001:db8::1"), 334);
        assert_eq!(fill(&shares, &mut open, "2001:db8::2"), 0);
        assert!(fill(&shares, &mut open, "2001:db8:0:1::1") > 0);
    }

    #[test]
    fn places_are_limited_and_each_source_leaves_some() {
        let shares = Shares::of(90, 8);
        let take = |source: &str| shares.take_place(source.parse().unwrap());
        let first: Vec<Share> = std::iter::from_fn(|| take("192.0.2.1")).collect();
        assert_eq!(first.len(), 80);
        let second: Vec<Share> = std::iter::from_fn(|| take("192.0.2.2")).collect();
        assert_eq!(second.len(), 9);
        let last = take("192.0.2.3");
        assert!(last.is_some() && take("192.0.2.4").is_none());
        drop(first);
        assert!(take("192.0.2.1").is_some());
    }

    #[test]
    fn closed_connections_return_their_share() {
        let shares = Shares::of(100, 1);
        let mut open = Vec::new();
        let first = fill(&shares, &mut open, "192.0.2.1");
        open.clear();
        assert!(shares.hosts.lock().is_empty(), "nothing is kept forever");
        assert_eq!(fill(&shares, &mut open, "192.0.2.1"), first);
        // A source without connections is refused only if no descriptor is free.
        assert!(shares.take_at("192.0.2.2".parse().unwrap(), 99).is_some());
        assert!(shares.take_at("192.0.2.2".parse().unwrap(), 100).is_none());
    }
}
