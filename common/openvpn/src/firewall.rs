//! Which packets between VPN clients are let through.
//!
//! Owns the rules. What KKP's server pod does with iptables: forwarding drops by default, what
//! belongs to a known connection passes, and a new one passes from the VPN's own network to pods,
//! services and the node access network. Only ICMP reaches the server's own address.

use std::net::Ipv4Addr;

use ipnet::Ipv4Net;

/// The rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Firewall {
    /// Who may open connections: the VPN's network. What comes from there is masqueraded.
    pub sources: Vec<Ipv4Net>,
    /// Where to: pods, services, node access network.
    pub destinations: Vec<Ipv4Net>,
}

impl Firewall {
    /// Whether a new connection may be made.
    pub fn permits(&self, source: Ipv4Addr, destination: Ipv4Addr) -> bool {
        let any = |networks: &[Ipv4Net], address| {
            networks.iter().any(|network| network.contains(&address))
        };
        any(&self.sources, source) && any(&self.destinations, destination)
    }
}
