//! Generated files and copies against their sources.

use std::collections::BTreeSet;
use std::path::Path;

use culvert_tests::charts::{CHARTS, Tools, deploy, run};
use serde_json::Value;
use tempfile::TempDir;

use super::rendered;

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns the YAML files of a folder by name.
fn names(folder: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.ends_with(".yaml")).collect()
}

#[test]
fn manifests_are_those_of_the_charts() {
    let Some(tools) = Tools::get() else { return };
    let folder = TempDir::new().unwrap();
    let mut render = std::process::Command::new(deploy("manifests/render"));
    render.env("HELM", tools.path("helm")).arg(folder.path());
    run(&mut render).unwrap();
    let committed = deploy("manifests");
    assert_eq!(names(&committed), names(folder.path()));
    for name in names(&committed) {
        let [old, new] = [&committed, folder.path()].map(|folder| read(&folder.join(&name)));
        assert!(
            old == new,
            "deploy/manifests/{name} differs: run deploy/manifests/render"
        );
    }
}

#[test]
fn readmes_list_the_values() {
    let Some(tools) = Tools::get() else { return };
    let folder = TempDir::new().unwrap();
    for (chart, _) in CHARTS {
        let copy = folder.path().join(chart);
        std::fs::create_dir(&copy).unwrap();
        for name in ["Chart.yaml", "values.yaml", "README.md.gotmpl"] {
            std::fs::copy(deploy("helm").join(chart).join(name), copy.join(name)).unwrap();
        }
    }
    let mut document = tools.program("helm-docs");
    document.args(["--sort-values-order", "file", "--chart-search-root"]);
    run(document.arg(folder.path())).unwrap();
    for (chart, _) in CHARTS {
        let path = deploy("helm").join(chart).join("README.md");
        let [old, new] = [path, folder.path().join(chart).join("README.md")].map(|it| read(&it));
        assert!(
            old == new,
            "README.md of {chart} differs: run helm-docs --chart-search-root deploy/helm --sort-values-order file"
        );
        let table = old.split("\n## Values\n").nth(1).unwrap();
        let rows: Vec<&str> = table
            .lines()
            .filter(|line| line.starts_with("| "))
            .collect();
        assert!(rows.len() > 50, "{chart}: {} rows", rows.len());
        for row in rows {
            assert!(!row.ends_with("|  |"), "{chart}: no text in {row}");
        }
    }
}

/// Collects the paths of the objects and values of a values file.
fn value_paths(value: &Value, schema: &Value, path: &str, found: &mut BTreeSet<String>) {
    found.insert(path.to_owned());
    // Objects without listed properties belong to Kubernetes, or have free keys.
    if let (Value::Object(fields), true) = (value, schema.get("properties").is_some()) {
        for (key, value) in fields {
            let schema = &schema["properties"][key];
            value_paths(value, schema, &format!("{path}.{key}"), found);
        }
    }
}

/// Collects the paths of the properties of a schema.
fn schema_paths(schema: &Value, path: &str, found: &mut BTreeSet<String>) {
    found.insert(path.to_owned());
    let properties = schema["properties"].as_object().into_iter().flatten();
    for (key, schema) in properties.filter(|(key, _)| *key != "global") {
        schema_paths(schema, &format!("{path}.{key}"), found);
    }
}

/// Returns an object with listed properties that admits other keys.
fn open_object(schema: &Value, path: &str) -> Option<String> {
    let properties = schema.get("properties")?.as_object()?;
    if schema["additionalProperties"] != false {
        return Some(path.to_owned());
    }
    let mut fields = properties.iter();
    fields.find_map(|(key, schema)| open_object(schema, &format!("{path}.{key}")))
}

#[test]
fn schemas_list_the_values_and_no_others() {
    for (chart, _) in CHARTS {
        let folder = deploy("helm").join(chart);
        let schema: Value =
            serde_json::from_str(&read(&folder.join("values.schema.json"))).unwrap();
        let values = &rendered::objects(&read(&folder.join("values.yaml")))[0];
        let (mut given, mut listed) = (BTreeSet::new(), BTreeSet::new());
        value_paths(values, &schema, chart, &mut given);
        schema_paths(&schema, chart, &mut listed);
        assert_eq!(given, listed);
        assert_eq!(open_object(&schema, chart), None);
    }
}

#[test]
fn charts_share_one_file_of_helpers() {
    let helpers = |chart: &str| read(&deploy("helm").join(chart).join("templates/_common.tpl"));
    for (chart, _) in CHARTS {
        let (first, _) = CHARTS[0];
        assert!(
            helpers(chart) == helpers(first),
            "_common.tpl of {chart} differs from the file of {first}"
        );
    }
}

#[test]
fn charts_name_the_version_and_the_images() {
    let images = read(&deploy("images/images.toml"));
    for (chart, image) in CHARTS {
        let folder = deploy("helm").join(chart);
        let about = &rendered::objects(&read(&folder.join("Chart.yaml")))[0];
        assert_eq!(about["appVersion"], env!("CARGO_PKG_VERSION"), "{chart}");
        let values = &rendered::objects(&read(&folder.join("values.yaml")))[0];
        let name = values["image"]["repository"].as_str().unwrap();
        let section = format!("[images.{image}]\nname = \"{name}\"\n");
        assert!(images.contains(&section), "{chart}: no image {name}");
    }
}
