//! The images: content, equal bytes of two runs, links, errors, SBOMs.
//!
//! Most tests use stand-ins instead of the programs, because a static release build takes many minutes. A stand-in is
//! a static program that prints its own name. No test builds the real programs statically.

mod archive;
mod container;
mod stand_ins;

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use culvert_tests::process::{ours, outcome as run};
use culvert_tests::skip::skip;
use serde_json::Value;
use tempfile::TempDir;

use crate::root;

use self::archive::{Node, Unpacked, nodes};
use self::stand_ins::{ARCH, OTHER_ARCH, StandIns, has_tomllib, stand_ins};

/// Image names of `assemble`.
const IMAGES: [&str; 5] = ["server", "agent", "door", "node-tunnel", "all"];

/// Returns the content of `images.toml`.
fn description() -> Value {
    let script =
        "import json, sys, tomllib; print(json.dumps(tomllib.load(open(sys.argv[1], 'rb'))))";
    let file = root().join("deploy/images/images.toml");
    let text = run(Command::new("python3").args(["-c", script]).arg(file)).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        skip("not root: files of an image belong to root");
    }
    root
}

/// Returns a command that writes the archive of an image. `CI=true` of the caller has no meaning for the command.
fn assemble(stand_ins: &StandIns, image: &str, binaries: &Path, output: &Path) -> Command {
    let mut command = Command::new(root().join("deploy/images/assemble"));
    command.args(["--image", image, "--arch", ARCH, "--tag", "v1.2.3"]);
    command.arg("--binaries").arg(binaries);
    command.arg("--output").arg(output);
    command
        .arg("--ca-certificates")
        .arg(&stand_ins.certificates);
    command.arg("--sboms").arg(&stand_ins.sboms);
    command
}

/// Returns the file system that the description demands, by path. `content` is the expected content of a file.
fn expected(description: &Value, image: &str, stand_ins: &StandIns) -> BTreeMap<String, Node> {
    let read = |path: &Path| std::fs::read(path).unwrap();
    let programs = strings(&description["images"][image]["programs"]);
    let passwd = "root:x:0:0:root:/:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/:/sbin/nologin\n";
    let mut found = BTreeMap::from([
        (
            "/etc/passwd".to_owned(),
            Node::file(0o644, passwd.as_bytes()),
        ),
        (
            "/etc/group".to_owned(),
            Node::file(0o644, b"root:x:0:\nnonroot:x:65532:\n"),
        ),
        (
            "/etc/host.conf".to_owned(),
            Node::file(0o644, b"multi on\n"),
        ),
        (
            "/etc/ssl/certs/ca-certificates.crt".to_owned(),
            Node::file(0o644, &read(&stand_ins.certificates)),
        ),
        (
            "/usr/share/doc/culvert/LICENSE".to_owned(),
            Node::file(0o644, &read(&root().join("LICENSE"))),
        ),
        ("/tmp".to_owned(), Node::folder(0o1777)),
    ]);
    for folder in [
        "/etc",
        "/etc/ssl",
        "/etc/ssl/certs",
        "/usr",
        "/usr/bin",
        "/usr/share",
    ] {
        found.insert(folder.to_owned(), Node::folder(0o755));
    }
    for folder in ["/usr/share/doc", "/usr/share/doc/culvert"] {
        found.insert(folder.to_owned(), Node::folder(0o755));
    }
    for program in programs {
        let content = read(&stand_ins.binaries.join(&program));
        found.insert(format!("/usr/bin/{program}"), Node::file(0o755, &content));
        for link in strings(&description["programs"][&program]["links"]) {
            let target = match link.rsplit_once('/') {
                Some(("", _)) => format!("usr/bin/{program}"),
                _ => program.clone(),
            };
            found.insert(link, Node::link(&target));
        }
    }
    found
}

fn strings(list: &Value) -> Vec<String> {
    let list = list.as_array().unwrap().iter();
    list.map(|it| it.as_str().unwrap().to_owned()).collect()
}

#[test]
fn two_runs_write_the_same_bytes() {
    let Some(stand_ins) = stand_ins() else { return };
    let folder = TempDir::new().unwrap();
    // The same programs with other times and other modes.
    let copies = folder.path().join("copies");
    std::fs::create_dir(&copies).unwrap();
    for entry in std::fs::read_dir(&stand_ins.binaries).unwrap() {
        let entry = entry.unwrap();
        let copy = copies.join(entry.file_name());
        std::fs::write(&copy, std::fs::read(entry.path()).unwrap()).unwrap();
        std::fs::set_permissions(&copy, PermissionsExt::from_mode(0o600)).unwrap();
    }
    for image in IMAGES {
        let first = folder.path().join("first.tar");
        let second = folder.path().join("second.tar");
        run(&mut assemble(
            &stand_ins,
            image,
            &stand_ins.binaries,
            &first,
        ))
        .unwrap();
        run(&mut assemble(&stand_ins, image, &copies, &second)).unwrap();
        let [first, second] = [first, second].map(|path| std::fs::read(path).unwrap());
        assert!(
            first == second,
            "{image}: two runs wrote different archives"
        );
        let sboms = ["first.cdx.json", "second.cdx.json"].map(|name| folder.path().join(name));
        let [first, second] = sboms.map(|path| std::fs::read(path).unwrap());
        assert!(first == second, "{image}: two runs wrote different SBOMs");
    }
}

#[test]
fn images_have_exactly_the_described_content() {
    let Some(stand_ins) = stand_ins() else { return };
    if !is_root() {
        return;
    }
    let description = description();
    let listed: Vec<&String> = description["images"].as_object().unwrap().keys().collect();
    assert_eq!(listed.len(), IMAGES.len(), "images.toml: {listed:?}");
    for image in IMAGES {
        let folder = TempDir::new().unwrap();
        let file = folder.path().join("image.tar");
        let report = run(&mut assemble(&stand_ins, image, &stand_ins.binaries, &file)).unwrap();
        let unpacked = Unpacked::new(&file);
        assert_eq!(
            nodes(&unpacked.tree()),
            expected(&description, image, &stand_ins),
            "{image}"
        );

        let first = &description["images"][image]["programs"][0];
        let config = &unpacked.config["config"];
        assert_eq!(
            config["Entrypoint"][0],
            format!("/usr/bin/{}", first.as_str().unwrap())
        );
        assert_eq!(config["User"], "65532:65532");
        assert_eq!(
            config["Labels"]["org.opencontainers.image.version"],
            "v1.2.3"
        );
        assert_eq!(unpacked.config["architecture"], ARCH);
        let name = description["images"][image]["name"].as_str().unwrap();
        let names = &unpacked.descriptor["annotations"];
        assert_eq!(
            names["io.containerd.image.name"],
            format!("localhost/{name}:v1.2.3")
        );
        assert_eq!(names["org.opencontainers.image.ref.name"], "v1.2.3");
        let digest = unpacked.descriptor["digest"].as_str().unwrap();
        assert!(report.contains(digest), "{report}");
        assert!(report.contains("image.cdx.json"), "{report}");
    }
}

#[test]
fn stock_paths_start_the_right_program_as_the_user_of_the_image() {
    let Some(stand_ins) = stand_ins() else { return };
    if !is_root() {
        return;
    }
    let description = description();
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("image.tar");
    run(&mut assemble(&stand_ins, "all", &stand_ins.binaries, &file)).unwrap();
    let unpacked = Unpacked::new(&file);
    let mut started = 0;
    for (program, about) in description["programs"].as_object().unwrap() {
        let mut paths = strings(&about["links"]);
        paths.push(format!("/usr/bin/{program}"));
        for path in paths {
            let mut chroot = Command::new("chroot");
            chroot.arg("--userspec=65532:65532").arg(unpacked.tree());
            let printed = run(chroot.arg(&path).args(["--flag", "value"])).unwrap();
            assert_eq!(printed, format!("{program} --flag value\n"), "{path}");
            started += 1;
        }
        // A stand-in writes its name into /tmp, which thus is writable for the user.
        let mark = std::fs::metadata(unpacked.tree().join("tmp").join(program)).unwrap();
        assert_eq!(std::os::unix::fs::MetadataExt::uid(&mark), 65532);
    }
    assert_eq!(started, 11);
}

#[test]
fn programs_behave_the_same_under_the_names_of_stock_programs() {
    if !has_tomllib() {
        return;
    }
    let description = description();
    let folder = TempDir::new().unwrap();
    for (program, about) in description["programs"].as_object().unwrap() {
        let path = ours(program);
        for link in strings(&about["links"]) {
            let name = link.rsplit('/').next().unwrap();
            let link = folder.path().join(name);
            let _ = std::fs::remove_file(&link);
            std::os::unix::fs::symlink(&path, &link).unwrap();
            for arguments in [&["--help"][..], &["--no-such-flag"]] {
                // Usage lines have the name that was called.
                let output = |path: &Path| {
                    let output = Command::new(path).args(arguments).output().unwrap();
                    let texts = [output.stdout, output.stderr];
                    let texts = texts.map(|text| String::from_utf8(text).unwrap());
                    (output.status, texts.map(|text| text.replace(name, program)))
                };
                let (direct, linked) = (output(&path), output(&link));
                assert_eq!(linked, direct, "{program} as {name} {arguments:?}");
            }
        }
    }
}

/// Asserts that `assemble` refuses this agent, with these parts of the error, and writes no archive.
fn refuses(arch: &str, agent: Option<&[u8]>, parts: &[&str]) {
    let Some(stand_ins) = stand_ins() else { return };
    let folder = TempDir::new().unwrap();
    if let Some(content) = agent {
        std::fs::write(folder.path().join("culvert-agent"), content).unwrap();
    }
    let output = folder.path().join("image.tar");
    let mut command = assemble(&stand_ins, "agent", folder.path(), &output);
    let error = run(command.args(["--arch", arch])).unwrap_err();
    for part in parts {
        assert!(error.contains(part), "no \"{part}\" in: {error}");
    }
    assert_eq!(error.lines().count(), 1, "{error}");
    assert!(!output.exists());
}

#[test]
fn missing_program_is_an_error_with_the_build_command() {
    refuses(
        ARCH,
        None,
        &["culvert-agent is missing", "deploy/images/build"],
    );
}

#[test]
fn dynamic_program_is_an_error_with_the_flags_of_a_static_build() {
    // The test itself needs a loader.
    let dynamic = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    let parts = [
        "culvert-agent is dynamically linked",
        "target-feature=+crt-static",
    ];
    refuses(ARCH, Some(&dynamic), &parts);
}

#[test]
fn program_for_another_architecture_is_an_error() {
    let Some(stand_ins) = stand_ins() else { return };
    let content = std::fs::read(stand_ins.binaries.join("culvert-agent")).unwrap();
    let part = format!("is built for {ARCH}, not for {OTHER_ARCH}");
    refuses(OTHER_ARCH, Some(&content), &[&part]);
}

#[test]
fn files_that_are_not_programs_are_errors() {
    refuses(ARCH, Some(b"#!/bin/sh\n"), &["is not an ELF program"]);
    let Some(stand_ins) = stand_ins() else { return };
    let content = std::fs::read(stand_ins.binaries.join("culvert-agent")).unwrap();
    refuses(ARCH, Some(&content[..100]), &["is truncated"]);
}

#[test]
fn image_for_the_other_architecture_has_its_name() {
    let Some(stand_ins) = stand_ins() else { return };
    if !is_root() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let mut content = std::fs::read(stand_ins.binaries.join("culvert-agent")).unwrap();
    let machine: u16 = if OTHER_ARCH == "arm64" { 183 } else { 62 };
    content[18..20].copy_from_slice(&machine.to_le_bytes());
    std::fs::write(folder.path().join("culvert-agent"), content).unwrap();
    let file = folder.path().join("image.tar");
    let mut command = assemble(&stand_ins, "agent", folder.path(), &file);
    run(command.args(["--arch", OTHER_ARCH])).unwrap();
    let unpacked = Unpacked::new(&file);
    assert_eq!(unpacked.config["architecture"], OTHER_ARCH);
    assert_eq!(unpacked.descriptor["platform"]["architecture"], OTHER_ARCH);
}

#[test]
fn sbom_lists_every_program_with_its_packages() {
    let Some(stand_ins) = stand_ins() else { return };
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("image.tar");
    let report = run(&mut assemble(&stand_ins, "all", &stand_ins.binaries, &file)).unwrap();
    let read =
        |path: &Path| -> Value { serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap() };
    let sbom = read(&folder.path().join("image.cdx.json"));
    let root = &sbom["metadata"]["component"];
    assert_eq!(root["type"], "container");
    let digest = root["properties"][0]["value"].as_str().unwrap();
    assert!(report.contains(digest), "{report}");

    let components: BTreeMap<&str, &Value> = sbom["components"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| (one["bom-ref"].as_str().unwrap(), one))
        .collect();
    let mut programs = 0;
    for program in description()["programs"].as_object().unwrap().keys() {
        let own = read(&stand_ins.sboms.join(format!("{program}.cdx.json")));
        let reference = own["metadata"]["component"]["bom-ref"].as_str().unwrap();
        assert_eq!(components[reference]["type"], "application");
        assert_eq!(components[reference]["name"], program.as_str());
        for package in own["components"].as_array().unwrap() {
            let reference = package["bom-ref"].as_str().unwrap();
            assert!(components.contains_key(reference), "{program}: {reference}");
        }
        programs += 1;
    }
    assert_eq!(programs, 5);
    assert!(components.contains_key("ca-certificates"));
    for edge in sbom["dependencies"].as_array().unwrap() {
        for to in edge["dependsOn"].as_array().unwrap() {
            assert!(components.contains_key(to.as_str().unwrap()), "{to}");
        }
    }
}
