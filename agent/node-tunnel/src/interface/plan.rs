//! The changes that an interface needs, computed from the interface's current state. No I/O.

use std::fmt;
use std::net::IpAddr;

use super::Interface;

/// An address of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub ip: IpAddr,
    /// Length of the network prefix, in bits.
    pub prefix: u8,
}

/// Current state of an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Link {
    /// Index of the interface; never 0.
    pub index: u32,
    /// Kind of the interface, as the kernel names it; `None` for a hardware device.
    pub kind: Option<String>,
    pub is_up: bool,
    /// All addresses of the interface, IPv4 and IPv6.
    pub addresses: Vec<Address>,
}

/// One change to an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Create the interface, already up.
    Create,
    /// Bring the interface up. IPv6 addresses exist only on an interface that is up.
    SetUp,
    /// Remove an unwanted address.
    Remove(Address),
    Add(Address),
}

/// The kind of an existing interface that differs from the wanted kind; `None` for a hardware device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Foreign(Option<String>);

// === impl Address ===

impl Address {
    /// Creates an address with a network of its own (`/32` or `/128`).
    pub(crate) fn host(ip: IpAddr) -> Self {
        let prefix = if ip.is_ipv4() { 32 } else { 128 };
        Self { ip, prefix }
    }

    /// True for an IPv6 link-local address. The kernel adds such an address to every interface.
    fn is_link_local(&self) -> bool {
        matches!(self.ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.ip, self.prefix)
    }
}

// === impl Step ===

impl Step {
    /// Joins steps for a log line.
    pub(crate) fn list(steps: &[Self]) -> String {
        let steps: Vec<String> = steps.iter().map(Self::to_string).collect();
        steps.join(", ")
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Create => write!(f, "create the interface"),
            Self::SetUp => write!(f, "set the interface up"),
            Self::Remove(address) => write!(f, "remove the address {address}"),
            Self::Add(address) => write!(f, "add the address {address}"),
        }
    }
}

// === impl Foreign ===

impl fmt::Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(kind) => write!(f, "is of kind {kind}"),
            None => write!(f, "is a device"),
        }
    }
}

/// Returns the steps from the current state to the wanted interface; empty if nothing is left to do. After
/// [`Step::Create`], the caller must check again for further steps.
///
/// If a wanted address is missing, the unwanted addresses of its family are removed, except link-local
/// addresses. network-interface-manager does the same: after a change of KKP's `tunnelingAgentIP`, the old
/// address must go. If no wanted address of a family is missing, addresses added by other programs stay.
///
/// # Errors
/// Returns [`Foreign`] for an interface of another kind.
pub(super) fn steps(wanted: &Interface, found: Option<&Link>) -> Result<Vec<Step>, Foreign> {
    let Some(link) = found else {
        return Ok(vec![Step::Create]);
    };
    if link.kind.as_deref() != Some(wanted.kind) {
        return Err(Foreign(link.kind.clone()));
    }
    let set_up = (!link.is_up).then_some(Step::SetUp);
    let wanted: Vec<Address> = wanted
        .addresses
        .iter()
        .copied()
        .map(Address::host)
        .collect();
    let missing = wanted.iter().filter(|one| !link.addresses.contains(one));
    let is_stale = |one: &&Address| {
        let is_replaced = |new: &Address| new.ip.is_ipv4() == one.ip.is_ipv4();
        !wanted.contains(one) && !one.is_link_local() && missing.clone().any(is_replaced)
    };
    let stale = link.addresses.iter().filter(is_stale);
    // Removals come first: if the steps are interrupted, the next check still finds the wanted address
    // missing, and repeats the removals.
    let removals = stale.copied().map(Step::Remove);
    let additions = missing.clone().copied().map(Step::Add);
    Ok(set_up
        .into_iter()
        .chain(removals)
        .chain(additions)
        .collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn address(text: &str) -> Address {
        let (ip, prefix) = text.split_once('/').unwrap();
        Address {
            ip: ip.parse().unwrap(),
            prefix: prefix.parse().unwrap(),
        }
    }

    /// Returns the steps from a link with `addresses` to an interface with one address of each family.
    fn plan(is_up: bool, addresses: &[&str]) -> String {
        let wanted = Interface {
            name: "envoyagent".to_owned(),
            kind: "dummy",
            addresses: vec![[100, 64, 30, 10].into(), "fd00::10".parse().unwrap()],
        };
        let link = Link {
            index: 7,
            kind: Some("dummy".to_owned()),
            is_up,
            addresses: addresses.iter().copied().map(address).collect(),
        };
        Step::list(&steps(&wanted, Some(&link)).unwrap())
    }

    const V4: &str = "100.64.30.10/32";
    const V6: &str = "fd00::10/128";

    #[test]
    fn existing_addresses_are_kept() {
        assert_eq!(plan(true, &[V4, V6]), "");
        assert_eq!(plan(true, &[V4, "10.0.0.1/24", "fd00::1/64", V6]), "");
    }

    #[test]
    fn missing_addresses_are_added() {
        let both = "add the address 100.64.30.10/32, add the address fd00::10/128";
        assert_eq!(plan(true, &[]), both);
        assert_eq!(plan(false, &[]), format!("set the interface up, {both}"));
        assert_eq!(plan(false, &[V4, V6]), "set the interface up");
        assert_eq!(plan(true, &[V4]), "add the address fd00::10/128");
    }

    #[test]
    fn missing_address_replaces_others_of_its_family() {
        assert_eq!(
            plan(true, &["192.168.30.10/32", "fd00::1/64", V6]),
            "remove the address 192.168.30.10/32, add the address 100.64.30.10/32"
        );
        assert_eq!(
            plan(true, &[V4, "10.0.0.1/24", "fe80::1/64", "fd00::1/64"]),
            "remove the address fd00::1/64, add the address fd00::10/128"
        );
        // With /24, the whole network would be local to the node.
        assert_eq!(
            plan(true, &["100.64.30.10/24", V6]),
            "remove the address 100.64.30.10/24, add the address 100.64.30.10/32"
        );
    }

    #[test]
    fn missing_interface_is_created_and_other_kinds_are_rejected() {
        let wanted = Interface {
            name: "envoyagent".to_owned(),
            kind: "dummy",
            addresses: Vec::new(),
        };
        assert_eq!(steps(&wanted, None), Ok(vec![Step::Create]));
        for (kind, text) in [(Some("bridge"), "is of kind bridge"), (None, "is a device")] {
            let link = Link {
                index: 7,
                kind: kind.map(str::to_owned),
                is_up: false,
                addresses: Vec::new(),
            };
            let foreign = steps(&wanted, Some(&link)).unwrap_err();
            assert_eq!(foreign.to_string(), text);
        }
    }
}
