//! The charts and the kustomize components against `culvert render`: both describe one cluster of KKP in the same way.

use std::collections::BTreeSet;

use culvert_tests::charts::{Tools, deploy, run};
use serde_json::{Value, json};

use super::arguments::texts;
use super::rendered::{self, objects};

/// Resources that charts and `culvert render` have in common. The memory limits differ, except for the server with both
/// tunnels: `culvert render` has those of KKP, which are below the bounds of the buffers.
const RESOURCES: [&str; 2] = ["/resources/requests", "/resources/limits/cpu"];

/// Returns the objects of a golden file of `culvert render`.
fn golden(name: &str) -> Vec<Value> {
    let file = deploy("cli/tests/rendered").join(format!("{name}.yaml"));
    objects(&std::fs::read_to_string(file).unwrap())
}

/// Returns the objects of a chart with a values file and further values.
fn release(tools: &Tools, chart: &str, values: &str, more: &[&str]) -> Vec<Value> {
    let folder = deploy("helm").join(chart);
    let mut helm = tools.helm();
    helm.args(["template", "release", "--skip-tests"]);
    helm.args(["--namespace", "cluster-abc123", "--values"]);
    helm.arg(folder.join("ci").join(values)).arg(&folder);
    for value in more {
        helm.args(["--set", value]);
    }
    objects(&run(&mut helm).unwrap())
}

/// Returns the object of a kind and a name. A chart names some objects after the release.
fn find<'a>(objects: &'a [Value], kind: &str, name: &str) -> &'a Value {
    let named = |name: &str| {
        let mut objects = objects.iter();
        objects.find(|it| it["kind"] == kind && it["metadata"]["name"] == name)
    };
    let found = named(name).or_else(|| named("release"));
    found.unwrap_or_else(|| panic!("no {kind} {name}"))
}

/// Returns a container of a Deployment or a DaemonSet.
fn container<'a>(workload: &'a Value, name: &str) -> &'a Value {
    let pod = rendered::pod(workload).unwrap();
    let mut containers = pod["containers"].as_array().unwrap().iter();
    containers.find(|it| it["name"] == name).unwrap()
}

/// Returns the arguments of a container with two hyphens, without those of `except`.
fn arguments(container: &Value, except: &[&str]) -> BTreeSet<String> {
    let args = texts(&container["args"]).into_iter();
    let args = args.map(|arg| format!("--{}", arg.trim_start_matches('-')));
    args.filter(|arg| {
        !except
            .iter()
            .any(|flag| arg.starts_with(&format!("{flag}=")))
    })
    .collect()
}

/// Returns the egress selector of kube-apiserver.
fn egress(all: &[Value]) -> Vec<Value> {
    let file = &find(all, "ConfigMap", "kube-apiserver-egress")["data"];
    objects(file["egress-selector-configuration.yaml"].as_str().unwrap())
}

/// Checks fields of two objects. JSON pointers name the fields.
fn same(what: &str, left: &Value, right: &Value, fields: &[&str]) {
    for field in fields {
        let [left, right] = [left, right].map(|it| it.pointer(field));
        assert!(left.is_some(), "{what} has no {field}");
        assert_eq!(left, right, "{field} of {what}");
    }
}

/// Checks that every field of `part` is in `whole`, at any depth.
fn contains(what: &str, whole: &Value, part: &Value) {
    match part {
        Value::Object(fields) => {
            for (key, value) in fields {
                contains(&format!("{what}.{key}"), &whole[key], value);
            }
        }
        _ => assert_eq!(whole, part, "{what}"),
    }
}

#[test]
fn kustomize_component_is_the_rendered_patch() {
    let Some(tools) = Tools::get() else { return };
    let mut kustomize = tools.program("kustomize");
    let text = run(kustomize.arg("build").arg(deploy("kustomize/example"))).unwrap();
    let (ours, golden) = (objects(&text), golden("konnectivity-nodeport"));
    let [left, right] = [&ours, &golden].map(|it| find(it, "Deployment", "apiserver"));
    let [left, right] = [left, right].map(|it| container(it, "konnectivity-server"));
    same(
        "the server",
        left,
        right,
        &["/args", "/command", "/resources", "/imagePullPolicy"],
    );
    contains("probe", &right["livenessProbe"], &left["livenessProbe"]);
    for (port, other) in left["ports"]
        .as_array()
        .unwrap()
        .iter()
        .zip(right["ports"].as_array().unwrap())
    {
        contains("port", other, port);
    }
    let mounts = |it: &Value| -> BTreeSet<String> {
        let mounts = it["volumeMounts"].as_array().unwrap().iter();
        mounts.map(|it| it["mountPath"].to_string()).collect()
    };
    assert_eq!(mounts(left), mounts(right));
    let [left, right] = [&ours, &golden].map(|it| find(it, "Service", "konnectivity-server"));
    same(
        "the Service",
        left,
        right,
        &[
            "/metadata/annotations",
            "/spec/type",
            "/spec/selector",
            "/spec/publishNotReadyAddresses",
        ],
    );
    contains(
        "Service",
        &right["spec"]["ports"][0],
        &left["spec"]["ports"][0],
    );
    let [left, right] = [&ours, &golden].map(|it| egress(it));
    assert_eq!(left, right);
    let flags = find(&golden, "ConfigMap", "kube-apiserver-tunnel-flags")["data"]["flags"].as_str();
    let api = container(find(&ours, "Deployment", "apiserver"), "apiserver");
    for flag in [
        "--egress-selector-config-file=",
        "--kubelet-preferred-address-types=",
    ] {
        let args = texts(&api["args"]);
        let arg = args.iter().find(|arg| arg.starts_with(flag)).unwrap();
        assert!(flags.unwrap().lines().any(|line| line == arg), "{arg}");
    }
}

#[test]
fn policy_for_kube_apiserver_is_optional_and_the_rendered_one() {
    let Some(tools) = Tools::get() else { return };
    let folder = tempfile::TempDir::new_in(deploy("kustomize")).unwrap();
    let file = folder.path().join("kustomization.yaml");
    let mut found = Vec::new();
    for components in ["", "components: [../apiserver-egress-policy]\n"] {
        let text = format!("namespace: cluster-abc123\nresources: [../example]\n{components}");
        std::fs::write(&file, text).unwrap();
        let mut kustomize = tools.program("kustomize");
        let text = run(kustomize.arg("build").arg(folder.path())).unwrap();
        found.push(objects(&text));
    }
    let has_policy = |it: &[Value]| it.iter().any(|it| it["kind"] == "NetworkPolicy");
    assert!(
        !has_policy(&found[0]),
        "a policy isolates API servers of other namespaces"
    );
    let name = "apiserver-internal-allow";
    let rendered = golden("konnectivity-nodeport");
    assert_eq!(
        find(&found[1], "NetworkPolicy", name),
        find(&rendered, "NetworkPolicy", name)
    );
}

#[test]
fn agent_is_the_rendered_agent() {
    let Some(tools) = Tools::get() else { return };
    let golden = golden("konnectivity-nodeport");
    let ours = release(
        tools,
        "culvert-agent",
        "kkp-2.31.yaml",
        &["server.port=31001"],
    );
    let [left, right] = [&golden, &ours].map(|it| find(it, "Deployment", "konnectivity-agent"));
    same(
        "the Deployment",
        left,
        right,
        &["/spec/replicas", "/spec/strategy"],
    );
    contains(
        "labels",
        &right["spec"]["template"]["metadata"]["labels"],
        &json!({"app": "konnectivity-agent"}),
    );
    let [left, right] = [left, right].map(|it| rendered::pod(it).unwrap());
    same(
        "the pod",
        left,
        right,
        &["/serviceAccountName", "/priorityClassName"],
    );
    contains(
        "security",
        &right["securityContext"],
        &left["securityContext"],
    );
    let keys = |pod: &Value| -> BTreeSet<String> {
        let kind = "preferredDuringSchedulingIgnoredDuringExecution";
        let terms = pod["affinity"]["podAntiAffinity"][kind].as_array().unwrap();
        let keys = terms
            .iter()
            .map(|it| format!("{} {}", it["weight"], it["podAffinityTerm"]["topologyKey"]));
        keys.collect()
    };
    assert_eq!(keys(left), keys(right));
    let [left, right] = [left, right].map(|it| &it["containers"][0]);
    same(
        "the agent",
        left,
        right,
        &["/name", "/command", "/securityContext"],
    );
    same("the agent", left, right, &RESOURCES);
    // The chart mounts the CA beside the token, and no token for the Kubernetes API. Its values are those of the stock agent,
    // which does not know the time of the drain.
    let others = ["--ca-cert", "--drain-timeout"];
    assert_eq!(arguments(left, &others), arguments(right, &others));
    let [left, right] =
        [&golden, &ours].map(|it| find(it, "PodDisruptionBudget", "konnectivity-agent"));
    same(
        "the budget",
        left,
        right,
        &["/spec/minAvailable", "/spec/unhealthyPodEvictionPolicy"],
    );
    let name = "system:konnectivity-server";
    let [left, right] = [&golden, &ours].map(|it| find(it, "ClusterRoleBinding", name));
    same("the binding", left, right, &["/roleRef", "/subjects"]);
}

#[test]
fn node_tunnel_is_the_rendered_node_tunnel() {
    let Some(tools) = Tools::get() else { return };
    let golden = golden("konnectivity-tunneling");
    let ours = release(tools, "culvert-node-tunnel", "kkp.yaml", &[]);
    let [left, right] = [&golden, &ours].map(|it| find(it, "DaemonSet", "envoy-agent"));
    let metadata = "/spec/template/metadata";
    same(
        "the pods",
        left,
        right,
        &[&format!("{metadata}/annotations")],
    );
    for field in [
        &format!("{metadata}/labels"),
        "/spec/template/spec/securityContext",
    ] {
        contains(
            field,
            right.pointer(field).unwrap(),
            left.pointer(field).unwrap(),
        );
    }
    let [left, right] = [left, right].map(|it| rendered::pod(it).unwrap());
    same(
        "the pod",
        left,
        right,
        &[
            "/hostNetwork",
            "/tolerations",
            "/priorityClassName",
            "/automountServiceAccountToken",
            "/terminationGracePeriodSeconds",
        ],
    );
    let [left, right] = [left, right].map(|it| &it["containers"][0]);
    same("the node tunnel", left, right, &["/name", "/resources"]);
    contains(
        "security",
        &right["securityContext"],
        &left["securityContext"],
    );
    assert!(arguments(left, &[]).is_subset(&arguments(right, &[])));
}

#[test]
fn door_of_a_cluster_is_the_rendered_door() {
    let Some(tools) = Tools::get() else { return };
    let golden = golden("konnectivity-loadbalancer");
    let ours = release(tools, "culvert-door", "kkp-layout.yaml", &[]);
    let [left, right] = [&golden, &ours].map(|it| find(it, "Deployment", "nodeport-proxy-envoy"));
    same("the door", left, right, &["/spec/replicas"]);
    let [left, right] = [left, right].map(|it| &rendered::pod(it).unwrap()["containers"][0]);
    assert!(arguments(left, &[]).is_subset(&arguments(right, &[])));
    same("the door", left, right, &["/securityContext"]);
    let [left, right] =
        [&golden, &ours].map(|it| find(it, "Deployment", "nodeport-proxy-lb-updater"));
    let [left, right] = [left, right].map(|it| container(it, "lb-updater"));
    assert!(arguments(left, &[]).is_subset(&arguments(right, &[])));
    same("the updater", left, right, &["/securityContext"]);
    let [left, right] =
        [&golden, &ours].map(|it| find(it, "PodDisruptionBudget", "nodeport-proxy-envoy"));
    same(
        "the budget",
        left,
        right,
        &["/spec/maxUnavailable", "/spec/unhealthyPodEvictionPolicy"],
    );
    let [left, right] = [&golden, &ours].map(|it| find(it, "Service", "front-loadbalancer"));
    same("the Service", left, right, &["/spec/type"]);
    find(&ours, "ServiceAccount", "nodeport-proxy");
}

#[test]
fn server_with_openvpn_is_the_rendered_server() {
    let Some(tools) = Tools::get() else { return };
    let golden = golden("openvpn-nodeport");
    let ours = release(tools, "culvert-server", "openvpn.yaml", &[]);
    let [left, right] = [&golden, &ours].map(|it| find(it, "Deployment", "openvpn-server"));
    same(
        "the Deployment",
        left,
        right,
        &["/spec/replicas", "/spec/strategy"],
    );
    let [left, right] = [left, right].map(|it| &rendered::pod(it).unwrap()["containers"][0]);
    same(
        "the server",
        left,
        right,
        &["/securityContext", "/resources"],
    );
    // In the chart, the mode is in a ConfigMap, metrics are at the health port, and all servers are replicas.
    let except = ["--tunnel-mode", "--admin-bind-address", "--server-count"];
    // Folders differ.
    let names = |args: BTreeSet<String>| -> BTreeSet<String> {
        let names = args.into_iter().map(|arg| match arg.split_once("=/") {
            Some((flag, _)) => flag.to_owned(),
            None => arg,
        });
        names.collect()
    };
    let [left, right] = [left, right].map(|it| names(arguments(it, &except)));
    let missing: Vec<&String> = left.difference(&right).collect();
    assert!(missing.is_empty(), "{missing:?}");
    let [left, right] = [&golden, &ours].map(|it| find(it, "Service", "openvpn-server"));
    same(
        "the Service",
        left,
        right,
        &["/spec/type", "/metadata/annotations"],
    );
    let [left, right] = [&golden, &ours].map(|it| egress(it));
    assert_eq!(left, right);
}
