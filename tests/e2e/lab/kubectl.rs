//! Calls of `kubectl`.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Map, Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;
use tokio::time::timeout;

/// Longest time for one call. Requests of kube-apiserver to a webhook or a kubelet end before.
const LIMIT: Duration = Duration::from_secs(90);

/// The program `kubectl` with the identity of one user.
#[derive(Debug, Clone)]
pub(crate) struct Kubectl {
    /// Path of the program.
    pub(crate) program: PathBuf,
    /// Kubeconfig of the user.
    pub(crate) kubeconfig: PathBuf,
}

impl Kubectl {
    /// Returns a command with the kubeconfig and the arguments.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("--kubeconfig").arg(&self.kubeconfig).args(args);
        // The cache of discovery is below the home directory.
        if let Some(dir) = self.kubeconfig.parent() {
            command.env("HOME", dir);
        }
        command.stdin(Stdio::null()).kill_on_drop(true);
        command
    }

    /// Runs a command with `input` and returns its output.
    ///
    /// # Errors
    /// Returns the error output if the command fails.
    pub(crate) async fn bytes(&self, args: &[&str], input: &[u8]) -> Result<Vec<u8>, String> {
        let mut command = self.command(args);
        command.stdin(Stdio::piped());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("kubectl");
        let mut stdin = child.stdin.take().expect("a pipe");
        let run = async {
            let write = async move { stdin.write_all(input).await.ok() };
            tokio::join!(write, child.wait_with_output()).1
        };
        let Ok(output) = timeout(LIMIT, run).await else {
            return Err(format!("kubectl {args:?} did not end within {LIMIT:?}"));
        };
        let output = output.expect("the output of kubectl");
        if output.status.success() {
            Ok(output.stdout)
        } else {
            Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
        }
    }

    /// Runs a command and returns its output as text.
    ///
    /// # Errors
    /// Returns the error output if the command fails.
    pub(crate) async fn run(&self, args: &[&str]) -> Result<String, String> {
        let bytes = self.bytes(args, &[]).await?;
        String::from_utf8(bytes).map_err(|error| error.to_string())
    }

    /// Runs a command that must succeed.
    pub(crate) async fn must(&self, args: &[&str]) -> String {
        let run = self.run(args).await;
        run.unwrap_or_else(|why| panic!("kubectl {args:?}: {why}"))
    }

    /// Creates or changes the objects of a YAML or JSON text.
    pub(crate) async fn apply(&self, objects: &str) {
        let run = self.bytes(&["apply", "-f", "-"], objects.as_bytes()).await;
        run.unwrap_or_else(|why| panic!("kubectl apply: {why}\n{objects}"));
    }

    /// Returns an object, or a list of objects.
    ///
    /// # Errors
    /// Returns the error output if the command fails.
    pub(crate) async fn get(&self, args: &[&str]) -> Result<Value, String> {
        let words: Vec<&str> = ["get", "-o", "json"].iter().chain(args).copied().collect();
        let text = self.run(&words).await?;
        serde_json::from_str(&text).map_err(|error| error.to_string())
    }
}

/// Creates or changes a Secret with the content of files.
pub(crate) async fn apply_secret(
    kubectl: &Kubectl,
    namespace: &str,
    name: &str,
    files: &[(&str, &PathBuf)],
) {
    let encode = |path: &PathBuf| BASE64_STANDARD.encode(std::fs::read(path).expect("a file"));
    let data: Map<String, Value> = files
        .iter()
        .map(|(name, path)| ((*name).to_owned(), json!(encode(path))))
        .collect();
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace},
        "data": data,
    });
    kubectl.apply(&secret.to_string()).await;
}
