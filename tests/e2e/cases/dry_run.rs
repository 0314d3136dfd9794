//! Dry runs of every object that installs the programs, judged by the real kube-apiserver: schemas, admission and Pod
//! Security. Warnings are errors.

use std::fs::read_to_string;
use std::path::{Path, PathBuf};
use std::process::Command;

use culvert_tests::charts::{CHARTS, Tools, deploy, run, values_files, yaml_files};
use culvert_tests::process::{ours, outcome};
use serde_json::Value;

use crate::lab::Lab;

/// Environment variable with the file of the CustomResourceDefinition of PodMonitors. `tests/e2e/run` sets the variable.
const POD_MONITORS: &str = "CULVERT_E2E_POD_MONITORS";

/// Namespaces of the objects, beside `kube-system`. The last one belongs to a values file of the chart culvert-door.
const NAMESPACES: [&str; 4] = ["releases", "cluster-abc123", "kubermatic", "shop"];

/// Name of the Deployment that `culvert render` patches.
const PATCHED: &str = "apiserver";

/// Parts of a Cluster's specification that change the rendered objects.
const SPECIFICATIONS: [&str; 3] = [
    "features: {apiserverNetworkPolicy: false}",
    "clusterNetwork: {ipFamily: IPv4+IPv6}",
    "componentsOverride: {konnectivityProxy: {hostAntiAffinity: required, zoneAntiAffinity: required, \
     keepaliveTime: 2m, args: [--v=5], resources: {limits: {cpu: 200m, memory: 100Mi}}}, \
     nodePortProxyEnvoy: {replicas: 3}, envoyAgent: {resources: {limits: {memory: 100Mi}}}}",
];

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

    /// Returns the level that a chart claims with its values. Pods with the network of the node need `Privileged`.
    fn of_release(release: &Release) -> Self {
        let mut files = release.values.iter();
        let uses_network_of_node = release.chart == "culvert-node-tunnel"
            || files.any(|it| it.ends_with("ci/daemonset.yaml"))
            || release.set["hostNetwork"] == true;
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

/// A chart with values.
struct Release {
    chart: &'static str,
    /// Name for messages.
    name: String,
    values: Vec<PathBuf>,
    /// Values after those of the files.
    set: Value,
}

impl Release {
    /// Adds the values and the chart to a command of helm.
    fn add_to(&self, helm: &mut Command) {
        for file in &self.values {
            helm.arg("--values").arg(file);
        }
        if self.set.is_object() {
            helm.arg("--set-json").arg(self.set.to_string());
        }
        helm.arg(deploy("helm").join(self.chart));
    }

    /// Renders the chart as the release `release`.
    fn template(&self, tools: &Tools, more: &[&str]) -> String {
        let mut helm = tools.helm();
        helm.args(["template", "release", "--namespace", NAMESPACES[0]]);
        self.add_to(&mut helm);
        let text = run(helm.args(more));
        text.unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }
}

/// Returns every chart with every values file.
fn values_files_of_charts() -> Vec<Release> {
    let mut releases = Vec::new();
    for (chart, _) in CHARTS {
        for file in values_files(chart) {
            releases.push(Release {
                chart,
                name: file.display().to_string(),
                values: vec![file],
                set: Value::Null,
            });
        }
    }
    releases
}

/// Returns every chart with the values of its unit tests, except those of a values file alone. Tests of errors render
/// nothing.
fn unit_tests_of_charts() -> Vec<Release> {
    let mut releases = Vec::new();
    for (chart, _) in CHARTS {
        for file in yaml_files(deploy("helm").join(chart).join("tests")) {
            let suite: Value = serde_saphyr::from_str(&read_to_string(&file).unwrap()).unwrap();
            let files = |list: &Value| -> Vec<PathBuf> {
                let names = list.as_array().into_iter().flatten();
                let folder = file.parent().unwrap();
                names.map(|it| folder.join(it.as_str().unwrap())).collect()
            };
            assert!(suite["set"].is_null(), "{}: add set", file.display());
            for test in suite["tests"].as_array().unwrap() {
                let mut asserts = test["asserts"].as_array().unwrap().iter();
                let is_error = asserts.any(|it| !it["failedTemplate"].is_null());
                if is_error || (test["values"].is_null() && test["set"].is_null()) {
                    continue;
                }
                releases.push(Release {
                    chart,
                    name: format!("{}: {}", file.display(), test["it"]),
                    values: [files(&suite["values"]), files(&test["values"])].concat(),
                    set: test["set"].clone(),
                });
            }
        }
    }
    releases
}

/// Judges the objects of releases, in namespaces with the claimed Pod Security.
async fn judge_releases(lab: &mut Lab, what: &str, releases: &[Release], least: usize) {
    let tools = prepare(lab).await;
    let (mut accepted, mut failures) = (0, Vec::new());
    for level in [Level::Restricted, Level::Privileged] {
        set_level(lab, level).await;
        let claims = |release: &&Release| Level::of_release(release) == level;
        for release in releases.iter().filter(claims) {
            let objects = release.template(tools, &[]);
            accepted += judge(lab, &release.name, &objects, &mut failures).await;
        }
    }
    conclude(what, accepted, least, &failures);
}

/// The objects of every chart with every values file are accepted.
pub(super) async fn charts_are_accepted_with_every_values_file(lab: &mut Lab) {
    judge_releases(lab, "charts", &values_files_of_charts(), 150).await;
}

/// The objects of every chart with the values of each unit test are accepted.
pub(super) async fn charts_are_accepted_with_the_values_of_every_unit_test(lab: &mut Lab) {
    judge_releases(lab, "unit tests", &unit_tests_of_charts(), 300).await;
}

/// Releases that claim *privileged* are refused under *restricted*, so that no release claims too much.
pub(super) async fn charts_with_the_network_of_the_node_violate_restricted(lab: &mut Lab) {
    let tools = prepare(lab).await;
    set_level(lab, Level::Restricted).await;
    for release in values_files_of_charts() {
        if Level::of_release(&release) == Level::Privileged {
            let objects = release.template(tools, &[]);
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
    for release in values_files_of_charts() {
        let dry_run = ["--dry-run=server", "--take-ownership", &kubeconfig];
        release.template(tools, &dry_run);
        // Other cases have created objects with names of the charts.
        let mut install = tools.helm();
        install.args(["install", "release", "--namespace", NAMESPACES[0]]);
        release.add_to(&mut install);
        let report = run(install.args(dry_run));
        let report = report.unwrap_or_else(|error| panic!("{}: {error}", release.name));
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

/// Returns the output of `culvert render` for clusters with names: the golden files, and clusters with other values.
fn rendered_clusters() -> Vec<(String, String)> {
    let mut clusters: Vec<(String, String)> = yaml_files(deploy("cli/tests/rendered"))
        .into_iter()
        .map(|file| (file.display().to_string(), read_to_string(&file).unwrap()))
        .collect();
    let golden = "kkpVersion: '2.31'\nkubernetesVersion: 1.36.3";
    let olds = ["2.28", "2.29", "2.30"].map(|kkp| {
        let kubernetes = if kkp == "2.30" { "1.35.1" } else { "1.33.1" };
        format!("kkpVersion: '{kkp}'\nkubernetesVersion: {kubernetes}")
    });
    let mut add = |facts: &str, spec: &str| {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("cluster.yaml");
        let text = format!(
            "clusterID: abc123
externalName: abc123.seed.example.com
addressIP: 192.0.2.10
nodePorts: {{apiserver: 31000, konnectivityServer: 31001, openvpnServer: 31002}}
nodeNetworks: [192.168.0.0/16]
{facts}
spec: {{{spec}}}
"
        );
        std::fs::write(&file, text).unwrap();
        let mut render = Command::new(ours("culvert"));
        let text = outcome(render.arg("render").arg(&file));
        let name = format!("{facts}, {spec}");
        clusters.push((
            name.clone(),
            text.unwrap_or_else(|why| panic!("{name}: {why}")),
        ));
    };
    for tunnel in ["konnectivity", "openvpn"] {
        for strategy in ["NodePort", "LoadBalancer", "Tunneling"] {
            let strategy = format!("exposeStrategy: {strategy}");
            for old in &olds {
                add(&format!("{old}\ntunnel: {tunnel}"), &strategy);
            }
            let facts = format!("{golden}\ntunnel: {tunnel}");
            for more in SPECIFICATIONS {
                add(&facts, &format!("{strategy}, {more}"));
            }
        }
        let ranges =
            "exposeStrategy: LoadBalancer, apiServerAllowedIPRanges: {cidrBlocks: [10.0.0.0/8]}";
        add(&format!("{golden}\ntunnel: {tunnel}"), ranges);
    }
    add(
        &format!("{golden}\nimages: {{server: stock, agent: stock}}"),
        "",
    );
    clusters
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
    let clusters = rendered_clusters();
    for level in [Level::Restricted, Level::Privileged] {
        set_level(lab, level).await;
        for (name, text) in &clusters {
            let documents = text.split("---\n").filter(|it| !it.trim().is_empty());
            let documents = documents.filter(|it| Level::of_rendered(it) == level);
            let (of_apiserver, objects): (Vec<&str>, Vec<&str>) =
                documents.partition(|it| is_patch(it));
            for document in of_apiserver {
                patches += 1;
                if let Err(why) = patch(lab, document).await {
                    failures.push(format!("{name}, patch: {why}"));
                }
            }
            if !objects.is_empty() {
                accepted += judge(lab, name, &objects.join("---\n"), &mut failures).await;
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
    assert_eq!(patches, clusters.len(), "one patch for each cluster");
    conclude("culvert render", accepted, 600, &failures);
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
    let releases = values_files_of_charts();
    let is_right = |it: &&Release| it.name.ends_with("culvert-agent/ci/everything.yaml");
    let right = releases.iter().find(is_right).unwrap();
    let right = right.template(tools, &[]);
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
