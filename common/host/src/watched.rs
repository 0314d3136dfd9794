//! A small file that is followed as it changes. Kubernetes replaces a mounted ConfigMap by turning
//! a link, editors write in place: both are noticed, and half of a text is never taken.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// How long after its last change a file is read whatever its time stamp says: two changes within
/// one tick of the file system's clock have the same.
const SETTLED: Duration = Duration::from_secs(2);

/// What a file may be.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The largest, in bytes.
    pub max_bytes: u64,
    /// Advice for an empty one, which is more likely about to be written than meant.
    pub if_empty: &'static str,
}

/// A file that is followed.
pub struct Watched {
    path: PathBuf,
    limits: Limits,
    /// What was read last, good or bad.
    text: String,
    /// What was read once and does not count yet: it may be half of what is being written.
    candidate: Option<String>,
    /// The file that was read last, as the file system has it.
    stamp: Option<Stamp>,
    /// Why the file could not be read at the last look.
    unreadable: Option<String>,
}

/// What one look has shown.
#[derive(Debug, PartialEq, Eq)]
pub enum Look {
    /// Nothing that counts already.
    Same,
    /// Another text, see [`Watched::text`].
    Changed,
    /// The file can not be read.
    Unreadable {
        /// Why.
        why: String,
        /// It was not so, or not for this reason, at the last look.
        is_new: bool,
    },
}

/// What tells one state of a file from another.
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
    /// When it can not be read; the text names it.
    pub fn open(path: &Path, limits: Limits) -> Result<Self, String> {
        let text = read(path, limits)?;
        Ok(Self {
            text,
            ..Self::unread(path, limits)
        })
    }

    /// A file that was not read yet; any text is a change.
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

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it says.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Looks at the file; a change counts once it was seen twice.
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
        // A file that is written in place is empty first, and then in part.
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
    /// Through links: Kubernetes replaces a ConfigMap by turning one.
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
