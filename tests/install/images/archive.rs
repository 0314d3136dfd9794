//! Reading an OCI archive and a file system, independently of `assemble`.

use std::collections::BTreeMap;
use std::fmt;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

use super::run;

/// One file, folder or link, without its times.
#[derive(PartialEq, Eq)]
pub(super) struct Node {
    mode: u32,
    owner: (u32, u32),
    kind: Kind,
}

#[derive(PartialEq, Eq)]
enum Kind {
    File(Vec<u8>),
    Folder,
    Link(PathBuf),
}

impl Node {
    /// A file that belongs to root.
    pub(super) fn file(mode: u32, content: &[u8]) -> Self {
        Self::of_root(mode, Kind::File(content.to_owned()))
    }

    /// A folder that belongs to root.
    pub(super) fn folder(mode: u32) -> Self {
        Self::of_root(mode, Kind::Folder)
    }

    /// A symbolic link that belongs to root.
    pub(super) fn link(target: &str) -> Self {
        Self::of_root(0o777, Kind::Link(target.into()))
    }

    fn of_root(mode: u32, kind: Kind) -> Self {
        let owner = (0, 0);
        Self { mode, owner, kind }
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:o} {:?} ", self.mode, self.owner)?;
        match &self.kind {
            Kind::File(content) => write!(f, "file of {} bytes", content.len()),
            Kind::Folder => f.write_str("folder"),
            Kind::Link(target) => write!(f, "-> {}", target.display()),
        }
    }
}

/// Returns everything below a folder, by absolute path within the folder.
pub(super) fn nodes(folder: &Path) -> BTreeMap<String, Node> {
    let mut found = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            let about = path.symlink_metadata().unwrap();
            let kind = if about.is_dir() {
                folders.push(path.clone());
                Kind::Folder
            } else if about.is_symlink() {
                Kind::Link(path.read_link().unwrap())
            } else {
                Kind::File(std::fs::read(&path).unwrap())
            };
            let node = Node {
                mode: about.permissions().mode() & 0o7777,
                owner: (about.uid(), about.gid()),
                kind,
            };
            let path = path.strip_prefix(folder).unwrap().display();
            found.insert(format!("/{path}"), node);
        }
    }
    found
}

/// An unpacked archive with one image of one layer.
pub(super) struct Unpacked {
    folder: TempDir,
    /// The descriptor of the manifest, from the index.
    pub(super) descriptor: Value,
    /// The configuration of the image.
    pub(super) config: Value,
}

impl Unpacked {
    /// Unpacks an archive as root.
    ///
    /// # Panics
    /// If the archive is malformed: wrong sizes, wrong digests, several images or layers.
    pub(super) fn new(archive: &Path) -> Self {
        let folder = TempDir::new().unwrap();
        for name in ["archive", "tree"] {
            std::fs::create_dir(folder.path().join(name)).unwrap();
        }
        // A TempDir is private; the user of an image must be able to enter the tree.
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let archived = folder.path().join("archive");
        run(Command::new("tar")
            .arg("-xf")
            .arg(archive)
            .arg("-C")
            .arg(&archived))
        .unwrap();
        let read = |path: &Path| -> Value {
            serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
        };
        assert_eq!(
            read(&archived.join("oci-layout"))["imageLayoutVersion"],
            "1.0.0"
        );
        let index = read(&archived.join("index.json"));
        let descriptor = only(&index["manifests"]).clone();
        let manifest = read(&blob(&archived, &descriptor));
        let config = read(&blob(&archived, &manifest["config"]));
        let layer = blob(&archived, only(&manifest["layers"]));
        let mut tar = Command::new("tar");
        tar.args(["--same-owner", "--numeric-owner", "-xzpf"])
            .arg(layer);
        run(tar.arg("-C").arg(folder.path().join("tree"))).unwrap();
        Self {
            folder,
            descriptor,
            config,
        }
    }

    /// Returns the folder with the file system of the image.
    pub(super) fn tree(&self) -> PathBuf {
        self.folder.path().join("tree")
    }
}

fn only(list: &Value) -> &Value {
    let list = list.as_array().unwrap();
    assert_eq!(list.len(), 1, "{list:?}");
    &list[0]
}

/// Returns the path of a blob, whose size and digest must be right.
fn blob(archive: &Path, descriptor: &Value) -> PathBuf {
    let digest = descriptor["digest"]
        .as_str()
        .unwrap()
        .strip_prefix("sha256:")
        .unwrap();
    let path = archive.join("blobs/sha256").join(digest);
    assert_eq!(
        path.metadata().unwrap().len(),
        descriptor["size"].as_u64().unwrap()
    );
    let sum = run(Command::new("sha256sum").arg(&path)).unwrap();
    assert!(sum.starts_with(digest), "{sum}");
    path
}
