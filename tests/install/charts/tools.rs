//! helm and the other judges of charts. `tests/install/tools/build` builds them.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use culvert_tests::envoy::skip;

/// The built programs.
pub(super) struct Tools {
    bin: PathBuf,
}

impl Tools {
    /// Builds the programs, once per process. If the build fails, returns `None` and prints the reason.
    ///
    /// # Panics
    /// If the build fails and `CI=true`.
    pub(super) fn get() -> Option<&'static Self> {
        static TOOLS: OnceLock<Result<Tools, String>> = OnceLock::new();
        let tools = TOOLS.get_or_init(|| {
            let folder = crate::root().join("tests/install/tools");
            let mut build = Command::new(folder.join("build"));
            let error = |text: String| text.lines().last().unwrap_or_default().to_owned();
            run(&mut build).map_err(error)?;
            let bin = folder.join("bin");
            Ok(Self { bin })
        });
        tools.as_ref().inspect_err(|why| skip(why)).ok()
    }

    /// Returns the path of a program.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.bin.join(name)
    }

    /// Returns a command that runs a program.
    pub(super) fn program(&self, name: &str) -> Command {
        Command::new(self.path(name))
    }

    /// Returns a command that runs helm, without the user's settings and without a cluster.
    pub(super) fn helm(&self) -> Command {
        let mut command = self.program("helm");
        for name in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
            command.env(name, self.path("helm-home"));
        }
        command.env_remove("KUBECONFIG");
        command
    }

    /// Returns a command that checks objects against the schemas of Kubernetes.
    pub(super) fn kubernetes_validate(&self) -> Command {
        let mut command = Command::new("python3");
        command.env("PYTHONPATH", self.path("python"));
        command.arg(self.path("python/bin/kubernetes-validate"));
        command
    }
}

/// Runs a command to its end, and returns its output on stdout and stderr. The output is the error if the command
/// fails.
pub(super) fn run(command: &mut Command) -> Result<String, String> {
    let output = command.stdin(Stdio::null()).output();
    let output = output.map_err(|error| error.to_string())?;
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    if output.status.success() {
        Ok(text)
    } else {
        Err(text)
    }
}
