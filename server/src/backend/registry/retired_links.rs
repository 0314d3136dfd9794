//! The QUIC links of agents whose TCP connection has ended. Such a link gets no new dials, and ends with its last stream.

use std::net::SocketAddr;
use std::sync::Arc;

use culvert_native::quic::link::Link;

use super::Registry;
use crate::tunnel::{Health, Peer};

/// A QUIC link whose TCP connection has ended.
pub(super) struct RetiredLink {
    agent_id: String,
    link: Arc<Link>,
}

/// Entry of a retired link in the registry; dropping the value removes the entry.
pub(crate) struct RetiredLinkGuard {
    registry: Arc<Registry>,
    retired: Arc<RetiredLink>,
}

// === impl Registry ===

impl Registry {
    /// Adds the QUIC link of an agent whose TCP connection has ended to the peers of the status output.
    pub(crate) fn retire_link(
        self: &Arc<Self>,
        agent_id: &str,
        link: &Arc<Link>,
    ) -> RetiredLinkGuard {
        let retired = Arc::new(RetiredLink {
            agent_id: agent_id.to_owned(),
            link: link.clone(),
        });
        self.retired_links.lock().push(retired.clone());
        RetiredLinkGuard {
            registry: self.clone(),
            retired,
        }
    }
}

// === impl RetiredLink ===

impl RetiredLink {
    /// Returns the link for the status output.
    pub(super) fn peer(&self) -> Peer {
        let address = self.link.remote_address();
        // A socket for IPv4 and IPv6 reports IPv4 addresses as IPv6 addresses.
        let address = SocketAddr::new(address.ip().to_canonical(), address.port());
        Peer {
            name: self.agent_id.clone(),
            kind: "agent, QUIC without TCP".to_owned(),
            health: match self.link.is_healthy() {
                true => Health::Draining,
                false => Health::Doubtful,
            },
            connections: self.link.open(),
            address: Some(address),
            // The link gets no new dials.
            identifiers: Vec::new(),
            more_identifiers: 0,
        }
    }
}

// === impl RetiredLinkGuard ===

impl Drop for RetiredLinkGuard {
    fn drop(&mut self) {
        let mut links = self.registry.retired_links.lock();
        links.retain(|other| !Arc::ptr_eq(other, &self.retired));
    }
}
