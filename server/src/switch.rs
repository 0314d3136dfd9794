//! The choice of the tunnel for new connections, and the switch between tunnels on a live server.
//!
//! ```text
//! flag, state file --(start)--\
//! mode file ------(changes)----+--> driver --> machine (sans-IO) --> route --> router
//! culvert switch --(admin)-----/        \----> state file, log, metrics
//! ```
//!
//! The last change wins. At first the mode comes from the flag, or from the mode file if present.
//! `culvert switch` overrides both, also after a restart, until the file or the flag differs from its value
//! at the time of the switch.

pub(crate) mod driver;
pub(crate) mod machine;
pub mod mode_file;
pub(crate) mod pages;
pub(crate) mod start;
pub(crate) mod state_file;
pub mod status;

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::tunnel::Mode;

/// Origin of the mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SetBy {
    /// `--tunnel-mode`.
    Flag,
    /// `--tunnel-mode-file`.
    File,
    /// `culvert switch`.
    Switch,
}

/// Settings from flags for the choice of the tunnel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Mode at start. Default [`Mode::Konnectivity`].
    pub mode: Mode,
    /// File with the mode, followed as it changes.
    pub mode_file: Option<PathBuf>,
    /// File that keeps the mode and a switch in progress across restarts.
    pub state_file: Option<PathBuf>,
    /// Time for which connections of the old tunnel may stay open after a switch. Default 5 min.
    pub drain: Duration,
}

/// Default of [`Settings::drain`].
pub const DEFAULT_DRAIN: Duration = Duration::from_secs(5 * 60);

/// A mode whose tunnel this server does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the tunnel mode {0} needs an OpenVPN tunnel, and this server has none configured; konnectivity and prefer-konnectivity are possible"
)]
pub struct Unavailable(pub Mode);

// === impl Settings ===

impl Default for Settings {
    fn default() -> Self {
        Self {
            mode: Mode::Konnectivity,
            mode_file: None,
            state_file: None,
            drain: DEFAULT_DRAIN,
        }
    }
}
