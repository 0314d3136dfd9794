//! The alerts and dashboards of `deploy/monitoring`.
//!
//! | module | contents |
//! |---|---|
//! | [`running`] | the real Prometheus with the alerts, beside the real programs |

mod running;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use culvert_tests::charts::{Tools, deploy, root, run};
use culvert_tests::skip::skip;
use serde_json::Value;
use tempfile::TempDir;

use crate::charts::objects;

/// Prefixes of the names of metrics in expressions.
const PREFIXES: [&str; 4] = ["culvert_", "konnectivity_", "envoy_", "process_"];

/// A label that looks like a metric.
const ENVOY_CLUSTER: &str = "envoy_cluster_name";

/// Values for the variables of a dashboard, as Grafana sets them if the user chooses nothing.
const VARIABLES: [(&str, &str); 3] = [
    ("$namespace", ".*"),
    ("$pod", ".*"),
    ("$__rate_interval", "1m"),
];

/// Returns the path of a program of Prometheus. If it cannot be installed, returns `None` and prints the reason.
///
/// # Panics
/// If it cannot be installed and `CI=true`.
fn prometheus(name: &str) -> Option<PathBuf> {
    static INSTALLED: OnceLock<Result<(), String>> = OnceLock::new();
    let folder = root().join("tests/install/tools");
    let installed = INSTALLED.get_or_init(|| {
        let result = run(&mut Command::new(folder.join("prometheus")));
        let reason = |text: String| text.lines().last().unwrap_or_default().to_owned();
        result.map(drop).map_err(reason)
    });
    installed.as_ref().inspect_err(|why| skip(why)).ok()?;
    Some(folder.join("bin").join(name))
}

fn yaml(text: &str) -> Value {
    let mut documents = objects(text);
    assert_eq!(documents.len(), 1);
    documents.remove(0)
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// An alert, as file and document show it.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Alert {
    name: String,
    expression: String,
    lasts: String,
}

fn alerts() -> BTreeSet<Alert> {
    let rules = yaml(&read(&deploy("monitoring/rules.yaml")));
    let groups = rules["groups"].as_array().unwrap().iter();
    let rules = groups.flat_map(|group| group["rules"].as_array().unwrap());
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let alert = |rule: &Value| Alert {
        name: text(&rule["alert"]),
        expression: text(&rule["expr"]),
        lasts: rule["for"].as_str().unwrap_or("0m").to_owned(),
    };
    rules.map(alert).collect()
}

/// The dashboards by file name, without its extension.
fn dashboards() -> Vec<(String, Value)> {
    let folder = deploy("monitoring/dashboards");
    let entries = std::fs::read_dir(folder).unwrap();
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let parse = |file: &Path| serde_json::from_str(&read(file)).unwrap();
    let name = |file: &Path| file.file_stem().unwrap().to_str().unwrap().to_owned();
    files.iter().map(|file| (name(file), parse(file))).collect()
}

/// Returns the panels of a dashboard with their expressions. Variables have values.
fn expressions(dashboard: &Value) -> Vec<(String, Vec<String>)> {
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let panels = panels.filter(|panel| panel["type"] != "row");
    let expression = |target: &Value| {
        let text = target["expr"].as_str().unwrap().to_owned();
        VARIABLES
            .iter()
            .fold(text, |text, (name, value)| text.replace(name, value))
    };
    panels
        .map(|panel| {
            let targets = panel["targets"].as_array().unwrap();
            assert!(!targets.is_empty(), "{panel}");
            let title = panel["title"].as_str().unwrap().to_owned();
            (title, targets.iter().map(expression).collect())
        })
        .collect()
}

/// Returns the names of metrics in an expression.
fn names(expression: &str) -> BTreeSet<&str> {
    let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words
        .filter(|word| *word != ENVOY_CLUSTER)
        .filter(|word| PREFIXES.iter().any(|prefix| word.starts_with(prefix)))
        .collect()
}

/// Returns the labels that an expression groups by or selects by, the latter with the selected values.
fn labels(expression: &str) -> BTreeSet<(&str, Vec<&str>)> {
    let parts = |open: &'static str, close: char| {
        let after = expression.split(open).skip(1);
        let lists = after.map(move |rest| rest.split(close).next().unwrap());
        lists.flat_map(|list| list.split(',').map(str::trim))
    };
    let grouped = [parts("by (", ')'), parts("on (", ')')]
        .into_iter()
        .flatten();
    let selected = parts("{", '}').map(|matcher| {
        let (name, value) = matcher.split_once('=').unwrap();
        let value = value.trim_start_matches('~').trim_matches('"');
        (name.trim_end_matches('!'), value.split('|').collect())
    });
    let grouped = grouped.map(|name| (name, Vec::new()));
    grouped.chain(selected).collect()
}

/// Returns the expressions of all alerts and dashboards.
fn all_expressions() -> Vec<String> {
    let rules = alerts().into_iter().map(|alert| alert.expression);
    let panels = dashboards()
        .into_iter()
        .flat_map(|(_, dashboard)| expressions(&dashboard))
        .flat_map(|(_, expressions)| expressions);
    rules.chain(panels).collect()
}

#[test]
fn document_lists_the_alerts() {
    let document = read(&root().join("docs/operations.md"));
    let (_, section) = document.split_once("\n## Alerts\n").unwrap();
    let (section, _) = section.split_once("\n## ").unwrap();
    // `\|` stands for `|` within a table.
    let section = section.replace("\\|", "\u{1}");
    let listed = section.lines().filter_map(|line| {
        let cells: Vec<&str> = line.strip_prefix("| `")?.split(" | ").collect();
        let [name, _, expression, lasts] = cells[..] else {
            panic!("{line}")
        };
        let expression = expression.trim_matches('`').replace('\u{1}', "|");
        Some(Alert {
            name: name.trim_matches('`').to_owned(),
            expression,
            lasts: lasts.trim_matches([' ', '|']).to_owned(),
        })
    });
    assert_eq!(listed.collect::<BTreeSet<_>>(), alerts());
}

#[test]
fn rule_of_the_operator_is_made_from_the_rules() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("prometheusrule.yaml");
    run(Command::new(deploy("monitoring/render")).arg(&file)).unwrap();
    let committed = read(&deploy("monitoring/prometheusrule.yaml"));
    assert!(
        committed == read(&file),
        "prometheusrule.yaml differs: run deploy/monitoring/render"
    );
    let rules = yaml(&read(&deploy("monitoring/rules.yaml")));
    assert_eq!(yaml(&committed)["spec"], rules);
}

#[test]
fn kustomization_has_the_rule_and_every_dashboard() {
    let Some(tools) = Tools::get() else { return };
    let mut kustomize = tools.program("kustomize");
    let text = run(kustomize.arg("build").arg(deploy("monitoring"))).unwrap();
    let objects = objects(&text);
    let [config, rule] = &objects[..] else {
        panic!("{text}")
    };
    assert_eq!(rule["kind"], "PrometheusRule");
    assert_eq!(config["metadata"]["labels"]["grafana_dashboard"], "1");
    let shipped = config["data"].as_object().unwrap();
    let files = dashboards();
    assert_eq!(shipped.len(), files.len());
    for (name, dashboard) in files {
        let text = shipped[&format!("{name}.json")].as_str().unwrap();
        assert_eq!(serde_json::from_str::<Value>(text).unwrap(), dashboard);
    }
}

#[test]
fn alerts_and_dashboards_read_documented_metrics() {
    let document = read(&root().join("docs/compatibility.md"));
    let documented = |name: &str| {
        let family = ["_bucket", "_sum", "_count"]
            .iter()
            .find_map(|suffix| name.strip_suffix(suffix))
            .unwrap_or(name);
        [name, family]
            .iter()
            .any(|name| document.contains(&format!("\n| `{name}` |")))
            || name.starts_with("process_")
    };
    for expression in all_expressions() {
        let names = names(&expression);
        assert!(!names.is_empty(), "{expression}");
        for name in names {
            assert!(documented(name), "{name} in {expression}");
        }
    }
}

#[test]
fn panels_of_a_dashboard_have_ids_and_places_of_their_own() {
    for (name, dashboard) in dashboards() {
        assert_eq!(dashboard["uid"], format!("culvert-{name}"));
        let (mut ids, mut cells) = (BTreeSet::new(), BTreeSet::new());
        for panel in dashboard["panels"].as_array().unwrap() {
            assert!(ids.insert(panel["id"].as_u64().unwrap()), "{name}: {panel}");
            let place = |key: &str| panel["gridPos"][key].as_u64().unwrap();
            let (left, right) = (place("x"), place("x") + place("w"));
            assert!(right <= 24, "{name}: {panel}");
            for row in place("y")..place("y") + place("h") {
                for column in left..right {
                    assert!(cells.insert((row, column)), "{name}: {panel}");
                }
            }
        }
    }
}

#[test]
fn alerts_fire_for_their_problem_and_for_nothing_else() {
    let Some(promtool) = prometheus("promtool") else {
        return;
    };
    let rules = deploy("monitoring/rules.yaml");
    run(Command::new(&promtool).args(["check", "rules"]).arg(&rules)).unwrap();
    let tests = root().join("tests/install/monitoring/alerts.yaml");
    run(Command::new(&promtool).args(["test", "rules"]).arg(&tests)).unwrap();
    let text = read(&tests);
    for Alert { name, .. } in alerts() {
        let fires = format!("- labels: '{{alertname=\"{name}\"}}'");
        assert!(text.contains(&fires), "{name} has no test");
    }
}
