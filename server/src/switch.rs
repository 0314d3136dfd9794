//! Which tunnel new connections go by, and how a live server changes from one to the other.
//!
//! ```text
//! flag, state file --(start)--\
//! mode file ------(changes)----+--> driver --> machine (sans-IO) --> route --> router
//! culvert switch --(admin)-----/        \----> state file, log, metrics
//! ```
//!
//! The last change wins: the mode is the flag's at first, the mode file's if there is one, and what
//! was set by `culvert switch` from then on, also after a restart, until the file or the flag says
//! something else than it did when the switch was made.

pub mod driver;
pub mod machine;
pub mod mode_file;
pub mod pages;
pub mod start;
pub mod state_file;
pub mod status;

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use culvert_host::label_values;
use serde::{Deserialize, Serialize};

use crate::backend::tunnel::Kind;

label_values! {
    /// Which tunnel new connections go by.
    #[derive(Serialize, Deserialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum Mode("mode") {
        /// By agents alone.
        Konnectivity = "konnectivity",
        /// By OpenVPN clients alone.
        Openvpn = "openvpn",
        /// By agents; by OpenVPN clients where no agent can take a connection.
        PreferKonnectivity = "prefer-konnectivity",
        /// By OpenVPN clients; by agents where no client can take a connection.
        PreferOpenvpn = "prefer-openvpn",
    }
}

/// Who set the mode.
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

/// What flags say about the choice of the tunnel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The mode to begin with. Default [`Mode::Konnectivity`].
    pub mode: Mode,
    /// A file that says the mode, followed as it changes.
    pub mode_file: Option<PathBuf>,
    /// Where the mode and a switch in progress survive a restart.
    pub state_file: Option<PathBuf>,
    /// How long connections of the old tunnel may live on after a switch. Default 5 min.
    pub drain: Duration,
}

/// The default of [`Settings::drain`].
pub const DEFAULT_DRAIN: Duration = Duration::from_secs(5 * 60);

/// Not the name of a mode.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no tunnel mode; there are konnectivity, openvpn, prefer-konnectivity and prefer-openvpn"
)]
pub struct UnknownMode(pub String);

/// A mode of a tunnel that this server has not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the tunnel mode {0} needs an OpenVPN tunnel, and this server has none configured; konnectivity and prefer-konnectivity are possible"
)]
pub struct Unavailable(pub Mode);

// === impl Mode ===

impl Mode {
    /// The tunnel that connections go by if it can take them.
    pub fn tunnel(self) -> Kind {
        match self {
            Self::Konnectivity | Self::PreferKonnectivity => Kind::Konnectivity,
            Self::Openvpn | Self::PreferOpenvpn => Kind::Openvpn,
        }
    }

    /// Whether the other tunnel stands in.
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
