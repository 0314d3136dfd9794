//! State of the tunnel that its session and its connections share.

use std::net::SocketAddrV4;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::metrics::OpenVpnMetrics;
use super::nodes::NodeAccess;
use crate::agent::Agent;

/// State shared by sessions and connections.
pub(crate) struct Tunnel {
    /// Agent that counts connections and owns their tasks.
    pub agent: Arc<Agent>,
    /// Metrics of the tunnel.
    pub metrics: OpenVpnMetrics,
    nodes: NodeAccess,
    up: AtomicBool,
}

impl Tunnel {
    /// Creates a tunnel that is down.
    pub(crate) fn new(agent: Arc<Agent>, nodes: NodeAccess) -> Arc<Self> {
        Arc::new(Self {
            metrics: OpenVpnMetrics::new(agent.metrics.registry()),
            agent,
            nodes,
            up: AtomicBool::new(false),
        })
    }

    /// Returns true while the tunnel can carry data.
    pub(crate) fn is_up(&self) -> bool {
        self.up.load(Ordering::Relaxed)
    }

    pub(super) fn set_up(&self, up: bool) {
        self.up.store(up, Ordering::Relaxed);
        self.metrics.up.set(if up { 1.0 } else { 0.0 });
    }

    /// Returns the address to dial for a destination from the tunnel.
    ///
    /// # Errors
    /// Returns the reason why the destination cannot be dialed.
    pub(super) fn target(&self, destination: SocketAddrV4) -> Result<SocketAddrV4, String> {
        target(&self.nodes, destination)
    }
}

fn target(nodes: &NodeAccess, destination: SocketAddrV4) -> Result<SocketAddrV4, String> {
    let target = nodes.target(destination).ok_or_else(|| {
        let ip = destination.ip();
        format!("{ip} is in the node access network, but --openvpn-nodes has no matching node")
    })?;
    let ip = target.ip();
    // The kernel of a stock client's pod does not route packets to such targets either. A loopback target is
    // allowed only if `--openvpn-nodes` maps a node address to it: the agent's operator may allow loopback
    // targets, but the dialing side may not.
    let nowhere = (ip.is_loopback() && target == destination)
        || ip.is_unspecified()
        || ip.is_multicast()
        || ip.is_broadcast()
        || target.port() == 0;
    match nowhere {
        true => Err(format!("{target} cannot be reached through the tunnel")),
        false => Ok(target),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn loopback_is_dialed_only_if_mapped_as_a_node() {
        let none = NodeAccess::default();
        let own = NodeAccess {
            nodes: vec!["127.0.0.0/16".parse().unwrap()],
            ..NodeAccess::default()
        };
        let to = |nodes: &NodeAccess, text: &str| target(nodes, text.parse().unwrap()).ok();
        for nodes in [&none, &own] {
            for nowhere in ["127.0.0.1:80", "0.0.0.0:80", "224.0.0.1:80", "172.25.0.1:0"] {
                assert_eq!(to(nodes, nowhere), None, "{nowhere}");
            }
            let pod = "172.25.0.1:80";
            assert_eq!(to(nodes, pod), Some(pod.parse().unwrap()));
        }
        assert_eq!(to(&none, "10.254.0.1:80"), None);
        assert_eq!(
            to(&own, "10.254.0.1:80"),
            Some("127.0.0.1:80".parse().unwrap())
        );
    }
}
