//! Log lines in klog's format, so that tools for the stock programs' logs keep working.
//!
//! ```text
//! I1121 00:05:08.048482    8894 clientset.rs:120] "agent connected" server="7f3a" attempt=2
//! ```
//!
//! A line has the severity letter, month and day, local time (UTC if the system does not know its time zone),
//! process id, source file and line, and the quoted message. The fields follow: first the event's fields,
//! then the fields of the enclosing spans, outermost span first. `--log-format=json` writes one JSON object
//! per line instead.
//!
//! | `-v` | our own lines | other crates' lines |
//! |---|---|---|
//! | up to 3 | INFO and above | WARN and above |
//! | 4 (default) | DEBUG and above | WARN and above |
//! | 5 to 7 | TRACE and above: a line per packet | WARN and above |
//! | 8 and up | TRACE and above | TRACE and above |
//!
//! Problems with the log never end or stall the program. A line that cannot be written to the file goes to
//! stderr. A message on stderr explains the first such failure, and [`lost_lines`] counts all of them. A thread
//! writes the lines. If the log stalls, at most 4 MiB of lines wait, of these 1 MiB only warnings and errors, and further
//! lines are dropped and counted.
//!
//! Of warnings and errors with one reason, 20 lines appear in 10 s, and of INFO lines from one place in the code 200. A line
//! then gives the number of further lines.

mod format;
mod limit;
mod queue;
mod sink;
#[cfg(test)]
mod tests;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use thiserror::Error;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::{FilterExt as _, Targets};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

use format::{KlogEvent, KlogFields};
use limit::{Limited, RateLimit};
use sink::Sink;

pub(super) use queue::WRITER_THREAD;
pub use queue::flush;

/// Prefix of our own log targets. The names of all crates in this workspace begin with it.
const OWN_TARGET: &str = "culvert";

/// Log target of the Kubernetes watch library. The library warns about a refused watch at every retry; our
/// own code logs the failure once.
const WATCHES_TARGET: &str = "kube_runtime";

/// Log target of the Kubernetes client, which logs whole answers that cannot be decoded, as warnings. The answer to a token
/// review contains the token. The library logs an error at every request that fails; our own code logs the failure once.
const CLIENT_TARGET: &str = "kube_client::client";

/// Log target of the UDP library, whose warnings are lines about single datagrams that were not sent. After each new socket,
/// the library warns again. Our own code logs what follows: a link that ends, or that cannot be made.
const UDP_TARGET: &str = "quinn_udp";

/// Verbosity from which other crates' lines are not limited to warnings.
const OTHERS_FROM: i32 = 8;

/// klog's default for `--log-file-max-size`, in megabytes.
pub const DEFAULT_MAX_MEGABYTES: u64 = 1800;

/// Number of bytes in one megabyte of `--log-file-max-size`; klog's megabyte is binary.
pub const MEGABYTE: u64 = 1024 * 1024;

/// Logging configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogConfig {
    /// klog's `-v`. Default 4; see the table at the top of the module.
    pub verbosity: i32,
    /// Text or JSON. Default text.
    pub format: LogFormat,
    /// File for all lines. `None`, the default, means only stderr.
    pub file: Option<LogFile>,
    /// Minimum severity of lines on stderr. Default [`Severity::Info`]: all lines.
    pub stderr_threshold: Severity,
    /// Set to omit everything up to and including `]` in text lines. Default false.
    pub skip_headers: bool,
    /// Set to show the folder of a source file. Default false.
    pub add_dir_header: bool,
}

/// Format of log lines (`--log-format`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// klog's text format.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// klog's severities. No line is logged as fatal; a threshold of fatal means never.
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

/// A log file and its size limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogFile {
    /// Location of the file.
    pub place: LogPlace,
    /// Size limit in bytes. At the limit, the file is renamed to the same name with `.1` appended, which
    /// replaces an older `.1` file, and a new file is started. The logs therefore use at most twice this size
    /// on disk. `None` means no limit. Default 1800 MB.
    pub max_bytes: Option<u64>,
}

/// Location of a log file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogPlace {
    /// This file. New lines are appended.
    File(PathBuf),
    /// A new file `PROGRAM.log.YYYYMMDD-HHMMSS.PID` in this folder.
    Dir(PathBuf),
}

/// Error while setting up logging.
#[derive(Debug, Error)]
pub enum LogError {
    /// The log file could not be opened.
    #[error(
        "cannot open the log file {path}: {source}; make its folder exist and writable, or log to stderr with \
         --logtostderr=true"
    )]
    Open {
        /// Path of the file.
        path: String,
        /// Error from the operating system.
        source: io::Error,
    },
    /// The thread that writes the log could not be started.
    #[error("cannot start the thread that writes the log: {0}")]
    Thread(#[source] io::Error),
    /// The process already has a global subscriber.
    #[error("logging is already set up in this process")]
    AlreadySet,
}

/// Sets up logging for the whole process.
///
/// # Errors
/// Returns a [`LogError`] if the log file cannot be opened or logging is already set up.
pub fn init(config: &LogConfig, program: &str) -> Result<(), LogError> {
    let sink = Sink::open(config, program, sink::Stderr::Process)?;
    let limit = Arc::<RateLimit>::default();
    let writer = queue::start(sink, limit.clone())?;
    tracing::subscriber::set_global_default(subscriber(config, writer, limit))
        .map_err(|_| LogError::AlreadySet)
}

crate::label_values! {
    /// Reason for a line that is missing from the log.
    pub enum LostLine("reason") {
        /// The log accepts lines too slowly, and the queue was full.
        QueueFull = "queue_full",
        /// The line exceeded the limit of its reason or place.
        RateLimit = "rate_limit",
        /// The line could not be written to the log file or to stderr. A line that cannot be written to the file goes to
        /// stderr.
        WriteFailed = "write_failed",
    }
}

/// Lines of this process that are missing from the log, in the order of [`LostLine`].
static LOST: [AtomicU64; LostLine::ALL.len()] = [const { AtomicU64::new(0) }; LostLine::ALL.len()];

/// Returns the number of lines of this process that are missing from the log for a reason.
pub fn lost_lines(reason: LostLine) -> u64 {
    let count = LOST.get(reason as usize);
    count.map_or(0, |count| count.load(Ordering::Relaxed))
}

fn lose_line(reason: LostLine) {
    if let Some(count) = LOST.get(reason as usize) {
        count.fetch_add(1, Ordering::Relaxed);
    }
}

fn subscriber<W>(
    config: &LogConfig,
    writer: W,
    limit: Arc<RateLimit>,
) -> impl tracing::Subscriber + Send + Sync + use<W>
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let own = match config.verbosity {
        ..=3 => LevelFilter::INFO,
        4 => LevelFilter::DEBUG,
        5.. => LevelFilter::TRACE,
    };
    let (others, repeated, client) = if config.verbosity >= OTHERS_FROM {
        (own, own, LevelFilter::ERROR)
    } else {
        (LevelFilter::WARN, LevelFilter::ERROR, LevelFilter::OFF)
    };
    let filter = Targets::new()
        .with_default(others)
        .with_target(WATCHES_TARGET, repeated)
        .with_target(CLIENT_TARGET, client)
        .with_target(UDP_TARGET, repeated)
        .with_target(OWN_TARGET, own);
    let lines = lines(config, writer).with_filter(filter.and(Limited(limit)));
    tracing_subscriber::registry().with(lines)
}

/// Creates the layer that writes lines in the configured format.
fn lines<S, W>(config: &LogConfig, writer: W) -> Box<dyn Layer<S> + Send + Sync>
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
    S: tracing::Subscriber + for<'a> LookupSpan<'a>,
{
    let layer = tracing_subscriber::fmt::layer()
        .with_writer(writer)
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
    /// Returns klog's defaults with the stock programs' `-v=4`: all lines as text on stderr.
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
    /// Returns every option in effect as `name=value`.
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
    /// Returns the value of `--log-format` for this format.
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
