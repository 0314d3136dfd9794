//! Output that cannot be written.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};

const CLUSTER: &str = "\
clusterID: abc123
kubernetesVersion: 1.36.3
externalName: abc123.seed.example.com
addressIP: 192.0.2.10
nodePorts: {apiserver: 31000, konnectivityServer: 31001}
spec: {exposeStrategy: NodePort}
";

/// Returns `culvert render` with a cluster file.
fn render(folder: &tempfile::TempDir) -> Command {
    let file = folder.path().join("cluster.yaml");
    std::fs::write(&file, CLUSTER).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_culvert"));
    command.arg("render").arg(file);
    command
}

#[test]
fn full_disk_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let full = File::options().write(true).open("/dev/full").unwrap();
    let output = render(&folder).stdout(full).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    let reason = "Error: cannot write to the standard output: No space left on device";
    assert!(errors.contains(reason), "{errors}");
}

#[test]
fn reader_that_closes_its_pipe_is_no_error() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = render(&folder);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    drop(child.stdout.take());
    let errors = BufReader::new(child.stderr.take().unwrap());
    let lines: Vec<String> = errors.lines().map(Result::unwrap).collect();
    assert_eq!(child.wait().unwrap().code(), Some(0), "{lines:?}");
    assert!(
        !lines.iter().any(|line| line.starts_with("Error")),
        "{lines:?}"
    );
}
