//! The charts, the kustomize components and the manifests: judges that need no cluster.
//!
//! | module | contents |
//! |---|---|
//! | [`rendered`] | the objects of every chart with every values file |
//! | [`agreement`] | the objects against those of `culvert render` |
//! | [`arguments`] | the arguments of every container, read by the real programs and by the stock programs |
//! | [`documents`] | commands and files in the documents |
//! | [`drift`] | generated files and copies against their sources |
//! | [`registry`] | a chart pushed to a registry and pulled again |

mod agreement;
mod arguments;
mod documents;
mod drift;
mod registry;
mod rendered;

use std::path::Path;

use culvert_tests::charts::{CHARTS, Tools, deploy, run, values_files};
use serde_json::Value;
use tempfile::TempDir;

use self::rendered::rendered;

pub(crate) use self::rendered::objects;

/// Oldest and newest version of Kubernetes whose schemas the objects must fit.
const KUBERNETES: [&str; 2] = ["1.30", "1.37"];

/// Returns the name of a file without its extension.
fn stem(file: &Path) -> &str {
    file.file_stem().unwrap().to_str().unwrap()
}

/// Checks objects against the schemas of a version of Kubernetes. Kinds of other projects have no schema.
fn check_schemas(tools: &Tools, version: &str, text: &str, objects: &[Value]) {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("objects.yaml");
    std::fs::write(&file, text).unwrap();
    let report = run(tools
        .kubernetes_validate()
        .args(["-k", version, "--strict"])
        .arg(&file))
    .unwrap_or_else(|error| panic!("Kubernetes {version}: {error}\n{text}"));
    let passed = report.lines().filter(|line| line.contains(" passed for "));
    let known = objects.iter().filter(|it| it["kind"] != "PodMonitor");
    assert_eq!(
        passed.count(),
        known.count(),
        "Kubernetes {version}: {report}"
    );
}

#[test]
fn charts_pass_lint_with_every_values_file() {
    let Some(tools) = Tools::get() else { return };
    for (chart, _) in CHARTS {
        for file in values_files(chart) {
            let mut helm = tools.helm();
            helm.args(["lint", "--strict", "--quiet", "--values"]);
            let result = run(helm.arg(&file).arg(deploy("helm").join(chart)));
            result.unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        }
    }
}

#[test]
fn rendered_objects_fit_the_schemas_of_kubernetes() {
    let Some(tools) = Tools::get() else { return };
    for version in KUBERNETES {
        let all = rendered(tools);
        let text: Vec<&str> = all.iter().map(|it| it.text.as_str()).collect();
        let objects: Vec<Value> = all.iter().flat_map(|it| it.objects.clone()).collect();
        check_schemas(tools, version, &text.join("\n"), &objects);
    }
}

#[test]
fn schemas_refuse_a_wrong_field() {
    let Some(tools) = Tools::get() else { return };
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("wrong.yaml");
    let text = "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {port: [1]}\n";
    std::fs::write(&file, text).unwrap();
    let mut validate = tools.kubernetes_validate();
    run(validate.args(["-k", "1.36", "--strict"]).arg(&file)).unwrap_err();
}

#[test]
fn unit_tests_of_the_charts_pass() {
    let Some(tools) = Tools::get() else { return };
    for (chart, _) in CHARTS {
        let report = run(tools
            .program("helm-unittest")
            .arg(deploy("helm").join(chart)));
        let report = report.unwrap_or_else(|error| panic!("{chart}: {error}"));
        assert!(report.contains("1 passed, 1 total"), "{chart}: {report}");
    }
}

/// Returns an error if the pod violates the Pod Security Standard *restricted*.
fn restricted(pod: &Value) -> Result<(), String> {
    for field in ["hostNetwork", "hostPID", "hostIPC"] {
        if pod[field] == true {
            return Err(field.to_owned());
        }
    }
    let security = &pod["securityContext"];
    if security["runAsNonRoot"] != true || security["runAsUser"] == 0 {
        return Err("root".to_owned());
    }
    if security["seccompProfile"]["type"] != "RuntimeDefault" {
        return Err("seccompProfile".to_owned());
    }
    let allowed = [
        "configMap",
        "emptyDir",
        "persistentVolumeClaim",
        "projected",
        "secret",
    ];
    for volume in pod["volumes"].as_array().into_iter().flatten() {
        if !allowed.iter().any(|kind| volume.get(kind).is_some()) {
            return Err(format!("volume {volume}"));
        }
    }
    for container in pod["containers"].as_array().unwrap() {
        let security = &container["securityContext"];
        let drops_all = security["capabilities"]["drop"] == serde_json::json!(["ALL"]);
        if security["allowPrivilegeEscalation"] != false || !drops_all {
            return Err(format!("container {}", container["name"]));
        }
        let added = security["capabilities"]["add"].as_array();
        let adds_more = added
            .into_iter()
            .flatten()
            .any(|it| it != "NET_BIND_SERVICE");
        if adds_more || security["runAsUser"] == 0 {
            return Err(format!("container {}", container["name"]));
        }
    }
    Ok(())
}

#[test]
fn pods_fit_the_restricted_standard_unless_they_use_the_network_of_the_node() {
    let Some(tools) = Tools::get() else { return };
    let mut count = 0;
    for render in rendered(tools) {
        for pod in render.pods() {
            let result = restricted(pod);
            if pod["hostNetwork"] == true {
                assert_eq!(result, Err("hostNetwork".to_owned()), "{}", render.name);
            } else {
                assert_eq!(result, Ok(()), "{}", render.name);
                count += 1;
            }
        }
    }
    assert!(count > 20, "{count} pods");
}

#[test]
fn selectors_of_services_budgets_and_policies_match_the_pods_of_their_release() {
    let Some(tools) = Tools::get() else { return };
    for render in rendered(tools) {
        let labels: Vec<&Value> = render.labels_of_pods().collect();
        for object in &render.objects {
            // A policy for egress only is for the pods of kube-apiserver.
            if object["spec"]["policyTypes"] == serde_json::json!(["Egress"]) {
                continue;
            }
            let selector = match object["kind"].as_str().unwrap() {
                "Service" => &object["spec"]["selector"],
                "PodDisruptionBudget" | "PodMonitor" => &object["spec"]["selector"]["matchLabels"],
                "NetworkPolicy" => &object["spec"]["podSelector"]["matchLabels"],
                _ => continue,
            };
            let selector = selector.as_object().unwrap();
            let matches = |pod: &&&Value| selector.iter().all(|(key, value)| pod[key] == *value);
            let found = labels.iter().filter(matches).count();
            let name = &object["metadata"]["name"];
            assert!(found > 0, "{}: {name} selects no pod", render.name);
        }
    }
}

#[test]
fn server_is_added_to_the_pod_of_kube_apiserver() {
    let Some(tools) = Tools::get() else { return };
    let mut kustomize = tools.program("kustomize");
    let text = run(kustomize.arg("build").arg(deploy("kustomize/example"))).unwrap();
    let objects = rendered::objects(&text);
    check_schemas(tools, "1.36", &text, &objects);
    let find = |kind: &str| objects.iter().find(|it| it["kind"] == kind).unwrap();
    let pod = &find("Deployment")["spec"]["template"]["spec"];
    assert_eq!(restricted(pod), Ok(()));

    let containers = pod["containers"].as_array().unwrap();
    let find_container = |name: &str| containers.iter().find(|it| it["name"] == name).unwrap();
    let api = find_container("apiserver");
    // The program has the capability in its file.
    let capabilities = &api["securityContext"]["capabilities"];
    assert_eq!(capabilities["add"], serde_json::json!(["NET_BIND_SERVICE"]));
    let flag = "--egress-selector-config-file=/etc/kubernetes/konnectivity/egress-selector-configuration.yaml";
    assert!(
        api["args"].as_array().unwrap().contains(&flag.into()),
        "{api}"
    );
    let server = find_container("konnectivity-server");
    let args = arguments::texts(&server["args"]);
    assert!(args.contains(&"--server-count=2".to_owned()), "{args:?}");

    let egress = find("ConfigMap")["data"]["egress-selector-configuration.yaml"].as_str();
    let egress = &rendered::objects(egress.unwrap())[0]["egressSelections"][0]["connection"];
    let socket = egress["transport"]["uds"]["udsName"].as_str().unwrap();
    assert!(args.contains(&format!("--uds-name={socket}")), "{args:?}");
    let folder = Path::new(socket).parent().unwrap().to_str().unwrap();
    for container in [api, server] {
        let mounts = container["volumeMounts"].as_array().unwrap();
        assert!(
            mounts.iter().any(|it| it["mountPath"] == folder),
            "{mounts:?}"
        );
    }
}

#[test]
fn server_needs_the_number_of_pods() {
    let Some(tools) = Tools::get() else { return };
    let folder = TempDir::new().unwrap();
    for part in ["example", "konnectivity-server", "kube-apiserver-flags"] {
        let copy = folder.path().join(part);
        std::fs::create_dir(&copy).unwrap();
        for entry in std::fs::read_dir(deploy("kustomize").join(part)).unwrap() {
            let entry = entry.unwrap();
            let text = std::fs::read_to_string(entry.path()).unwrap();
            let text = text.replace("  replicas: 2\n", "");
            std::fs::write(copy.join(entry.file_name()), text).unwrap();
        }
    }
    let mut kustomize = tools.program("kustomize");
    let error = run(kustomize.arg("build").arg(folder.path().join("example"))).unwrap_err();
    assert!(error.contains("spec.replicas"), "{error}");
}
