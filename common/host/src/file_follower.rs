//! Files that are watched for changes. Kubernetes replaces a mounted ConfigMap or Secret by changing a
//! symbolic link; editors write in place. Both changes are noticed, and a partly written text is never used.

use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Time after the last change during which a file is read even if its time stamp is unchanged: two changes
/// within one tick of the file system's clock have the same time stamp.
const SETTLED: Duration = Duration::from_secs(2);

/// Limits of a watched text file.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Largest size, in bytes.
    pub max_bytes: u64,
    /// Advice for an empty file. An empty file is an error, because more text is probably about to follow.
    pub if_empty: &'static str,
}

/// One text file, or several files as one unit, watched for changes.
pub struct FileFollower {
    paths: Vec<PathBuf>,
    max_bytes: u64,
    /// Advice for an empty text file; `None` for files of any bytes.
    if_empty: Option<&'static str>,
    /// Contents in effect, valid or not; one element per file, none before the first read.
    contents: Vec<Vec<u8>>,
    /// New text seen once. Not yet in effect, because the file may be partly written.
    candidate: Option<Vec<Vec<u8>>>,
    /// States of the files at the last read.
    stamps: Option<Vec<Stamp>>,
    /// Reason why a file could not be read at the last check; `None` after a success.
    unreadable: Option<String>,
}

/// Result of one check.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// No change, or no change in effect yet.
    Same,
    /// The contents have changed.
    Changed,
    /// A file cannot be read.
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

// === impl FileFollower ===

impl FileFollower {
    /// Reads a text file for the first time. A later change counts once two checks have read the same text.
    ///
    /// # Errors
    /// Fails if the file cannot be read; the error text names the file.
    pub fn open(path: &Path, limits: Limits) -> Result<Self, String> {
        let mut follower = Self::unread(path, limits);
        follower.contents = follower.read()?;
        Ok(follower)
    }

    /// Follows a text file that was not read yet. Any text counts as a change.
    pub fn unread(path: &Path, limits: Limits) -> Self {
        Self::new(
            vec![path.to_owned()],
            limits.max_bytes,
            Some(limits.if_empty),
        )
    }

    /// Follows several files that were not read yet as one unit, each of at most `max_bytes` bytes. A change
    /// of any file counts at once, so the caller must validate the files, and call [`retry`](Self::retry) if
    /// the files do not fit together.
    pub fn unit(paths: Vec<PathBuf>, max_bytes: u64) -> Self {
        Self::new(paths, max_bytes, None)
    }

    fn new(paths: Vec<PathBuf>, max_bytes: u64, if_empty: Option<&'static str>) -> Self {
        Self {
            paths,
            max_bytes,
            if_empty,
            contents: Vec::new(),
            candidate: None,
            stamps: None,
            unreadable: None,
        }
    }

    /// Returns the path of the first file.
    pub fn path(&self) -> &Path {
        self.paths.first().map_or(Path::new(""), PathBuf::as_path)
    }

    /// Returns the text in effect.
    pub fn text(&self) -> &str {
        let text = self.contents.first().map(|text| str::from_utf8(text));
        text.and_then(Result::ok).unwrap_or_default()
    }

    /// Checks the files.
    pub fn check(&mut self) -> Outcome {
        let stamps: Option<Vec<_>> = self.paths.iter().map(|path| Stamp::of(path)).collect();
        let calm = self.unreadable.is_none() && self.candidate.is_none();
        let is_settled = |stamps: &Vec<Stamp>| stamps.iter().all(Stamp::is_settled);
        if calm && stamps == self.stamps && stamps.as_ref().is_some_and(is_settled) {
            return Outcome::Same;
        }
        self.stamps = stamps;
        let contents = match self.read() {
            Ok(contents) => contents,
            Err(why) => {
                let before = self.unreadable.replace(why.clone());
                let is_new = before.as_ref() != Some(&why);
                return Outcome::Unreadable { why, is_new };
            }
        };
        self.unreadable = None;
        if contents == self.contents {
            self.candidate = None;
            return Outcome::Same;
        }
        // A text file written in place is first empty, and then incomplete.
        if self.if_empty.is_some() && self.candidate.as_ref() != Some(&contents) {
            self.candidate = Some(contents);
            return Outcome::Same;
        }
        self.candidate = None;
        self.contents = contents;
        Outcome::Changed
    }

    /// Makes the next check report a change, whatever the files contain.
    pub fn retry(&mut self) {
        self.contents.clear();
        self.stamps = None;
    }

    fn read(&self) -> Result<Vec<Vec<u8>>, String> {
        self.paths.iter().map(|path| self.read_file(path)).collect()
    }

    fn read_file(&self, path: &Path) -> Result<Vec<u8>, String> {
        let shown = path.display();
        let fail = |error: std::io::Error| format!("cannot read {shown}: {error}");
        let file = std::fs::File::open(path).map_err(fail)?;
        let (length, max) = (file.metadata().map_err(fail)?.len(), self.max_bytes);
        if length > max {
            return Err(format!(
                "{shown} has {length} bytes; at most {max} are read"
            ));
        }
        let mut file = file.take(max);
        let Some(if_empty) = self.if_empty else {
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes).map_err(fail)?;
            return Ok(bytes);
        };
        let mut text = String::new();
        file.read_to_string(&mut text).map_err(fail)?;
        match text.trim().is_empty() {
            true => Err(format!("{shown} is empty; {if_empty}")),
            false => Ok(text.into_bytes()),
        }
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const LIMITS: Limits = Limits {
        max_bytes: 8,
        if_empty: "write text",
    };

    fn unreadable(outcome: Outcome) -> (String, bool) {
        match outcome {
            Outcome::Unreadable { why, is_new } => (why, is_new),
            outcome => panic!("{outcome:?}"),
        }
    }

    #[test]
    fn text_changes_after_two_equal_checks_and_failures_keep_the_last_text() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mode");
        std::fs::write(&path, "a").unwrap();
        let mut follower = FileFollower::open(&path, LIMITS).unwrap();
        assert_eq!((follower.check(), follower.text()), (Outcome::Same, "a"));
        std::fs::write(&path, "b").unwrap();
        assert_eq!((follower.check(), follower.text()), (Outcome::Same, "a"));
        assert_eq!((follower.check(), follower.text()), (Outcome::Changed, "b"));
        for (text, reason) in [(" ", "is empty; write text"), ("123456789", "has 9 bytes")] {
            std::fs::write(&path, text).unwrap();
            let (why, is_new) = unreadable(follower.check());
            assert!(why.contains(reason) && is_new, "{why}");
            assert!(!unreadable(follower.check()).1);
        }
        std::fs::write(&path, [0xff]).unwrap();
        assert!(unreadable(follower.check()).0.contains("UTF-8"));
        assert_eq!(follower.text(), "b");
    }

    #[test]
    fn unit_changes_with_any_file_and_only_while_all_files_are_readable() {
        let dir = tempfile::tempdir().unwrap();
        let paths = [dir.path().join("cert"), dir.path().join("key")];
        let [cert, key] = &paths;
        std::fs::write(cert, [0xff]).unwrap();
        std::fs::write(key, "").unwrap();
        let mut follower = FileFollower::unit(paths.to_vec(), 8);
        assert_eq!(follower.check(), Outcome::Changed);
        assert_eq!(follower.check(), Outcome::Same);
        std::fs::write(key, "k").unwrap();
        assert_eq!(follower.check(), Outcome::Changed);
        std::fs::remove_file(key).unwrap();
        std::fs::write(cert, "c").unwrap();
        assert!(unreadable(follower.check()).1);
        assert!(!unreadable(follower.check()).1);
        std::fs::write(key, "k").unwrap();
        assert_eq!(follower.check(), Outcome::Changed);
        assert_eq!(follower.check(), Outcome::Same);
        follower.retry();
        assert_eq!(follower.check(), Outcome::Changed);
    }
}
