//! Calls of helm.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use serde_json::Value;
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;

/// The program `helm`, with the identity of a cluster administrator.
#[derive(Debug, Clone)]
pub(crate) struct Helm {
    /// Path of the program.
    pub(super) program: PathBuf,
    /// Kubeconfig of the user.
    pub(super) kubeconfig: PathBuf,
    /// Folder for helm's own files.
    pub(super) home: PathBuf,
    /// Namespace of the releases.
    pub(crate) namespace: &'static str,
}

impl Helm {
    /// Installs or changes a release of a chart of this repository, and waits until its objects are ready.
    pub(crate) async fn install(&self, release: &str, chart: &str, values: &Value) {
        self.upgrade(release, chart, values, &["--wait", "--timeout=2m"])
            .await;
    }

    /// Installs or changes a release of a chart of this repository.
    pub(crate) async fn apply(&self, release: &str, chart: &str, values: &Value) {
        self.upgrade(release, chart, values, &[]).await;
    }

    /// Runs the tests of a release, which must pass.
    pub(crate) async fn test(&self, release: &str) {
        let words = ["test", release];
        let said = self.run(&words, &["--timeout=2m"], &Value::Null).await;
        assert!(said.contains("Succeeded"), "{said}");
    }

    async fn upgrade(&self, release: &str, chart: &str, values: &Value, more: &[&str]) {
        let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
        let chart = tests.join("../../deploy/helm").join(chart);
        let chart = chart.display().to_string();
        let words = ["upgrade", "--install", release, &chart, "--values=-"];
        let said = self.run(&words, more, values).await;
        // The namespace warns of pods outside the profile "restricted".
        assert!(!said.contains("would violate"), "{said}");
    }

    /// Removes a release, and waits until its objects are gone.
    pub(crate) async fn uninstall(&self, release: &str) {
        let words = ["uninstall", release];
        self.run(&words, &["--wait", "--timeout=2m"], &Value::Null)
            .await;
    }

    async fn run(&self, words: &[&str], more: &[&str], values: &Value) -> String {
        let mut command = Command::new(&self.program);
        command.args(words).args(more);
        command.arg(format!("--namespace={}", self.namespace));
        command.arg("--kubeconfig").arg(&self.kubeconfig);
        for name in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
            command.env(name, &self.home);
        }
        command.stdin(Stdio::piped()).kill_on_drop(true);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("helm");
        let mut stdin = child.stdin.take().expect("a pipe");
        let written = stdin.write_all(values.to_string().as_bytes()).await;
        drop(stdin);
        let output = child.wait_with_output().await.expect("the output of helm");
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text).into_owned();
        assert!(
            output.status.success(),
            "helm {words:?}: {written:?} {text}"
        );
        text
    }
}
