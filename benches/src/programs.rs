//! Our programs, the stock programs, and the endpoint of idle connections.

use std::net::SocketAddr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use culvert_tests::interop::Interop;
use culvert_tests::metrics::http_get;
use culvert_tests::{Program, eventually};
use tempfile::TempDir;

use crate::agents::AGENTS;
use crate::endpoint::{ENDPOINT, LISTENING};
use crate::harness::harness;
use crate::names::{AGENT, NODE, PROXY, SERVER};

/// Time limit for a program to become ready, and for the endpoint to print its address.
const START_LIMIT: Duration = Duration::from_secs(20);

/// The programs to start.
#[derive(Debug)]
pub(crate) struct Programs {
    /// Folder of our programs and of this program.
    ours: PathBuf,
    /// Folder with links to this program: the harness starts files, not subcommands.
    names: TempDir,
    /// The stock programs and the Go driver. `None` if Go is not installed.
    pub stock: Option<&'static Interop>,
}

impl Programs {
    /// Builds our programs with the profile of this program, and the stock programs if Go is installed.
    /// Prints a line to stderr if Go is missing. Panics if the stock programs do not build.
    pub(crate) fn find() -> anyhow::Result<Self> {
        Ok(Self {
            stock: Interop::get(),
            ..Self::ours()?
        })
    }

    /// Builds our programs only.
    pub(crate) fn ours() -> anyhow::Result<Self> {
        let this = std::env::current_exe().context("cannot find the path of this program")?;
        Self::at(build(&this)?)
    }

    /// Uses our programs in the folder `ours`.
    pub(crate) fn at(ours: PathBuf) -> anyhow::Result<Self> {
        let this = std::env::current_exe().context("cannot find the path of this program")?;
        let names = tempfile::Builder::new()
            .prefix("culvert-bench-")
            .tempdir()?;
        for name in [ENDPOINT, AGENTS] {
            symlink(&this, names.path().join(name))
                .with_context(|| format!("cannot create the link {name}"))?;
        }
        Ok(Self {
            ours,
            names,
            stock: None,
        })
    }

    /// Returns the path of one of our programs.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.ours.join(name)
    }

    /// Returns the path of the program that runs many agents of ours.
    pub(crate) fn agents(&self) -> PathBuf {
        self.names.path().join(AGENTS)
    }

    /// Starts one of our programs, and waits until its listener `health` says that the program is ready.
    ///
    /// # Panics
    /// If the program is not ready in time.
    pub(crate) async fn start(&self, name: &str, args: &[String], health: SocketAddr) -> Program {
        let program = Program::spawn(self.path(name), args, &[]);
        eventually(&format!("{name} is ready"), START_LIMIT, async || {
            let (status, _, body) = http_get(health, "/readyz").await?;
            ensure!(status.is_success(), "{status} {body:?}");
            anyhow::Ok(())
        })
        .await;
        program
    }

    /// Starts the endpoint of idle connections and returns its address.
    pub(crate) async fn endpoint(&self) -> anyhow::Result<(Program, SocketAddr)> {
        let path = self.names.path().join(ENDPOINT);
        let starting = async {
            let program = Program::spawn(path, [""; 0], &[]);
            let line = program.wait_for_log(LISTENING, START_LIMIT).await;
            (program, line)
        };
        let (program, line) = harness(starting).await?;
        let address = line.trim_start_matches(LISTENING).parse();
        Ok((
            program,
            address.context("cannot parse the address of the endpoint")?,
        ))
    }
}

/// Builds our programs with Cargo into the folder of `this` program, and returns that folder. The shipped
/// programs are measured, because a larger program that contains all of them would use other memory pages.
fn build(this: &Path) -> anyhow::Result<PathBuf> {
    let folder = this
        .parent()
        .context("cannot find the folder of this program")?;
    let Some(cargo) = std::env::var_os("CARGO") else {
        let missing = [SERVER, AGENT, PROXY, NODE]
            .into_iter()
            .find(|name| !folder.join(name).exists());
        return match missing {
            Some(name) => bail!(
                "{name} is not in the folder of this program; start this program with `cargo run --release -p culvert-bench`"
            ),
            None => Ok(folder.to_owned()),
        };
    };
    eprintln!("building our programs");
    let mut command = Command::new(cargo);
    command.args(["build", "--quiet", "--locked"]);
    let packages = [SERVER, AGENT, "culvert-door", NODE];
    command.args(packages.map(|package| format!("--package={package}")));
    command.current_dir(env!("CARGO_MANIFEST_DIR"));
    command.arg("--target-dir").args(folder.parent());
    if folder.ends_with("release") {
        command.arg("--release");
    }
    // `cargo run` sets these variables for this program. The build script of ring depends on some of them, so
    // keeping them would rebuild ring and its dependents, now and in the next run.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["CARGO_PKG_", "CARGO_MANIFEST_", "OUT_DIR"]
            .iter()
            .any(|start| text.starts_with(start))
        {
            command.env_remove(name);
        }
    }
    ensure!(
        command.status()?.success(),
        "cargo failed to build our programs"
    );
    Ok(folder.to_owned())
}
