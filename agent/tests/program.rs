//! Tests of the program `culvert-agent`: exit codes and error texts at start.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::process::{Command, Output};

fn run(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_culvert-agent"))
        .args(args)
        .output()
        .expect("the program must start")
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn help_and_version_exit_with_code_0() {
    for flag in ["--help", "--version"] {
        let output = run(&[flag]);
        assert_eq!(output.status.code(), Some(0), "{flag}");
        assert!(
            !output.stdout.is_empty() && output.stderr.is_empty(),
            "{flag}"
        );
    }
}

#[test]
fn unknown_flag_is_named_and_exits_with_code_1() {
    let output = run(&["--no-such-flag"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("unknown flag: --no-such-flag"));
}

#[test]
fn missing_ca_error_names_the_flag() {
    let output = run(&["--health-server-port=39993", "--admin-server-port=39994"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("--ca-cert"), "{}", stderr(&output));
}
