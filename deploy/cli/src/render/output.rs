//! YAML of the rendered objects.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::ValueEnum as _;

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

/// Writes a file for each part, and for seed and user cluster. Patches get files of their own. `namespace` is the namespace of
/// the user cluster in the seed.
///
/// # Errors
/// Fails if the folder or a file cannot be written.
pub(super) fn write(folder: &Path, namespace: &str, objects: &[Object]) -> anyhow::Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let mut files: BTreeMap<String, Vec<&Object>> = BTreeMap::new();
    for object in objects {
        let file = file(object.place, object.part, object.is_patch);
        files.entry(file).or_default().push(object);
    }
    for (file, objects) in files {
        let path = folder.join(file);
        let text = format!("{CLUSTER}{namespace}\n{}", stream(objects)?);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        say!("{}", path.display());
    }
    Ok(())
}

/// Returns the namespace of another user cluster whose objects an earlier run has written into the folder.
pub(super) fn other_cluster(folder: &Path, namespace: &str) -> Option<String> {
    every_file(Part::value_variants())
        .filter_map(|(.., file)| fs::read_to_string(folder.join(file)).ok())
        .filter_map(|text| Some(text.lines().next()?.strip_prefix(CLUSTER)?.to_owned()))
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
        .filter(|path| path.exists())
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
