//! The collector of command-line problems, so that one start reports all errors and warnings.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::{GoDuration, HostPort, StringSlice};
use crate::admin::NO_PROFILES;
use crate::net::networks::Networks;

/// Errors, warnings, and flags without effect.
#[derive(Debug, Default)]
pub struct Problems {
    errors: Vec<String>,
    warnings: Vec<String>,
    unneeded: Vec<String>,
}

impl Problems {
    /// Creates a collector, with a warning if there are stray positional arguments.
    pub fn new(strays: &[String]) -> Self {
        let mut problems = Self::default();
        if !strays.is_empty() {
            problems.warn(format!(
                "ignored arguments that are not flags: {}",
                strays.join(" ")
            ));
        }
        problems
    }

    /// Adds an error. An error keeps the program from starting.
    pub fn error(&mut self, text: impl Into<String>) {
        self.errors.push(text.into());
    }

    /// Adds a warning for the operator.
    pub fn warn(&mut self, text: impl Into<String>) {
        self.warnings.push(text.into());
    }

    /// Adds an error unless `holds` is true.
    pub fn require(&mut self, holds: bool, text: impl FnOnce() -> String) {
        if !holds {
            self.error(text());
        }
    }

    /// Records a flag without effect, if `is_set` is true. `why` is the reason, or the part of the program that does
    /// the work of the flag. `flag` is the name without dashes.
    pub fn unneeded(&mut self, is_set: bool, flag: &str, why: &str) {
        if is_set {
            self.unneeded.push(format!("--{flag} ({why})"));
        }
    }

    /// Checks a file flag. Returns `None` if the flag is empty. Adds an error if the file does not exist.
    ///
    /// A file that exists but cannot be inspected is accepted, as in the stock programs; opening the file
    /// later fails with a better text.
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

    /// Checks a certificate file flag and its key file flag. Neither flag may be set without the other.
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

    /// Checks that no two TCP listeners have the same port, each listener with the name of its port flag. `None` stands for
    /// a listener that does not exist. Listeners on two hosts may share a port.
    pub fn distinct_ports(&mut self, listeners: &[(&str, Option<&HostPort>)]) {
        let listeners = listeners
            .iter()
            .filter_map(|(flag, at)| Some((flag, (*at)?)));
        let listeners: Vec<_> = listeners.collect();
        for (count, (flag, one)) in listeners.iter().enumerate() {
            for (other_flag, other) in listeners.iter().skip(count + 1) {
                // An empty host stands for all hosts, and 0 for a port that was refused.
                let is_shared =
                    one.host == other.host || one.host.is_empty() || other.host.is_empty();
                let port = one.port;
                self.require(port != other.port || port == 0 || !is_shared, || {
                    format!("--{flag} and --{other_flag} must differ, got {port} for both")
                });
            }
        }
    }

    /// Checks an interval flag. A value below `floor` is raised to `floor`, with a warning.
    pub fn at_least(&mut self, flag: &str, value: GoDuration, floor: Duration) -> Duration {
        let given = value.saturating();
        if given < floor {
            let raised = GoDuration::from(floor);
            self.warn(format!("--{flag}={value} is raised to {raised}"));
        }
        given.max(floor)
    }

    /// Checks a queue length flag. The value must be at least 1; a value above `max` is lowered to `max`,
    /// with a warning.
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

    /// Checks a flag whose value is a number of bytes; 0 is allowed.
    pub fn bytes(&mut self, flag: &str, value: i64) -> usize {
        self.require(value >= 0, || format!("{flag} must be >= 0, got {value}"));
        usize::try_from(value).unwrap_or(0)
    }

    /// Checks a flag whose value is a number of threads, from 0 to 1024.
    pub fn threads(&mut self, flag: &str, value: i64) -> usize {
        self.require((0..=1024).contains(&value), || {
            format!("{flag} must be 0 to 1024, got {value}")
        });
        usize::try_from(value).unwrap_or(0)
    }

    /// Checks a duration flag. The value must be above zero.
    pub fn above_zero(&mut self, flag: &str, value: GoDuration) -> Duration {
        self.require(value.nanos() > 0, || {
            format!("{flag} must be > 0, got {value}")
        });
        value.saturating()
    }

    /// Checks a duration flag. The value must not be below zero.
    pub fn not_negative(&mut self, flag: &str, value: GoDuration) -> Duration {
        self.require(value.nanos() >= 0, || {
            format!("{flag} must be >= 0, got {value}")
        });
        value.saturating()
    }

    /// Parses a flag whose value is a list of networks.
    pub fn networks(&mut self, flag: &str, uses: &[StringSlice]) -> Networks {
        let texts = StringSlice::concat(uses);
        let networks = Networks::parse(texts.iter().map(String::as_str));
        networks.unwrap_or_else(|error| {
            self.error(format!("--{flag}: {error}"));
            Networks::default()
        })
    }

    /// Checks the profiling flags. The programs have no profiles, and `/debug/pprof` answers 404 with the same
    /// advice.
    pub fn profiling(&mut self, profiling: bool, contention: bool) {
        self.require(profiling || !contention, || {
            "if --enable-contention-profiling is set, --enable-profiling must also be set"
                .to_owned()
        });
        let flags = match contention {
            true => "--enable-profiling and --enable-contention-profiling have",
            false => "--enable-profiling has",
        };
        if profiling {
            self.warn(format!("{flags} no effect: {NO_PROFILES}"));
        }
    }

    /// Checks a flag whose value is sent in an HTTP/2 header; only printable ASCII is allowed.
    pub fn header_value(&mut self, flag: &str, value: String) -> String {
        self.require(value.bytes().all(|b| matches!(b, b' '..=b'~')), || {
            format!("--{flag} must be printable ASCII, got {value:?}")
        });
        value
    }

    /// Returns the warnings, in order. The last warnings name the flags without effect.
    ///
    /// # Errors
    /// Returns the error texts, in order, if there are errors.
    pub fn finish(mut self) -> Result<Vec<String>, Vec<String>> {
        if !self.errors.is_empty() {
            return Err(self.errors);
        }
        if !self.unneeded.is_empty() {
            let flags = self.unneeded.join(", ");
            self.warn(format!("accepted, without effect here: {flags}"));
        }
        Ok(self.warnings)
    }
}
