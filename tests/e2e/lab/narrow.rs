//! A path between agent and servers with a link of a smaller MTU, whose routers do not report lost packets.
//!
//! ```text
//! seed --192.168.81.0/24-- router1 --192.168.82.0/24, MTU 1400-- router2 --192.168.83.0/24-- node
//! ```

use culvert_tests::namespace;
use culvert_tests::openvpn::Namespace;

use super::{Lab, SEED};

/// MTU of the link in the middle. All other links have 1500.
const MTU: u32 = 1400;
/// Kernel setting of a network namespace: 1 lets TCP probe for the size of packets after losses.
const PROBING: &str = "/proc/sys/net/ipv4/tcp_mtu_probing";

/// The path. All packets between the node and the servers take the path until [`NarrowPath::remove`].
pub(crate) struct NarrowPath {
    node: Namespace,
}

impl Lab {
    /// Creates the path. The routers drop large packets that must not be fragmented, and their reports.
    pub(crate) fn narrow_path(&self) -> NarrowPath {
        let node = self.node.clone();
        let [first, second] = ["router1", "router2"].map(Namespace::add);
        ip("link add router1 type veth peer name seed netns router1");
        ip("address add 192.168.81.1/24 dev router1");
        ip("link set router1 up");
        first.ip("address add 192.168.81.2/24 dev seed");
        first.ip("link set seed up");
        first.link("192.168.82.1/24", &second, "192.168.82.2/24");
        first.ip(&format!("link set router2 mtu {MTU}"));
        second.ip(&format!("link set router1 mtu {MTU}"));
        second.link("192.168.83.1/24", &node, "192.168.83.2/24");

        ip("route add 192.168.83.0/24 via 192.168.81.2");
        first.ip("route add 192.168.83.0/24 via 192.168.82.2");
        first.ip(&format!("route add {SEED}/32 via 192.168.81.1"));
        second.ip(&format!("route add {SEED}/32 via 192.168.82.1"));
        node.ip(&format!("route add {SEED}/32 via 192.168.83.1"));
        for router in [&first, &second] {
            router.forward();
            router.iptables("-w -A OUTPUT -p icmp --icmp-type fragmentation-needed -j DROP");
        }
        NarrowPath { node }
    }
}

impl NarrowPath {
    /// Lets TCP of the seed and of the node probe for the size of packets, or not.
    pub(crate) fn probe(&self, is_on: bool) {
        let value = if is_on { "1" } else { "0" };
        let write = || std::fs::write(PROBING, value).expect("a kernel setting");
        write();
        self.node.within(write);
    }

    /// Gives the node's route to the servers the MTU of the link in the middle.
    pub(crate) fn set_mtu_of_the_route(&self) {
        let change = format!("route change {SEED}/32 via 192.168.83.1 mtu lock {MTU}");
        self.node.ip(&change);
    }

    /// Removes the path.
    pub(crate) fn remove(self) {
        self.probe(false);
        // The routes end with the links.
        ip("link del router1");
        self.node.ip("link del router2");
    }
}

fn ip(words: &str) {
    namespace::ip(words).unwrap_or_else(|why| panic!("ip {words}: {why}"));
}
