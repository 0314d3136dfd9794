//! What the admin listener says of the tunnels and takes as a request, as values that the
//! operator's tool reads and writes too.

use culvert_host::flags::GoDuration;
use serde::{Deserialize, Serialize};

use super::{Mode, SetBy};
use crate::backend::tunnel::{Health, Kind, Peer};

/// The path of the status: GET.
pub const STATUS_PATH: &str = "/tunnel";

/// The path of a [`Request`]: POST.
pub const SWITCH_PATH: &str = "/tunnel/switch";

/// Everything about the tunnels of one server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    /// The mode that was set last.
    pub mode: Mode,
    /// Who set it.
    pub set_by: SetBy,
    /// Where new dials go: the tunnel, and the one that stands in for it.
    pub new_dials: Vec<Kind>,
    /// How far the switch to the mode is.
    pub switch: Progress,
    /// The tunnels that this server has.
    pub tunnels: Vec<TunnelStatus>,
    /// How long the last switch took that is over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_switch_seconds: Option<f64>,
    /// What does not work: a mode file that can not be used, a state that can not be saved.
    pub problems: Vec<String>,
}

/// How far a switch is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(
    tag = "phase",
    rename_all = "kebab-case",
    rename_all_fields = "camelCase"
)]
pub enum Progress {
    /// The mode is in force.
    Settled,
    /// It will be once this tunnel has a healthy peer.
    Waiting {
        /// The tunnel.
        tunnel: Kind,
        /// For how long already.
        seconds: f64,
    },
    /// It is for new dials; connections of this tunnel live on.
    Draining {
        /// The tunnel.
        tunnel: Kind,
        /// For how long the switch has been in progress.
        seconds: f64,
        /// How many dials and connections it still has.
        left: usize,
        /// When they are closed; 0 if the time is over and only a healthy peer of the other tunnel
        /// is missing.
        seconds_left: f64,
    },
}

/// One tunnel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TunnelStatus {
    /// Which one.
    pub tunnel: Kind,
    /// The health of its best peer.
    pub health: Health,
    /// Open connections.
    pub connections: usize,
    /// Dials in progress.
    pub dials: usize,
    /// Its peers.
    pub peers: Vec<Peer>,
}

/// A request for a mode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Request {
    /// The mode.
    pub to: Mode,
    /// How long connections of the old tunnel may live on, in Go's syntax; the server's default if
    /// nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain: Option<String>,
}

impl Request {
    /// The request for a mode.
    pub fn new(to: Mode, drain: Option<GoDuration>) -> Self {
        let drain = drain.map(|drain| drain.to_string());
        Self { to, drain }
    }

    /// The drain.
    ///
    /// # Errors
    /// When it is not a duration, or below zero.
    pub fn drain(&self) -> Result<Option<std::time::Duration>, String> {
        let Some(text) = &self.drain else {
            return Ok(None);
        };
        let drain: GoDuration = text.parse().map_err(|error| format!("drain: {error}"))?;
        if drain.nanos() < 0 {
            return Err(format!("drain must be >= 0, got {drain}"));
        }
        Ok(Some(drain.saturating()))
    }
}
