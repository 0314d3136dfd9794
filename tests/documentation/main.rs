//! Checks of the documents against the programs, and of the source text against the rules of the project.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

mod architecture;
mod layout;
mod programs;
mod prose;

use std::path::PathBuf;
use std::process::Command;

/// Returns the top folder of the repository.
fn root() -> PathBuf {
    let tests = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    tests.parent().unwrap().to_owned()
}

/// Returns cargo's description of the workspace, without other crates.
fn metadata() -> serde_json::Value {
    let mut command = Command::new(std::env::var("CARGO").unwrap_or("cargo".to_owned()));
    command.current_dir(root());
    command.args([
        "metadata",
        "--no-deps",
        "--offline",
        "--format-version",
        "1",
    ]);
    let output = command.output().expect("cargo metadata");
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}
