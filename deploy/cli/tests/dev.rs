//! `culvert dev` as a person runs it.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

fn dev(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_culvert"));
    command.arg("dev").args(args);
    command
}

/// Ends the program also when the test fails.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn once_checks_every_front_end_and_exits_well() {
    let output = dev(&["--once"]).output().expect("the program starts");
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
    assert_eq!(errors, "", "a tunnel that works warns of nothing");
}

#[test]
fn the_rows_of_the_door_say_what_came_through_it() {
    let folder = tempfile::tempdir().expect("a folder");
    // The only folder where programs are looked for: there is no curl.
    let output = dev(&["--once"]).env("PATH", folder.path()).output();
    let output = output.expect("the program starts");
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
            "ok: curl is not installed; 23 bytes by our own",
        ),
    ] {
        let row = text.lines().find(|line| line.contains(check));
        let row = row.unwrap_or_else(|| panic!("no row {check}:\n{text}"));
        assert!(row.ends_with(seen), "{row}");
    }
}

#[test]
fn the_printed_curl_lines_work_and_ctrl_c_removes_the_folder() {
    if Command::new("curl").arg("--version").output().is_err() {
        assert!(std::env::var_os("CI").is_none(), "curl is not on PATH");
        println!("skipped: curl not found");
        return;
    }
    let mut running = Running(
        dev(&[])
            .stdout(Stdio::piped())
            .spawn()
            .expect("the program starts"),
    );
    let output = running.0.stdout.take().expect("its output");
    let mut lines = Vec::new();
    let mut folder = None;
    for line in BufReader::new(output).lines() {
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
            .args(["-c", &format!("{line} --silent --show-error --max-time 20")])
            .output()
            .expect("a shell");
        let text = String::from_utf8_lossy(&answer.stdout);
        let errors = String::from_utf8_lossy(&answer.stderr);
        assert!(text.contains("hello"), "{line}\n{text}\n{errors}");
    }

    let pid = rustix::process::Pid::from_child(&running.0);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("a signal");
    assert_eq!(running.0.wait().expect("an exit").code(), Some(0));
    let folder = folder.expect("a folder");
    assert!(
        !std::path::Path::new(&folder).exists(),
        "{folder} is left behind"
    );
}
