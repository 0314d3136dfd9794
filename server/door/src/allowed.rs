//! Who may use the CONNECT listener, by address.

use std::net::IpAddr;

use ipnet::IpNet;

/// Networks whose members may connect; none means everybody.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllowedNetworks(Vec<IpNet>);

/// Text that is no network.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a network; write an address and a prefix length, such as 10.0.0.0/8 or fd00::/8"
)]
pub struct NetworkError(String);

impl AllowedNetworks {
    /// Reads networks. An address alone is a network of one.
    ///
    /// # Errors
    /// The first text that is none.
    pub fn parse<'a>(texts: impl IntoIterator<Item = &'a str>) -> Result<Self, NetworkError> {
        let network = |text: &str| {
            let text = text.trim();
            let alone = || text.parse::<IpAddr>().map(IpNet::from);
            text.parse::<IpNet>()
                .or_else(|_| alone())
                .map_err(|_| NetworkError(text.to_owned()))
        };
        texts
            .into_iter()
            .map(network)
            .collect::<Result<_, _>>()
            .map(Self)
    }

    /// Whether `address` may connect. An IPv4 address that a socket of both families shows as IPv6
    /// counts as IPv4.
    pub fn contains(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.0.is_empty() || self.0.iter().any(|network| network.contains(&address))
    }

    /// The networks as text, for the log at start.
    pub fn describe(&self) -> String {
        let texts: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        texts.join(",")
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn members_are_let_in_and_nobody_else() {
        let allowed = AllowedNetworks::parse(["10.0.0.0/8", " fd00::/8", "192.0.2.7"]).unwrap();
        let contains = |text: &str| allowed.contains(text.parse().unwrap());
        assert!(contains("10.1.2.3") && contains("fd12::1") && contains("192.0.2.7"));
        assert!(contains("::ffff:10.1.2.3"));
        assert!(!contains("11.0.0.1") && !contains("192.0.2.8") && !contains("fe80::1"));
        assert!(AllowedNetworks::default().contains("11.0.0.1".parse().unwrap()));
        assert_eq!(allowed.describe(), "10.0.0.0/8,fd00::/8,192.0.2.7/32");
    }

    #[test]
    fn what_is_no_network_is_named() {
        for text in ["", "10.0.0.0/33", "example.com", "10.0.0/8"] {
            let error = AllowedNetworks::parse([text]).unwrap_err().to_string();
            assert!(error.contains(&format!("{text:?}")), "{error}");
        }
    }
}
