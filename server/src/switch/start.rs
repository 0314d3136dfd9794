//! The choice of the mode at start.

use std::fs;
use std::path::{Path, PathBuf};

use culvert_host::file_follower::{FileFollower, Limits, SLOW_READ, read_in_background, too_slow};
use tracing::{error, info, warn};

use super::machine::{Phase, Switch};
use super::state_file::{Clocks, Saved, StateFile};
use super::{SetBy, Settings, Unavailable, mode_file};
use crate::router::View;
use crate::tunnel::Mode;

/// Inputs for the choice of the mode at start.
pub(crate) struct Start {
    pub(super) settings: Settings,
    /// The mode file, if configured.
    pub(super) mode_file: Option<FileFollower>,
    pub(super) state: Option<StateFile>,
    /// Mode in the mode file.
    pub(super) file: Option<Mode>,
    saved: Option<Saved>,
    /// Reason why the saved state is not used: the file is unusable, or the server does not have the tunnel.
    pub(super) lost: Option<String>,
    /// Problem with the mode in the mode file.
    pub(super) wrong: Option<StartError>,
    /// Reason why the mode file cannot be read.
    pub(super) unreadable: Option<String>,
}

/// Reason why a server cannot start in its mode.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    /// The mode file has no valid mode.
    #[error("--tunnel-mode-file {path}: {why}")]
    File {
        /// Path of the file.
        path: String,
        /// Problem with the file.
        why: String,
    },
    /// The state file is a folder or a device.
    #[error("--tunnel-state-file {}: not a regular file; name a file in a writable folder", _0.display())]
    StateFile(PathBuf),
    /// The flag or the file names a mode whose tunnel this server does not have.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
}

/// Mode at start.
#[derive(Debug, PartialEq, Eq)]
struct Decision {
    mode: Mode,
    set_by: SetBy,
    /// True if the mode comes from the saved state.
    from_state: bool,
}

impl Start {
    /// As [`read`](Self::read), on a thread of its own. Logs a warning if this takes longer than [`SLOW_READ`].
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub(crate) async fn load(settings: Settings) -> Result<Self, StartError> {
        let files = [&settings.state_file, &settings.mode_file];
        let files: Vec<_> = files
            .into_iter()
            .flatten()
            .map(|path| path.display().to_string())
            .collect();
        let files = files.join(" or ");
        let is_slow = || {
            warn!(
                "{}; this server starts once the files are read",
                too_slow(files, SLOW_READ)
            )
        };
        let (start, _) = read_in_background(move || Self::read(settings), is_slow).await;
        start
    }

    /// Reads the state file and the mode file. If the mode file cannot be read, the server starts without the
    /// file, and follows the file once it can be read. An unusable state file is ignored.
    ///
    /// # Errors
    /// Fails if the mode file has no valid mode and no state is saved, or if the state file is a folder or a device.
    pub(super) fn read(settings: Settings) -> Result<Self, StartError> {
        let state = settings.state_file.as_deref().map(StateFile::new);
        if let Some(path) = &settings.state_file
            && fs::metadata(path).is_ok_and(|found| !found.is_file())
        {
            return Err(StartError::StateFile(path.clone()));
        }
        let (saved, lost) = match state.as_ref().map(StateFile::load) {
            None => (None, None),
            Some(Ok(saved)) => (saved, None),
            Some(Err(why)) => {
                error!("{why}; starting without it");
                (None, Some(why))
            }
        };
        let mut start = Self {
            mode_file: None,
            state,
            file: None,
            saved,
            lost,
            wrong: None,
            unreadable: None,
            settings,
        };
        if let Some(path) = start.settings.mode_file.clone() {
            start.open(&path)?;
        }
        Ok(start)
    }

    fn open(&mut self, path: &Path) -> Result<(), StartError> {
        let limits = Limits {
            max_bytes: mode_file::MAX_BYTES,
            if_empty: mode_file::IF_EMPTY,
        };
        match FileFollower::open(path, limits) {
            Ok(follower) => {
                let wrong = |why| StartError::File {
                    path: path.display().to_string(),
                    why,
                };
                match (mode_file::parse(follower.text()), &self.saved) {
                    (Ok(mode), _) => self.file = Some(mode),
                    (Err(why), None) => return Err(wrong(why)),
                    (Err(why), Some(saved)) => {
                        self.file = saved.file;
                        self.wrong = Some(wrong(why));
                    }
                }
                self.mode_file = Some(follower);
            }
            Err(why) => {
                warn!("--tunnel-mode-file: {why}; the file has no effect until it can be read");
                self.unreadable = Some(why);
                self.mode_file = Some(FileFollower::unread(path, limits));
            }
        }
        Ok(())
    }

    /// Returns the machine to start with, and the origin of its mode. A mode that has changed since the state was saved is
    /// requested as in a running server: dials use the old tunnel until the new one has a healthy peer. A wrong mode file
    /// leaves the saved mode in force. A state file that is not used is renamed.
    ///
    /// # Errors
    /// Fails if the flag or the file names a mode whose tunnel this server does not have, or if the mode file is wrong and
    /// the saved mode cannot be used.
    pub(crate) fn machine(
        &mut self,
        view: &View,
        clocks: Clocks,
    ) -> Result<(Switch, SetBy), StartError> {
        let possible = self
            .saved
            .as_ref()
            .is_none_or(|saved| view.allows(saved.mode));
        if !possible && let Some(saved) = self.saved.take() {
            let why = format!("--tunnel-state-file: {}", Unavailable(saved.mode));
            error!("{why}; starting without it");
            self.lost = Some(why);
        }
        let flag = match (&self.saved, &self.wrong) {
            (Some(saved), Some(wrong)) => {
                error!("{wrong}; the saved mode stays in force");
                saved.flag
            }
            (Some(_), None) => self.settings.mode,
            (None, _) => self.wrong.take().map_or(Ok(self.settings.mode), Err)?,
        };
        let decision = decide(flag, self.file, self.saved.as_ref());
        let Decision { mode, set_by, .. } = decision;
        if !view.allows(mode) {
            return Err(Unavailable(mode).into());
        }
        if decision.from_state && self.unreadable.is_some() {
            // The file may be unchanged since the state was saved. The saved value is kept, so that an
            // unchanged file does not undo a switch once the file can be read.
            self.file = self.saved.as_ref().and_then(|saved| saved.file);
        }
        let drain = self.settings.drain;
        let mut switch = match &self.saved {
            Some(saved) => Switch::new(saved.mode, saved.phase(drain, clocks), drain),
            None => Switch::new(mode, Phase::Settled, drain),
        };
        if switch.mode() != mode {
            switch.request(mode, None, clocks.now, view)?;
        }
        info!(
            mode = mode.as_str(),
            set_by = set_by.name(),
            in_switch = switch.phase() != Phase::Settled,
            "tunnel mode"
        );
        if let (Some(why), Some(state)) = (&mut self.lost, &self.state) {
            let kept = state.set_aside();
            warn!("--tunnel-state-file: {kept}; confirm the mode with `culvert switch`");
            *why = format!("{why}; {kept}; confirm the mode with `culvert switch`");
        }
        Ok((switch, set_by))
    }
}

/// Chooses the mode. The saved state counts as long as the file, or without a file the flag, has the same
/// mode as when the state was saved.
fn decide(flag: Mode, file: Option<Mode>, saved: Option<&Saved>) -> Decision {
    let unchanged = saved.filter(|saved| match file {
        Some(mode) => saved.file == Some(mode),
        None => saved.flag == flag,
    });
    match (unchanged, file) {
        (Some(saved), _) => Decision {
            mode: saved.mode,
            set_by: saved.set_by,
            from_state: true,
        },
        (None, Some(mode)) => Decision {
            mode,
            set_by: SetBy::File,
            from_state: false,
        },
        (None, None) => Decision {
            mode: flag,
            set_by: SetBy::Flag,
            from_state: false,
        },
    }
}

impl SetBy {
    /// Returns the name for logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Flag => "flag",
            Self::File => "file",
            Self::Switch => "switch",
        }
    }
}

#[cfg(test)]
mod tests;
