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
    /// Id of the server, the value of `--server-id`. Missing in the answer of older servers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server_id: Option<String>,
    /// Version of the server. Missing in the answer of older servers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]

    use serde_json::{Value, json};

    use super::*;

    /// Answer of a server without the newer fields.
    const OLD: &str = r#"{"mode":"konnectivity","setBy":"flag","newDials":["konnectivity"],
        "switch":{"phase":"settled"},"tunnels":[{"tunnel":"konnectivity","health":"healthy","connections":1,"dials":0,
        "peers":[{"name":"a","kind":"agent, native","health":"healthy","connections":1}]}],"problems":[]}"#;

    #[test]
    fn new_fields_are_missing_in_the_answer_of_an_older_server() {
        let old: Status = serde_json::from_str(OLD).unwrap();
        assert_eq!((&old.server_id, &old.version), (&None, &None));
        let peer = &old.tunnels[0].peers[0];
        assert_eq!((peer.address, peer.more_identifiers), (None, 0));
        assert_eq!(peer.describe_identifiers(), "");
        let again: Value = serde_json::to_value(&old).unwrap();
        assert_eq!(again, serde_json::from_str::<Value>(OLD).unwrap());
    }

    #[test]
    fn addresses_identifiers_server_and_version_are_in_the_answer() {
        let mut status: Status = serde_json::from_str(OLD).unwrap();
        status.server_id = Some("s".to_owned());
        status.version = Some("0.2.0".to_owned());
        let peer = &mut status.tunnels[0].peers[0];
        peer.address = Some(([192, 0, 2, 1], 1000).into());
        peer.identifiers = vec!["ipv4=10.0.0.1".to_owned(), "host=a".to_owned()];
        peer.more_identifiers = 3;
        let text = "ipv4=10.0.0.1, host=a, and 3 more";
        assert_eq!(peer.describe_identifiers(), text);
        let answer = serde_json::to_value(&status).unwrap();
        assert_eq!(answer["serverId"], "s");
        assert_eq!(answer["version"], "0.2.0");
        let peer = json!({
            "name": "a", "kind": "agent, native", "health": "healthy", "connections": 1,
            "address": "192.0.2.1:1000", "identifiers": ["ipv4=10.0.0.1", "host=a"], "moreIdentifiers": 3,
        });
        assert_eq!(answer["tunnels"][0]["peers"], json!([peer]));
        assert_eq!(serde_json::from_value::<Status>(answer).unwrap(), status);
    }
}
