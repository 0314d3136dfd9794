//! The state file: keeps the mode and a switch in progress across restarts.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::Instant;

use super::SetBy;
use super::machine::Phase;
use crate::tunnel::{Kind, Mode};

/// Largest state file, in bytes.
const MAX_BYTES: u64 = 64 * 1024;

/// The only version so far.
const VERSION: u32 = 1;

/// Content of the state file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Saved {
    version: u32,
    /// Mode that was set last.
    pub mode: Mode,
    /// Origin of the mode.
    pub set_by: SetBy,
    /// Value of `--tunnel-mode` at that time.
    pub flag: Mode,
    /// Mode in the mode file at that time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<Mode>,
    /// Switch in progress.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub switch: Option<SavedSwitch>,
}

/// A switch in progress. Times are wall-clock times in ms since 1970.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    tag = "phase",
    rename_all = "kebab-case",
    rename_all_fields = "camelCase"
)]
pub(crate) enum SavedSwitch {
    /// The target had no healthy peer.
    Waiting {
        /// Preferred tunnel of dials.
        first: Kind,
        /// Time for which connections may stay open afterwards, in ms.
        drain_ms: u64,
        /// Time of the request.
        since_ms: u64,
    },
    /// Connections of the other tunnel were still open.
    Draining {
        /// Time when the connections are closed.
        deadline_ms: u64,
        /// Time of the request.
        since_ms: u64,
    },
}

/// The state file at a path.
#[derive(Clone, Debug)]
pub(crate) struct StateFile {
    path: PathBuf,
}

/// The wall clock and the monotonic clock of the process, at the same point in time. The wall clock continues
/// across restarts; the monotonic clock is never adjusted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clocks {
    /// Monotonic clock of this process.
    pub now: Instant,
    /// Wall clock.
    pub wall: SystemTime,
}

// === impl Saved ===

impl Saved {
    /// Creates the state to save, without a switch in progress.
    pub(crate) fn new(mode: Mode, set_by: SetBy, flag: Mode, file: Option<Mode>) -> Self {
        Self {
            version: VERSION,
            mode,
            set_by,
            flag,
            file,
            switch: None,
        }
    }

    /// Adds the switch in progress, if any.
    #[must_use]
    pub(crate) fn with_phase(mut self, phase: Phase, clocks: Clocks) -> Self {
        self.switch = match phase {
            Phase::Settled => None,
            Phase::Waiting {
                first,
                drain,
                since,
            } => Some(SavedSwitch::Waiting {
                first,
                drain_ms: millis(drain),
                since_ms: clocks.to_wall(since),
            }),
            Phase::Draining {
                deadline, since, ..
            } => Some(SavedSwitch::Draining {
                deadline_ms: clocks.to_wall(deadline),
                since_ms: clocks.to_wall(since),
            }),
        };
        self
    }

    /// Returns the saved phase. The remaining drain time is at most the requested time or `longest_drain`,
    /// whichever is longer, even if the wall clock was adjusted since the state was saved.
    pub(crate) fn phase(&self, longest_drain: Duration, clocks: Clocks) -> Phase {
        match self.switch {
            None => Phase::Settled,
            Some(SavedSwitch::Waiting {
                first,
                drain_ms,
                since_ms,
            }) => Phase::Waiting {
                first,
                drain: Duration::from_millis(drain_ms),
                since: clocks.since(since_ms),
            },
            Some(SavedSwitch::Draining {
                deadline_ms,
                since_ms,
            }) => {
                let meant = Duration::from_millis(deadline_ms.saturating_sub(since_ms));
                let left = clocks.until(deadline_ms).min(meant.max(longest_drain));
                Phase::Draining {
                    deadline: clocks.now + left,
                    since: clocks.since(since_ms),
                    closing: false,
                    overdue: false,
                }
            }
        }
    }
}

// === impl Clocks ===

impl Clocks {
    /// Reads both clocks.
    pub(crate) fn read() -> Self {
        Self {
            now: Instant::now(),
            wall: SystemTime::now(),
        }
    }

    fn wall_ms(self) -> u64 {
        millis(self.wall.duration_since(UNIX_EPOCH).unwrap_or_default())
    }

    fn to_wall(self, time: Instant) -> u64 {
        let later = millis(time.saturating_duration_since(self.now));
        let earlier = millis(self.now.saturating_duration_since(time));
        (self.wall_ms() + later).saturating_sub(earlier)
    }

    fn until(self, wall_ms: u64) -> Duration {
        Duration::from_millis(wall_ms.saturating_sub(self.wall_ms()))
    }

    /// Converts a wall-clock time in the past to the monotonic clock. The monotonic clock cannot represent
    /// times before the computer started; such times become the current time.
    fn since(self, wall_ms: u64) -> Instant {
        let ago = Duration::from_millis(self.wall_ms().saturating_sub(wall_ms));
        self.now.checked_sub(ago).unwrap_or(self.now)
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

// === impl StateFile ===

impl StateFile {
    /// Creates a handle for the file at a path. The file may be missing.
    pub(crate) fn new(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
        }
    }

    /// Reads the file; `None` if it is missing.
    ///
    /// # Errors
    /// Fails if the file cannot be read, or is not a state file of this program; the error text names the
    /// file.
    pub(crate) fn load(&self) -> Result<Option<Saved>, String> {
        let fail = |why: String| format!("--tunnel-state-file {}: {why}", self.path.display());
        let file = match File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(fail(error.to_string())),
        };
        let mut text = String::new();
        let mut file = file.take(MAX_BYTES + 1);
        file.read_to_string(&mut text)
            .map_err(|error| fail(error.to_string()))?;
        if text.len() as u64 > MAX_BYTES {
            return Err(fail(format!("longer than {MAX_BYTES} bytes")));
        }
        let saved: Saved = serde_json::from_str(&text).map_err(|error| fail(error.to_string()))?;
        if saved.version != VERSION {
            let version = saved.version;
            return Err(fail(format!(
                "unknown version {version}; expected {VERSION}"
            )));
        }
        Ok(Some(saved))
    }

    /// Renames a file that is not used, so that the next save does not replace it. Returns what has happened to the file.
    pub(crate) fn set_aside(&self) -> String {
        let kept = beside(&self.path, ".bad");
        match fs::rename(&self.path, &kept) {
            Ok(()) => format!("the file is now {}", kept.display()),
            Err(error) => format!("the file cannot be renamed: {error}"),
        }
    }

    /// Replaces the file, on a thread of its own: writing to a disk may block. After a crash at any point, either the old or
    /// the new file exists. The task fails if the file cannot be written; the error text names the file.
    pub(crate) fn save(&self, saved: &Saved) -> JoinHandle<Result<(), String>> {
        let (path, text) = (self.path.clone(), serde_json::to_vec(saved));
        spawn_blocking(move || {
            let written = text.map_err(io::Error::other);
            let written = written.and_then(|text| replace(&path, &text));
            written.map_err(|error| {
                let path = path.display();
                format!("cannot save --tunnel-state-file {path}: {error}")
            })
        })
    }
}

/// Returns the path with an ending.
fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(ending);
    path.with_file_name(name)
}

fn replace(path: &Path, text: &[u8]) -> io::Result<()> {
    let new = beside(path, ".new");
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    // Another user of the folder may have placed a link here.
    options.custom_flags(OFlags::NOFOLLOW.bits() as i32);
    let mut file = options.open(&new)?;
    file.write_all(text)?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

#[cfg(test)]
mod tests;
