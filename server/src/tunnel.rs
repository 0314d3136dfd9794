//! Types that describe the tunnels of a server: kind, mode, health, peers.

use std::fmt;
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
