//! The objects of every chart with every values file.

use std::path::Path;
use std::sync::OnceLock;

use culvert_tests::charts::{CHARTS, Tools, deploy, run, values_files};
use serde_json::Value;

use super::stem;

/// A chart with a values file.
pub(super) struct Rendered {
    /// Chart and values file, for messages.
    pub(super) name: String,
    /// Name of the chart.
    pub(super) chart: &'static str,
    /// The rendered text.
    pub(super) text: String,
    /// The objects of the text.
    pub(super) objects: Vec<Value>,
}

impl Rendered {
    /// Returns the specifications of all pods.
    pub(super) fn pods(&self) -> impl Iterator<Item = &Value> {
        self.objects.iter().filter_map(pod)
    }

    /// Returns the labels of all pods.
    pub(super) fn labels_of_pods(&self) -> impl Iterator<Item = &Value> {
        self.objects.iter().filter_map(|object| {
            pod(object)?;
            let template = &object["spec"]["template"];
            let pod = if template.is_null() { object } else { template };
            Some(&pod["metadata"]["labels"])
        })
    }
}

/// Returns the specification of the pod of an object.
pub(super) fn pod(object: &Value) -> Option<&Value> {
    match object["kind"].as_str()? {
        "Pod" => Some(&object["spec"]),
        "Deployment" | "DaemonSet" => Some(&object["spec"]["template"]["spec"]),
        _ => None,
    }
}

/// Returns the documents of a YAML text that are not empty.
pub(crate) fn objects(text: &str) -> Vec<Value> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(text).unwrap();
    documents.into_iter().filter(|it| !it.is_null()).collect()
}

/// Renders a chart.
pub(super) fn template(tools: &Tools, chart: &Path, values: &Path) -> String {
    let mut helm = tools.helm();
    helm.args(["template", "release", "--namespace", "place", "--values"]);
    run(helm.arg(values).arg(chart))
        .unwrap_or_else(|error| panic!("{} with {}: {error}", chart.display(), values.display()))
}

/// Returns all charts with all values files, rendered once per process.
pub(super) fn rendered(tools: &Tools) -> &'static [Rendered] {
    static ALL: OnceLock<Vec<Rendered>> = OnceLock::new();
    ALL.get_or_init(|| {
        let cases = CHARTS.iter().flat_map(|(chart, _)| {
            let files = values_files(chart).into_iter();
            files.map(move |file| (*chart, file))
        });
        let render = |(chart, file): (&'static str, std::path::PathBuf)| {
            let text = template(tools, &deploy("helm").join(chart), &file);
            let objects = objects(&text);
            let name = format!("{chart} with {}", stem(&file));
            Rendered {
                name,
                chart,
                text,
                objects,
            }
        };
        cases.map(render).collect()
    })
}
