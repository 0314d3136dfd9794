//! The QUIC flows of an upstream.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use culvert_host::net::shares::Share;

use super::Upstream;

/// A place within the limit of an upstream for QUIC flows, and in the share of a client's address.
#[derive(Debug)]
pub(crate) struct FlowPlace {
    upstream: Arc<Upstream>,
    _share: Share,
}

// === impl Upstream ===

impl Upstream {
    /// Takes a place for a QUIC flow; `None` if the upstream, or the client's address, has as many flows as
    /// `--max-connections` allows. TCP connections have places of their own: the addresses of UDP clients may be
    /// forged.
    pub(crate) fn flow_place(self: &Arc<Self>, client: IpAddr) -> Option<FlowPlace> {
        let taken = self.flows.load(Ordering::Relaxed);
        let share = self.flow_shares.take_at(client, taken)?;
        self.flows.fetch_add(1, Ordering::Relaxed);
        Some(FlowPlace {
            upstream: self.clone(),
            _share: share,
        })
    }

    /// Returns true if no place for a QUIC flow is left.
    pub(crate) fn is_full_of_flows(&self) -> bool {
        self.flows.load(Ordering::Relaxed) >= self.limit
    }

    /// Returns the UDP address of the next endpoint in the rotation; `None` without an endpoint that serves QUIC.
    pub(crate) fn quic_endpoint(&self) -> Option<SocketAddr> {
        let endpoint = self.candidates().first().copied()?;
        self.backend.read().quic_address(endpoint)
    }

    /// Returns true if only clients in some networks may connect.
    pub(crate) fn is_restricted(&self) -> bool {
        self.backend.read().allowed.is_some()
    }
}

impl Drop for FlowPlace {
    fn drop(&mut self) {
        self.upstream.flows.fetch_sub(1, Ordering::Relaxed);
    }
}
