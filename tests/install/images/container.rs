//! The build script, and the Containerfile under buildah.
//!
//! Both run completely, with one exception: `cargo build` copies stand-ins.

use std::path::{Path, PathBuf};
use std::process::Command;

use culvert_tests::skip::skip;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::archive::nodes;
use super::stand_ins::{ARCH, OTHER_ARCH, PROGRAMS, StandIns, stand_ins};
use super::{IMAGES, is_root, root, run};

/// Runs `deploy/images/build` with the cargo of the stand-ins, and returns its output.
fn build(stand_ins: &StandIns, folder: &Path) -> String {
    let path = std::env::var("PATH").unwrap();
    let mut command = Command::new(root().join("deploy/images/build"));
    command.env("PATH", format!("{}:{path}", stand_ins.tools.display()));
    command.env("CARGO_TARGET_DIR", folder.join("target"));
    // Flags of the developer must not replace the flags of the script.
    command.env("RUSTFLAGS", "-C target-cpu=native");
    command.env("CARGO_ENCODED_RUSTFLAGS", "-Copt-level=0");
    // A path is relative to the folder of the caller.
    command.current_dir(folder);
    command.args(["--tag", "v1.2.3", "--output", "images"]);
    command
        .arg("--ca-certificates")
        .arg(&stand_ins.certificates);
    run(&mut command).unwrap()
}

fn has_objcopy() -> bool {
    let found = Command::new("objcopy").arg("--version").output().is_ok();
    if !found {
        skip("no objcopy");
    }
    found
}

#[test]
fn build_writes_all_images_with_debug_symbols_in_files_of_their_own() {
    let Some(stand_ins) = stand_ins() else { return };
    if !has_objcopy() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let report = build(&stand_ins, folder.path());
    let images = folder.path().join("images");
    for image in IMAGES {
        for ending in ["tar", "cdx.json"] {
            let file = images.join(format!("culvert-{image}-{ARCH}.{ending}"));
            assert!(file.is_file(), "{report}");
        }
        let file = format!("culvert-{image}-{ARCH}.tar: ");
        let line = report
            .lines()
            .find(|line| line.contains(&file))
            .expect(&report);
        assert!(line.contains(" bytes unpacked, sha256:"), "{line}");
    }
    let left_out: Vec<&str> = report
        .lines()
        .filter(|line| line.contains(OTHER_ARCH))
        .collect();
    assert_eq!(left_out.len(), 1, "{report}");
    assert!(left_out[0].starts_with(&format!(
        "no images for {OTHER_ARCH}: the target is missing: run rustup target add"
    )));

    for program in PROGRAMS {
        let stripped = images.join(ARCH).join(program);
        let debug = images
            .join(ARCH)
            .join("debug")
            .join(format!("{program}.debug"));
        let sections = |path: &Path| run(Command::new("objdump").arg("-h").arg(path)).unwrap();
        assert!(!sections(&stripped).contains(".debug_info"));
        assert!(sections(&stripped).contains(".gnu_debuglink"));
        assert!(sections(&debug).contains(".debug_info"));
        let printed = run(Command::new(&stripped).arg("--flag")).unwrap();
        assert_eq!(printed, format!("{program} --flag\n"));
    }
}

#[test]
fn build_for_an_architecture_without_tools_is_an_error() {
    let Some(stand_ins) = stand_ins() else { return };
    let path = std::env::var("PATH").unwrap();
    let folder = TempDir::new().unwrap();
    let mut command = Command::new(root().join("deploy/images/build"));
    command.env("PATH", format!("{}:{path}", stand_ins.tools.display()));
    command
        .args(["--arch", OTHER_ARCH, "--output"])
        .arg(folder.path());
    let error = run(&mut command).unwrap_err();
    assert!(
        error.starts_with(&format!("build: {OTHER_ARCH}: the target is missing")),
        "{error}"
    );
    let error =
        run(Command::new(root().join("deploy/images/build")).args(["--arch", "mips"])).unwrap_err();
    assert!(error.contains("unknown architecture \"mips\""), "{error}");
}

#[test]
fn build_checks_the_ca_certificates_first() {
    let folder = TempDir::new().unwrap();
    let mut command = Command::new(root().join("deploy/images/build"));
    command.current_dir(folder.path());
    let error = run(command.args(["--ca-certificates", "missing.crt"])).unwrap_err();
    let start = "build: cannot read the CA certificates in /";
    assert!(error.contains(start), "{error}");
    assert!(
        error.contains("/missing.crt; set --ca-certificates"),
        "{error}"
    );
}

/// Buildah with a storage of its own.
struct Buildah {
    folder: TempDir,
}

impl Buildah {
    /// Returns `None` if buildah cannot run here.
    fn new() -> Option<Self> {
        if Command::new("buildah").arg("--version").output().is_err() {
            skip("buildah not found");
            return None;
        }
        let folder = TempDir::new().unwrap();
        std::fs::create_dir(folder.path().join("tmp")).unwrap();
        is_root().then_some(Self { folder })
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new("buildah");
        let storage = |name: &str| self.folder.path().join(name);
        command.env("TMPDIR", storage("tmp"));
        command.arg("--root").arg(storage("root"));
        command.arg("--runroot").arg(storage("run"));
        command.args(["--storage-driver", "vfs"]).args(words);
        command
    }

    /// Builds the image that stands for the official Rust image: the programs of this machine, and the cargo of the
    /// stand-ins.
    fn make_builder(&self, stand_ins: &StandIns) {
        let context = self.folder.path().join("builder");
        let top = context.join("top");
        for folder in [
            "usr",
            "etc/alternatives",
            "etc/ssl/certs",
            "tmp",
            "dev",
            "proc",
            "sys",
            "root",
        ] {
            std::fs::create_dir_all(top.join(folder)).unwrap();
        }
        for link in ["bin", "sbin", "lib", "lib64"] {
            std::os::unix::fs::symlink(format!("usr/{link}"), top.join(link)).unwrap();
        }
        std::fs::write(top.join("etc/passwd"), "root:x:0:0:root:/root:/bin/sh\n").unwrap();
        let certificates = top.join("etc/ssl/certs/ca-certificates.crt");
        std::fs::copy(&stand_ins.certificates, certificates).unwrap();
        run(Command::new("cp")
            .arg("-a")
            .arg(&stand_ins.tools)
            .arg(top.join("tools")))
        .unwrap();
        let text = "FROM scratch\nCOPY top/ /\nENV PATH=/tools:/usr/bin HOME=/root\n";
        std::fs::write(context.join("Containerfile"), text).unwrap();
        let words = [
            "bud",
            "--isolation",
            "chroot",
            "--tag",
            "localhost/builder:1",
        ];
        run(self.command(&words).arg(&context)).unwrap();
    }

    /// Builds a target of the Containerfile.
    fn make_image(&self, target: &str) {
        let tag = format!("localhost/{target}:1");
        let mut command =
            self.command(&["bud", "--isolation", "chroot", "--pull-never", "--layers"]);
        command.args(["--tag", &tag, "--target", target]);
        command.args([
            "--build-arg",
            "BUILDER=localhost/builder:1",
            "--build-arg",
            "TAG=v1.2.3",
        ]);
        command.args([
            "-v",
            "/usr:/usr:ro",
            "-v",
            "/etc/alternatives:/etc/alternatives:ro",
        ]);
        command
            .arg("-f")
            .arg(root().join("deploy/images/Containerfile"));
        run(command.arg(root())).unwrap();
    }

    /// Returns the folder with the file system of an image, and its configuration.
    fn open(&self, image: &str) -> (PathBuf, Value) {
        let container = run(&mut self.command(&["from", "--pull-never", image])).unwrap();
        let folder = run(&mut self.command(&["mount", container.trim()])).unwrap();
        let about = run(&mut self.command(&["inspect", "--type", "image", image])).unwrap();
        let about: Value = serde_json::from_str(&about).unwrap();
        let image = &about["OCIv1"];
        let mut config = image["config"].clone();
        let labels = config["Labels"].as_object_mut().unwrap();
        labels.remove("io.buildah.version");
        (
            folder.trim().into(),
            json!({ "config": config, "architecture": image["architecture"], "os": image["os"] }),
        )
    }
}

impl Drop for Buildah {
    fn drop(&mut self) {
        let _ = self.command(&["rm", "--all"]).output();
    }
}

#[test]
fn containerfile_builds_the_same_images_as_assemble() {
    let Some(stand_ins) = stand_ins() else { return };
    let Some(buildah) = Buildah::new() else {
        return;
    };
    if !has_objcopy() {
        return;
    }
    let folder = TempDir::new().unwrap();
    build(&stand_ins, folder.path());
    buildah.make_builder(&stand_ins);
    for image in IMAGES {
        buildah.make_image(image);
        let file = format!("images/culvert-{image}-{ARCH}.tar");
        let archive = format!("oci-archive:{}", folder.path().join(file).display());
        let pulled = run(&mut buildah.command(&["pull", "--quiet", &archive])).unwrap();
        let (tree, config) = buildah.open(&format!("localhost/{image}:1"));
        let (own_tree, own_config) = buildah.open(pulled.trim());
        assert_eq!(nodes(&tree), nodes(&own_tree), "{image}");
        assert_eq!(config, own_config, "{image}");
        assert!(nodes(&tree).contains_key("/usr/bin"), "{image}");
    }
}
