//! The charts, and the programs that judge them: helm and others, built by `tests/install/tools/build`.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use crate::skip::skip;

/// The charts, and the image of each in `deploy/images/images.toml`.
pub const CHARTS: [(&str, &str); 4] = [
    ("culvert-agent", "agent"),
    ("culvert-door", "door"),
    ("culvert-node-tunnel", "node-tunnel"),
    ("culvert-server", "server"),
];

/// Returns the top folder of the repository.
pub fn root() -> PathBuf {
    let tests = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    tests.parent().unwrap().to_owned()
}

/// Returns a path below the folder `deploy`.
pub fn deploy(path: &str) -> PathBuf {
    root().join("deploy").join(path)
}

/// Returns the files of a folder with the extension `yaml`, sorted.
///
/// # Panics
/// If the folder has no such file.
pub fn yaml_files(folder: PathBuf) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(&folder).unwrap();
    let files = entries.map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> = files
        .filter(|file| file.extension().is_some_and(|it| it == "yaml"))
        .collect();
    files.sort();
    assert!(!files.is_empty(), "no YAML file in {}", folder.display());
    files
}

/// Returns the values files of a chart, sorted.
pub fn values_files(chart: &str) -> Vec<PathBuf> {
    yaml_files(deploy("helm").join(chart).join("ci"))
}

/// The built programs.
#[derive(Debug)]
pub struct Tools {
    bin: PathBuf,
}

impl Tools {
    /// Builds the programs, once per process. If the build fails, returns `None` and prints the reason.
    ///
    /// # Panics
    /// If the build fails and `CI=true`.
    pub fn get() -> Option<&'static Self> {
        static TOOLS: OnceLock<Result<Tools, String>> = OnceLock::new();
        let tools = TOOLS.get_or_init(|| {
            let folder = root().join("tests/install/tools");
            let mut build = Command::new(folder.join("build"));
            let error = |text: String| text.lines().last().unwrap_or_default().to_owned();
            run(&mut build).map_err(error)?;
            let bin = folder.join("bin");
            Ok(Self { bin })
        });
        tools.as_ref().inspect_err(|why| skip(why)).ok()
    }

    /// Returns the path of a program.
    pub fn path(&self, name: &str) -> PathBuf {
        self.bin.join(name)
    }

    /// Returns a command that runs a program.
    pub fn program(&self, name: &str) -> Command {
        Command::new(self.path(name))
    }

    /// Returns a command that runs helm, without the user's settings and without a cluster.
    pub fn helm(&self) -> Command {
        let mut command = self.program("helm");
        for name in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
            command.env(name, self.path("helm-home"));
        }
        command.env_remove("KUBECONFIG");
        command
    }

    /// Returns a command that checks objects against the schemas of Kubernetes.
    pub fn kubernetes_validate(&self) -> Command {
        let mut command = Command::new("python3");
        command.env("PYTHONPATH", self.path("python"));
        command.arg(self.path("python/bin/kubernetes-validate"));
        command
    }
}

/// Runs a command to its end, and returns its output on stdout and stderr.
///
/// # Errors
/// Returns the output if the command fails.
pub fn run(command: &mut Command) -> Result<String, String> {
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
