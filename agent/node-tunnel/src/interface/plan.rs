//! What to do about an interface as it is found. Values in, steps out.

use std::fmt;
use std::net::IpAddr;

use super::Interface;

/// An address of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// The address.
    pub ip: IpAddr,
    /// Leading bits that its network has in common.
    pub prefix: u8,
}

/// An interface as it is found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// The kernel's number for it; never 0.
    pub index: u32,
    /// The kernel's name for its kind. A device has none.
    pub kind: Option<String>,
    /// Whether it is set up.
    pub is_up: bool,
    /// All its addresses, of both families.
    pub addresses: Vec<Address>,
}

/// One change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Make it, already up.
    Create,
    /// Set it up: addresses of IPv6 are there only then.
    SetUp,
    /// Take an address away that nobody wants any more.
    Remove(Address),
    /// Add an address.
    Add(Address),
}

/// An interface of another kind than the wanted one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Foreign(Option<String>);

// === impl Address ===

impl Address {
    /// An address alone in its network.
    pub fn host(ip: IpAddr) -> Self {
        let prefix = if ip.is_ipv4() { 32 } else { 128 };
        Self { ip, prefix }
    }

    /// Whether the kernel gives it to every interface by itself.
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
    /// Several steps for a log line.
    pub fn list(steps: &[Self]) -> String {
        let steps: Vec<String> = steps.iter().map(Self::to_string).collect();
        steps.join(", ")
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Create => write!(f, "make it"),
            Self::SetUp => write!(f, "set it up"),
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

/// What it takes to make an interface as it has to be; nothing if it is. After [`Step::Create`]
/// there is more to do, which another look tells.
///
/// As network-interface-manager does, an address that is missing takes the place of those of its
/// family: it was another one before `tunnelingAgentIP` changed. Otherwise what others add stays.
///
/// # Errors
/// [`Foreign`] for an interface of another kind.
pub fn steps(wanted: &Interface, found: Option<&Link>) -> Result<Vec<Step>, Foreign> {
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
    // First the old ones: if this ends half way, the next look still finds the new one missing.
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

    /// The steps for both families, from a link with these addresses.
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
    fn what_is_in_place_is_left_alone() {
        assert_eq!(plan(true, &[V4, V6]), "");
        assert_eq!(plan(true, &[V4, "10.0.0.1/24", "fd00::1/64", V6]), "");
    }

    #[test]
    fn what_is_missing_is_added() {
        let both = "add the address 100.64.30.10/32, add the address fd00::10/128";
        assert_eq!(plan(true, &[]), both);
        assert_eq!(plan(false, &[]), format!("set it up, {both}"));
        assert_eq!(plan(false, &[V4, V6]), "set it up");
        assert_eq!(plan(true, &[V4]), "add the address fd00::10/128");
    }

    #[test]
    fn a_missing_address_replaces_those_of_its_family() {
        assert_eq!(
            plan(true, &["192.168.30.10/32", "fd00::1/64", V6]),
            "remove the address 192.168.30.10/32, add the address 100.64.30.10/32"
        );
        assert_eq!(
            plan(true, &[V4, "10.0.0.1/24", "fe80::1/64", "fd00::1/64"]),
            "remove the address fd00::1/64, add the address fd00::10/128"
        );
        // A whole network would be local to the node.
        assert_eq!(
            plan(true, &["100.64.30.10/24", V6]),
            "remove the address 100.64.30.10/24, add the address 100.64.30.10/32"
        );
    }

    #[test]
    fn an_interface_is_made_and_one_of_another_kind_never_touched() {
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
