//! The interface of a tunnel into the worker network. A server may have two tunnels side by side: agents
//! and OpenVPN clients. The router chooses a tunnel for each dial.

use std::pin::Pin;

use culvert_host::label_values;
use culvert_stream::Dial;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::Connection;
use super::agent::StreamDialError;

label_values! {
    /// A tunnel into the worker network.
    #[derive(Serialize, Deserialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum Kind("tunnel") {
        /// Agents that connect to this server.
        Konnectivity = "konnectivity",
        /// OpenVPN clients that connect to this server.
        Openvpn = "openvpn",
    }
}

/// Readiness of a tunnel or a peer for new connections. Greater is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Health {
    /// No peer is connected.
    Absent,
    /// Every connected peer drains, or has not answered for too long.
    Doubtful,
    /// A peer is ready.
    Healthy,
}

/// A peer as `culvert status` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Peer {
    /// Name of the peer, chosen by the peer.
    pub name: String,
    /// Kind of the peer.
    pub kind: String,
    /// Readiness for new connections.
    pub health: Health,
    /// Number of open connections.
    pub connections: usize,
}

/// Reason why no tunnel could open a connection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DialError {
    /// No agent is connected.
    #[error("No agent available")]
    NoAgent,
    /// No connected OpenVPN client has a route to the address.
    #[error("No OpenVPN client available")]
    NoClient,
    /// OpenVPN cannot carry the dial: the address is IPv6 or a name unknown to this server. An agent may
    /// succeed.
    #[error("{0}")]
    Uncarried(String),
    /// The dial failed at a peer.
    #[error(transparent)]
    Stream(#[from] StreamDialError),
}

/// A dial in progress. Dropping it cancels the dial.
pub type Dialing<'a> = Pin<Box<dyn Future<Output = Result<Connection, DialError>> + Send + 'a>>;

/// A tunnel: its peers, and connections through them. The router counts open connections, and ends
/// connections after a switch to another tunnel.
///
/// The tunnel maintains the metrics `established_connections`, `connection_duration_seconds` and
/// `pending_backend_dials`, and counts the dials that a peer refused.
pub trait Tunnel: Send + Sync + 'static {
    /// Returns the health of the best peer. Must be cheap: a server with two tunnels needs the health for
    /// every dial.
    fn health(&self) -> Health;

    /// Opens a connection before the deadline. [`StreamDialError::Refused`] means that the endpoint itself
    /// cannot be reached, and is final. After other errors the router may try the other tunnel, so nothing
    /// may have been sent to the endpoint.
    fn dial<'a>(&'a self, dial: &'a Dial, deadline: Instant) -> Dialing<'a>;

    /// Returns the connected peers.
    fn peers(&self) -> Vec<Peer>;

    /// Returns the thread where a new client is best served, if the tunnel has a preference.
    fn shard(&self) -> Option<usize> {
        None
    }
}

// === impl Kind ===

impl Kind {
    /// Returns the other tunnel.
    #[must_use]
    pub fn other(self) -> Self {
        match self {
            Self::Konnectivity => Self::Openvpn,
            Self::Openvpn => Self::Konnectivity,
        }
    }
}

// === impl Health ===

impl Health {
    /// Returns the text shown to people.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Absent => "no peer",
            Self::Doubtful => "doubtful",
            Self::Healthy => "healthy",
        }
    }
}

// === impl DialError ===

impl DialError {
    /// Returns true if a peer tried the endpoint and failed: another tunnel would not help.
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Stream(StreamDialError::Refused(_)))
    }
}
