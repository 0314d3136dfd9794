//! The node access network: addresses for reaching nodes through the VPN.
//!
//! A node with the InternalIP `a.b.c.d` has the address `X.Y.c.d` there; `X.Y` are the first two octets of
//! the network. The server role translates dialed addresses, and the client role translates them back.

use std::net::{Ipv4Addr, SocketAddrV4};

use ipnet::Ipv4Net;

/// Translation without a list of nodes: every address that is neither a pod nor a Service counts as the
/// InternalIP of a node. The caller must replace ExternalIPs first, because this rule is wrong for
/// ExternalIPs.
#[derive(Clone, Debug)]
pub struct Nodes {
    access: Ipv4Net,
    direct: Vec<Ipv4Net>,
}

impl Nodes {
    /// Creates the translation. `access` is the node access network, 10.254.0.0/16 in KKP. Addresses in
    /// `access` and in `direct` (pods, Services) are never translated.
    pub fn new(access: Ipv4Net, direct: Vec<Ipv4Net>) -> Self {
        Self { access, direct }
    }

    /// Returns the address to dial through the VPN for `destination`.
    pub fn translate(&self, destination: SocketAddrV4) -> SocketAddrV4 {
        let mut kept = self.direct.iter().chain([&self.access]);
        if kept.any(|network| network.contains(destination.ip())) {
            return destination;
        }
        let [x, y, ..] = self.access.network().octets();
        let [.., c, d] = destination.ip().octets();
        SocketAddrV4::new(Ipv4Addr::new(x, y, c, d), destination.port())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn at(text: &str) -> SocketAddrV4 {
        text.parse().unwrap()
    }

    #[test]
    fn addresses_outside_pod_and_service_networks_are_translated() {
        let direct = ["172.25.0.0/16", "10.240.16.0/20"].map(|net| net.parse().unwrap());
        let nodes = Nodes::new("10.254.0.0/16".parse().unwrap(), direct.into());
        for (dialed, through) in [
            ("192.168.7.9:10250", "10.254.7.9:10250"),
            ("192.168.7.9:9100", "10.254.7.9:9100"),
            ("172.25.3.4:443", "172.25.3.4:443"),
            ("10.240.16.10:53", "10.240.16.10:53"),
            ("10.254.7.9:10250", "10.254.7.9:10250"),
        ] {
            assert_eq!(nodes.translate(at(dialed)), at(through));
        }
    }
}
