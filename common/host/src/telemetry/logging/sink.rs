//! The destinations of finished lines: a file with a size limit, stderr, or both.
//!
//! Writers never report an error and never panic. The file's lock covers one write, or the rename when the
//! file has reached its limit.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use time::OffsetDateTime;
use time::macros::format_description;
use tracing::Metadata;
use tracing_subscriber::fmt::MakeWriter;

use super::{LogConfig, LogError, LogPlace, LostLine, Severity, lose_line};

/// Destinations of log lines.
pub(super) struct Sink {
    file: Option<Mutex<BoundedFile>>,
    stderr: Stderr,
    stderr_threshold: Severity,
}

/// The process's stderr, or a buffer that a test can read.
#[derive(Clone)]
pub(super) enum Stderr {
    /// File descriptor 2.
    Process,
    /// Buffer in memory.
    #[cfg_attr(not(test), expect(dead_code, reason = "only tests use the buffer"))]
    Buffer(Arc<Mutex<Vec<u8>>>),
}

impl Stderr {
    /// Writes all of `bytes` at once. `eprintln!` would panic where this function returns an error.
    fn write(&self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Process => io::stderr().lock().write_all(bytes),
            Self::Buffer(buffer) => {
                let mut buffer = buffer.lock();
                buffer.write_all(bytes)
            }
        }
    }
}

impl Sink {
    /// Opens the log file, if the configuration has one.
    pub(super) fn open(
        config: &LogConfig,
        program: &str,
        stderr: Stderr,
    ) -> Result<Self, LogError> {
        let file = match &config.file {
            None => None,
            Some(file) => {
                let path = match &file.place {
                    LogPlace::File(path) => path.clone(),
                    LogPlace::Dir(dir) => dir.join(file_name(program)),
                };
                let opened =
                    BoundedFile::open(&path, file.max_bytes).map_err(|source| LogError::Open {
                        path: path.display().to_string(),
                        source,
                    })?;
                Some(Mutex::new(opened))
            }
        };
        Ok(Self {
            file,
            stderr,
            stderr_threshold: config.stderr_threshold,
        })
    }

    pub(super) fn line(&self, severity: Severity, line: &[u8]) {
        let mut to_stderr = severity >= self.stderr_threshold;
        if let Some(file) = &self.file {
            let written = {
                let mut file = file.lock();
                file.write_line(line)
                    .map_err(|error| file.explain_once(&error))
            };
            if let Err(explanation) = written {
                lose_line(LostLine::WriteFailed);
                to_stderr = true;
                if let Some(text) = explanation {
                    self.to_stderr(text.as_bytes());
                }
            }
        }
        if to_stderr {
            self.to_stderr(line);
        }
    }

    fn to_stderr(&self, line: &[u8]) {
        if self.stderr.write(line).is_err() {
            lose_line(LostLine::WriteFailed);
        }
    }
}

/// Returns the file name `PROGRAM.log.YYYYMMDD-HHMMSS.PID`, in local time.
fn file_name(program: &str) -> String {
    let now = OffsetDateTime::now_local().unwrap_or_else(|_| OffsetDateTime::now_utc());
    let stamp = now
        .format(format_description!(
            "[year][month][day]-[hour][minute][second]"
        ))
        .unwrap_or_default();
    format!("{program}.log.{stamp}.{}", std::process::id())
}

// === impl MakeWriter ===

/// Writer for the line of one event.
pub(super) struct LineWriter<'a> {
    sink: &'a Sink,
    severity: Severity,
}

impl<'a> MakeWriter<'a> for Sink {
    type Writer = LineWriter<'a>;

    fn make_writer(&'a self) -> LineWriter<'a> {
        LineWriter {
            sink: self,
            severity: Severity::Info,
        }
    }

    fn make_writer_for(&'a self, meta: &Metadata<'_>) -> LineWriter<'a> {
        LineWriter {
            sink: self,
            severity: Severity::from(meta.level()),
        }
    }
}

impl Write for LineWriter<'_> {
    /// Writes one line. `tracing_subscriber`'s formatting layer passes each line whole, in one call.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.sink.line(self.severity, line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

// === impl BoundedFile ===

/// A file that is renamed when it reaches its size limit.
struct BoundedFile {
    file: File,
    path: PathBuf,
    size: u64,
    /// Size limit in bytes. `None` means no limit. Devices and pipes have no limit, because they do not grow.
    max_bytes: Option<u64>,
    /// Set if the last write stopped inside a line.
    torn: bool,
    /// True if the current failure was explained.
    explained: bool,
}

impl BoundedFile {
    fn open(path: &Path, max_bytes: Option<u64>) -> io::Result<Self> {
        let file = append_to(path)?;
        let meta = file.metadata()?;
        Ok(Self {
            file,
            path: path.to_owned(),
            size: meta.len(),
            max_bytes: max_bytes.filter(|_| meta.is_file()),
            torn: false,
            explained: false,
        })
    }

    fn write_line(&mut self, line: &[u8]) -> io::Result<()> {
        let len = u64::try_from(line.len()).unwrap_or(u64::MAX);
        let full = |max| self.size > 0 && self.size.saturating_add(len) > max;
        if self.max_bytes.is_some_and(full) {
            self.rotate()?;
        }
        if self.torn {
            self.file.write_all(b"\n")?;
            self.torn = false;
        }
        self.file
            .write_all(line)
            .inspect_err(|_| self.torn = true)?;
        self.size = self.size.saturating_add(len);
        self.explained = false;
        Ok(())
    }

    fn rotate(&mut self) -> io::Result<()> {
        let mut aside = self.path.clone().into_os_string();
        aside.push(".1");
        // The file may be missing: someone else moved it, or the last attempt to create the new file failed.
        match std::fs::rename(&self.path, aside) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        self.file = append_to(&self.path)?;
        self.size = 0;
        self.torn = false;
        Ok(())
    }

    /// Returns the message for the operator at the first failure after a success, and `None` at every later failure.
    fn explain_once(&mut self, error: &io::Error) -> Option<String> {
        if self.explained {
            return None;
        }
        self.explained = true;
        Some(format!(
            "cannot write the log file {}: {error}; affected lines go to stderr instead. Free space or make the file writable; \
             no restart is needed\n",
            self.path.display()
        ))
    }
}

/// Opens a file for appending. Only the user of the process can read a new file: log lines have names and
/// addresses of users and clusters.
fn append_to(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.create(true).append(true).mode(0o600).open(path)
}
