#![allow(clippy::unwrap_used, clippy::panic)]

use std::fmt;
use std::process::Command;

use tracing::field::{Empty, debug};
use tracing::info_span;

use super::*;
use crate::telemetry::logging::{LogConfig, LogFormat};
use crate::telemetry::metrics::Registry;

/// Environment variable that makes the test panic, in a process of its own.
const CHILD: &str = "CULVERT_TEST_PANICS";

/// A value that cannot be logged.
struct Broken;

impl fmt::Debug for Broken {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        panic!("broken value");
    }
}

#[test]
fn panic_is_a_log_line_and_panic_inside_the_logging_code_goes_to_stderr() {
    if std::env::var_os(CHILD).is_some() {
        return panic_twice();
    }
    let this = thread::current().name().unwrap().to_owned();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &this, "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    let page = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{stderr}");

    let line = stderr.lines().next().unwrap();
    for part in [
        r#""level":"ERROR""#,
        r#""message":"panic; please report the bug""#,
        r#""reason":"first""#,
        "tests.rs:",
        r#""thread":"worker""#,
        r#""spans":[{"id":"a1","name":"agent"}]"#,
    ] {
        assert!(line.contains(part), "{part} is missing from {line}");
    }
    assert!(!stderr.contains("thread 'worker'"), "{stderr}");
    assert!(page.contains("\nculvert_panics_total 1\n"), "{page}");
    assert!(stderr.contains("thread 'logger'"), "{stderr}");
    assert!(stderr.contains("\nbroken value\n"), "{stderr}");
}

fn panic_twice() {
    let config = LogConfig {
        format: LogFormat::Json,
        ..LogConfig::default()
    };
    logging::init(&config, "test").unwrap();
    install();
    panic_on("worker", || {
        let _span = info_span!("agent", id = "a1").entered();
        panic!("first");
    });
    print!("\n{}", Registry::new(&[]).unwrap().render());
    panic_on("logger", || {
        let span = info_span!("agent", id = Empty).entered();
        // The fields of the span are locked here, and a log line of this thread would wait for them forever.
        span.record("id", debug(Broken));
    });
}

fn panic_on(name: &str, panics: impl FnOnce() + Send + 'static) {
    let thread = thread::Builder::new().name(name.to_owned());
    thread.spawn(panics).unwrap().join().unwrap_err();
}

#[test]
fn work_that_waits_forever_or_panics_has_not_ended() {
    let (_held, never) = mpsc::channel::<()>();
    assert!(!ends_within(Duration::from_millis(10), move || {
        let _ = never.recv();
    }));
    assert!(ends_within(Duration::from_secs(60), || ()));
    let panics = || panic!("of the logging code");
    assert!(!ends_within(Duration::from_secs(60), panics));
}
