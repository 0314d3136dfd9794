//! Sibling modules must not import each other in a cycle, in any crate and at any level.
//!
//! Imports are the `use` lines of a module and its descendants, and the paths that begin with `crate`, `self`
//! or `super`. A name that the parent module imports from a sibling counts as a use of the sibling. Items of the
//! parent module itself and imports of all its names (`super::*`) are not counted. Test code is left out.

mod source;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::Path;

use crate::{metadata, root};

/// Absolute path of a module or an item, without `crate`.
type ModulePath = Vec<String>;

/// The imports between the children of one module: from, to, and an example.
type Edges = BTreeMap<(String, String), String>;

/// The modules and paths of one crate.
#[derive(Default)]
struct Crate {
    modules: BTreeSet<ModulePath>,
    /// Targets of the names that `use` lines bring into modules.
    bindings: BTreeMap<ModulePath, ModulePath>,
    /// Every path: the module that contains the path, the target, and the place.
    uses: Vec<(ModulePath, ModulePath, String)>,
}

impl Crate {
    /// Reads the root file, and the files of all modules. `read` returns the text of a file.
    fn read(root_file: &str, read: &dyn Fn(&str) -> Option<String>) -> Self {
        let folder = root_file.rfind('/').map_or("", |end| &root_file[..=end]);
        let mut this = Self::default();
        let mut named = Vec::new();
        let mut files = vec![(Vec::new(), root_file.to_owned())];
        while let Some((module, file)) = files.pop() {
            let text = read(&file).unwrap_or_else(|| panic!("cannot read {file}"));
            let outline = source::read(&text, &module);
            named.extend(outline.paths.into_iter().map(|path| (path, file.clone())));
            for declared in outline.modules {
                if declared.has_file {
                    let file = format!("{folder}{}.rs", declared.path.join("/"));
                    files.push((declared.path.clone(), file));
                }
                this.modules.insert(declared.path);
            }
        }
        for (named, file) in named {
            let Some(target) = this.absolute(&named) else {
                continue;
            };
            if let Some(alias) = &named.alias {
                let name = [named.module.as_slice(), std::slice::from_ref(alias)].concat();
                this.bindings.insert(name, target.clone());
            }
            let place = format!("{file}:{}: {}", named.line, named.path.join("::"));
            this.uses.push((named.module, target, place));
        }
        this
    }

    /// Returns the absolute path, or `None` for a path into another crate.
    fn absolute(&self, named: &source::Named) -> Option<ModulePath> {
        let mut base = named.module.clone();
        let mut rest = named.path.as_slice();
        match rest.first()?.as_str() {
            "crate" => base.clear(),
            "self" => {}
            "super" => drop(base.pop()),
            child => {
                base.push(child.to_owned());
                if !self.modules.contains(&base) {
                    return None;
                }
            }
        }
        rest = &rest[1..];
        while let Some((first, after)) = rest.split_first()
            && first == "super"
        {
            base.pop();
            rest = after;
        }
        base.extend_from_slice(rest);
        Some(base)
    }

    /// Returns the imports between siblings, by parent module.
    fn edges(&self) -> BTreeMap<ModulePath, Edges> {
        let mut levels: BTreeMap<ModulePath, Edges> = BTreeMap::new();
        for (from, target, place) in &self.uses {
            let mut target = target;
            // A chain of imports may be circular.
            for _ in 0..8 {
                let level = from.iter().zip(target).take_while(|(a, b)| a == b).count();
                if level == from.len() || level == target.len() {
                    break;
                }
                let sibling = &target[..=level];
                if self.modules.contains(sibling) {
                    let edge = (from[level].clone(), target[level].clone());
                    let edges = levels.entry(from[..level].to_vec()).or_default();
                    edges.entry(edge).or_insert_with(|| place.clone());
                    break;
                }
                let Some(imported) = self.bindings.get(sibling) else {
                    break;
                };
                target = imported;
            }
        }
        levels
    }

    /// Returns a description of every cycle.
    fn cycles(&self) -> Vec<String> {
        let mut found = Vec::new();
        for (parent, edges) in self.edges() {
            let parent = [&["crate".to_owned()], parent.as_slice()]
                .concat()
                .join("::");
            for cycle in cycles(&edges) {
                let mut text = format!("in {parent}: {} -> {}", cycle.join(" -> "), cycle[0]);
                for (at, from) in cycle.iter().enumerate() {
                    let to = &cycle[(at + 1) % cycle.len()];
                    let place = &edges[&(from.clone(), to.clone())];
                    text.push_str(&format!("\n    {from} -> {to}: {place}"));
                }
                found.push(text);
            }
        }
        found
    }
}

/// Returns cycles, the shortest first. Cycles do not share edges, so a cycle of the same modules may appear only
/// after a repair. A cycle begins with its first name in the order of the alphabet.
fn cycles(edges: &Edges) -> Vec<Vec<String>> {
    let shortest = |(from, to): &(String, String)| shortest(edges, to, from);
    let mut found: Vec<Vec<String>> = edges.keys().filter_map(shortest).collect();
    for cycle in &mut found {
        let first = (0..cycle.len()).min_by_key(|at| &cycle[*at]);
        cycle.rotate_left(first.unwrap_or(0));
    }
    found.sort_by_key(|cycle| (cycle.len(), cycle.clone()));
    let mut reported = BTreeSet::new();
    found.retain(|cycle| {
        let next = cycle.iter().cycle().skip(1).cloned();
        let own: Vec<_> = cycle.iter().cloned().zip(next).collect();
        let is_new = own.iter().all(|edge| !reported.contains(edge));
        reported.extend(own);
        is_new
    });
    found
}

/// Returns the shortest way between two modules, both included.
fn shortest(edges: &Edges, from: &str, to: &str) -> Option<Vec<String>> {
    let mut ways = VecDeque::from([vec![from.to_owned()]]);
    let mut seen = BTreeSet::from([from.to_owned()]);
    while let Some(way) = ways.pop_front() {
        let last = way.last()?;
        if last == to {
            return Some(way);
        }
        for (_, next) in edges.keys().filter(|(from, _)| from == last) {
            if seen.insert(next.clone()) {
                ways.push_back([way.as_slice(), std::slice::from_ref(next)].concat());
            }
        }
    }
    None
}

#[test]
fn sibling_modules_form_no_cycle() {
    let mut found = Vec::new();
    for package in metadata()["packages"].as_array().unwrap() {
        for target in package["targets"].as_array().unwrap() {
            let kind = target["kind"][0].as_str().unwrap();
            if !matches!(kind, "lib" | "bin") {
                continue;
            }
            let file = Path::new(target["src_path"].as_str().unwrap());
            let file = file.strip_prefix(root()).unwrap().to_str().unwrap();
            let read = |file: &str| std::fs::read_to_string(root().join(file)).ok();
            let name = package["name"].as_str().unwrap();
            for cycle in Crate::read(file, &read).cycles() {
                found.push(format!("{name} {cycle}"));
            }
        }
    }
    found.dedup();
    assert!(
        found.is_empty(),
        "{} import cycles; move the shared item to the lower module:\n{}",
        found.len(),
        found.join("\n")
    );
}

/// Returns the cycles of a crate with these files.
fn cycles_of(files: &[(&str, &str)]) -> Vec<String> {
    let read = |name: &str| {
        let file = files.iter().find(|(file, _)| *file == name);
        file.map(|(_, text)| (*text).to_owned())
    };
    Crate::read("lib.rs", &read).cycles()
}

#[test]
fn cycle_of_two_modules_is_found_with_places() {
    let found = cycles_of(&[
        ("lib.rs", "mod a;\npub mod b;\n"),
        (
            "a.rs",
            "//! A.\npub use std::fmt;\nuse crate::{\n    b::{self as bee, Bee},\n};\n",
        ),
        (
            "b.rs",
            "pub struct Bee;\nfn bee() -> super::a::A { todo!() }\n",
        ),
    ]);
    let expected =
        "in crate: a -> b -> a\n    a -> b: a.rs:4: crate::b\n    b -> a: b.rs:2: super::a::A";
    assert_eq!(found, [expected]);
}

#[test]
fn cycle_of_three_descendants_is_found_at_the_level_of_their_ancestors() {
    let found = cycles_of(&[
        ("lib.rs", "mod top;"),
        ("top.rs", "mod a; mod b; mod c { use super::a::deep; }"),
        ("top/a.rs", "pub mod deep;"),
        ("top/a/deep.rs", "use super::super::b::Bee;"),
        ("top/b.rs", "const SEA: u8 = crate::top::c::SEA;"),
    ]);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].starts_with("in crate::top: a -> b -> c -> a\n"));
}

#[test]
fn import_through_the_parent_counts_and_items_of_the_parent_do_not() {
    let parent = "mod a; mod b; pub use self::b::Bee; pub struct Own;";
    let found = cycles_of(&[
        ("lib.rs", parent),
        ("a.rs", "use super::Bee; use super::Own;"),
        ("b.rs", "use crate::a::A;"),
    ]);
    assert!(found[0].starts_with("in crate: a -> b -> a\n"));
    let found = cycles_of(&[
        ("lib.rs", parent),
        (
            "a.rs",
            "use super::Own; use self::inner::X; mod inner { use super::Y; }",
        ),
        ("b.rs", "use crate::a::A; use super::*;"),
    ]);
    assert_eq!(found, [""; 0]);
}

#[test]
fn tests_comments_and_texts_make_no_cycle() {
    let found = cycles_of(&[
        ("lib.rs", "mod a; mod b; #[cfg(test)] mod tests;"),
        ("a.rs", "use crate::b::Bee;"),
        (
            "b.rs",
            r#"// crate::a::A
               struct B { #[cfg(test)] a: crate::a::A, text: &'static str }
               const TEXT: &str = "crate::a::A"; /* use super::a; */
               #[cfg(test)] #[allow(dead_code)] use crate::a::{A, B};
               #[cfg(test)] fn f(a: [u8; 2]) { super::a::f(); }
               #[cfg(all(test, unix))] mod tests { use super::super::a::A; fn g() {} }
               use other::a; use ::a::b;"#,
        ),
    ]);
    assert_eq!(found, [""; 0]);
}
