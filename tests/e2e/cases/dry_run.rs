//! Dry runs of every object that installs the programs, judged by the real kube-apiserver: schemas, admission and Pod
//! Security. Warnings are errors.

use std::fs::read_to_string;
use std::path::{Path, PathBuf};

use culvert_tests::charts::{CHARTS, Tools, deploy, run, values_files, yaml_files};

use crate::lab::Lab;

/// Environment variable with the file of the CustomResourceDefinition of PodMonitors. `tests/e2e/run` sets the variable.
const POD_MONITORS: &str = "CULVERT_E2E_POD_MONITORS";

/// Namespaces of the objects, beside `kube-system`. The last one belongs to a values file of the chart culvert-door.
const NAMESPACES: [&str; 4] = ["releases", "cluster-abc123", "kubermatic", "shop"];

/// Name of the Deployment that `culvert render` patches.
const PATCHED: &str = "apiserver";

/// Arguments of a dry run.
const APPLY: [&str; 7] = [
    "apply",
    "--dry-run=server",
    "--validate=strict",
    "--warnings-as-errors",
    "--output=name",
    "--filename",
    "-",
];

/// Level of Pod Security.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Level {
    Restricted,
    Privileged,
}

impl Level {
    fn name(self) -> &'static str {
        match self {
            Self::Restricted => "restricted",
            Self::Privileged => "privileged",
        }
    }

    /// Returns the level that a chart claims with a values file. Pods with the network of the node need `Privileged`.
    fn of_chart(chart: &str, values: &Path) -> Self {
        let uses_network_of_node =
            chart == "culvert-node-tunnel" || values.ends_with("culvert-agent/ci/daemonset.yaml");
        if uses_network_of_node {
            Self::Privileged
        } else {
            Self::Restricted
        }
    }

    /// Returns the level that a manifest claims.
    fn of_manifest(file: &Path) -> Self {
        let name = file.file_name().unwrap();
        if name == "node-tunnel.yaml" || name == "agent-daemonset.yaml" {
            Self::Privileged
        } else {
            Self::Restricted
        }
    }

    /// Returns the level of a document of `culvert render`. The patched pod of kube-apiserver belongs to KKP.
    fn of_rendered(document: &str) -> Self {
        if document.contains("\n  name: envoy-agent\n") || is_patch(document) {
            Self::Privileged
        } else {
            Self::Restricted
        }
    }
}

/// Creates what the objects of all cases need: the kind PodMonitor, and namespaces with the account of pods that name
/// none.
async fn prepare(lab: &mut Lab) -> &'static Tools {
    lab.no_tunnel().await;
    let tools = Tools::get().expect("programs of tests/install/tools");
    let file = std::env::var_os(POD_MONITORS).expect(POD_MONITORS);
    // The definition is too large for the annotation of a client-side apply.
    let definition = PathBuf::from(file);
    let apply = [
        "apply",
        "--server-side",
        "--filename",
        definition.to_str().unwrap(),
    ];
    lab.kubectl.must(&apply).await;
    let name = "crd/podmonitors.monitoring.coreos.com";
    let established = ["wait", "--for=condition=Established", "--timeout=60s", name];
    lab.kubectl.must(&established).await;
    for namespace in NAMESPACES {
        let objects = format!(
            "{{apiVersion: v1, kind: Namespace, metadata: {{name: {namespace}}}}}
---
{{apiVersion: v1, kind: ServiceAccount, metadata: {{name: default, namespace: {namespace}}}}}
"
        );
        lab.kubectl.apply(&objects).await;
    }
    tools
}

/// Sets the level of Pod Security of all namespaces.
async fn set_level(lab: &Lab, level: Level) {
    let level = level.name();
    let prefix = "pod-security.kubernetes.io";
    let labels = [
        format!("{prefix}/enforce={level}"),
        format!("{prefix}/warn={level}"),
        format!("{prefix}/enforce-version=latest"),
        format!("{prefix}/warn-version=latest"),
    ];
    let mut args = vec!["label", "namespace", "--overwrite", "kube-system"];
    args.extend(NAMESPACES);
    args.extend(labels.iter().map(String::as_str));
    lab.kubectl.must(&args).await;
}

/// Judges objects, and adds the reason to `failures`. Returns the number of accepted objects.
async fn judge(lab: &Lab, name: &str, objects: &str, failures: &mut Vec<String>) -> usize {
    match lab.kubectl.bytes(&APPLY, objects.as_bytes()).await {
        Ok(names) => String::from_utf8_lossy(&names).lines().count(),
        Err(why) => {
            failures.push(format!("{name}: {why}"));
            0
        }
    }
}

/// Ends the case if an object was refused.
fn conclude(what: &str, accepted: usize, least: usize, failures: &[String]) {
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(accepted >= least, "only {accepted} objects of {what}");
    eprintln!("{accepted} objects of {what} accepted");
}

/// Renders a chart as the release `release`.
fn template(tools: &Tools, chart: &str, values: &Path, more: &[&str]) -> String {
    let mut helm = tools.helm();
    helm.args([
        "template",
        "release",
        "--namespace",
        NAMESPACES[0],
        "--values",
    ]);
    helm.arg(values).arg(deploy("helm").join(chart)).args(more);
    run(&mut helm).unwrap_or_else(|error| panic!("{}: {error}", values.display()))
}

/// Returns every chart with every values file.
fn releases() -> impl Iterator<Item = (&'static str, PathBuf)> {
    CHARTS.iter().flat_map(|(chart, _)| {
        let files = values_files(chart).into_iter();
        files.map(move |file| (*chart, file))
    })
}

/// The objects of every chart with every values file are accepted, in namespaces with the claimed Pod Security.
pub(super) async fn charts_are_accepted_with_every_values_file(lab: &mut Lab) {
    let tools = prepare(lab).await;
    let (mut accepted, mut failures) = (0, Vec::new());
    for level in [Level::Restricted, Level::Privileged] {
        set_level(lab, level).await;
        for (chart, values) in releases() {
            if Level::of_chart(chart, &values) == level {
                let objects = template(tools, chart, &values, &[]);
                let name = values.display().to_string();
                accepted += judge(lab, &name, &objects, &mut failures).await;
            }
        }
    }
    conclude("charts", accepted, 150, &failures);
}

/// Releases that claim *privileged* are refused under *restricted*, so that no release claims too much.
pub(super) async fn charts_with_the_network_of_the_node_violate_restricted(lab: &mut Lab) {
    let tools = prepare(lab).await;
    set_level(lab, Level::Restricted).await;
    for (chart, values) in releases() {
        if Level::of_chart(chart, &values) == Level::Privileged {
            let objects = template(tools, chart, &values, &[]);
            let error = lab.kubectl.bytes(&APPLY, objects.as_bytes()).await;
            let error = error.unwrap_err();
            assert!(error.contains("would violate PodSecurity"), "{error}");
            assert!(error.contains("hostNetwork=true"), "{error}");
        }
    }
}

/// helm accepts every chart with every values file when it asks the cluster for its version and its kinds.
pub(super) async fn helm_accepts_every_values_file(lab: &mut Lab) {
    let tools = prepare(lab).await;
    let kubeconfig = format!("--kubeconfig={}", lab.kubectl.kubeconfig.display());
    for (chart, values) in releases() {
        template(
            tools,
            chart,
            &values,
            &["--dry-run=server", "--take-ownership", &kubeconfig],
        );
        // Other cases have created objects with names of the charts.
        let mut install = tools.helm();
        install.args(["install", "release", "--namespace", NAMESPACES[0]]);
        install.args(["--dry-run=server", "--take-ownership", &kubeconfig]);
        install.arg("--values").arg(&values);
        let report = run(install.arg(deploy("helm").join(chart)));
        let report = report.unwrap_or_else(|error| panic!("{}: {error}", values.display()));
        assert!(report.contains("STATUS: pending-install"), "{report}");
        assert!(report.contains("\nNOTES:\n"), "{report}");
    }
}

/// Every file of `deploy/manifests` is accepted.
pub(super) async fn manifests_are_accepted(lab: &mut Lab) {
    prepare(lab).await;
    let (mut accepted, mut failures) = (0, Vec::new());
    for level in [Level::Restricted, Level::Privileged] {
        set_level(lab, level).await;
        for file in yaml_files(deploy("manifests")) {
            if Level::of_manifest(&file) == level {
                let objects = read_to_string(&file).unwrap();
                let name = file.display().to_string();
                accepted += judge(lab, &name, &objects, &mut failures).await;
            }
        }
    }
    conclude("manifests", accepted, 50, &failures);
}

/// kube-apiserver with the kustomize components is accepted.
pub(super) async fn kustomize_example_is_accepted(lab: &mut Lab) {
    let tools = prepare(lab).await;
    set_level(lab, Level::Restricted).await;
    let mut kustomize = tools.program("kustomize");
    kustomize.arg("build").arg(deploy("kustomize/example"));
    let objects = run(&mut kustomize).unwrap();
    let mut failures = Vec::new();
    let accepted = judge(lab, "example", &objects, &mut failures).await;
    conclude("the kustomize example", accepted, 3, &failures);
}

/// Returns true for a patch of the Deployment of kube-apiserver.
fn is_patch(document: &str) -> bool {
    document.contains("# a strategic merge patch")
}

/// What `culvert render` prints for each kind of cluster is accepted. Patches are tried on a Deployment of
/// kube-apiserver.
pub(super) async fn rendered_clusters_are_accepted(lab: &mut Lab) {
    prepare(lab).await;
    set_level(lab, Level::Restricted).await;
    let base = read_to_string(deploy("kustomize/example/apiserver.yaml")).unwrap();
    let in_namespace = ["apply", "--namespace=cluster-abc123", "--filename", "-"];
    let create = lab.kubectl.bytes(&in_namespace, base.as_bytes()).await;
    create.unwrap();
    let (mut accepted, mut patches, mut failures) = (0, 0, Vec::new());
    for level in [Level::Restricted, Level::Privileged] {
        set_level(lab, level).await;
        for file in yaml_files(deploy("cli/tests/rendered")) {
            let name = file.display().to_string();
            let text = read_to_string(&file).unwrap();
            let documents = text.split("---\n").filter(|it| !it.trim().is_empty());
            for document in documents.filter(|it| Level::of_rendered(it) == level) {
                if is_patch(document) {
                    patches += 1;
                    if let Err(why) = patch(lab, document).await {
                        failures.push(format!("{name}, patch: {why}"));
                    }
                } else {
                    accepted += judge(lab, &name, document, &mut failures).await;
                }
            }
        }
    }
    let delete = [
        "delete",
        "deployment",
        PATCHED,
        "--namespace=cluster-abc123",
    ];
    lab.kubectl.must(&delete).await;
    assert_eq!(patches, 6, "one patch for each cluster");
    conclude("culvert render", accepted, 80, &failures);
}

/// Tries a patch of the Deployment of kube-apiserver.
async fn patch(lab: &Lab, document: &str) -> Result<(), String> {
    let args = [
        "patch",
        "deployment",
        PATCHED,
        "--namespace=cluster-abc123",
        "--dry-run=server",
        "--warnings-as-errors",
        "--patch-file=/dev/stdin",
    ];
    let output = lab.kubectl.bytes(&args, document.as_bytes()).await?;
    let output = String::from_utf8_lossy(&output).into_owned();
    // kubectl reports a patch without an effect with another text.
    let is_changed = output == format!("deployment.apps/{PATCHED} patched\n");
    is_changed.then_some(()).ok_or(output)
}

/// The judges find an unknown field, a wrong value, a violation of Pod Security, a missing namespace, and a wrong field
/// in a PodMonitor and in a patch.
pub(super) async fn wrong_objects_are_refused(lab: &mut Lab) {
    let tools = prepare(lab).await;
    set_level(lab, Level::Restricted).await;
    let values = deploy("helm/culvert-agent/ci/everything.yaml");
    let right = template(tools, "culvert-agent", &values, &[]);
    let wrong = [
        (
            "minAvailable: 3",
            "minAvailabel: 3",
            "unknown field \"spec.minAvailabel\"",
        ),
        (
            "protocol: TCP",
            "protocol: TPC",
            "Unsupported value: \"TPC\"",
        ),
        (
            "runAsNonRoot: true",
            "runAsNonRoot: false",
            "would violate PodSecurity",
        ),
        (
            "namespace: releases",
            "namespace: none",
            "namespaces \"none\" not found",
        ),
        (
            "podMetricsEndpoints:",
            "podMetricEndpoints:",
            "unknown field \"spec.podMetricEndpoints\"",
        ),
    ];
    for (from, to, reason) in wrong {
        assert!(right.contains(from), "{from} is missing in:\n{right}");
        let objects = right.replace(from, to);
        let result = lab.kubectl.bytes(&APPLY, objects.as_bytes()).await;
        let error = result.expect_err(to);
        assert!(error.contains(reason), "{to}: {error}");
    }
}
