//! Addresses of nodes inside the VPN, and their mapping to nodes.
//!
//! Control planes reach a node with the InternalIP `a.b.c.d` as `X.Y.c.d`. `X.Y` are the first two octets of
//! the node access network. `c.d` alone does not identify a node, so the possible `a.b` must be configured.

use std::net::{Ipv4Addr, SocketAddrV4};

use ipnet::Ipv4Net;

/// Default node access network of the stock platform.
pub const DEFAULT_NETWORK: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(10, 254, 0, 0), 16);

/// The node access network and the nodes reachable through it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeAccess {
    /// Node access network; only its first two octets are used.
    pub network: Ipv4Net,
    /// Addresses of nodes, and networks of nodes of /16 or smaller. The first match wins.
    pub nodes: Vec<Ipv4Net>,
}

impl Default for NodeAccess {
    fn default() -> Self {
        Self {
            network: DEFAULT_NETWORK,
            nodes: Vec::new(),
        }
    }
}

impl NodeAccess {
    /// Returns the real address of `destination`, an address as seen by the control plane. Addresses outside
    /// the node access network are returned unchanged. Returns `None` if the address is in the node access
    /// network but belongs to no node.
    pub fn target(&self, destination: SocketAddrV4) -> Option<SocketAddrV4> {
        let [x, y, c, d] = destination.ip().octets();
        let [own_x, own_y, ..] = self.network.addr().octets();
        if (x, y) != (own_x, own_y) {
            return Some(destination);
        }
        self.nodes.iter().find_map(|nodes| {
            let [a, b, ..] = nodes.addr().octets();
            let node = Ipv4Addr::new(a, b, c, d);
            let found = nodes.contains(&node);
            found.then(|| SocketAddrV4::new(node, destination.port()))
        })
    }

    /// Returns pairs of entries that cover the same last two octets. The second entry of a pair is never
    /// reached.
    pub fn collisions(&self) -> Vec<(Ipv4Net, Ipv4Net)> {
        let moved = |nodes: &Ipv4Net| {
            let [_, _, c, d] = nodes.addr().octets();
            Ipv4Net::new(Ipv4Addr::new(0, 0, c, d), nodes.prefix_len())
        };
        let mut pairs = Vec::new();
        for (index, later) in self.nodes.iter().enumerate() {
            let earlier = self.nodes.iter().take(index).find(|earlier| {
                matches!((moved(earlier), moved(later)), (Ok(a), Ok(b)) if a.contains(&b))
            });
            pairs.extend(earlier.map(|earlier| (*earlier, *later)));
        }
        pairs
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn access(nodes: &[&str]) -> NodeAccess {
        NodeAccess {
            nodes: nodes.iter().map(|net| net.parse().unwrap()).collect(),
            ..NodeAccess::default()
        }
    }

    fn target(access: &NodeAccess, destination: &str) -> Option<String> {
        access
            .target(destination.parse().unwrap())
            .map(|target| target.to_string())
    }

    #[test]
    fn nodes_are_found_by_their_last_two_octets() {
        let access = access(&["192.168.0.0/20", "10.1.20.7/32", "172.30.0.0/16"]);
        for (destination, expected) in [
            ("10.254.15.9:10250", "192.168.15.9:10250"),
            ("10.254.20.7:9100", "10.1.20.7:9100"),
            ("10.254.20.8:10250", "172.30.20.8:10250"),
            // Outside the node access network.
            ("172.25.0.9:443", "172.25.0.9:443"),
            ("10.253.20.7:1", "10.253.20.7:1"),
        ] {
            assert_eq!(target(&access, destination).unwrap(), expected);
        }
    }

    #[test]
    fn unknown_node_has_no_target() {
        let access = access(&["192.168.0.0/24"]);
        assert_eq!(target(&access, "10.254.1.1:10250"), None);
    }

    #[test]
    fn collisions_are_detected() {
        let access = access(&["10.1.0.0/16", "10.2.3.4/32", "10.1.0.0/24"]);
        let collisions = access.collisions();
        assert_eq!(collisions.len(), 2, "{collisions:?}");
        assert_eq!(
            collisions.first().unwrap().1,
            "10.2.3.4/32".parse().unwrap()
        );
    }
}
