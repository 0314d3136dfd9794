//! The UDP socket for the QUIC links of agents.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context as _;
use culvert_host::tls::reload::ServerTls;
use culvert_native::quic::endpoint::{self, ServerEndpoint, receive_buffer};
use culvert_native::quic::keys::EndpointKeys;
use culvert_native::quic::{CONNECTION_BYTES, LINK_BYTES};
use tracing::warn;

use crate::backend::second_link::{MAX_CONNECTIONS, SecondLinks};
use crate::config::AgentListener;

/// Receive buffer below which fast transfers lose packets, in bytes.
const SMALL_BUFFER_BYTES: usize = 1 << 20;

/// Bounds for the buffered bytes of QUIC links; 0 without QUIC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Buffers {
    /// Bound for one connection, in bytes.
    pub(super) connection: usize,
    /// Bound for the other bytes of all links of an agent.
    pub(super) peer: usize,
}

/// An open socket that is not served yet.
pub(super) struct Bound {
    pub(super) address: SocketAddr,
    pub(super) endpoint: Arc<ServerEndpoint>,
    pub(super) second_links: Arc<SecondLinks>,
}

impl Buffers {
    /// Returns the bounds for a listener.
    pub(super) fn of(listener: &AgentListener) -> Self {
        match listener.quic_port {
            Some(_) => Self {
                connection: CONNECTION_BYTES,
                peer: MAX_CONNECTIONS * LINK_BYTES,
            },
            None => Self::default(),
        }
    }
}

/// Opens the socket beside the listener for agents at `tcp`. Returns `None` if the configuration offers no QUIC.
pub(super) async fn bind(
    listener: &AgentListener,
    tcp: SocketAddr,
    tls: &ServerTls,
) -> anyhow::Result<Option<Bound>> {
    let Some(port) = listener.quic_port else {
        return Ok(None);
    };
    let address = SocketAddr::new(tcp.ip(), port);
    let advice = || format!("cannot serve QUIC on {address}; see --agent-quic-port");
    let socket = endpoint::bind(address).with_context(advice)?;
    let address = socket.local_addr()?;
    let key = tokio::fs::read(&listener.key).await;
    let key = key.with_context(|| format!("cannot read {}", listener.key.display()))?;
    let (keys, copy) = (EndpointKeys::derive(&key), socket.try_clone()?);
    let endpoint = ServerEndpoint::new(socket, &tls.get(), keys).with_context(advice)?;
    let bytes = receive_buffer(&copy);
    if bytes < SMALL_BUFFER_BYTES {
        warn!(
            bytes,
            "the receive buffer for QUIC is small: fast transfers will lose packets; raise the sysctl net.core.rmem_max \
             of the node to 4194304"
        );
    }
    Ok(Some(Bound {
        address,
        endpoint: Arc::new(endpoint),
        second_links: SecondLinks::new(address.port(), tcp.port()),
    }))
}
