//! Tests of `culvert dev`, run as a person runs the command.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use std::io::{BufRead, BufReader, Lines, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::time::timeout;

fn dev(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_culvert"));
    command.arg("dev").args(args);
    command
}

/// Guard that kills the program, even if the test fails.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a program whose output the test reads.
fn started(command: &mut Command) -> (Running, Lines<BufReader<ChildStdout>>) {
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .expect("the program must start");
    let output = child.stdout.take().expect("its output");
    (Running(child), BufReader::new(output).lines())
}

fn kill(running: &Running, signal: Signal) {
    kill_process(Pid::from_child(&running.0), signal).expect("a signal");
}

#[test]
fn once_checks_every_front_end_and_exits_with_code_0() {
    let output = dev(&["--once"]).output().expect("the program must start");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{text}\n{errors}");
    for (front_end, rows) in [
        ("gRPC, Unix socket", 6),
        ("CONNECT, Unix socket", 6),
        ("CONNECT, mutual TLS", 6),
        ("door, server name", 3),
        ("door, CONNECT", 1),
        ("node tunnel to door", 2),
    ] {
        let passed = text.lines().filter(|line| line.contains(" ok: "));
        let passed = passed.filter(|line| line.trim_start().starts_with(front_end));
        assert_eq!(passed.count(), rows, "{front_end}:\n{text}");
    }
    assert_eq!(errors, "", "a working tunnel must not log warnings");
}

#[test]
fn door_rows_show_the_received_data() {
    let folder = tempfile::tempdir().expect("a folder");
    // The only folder in PATH, so curl is missing.
    let output = dev(&["--once"]).env("PATH", folder.path()).output();
    let output = output.expect("the program must start");
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{text}");
    for (check, seen) in [
        ("HTTPS GET", "ok: 23 bytes, verified as dev.localhost"),
        (
            "agent connected",
            "ok: 3 servers as konnectivity-server.dev.localhost",
        ),
        ("GET by that agent", "ok: 1 MiB counted by the door, native"),
        (
            "curl --proxytunnel",
            "ok: curl is not installed; 23 bytes with the built-in client",
        ),
    ] {
        let row = text.lines().find(|line| line.contains(check));
        let row = row.unwrap_or_else(|| panic!("no row {check}:\n{text}"));
        assert!(row.ends_with(seen), "{row}");
    }
}

/// Prints past the capture of libtest, which would hide the line.
fn skipped(why: &str) {
    writeln!(std::io::stderr(), "skipped: {why}").expect("stderr");
}

/// True if a stock client ran. Otherwise prints the reason; with `CI=true`, a missing client is a failure.
fn has_stock_client(text: &str) -> bool {
    let left_out = text.lines().find(|line| line.contains(" left out: "));
    if let Some(line) = left_out {
        let ci = std::env::var("CI").is_ok_and(|ci| ci == "true");
        assert!(!ci, "{line}, though CI=true");
        skipped(line.trim());
    }
    left_out.is_none()
}

/// Returns the results of the passed rows for a front end and a check.
fn results<'a>(text: &'a str, front_end: &str, check: &str) -> Vec<&'a str> {
    let rows = text.lines().filter_map(|line| {
        let row = line.trim_start().strip_prefix(front_end)?;
        let row = row.trim_start().strip_prefix(check)?;
        row.split_once(" ok: ").map(|(_, result)| result)
    });
    rows.collect()
}

#[test]
fn openvpn_is_checked_and_switches_lose_no_connection() {
    let output = dev(&["--openvpn", "--once"]).output();
    let output = output.expect("the program must start");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{text}\n{errors}");
    let front_ends = [
        "gRPC, Unix socket",
        "CONNECT, Unix socket",
        "CONNECT, mutual TLS",
    ];
    for front_end in front_ends {
        for (check, seen) in [
            ("openvpn: connected", "user-cluster-client 10.20.0."),
            ("switch to openvpn", "new dials by openvpn"),
            ("openvpn: HTTP GET", "23 bytes"),
            ("openvpn: 20 MiB down", "every byte verified"),
            ("openvpn: 20 MiB up", "every byte verified"),
            ("switch to konnectivity", "new dials by konnectivity"),
            ("switches under load", "8 switches, "),
        ] {
            let results = results(&text, front_end, check);
            let [result] = results[..] else {
                panic!("{front_end}, {check}: {results:?}\n{text}");
            };
            assert!(result.starts_with(seen), "{front_end}, {check}: {result}");
        }
        let client = results(&text, front_end, "openvpn: connected").concat();
        assert!(client.contains(", culvert/"), "{client}");
        let load = results(&text, front_end, "switches under load").concat();
        let counts: Vec<&str> = load.split(", ").collect();
        assert!(counts.contains(&"failed dials: 0"), "{load}");
        assert!(counts.contains(&"32 long streams"), "{load}");
        assert!(counts[4].starts_with("cut streams: 0 "), "{load}");
        let dials: u32 = counts[1].trim_end_matches(" dials").parse().unwrap();
        assert!(dials >= 100, "{load}");
    }
    if has_stock_client(&text) {
        for (check, seen) in [
            ("stock: connected", "stock-client 10.20.0."),
            ("stock: HTTP GET", "23 bytes"),
            ("stock: 20 MiB down", "every byte verified"),
            ("stock: 20 MiB up", "every byte verified"),
        ] {
            let results = results(&text, front_ends[2], check);
            let [result] = results[..] else {
                panic!("{check}: {results:?}\n{text}");
            };
            assert!(result.starts_with(seen), "{check}: {result}");
        }
        let client = results(&text, front_ends[2], "stock: connected").concat();
        assert!(client.contains(", OpenVPN 2."), "{client}");
    }
    assert_eq!(errors, "", "a working tunnel must not log warnings");
}

/// Returns the command lines of all processes that contain `text`.
fn processes(text: &str) -> Vec<String> {
    let all = std::fs::read_dir("/proc").expect("/proc");
    let lines = all.filter_map(|entry| {
        let line = std::fs::read(entry.ok()?.path().join("cmdline")).ok()?;
        Some(String::from_utf8_lossy(&line).into_owned())
    });
    lines.filter(|line| line.contains(text)).collect()
}

/// Runs a command line that the program printed for people to try.
fn try_line(text: &str, command: &str) -> String {
    let line = text.lines().find(|line| line.contains(command));
    let output = Command::new("sh")
        .args(["-c", line.expect("a line")])
        .output()
        .expect("the program must start");
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    assert!(output.status.success(), "{command}: {said}");
    said
}

#[tokio::test]
async fn stock_client_ends_with_the_program_after_any_signal() {
    // KILL in the middle of the checks, INT after the checks.
    for (signal, until) in [(Signal::KILL, "stock"), (Signal::INT, "Ctrl-C")] {
        let (mut running, mut lines) = started(&mut dev(&["--openvpn"]));
        let mut text = String::new();
        while !text.lines().last().unwrap_or_default().contains(until) {
            text += &lines.next().expect("a line").expect("text");
            text += "\n";
        }
        if has_stock_client(&text) {
            assert!(!processes(folder(&text)).is_empty(), "{text}");
        }
        if signal == Signal::INT {
            let switched = try_line(&text, "/culvert switch --admin-uds");
            assert_eq!(switched.lines().last(), Some("openvpn: in force"));
            let status = try_line(&text, "/culvert status --admin-uds");
            assert!(
                status.contains("  user-cluster-client 10.20.0."),
                "{status}"
            );
        }
        kill(&running, signal);
        running.0.wait().expect("an exit");
        let folder = folder(&text);
        let gone = async {
            while !processes(folder).is_empty() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        if timeout(Duration::from_secs(10), gone).await.is_err() {
            panic!("{:?} after {signal:?}", processes(folder));
        }
        match signal {
            Signal::KILL => std::fs::remove_dir_all(folder).expect("a folder"),
            _ => assert!(!Path::new(folder).exists(), "{folder}"),
        }
    }
}

/// Returns the folder of a running program, from the program's output.
fn folder(text: &str) -> &str {
    let mut lines = text.lines();
    let folder = lines.find_map(|line| line.strip_prefix("Starting a tunnel in "));
    let folder = folder.and_then(|rest| rest.strip_suffix(" ..."));
    folder.expect("a folder")
}

#[test]
fn an_interrupt_before_the_checks_is_a_failure_with_once() {
    let (mut running, mut lines) = started(dev(&["--once"]).stderr(Stdio::null()));
    folder(&lines.next().expect("a line").expect("text"));
    kill(&running, Signal::INT);
    assert_eq!(running.0.wait().expect("an exit").code(), Some(1));
}

#[test]
fn a_closed_terminal_and_ctrl_backslash_remove_the_folder() {
    for signal in [Signal::HUP, Signal::QUIT] {
        // Whoever runs the tests may ignore the signals, as nohup does, and programs inherit that.
        let mut command = Command::new("env");
        let program = env!("CARGO_BIN_EXE_culvert");
        command.args(["--default-signal=HUP,QUIT", program, "dev"]);
        let (mut running, mut lines) = started(&mut command);
        let first = lines.next().expect("a line").expect("text");
        let folder = folder(&first);
        assert!(Path::new(folder).exists(), "{folder}");
        kill(&running, signal);
        assert_eq!(running.0.wait().expect("an exit").code(), Some(0));
        assert!(!Path::new(folder).exists(), "{folder}");
    }
}

#[test]
fn the_program_runs_on_after_its_terminal_was_closed_with_nohup() {
    let mut shell = Command::new("sh");
    let program = env!("CARGO_BIN_EXE_culvert");
    shell.args(["-c", "trap '' HUP && exec \"$0\" dev", program]);
    let (mut running, mut lines) = started(&mut shell);
    folder(&lines.next().expect("a line").expect("text"));
    let status = std::fs::read_to_string(format!("/proc/{}/status", running.0.id()));
    let status = status.expect("the program must run");
    let mask = |name| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        u64::from_str_radix(line.expect("a line").trim(), 16).expect("a mask")
    };
    let (hangup, interrupt) = (1 << 0, 1 << 1);
    assert_eq!(mask("SigIgn:") & hangup, hangup);
    assert_eq!(mask("SigCgt:") & (hangup | interrupt), interrupt);
    kill(&running, Signal::INT);
    assert_eq!(running.0.wait().expect("an exit").code(), Some(0));
}

#[test]
fn checks_pass_without_the_stock_client() {
    let folder = tempfile::tempdir().expect("a folder");
    let output = dev(&["--openvpn", "--once"])
        .env("PATH", folder.path())
        .output()
        .expect("the program must start");
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert_eq!(text.matches(" left out: ").count(), 1, "{text}");
    assert_eq!(text.matches("failed dials: 0").count(), 3, "{text}");
}

#[test]
fn printed_curl_lines_work_and_ctrl_c_removes_the_folder() {
    if Command::new("curl").arg("--version").output().is_err() {
        assert!(std::env::var_os("CI").is_none(), "curl is not on PATH");
        skipped("curl not found");
        return;
    }
    let temporary = tempfile::Builder::new().prefix("a folder").tempdir();
    let temporary = temporary.expect("a folder");
    let (mut running, output) = started(dev(&[]).env("TMPDIR", temporary.path()));
    let mut lines = Vec::new();
    let mut folder = None;
    for line in output {
        let line = line.expect("text");
        if let Some(path) = line.strip_prefix("Certificates are in ") {
            folder = Some(path.to_owned());
        }
        if line.trim_start().starts_with("curl ") {
            lines.push(line.trim().to_owned());
        }
        if line.starts_with("Ctrl-C") {
            break;
        }
    }
    assert_eq!(lines.len(), 3, "{lines:?}");
    for line in lines {
        let answer = Command::new("sh")
            .args([
                "-c",
                &format!(
                    "{line} --silent --show-error --max-time 20 --write-out ' %{{http_connect}}'"
                ),
            ])
            .env("NO_PROXY", "127.0.0.1,.svc.cluster.local")
            .output()
            .expect("a shell");
        let text = String::from_utf8_lossy(&answer.stdout);
        let errors = String::from_utf8_lossy(&answer.stderr);
        assert!(text.contains("hello"), "{line}\n{text}\n{errors}");
        let is_tunneled = line.contains("--proxytunnel");
        assert_eq!(text.ends_with(" 200"), is_tunneled, "{line}\n{text}");
    }

    kill(&running, Signal::INT);
    assert_eq!(running.0.wait().expect("an exit").code(), Some(0));
    let folder = folder.expect("a folder");
    assert!(!Path::new(&folder).exists(), "{folder} is left behind");
}
