//! The one shape of a way into the worker network. A server may have two side by side: agents, and
//! OpenVPN clients. The router chooses between them for each dial.

use std::pin::Pin;

use culvert_host::label_values;
use culvert_stream::Dial;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::Connection;
use super::agent::StreamDialError;

label_values! {
    /// A tunnel.
    #[derive(Serialize, Deserialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum Kind("tunnel") {
        /// Agents that connect to this server.
        Konnectivity = "konnectivity",
        /// OpenVPN clients that connect to this server.
        Openvpn = "openvpn",
    }
}

/// Whether a tunnel, or one peer of it, can take new connections. Greater is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Health {
    /// No peer is connected.
    Absent,
    /// All that there is drains, or has not answered for too long.
    Doubtful,
    /// A peer is ready.
    Healthy,
}

/// A peer as `culvert status` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Peer {
    /// How the peer calls itself.
    pub name: String,
    /// What kind of peer it is.
    pub kind: String,
    /// Whether it can take new connections.
    pub health: Health,
    /// Its open connections.
    pub connections: usize,
}

/// Why no tunnel could open a connection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DialError {
    /// No agent is connected.
    #[error("No agent available")]
    NoAgent,
    /// No OpenVPN client is connected that has a route to the address.
    #[error("No OpenVPN client available")]
    NoClient,
    /// OpenVPN can not carry it: IPv6, or a name that is not known here. An agent may.
    #[error("{0}")]
    Uncarried(String),
    /// The peers that were asked failed.
    #[error(transparent)]
    Stream(#[from] StreamDialError),
}

/// A dial in progress. Dropping it gives the dial up.
pub type Dialing<'a> = Pin<Box<dyn Future<Output = Result<Connection, DialError>> + Send + 'a>>;

/// A tunnel: its peers, and connections through them. Open connections are counted by the router,
/// which also ends them when traffic was switched to another tunnel.
///
/// The families `established_connections`, `connection_duration_seconds` and `pending_backend_dials`
/// are the tunnel's to keep, and so is the count of dials that a peer refused.
pub trait Tunnel: Send + Sync + 'static {
    /// The health of its best peer. Asked for with every dial of a server with two tunnels: it must
    /// be cheap.
    fn health(&self) -> Health;

    /// Opens a connection, until the deadline at the latest. It says [`StreamDialError::Refused`] if
    /// the target itself can not be reached: that is final. All other errors may lead to a try by
    /// the other tunnel, so nothing may have been sent to a target.
    fn dial<'a>(&'a self, dial: &'a Dial, deadline: Instant) -> Dialing<'a>;

    /// The peers that are connected now.
    fn peers(&self) -> Vec<Peer>;

    /// The thread where a new client is best served, if the tunnel has a preference.
    fn shard(&self) -> Option<usize> {
        None
    }
}

// === impl Kind ===

impl Kind {
    /// The other one of the two.
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
    /// The word for people.
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
    /// The target was asked, or nobody is left to ask: another tunnel would not help.
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Stream(StreamDialError::Refused(_)))
    }
}
