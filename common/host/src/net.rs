//! Sockets: listeners, the PROXY protocol, admission and shares of peers, dialing with Go's error texts, the policy
//! for destinations, the CONNECT request head, outbound proxies, read-ahead, shared sockets, socket options, congestion
//! control, and detection of dead peers.

pub mod admission;
pub mod congestion;
pub mod connect;
pub mod destinations;
pub mod dial;
pub mod listen;
pub mod literal;
pub mod long_path;
pub mod loss;
pub mod networks;
pub mod options;
pub mod proxy;
pub mod proxy_protocol;
pub mod readahead;
pub mod shares;
pub mod silence;
pub mod socket;

use std::net::{IpAddr, Ipv4Addr};

/// Returns true if packets to the address go to one host, which may use the address as the source of its answer.
pub fn is_unicast(ip: IpAddr) -> bool {
    let ip = ip.to_canonical();
    !ip.is_multicast() && ip != IpAddr::V4(Ipv4Addr::BROADCAST)
}

/// Returns true if a socket that is bound to no address may send from the address. A link-local IPv6 address needs the
/// number of an interface, too.
pub fn is_source(ip: IpAddr) -> bool {
    let is_link_local = matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
    is_unicast(ip) && !is_link_local
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn multicast_and_broadcast_are_recognized_in_mapped_form() {
        for (text, expected) in [
            ("192.0.2.1", true),
            ("::ffff:192.0.2.1", true),
            ("2001:db8::1", true),
            ("224.0.0.1", false),
            ("::ffff:224.0.0.1", false),
            ("255.255.255.255", false),
            ("::ffff:255.255.255.255", false),
            ("ff02::1", false),
        ] {
            assert_eq!(is_unicast(text.parse().unwrap()), expected, "{text}");
        }
    }

    #[test]
    fn addresses_that_need_an_interface_are_no_sources() {
        for (text, expected) in [
            ("fe80::1", false),
            ("ff02::1", false),
            ("fd00::1", true),
            ("192.0.2.1", true),
        ] {
            assert_eq!(is_source(text.parse().unwrap()), expected, "{text}");
        }
    }
}
