//! Lists of networks, for the addresses of peers.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;

/// A list of networks. An empty list contains no address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Networks(Vec<IpNet>);

/// Error for an invalid network.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a network; write an address and a prefix length, such as 10.0.0.0/8 or fd00::/8"
)]
pub struct NetworkError(String);

impl Networks {
    /// Parses networks. An address without a prefix length is a network of one address.
    ///
    /// # Errors
    /// Returns the first invalid text.
    pub fn parse<'a>(texts: impl IntoIterator<Item = &'a str>) -> Result<Self, NetworkError> {
        let network = |text: &str| {
            let text = text.trim();
            parse_network(text).ok_or_else(|| NetworkError(text.to_owned()))
        };
        texts
            .into_iter()
            .map(network)
            .collect::<Result<_, _>>()
            .map(Self)
    }

    /// Returns true if `address` is in one of the networks. An IPv4-mapped IPv6 address (from a dual-stack
    /// socket) counts as IPv4.
    pub fn contains(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.0.iter().any(|network| network.contains(&address))
    }

    /// Returns true if the list has no network.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Parses a network. An address without a prefix length is a network of one address. An IPv4-mapped IPv6 network
/// becomes an IPv4 network.
pub(super) fn parse_network(text: &str) -> Option<IpNet> {
    let alone = || text.parse::<IpAddr>().map(IpNet::from);
    let network = text.parse::<IpNet>().or_else(|_| alone()).ok()?.trunc();
    // Addresses are compared in their IPv4 form.
    let mapped = match network {
        IpNet::V6(v6) if v6.prefix_len() >= 96 => v6.addr().to_ipv4_mapped(),
        _ => None,
    };
    match mapped {
        Some(v4) => IpNet::new(v4.into(), network.prefix_len() - 96).ok(),
        None => Some(network),
    }
}

impl fmt::Display for Networks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&texts.join(","))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn only_members_are_contained() {
        let networks = Networks::parse(["10.0.0.0/8", " fd00::/8", "192.0.2.7"]).unwrap();
        let contains = |text: &str| networks.contains(text.parse().unwrap());
        assert!(contains("10.1.2.3") && contains("fd12::1") && contains("192.0.2.7"));
        assert!(contains("::ffff:10.1.2.3"));
        assert!(!contains("11.0.0.1") && !contains("192.0.2.8") && !contains("fe80::1"));
        assert!(!Networks::default().contains("11.0.0.1".parse().unwrap()));
        assert_eq!(networks.to_string(), "10.0.0.0/8,fd00::/8,192.0.2.7/32");
    }

    #[test]
    fn invalid_network_is_reported() {
        for text in ["", "10.0.0.0/33", "example.com", "10.0.0/8"] {
            let error = Networks::parse([text]).unwrap_err().to_string();
            assert!(error.contains(&format!("{text:?}")), "{error}");
        }
    }
}
