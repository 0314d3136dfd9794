//! The program itself: its exit codes, and its messages when it cannot start.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::process::{Command, Output};

fn run(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_culvert-server"))
        .args(args)
        .output()
        .expect("the program starts")
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
fn an_unknown_flag_is_named_with_exit_code_1() {
    let output = run(&["--no-such-flag"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("unknown flag: --no-such-flag"));
}

#[test]
fn token_authentication_names_a_missing_kubeconfig() {
    let output = run(&[
        "--uds-name=/nonexistent/front.socket",
        "--server-port=0",
        "--agent-namespace=kube-system",
        "--agent-service-account=konnectivity-agent",
        "--authentication-audience=system:konnectivity-server",
        "--kubeconfig=/nonexistent/kubeconfig",
    ]);
    assert_eq!(output.status.code(), Some(1));
    let text = stderr(&output);
    assert!(
        text.contains("kubeconfig /nonexistent/kubeconfig"),
        "{text}"
    );
}

#[test]
fn missing_agent_certificate_names_the_flag() {
    let dir = tempfile::tempdir().unwrap();
    let socket = format!("--uds-name={}", dir.path().join("front.socket").display());
    let output = run(&[&socket, "--server-port=0"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("--cluster-cert"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn allocator_settings_do_not_depend_on_the_build_folder() {
    let output = Command::new(env!("CARGO_BIN_EXE_culvert-server"))
        .arg("--version")
        .env("_RJEM_MALLOC_CONF", "stats_print:true")
        .output()
        .expect("the program starts");
    let text = stderr(&output);
    for setting in ["opt.narenas: 4", "opt.dirty_decay_ms: 2000"] {
        assert!(text.contains(setting), "{setting} is missing from {text}");
    }
}
