//! The stock programs and the Go driver, which uses a tunnel in the same way as kube-apiserver.
//!
//! The programs are built from `tests/interop` at first use. Without Go, tests print a message and pass; with
//! `CI=true`, they fail.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::Value;
use tokio::time::timeout;

use crate::process::Program;
use crate::skip::{find_program, skip};

/// Longest run of the driver: far more than any run needs.
const RUN_LIMIT: Duration = Duration::from_secs(120);

/// Builds of older releases, by version.
type Releases = HashMap<&'static str, &'static OnceLock<Option<Interop>>>;

/// Paths of the built programs of one release.
#[derive(Debug)]
pub struct Interop {
    /// Path of the stock server. No such file exists if only the release's client library is used.
    pub proxy_server: PathBuf,
    /// Path of the stock agent. No such file exists if only the release's client library is used.
    pub proxy_agent: PathBuf,
    /// Path of the driver.
    pub driver: PathBuf,
    /// Path of the program that runs many stock agents; only the newest release has one.
    pub agents: PathBuf,
}

impl Interop {
    /// Builds the programs of the newest release, once per process. If Go is missing, returns `None` and
    /// prints a message on stderr.
    ///
    /// # Panics
    /// If the build fails, or if Go is missing and `CI=true`.
    pub fn get() -> Option<&'static Self> {
        static NEWEST: OnceLock<Option<Interop>> = OnceLock::new();
        Self::once(&NEWEST, None)
    }

    /// Builds the programs of an older release, once per process, as [`get`](Self::get) does. The releases are
    /// the files in `tests/interop/versions`.
    ///
    /// # Panics
    /// If the build fails, or if Go is missing and `CI=true`.
    pub fn release(version: &'static str) -> Option<&'static Self> {
        static RELEASES: OnceLock<Mutex<Releases>> = OnceLock::new();
        let releases = RELEASES.get_or_init(Mutex::default);
        let cell = *releases.lock().entry(version).or_insert_with(|| {
            // One cell per version of the folder, for the whole process.
            Box::leak(Box::default())
        });
        Self::once(cell, Some(version))
    }

    fn once(cell: &'static OnceLock<Option<Self>>, version: Option<&str>) -> Option<&'static Self> {
        let built = cell.get_or_init(|| Self::build(version)).as_ref();
        if built.is_none() {
            skip("go not found");
        }
        built
    }

    fn build(version: Option<&str>) -> Option<Self> {
        find_program("go", [])?;
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("interop");
        let output = Command::new(dir.join("build"))
            .args(version)
            .stdin(Stdio::null())
            .output()
            .expect("starting tests/interop/build");
        assert!(
            output.status.success(),
            "tests/interop/build {}: {}\n{}",
            version.unwrap_or_default(),
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        let bin = dir.join("bin").join(version.unwrap_or_default());
        Some(Self {
            proxy_server: bin.join("proxy-server"),
            proxy_agent: bin.join("proxy-agent"),
            driver: bin.join("driver"),
            agents: bin.join("agents"),
        })
    }

    /// Runs the driver to its end and returns the result that the driver prints as its last line, successful
    /// (`"ok": true`) or not.
    ///
    /// # Panics
    /// If the driver prints no result, or does not exit within two minutes.
    pub async fn run<A: AsRef<str>>(&self, args: &[A]) -> Value {
        let args: Vec<&str> = args.iter().map(AsRef::as_ref).collect();
        let output = tokio::process::Command::new(&self.driver)
            .args(&args)
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output();
        let output = timeout(RUN_LIMIT, output).await;
        let output = output.unwrap_or_else(|_| panic!("driver {args:?} does not exit"));
        let output = output.expect("starting the driver");
        let stdout = String::from_utf8_lossy(&output.stdout);
        let last = stdout.lines().last().unwrap_or_default();
        serde_json::from_str(last).unwrap_or_else(|error| {
            let stderr = String::from_utf8_lossy(&output.stderr);
            panic!(
                "driver {args:?} ({}): {error} in {last:?}\n{stderr}",
                output.status
            )
        })
    }

    /// Starts the driver and leaves it running, for subcommands that read commands from stdin.
    ///
    /// # Panics
    /// If the driver cannot be started.
    pub fn start<A: AsRef<str>>(&self, args: &[A]) -> Program {
        Program::spawn(&self.driver, args.iter().map(AsRef::as_ref), &[])
    }
}
