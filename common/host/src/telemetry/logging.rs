//! Log lines in klog's form, so that what reads the stock programs' logs goes on reading them.
//!
//! ```text
//! I1121 00:05:08.048482    8894 clientset.rs:120] "agent connected" server="7f3a" attempt=2
//! ```
//!
//! Severity letter, month and day, local time (UTC when the system does not know its zone), process id, source file and
//! line, the quoted message, then fields: those of the event first, those of the spans around it after them, outermost
//! first. `--log-format=json` writes one object per line instead.
//!
//! | `-v` | our own lines | other crates' lines |
//! |---|---|---|
//! | up to 3 | INFO and above | WARN and above |
//! | 4 (default) | DEBUG and above | WARN and above |
//! | 5 to 7 | TRACE and above: a line per packet | WARN and above |
//! | 8 and up | TRACE and above | TRACE and above |
//!
//! Logging never ends or stalls the program because of a log file. A line that a file does not take goes to stderr, the
//! first such failure is explained there, and [`lost_lines`] counts them.

mod format;
mod sink;
#[cfg(test)]
mod tests;

use std::io;
use std::path::PathBuf;

use thiserror::Error;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

use format::{KlogEvent, KlogFields};
use sink::Sink;

/// Prefix of the targets that count as our own: all of this workspace's crates begin with it.
const OWN_TARGET: &str = "culvert";

/// Warns of a refused watch at every new try. Whoever watches says so once.
const WATCHES_TARGET: &str = "kube_runtime";

/// From this verbosity on, other crates' lines are not held back to warnings.
const OTHERS_FROM: i32 = 8;

/// klog's default for `--log-file-max-size`: 1800 MB.
pub const DEFAULT_MAX_MEGABYTES: u64 = 1800;

/// Bytes in the unit of `--log-file-max-size`; klog's megabyte is the binary one.
pub const MEGABYTE: u64 = 1024 * 1024;

/// Where log lines go and how many of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogConfig {
    /// klog's `-v`. Default 4; see the module's table.
    pub verbosity: i32,
    /// Text or JSON. Default text.
    pub format: LogFormat,
    /// The file that all lines go to. `None`, the default, leaves only stderr.
    pub file: Option<LogFile>,
    /// Lines of this severity and above go to stderr. Default [`Severity::Info`]: all of them.
    pub stderr_threshold: Severity,
    /// Leave out everything up to and including `]` of text lines. Default false.
    pub skip_headers: bool,
    /// Show a source file with its folder. Default false.
    pub add_dir_header: bool,
}

/// The form of a line (`--log-format`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// klog's text.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// klog's severities. Nothing is logged as fatal; as a threshold it means never.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// `INFO` or 0.
    #[default]
    Info,
    /// `WARNING` or 1.
    Warning,
    /// `ERROR` or 2.
    Error,
    /// `FATAL` or 3.
    Fatal,
}

/// A log file and its bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogFile {
    /// Which file.
    pub place: LogPlace,
    /// Bytes after which the file is moved to the same name with `.1` appended, over the one moved there before, and
    /// begun anew: twice this is the most disk that logs take. `None` never moves it. Default 1800 MB.
    pub max_bytes: Option<u64>,
}

/// Which file lines go to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogPlace {
    /// This file, appended to.
    File(PathBuf),
    /// A new file `PROGRAM.log.YYYYMMDD-HHMMSS.PID` in this folder.
    Dir(PathBuf),
}

/// Why logging could not be set up.
#[derive(Debug, Error)]
pub enum LogError {
    /// The log file could not be opened.
    #[error(
        "cannot open the log file {path}: {source}; make its folder exist and writable, or log to stderr with \
         --logtostderr=true"
    )]
    Open {
        /// The file.
        path: String,
        /// What the system said.
        source: io::Error,
    },
    /// Something else in the process has set a global subscriber before.
    #[error("logging is already set up in this process")]
    AlreadySet,
}

/// Sets up logging for the whole process.
///
/// # Errors
/// [`LogError`] if the log file can not be opened or logging is set up already.
pub fn init(config: &LogConfig, program: &str) -> Result<(), LogError> {
    let sink = Sink::open(config, program, sink::Stderr::Process)?;
    tracing::subscriber::set_global_default(subscriber(config, sink))
        .map_err(|_| LogError::AlreadySet)
}

/// Lines of this process that did not reach a place they should have gone to: their file (they are on stderr then) or
/// stderr itself.
pub fn lost_lines() -> u64 {
    sink::lost_lines()
}

fn subscriber(config: &LogConfig, sink: Sink) -> impl tracing::Subscriber + Send + Sync + use<> {
    let own = match config.verbosity {
        ..=3 => LevelFilter::INFO,
        4 => LevelFilter::DEBUG,
        5.. => LevelFilter::TRACE,
    };
    let (others, watches) = if config.verbosity >= OTHERS_FROM {
        (own, own)
    } else {
        (LevelFilter::WARN, LevelFilter::ERROR)
    };
    let filter = Targets::new()
        .with_default(others)
        .with_target(WATCHES_TARGET, watches)
        .with_target(OWN_TARGET, own);
    tracing_subscriber::registry().with(lines(config, sink).with_filter(filter))
}

/// The layer that writes lines in the configured form.
fn lines<S>(config: &LogConfig, sink: Sink) -> Box<dyn Layer<S> + Send + Sync>
where
    S: tracing::Subscriber + for<'a> LookupSpan<'a>,
{
    let layer = tracing_subscriber::fmt::layer()
        .with_writer(sink)
        .log_internal_errors(false);
    match config.format {
        LogFormat::Text => layer
            .fmt_fields(KlogFields)
            .event_format(KlogEvent {
                skip_header: config.skip_headers,
                with_folder: config.add_dir_header,
            })
            .boxed(),
        LogFormat::Json => layer
            .json()
            .flatten_event(true)
            .with_current_span(false)
            .with_file(true)
            .with_line_number(true)
            .boxed(),
    }
}

// === impl LogConfig ===

impl Default for LogConfig {
    /// klog's defaults at the stock programs' `-v=4`: everything as text on stderr.
    fn default() -> Self {
        Self {
            verbosity: 4,
            format: LogFormat::Text,
            file: None,
            stderr_threshold: Severity::Info,
            skip_headers: false,
            add_dir_header: false,
        }
    }
}

impl LogConfig {
    /// Every option in effect as `name=value`.
    pub fn describe(&self) -> Vec<String> {
        let Self {
            verbosity,
            format,
            file,
            stderr_threshold,
            skip_headers,
            add_dir_header,
        } = self;
        let mut lines = vec![
            format!("v={verbosity}"),
            format!("log-format={}", format.name()),
            format!("logtostderr={}", file.is_none()),
            format!("stderrthreshold={stderr_threshold:?}"),
            format!("skip-headers={skip_headers}"),
            format!("add-dir-header={add_dir_header}"),
        ];
        if let Some(LogFile { place, max_bytes }) = file {
            lines.push(match place {
                LogPlace::File(path) => format!("log-file={}", path.display()),
                LogPlace::Dir(path) => format!("log-dir={}", path.display()),
            });
            let megabytes = max_bytes.unwrap_or(0) / MEGABYTE;
            lines.push(format!("log-file-max-size={megabytes}"));
        }
        lines
    }
}

impl LogFormat {
    /// The spelling of `--log-format`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Json => "json",
        }
    }
}

impl From<&tracing::Level> for Severity {
    fn from(level: &tracing::Level) -> Self {
        match *level {
            tracing::Level::ERROR => Self::Error,
            tracing::Level::WARN => Self::Warning,
            _ => Self::Info,
        }
    }
}
