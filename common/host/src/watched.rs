//! A small file, followed for changes. Kubernetes replaces a mounted ConfigMap by changing a symbolic link;
//! editors write in place. Both changes are noticed, and a partly written text is never used.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Time after the last change during which a file is read even if its time stamp is unchanged: two changes
/// within one tick of the file system's clock have the same time stamp.
const SETTLED: Duration = Duration::from_secs(2);

/// Limits of a watched file.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Largest size, in bytes.
    pub max_bytes: u64,
    /// Advice for an empty file. An empty file is an error, because more text is probably about to follow.
    pub if_empty: &'static str,
}

/// A file followed for changes.
pub struct Watched {
    path: PathBuf,
    limits: Limits,
    /// Text in effect, valid or not.
    text: String,
    /// New text seen once. Not yet in effect, because the file may be partly written.
    candidate: Option<String>,
    /// State of the file at the last read.
    stamp: Option<Stamp>,
    /// Reason why the file could not be read at the last check; `None` after a success.
    unreadable: Option<String>,
}

/// Result of one check.
#[derive(Debug, PartialEq, Eq)]
pub enum Look {
    /// No change, or no change in effect yet.
    Same,
    /// The text has changed, see [`Watched::text`].
    Changed,
    /// The file cannot be read.
    Unreadable {
        /// Reason.
        why: String,
        /// True if the previous check succeeded or failed for another reason.
        is_new: bool,
    },
}

/// Properties that distinguish two states of a file.
#[derive(PartialEq, Eq)]
struct Stamp {
    modified: SystemTime,
    length: u64,
    inode: u64,
}

// === impl Watched ===

impl Watched {
    /// Reads the file for the first time.
    ///
    /// # Errors
    /// If the file cannot be read; the text names the file.
    pub fn open(path: &Path, limits: Limits) -> Result<Self, String> {
        let text = read(path, limits)?;
        Ok(Self {
            text,
            ..Self::unread(path, limits)
        })
    }

    /// Creates a watch on a file that was not read yet. Any text counts as a change.
    pub fn unread(path: &Path, limits: Limits) -> Self {
        Self {
            path: path.to_owned(),
            limits,
            text: String::new(),
            candidate: None,
            stamp: None,
            unreadable: None,
        }
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the text in effect.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Checks the file. A change counts once two checks have seen the same text.
    pub fn look(&mut self) -> Look {
        let stamp = Stamp::of(&self.path);
        let calm = self.unreadable.is_none() && self.candidate.is_none();
        if calm && stamp == self.stamp && stamp.as_ref().is_some_and(Stamp::is_settled) {
            return Look::Same;
        }
        self.stamp = stamp;
        let text = match read(&self.path, self.limits) {
            Ok(text) => text,
            Err(why) => {
                let before = self.unreadable.replace(why.clone());
                let is_new = before.as_ref() != Some(&why);
                return Look::Unreadable { why, is_new };
            }
        };
        self.unreadable = None;
        if text == self.text {
            self.candidate = None;
            return Look::Same;
        }
        // A file written in place is first empty, and then incomplete.
        if self.candidate.as_ref() != Some(&text) {
            self.candidate = Some(text);
            return Look::Same;
        }
        self.candidate = None;
        self.text = text;
        Look::Changed
    }
}

// === impl Stamp ===

impl Stamp {
    /// Reads the state of a file through symbolic links: Kubernetes replaces a ConfigMap by changing a
    /// link.
    fn of(path: &Path) -> Option<Self> {
        let file = std::fs::metadata(path).ok()?;
        Some(Self {
            modified: file.modified().ok()?,
            length: file.len(),
            inode: file.ino(),
        })
    }

    fn is_settled(&self) -> bool {
        self.modified.elapsed().is_ok_and(|age| age > SETTLED)
    }
}

fn read(path: &Path, limits: Limits) -> Result<String, String> {
    let fail = |error: std::io::Error| format!("cannot read {}: {error}", path.display());
    let length = std::fs::metadata(path).map_err(fail)?.len();
    let max = limits.max_bytes;
    if length > max {
        return Err(format!(
            "{} has {length} bytes; at most {max} are read",
            path.display()
        ));
    }
    let text = std::fs::read_to_string(path).map_err(fail)?;
    if text.trim().is_empty() {
        return Err(format!("{} is empty; {}", path.display(), limits.if_empty));
    }
    Ok(text)
}
