//! Which node is dialed, by what Nodes say of themselves.
//!
//! Control planes may dial a node by its ExternalIP or by name. Behind the VPN only InternalIPs are
//! known, so such an address becomes the InternalIP of the node that it belongs to. No I/O; the
//! [`watch`](super::node_watch) feeds it.
//!
//! A kubelet writes the addresses of its own Node. So what one says can not take anything away from
//! pods, Services and other nodes' InternalIPs, nor the name that the cluster knows another Node by. Else, of
//! two that say the same the older is believed: whose an ExternalIP really is, nothing here tells.

use std::collections::{HashMap, HashSet};
use std::net::{Ipv4Addr, SocketAddrV4};

use ipnet::Ipv4Net;
use k8s_openapi::api::core::v1 as core;

/// How many addresses of one Node count. Real ones have a handful.
const MAX_ADDRESSES: usize = 32;

/// How many problems are told at once.
const MAX_PROBLEMS: usize = 100;

/// What matters of a Node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    name: String,
    uid: String,
    /// In seconds.
    created: i64,
    /// Where it is dialed.
    internal: Ipv4Addr,
    /// Further InternalIPs: addresses of its own that are dialed as they are.
    others: Vec<Ipv4Addr>,
    external: Vec<Ipv4Addr>,
    /// In lower case, without a dot at the end.
    names: Vec<String>,
}

/// Whose an address or a name is.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Known {
    /// How many nodes these are.
    pub nodes: usize,
    /// InternalIPs by ExternalIP.
    external: HashMap<Ipv4Addr, Ipv4Addr>,
    /// InternalIPs by name.
    names: HashMap<String, Ipv4Addr>,
}

// === impl Node ===

impl Node {
    /// `None` for one without an InternalIP of IPv4: there is no way to it.
    pub fn of(node: core::Node) -> Option<Self> {
        let metadata = node.metadata;
        let mut internal = Vec::new();
        let mut external = Vec::new();
        let mut names = Vec::new();
        let addresses = node.status.and_then(|status| status.addresses);
        let addresses = addresses.unwrap_or_default().into_iter();
        for address in addresses.take(MAX_ADDRESSES) {
            let text = address.address.as_str();
            match address.type_.as_str() {
                "InternalIP" => internal.extend(text.parse::<Ipv4Addr>().ok()),
                "ExternalIP" => external.extend(text.parse::<Ipv4Addr>().ok()),
                "Hostname" | "InternalDNS" | "ExternalDNS" => names.extend(name_of(text)),
                _ => {}
            }
        }
        let mut internal = internal.into_iter();
        Some(Self {
            name: metadata.name.unwrap_or_default(),
            uid: metadata.uid.unwrap_or_default(),
            created: metadata
                .creation_timestamp
                .map_or(0, |time| time.0.as_second()),
            internal: internal.next()?,
            others: internal.collect(),
            external,
            names,
        })
    }

    /// Its InternalIPs.
    fn own(&self) -> impl Iterator<Item = Ipv4Addr> {
        [self.internal]
            .into_iter()
            .chain(self.others.iter().copied())
    }

    /// Smaller is older.
    fn seniority(&self) -> (i64, [&String; 2]) {
        (self.created, [&self.uid, &self.name])
    }
}

/// A node's name as it is looked up. `None` for what is none, or is another's: an address, this
/// machine, a Service.
fn name_of(text: &str) -> Option<String> {
    let name = text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase();
    let last = name.rsplit('.').next().unwrap_or_default();
    let is_taken = last == "localhost" || name.split('.').any(|label| label == "svc");
    // No address in any notation: 010.1, 0x7f.1, 2130706433.
    let is_number = last.starts_with(|first: char| first.is_ascii_digit())
        && (name.contains('.')
            || last.starts_with("0x")
            || !last.contains(|c: char| !c.is_ascii_digit()));
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    let is_name = (1..=253).contains(&name.len()) && !is_number && name.bytes().all(is_plain);
    (is_name && !is_taken).then_some(name)
}

// === impl Known ===

impl Known {
    /// Draws up what is known, and what the operator should know. An address in `direct` is dialed
    /// as it is, whatever a Node says.
    pub fn of<'a>(
        nodes: impl Iterator<Item = &'a Node>,
        direct: &[Ipv4Net],
    ) -> (Self, Vec<String>) {
        let mut nodes: Vec<&Node> = nodes.collect();
        nodes.sort_unstable_by(|a, b| a.seniority().cmp(&b.seniority()));
        let internal: HashSet<Ipv4Addr> = nodes.iter().map(|node| node.internal).collect();
        let own_names: HashMap<&str, &Node> = nodes
            .iter()
            .map(|node| (node.name.as_str(), *node))
            .collect();

        let mut problems = Vec::new();
        let mut problem = |node: &Node, text: String| {
            if problems.len() < MAX_PROBLEMS {
                problems.push(format!("Node {}: {text}", node.name));
            }
        };
        let mut external = HashMap::new();
        let mut names = HashMap::new();
        for node in &nodes {
            for ip in &node.external {
                if node.own().any(|own| own == *ip) {
                    continue;
                }
                if direct.iter().any(|network| network.contains(ip)) {
                    let text = format!("its ExternalIP {ip} is of the VPN or of --openvpn-route");
                    problem(node, format!("{text}, and is dialed as it is"));
                } else if internal.contains(ip) {
                    let text = format!("its ExternalIP {ip} is another's InternalIP");
                    problem(node, format!("{text}, and stays that"));
                } else {
                    let (_, first) = *external.entry(*ip).or_insert((node.internal, *node));
                    if first != *node {
                        let text = format!("its ExternalIP {ip} is Node {}'s, too", first.name);
                        problem(node, format!("{text}, which is older and is dialed"));
                    }
                }
            }
            for name in &node.names {
                let of_name = own_names.get(name.as_str()).copied();
                let claim = of_name.unwrap_or(node);
                let (_, first) = *names.entry(name.clone()).or_insert((claim.internal, claim));
                if first != *node {
                    let text = format!("its name {name} is Node {}'s, too", first.name);
                    problem(node, format!("{text}, which is dialed"));
                }
            }
        }
        let known = Self {
            nodes: nodes.len(),
            external: external.into_iter().map(|(ip, (to, _))| (ip, to)).collect(),
            names: names
                .into_iter()
                .map(|(name, (to, _))| (name, to))
                .collect(),
        };
        (known, problems)
    }

    /// Where a node is that is dialed by name; `address` is `HOST:PORT`.
    pub fn named(&self, address: &str) -> Option<SocketAddrV4> {
        let (host, port) = address.rsplit_once(':')?;
        let ip = self.names.get(&name_of(host)?)?;
        Some(SocketAddrV4::new(*ip, port.parse().ok()?))
    }

    /// The InternalIP behind an ExternalIP; anything else as it is.
    pub fn internal(&self, dialed: SocketAddrV4) -> SocketAddrV4 {
        let ip = self.external.get(dialed.ip()).unwrap_or(dialed.ip());
        SocketAddrV4::new(*ip, dialed.port())
    }
}

#[cfg(test)]
mod tests;
