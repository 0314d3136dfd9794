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
    for front_end in [
        "gRPC, Unix socket",
        "CONNECT, Unix socket",
        "CONNECT, mutual TLS",
    ] {
        let rows = text.lines().filter(|line| line.contains(front_end));
        let passed = rows.filter(|line| line.contains(" ok: ")).count();
        assert_eq!(passed, 6, "{front_end}:\n{text}");
    }
    assert_eq!(errors, "", "a tunnel that works warns of nothing");
}

#[test]
fn the_printed_curl_line_works_and_ctrl_c_removes_the_folder() {
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
    let mut curl = None;
    let mut folder = None;
    for line in BufReader::new(output).lines() {
        let line = line.expect("text");
        if let Some(path) = line.strip_prefix("Certificates are in ") {
            folder = Some(path.to_owned());
        }
        if line.trim_start().starts_with("curl ") {
            curl = Some(line.trim().to_owned());
        }
        if line.starts_with("Ctrl-C") {
            break;
        }
    }
    let line = curl.expect("a curl line");
    let answer = Command::new("sh")
        .args(["-c", &format!("{line} --silent --show-error --max-time 20")])
        .output()
        .expect("a shell");
    let text = String::from_utf8_lossy(&answer.stdout);
    let errors = String::from_utf8_lossy(&answer.stderr);
    assert!(text.contains("hello"), "{line}\n{text}\n{errors}");

    let pid = rustix::process::Pid::from_child(&running.0);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("a signal");
    assert_eq!(running.0.wait().expect("an exit").code(), Some(0));
    let folder = folder.expect("a folder");
    assert!(
        !std::path::Path::new(&folder).exists(),
        "{folder} is left behind"
    );
}
