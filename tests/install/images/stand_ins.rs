//! Small static programs in place of the release programs, and a cargo that "builds" them.

use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Weak};

use culvert_tests::skip::skip;
use parking_lot::Mutex;
use tempfile::TempDir;

use super::run;
use crate::root;

/// Names of the programs.
pub(super) const PROGRAMS: [&str; 5] = [
    "culvert",
    "culvert-agent",
    "culvert-node-tunnel",
    "culvert-nodeport-proxy",
    "culvert-server",
];

/// Architecture of this machine, in the words of images.
pub(super) const ARCH: &str = if cfg!(target_arch = "aarch64") {
    "arm64"
} else {
    "amd64"
};

/// An architecture that is not the one of this machine.
pub(super) const OTHER_ARCH: &str = if cfg!(target_arch = "aarch64") {
    "amd64"
} else {
    "arm64"
};

/// Prints its name and arguments, and writes a file with its name into `/tmp` if possible.
const SOURCE: &str = r#"
fn main() {
    let name = env!("STAND_IN");
    let words = std::iter::once(name.to_owned()).chain(std::env::args().skip(1));
    println!("{}", words.collect::<Vec<_>>().join(" "));
    if std::fs::metadata("/proc/self").is_err() {
        std::fs::write(format!("/tmp/{name}"), "").unwrap();
    }
}
"#;

/// Copies the stand-ins to the place of a release build. Other commands go to the real cargo.
const CARGO: &str = r#"#!/bin/sh
set -eu
here=$(dirname "$(realpath "$0")")
if [ "$1" != build ]; then
  # A version manager may have put other folders before this one.
  PATH=$(printf %s "$PATH" | tr : '\n' | grep -vxF "$here" | paste -sd:)
  export PATH
  exec cargo "$@"
fi
case "$RUSTFLAGS" in
  *"-C target-feature=+crt-static"*) ;;
  *) echo "not a static build: $RUSTFLAGS" >&2; exit 1 ;;
esac
case " $* " in
  *" --release --locked --target "*) ;;
  *) echo "unexpected arguments: $*" >&2; exit 1 ;;
esac
while [ "$1" != --target ]; do shift; done
case "$2" in aarch64-*) pages=16 ;; *) pages="" ;; esac
[ "${JEMALLOC_SYS_WITH_LG_PAGE:-}" = "$pages" ] || { echo "wrong size of pages for $2" >&2; exit 1; }
mkdir -p "${CARGO_TARGET_DIR:-target}/$2/release"
cp "$here/programs/"* "${CARGO_TARGET_DIR:-target}/$2/release/"
"#;

/// A rustup without a target for another architecture.
const RUSTUP: &str = "#!/bin/sh\necho no-such-target\n";

/// Files that all tests share.
pub(super) struct StandIns {
    /// Folder with `cargo`, `rustup` and the folder `programs`.
    pub(super) tools: PathBuf,
    /// Folder with a stand-in for each program.
    pub(super) binaries: PathBuf,
    /// A file of CA certificates.
    pub(super) certificates: PathBuf,
    /// SBOMs of the real programs.
    pub(super) sboms: PathBuf,
    /// The parent of the other folders, except `sboms`.
    _own: TempDir,
}

/// Returns the stand-ins. All tests that run at the same time share them. Without rustc or Python 3.11, prints a
/// message and returns `None`.
///
/// # Panics
/// If the stand-ins cannot be made, or if rustc or Python is missing and `CI=true`.
pub(super) fn stand_ins() -> Option<Arc<StandIns>> {
    static SHARED: Mutex<Weak<StandIns>> = Mutex::new(Weak::new());
    let mut shared = SHARED.lock();
    if let Some(stand_ins) = shared.upgrade() {
        return Some(stand_ins);
    }
    if !has_tomllib() {
        return None;
    }
    if let Err(why) = run(rustc().arg("--version")) {
        skip(&format!("no rustc: {why}"));
        return None;
    }
    let stand_ins = Arc::new(make(TempDir::new().unwrap()));
    *shared = Arc::downgrade(&stand_ins);
    Some(stand_ins)
}

/// Returns true if Python can read `images.toml`. Otherwise reports that a test is skipped.
pub(super) fn has_tomllib() -> bool {
    let imported = run(Command::new("python3").args(["-c", "import tomllib"]));
    imported
        .inspect_err(|why| skip(&format!("no Python 3.11: {}", why.trim())))
        .is_ok()
}

fn rustc() -> Command {
    Command::new(std::env::var_os("RUSTC").unwrap_or("rustc".into()))
}

fn make(own: TempDir) -> StandIns {
    let folder = own.path();
    let tools = folder.join("tools");
    let binaries = tools.join("programs");
    std::fs::create_dir_all(&binaries).unwrap();
    let source = folder.join("stand_in.rs");
    std::fs::write(&source, SOURCE).unwrap();
    for program in PROGRAMS {
        let mut command = rustc();
        command.args([
            "-C",
            "target-feature=+crt-static",
            "-C",
            "opt-level=1",
            "-g",
        ]);
        command.args(["--edition", "2024", "--target", &target()]);
        command.arg(&source).arg("-o").arg(binaries.join(program));
        run(command.env("STAND_IN", program)).unwrap();
    }
    for (name, text) in [("cargo", CARGO), ("rustup", RUSTUP)] {
        let path = tools.join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755))
            .unwrap();
    }
    let certificates = folder.join("ca.crt");
    let text = "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n";
    std::fs::write(&certificates, text).unwrap();
    run(Command::new(root().join(".ci/sbom")).current_dir(root())).unwrap();
    StandIns {
        tools,
        binaries,
        certificates,
        sboms: root().join("target/sbom"),
        _own: own,
    }
}

/// Returns Rust's name of this machine.
pub(super) fn target() -> String {
    format!("{}-unknown-linux-gnu", std::env::consts::ARCH)
}
