//! The exit codes and texts of the program when it does not start.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::process::{Command, Output};

fn run(flag: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_culvert-nodeport-proxy"))
        .arg(flag)
        .output()
        .expect("the program starts")
}

#[test]
fn help_and_version_exit_with_0() {
    for flag in ["--help", "--version"] {
        let output = run(flag);
        assert_eq!(output.status.code(), Some(0), "{flag}");
        assert!(!output.stdout.is_empty() && output.stderr.is_empty());
    }
}

#[test]
fn unknown_flag_exits_with_1_and_is_named() {
    let output = run("--no-such-flag");
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("--no-such-flag"), "{text}");
}
