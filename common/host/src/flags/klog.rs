//! klog's flag group, as both stock programs have it, and `--log-format`.

use std::path::PathBuf;

use clap::Args;

use super::Problems;
use super::values::{ValueError, go_int};
use crate::telemetry::logging::{
    DEFAULT_MAX_MEGABYTES, LogConfig, LogFile, LogFormat, LogPlace, MEGABYTE, Severity,
};

/// The logging flags.
///
/// Accepted for compatibility and without meaning here: `--one-output` (every line is written once, to one file),
/// `--skip-log-headers` (log files have no header lines to skip). `--vmodule` and `--log-backtrace-at` are accepted and
/// named in the start warning when set: there is one verbosity for the whole program, and no line carries a stack trace.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Logging")]
pub struct KlogFlags {
    /// Verbosity: up to 3 for what an operator wants to see, 4 adds debugging, 5 and more a line per packet, 8 and more
    /// the libraries' own lines
    #[arg(short = 'v', long = "v", value_name = "N", default_value = "4", value_parser = level)]
    v: i32,

    /// Form of log lines: text (klog's) or json (one object per line)
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

    /// Folder for a new log file per start; used with --logtostderr=false and without --log-file. Empty is the
    /// system's folder for temporary files
    #[arg(long, value_name = "DIR", default_value = "")]
    log_dir: String,

    /// Log file, appended to; used with --logtostderr=false
    #[arg(long, value_name = "FILE", default_value = "")]
    log_file: String,

    /// Megabytes after which a log file is moved to FILE.1 and begun anew; 0 is unlimited
    #[arg(long, value_name = "MB", default_value_t = DEFAULT_MAX_MEGABYTES)]
    log_file_max_size: u64,

    /// Show a source file with its folder
    #[arg(long)]
    add_dir_header: bool,

    /// Leave time, severity and source out of text lines
    #[arg(long)]
    skip_headers: bool,

    /// No effect: every line is written once
    #[arg(long)]
    one_output: bool,

    /// No effect: log files have no header lines
    #[arg(long)]
    skip_log_headers: bool,

    /// No effect: there is one verbosity for the whole program
    #[arg(long, value_name = "PATTERN=N,...", default_value = "", value_parser = vmodule)]
    vmodule: String,

    /// No effect: lines carry no stack traces
    #[arg(long, value_name = "FILE:N", default_value = "", value_parser = backtrace_at)]
    log_backtrace_at: String,
}

impl KlogFlags {
    /// What the flags come to.
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

    /// Notes the flags that are set and that nothing acts upon.
    pub fn note_unacted(&self, problems: &mut Problems) {
        problems.unacted(!self.vmodule.is_empty(), "vmodule");
        let backtrace = !matches!(self.log_backtrace_at.as_str(), "" | ":0");
        problems.unacted(backtrace, "log-backtrace-at");
    }
}

/// klog's level is 32 bits wide.
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

/// A severity's name in any case, or its number. As in klog, a number beyond the ends means the end.
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

/// `pattern=N[,pattern=N]`; empty items are skipped.
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

/// `file.go:234`. Empty, and `:0` which klog prints for nothing, are nothing.
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
