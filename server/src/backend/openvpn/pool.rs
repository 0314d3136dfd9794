//! The addresses of the VPN's network, and the options that push an address to a client.
//!
//! [`Pool`] counts the leases. Dropping the last lease of an address frees the address.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::Arc;

use culvert_openvpn::control::push::Topology;
use ipnet::Ipv4Net;
use parking_lot::Mutex;

/// The addresses available to clients.
#[derive(Debug)]
pub(super) struct Pool {
    network: Ipv4Net,
    topology: Topology,
    /// Number of leases of each address in use.
    taken: Mutex<BTreeMap<Ipv4Addr, usize>>,
}

/// Lease of an address.
#[derive(Debug)]
pub(super) struct Lease {
    /// Address of the client.
    pub address: Ipv4Addr,
    /// Second argument of `ifconfig`: the remote end or the netmask.
    pub second: Ipv4Addr,
    /// True for an address that the pool has chosen, false for an address from a client's file.
    pub is_dynamic: bool,
    pool: Arc<Pool>,
}

/// Reason why a client gets no address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NoAddress {
    /// All addresses are in use.
    #[error("all addresses of {0} are in use; set --openvpn-network to a larger network")]
    Exhausted(Ipv4Net),
    /// Another client uses the requested address.
    #[error("{0} is in use by another client")]
    Taken(Ipv4Addr),
}

impl Pool {
    /// Creates a pool with all addresses free. The server uses the first address of the network.
    pub(super) fn new(network: Ipv4Net, topology: Topology) -> Arc<Self> {
        Arc::new(Self {
            network: network.trunc(),
            topology,
            taken: Mutex::default(),
        })
    }

    /// Returns the server's own address.
    pub(super) fn server(&self) -> Ipv4Addr {
        self.at(1)
    }

    fn at(&self, offset: u32) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.network.network().to_bits().wrapping_add(offset))
    }

    fn size(&self) -> u32 {
        1_u32
            .checked_shl(32 - u32::from(self.network.prefix_len()))
            .unwrap_or(u32::MAX)
    }

    /// Iterates over the addresses and their second `ifconfig` arguments, in order of allocation. With net30
    /// (blocks of four), the server's block and the last block stay unused, as in the stock program.
    fn candidates(&self) -> impl Iterator<Item = (Ipv4Addr, Ipv4Addr)> + '_ {
        let (first, step, count) = match self.topology {
            Topology::Net30 => (6, 4, (self.size() / 4).saturating_sub(2)),
            Topology::Subnet | Topology::P2p => (2, 1, self.size().saturating_sub(3)),
        };
        (0..count).map(move |index| {
            let address = self.at(first + step * index);
            (address, self.second(address))
        })
    }

    fn second(&self, address: Ipv4Addr) -> Ipv4Addr {
        match self.topology {
            Topology::Net30 => Ipv4Addr::from_bits(address.to_bits().wrapping_sub(1)),
            Topology::Subnet => self.network.netmask(),
            Topology::P2p => self.server(),
        }
    }

    /// Leases the first free address.
    ///
    /// # Errors
    /// Fails if all addresses are in use.
    pub(super) fn lease(self: &Arc<Self>) -> Result<Lease, NoAddress> {
        let mut taken = self.taken.lock();
        let (address, second) = self
            .candidates()
            .find(|(address, _)| !taken.contains_key(address))
            .ok_or(NoAddress::Exhausted(self.network))?;
        Ok(self.take(&mut taken, address, second, true))
    }

    fn take(
        self: &Arc<Self>,
        taken: &mut BTreeMap<Ipv4Addr, usize>,
        address: Ipv4Addr,
        second: Ipv4Addr,
        is_dynamic: bool,
    ) -> Lease {
        *taken.entry(address).or_default() += 1;
        Lease {
            address,
            second,
            is_dynamic,
            pool: self.clone(),
        }
    }

    /// Leases the address that a client's file specifies. The address may be outside the network.
    ///
    /// # Errors
    /// Fails if the address belongs to the server or to another client.
    pub(super) fn lease_static(
        self: &Arc<Self>,
        address: Ipv4Addr,
        second: Option<Ipv4Addr>,
    ) -> Result<Lease, NoAddress> {
        let mut taken = self.taken.lock();
        if address == self.server() || taken.contains_key(&address) {
            return Err(NoAddress::Taken(address));
        }
        let second = second.unwrap_or_else(|| self.second(address));
        Ok(self.take(&mut taken, address, second, false))
    }

    /// Leases the address of a dynamic lease that still exists. The address stays in use until both are dropped.
    pub(super) fn take_over(self: &Arc<Self>, address: Ipv4Addr) -> Lease {
        let second = self.second(address);
        self.take(&mut self.taken.lock(), address, second, true)
    }

    /// Leases the address that a client's file specifies even if older leases of the address exist. The address stays
    /// in use until all are dropped.
    pub(super) fn take_over_static(
        self: &Arc<Self>,
        address: Ipv4Addr,
        second: Option<Ipv4Addr>,
    ) -> Lease {
        let second = second.unwrap_or_else(|| self.second(address));
        self.take(&mut self.taken.lock(), address, second, false)
    }
}

impl Lease {
    /// Returns the pushed options for the client's address and the route to the server.
    pub(super) fn push(&self) -> Vec<String> {
        let (address, second, server) = (self.address, self.second, self.pool.server());
        let way = match self.pool.topology {
            Topology::Subnet => format!("route-gateway {server}"),
            Topology::Net30 | Topology::P2p => format!("route {server}"),
        };
        let topology = self.pool.topology.name();
        vec![
            way,
            format!("topology {topology}"),
            format!("ifconfig {address} {second}"),
        ]
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut taken = self.pool.taken.lock();
        if let Some(leases) = taken.get_mut(&self.address) {
            *leases -= 1;
            if *leases == 0 {
                taken.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]

    use super::*;

    fn pool(network: &str, topology: Topology) -> Arc<Pool> {
        Pool::new(network.parse().unwrap(), topology)
    }

    #[test]
    fn addresses_match_the_stock_program() {
        let net30 = pool("10.20.0.0/24", Topology::Net30);
        let first = net30.lease().unwrap();
        assert_eq!(
            first.push(),
            [
                "route 10.20.0.1",
                "topology net30",
                "ifconfig 10.20.0.6 10.20.0.5"
            ]
        );
        assert_eq!(
            net30.lease().unwrap().push()[2],
            "ifconfig 10.20.0.10 10.20.0.9"
        );
        let subnet = pool("10.20.0.0/24", Topology::Subnet).lease().unwrap();
        assert_eq!(
            subnet.push(),
            [
                "route-gateway 10.20.0.1",
                "topology subnet",
                "ifconfig 10.20.0.2 255.255.255.0"
            ]
        );
        let p2p = pool("10.20.0.0/24", Topology::P2p).lease().unwrap();
        assert_eq!(p2p.push()[2], "ifconfig 10.20.0.2 10.20.0.1");
    }

    #[test]
    fn leased_addresses_are_unique_and_freed_on_drop() {
        for (topology, network, count) in [
            (Topology::Net30, "10.20.0.0/24", 62),
            (Topology::Subnet, "10.20.0.0/24", 253),
            (Topology::Subnet, "10.20.0.0/29", 5),
            (Topology::Net30, "10.20.0.0/29", 0),
        ] {
            let pool = pool(network, topology);
            let leases: Vec<Lease> = std::iter::from_fn(|| pool.lease().ok()).collect();
            assert_eq!(leases.len(), count, "{network} {topology:?}");
            let mut addresses: Vec<_> = leases.iter().map(|lease| lease.address).collect();
            addresses.dedup();
            assert_eq!(addresses.len(), count);
            assert!(addresses.iter().all(|a| pool.network.contains(a)));
            assert!(matches!(pool.lease(), Err(NoAddress::Exhausted(_))));
            drop(leases);
            assert_eq!(pool.lease().is_ok(), count > 0);
        }
    }

    #[test]
    fn static_address_is_skipped_by_the_pool() {
        let pool = pool("10.20.0.0/24", Topology::Net30);
        let six: Ipv4Addr = "10.20.0.6".parse().unwrap();
        let own = pool.lease_static(six, None).unwrap();
        assert_eq!(own.push()[2], "ifconfig 10.20.0.6 10.20.0.5");
        assert_eq!(
            pool.lease_static(six, None).unwrap_err(),
            NoAddress::Taken(six)
        );
        assert_eq!(
            pool.lease().unwrap().address,
            "10.20.0.10".parse::<Ipv4Addr>().unwrap()
        );
        let server = pool.server();
        assert!(pool.lease_static(server, None).is_err());
    }
}
