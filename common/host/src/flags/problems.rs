//! Collects everything that is wrong with a command line, so that one start shows all of it, and what is merely odd.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::GoDuration;

/// What is wrong, what was changed, and what will have no effect.
#[derive(Debug, Default)]
pub struct Problems {
    errors: Vec<String>,
    warnings: Vec<String>,
    unacted: Vec<String>,
}

impl Problems {
    /// Begins with a warning about stray positionals, if there are any.
    pub fn new(strays: &[String]) -> Self {
        let mut problems = Self::default();
        if !strays.is_empty() {
            problems.warn(format!("ignored, no flags: {}", strays.join(" ")));
        }
        problems
    }

    /// Notes something that keeps the program from starting.
    pub fn error(&mut self, text: impl Into<String>) {
        self.errors.push(text.into());
    }

    /// Notes something that the operator should know.
    pub fn warn(&mut self, text: impl Into<String>) {
        self.warnings.push(text.into());
    }

    /// Notes an error unless `holds`.
    pub fn require(&mut self, holds: bool, text: impl FnOnce() -> String) {
        if !holds {
            self.error(text());
        }
    }

    /// Notes that a flag, without its dashes, was set to something that nothing acts upon.
    pub fn unacted(&mut self, is_set: bool, flag: &str) {
        if is_set {
            self.unacted.push(format!("--{flag}"));
        }
    }

    /// A file flag: `None` when empty, and an error when nothing is at the path.
    ///
    /// Only absence counts. A file that can not be looked at passes, as it does in the stock programs, and fails with a
    /// better text when it is opened.
    pub fn file(&mut self, what: &str, path: &str) -> Option<PathBuf> {
        if path.is_empty() {
            return None;
        }
        if let Err(error) = std::fs::metadata(path)
            && error.kind() == io::ErrorKind::NotFound
        {
            self.error(format!(
                "error checking {what} {path}, got stat {path}: no such file or directory"
            ));
        }
        Some(PathBuf::from(path))
    }

    /// A certificate flag and its key flag, both files: each needs the other.
    pub fn key_pair(&mut self, whose: &str, cert: &str, key: &str) -> Option<(PathBuf, PathBuf)> {
        let key_path = self.file(&format!("{whose} key"), key);
        self.require(key.is_empty() || !cert.is_empty(), || {
            format!("cannot have {whose} cert empty when {whose} key is set to {key:?}")
        });
        let cert_path = self.file(&format!("{whose} cert"), cert);
        self.require(cert.is_empty() || !key.is_empty(), || {
            format!("cannot have {whose} key empty when {whose} cert is set to {cert:?}")
        });
        cert_path.zip(key_path)
    }

    /// An interval flag; one below `floor` is raised to it, with a warning.
    pub fn at_least(&mut self, flag: &str, value: GoDuration, floor: Duration) -> Duration {
        let given = value.saturating();
        if given < floor {
            let raised = GoDuration::from(floor);
            self.warn(format!("--{flag}={value} is raised to {raised}"));
        }
        given.max(floor)
    }

    /// A queue length flag: at least 1, and lowered to `max` with a warning.
    pub fn channel_size(&mut self, flag: &str, what: &str, value: i64, max: usize) -> usize {
        self.require(value > 0, || {
            format!("{what} size {value} must be greater than 0")
        });
        let size = usize::try_from(value).unwrap_or(0);
        if size > max {
            self.warn(format!("--{flag}={value} is lowered to {max}"));
        }
        size.min(max)
    }

    /// A number of bytes, 0 included.
    pub fn bytes(&mut self, flag: &str, value: i64) -> usize {
        self.require(value >= 0, || format!("{flag} must be >= 0, got {value}"));
        usize::try_from(value).unwrap_or(0)
    }

    /// A number of threads.
    pub fn threads(&mut self, flag: &str, value: i64) -> usize {
        self.require((0..=1024).contains(&value), || {
            format!("{flag} must be 0 to 1024, got {value}")
        });
        usize::try_from(value).unwrap_or(0)
    }

    /// A time that can not be nothing.
    pub fn above_zero(&mut self, flag: &str, value: GoDuration) -> Duration {
        self.require(value.nanos() > 0, || {
            format!("{flag} must be > 0, got {value}")
        });
        value.saturating()
    }

    /// A flag that is sent in an HTTP/2 header, which holds only printable ASCII.
    pub fn header_value(&mut self, flag: &str, value: String) -> String {
        self.require(value.bytes().all(|b| matches!(b, b' '..=b'~')), || {
            format!("--{flag} must be printable ASCII, got {value:?}")
        });
        value
    }

    /// All errors in the order they were noted; without errors the warnings, one of which names the flags that have no
    /// effect.
    ///
    /// # Errors
    /// The texts of what was noted as an error, if anything was.
    pub fn finish(mut self) -> Result<Vec<String>, Vec<String>> {
        if !self.errors.is_empty() {
            return Err(self.errors);
        }
        if !self.unacted.is_empty() {
            let flags = self.unacted.join(", ");
            self.warn(format!("accepted, not yet acted upon: {flags}"));
        }
        Ok(self.warnings)
    }
}
