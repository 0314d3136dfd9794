//! The translation of dialed node addresses, based on the Nodes' reported addresses.
//!
//! Control planes may dial a node by ExternalIP or by name. Behind the VPN only InternalIPs are known, so an
//! ExternalIP or name is translated to the InternalIP of its node. This module does no I/O; the
//! [`watch`](super::node_watch) supplies the Nodes.
//!
//! A kubelet writes the addresses of its own Node and could claim foreign addresses. Claims therefore never
//! redirect dials to pods, Services, or InternalIPs of other nodes, nor dials to the object name of another
//! Node, even a Node without an InternalIP. If two Nodes claim the same ExternalIP or name, the older Node wins,
//! because the real owner cannot be determined here.

use std::collections::{HashMap, HashSet};
use std::net::{Ipv4Addr, SocketAddrV4};

use ipnet::Ipv4Net;
use k8s_openapi::api::core::v1 as core;

/// Number of addresses considered per Node. Real Nodes have a handful.
const MAX_ADDRESSES: usize = 32;

/// Largest number of problems reported together.
const MAX_PROBLEMS: usize = 100;

/// The relevant parts of a Node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Node {
    name: String,
    uid: String,
    /// Creation time, in seconds.
    created: i64,
    /// InternalIP that dials use. `None` if the node is unreachable: then only its object name counts.
    internal: Option<Ipv4Addr>,
    /// Further InternalIPs, which are dialed without translation.
    others: Vec<Ipv4Addr>,
    external: Vec<Ipv4Addr>,
    /// Names in lower case, without a trailing dot.
    names: Vec<String>,
}

/// Translation of ExternalIPs and names.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Known {
    /// Number of nodes with an InternalIP.
    pub nodes: usize,
    /// InternalIPs by ExternalIP.
    external: HashMap<Ipv4Addr, Ipv4Addr>,
    /// InternalIPs by name.
    names: HashMap<String, Ipv4Addr>,
}

// === impl Node ===

impl Node {
    /// Extracts the relevant parts of a Node. Returns `None` for an object without a name.
    pub(super) fn of(node: core::Node) -> Option<Self> {
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
            name: metadata.name?,
            uid: metadata.uid.unwrap_or_default(),
            created: metadata
                .creation_timestamp
                .map_or(0, |time| time.0.as_second()),
            internal: internal.next(),
            others: internal.collect(),
            external,
            names,
        })
    }

    /// Returns the node's InternalIPs.
    fn own(&self) -> impl Iterator<Item = Ipv4Addr> {
        let first = self.internal.into_iter();
        first.chain(self.others.iter().copied())
    }

    /// Returns a sort key; older nodes sort first.
    fn seniority(&self) -> (i64, [&String; 2]) {
        (self.created, [&self.uid, &self.name])
    }
}

/// Normalizes a node's name for lookups. Returns `None` for an address, and for names that do not belong to
/// nodes: `localhost` and Services.
fn name_of(text: &str) -> Option<String> {
    let name = text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase();
    let last = name.rsplit('.').next().unwrap_or_default();
    let is_taken = last == "localhost" || name.split('.').any(|label| label == "svc");
    // Addresses in every notation are excluded: 010.1, 0x7f.1, 2130706433.
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
    /// Builds the translation, and a list of problems for the operator. Addresses in `direct` are never
    /// translated.
    pub(super) fn of<'a>(
        nodes: impl Iterator<Item = &'a Node>,
        direct: &[Ipv4Net],
    ) -> (Self, Vec<String>) {
        let mut nodes: Vec<&Node> = nodes.collect();
        nodes.sort_unstable_by(|a, b| a.seniority().cmp(&b.seniority()));
        let internal: HashSet<Ipv4Addr> = nodes.iter().filter_map(|node| node.internal).collect();
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
        let mut reachable = 0;
        for node in &nodes {
            let Some(own) = node.internal else {
                continue;
            };
            reachable += 1;
            for ip in &node.external {
                if node.own().any(|own| own == *ip) {
                    continue;
                }
                if direct.iter().any(|network| network.contains(ip)) {
                    let text = format!(
                        "its ExternalIP {ip} is in the network of the VPN or of --openvpn-route"
                    );
                    problem(node, format!("{text}, and is dialed without translation"));
                } else if internal.contains(ip) {
                    let text = format!("its ExternalIP {ip} is the InternalIP of another Node");
                    problem(node, format!("{text}, and is not translated"));
                } else {
                    let (_, first) = *external.entry(*ip).or_insert((own, *node));
                    if first != *node {
                        let text =
                            format!("its ExternalIP {ip} also belongs to Node {}", first.name);
                        problem(node, format!("{text}, which is older and is dialed"));
                    }
                }
            }
            for name in &node.names {
                let of_name = own_names.get(name.as_str()).copied();
                let claim = of_name.unwrap_or(node);
                let Some(to) = claim.internal else {
                    let text = format!("its name {name} also belongs to Node {}", claim.name);
                    problem(
                        node,
                        format!("{text}, which has no InternalIP; the name is not translated"),
                    );
                    continue;
                };
                let (_, first) = *names.entry(name.clone()).or_insert((to, claim));
                if first != *node {
                    let text = format!("its name {name} also belongs to Node {}", first.name);
                    problem(node, format!("{text}, which is dialed"));
                }
            }
        }
        let known = Self {
            nodes: reachable,
            external: external.into_iter().map(|(ip, (to, _))| (ip, to)).collect(),
            names: names
                .into_iter()
                .map(|(name, (to, _))| (name, to))
                .collect(),
        };
        (known, problems)
    }

    /// Translates a dialed node name; `address` is `HOST:PORT`.
    pub(super) fn named(&self, address: &str) -> Option<SocketAddrV4> {
        let (host, port) = address.rsplit_once(':')?;
        let ip = self.names.get(&name_of(host)?)?;
        Some(SocketAddrV4::new(*ip, port.parse().ok()?))
    }

    /// Translates an ExternalIP to an InternalIP. Returns other addresses unchanged.
    pub(super) fn internal(&self, dialed: SocketAddrV4) -> SocketAddrV4 {
        let ip = self.external.get(dialed.ip()).unwrap_or(dialed.ip());
        SocketAddrV4::new(*ip, dialed.port())
    }
}

#[cfg(test)]
mod tests;
