//! The logging flags: klog's flag group, as in both stock programs, and `--log-format`.

use std::path::PathBuf;

use clap::Args;

use super::Problems;
use super::values::{ValueError, go_int};
use crate::telemetry::logging::{
    DEFAULT_MAX_MEGABYTES, LogConfig, LogFile, LogFormat, LogPlace, MEGABYTE, Severity,
};

/// The logging flags.
///
/// Four flags are accepted for compatibility and have no effect. `--one-output` and `--skip-log-headers`: the
/// program always writes every line once, to one file without header lines. `--vmodule` and
/// `--log-backtrace-at` name lines in the Go sources of the stock programs. If one of the latter two flags is
/// set, a warning at startup names the flag.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Logging")]
pub struct KlogFlags {
    /// Verbosity: up to 3 for normal operation, 4 adds debug lines, 5 adds a line per packet, 8 adds the
    /// libraries' own debug lines
    #[arg(short = 'v', long = "v", value_name = "N", default_value = "4", value_parser = level)]
    v: i32,

    /// Format of log lines: text (klog's format) or json (one object per line)
    #[arg(long, value_name = "FORMAT", default_value = "text", value_parser = log_format)]
    log_format: LogFormat,

    /// Log to stderr instead of files
    #[arg(long, default_value = "true")]
    logtostderr: bool,

    /// Log to stderr as well as files
    #[arg(long)]
    alsologtostderr: bool,

    /// With --alsologtostderr: lines of this severity and above go to stderr
    #[arg(long, value_name = "SEVERITY", default_value = "INFO", value_parser = severity)]
    alsologtostderrthreshold: Severity,

    /// When logging to files: lines of this severity and above also go to stderr (INFO, WARNING, ERROR, FATAL or 0 to 3)
    #[arg(long, value_name = "SEVERITY", default_value = "ERROR", value_parser = severity)]
    stderrthreshold: Severity,

    /// With --logtostderr: ignore --stderrthreshold and log everything
    #[arg(long, default_value = "true")]
    legacy_stderr_threshold_behavior: bool,

    /// Folder for log files, one new file per start; used with --logtostderr=false and without --log-file.
    /// Empty means the system's folder for temporary files
    #[arg(long, value_name = "DIR", default_value = "")]
    log_dir: String,

    /// Log file to append to; used with --logtostderr=false
    #[arg(long, value_name = "FILE", default_value = "")]
    log_file: String,

    /// Size in megabytes at which a log file is renamed to FILE.1 and a new file is started; 0 means
    /// unlimited
    #[arg(long, value_name = "MB", default_value_t = DEFAULT_MAX_MEGABYTES)]
    log_file_max_size: u64,

    /// Show the source file's folder in the header of text lines
    #[arg(long)]
    add_dir_header: bool,

    /// Omit time, severity and source in text lines
    #[arg(long)]
    skip_headers: bool,

    /// No effect: every line is always written once, to one file
    #[arg(long)]
    one_output: bool,

    /// No effect: log files never have header lines
    #[arg(long)]
    skip_log_headers: bool,

    /// No effect: it names files of the stock program; -v sets the verbosity of the whole program
    #[arg(long, value_name = "PATTERN=N,...", default_value = "", value_parser = vmodule)]
    vmodule: String,

    /// No effect: it names a line of the stock program
    #[arg(long, value_name = "FILE:N", default_value = "", value_parser = backtrace_at)]
    log_backtrace_at: String,
}

impl KlogFlags {
    /// Returns the logging configuration that the flags describe.
    pub fn log_config(&self) -> LogConfig {
        let stderr_threshold = if self.logtostderr {
            if self.legacy_stderr_threshold_behavior {
                Severity::Info
            } else {
                self.stderrthreshold
            }
        } else if self.alsologtostderr {
            self.stderrthreshold.min(self.alsologtostderrthreshold)
        } else {
            self.stderrthreshold
        };
        LogConfig {
            verbosity: self.v,
            format: self.log_format,
            file: (!self.logtostderr).then(|| self.log_file()),
            stderr_threshold,
            skip_headers: self.skip_headers,
            add_dir_header: self.add_dir_header,
        }
    }

    fn log_file(&self) -> LogFile {
        let place = if !self.log_file.is_empty() {
            LogPlace::File(PathBuf::from(&self.log_file))
        } else if !self.log_dir.is_empty() {
            LogPlace::Dir(PathBuf::from(&self.log_dir))
        } else {
            LogPlace::Dir(std::env::temp_dir())
        };
        let max_bytes = self.log_file_max_size.saturating_mul(MEGABYTE);
        LogFile {
            place,
            max_bytes: (max_bytes > 0).then_some(max_bytes),
        }
    }

    /// Records the flags that are set but have no effect.
    pub fn note_unneeded(&self, problems: &mut Problems) {
        let why = "it names files of the stock program; -v sets the verbosity of the whole program";
        problems.unneeded(!self.vmodule.is_empty(), "vmodule", why);
        let backtrace = !matches!(self.log_backtrace_at.as_str(), "" | ":0");
        let why = "it names a line of the stock program";
        problems.unneeded(backtrace, "log-backtrace-at", why);
    }
}

/// Parses a verbosity level. klog's level is 32 bits wide.
fn level(text: &str) -> Result<i32, ValueError> {
    let level = text
        .parse::<i64>()
        .map_err(|_| ValueError::Int(text.to_owned()))?;
    i32::try_from(level).map_err(|_| ValueError::IntRange(text.to_owned()))
}

fn log_format(text: &str) -> Result<LogFormat, &'static str> {
    match text {
        "text" => Ok(LogFormat::Text),
        "json" => Ok(LogFormat::Json),
        _ => Err("log format must be text or json"),
    }
}

/// Parses a severity: a name in any case, or a number. As in klog, a number out of range means the nearest
/// severity.
fn severity(text: &str) -> Result<Severity, ValueError> {
    match text.to_ascii_uppercase().as_str() {
        "INFO" => Ok(Severity::Info),
        "WARNING" => Ok(Severity::Warning),
        "ERROR" => Ok(Severity::Error),
        "FATAL" => Ok(Severity::Fatal),
        _ => Ok(match go_int(text)? {
            ..=0 => Severity::Info,
            1 => Severity::Warning,
            2 => Severity::Error,
            3.. => Severity::Fatal,
        }),
    }
}

/// Checks `pattern=N[,pattern=N]`; empty items are skipped.
fn vmodule(text: &str) -> Result<String, &'static str> {
    const SYNTAX: &str = "syntax error: expect comma-separated list of filename=N";
    for item in text.split(',').filter(|item| !item.is_empty()) {
        let (pattern, level) = item.split_once('=').ok_or(SYNTAX)?;
        if pattern.is_empty() || level.parse::<i32>().is_err() {
            return Err(SYNTAX);
        }
    }
    Ok(text.to_owned())
}

/// Checks `file.go:234`. The empty string and `:0` mean that the flag is not set; klog prints `:0` for an
/// unset flag.
fn backtrace_at(text: &str) -> Result<String, &'static str> {
    const SYNTAX: &str = "syntax error: expect file.go:234";
    if matches!(text, "" | ":0") {
        return Ok(text.to_owned());
    }
    let (file, line) = text.split_once(':').ok_or(SYNTAX)?;
    let line: u32 = line.parse().map_err(|_| SYNTAX)?;
    if file.is_empty() || line == 0 {
        return Err(SYNTAX);
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests;
