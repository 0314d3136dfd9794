//! The node access network: the addresses under which nodes are reached through the VPN.
//!
//! A node's InternalIP `a.b.c.d` is `X.Y.c.d` there, `X.Y` being the first two octets of the
//! network. The server role translates what is dialed, the client role translates back. Owns the
//! list of known nodes.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddrV4};

use ipnet::Ipv4Net;

/// The kubelet's port where a node does not name one.
const KUBELET_PORT: u16 = 10250;

/// A node, as the Kubernetes API knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its name, for messages.
    pub name: String,
    /// Its IPv4 InternalIP. Without one a node can not be reached.
    pub internal: Ipv4Addr,
    /// Its IPv4 ExternalIPs.
    pub external: Vec<Ipv4Addr>,
    /// Its kubelet's port; 0 stands for 10250.
    pub kubelet_port: u16,
}

/// The translation table.
#[derive(Clone, Debug)]
pub struct Nodes {
    access: Ipv4Net,
    direct: Vec<Ipv4Net>,
    rewrite_others: bool,
    /// A node's address and kubelet port to its InternalIP.
    dialed: HashMap<SocketAddrV4, Ipv4Addr>,
    /// The last two octets to the InternalIP.
    internal: HashMap<[u8; 2], Ipv4Addr>,
    collisions: Vec<(String, String)>,
}

impl Nodes {
    /// No nodes yet. `access` is the node access network, 10.254.0.0/16 in KKP; addresses in it
    /// and in `direct` (pods, services) are never translated.
    ///
    /// With `rewrite_others` every other address is taken for a node's InternalIP, on every port.
    /// It needs no list of nodes, but is wrong for ExternalIPs that are not in the list. Without
    /// it only kubelets of listed nodes are translated, as KKP's kubeletdnat-controller does.
    pub fn new(access: Ipv4Net, direct: Vec<Ipv4Net>, rewrite_others: bool) -> Self {
        Self {
            access,
            direct,
            rewrite_others,
            dialed: HashMap::new(),
            internal: HashMap::new(),
            collisions: Vec::new(),
        }
    }

    /// Replaces the list of nodes.
    pub fn update(&mut self, nodes: &[Node]) {
        self.dialed.clear();
        self.internal.clear();
        self.collisions.clear();
        let mut names = HashMap::new();
        for node in nodes {
            let port = match node.kubelet_port {
                0 => KUBELET_PORT,
                port => port,
            };
            for address in node.external.iter().chain([&node.internal]) {
                self.dialed
                    .entry(SocketAddrV4::new(*address, port))
                    .or_insert(node.internal);
            }
            let [.., c, d] = node.internal.octets();
            let first = *self.internal.entry([c, d]).or_insert(node.internal);
            let name = *names.entry([c, d]).or_insert(&node.name);
            if first != node.internal {
                self.collisions.push((name.clone(), node.name.clone()));
            }
        }
    }

    /// Where to dial through the VPN for `destination`.
    pub fn translate(&self, destination: SocketAddrV4) -> SocketAddrV4 {
        let port = destination.port();
        if let Some(internal) = self.dialed.get(&destination) {
            return SocketAddrV4::new(self.accessed(*internal), port);
        }
        let direct = self
            .direct
            .iter()
            .chain([&self.access])
            .any(|network| network.contains(destination.ip()));
        if direct || !self.rewrite_others {
            return destination;
        }
        SocketAddrV4::new(self.accessed(*destination.ip()), port)
    }

    /// The node behind an address of the node access network, of those in the list. Any port: the
    /// client's DNAT rules have none.
    pub fn restore(&self, destination: SocketAddrV4) -> Option<SocketAddrV4> {
        let [a, b, c, d] = destination.ip().octets();
        let [x, y, ..] = self.access.network().octets();
        if [a, b] != [x, y] {
            return None;
        }
        let internal = self.internal.get(&[c, d])?;
        Some(SocketAddrV4::new(*internal, destination.port()))
    }

    /// Nodes that share their last two octets, by name: the second of each pair is not reached,
    /// the first answers in its place.
    pub fn collisions(&self) -> &[(String, String)] {
        &self.collisions
    }

    fn accessed(&self, internal: Ipv4Addr) -> Ipv4Addr {
        let [x, y, ..] = self.access.network().octets();
        let [.., c, d] = internal.octets();
        Ipv4Addr::new(x, y, c, d)
    }
}
