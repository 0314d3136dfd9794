//! The firewall between VPN clients.
//!
//! Owns the rules. They match the iptables rules of KKP's server pod: forwarding drops by default, packets of
//! a known connection pass, and a new connection may go from the VPN's own network to pods, services and the
//! node access network. Only ICMP reaches the server's own address.

use std::net::Ipv4Addr;

use ipnet::Ipv4Net;

/// The rules for new connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Firewall {
    /// Networks whose hosts may open connections: the VPN's own network. Packets from these networks are
    /// masqueraded.
    pub sources: Vec<Ipv4Net>,
    /// Permitted destinations: pods, services, node access network.
    pub destinations: Vec<Ipv4Net>,
}

impl Firewall {
    /// True if `source` may open a connection to `destination`.
    pub fn permits(&self, source: Ipv4Addr, destination: Ipv4Addr) -> bool {
        let any = |networks: &[Ipv4Net], address| {
            networks.iter().any(|network| network.contains(&address))
        };
        any(&self.sources, source) && any(&self.destinations, destination)
    }
}
