//! The policy for destinations of dials: lists of networks and ports that are allowed or denied.
//!
//! A denied destination stays denied, even if it is also allowed. Without an allow list, every other destination is
//! allowed. An agent also denies link-local addresses and the addresses of metadata services, unless an entry of
//! the allow list names them: `169.254.20.10` and `169.254.0.0/16` do, `0.0.0.0/0` and `*` do not.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::RangeInclusive;

use super::networks::parse_network;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// Link-local networks, and the IPv6 addresses of Amazon's and Google's metadata services.
const METADATA: [IpNet; 4] = [
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(169, 254, 0, 0), 16)),
    IpNet::V6(Ipv6Net::new_assert(
        Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0),
        10,
    )),
    IpNet::V6(Ipv6Net::new_assert(
        Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254),
        128,
    )),
    IpNet::V6(Ipv6Net::new_assert(
        Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254),
        128,
    )),
];

/// Ports of an entry without ports.
const ALL_PORTS: RangeInclusive<u16> = 0..=u16::MAX;

/// Destinations that a program may dial. The default is a server's policy that allows everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Destinations {
    program: Program,
    allow: Vec<Entry>,
    deny: Vec<Entry>,
}

/// Program with a policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Program {
    /// The server.
    #[default]
    Server,
    /// The agent, which denies metadata services by default.
    Agent,
}

/// Entry of a list: a network and ports.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    /// `None` means every address.
    network: Option<IpNet>,
    ports: RangeInclusive<u16>,
}

/// Denial of a dial: the program and its rule. The text is sent to the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("denied by the {program}: {rule}")]
pub struct Denial {
    program: Program,
    rule: Rule,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum Rule {
    #[error("the destination is in --deny-destinations")]
    Listed,
    #[error("the destination is not in --allow-destinations")]
    NotListed,
    #[error(
        "the destination is link-local or a metadata service; to allow it, name it in --allow-destinations"
    )]
    Metadata,
    #[error(
        "with --allow-destinations or --deny-destinations, the port of an address must be a number"
    )]
    NoPort,
}

// === impl Destinations ===

impl Destinations {
    /// Parses the lists of `--allow-destinations` and `--deny-destinations`. Also returns the problems of the
    /// lists, one for each entry that cannot be used.
    pub fn parse(program: Program, allow: &[String], deny: &[String]) -> (Self, Vec<String>) {
        let mut problems = Vec::new();
        let mut list = |flag: &str, texts: &[String]| {
            let mut entries = Vec::new();
            for text in texts {
                match Entry::parse(text.trim()) {
                    Some(entry) => entries.push(entry),
                    None => problems.push(format!(
                        "--{flag}: {text:?} is not a destination; write a network and optional ports, such as \
                         10.0.0.0/8, 10.0.0.0/8:443, [fd00::/8]:1-1024 or *:22"
                    )),
                }
            }
            entries
        };
        let destinations = Self {
            program,
            allow: list("allow-destinations", allow),
            deny: list("deny-destinations", deny),
        };
        (destinations, problems)
    }

    /// Returns an agent's policy without lists.
    pub fn of_agent() -> Self {
        Self {
            program: Program::Agent,
            ..Self::default()
        }
    }

    /// Checks an address before a dial. The kernel connects unspecified addresses to this host, so that
    /// `0.0.0.0` and `::` are checked as loopback addresses.
    ///
    /// # Errors
    /// Returns a [`Denial`] unless the policy allows the destination.
    pub fn check(&self, address: SocketAddr) -> Result<(), Denial> {
        let (ip, port) = (effective(address.ip()), address.port());
        let is_in = |list: &[Entry]| list.iter().any(|entry| entry.contains(ip, port));
        if is_in(&self.deny) {
            return Err(self.denial(Rule::Listed));
        }
        let names = |entry: &Entry| entry.is_metadata() && entry.contains(ip, port);
        if self.program == Program::Agent && is_metadata(ip) && !self.allow.iter().any(names) {
            return Err(self.denial(Rule::Metadata));
        }
        if !self.allow.is_empty() && !is_in(&self.allow) {
            return Err(self.denial(Rule::NotListed));
        }
        Ok(())
    }

    /// Returns the denial of an address whose port is not a number, so that it cannot be checked.
    pub(super) fn no_port(&self) -> Denial {
        self.denial(Rule::NoPort)
    }

    /// Returns true if both lists are empty.
    pub(super) fn has_no_lists(&self) -> bool {
        self.allow.is_empty() && self.deny.is_empty()
    }

    /// Returns a warning if the allow list probably allows less than intended.
    pub fn warning(&self) -> Option<String> {
        let is_narrow = !self.allow.is_empty() && self.allow.iter().all(Entry::is_metadata);
        (self.program == Program::Agent && is_narrow).then(|| {
            "--allow-destinations has only link-local or metadata addresses, so every other destination is \
             denied; add * to allow the others"
                .to_owned()
        })
    }

    /// Returns the lists as `name=value`, for the log at start.
    pub fn describe(&self) -> [String; 2] {
        let list = |entries: &[Entry]| {
            let texts: Vec<String> = entries.iter().map(ToString::to_string).collect();
            texts.join(",")
        };
        [
            format!("allow-destinations={}", list(&self.allow)),
            format!("deny-destinations={}", list(&self.deny)),
        ]
    }

    fn denial(&self, rule: Rule) -> Denial {
        Denial {
            program: self.program,
            rule,
        }
    }
}

/// Returns the address that a connection to `address` reaches.
fn effective(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(v4) if v4.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(v6) if v6.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        other => other,
    }
}

fn is_metadata(ip: IpAddr) -> bool {
    METADATA.iter().any(|network| network.contains(&ip))
}

// === impl Entry ===

impl Entry {
    /// Parses `NETWORK` or `NETWORK:PORTS`. An IPv6 network needs brackets if ports follow. An address is a
    /// network of one address, and `*` is every address. `PORTS` is a port or `FIRST-LAST`.
    fn parse(text: &str) -> Option<Self> {
        let (network, ports) = match text.strip_prefix('[') {
            Some(rest) => {
                let (network, after) = rest.split_once(']')?;
                match after {
                    "" => (network, None),
                    _ => (network, Some(after.strip_prefix(':')?)),
                }
            }
            None => match text.split_once(':') {
                Some((network, ports)) if !ports.contains(':') => (network, Some(ports)),
                _ => (text, None),
            },
        };
        let ports = match ports {
            Some(ports) => parse_ports(ports)?,
            None => ALL_PORTS,
        };
        let network = match network {
            "*" => None,
            text => Some(parse_network(text)?),
        };
        Some(Self { network, ports })
    }

    fn contains(&self, ip: IpAddr, port: u16) -> bool {
        let is_in_network = self.network.is_none_or(|network| network.contains(&ip));
        is_in_network && self.ports.contains(&port)
    }

    /// Returns true if the entry has no other addresses than link-local and metadata addresses.
    fn is_metadata(&self) -> bool {
        let network = self.network;
        network.is_some_and(|network| METADATA.iter().any(|all| all.contains(&network)))
    }
}

fn parse_ports(text: &str) -> Option<RangeInclusive<u16>> {
    let port = |text: &str| {
        let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
        let port = text.parse::<u16>().ok().filter(|port| *port > 0);
        port.filter(|_| is_number)
    };
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let (first, last) = (port(first)?, port(last)?);
    (first <= last).then_some(first..=last)
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let network = self.network.map_or("*".to_owned(), |net| net.to_string());
        if self.ports == ALL_PORTS {
            return f.write_str(&network);
        }
        match self.network {
            Some(IpNet::V6(_)) => write!(f, "[{network}]:")?,
            _ => write!(f, "{network}:")?,
        }
        match (self.ports.start(), self.ports.end()) {
            (first, last) if first == last => write!(f, "{first}"),
            (first, last) => write!(f, "{first}-{last}"),
        }
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Server => "server",
            Self::Agent => "agent",
        })
    }
}

#[cfg(test)]
mod tests;
