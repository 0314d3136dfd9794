//! Checks that docs/architecture.md has the real graph of the crates, and that all pages name only existing files.

use std::collections::BTreeSet;

use crate::prose::files;
use crate::{metadata, root};

/// Endings of file names.
const ENDINGS: [&str; 7] = [".rs", ".md", ".toml", ".json", ".yaml", ".yml", ".proto"];

fn document() -> String {
    std::fs::read_to_string(root().join("docs/architecture.md")).unwrap()
}

/// Adds a crate and its edges: `name`, and `name -> dependency` for each dependency.
fn add(graph: &mut BTreeSet<String>, name: &str, dependencies: &[&str]) {
    graph.insert(name.to_owned());
    for dependency in dependencies {
        graph.insert(format!("{name} -> {dependency}"));
    }
}

/// Returns the graph of the workspace, without dependencies of tests only.
fn real_graph() -> BTreeSet<String> {
    let metadata = metadata();
    let packages = metadata["packages"].as_array().unwrap();
    let names: BTreeSet<&str> = packages.iter().filter_map(|p| p["name"].as_str()).collect();
    let mut graph = BTreeSet::new();
    for package in packages {
        let all = package["dependencies"].as_array().unwrap().iter();
        let product = all.filter(|dependency| dependency["kind"] != "dev");
        let dependencies: Vec<&str> = product
            .filter_map(|dependency| dependency["name"].as_str())
            .filter(|name| names.contains(name))
            .collect();
        add(&mut graph, package["name"].as_str().unwrap(), &dependencies);
    }
    graph
}

/// Returns the graph in a document: the fenced block with a line for each crate.
fn drawn_graph(document: &str) -> BTreeSet<String> {
    let mut blocks = document.split("\n```").skip(1).step_by(2);
    let block = blocks.find(|block| block.contains("\nculvert-door -> "));
    let mut graph = BTreeSet::new();
    for line in block.unwrap_or_default().lines().skip(1) {
        let (name, dependencies) = line.split_once("->").unwrap_or((line, ""));
        let dependencies = dependencies.split(',').map(str::trim);
        let dependencies: Vec<&str> = dependencies.filter(|name| !name.is_empty()).collect();
        add(&mut graph, name.trim(), &dependencies);
    }
    graph
}

/// Returns the paths in the code spans of a document, without the spans that cannot be paths.
fn paths(document: &str, folders: &[String]) -> Vec<String> {
    let is_path = |span: &&str| {
        let plain = span
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "._-/".contains(c));
        let first = span.split('/').next().unwrap_or_default();
        let in_folder = span.contains('/') && folders.iter().any(|folder| folder == first);
        plain && (in_folder || ENDINGS.iter().any(|ending| span.ends_with(ending)))
    };
    let text: Vec<&str> = document.split("```").step_by(2).collect();
    let spans = text
        .iter()
        .flat_map(|text| text.split('`').skip(1).step_by(2));
    spans.filter(is_path).map(str::to_owned).collect()
}

#[test]
fn architecture_page_draws_the_graph_of_the_crates() {
    let (drawn, real) = (drawn_graph(&document()), real_graph());
    let missing: Vec<&String> = real.difference(&drawn).collect();
    let surplus: Vec<&String> = drawn.difference(&real).collect();
    assert!(
        missing.is_empty() && surplus.is_empty(),
        "docs/architecture.md: missing {missing:#?}, surplus {surplus:#?}"
    );
}

/// Returns the top folders of the repository.
fn folders() -> Vec<String> {
    let entries = std::fs::read_dir(root()).unwrap().flatten();
    let folders = entries.filter(|entry| entry.path().is_dir());
    let names = folders.filter_map(|entry| entry.file_name().into_string().ok());
    // Builds write this folder.
    names.filter(|name| name != "target").collect()
}

#[test]
fn pages_name_existing_files() {
    let mut pages = Vec::new();
    files(&root().join("docs"), "md", &mut pages);
    assert!(!pages.is_empty());
    let folders = folders();
    let mut missing = Vec::new();
    for page in pages {
        let text = std::fs::read_to_string(&page).unwrap();
        let named = paths(&text, &folders).into_iter();
        // Pages also name files without a folder that are in no repository.
        let in_folders = named.filter(|path| path.contains('/'));
        let absent = in_folders.filter(|path| !root().join(path).exists());
        missing.extend(absent.map(|path| format!("{}: {path}", page.display())));
    }
    assert!(missing.is_empty(), "no such files: {missing:#?}");
}

#[test]
fn architecture_page_names_existing_files() {
    let folders = folders();
    let named = paths(&document(), &folders);
    assert!(!named.is_empty());
    let missing: Vec<&String> = named
        .iter()
        .filter(|path| !root().join(path).exists())
        .collect();
    assert!(
        missing.is_empty(),
        "docs/architecture.md names no files of the repository: {missing:#?}"
    );
}

#[test]
fn drawn_graph_is_read_from_the_block() {
    let text = "x\n```\nother -> y\n```\n\n```text\nculvert-stream\nculvert-door -> a, b\n```\nend";
    let expected = [
        "culvert-door",
        "culvert-door -> a",
        "culvert-door -> b",
        "culvert-stream",
    ];
    assert_eq!(drawn_graph(text), expected.map(str::to_owned).into());
}

#[test]
fn paths_are_told_from_other_code_spans() {
    let text =
        "`server/src` `door.rs`\n```\n`server/no`\n```\n`/metrics` `culvert/1` `server/a b` `h2`";
    assert_eq!(
        paths(text, &["server".to_owned()]),
        ["server/src", "door.rs"]
    );
}
