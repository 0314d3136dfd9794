//! Networks of the attacked programs, the attacker and the honest clients.
//!
//! Inside private namespaces, each party has a network namespace with a link to the namespace of the attacked
//! programs. Elsewhere all parties are on loopback, with different addresses.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU32, Ordering};

use culvert_tests::namespace::{self, ip};
use culvert_tests::openvpn::Namespace;

/// Address of the attacked programs for all other namespaces.
const ATTACKED: Ipv4Addr = Ipv4Addr::new(192, 168, 90, 1);

/// Networks of the three links.
const CLIENT_LINK: [u8; 3] = [192, 168, 77];
const ATTACKER_LINK: [u8; 3] = [192, 168, 81];
const HONEST_LINK: [u8; 3] = [192, 168, 82];

/// Address behind the client of an OpenVPN server, in the client's namespace.
const BEHIND: Ipv4Addr = Ipv4Addr::new(172, 25, 1, 10);

/// First two bytes of the attacker's addresses, in namespaces and on loopback.
const ATTACKERS: [u8; 2] = [10, 81];
const ATTACKERS_ON_LOOPBACK: [u8; 2] = [127, 81];

/// Address of honest clients on loopback.
const HONEST_ON_LOOPBACK: Ipv4Addr = Ipv4Addr::new(127, 82, 0, 1);

/// The networks of one measurement. Dropping the value removes the namespaces.
#[derive(Debug, Default)]
pub(super) struct Networks {
    spaces: Option<Spaces>,
}

/// A namespace for each party.
#[derive(Debug)]
struct Spaces {
    attacked: Namespace,
    attacker: Namespace,
    honest: Namespace,
    client: Namespace,
    names: [String; 4],
}

impl Networks {
    /// Creates the namespaces, or uses loopback outside of private namespaces. Panics if a namespace cannot be
    /// created.
    pub(super) fn create() -> Self {
        if !namespace::is_inside() {
            return Self::default();
        }
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let names = ["at", "a", "h", "c"].map(|name| format!("{name}{number}"));
        let [attacked, attacker, honest, client] =
            names.each_ref().map(|name| Namespace::add(name));
        attacked.address(ATTACKED);
        client.address(BEHIND);
        for (link, other) in [
            (CLIENT_LINK, &client),
            (ATTACKER_LINK, &attacker),
            (HONEST_LINK, &honest),
        ] {
            let [near, far] = [1, 2].map(|last| in_link(link, last));
            attacked.link(&format!("{near}/24"), other, &format!("{far}/24"));
            other.ip(&format!("route add {ATTACKED} via {near}"));
        }
        // The attacker may use every address of its network.
        let [one, two] = ATTACKERS;
        let network = format!("{one}.{two}.0.0/16");
        attacker.ip(&format!("route add local {network} dev lo"));
        let via = in_link(ATTACKER_LINK, 2);
        attacked.ip(&format!("route add {network} via {via}"));
        Self {
            spaces: Some(Spaces {
                attacked,
                attacker,
                honest,
                client,
                names,
            }),
        }
    }

    /// Address at which the other parties reach the attacked programs.
    pub(super) fn address(&self) -> Ipv4Addr {
        self.spaces
            .as_ref()
            .map_or(Ipv4Addr::LOCALHOST, |_| ATTACKED)
    }

    /// Address on which the attacked programs listen. Their own parts also use loopback.
    pub(super) fn bind(&self) -> Ipv4Addr {
        let spaces = self.spaces.as_ref();
        spaces.map_or(Ipv4Addr::LOCALHOST, |_| Ipv4Addr::UNSPECIFIED)
    }

    /// Returns addresses of the attacker.
    pub(super) fn attackers(&self, count: u16) -> Vec<Ipv4Addr> {
        let [one, two] = match self.spaces {
            Some(_) => ATTACKERS,
            None => ATTACKERS_ON_LOOPBACK,
        };
        let numbers = (1..=count).map(u16::to_be_bytes);
        numbers
            .map(|[three, four]| Ipv4Addr::new(one, two, three, four))
            .collect()
    }

    /// Address of honest clients.
    pub(super) fn honest_source(&self) -> Ipv4Addr {
        let spaces = self.spaces.as_ref();
        spaces.map_or(HONEST_ON_LOOPBACK, |_| in_link(HONEST_LINK, 2))
    }

    /// Address behind the client of an OpenVPN server, if the client has a namespace.
    pub(super) fn behind(&self) -> Option<Ipv4Addr> {
        self.spaces.as_ref().map(|_| BEHIND)
    }

    /// Network of the attacked programs; `None` is the network of this process.
    pub(super) fn attacked(&self) -> Option<Namespace> {
        self.spaces.as_ref().map(|spaces| spaces.attacked.clone())
    }

    /// Network of the attacker.
    pub(super) fn attacker(&self) -> Option<Namespace> {
        self.spaces.as_ref().map(|spaces| spaces.attacker.clone())
    }

    /// Network of honest clients.
    pub(super) fn honest(&self) -> Option<Namespace> {
        self.spaces.as_ref().map(|spaces| spaces.honest.clone())
    }

    /// Network of the client of an OpenVPN server.
    pub(super) fn client(&self) -> Option<Namespace> {
        self.spaces.as_ref().map(|spaces| spaces.client.clone())
    }
}

impl Drop for Networks {
    fn drop(&mut self) {
        for name in self.spaces.iter().flat_map(|spaces| &spaces.names) {
            if let Err(why) = ip(&format!("netns delete {name}")) {
                eprintln!("cannot remove the namespace {name}: {why}");
            }
        }
    }
}

fn in_link([one, two, three]: [u8; 3], last: u8) -> Ipv4Addr {
    Ipv4Addr::new(one, two, three, last)
}
