//! Upstream's own integration suite, run against our agent.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use culvert_tests::interop::Interop;
use culvert_tests::process::ours;

/// Exit code of the script if the machine cannot run the suite.
const CANNOT: i32 = 77;

/// Prefixes of the result lines of `go test -v`.
const SUMMARY: [&str; 5] = ["--- ", "    --- ", "ok ", "FAIL", "panic:"];

/// Tests with races inside the client, which may be repeated. On a busy machine these tests also fail with
/// the stock agent.
const RACY: [&str; 2] = [
    // Releases the response exactly when the client's deadline passes.
    "TestProxyHandle_RequestDeadlineExceeded_GRPC",
    // Cancels the tunnel and the request together; the request may see the end of the tunnel first.
    "TestProxyHandle_TunnelContextCancelled_GRPC",
];

/// Largest number of repetitions of a racy test.
const REPEATS: usize = 4;

/// Starts first because of the module's name: the suite takes long and needs little CPU time.
#[test]
fn agent_passes_upstreams_suite() {
    if Interop::get().is_none() {
        return;
    }
    let output = run(&["-v"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(CANNOT) {
        eprintln!("skipped: {}", stderr.trim());
        return;
    }
    let lines = summary(&output);
    let count = |what: &str| lines.iter().filter(|line| line.contains(what)).count();
    assert!(count("--- PASS") > 20, "the suite has shrunk: {stderr}");
    assert_eq!(count("--- SKIP"), 0, "the suite has skipped tests");
    if output.status.success() {
        return;
    }
    let failed = lines
        .iter()
        .filter_map(|line| line.strip_prefix("--- FAIL: "));
    let failed: Vec<&str> = failed.filter_map(|rest| rest.split(' ').next()).collect();
    let racy = !failed.is_empty() && failed.iter().all(|name| RACY.contains(name));
    assert!(racy, "{}", String::from_utf8_lossy(&output.stdout));
    let only = format!("-run=^({})$", failed.join("|"));
    let passes = || {
        let output = run(&["-v", &only]);
        let passed = summary(&output)
            .iter()
            .any(|line| line.contains("--- PASS"));
        passed && output.status.success()
    };
    assert!(
        (0..REPEATS).any(|_| passes()),
        "{failed:?} failed each time"
    );
}

/// Runs the suite with additional flags for `go test`.
fn run(flags: &[&str]) -> Output {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("interop/upstream-suite");
    Command::new(script)
        .arg(ours("culvert-agent"))
        .args(flags)
        .stdin(Stdio::null())
        .output()
        .expect("starting upstream's suite")
}

/// Prints and returns the result lines.
fn summary(output: &Output) -> Vec<String> {
    let stdout = String::from_utf8_lossy(&output.stdout);
    let is_summary = |line: &&str| SUMMARY.iter().any(|start| line.starts_with(start));
    let lines: Vec<String> = stdout
        .lines()
        .filter(is_summary)
        .map(str::to_owned)
        .collect();
    println!("{}", lines.join("\n"));
    lines
}
