#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use clap::Parser;

use super::KlogFlags;
use crate::flags::{Exit, Problems, parse};
use crate::telemetry::logging::{LogConfig, LogFile, LogFormat, LogPlace, MEGABYTE, Severity};

#[derive(Parser, Debug)]
#[command(name = "program")]
struct Flags {
    #[command(flatten)]
    klog: KlogFlags,
}

fn read(line: &[&str]) -> Result<KlogFlags, Exit> {
    parse::<Flags, _, _>(std::iter::once("program").chain(line.iter().copied()))
        .map(|parsed| parsed.flags.klog)
}

fn config(line: &[&str]) -> LogConfig {
    read(line).unwrap().log_config()
}

#[test]
fn defaults_match_klog() {
    assert_eq!(config(&[]), LogConfig::default());
}

#[test]
fn every_flag_is_accepted() {
    let flags = read(&[
        "--v=3",
        "--vmodule=",
        "--logtostderr=true",
        "--alsologtostderr=false",
        "--stderrthreshold=1",
        "--alsologtostderrthreshold=0",
        "--legacy-stderr-threshold-behavior=true",
        "--log-dir=",
        "--log-file=",
        "--log-file-max-size=0",
        "--add-dir-header=false",
        "--skip-headers=false",
        "--one-output=false",
        "--skip-log-headers=false",
        "--log-backtrace-at=:0",
        "--log-format=text",
    ])
    .unwrap();
    let mut problems = Problems::default();
    flags.note_unneeded(&mut problems);
    assert_eq!(problems.finish(), Ok(vec![]));
}

#[test]
fn flags_without_effect_are_named() {
    let flags = read(&["--vmodule=a*=2,,b=1", "--log-backtrace-at=x.go:7"]).unwrap();
    let mut problems = Problems::default();
    flags.note_unneeded(&mut problems);
    let warnings = problems.finish().unwrap();
    let [line] = warnings.as_slice() else {
        panic!("{warnings:?}");
    };
    for part in [
        "accepted, without effect here: ",
        "--vmodule (",
        "--log-backtrace-at (",
    ] {
        assert!(line.contains(part), "{line}");
    }
}

#[test]
fn flags_select_the_log_file_and_the_stderr_threshold() {
    let file = |path: &str| LogPlace::File(PathBuf::from(path));
    let dir = |path: &Path| LogPlace::Dir(path.to_owned());
    let temp = std::env::temp_dir();
    let cases: [(&[&str], Option<LogPlace>, Severity); 8] = [
        (&["--log-file=/x/y.log"], None, Severity::Info),
        (&["--stderrthreshold=ERROR"], None, Severity::Info),
        (
            &[
                "--stderrthreshold=ERROR",
                "--legacy-stderr-threshold-behavior=false",
            ],
            None,
            Severity::Error,
        ),
        (
            &["--logtostderr=false", "--log-file=/x/y.log"],
            Some(file("/x/y.log")),
            Severity::Error,
        ),
        (
            &[
                "--logtostderr=false",
                "--log-dir=/x",
                "--stderrthreshold=fatal",
            ],
            Some(dir(Path::new("/x"))),
            Severity::Fatal,
        ),
        (
            &["--logtostderr=false", "--log-dir=/x", "--log-file=/y"],
            Some(file("/y")),
            Severity::Error,
        ),
        (
            &["--logtostderr=false", "--alsologtostderr"],
            Some(dir(&temp)),
            Severity::Info,
        ),
        (
            &[
                "--logtostderr=false",
                "--alsologtostderr",
                "--alsologtostderrthreshold=Warning",
            ],
            Some(dir(&temp)),
            Severity::Warning,
        ),
    ];
    for (line, place, threshold) in cases {
        let config = config(line);
        assert_eq!(config.file.map(|file| file.place), place, "{line:?}");
        assert_eq!(config.stderr_threshold, threshold, "{line:?}");
    }
}

#[test]
fn log_file_max_size_is_converted_to_bytes() {
    let bound = |size: &str| {
        let config = config(&["--logtostderr=false", "--log-file=/x", size]);
        config.file.and_then(|LogFile { max_bytes, .. }| max_bytes)
    };
    assert_eq!(bound("--log-file-max-size=1800"), Some(1800 * MEGABYTE));
    assert_eq!(bound("--log-file-max-size=0"), None);
    assert_eq!(
        bound("--log-file-max-size=18446744073709551615"),
        Some(u64::MAX)
    );
}

#[test]
fn format_flags_are_applied() {
    let config = config(&["--log-format=json", "--skip-headers", "--add-dir-header=1"]);
    assert_eq!(config.format, LogFormat::Json);
    assert!(config.skip_headers && config.add_dir_header);
}

#[test]
fn invalid_values_are_refused() {
    for flag in [
        "-v=x",
        "-v=0x3",
        "-v=99999999999",
        "--log-format=xml",
        "--stderrthreshold=loud",
        "--vmodule=a",
        "--vmodule==1",
        "--log-backtrace-at=a",
        "--log-backtrace-at=a:0",
        "--log-file-max-size=-1",
        "--log_file=x",
    ] {
        assert_eq!(read(&[flag]).unwrap_err().code, 1, "{flag}");
    }
}
