//! Agent identifiers: the addresses and networks that an agent serves, as a URL query.
//!
//! The query follows the rules of Go's `url.ParseQuery`. The agent checks the text of `--agent-identifiers` and
//! sends it unchanged. The server chooses agents by the identifiers (`pkg/agent/agent_identifiers.go` upstream).

use std::net::IpAddr;

use ipnet::IpNet;
use thiserror::Error;

/// Identifiers of one agent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identifiers {
    /// Values of `ipv4`, `ipv6` and `host`, in the form of [`host_key`].
    pub hosts: Vec<String>,
    /// Values of `cidr`, without host bits.
    pub networks: Vec<IpNet>,
    /// True if the agent serves all other destinations.
    pub default_route: bool,
    /// Values of `cidr` that are not a network.
    pub malformed: Vec<String>,
}

/// Reason why identifiers are invalid.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum IdentifierError {
    /// A key is unknown.
    #[error("agent address is invalid: unknown address type: {0}")]
    UnknownType(String),
    /// A percent sign does not begin an escape.
    #[error("agent address is invalid: invalid URL escape {0:?}")]
    Escape(String),
    /// The text has a semicolon, which Go does not accept as a separator.
    #[error("agent address is invalid: invalid semicolon separator in query")]
    Semicolon,
}

/// Kind of an identifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Host,
    Network,
    DefaultRoute,
}

// === impl Identifiers ===

impl Identifiers {
    /// Returns the number of identifiers, without the default route.
    pub fn count(&self) -> usize {
        self.hosts.len() + self.networks.len() + self.malformed.len()
    }

    /// Returns the first identifiers in the syntax of `--agent-identifiers`, at most `most`, and the number of the others.
    /// The default route is the first. An address has the key `ipv4` or `ipv6`, also if the agent has sent it as a host.
    pub fn first(&self, most: usize) -> (Vec<String>, usize) {
        let route = self
            .default_route
            .then(|| "default-route=true".to_owned())
            .into_iter();
        let hosts = self
            .hosts
            .iter()
            .map(|host| format!("{}={host}", host_type(host)));
        let networks = self
            .networks
            .iter()
            .map(|network| format!("cidr={network}"));
        let malformed = self.malformed.iter().map(|value| format!("cidr={value}"));
        let all = route.chain(hosts).chain(networks).chain(malformed);
        let count = self.count() + usize::from(self.default_route);
        (all.take(most).collect(), count.saturating_sub(most))
    }

    /// Reads the identifiers of an agent. Keys of newer versions are ignored, as in the stock server.
    ///
    /// # Errors
    /// Fails if the text is not a URL query.
    pub fn parse(text: &str) -> Result<Self, IdentifierError> {
        let mut identifiers = Self::default();
        let mut route = None;
        for (key, value) in items(text)? {
            match kind(&key) {
                Some(Kind::Host) if !value.is_empty() => {
                    identifiers.hosts.push(host_key(&value));
                }
                Some(Kind::Network) => match network(&value) {
                    Some(network) => identifiers.networks.push(network),
                    None => identifiers.malformed.push(value),
                },
                // Only the first value counts, as in upstream.
                Some(Kind::DefaultRoute) if route.is_none() => route = Some(is_true(&value)),
                Some(Kind::Host | Kind::DefaultRoute) | None => {}
            }
        }
        identifiers.default_route = route.unwrap_or(false);
        identifiers.hosts.sort_unstable();
        identifiers.hosts.dedup();
        identifiers.networks.sort_unstable();
        identifiers.networks.dedup();
        Ok(identifiers)
    }
}

/// Checks the whole text, for the agent. An empty text and empty items are valid.
///
/// # Errors
/// Fails if the text is not a URL query or has an unknown key.
pub fn check(text: &str) -> Result<(), IdentifierError> {
    for (key, _) in items(text)? {
        if kind(&key).is_none() {
            return Err(IdentifierError::UnknownType(key));
        }
    }
    Ok(())
}

/// Returns the form in which hosts are compared: addresses in canonical form and without brackets, names in lower
/// case and without a final dot. The stock server compares the texts.
pub fn host_key(host: &str) -> String {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    match bare.parse::<IpAddr>() {
        Ok(address) => address.to_canonical().to_string(),
        Err(_) => {
            let name = host.strip_suffix('.').unwrap_or(host);
            name.to_ascii_lowercase()
        }
    }
}

/// Returns the key of a host.
fn host_type(host: &str) -> &'static str {
    match host.parse::<IpAddr>() {
        Ok(IpAddr::V4(_)) => "ipv4",
        Ok(IpAddr::V6(_)) => "ipv6",
        Err(_) => "host",
    }
}

fn kind(key: &str) -> Option<Kind> {
    match key {
        "ipv4" | "ipv6" | "host" => Some(Kind::Host),
        "cidr" => Some(Kind::Network),
        "default-route" => Some(Kind::DefaultRoute),
        _ => None,
    }
}

/// Returns true for the texts that Go's `strconv.ParseBool` takes for true.
fn is_true(text: &str) -> bool {
    matches!(text, "1" | "t" | "T" | "true" | "TRUE" | "True")
}

/// Parses a network. Host bits are ignored.
fn network(text: &str) -> Option<IpNet> {
    text.parse().ok().map(|network: IpNet| network.trunc())
}

fn items(text: &str) -> Result<Vec<(String, String)>, IdentifierError> {
    let items = text.split('&').filter(|item| !item.is_empty());
    let item = |item: &str| {
        if item.contains(';') {
            return Err(IdentifierError::Semicolon);
        }
        let (key, value) = item.split_once('=').unwrap_or((item, ""));
        Ok((unescape(key)?, unescape(value)?))
    };
    items.map(item).collect()
}

fn unescape(text: &str) -> Result<String, IdentifierError> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => {
                let escape = [rest.next(), rest.next()];
                hex_pair(escape).ok_or_else(|| bad_escape(escape))?
            }
            other => other,
        });
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn hex_pair([high, low]: [Option<u8>; 2]) -> Option<u8> {
    let digit = |byte: Option<u8>| char::from(byte?).to_digit(16);
    u8::try_from(digit(high)? * 16 + digit(low)?).ok()
}

fn bad_escape(escape: [Option<u8>; 2]) -> IdentifierError {
    let bytes: Vec<u8> = escape.into_iter().flatten().collect();
    IdentifierError::Escape(format!("%{}", String::from_utf8_lossy(&bytes)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]

    use super::*;

    #[test]
    fn known_keys_in_url_syntax_are_valid() {
        let valid = [
            "",
            "ipv4=1.2.3.4",
            "ipv4=1.2.3.4&ipv4=5.6.7.8&host=node1&cidr=10.0.0.0/8&ipv6=::1",
            "default-route=true",
            "host",
            "&&host=a&",
            "host=%41+b",
            "%68ost=a",
        ];
        for text in valid {
            assert_eq!(check(text), Ok(()), "{text:?}");
        }
    }

    #[test]
    fn invalid_identifiers_get_upstreams_error_texts() {
        let invalid = [
            (
                "uid=7",
                "agent address is invalid: unknown address type: uid",
            ),
            (
                "IPv4=1.2.3.4",
                "agent address is invalid: unknown address type: IPv4",
            ),
            (
                "host=a&=b",
                "agent address is invalid: unknown address type: ",
            ),
            (
                "host=%4",
                "agent address is invalid: invalid URL escape \"%4\"",
            ),
            (
                "host=%zz",
                "agent address is invalid: invalid URL escape \"%zz\"",
            ),
            (
                "host=a;b",
                "agent address is invalid: invalid semicolon separator in query",
            ),
        ];
        for (text, expected) in invalid {
            let shown = check(text).map_err(|error| error.to_string());
            assert_eq!(shown, Err(expected.to_owned()), "{text:?}");
        }
    }

    #[test]
    fn identifiers_are_read_in_canonical_form() {
        let text = "ipv4=10.0.0.1&host=Node-1.&ipv6=%5B2001:DB8::0001%5D&host=node-1&zone=a&host=\
                    &cidr=10.1.2.3/16&cidr=fd00::/8&cidr=nonsense&default-route=T&default-route=false";
        let identifiers = Identifiers::parse(text).unwrap();
        assert_eq!(identifiers.hosts, ["10.0.0.1", "2001:db8::1", "node-1"]);
        let networks: Vec<_> = identifiers.networks.iter().map(IpNet::to_string).collect();
        assert_eq!(networks, ["10.1.0.0/16", "fd00::/8"]);
        assert_eq!(identifiers.malformed, ["nonsense"]);
        assert!(identifiers.default_route);
        let route = |text| Identifiers::parse(text).unwrap().default_route;
        assert!(!route("default-route=yes") && !route("default-route=0&default-route=1"));
        assert!(Identifiers::parse("host=%4").is_err());
    }

    #[test]
    fn first_identifiers_have_their_keys_and_the_rest_is_counted() {
        let text = "host=node-1&cidr=10.1.0.0/16&ipv6=fd00::1&cidr=nonsense&host=10.0.0.1&default-route=true";
        let identifiers = Identifiers::parse(text).unwrap();
        let all = [
            "default-route=true",
            "ipv4=10.0.0.1",
            "ipv6=fd00::1",
            "host=node-1",
            "cidr=10.1.0.0/16",
            "cidr=nonsense",
        ];
        for most in 0..8 {
            let (first, more) = identifiers.first(most);
            assert_eq!(first, all[..most.min(all.len())]);
            assert_eq!(first.len() + more, all.len());
        }
        assert_eq!(Identifiers::default().first(8), (Vec::new(), 0));
    }

    #[test]
    fn forms_of_a_host_are_equal() {
        for (one, other) in [
            ("::ffff:10.0.0.1", "10.0.0.1"),
            ("[::1]", "0:0::1"),
            ("KUBELET.example.", "kubelet.EXAMPLE"),
        ] {
            assert_eq!(host_key(one), host_key(other));
        }
    }
}
