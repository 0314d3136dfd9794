//! A run of upstream's own integration suite.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use culvert_tests::interop::Interop;
use culvert_tests::skip::skip;

/// Argument for the stock server or agent inside the test process.
pub(crate) const IN_PROCESS: &str = "in-process";

/// Tests and subtests of the suite, sorted. All of them run against both programs, although four tests do not depend on our
/// server or do not depend on our agent: `TestCustomALPN`, `TestProxyHandle_DoneContext_GRPC`,
/// `TestAgentReadinessWithoutServer` and `TestProxyDial_RequestCancelled_GRPC`, which has an agent of its own.
const TESTS: [&str; 32] = [
    "TestAgentReadinessWithoutServer",
    "TestAgentRestartReconnect",
    "TestAgentRestartReconnect/grpc",
    "TestAgentRestartReconnect/http-connect",
    "TestAgent_MultipleConn",
    "TestAgent_MultipleConn/grpc",
    "TestAgent_MultipleConn/http-connect",
    "TestBasicHAProxyServer_GRPC",
    "TestBasicProxy_GRPC",
    "TestBasicProxy_HTTPCONN",
    "TestConcurrentClientRequest",
    "TestCustomALPN",
    "TestEchoServer",
    "TestFailedDNSLookupProxy_HTTPCONN",
    "TestFailedDial_HTTPCONN",
    "TestGRPCServerAndAgentReadiness",
    "TestHTTPConnServerAndAgentReadiness",
    "TestProxyDial_AgentTimeout_GRPC",
    "TestProxyDial_RequestCancelled_Concurrent_GRPC",
    "TestProxyDial_RequestCancelled_GRPC",
    "TestProxyHandleDialError_GRPC",
    "TestProxyHandle_AfterDrain",
    "TestProxyHandle_DoneContext_GRPC",
    "TestProxyHandle_RequestDeadlineExceeded_GRPC",
    "TestProxyHandle_TunnelContextCancelled_GRPC",
    "TestProxy_Agent_Disconnect_Persistent_Connection",
    "TestProxy_Agent_Disconnect_Persistent_Connection/grpc",
    "TestProxy_Agent_Disconnect_Persistent_Connection/http-connect",
    "TestProxy_ConcurrencyGRPC",
    "TestProxy_ConcurrencyHTTP",
    "TestProxy_LargeResponse",
    "TestServerRestartAgentReconnect",
];

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

/// Runs the suite against a server and an agent, each a path or [`IN_PROCESS`]. Every test must pass.
pub(crate) fn passes(server: &Path, agent: &Path) {
    if Interop::get().is_none() {
        return;
    }
    let run = |flags: &[&str]| run(server, agent, flags);
    let output = run(&["-v"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(CANNOT) {
        skip(stderr.trim());
        return;
    }
    let lines = summary(&output);
    let results = |prefix: &str| -> Vec<&str> {
        let lines = lines.iter().map(|line| line.trim_start());
        let rest = lines.filter_map(|line| line.strip_prefix(prefix));
        rest.filter_map(|rest| rest.split(' ').next()).collect()
    };
    let (passed, failed) = (results("--- PASS: "), results("--- FAIL: "));
    let mut all: Vec<&str> = passed.iter().chain(&failed).copied().collect();
    all.sort_unstable();
    assert_eq!(all, TESTS, "other tests than expected: {stderr}");
    if output.status.success() {
        return;
    }
    let racy = !failed.is_empty() && failed.iter().all(|name| RACY.contains(name));
    assert!(racy, "{}", String::from_utf8_lossy(&output.stdout));
    let only = format!("-run=^({})$", failed.join("|"));
    let repeated = || {
        let output = run(&["-v", &only]);
        let passed = summary(&output)
            .iter()
            .any(|line| line.contains("--- PASS"));
        passed && output.status.success()
    };
    assert!(
        (0..REPEATS).any(|_| repeated()),
        "{failed:?} failed each time"
    );
}

/// Runs the suite with additional flags for `go test`.
fn run(server: &Path, agent: &Path, flags: &[&str]) -> Output {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("interop/upstream-suite");
    Command::new(script)
        .args([server, agent])
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
