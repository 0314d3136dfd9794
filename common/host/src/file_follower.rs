//! Files that are watched for changes. Kubernetes replaces a mounted ConfigMap or Secret by changing a
//! symbolic link; editors write in place. Both changes are noticed. New content counts once two checks have read
//! the same content, so partly written files, and files from two states of a Secret, are not used. A file system over the
//! network may never answer, so programs read files with [`read_in_background`].

use std::fmt::Display;
use std::future::pending;
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, timeout, timeout_at};

/// Time of a read after which the operator is warned.
pub const SLOW_READ: Duration = Duration::from_secs(30);

/// Time limit of a read that a peer waits for. OpenVPN peers give up after 60 s by default.
pub const PROMPT_READ: Duration = Duration::from_secs(10);

/// Time after the last change during which a file is read even if its time stamp is unchanged: two changes
/// within one tick of the file system's clock have the same time stamp. For a time stamp in the future, the time since
/// the stamp was first seen counts.
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
    /// New contents seen once. Not yet in effect, because a file may be partly written.
    candidate: Option<Vec<Vec<u8>>>,
    /// States of the files at the last read.
    stamps: Option<Vec<Stamp>>,
    /// Time of the check that found `stamps` first.
    stamped: Instant,
    /// Reason why a file could not be read at the last check; `None` after a success.
    unreadable: Option<String>,
}

/// Reason why a file cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The operating system reports an error, or the text is not UTF-8.
    #[error("cannot read {}: {reason}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Reason.
        reason: io::Error,
    },
    /// The file is larger than the limit.
    #[error("{} has more than {max} bytes, the limit", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Limit, in bytes.
        max: u64,
    },
    /// The text file is empty.
    #[error("{} is empty; {advice}", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
        /// Remedy.
        advice: &'static str,
    },
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
    /// Time of the last change of the inode, in seconds and nanoseconds since 1970. Unlike `modified`, no program can set
    /// this time: `cp -p` and reproducible archives keep the time of modification.
    changed: (i64, i64),
    length: u64,
    /// Device and inode.
    file: (u64, u64),
}

/// Runs a function that reads files on a thread of its own, and calls `is_slow` if the function takes longer than
/// [`SLOW_READ`]. Returns the result once the function ends, and true if it was slow.
pub async fn read_in_background<T: Send + 'static>(
    read: impl FnOnce() -> T + Send + 'static,
    is_slow: impl FnOnce(),
) -> (T, bool) {
    let mut reading = spawn_blocking(read);
    let (ended, was_slow) = match timeout(SLOW_READ, &mut reading).await {
        Ok(ended) => (ended, false),
        Err(_) => {
            is_slow();
            (reading.await, true)
        }
    };
    match ended {
        Ok(value) => (value, was_slow),
        Err(error) if error.is_panic() => resume_unwind(error.into_panic()),
        // The runtime ends.
        Err(_) => pending().await,
    }
}

/// As [`read_in_background`], but returns `None` at the deadline. A hanging read keeps its thread, so each read first waits
/// until earlier reads with the same semaphore, which has one permit, have ended.
pub async fn read_until<T: Send + 'static>(
    deadline: Instant,
    turn: &Arc<Semaphore>,
    read: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let reading = async {
        let permit = turn.clone().acquire_owned().await.ok()?;
        let read = move || {
            let _permit = permit;
            read()
        };
        Some(read_in_background(read, || ()).await.0)
    };
    timeout_at(deadline, reading).await.ok().flatten()
}

/// Returns the reason and the remedy for files that are not read within `limit`.
pub fn too_slow(files: impl Display, limit: Duration) -> String {
    let limit = limit.as_secs();
    format!("reading {files} takes more than {limit} s; check the volume")
}

// === impl FileFollower ===

impl FileFollower {
    /// Reads a text file for the first time. A later change counts once two checks have read the same text.
    ///
    /// # Errors
    /// Fails if the file cannot be read; the error text names the file.
    pub fn open(path: &Path, limits: Limits) -> Result<Self, String> {
        let mut follower = Self::unread(path, limits);
        follower.read_now().map_err(|error| error.to_string())?;
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

    /// Follows several files that were not read yet as one unit, each of at most `max_bytes` bytes. The caller
    /// must check if changed files fit together.
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
            stamped: Instant::now(),
            unreadable: None,
        }
    }

    /// Returns the path of the first file.
    pub fn path(&self) -> &Path {
        self.paths.first().map_or(Path::new(""), PathBuf::as_path)
    }

    /// Returns the paths of all files.
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// Returns the contents in effect, one element per file; empty before the first read.
    pub fn contents(&self) -> &[Vec<u8>] {
        &self.contents
    }

    /// Returns true if the last check found nothing but the contents in effect.
    pub fn is_current(&self) -> bool {
        let is_read = self.contents.len() == self.paths.len();
        is_read && self.unreadable.is_none() && self.candidate.is_none()
    }

    /// Returns the text in effect.
    pub fn text(&self) -> &str {
        let text = self.contents.first().map(|text| str::from_utf8(text));
        text.and_then(Result::ok).unwrap_or_default()
    }

    /// Reads the files. Their contents are in effect at once.
    ///
    /// # Errors
    /// Fails if a file cannot be read.
    pub fn read_now(&mut self) -> Result<&[Vec<u8>], ReadError> {
        self.contents = self.read()?;
        Ok(&self.contents)
    }

    /// Checks the files.
    pub fn check(&mut self) -> Outcome {
        let stamps: Option<Vec<_>> = self.paths.iter().map(|path| Stamp::of(path)).collect();
        let calm = self.unreadable.is_none() && self.candidate.is_none();
        let seen = self.stamped.elapsed();
        let is_settled = |stamps: &Vec<Stamp>| stamps.iter().all(|stamp| stamp.is_settled(seen));
        if stamps != self.stamps {
            self.stamped = Instant::now();
        } else if calm && stamps.as_ref().is_some_and(is_settled) {
            return Outcome::Same;
        }
        self.stamps = stamps;
        let contents = match self.read() {
            Ok(contents) => contents,
            Err(error) => {
                let why = error.to_string();
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
        // A file written in place is first empty, and then incomplete.
        if self.candidate.as_ref() != Some(&contents) {
            self.candidate = Some(contents);
            return Outcome::Same;
        }
        self.candidate = None;
        self.contents = contents;
        Outcome::Changed
    }

    fn read(&self) -> Result<Vec<Vec<u8>>, ReadError> {
        self.paths.iter().map(|path| self.read_file(path)).collect()
    }

    fn read_file(&self, path: &Path) -> Result<Vec<u8>, ReadError> {
        let failed = |reason| ReadError::Io {
            path: path.to_owned(),
            reason,
        };
        let max = self.max_bytes;
        let file = std::fs::File::open(path).map_err(failed)?;
        let mut bytes = Vec::new();
        file.take(max + 1).read_to_end(&mut bytes).map_err(failed)?;
        if bytes.len() as u64 > max {
            let path = path.to_owned();
            return Err(ReadError::TooLarge { path, max });
        }
        let Some(advice) = self.if_empty else {
            return Ok(bytes);
        };
        let text = str::from_utf8(&bytes)
            .map_err(|_| failed(io::Error::other("the text is not UTF-8")))?;
        match text.trim().is_empty() {
            true => Err(ReadError::Empty {
                path: path.to_owned(),
                advice,
            }),
            false => Ok(bytes),
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
            changed: (file.ctime(), file.ctime_nsec()),
            length: file.len(),
            file: (file.dev(), file.ino()),
        })
    }

    /// Returns true if the next change of the file will change the stamp, which was first seen the time `seen` ago.
    fn is_settled(&self, seen: Duration) -> bool {
        let changed = u64::try_from(self.changed.0).unwrap_or(0);
        let changed = SystemTime::UNIX_EPOCH + Duration::from_secs(changed);
        let latest = self.modified.max(changed);
        latest.elapsed().unwrap_or(seen) > SETTLED
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
        for (text, reason) in [
            (" ", "is empty; write text"),
            ("123456789", "has more than 8 bytes"),
        ] {
            std::fs::write(&path, text).unwrap();
            let (why, is_new) = unreadable(follower.check());
            assert!(why.contains(reason) && is_new, "{why}");
            assert!(!unreadable(follower.check()).1);
        }
        std::fs::write(&path, [0xff]).unwrap();
        assert!(unreadable(follower.check()).0.contains("UTF-8"));
        assert_eq!(follower.text(), "b");
    }

    #[tokio::test(start_paused = true)]
    async fn change_that_keeps_the_length_and_a_time_in_the_future_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mode");
        let future = SystemTime::now() + Duration::from_secs(3600);
        let write = |text: &str| {
            std::fs::write(&path, text).unwrap();
            let file = std::fs::File::options().write(true).open(&path).unwrap();
            file.set_modified(future).unwrap();
        };
        write("a");
        let mut follower = FileFollower::open(&path, LIMITS).unwrap();
        assert_eq!(follower.check(), Outcome::Same);
        tokio::time::sleep(SETTLED * 2).await;
        // No further read is needed while the stamp stays.
        let stamp = Stamp::of(&path).unwrap();
        assert!(stamp.is_settled(SETTLED * 2) && !stamp.is_settled(SETTLED / 2));
        write("b");
        assert_eq!([(); 2].map(|()| follower.check())[1], Outcome::Changed);
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
        assert!(!follower.is_current());
        assert_eq!(follower.read_now().unwrap(), [vec![0xff], vec![]]);
        assert!(follower.is_current());
        assert_eq!(follower.check(), Outcome::Same);
        // Half of a change is never in effect.
        std::fs::write(key, "k").unwrap();
        assert_eq!(follower.check(), Outcome::Same);
        assert!(!follower.is_current());
        std::fs::write(cert, "c").unwrap();
        assert_eq!(follower.check(), Outcome::Same);
        assert_eq!(follower.check(), Outcome::Changed);
        assert_eq!(follower.contents(), [b"c".to_vec(), b"k".to_vec()]);
        std::fs::remove_file(key).unwrap();
        std::fs::write(cert, "d").unwrap();
        assert!(unreadable(follower.check()).1);
        assert!(!unreadable(follower.check()).1);
        std::fs::write(key, "k").unwrap();
        assert_eq!(follower.check(), Outcome::Same);
        assert_eq!(follower.check(), Outcome::Changed);
        assert_eq!(follower.check(), Outcome::Same);
        assert!(follower.is_current());
    }

    #[test]
    fn swapped_link_to_another_folder_is_a_change() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for (folder, text) in [("..1", "one"), ("..2", "two")] {
            std::fs::create_dir(at(folder)).unwrap();
            std::fs::write(at(folder).join("file"), text).unwrap();
        }
        let link = |to: &str| {
            std::os::unix::fs::symlink(to, at("..data_tmp")).unwrap();
            std::fs::rename(at("..data_tmp"), at("..data")).unwrap();
        };
        link("..1");
        std::os::unix::fs::symlink("..data/file", at("file")).unwrap();
        let mut follower = FileFollower::unit(vec![at("file")], 8);
        assert_eq!(follower.read_now().unwrap(), [b"one".to_vec()]);
        link("..2");
        assert_eq!(follower.check(), Outcome::Same);
        assert_eq!(follower.check(), Outcome::Changed);
        assert_eq!(follower.contents(), [b"two".to_vec()]);
    }
}
