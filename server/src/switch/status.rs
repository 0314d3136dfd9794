//! The admin listener's status of the tunnels, and its requests. The operator's tool uses the same types.

use culvert_host::flags::GoDuration;
use serde::{Deserialize, Serialize};

use super::SetBy;
use crate::tunnel::{Kind, Mode, TunnelStatus};

/// Path of the status (GET).
pub const STATUS_PATH: &str = "/tunnel";

/// Path of a [`Request`] (POST).
pub const SWITCH_PATH: &str = "/tunnel/switch";

/// Status of all tunnels of a server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    /// True if this server drains: it stops soon, and still serves dials.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub draining: bool,
    /// Congestion control of agents' connections, as the kernel names it. Missing in the answer of older servers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_congestion: Option<String>,
    /// Mode that was set last.
    pub mode: Mode,
    /// Origin of the mode.
    pub set_by: SetBy,
    /// Tunnels of new dials: the preferred tunnel, then its fallback.
    pub new_dials: Vec<Kind>,
    /// Progress of the switch to the mode.
    pub switch: Progress,
    /// Tunnels that this server has.
    pub tunnels: Vec<TunnelStatus>,
    /// Duration of the last completed switch, in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_switch_seconds: Option<f64>,
    /// Current problems: a mode file that cannot be used, or a state that was lost or cannot be saved.
    pub problems: Vec<String>,
    /// Set while a restart would lose the mode, because it cannot be saved. Missing in the answer of older servers.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unsaved: bool,
}

/// Progress of a switch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(
    tag = "phase",
    rename_all = "kebab-case",
    rename_all_fields = "camelCase"
)]
pub enum Progress {
    /// The mode is in force.
    Settled,
    /// The switch waits until this tunnel has a healthy peer.
    Waiting {
        /// Tunnel that the switch waits for.
        tunnel: Kind,
        /// Time since the request, in seconds.
        seconds: f64,
    },
    /// New dials use the other tunnel; connections of this tunnel stay open.
    Draining {
        /// Tunnel that drains.
        tunnel: Kind,
        /// Time since the request, in seconds.
        seconds: f64,
        /// Number of remaining dials and connections.
        left: usize,
        /// Time until the connections are closed, in seconds. 0 if the deadline has passed and only a
        /// healthy peer of the other tunnel is missing.
        seconds_left: f64,
    },
}

/// Request for a mode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Request {
    /// Requested mode.
    pub to: Mode,
    /// Time for which connections of the old tunnel may stay open, in Go's duration syntax. `None` means
    /// the server's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain: Option<String>,
}

impl Request {
    /// Creates a request for a mode.
    pub fn new(to: Mode, drain: Option<GoDuration>) -> Self {
        let drain = drain.map(|drain| drain.to_string());
        Self { to, drain }
    }

    /// Returns the drain time.
    ///
    /// # Errors
    /// Fails if the text is not a duration, or is below zero.
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
