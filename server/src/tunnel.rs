//! Types that describe the tunnels of a server: kind, mode, health, peers.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

use culvert_host::label_values;
use serde::{Deserialize, Serialize};

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

label_values! {
    /// Choice of the tunnel for new connections.
    #[derive(Serialize, Deserialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum Mode("mode") {
        /// Agents only.
        Konnectivity = "konnectivity",
        /// OpenVPN clients only.
        Openvpn = "openvpn",
        /// Agents; OpenVPN clients while no agent can accept a connection.
        PreferKonnectivity = "prefer-konnectivity",
        /// OpenVPN clients; agents while no client can accept a connection.
        PreferOpenvpn = "prefer-openvpn",
    }
}

label_values! {
    /// Readiness of a tunnel or a peer for new connections. Greater is better.
    #[derive(PartialOrd, Ord, Serialize, Deserialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum Health("health") {
        /// No peer is connected.
        Absent = "no peer",
        /// No connected peer has answered for too long.
        Doubtful = "doubtful",
        /// Every peer that answers drains: it still accepts connections, and stops soon.
        Draining = "draining",
        /// A peer is ready.
        Healthy = "healthy",
    }
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
    /// Address of the peer, or of a load balancer. Missing in the answer of older servers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<SocketAddr>,
    /// First identifiers of an agent, in the syntax of `--agent-identifiers`. Missing in the answer of older servers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub identifiers: Vec<String>,
    /// Number of the other identifiers.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub more_identifiers: usize,
}

/// Status of a tunnel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TunnelStatus {
    /// Kind of the tunnel.
    pub tunnel: Kind,
    /// Health of the best peer.
    pub health: Health,
    /// Number of open connections.
    pub connections: usize,
    /// Number of dials in progress.
    pub dials: usize,
    /// Peers of the tunnel.
    pub peers: Vec<Peer>,
}

/// A text that is not the name of a mode.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown tunnel mode {0:?}; expected konnectivity, openvpn, prefer-konnectivity or prefer-openvpn"
)]
pub struct UnknownMode(pub String);

// === impl Peer ===

impl Peer {
    /// Describes the identifiers for people. The text is empty without identifiers.
    #[must_use]
    pub fn describe_identifiers(&self) -> String {
        list_identifiers(&self.identifiers, self.more_identifiers)
    }
}

/// Describes identifiers for people: the first identifiers, and the number of the others.
pub(crate) fn list_identifiers(first: &[String], more: usize) -> String {
    let first = first.join(", ");
    match more {
        0 => first,
        more => format!("{first}, and {more} more"),
    }
}

/// Returns true for the count of a field that is left out.
fn is_zero(count: &usize) -> bool {
    *count == 0
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

// === impl Mode ===

impl Mode {
    /// Returns the preferred tunnel.
    pub fn tunnel(self) -> Kind {
        match self {
            Self::Konnectivity | Self::PreferKonnectivity => Kind::Konnectivity,
            Self::Openvpn | Self::PreferOpenvpn => Kind::Openvpn,
        }
    }

    /// Returns true if the other tunnel is a fallback.
    pub fn prefers(self) -> bool {
        matches!(self, Self::PreferKonnectivity | Self::PreferOpenvpn)
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Mode {
    type Err = UnknownMode;

    fn from_str(text: &str) -> Result<Self, UnknownMode> {
        let known = Self::ALL.iter().find(|mode| mode.as_str() == text);
        known.copied().ok_or_else(|| UnknownMode(text.to_owned()))
    }
}
