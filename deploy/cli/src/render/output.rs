//! YAML of the rendered objects.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::ValueEnum as _;
use tempfile::NamedTempFile;

use super::objects::{Object, Part, Place};

/// Returns all objects as a stream of documents. A comment before each document names its part and its cluster.
///
/// # Errors
/// Fails if an object cannot be written as YAML.
pub(super) fn stream<'a>(objects: impl IntoIterator<Item = &'a Object>) -> anyhow::Result<String> {
    let mut text = String::new();
    for object in objects {
        text.push_str("---\n");
        let place = match object.place {
            Place::Seed => "seed",
            Place::User => "user cluster",
        };
        text.push_str(&format!("# part: {}, for the {place}\n", name(object.part)));
        if object.is_patch {
            text.push_str(
                "# a strategic merge patch, not for kubectl apply: kubectl patch --patch-file\n",
            );
        }
        text.push_str(&serde_saphyr::to_string(&object.value)?);
        if !text.ends_with('\n') {
            text.push('\n');
        }
    }
    Ok(text)
}

/// Begin of the first line of each file, before the namespace of the user cluster in the seed.
const CLUSTER: &str = "# cluster: ";

/// Longest first line, in bytes; longer than any namespace.
const MAX_LINE_BYTES: u64 = 1024;

/// Writes a file for each part, and for seed and user cluster. Patches get files of their own. `namespace` is the namespace of
/// the user cluster in the seed. All files are complete before the first of them replaces a file of an earlier run. A
/// symbolic link is replaced, and its target stays as it is.
///
/// # Errors
/// Fails if the folder or a file cannot be written, or if a file exists that no earlier run has written.
pub(super) fn write(folder: &Path, namespace: &str, objects: &[Object]) -> anyhow::Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let mut files: BTreeMap<String, Vec<&Object>> = BTreeMap::new();
    for object in objects {
        let file = file(object.place, object.part, object.is_patch);
        files.entry(file).or_default().push(object);
    }
    for file in files.keys() {
        let path = folder.join(file);
        // The metadata of a link is found even if its target is missing.
        let found = fs::symlink_metadata(&path);
        let is_missing = found.is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
        let owner = owner(&path).with_context(|| format!("cannot read {}", path.display()))?;
        anyhow::ensure!(
            is_missing || owner.is_some(),
            "{}: no earlier run of culvert render wrote this file: its first line does not begin with {CLUSTER:?}; move or \
             delete the file, or choose another folder",
            path.display()
        );
    }
    let cannot_write = |path: &Path| format!("cannot write {}", path.display());
    let mut complete = Vec::new();
    for (file, objects) in files {
        let path = folder.join(file);
        let text = format!("{CLUSTER}{namespace}\n{}", stream(objects)?);
        let temporary = temporary(folder, &text).with_context(|| cannot_write(&path))?;
        complete.push((path, temporary));
    }
    for (path, temporary) in complete {
        let replaced = temporary.persist(&path).map_err(|failed| failed.error);
        replaced.with_context(|| cannot_write(&path))?;
        say!("{}", path.display());
    }
    Ok(())
}

/// Writes a text to a new file in the folder. The file is removed when the returned value is dropped.
fn temporary(folder: &Path, text: &str) -> io::Result<NamedTempFile> {
    let mut file = tempfile::Builder::new()
        .prefix(".culvert-render-")
        .permissions(fs::Permissions::from_mode(0o666))
        .tempfile_in(folder)?;
    file.write_all(text.as_bytes())?;
    Ok(file)
}

/// Returns the namespace in the first line of a file; `None` if no run of this command has written the file, or if the file
/// is missing.
fn owner(path: &Path) -> io::Result<Option<String>> {
    // A pipe would block.
    match fs::metadata(path) {
        Ok(found) if found.is_file() => {}
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => return Ok(None),
    }
    let mut line = Vec::new();
    let file = BufReader::new(fs::File::open(path)?);
    file.take(MAX_LINE_BYTES).read_until(b'\n', &mut line)?;
    let line = String::from_utf8_lossy(&line);
    let namespace = line.trim_end().strip_prefix(CLUSTER);
    Ok(namespace.map(str::to_owned))
}

/// Returns the namespace of another user cluster whose objects an earlier run has written into the folder.
pub(super) fn other_cluster(folder: &Path, namespace: &str) -> Option<String> {
    every_file(Part::value_variants())
        .filter_map(|(.., file)| owner(&folder.join(file)).ok()?)
        .find(|found| found != namespace)
}

/// Returns the files in the folder that an earlier run has written for one of the `parts`, and that have none of the
/// objects. An empty list of parts means all parts.
pub(super) fn stale(folder: &Path, objects: &[Object], parts: &[Part]) -> Vec<PathBuf> {
    let parts = match parts {
        [] => Part::value_variants(),
        parts => parts,
    };
    every_file(parts)
        .filter(|(place, part, is_patch, _)| {
            let is_in =
                |it: &Object| (it.place, it.part, it.is_patch) == (*place, *part, *is_patch);
            !objects.iter().any(is_in)
        })
        .map(|(.., file)| folder.join(file))
        .filter(|path| owner(path).is_ok_and(|owner| owner.is_some()))
        .collect()
}

/// Returns place, part, kind and name of every file that may have objects of the parts.
fn every_file(parts: &[Part]) -> impl Iterator<Item = (Place, Part, bool, String)> {
    let places = [Place::Seed, Place::User];
    let kinds = places
        .into_iter()
        .flat_map(|place| [(place, false), (place, true)]);
    parts.iter().flat_map(move |part| {
        let of_part = kinds.clone();
        of_part.map(|(place, is_patch)| (place, *part, is_patch, file(place, *part, is_patch)))
    })
}

/// Returns the name of the file of an object.
fn file(place: Place, part: Part, is_patch: bool) -> String {
    let place = match place {
        Place::Seed => "seed",
        Place::User => "user",
    };
    let suffix = if is_patch { "-patch" } else { "" };
    format!("{place}-{}{suffix}.yaml", name(part))
}

/// Returns the name of a part on the command line.
pub(super) fn name(part: Part) -> String {
    part.to_possible_value()
        .map(|value| value.get_name().to_owned())
        .unwrap_or_default()
}
