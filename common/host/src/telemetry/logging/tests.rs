#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use tokio::time::Instant;

use time::macros::datetime;
use tracing::{Level, debug, error, info, info_span, trace, warn};

use super::format::header;
use super::limit::RateLimit;
use super::sink::{Sink, Stderr};
use super::{
    LogConfig, LogError, LogFile, LogFormat, LogPlace, LostLine, Severity, lost_lines, subscriber,
};

/// Runs `work` under its own subscriber and returns the text written to stderr.
fn logged(config: &LogConfig, work: impl FnOnce()) -> String {
    let buffer = Arc::new(Mutex::new(Vec::new()));
    let sink = Sink::open(config, "program", Stderr::Buffer(Arc::clone(&buffer))).unwrap();
    tracing::subscriber::with_default(subscriber(config, sink, Arc::default()), work);
    String::from_utf8(buffer.lock().clone()).unwrap()
}

fn bare() -> LogConfig {
    LogConfig {
        skip_headers: true,
        ..LogConfig::default()
    }
}

fn with_file(path: &Path) -> LogConfig {
    LogConfig {
        file: Some(LogFile {
            place: LogPlace::File(path.to_owned()),
            max_bytes: None,
        }),
        stderr_threshold: Severity::Error,
        ..bare()
    }
}

#[test]
fn header_has_klogs_layout() {
    let now = datetime!(2026-11-21 00:05:08.048482 UTC);
    assert_eq!(
        header(&Level::INFO, now, 8894),
        "I1121 00:05:08.048482    8894"
    );
    assert_eq!(
        header(&Level::WARN, now, 1),
        "W1121 00:05:08.048482       1"
    );
    assert_eq!(
        header(&Level::ERROR, now, 12_345_678),
        "E1121 00:05:08.048482 12345678"
    );
    assert_eq!(header(&Level::DEBUG, now, 7).chars().next(), Some('I'));
    assert_eq!(header(&Level::TRACE, now, 7).chars().next(), Some('I'));
}

#[test]
fn answers_of_the_kubernetes_api_are_not_logged_at_any_verbosity() {
    let config = LogConfig {
        verbosity: 10,
        ..bare()
    };
    let lines = logged(&config, || {
        warn!(target: "kube_client::client", "an answer with a token");
        warn!(target: "kube_client::config", "a warning");
    });
    assert!(
        lines.contains("a warning") && !lines.contains("token"),
        "{lines}"
    );
}

#[test]
fn failed_requests_of_the_kubernetes_client_are_logged_only_with_other_details() {
    let failed = || error!(target: "kube_client::client::builder", "failed with error");
    for (verbosity, count) in [(4, 0), (7, 0), (8, 1)] {
        let config = LogConfig {
            verbosity,
            ..bare()
        };
        assert_eq!(logged(&config, failed).lines().count(), count);
    }
}

#[test]
fn text_line_has_header_message_and_fields() {
    let line = logged(&LogConfig::default(), || {
        info!(attempt = 2, "agent connected")
    });
    let (header, rest) = line.split_once("] ").unwrap();
    assert_eq!(rest, "\"agent connected\" attempt=2\n");
    let words: Vec<&str> = header.split_whitespace().collect();
    let [date, clock, pid, place] = words.as_slice() else {
        panic!("{header}");
    };
    assert!(date.starts_with('I') && date.len() == 5, "{date}");
    assert_eq!(clock.len(), "00:05:08.048482".len(), "{clock}");
    assert_eq!(*pid, std::process::id().to_string());
    assert!(place.starts_with("tests.rs:"), "{place}");

    let config = LogConfig {
        add_dir_header: true,
        ..LogConfig::default()
    };
    let line = logged(&config, || info!("x"));
    assert!(line.contains(" logging/tests.rs:"), "{line}");
}

#[test]
fn fields_are_quoted_as_in_klog() {
    let host = "evil\nI1121 00:00:00.000000 1 x.rs:1] \"forged\"";
    let line = logged(&bare(), || {
        info!(host, count = 3_u64, ok = true, ratio = 0.5, id = %"a b", list = ?[1, 2], "dial \"x\"");
    });
    assert_eq!(
        line,
        "\"dial \\\"x\\\"\" host=\"evil\\nI1121 00:00:00.000000 1 x.rs:1] \\\"forged\\\"\" count=3 ok=true ratio=0.5 \
         id=\"a b\" list=\"[1, 2]\"\n"
    );
}

#[test]
fn span_fields_follow_outermost_first() {
    let line = logged(&bare(), || {
        let outer = info_span!("agent", id = "a1", later = tracing::field::Empty).entered();
        outer.record("later", 5);
        let _inner = info_span!("conn", conn = 7).entered();
        info!(bytes = 1, "done");
    });
    assert_eq!(line, "\"done\" bytes=1 id=\"a1\" later=5 conn=7\n");
}

#[test]
fn verbosity_selects_levels() {
    let everything = || {
        error!("e");
        warn!("w");
        info!("i");
        debug!("d");
        trace!("t");
        error!(target: "h2::codec", "other e");
        warn!(target: "h2::codec", "other w");
        info!(target: "h2::codec", "other i");
        trace!(target: "h2::codec", "other t");
    };
    let cases: [(i32, &[&str]); 5] = [
        (-1, &["e", "w", "i", "other e", "other w"]),
        (3, &["e", "w", "i", "other e", "other w"]),
        (4, &["e", "w", "i", "d", "other e", "other w"]),
        (7, &["e", "w", "i", "d", "t", "other e", "other w"]),
        (
            8,
            &[
                "e", "w", "i", "d", "t", "other e", "other w", "other i", "other t",
            ],
        ),
    ];
    for (verbosity, expected) in cases {
        let config = LogConfig {
            verbosity,
            ..bare()
        };
        let text = logged(&config, everything);
        let lines: Vec<&str> = text.lines().map(|line| line.trim_matches('"')).collect();
        assert_eq!(lines, expected, "v={verbosity}");
    }
}

#[test]
fn json_line_has_message_fields_and_source() {
    let config = LogConfig {
        format: LogFormat::Json,
        ..LogConfig::default()
    };
    let line = logged(&config, || {
        let _span = info_span!("conn", id = 7).entered();
        warn!(host = "a\nb", "no answer");
    });
    let (timestamp, rest) = line.split_once(',').unwrap();
    assert!(timestamp.starts_with("{\"timestamp\":\"20"), "{timestamp}");
    let (before, after) = rest.split_once("\"line_number\":").unwrap();
    let after = after.trim_start_matches(|c: char| c.is_ascii_digit());
    assert_eq!(
        format!("{before}{after}"),
        "\"level\":\"WARN\",\"message\":\"no answer\",\"host\":\"a\\nb\",\
         \"target\":\"culvert_host::telemetry::logging::tests\",\
         \"filename\":\"common/host/src/telemetry/logging/tests.rs\",,\"spans\":[{\"id\":7,\"name\":\"conn\"}]}\n"
    );
}

#[test]
fn file_gets_all_lines_and_stderr_only_severe_lines() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("program.log");
    std::fs::write(&path, "earlier\n").unwrap();
    let stderr = logged(&with_file(&path), || {
        info!("i");
        error!("e");
    });
    assert_eq!(
        std::fs::read_to_string(&path).unwrap(),
        "earlier\n\"i\"\n\"e\"\n"
    );
    assert_eq!(stderr, "\"e\"\n");
}

#[test]
fn folder_gets_one_file_per_start() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = with_file(Path::new(""));
    config.file.as_mut().unwrap().place = LogPlace::Dir(dir.path().to_owned());
    logged(&config, || info!("i"));
    let files: Vec<PathBuf> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    let [path] = files.as_slice() else {
        panic!("{files:?}");
    };
    let name = path.file_name().unwrap().to_str().unwrap();
    assert!(name.starts_with("program.log.20"), "{name}");
    let mode = path.metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert!(
        name.ends_with(&format!(".{}", std::process::id())),
        "{name}"
    );
    assert_eq!(std::fs::read_to_string(path).unwrap(), "\"i\"\n");
}

#[test]
fn full_file_is_renamed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("program.log");
    let mut config = with_file(&path);
    // Two lines of four bytes fit, a third line does not.
    config.file.as_mut().unwrap().max_bytes = Some(10);
    logged(&config, || {
        for name in ["a", "b", "c", "d", "e"] {
            info!("{name}");
        }
    });
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "\"e\"\n");
    let aside = std::fs::read_to_string(dir.path().join("program.log.1")).unwrap();
    assert_eq!(aside, "\"c\"\n\"d\"\n");
}

#[test]
fn line_longer_than_the_limit_is_written_whole() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("program.log");
    let mut config = with_file(&path);
    config.file.as_mut().unwrap().max_bytes = Some(2);
    logged(&config, || {
        info!("long");
        info!("longer");
    });
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "\"longer\"\n");
}

#[test]
fn full_disk_loses_no_line_and_is_explained_once() {
    let before = lost_lines(LostLine::WriteFailed);
    let stderr = logged(&with_file(Path::new("/dev/full")), || {
        info!("first");
        info!("second");
    });
    let lines: Vec<&str> = stderr.lines().collect();
    let [explanation, first, second] = lines.as_slice() else {
        panic!("{stderr}");
    };
    assert!(
        explanation.starts_with("cannot write the log file /dev/full: "),
        "{explanation}"
    );
    assert!(explanation.contains("Free space"), "{explanation}");
    assert_eq!((*first, *second), ("\"first\"", "\"second\""));
    assert!(lost_lines(LostLine::WriteFailed) >= before + 2);
}

#[test]
fn logging_survives_a_deleted_folder_and_resumes_in_a_new_one() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("logs");
    let path = folder.join("program.log");
    std::fs::create_dir(&folder).unwrap();
    let mut config = with_file(&path);
    config.file.as_mut().unwrap().max_bytes = Some(6);
    let stderr = logged(&config, || {
        info!("a");
        std::fs::remove_dir_all(&folder).unwrap();
        info!("b");
        info!("c");
        std::fs::create_dir(&folder).unwrap();
        info!("d");
    });
    assert!(stderr.ends_with("\"b\"\n\"c\"\n"), "{stderr}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "\"d\"\n");
}

#[test]
fn failure_after_a_success_is_explained_again() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("logs");
    std::fs::create_dir(&folder).unwrap();
    let mut config = with_file(&folder.join("program.log"));
    // Each line but the first begins a new file.
    config.file.as_mut().unwrap().max_bytes = Some(6);
    let stderr = logged(&config, || {
        info!("a");
        for _ in 0..2 {
            std::fs::remove_dir_all(&folder).unwrap();
            info!("b");
            info!("c");
            std::fs::create_dir(&folder).unwrap();
            info!("d");
        }
    });
    let explained = stderr.matches("cannot write the log file").count();
    assert_eq!(explained, 2, "{stderr}");
}

#[test]
fn unopenable_log_file_is_an_error_at_startup() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("absent/program.log");
    let error = super::init(&with_file(&path), "program").expect_err("no such folder");
    assert!(matches!(error, LogError::Open { .. }));
    let text = error.to_string();
    assert!(
        text.contains("absent/program.log") && text.contains("--logtostderr=true"),
        "{text}"
    );
}

#[test]
fn effective_options_are_described() {
    let config = with_file(Path::new("/x/y.log"));
    assert_eq!(
        config.describe(),
        [
            "v=4",
            "log-format=text",
            "logtostderr=false",
            "stderrthreshold=Error",
            "skip-headers=true",
            "add-dir-header=false",
            "log-file=/x/y.log",
            "log-file-max-size=0",
        ]
    );
}

#[test]
fn warnings_with_one_reason_are_limited_and_the_rest_is_counted() {
    let before = lost_lines(LostLine::RateLimit);
    let limit = Arc::<RateLimit>::default();
    let buffer = Arc::new(Mutex::new(Vec::new()));
    let sink = Sink::open(&bare(), "program", Stderr::Buffer(buffer.clone())).unwrap();
    let started = Instant::now();
    tracing::subscriber::with_default(subscriber(&bare(), sink, limit.clone()), || {
        for peer in 0..50 {
            for reason in ["timeout", "garbage"] {
                warn!(reason, peer, "connection refused");
            }
            info!(peer, "agent connected");
        }
        limit.report(started);
        limit.report(started + Duration::from_secs(11));
        limit.report(started + Duration::from_secs(22));
        warn!(reason = "timeout", "connection refused");
    });
    let text = String::from_utf8(buffer.lock().clone()).unwrap();
    let count = |part: &str| text.lines().filter(|line| line.contains(part)).count();
    assert_eq!(count("reason=\"timeout\""), 21, "{text}");
    assert_eq!(count("reason=\"garbage\""), 20, "{text}");
    assert_eq!(count("agent connected"), 50);
    assert_eq!(
        count("\"30 more in the last 10 s\" line=\"connection refused\""),
        2,
        "{text}"
    );
    assert!(lost_lines(LostLine::RateLimit) >= before + 60);
}

#[test]
fn info_lines_of_one_place_are_limited_whatever_the_reason() {
    let limit = Arc::<RateLimit>::default();
    let buffer = Arc::new(Mutex::new(Vec::new()));
    let sink = Sink::open(&bare(), "program", Stderr::Buffer(buffer.clone())).unwrap();
    let started = Instant::now();
    tracing::subscriber::with_default(subscriber(&bare(), sink, limit.clone()), || {
        for peer in 0..1000 {
            info!(reason = format!("reason {peer}"), "agent disconnected");
        }
        info!("another place");
        limit.report(started + Duration::from_secs(11));
    });
    let text = String::from_utf8(buffer.lock().clone()).unwrap();
    let count = |part: &str| text.lines().filter(|line| line.contains(part)).count();
    assert_eq!(count("reason="), 200, "{text}");
    assert_eq!(count("another place"), 1, "{text}");
    assert_eq!(
        count("\"800 more in the last 10 s\" line=\"agent disconnected\""),
        1,
        "{text}"
    );
}
