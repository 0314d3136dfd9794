//! Rendered clusters of each tunnel and expose strategy: golden files, types, and command lines.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::core::v1::{ConfigMap, Service, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::apiserver::Apiserver;
use super::cluster::Cluster;
use super::finding::Findings;
use super::objects::{self, Object, Part};
use super::plan::{Plan, Side};
use super::target::Target;
use super::{Options, facts, input, output, plan, rules, tokens};

mod chains;

const STRATEGIES: [&str; 3] = ["NodePort", "LoadBalancer", "Tunneling"];
const TUNNELS: [&str; 2] = ["konnectivity", "openvpn"];

/// Returns the cluster file of a tunnel and a strategy, with `more` lines.
fn file(tunnel: &str, strategy: &str, more: &str) -> String {
    format!(
        "clusterID: abc123\ntunnel: {tunnel}\nkubernetesVersion: 1.36.3\nexternalName: abc123.seed.example.com\n\
         addressIP: 192.0.2.10\nnodePorts: {{apiserver: 31000, konnectivityServer: 31001, openvpnServer: 31002}}\n\
         nodeNetworks: [192.168.0.0/16]\n{more}\nspec: {{exposeStrategy: {strategy}}}"
    )
}

fn render<T>(text: &str, use_objects: impl FnOnce(&[Object]) -> T) -> T {
    let mut findings = Findings::default();
    let cluster = Cluster::new(input::parse(text).unwrap(), true, &mut findings);
    rules::check(&cluster, None, &mut findings);
    let target = Target::new(&cluster, &mut findings);
    assert_eq!(findings.problems, []);
    use_objects(&objects::all(&target, None))
}

fn each(mut check: impl FnMut(&str, &str, &[Object])) {
    for tunnel in TUNNELS {
        for strategy in STRATEGIES {
            let text = file(tunnel, strategy, "");
            render(&text, |objects| check(tunnel, strategy, objects));
        }
    }
}

#[test]
fn rendered_clusters_equal_the_golden_files() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/rendered");
    each(|tunnel, strategy, objects| {
        let path = folder.join(format!("{tunnel}-{strategy}.yaml").to_lowercase());
        let text = output::stream(objects).unwrap();
        if std::env::var_os("CULVERT_UPDATE_GOLDEN").is_some() {
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(&path, &text).unwrap();
        }
        let golden = std::fs::read_to_string(&path).unwrap();
        assert!(
            text == golden,
            "{} differs; CULVERT_UPDATE_GOLDEN=1 writes it again",
            path.display()
        );
    });
}

#[test]
fn egress_of_kube_apiserver_is_left_alone_without_kkps_policies() {
    let policies = |text: &str| -> Vec<Value> {
        render(text, |objects| {
            let all = objects.iter().filter(|it| it.part == Part::NetworkPolicies);
            all.map(|it| it.value["metadata"]["name"].clone()).collect()
        })
    };
    for tunnel in TUNNELS {
        let text = file(tunnel, "NodePort", "");
        assert_eq!(policies(&text).len(), 1, "{tunnel}");
        let feature = "NodePort, features: {apiserverNetworkPolicy: false}";
        let text = file(tunnel, feature, "");
        assert_eq!(policies(&text), [] as [Value; 0], "{tunnel}");
    }
}

/// Checks that the Kubernetes type knows every field. An empty list or object may be left out.
fn fits<T: DeserializeOwned + Serialize>(value: &Value) {
    let typed: T = serde_json::from_value(value.clone()).unwrap();
    let back = serde_json::to_value(typed).unwrap();
    let mut lost = Vec::new();
    compare("", value, &back, &mut lost);
    assert_eq!(lost, [""; 0], "{value:#}");
}

fn compare(path: &str, ours: &Value, theirs: &Value, lost: &mut Vec<String>) {
    match (ours, theirs) {
        (Value::Object(ours), Value::Object(theirs)) => {
            for (key, value) in ours {
                let theirs = theirs.get(key).unwrap_or(&Value::Null);
                compare(&format!("{path}.{key}"), value, theirs, lost);
            }
        }
        (Value::Array(ours), Value::Array(theirs)) if ours.len() == theirs.len() => {
            for (ours, theirs) in ours.iter().zip(theirs) {
                compare(path, ours, theirs, lost);
            }
        }
        (Value::Array(ours), Value::Null) if ours.is_empty() => {}
        _ if ours == theirs => {}
        _ => lost.push(path.to_owned()),
    }
}

/// Removes the directives of a strategic merge patch that delete items. The types of Kubernetes do not have them.
fn remove_deletions(value: &mut Value) {
    match value {
        Value::Array(items) => {
            items.retain(|item| item["$patch"] != "delete");
            items.iter_mut().for_each(remove_deletions);
        }
        Value::Object(fields) => fields.values_mut().for_each(remove_deletions),
        _ => {}
    }
}

#[test]
fn rendered_objects_have_only_fields_of_their_kubernetes_types() {
    each(|_, _, objects| {
        for object in objects {
            let mut value = object.value.clone();
            if object.is_patch {
                remove_deletions(&mut value);
            }
            let value = &value;
            match value["kind"].as_str().unwrap() {
                "ClusterRole" => fits::<ClusterRole>(value),
                "ClusterRoleBinding" => fits::<ClusterRoleBinding>(value),
                "ConfigMap" => fits::<ConfigMap>(value),
                "DaemonSet" => fits::<DaemonSet>(value),
                "Deployment" => fits::<Deployment>(value),
                "NetworkPolicy" => fits::<NetworkPolicy>(value),
                "PodDisruptionBudget" => fits::<PodDisruptionBudget>(value),
                "Role" => fits::<Role>(value),
                "RoleBinding" => fits::<RoleBinding>(value),
                "Service" => fits::<Service>(value),
                "ServiceAccount" => fits::<ServiceAccount>(value),
                kind => panic!("no type for {kind}"),
            }
        }
    });
}

#[test]
fn patch_of_servers_beside_kube_apiserver_removes_the_volume_of_other_servers() {
    let name = "culvert-front-end-client";
    let path = "/etc/kubernetes/culvert-front-end";
    each(|tunnel, _, objects| {
        let patch = objects.iter().find(|it| it.is_patch).unwrap();
        let pod = &patch.value["spec"]["template"]["spec"];
        let mut containers = pod["containers"].as_array().unwrap().iter();
        let container = containers.find(|it| it["name"] == "apiserver").unwrap();
        // Patches find volumes by name, and mounts by path.
        let mut volumes = pod["volumes"].as_array().unwrap().iter();
        let volume = volumes.find(|it| it["name"] == name).unwrap();
        let mut mounts = container["volumeMounts"].as_array().unwrap().iter();
        let mount = mounts.find(|it| it["mountPath"] == path).unwrap();
        match tunnel {
            "konnectivity" => {
                assert_eq!(
                    volume,
                    &serde_json::json!({"name": name, "$patch": "delete"})
                );
                assert_eq!(
                    mount,
                    &serde_json::json!({"mountPath": path, "$patch": "delete"})
                );
            }
            _ => {
                assert_eq!(volume["secret"]["secretName"], name);
                assert_eq!(mount["name"], name);
            }
        }
    });
}

#[test]
fn unready_pods_do_not_keep_nodes_from_a_drain() {
    let mut seen = BTreeSet::new();
    each(|_, _, objects| {
        let budgets = objects.iter().map(|it| &it.value);
        for budget in budgets.filter(|it| it["kind"] == "PodDisruptionBudget") {
            let policy = &budget["spec"]["unhealthyPodEvictionPolicy"];
            assert_eq!(policy, "AlwaysAllow", "{budget}");
            seen.insert(budget["metadata"]["name"].to_string());
        }
    });
    assert_eq!(seen.len(), 2, "{seen:?}");
}

/// A copy of the paths that the arguments name, because the parsers look for the files.
struct Root(tempfile::TempDir);

impl Root {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// Moves absolute paths of the arguments into the folder, and creates the files.
    fn move_into(&self, args: &[String]) -> Vec<String> {
        let moved = args.iter().map(|arg| match arg.split_once("=/") {
            Some((flag, path)) => {
                let file: PathBuf = self.0.path().join(path);
                std::fs::create_dir_all(file.parent().unwrap()).unwrap();
                match flag {
                    "--openvpn-client-config-dir" => std::fs::create_dir_all(&file).unwrap(),
                    "--uds-name" | "--admin-uds" | "--tunnel-state-file" => {}
                    _ => std::fs::write(&file, "").unwrap(),
                }
                format!("{flag}={}", file.display())
            }
            None => arg.clone(),
        });
        std::iter::once("program".to_owned()).chain(moved).collect()
    }
}

/// Returns the command lines: name of the container, arguments.
fn command_lines(objects: &[Object]) -> Vec<(String, Vec<String>)> {
    let pods = objects
        .iter()
        .map(|object| &object.value["spec"]["template"]["spec"]);
    let containers = pods
        .filter_map(|pod| pod["containers"].as_array())
        .flatten();
    let with_args = containers.filter(|container| container["args"].is_array());
    with_args
        .map(|container| {
            let name = container["name"].as_str().unwrap().to_owned();
            (
                name,
                serde_json::from_value(container["args"].clone()).unwrap(),
            )
        })
        .collect()
}

#[test]
fn programs_accept_every_rendered_argument() {
    let mut seen = BTreeSet::new();
    for kkp in ["2.28", "2.31"] {
        let version = if kkp == "2.28" { "1.33.1" } else { "1.36.3" };
        for (tunnel, strategy) in TUNNELS.iter().flat_map(|t| STRATEGIES.map(|s| (t, s))) {
            let text = file(tunnel, strategy, &format!("kkpVersion: '{kkp}'"));
            let text = text.replace("1.36.3", version);
            for (name, args) in render(&text, command_lines) {
                let root = Root::new();
                let line = root.move_into(&args);
                let outcome = match name.as_str() {
                    "konnectivity-server" | "openvpn-server" => {
                        culvert_server::config::Config::from_args(&line).map(drop)
                    }
                    "konnectivity-agent" | "openvpn-client" => {
                        culvert_agent::config::Config::from_args(&line).map(drop)
                    }
                    "envoy-manager" | "lb-updater" => {
                        culvert_door::config::Config::from_args(&line).map(drop)
                    }
                    "envoy-agent" => {
                        culvert_node_tunnel::config::Config::from_args(&line).map(drop)
                    }
                    other => panic!("unknown container {other}"),
                };
                assert_eq!(
                    outcome.map_err(|exit| exit.text),
                    Ok(()),
                    "{name} {args:#?}"
                );
                seen.insert(name);
            }
        }
    }
    assert_eq!(seen.len(), 7, "{seen:?}");
}

#[test]
fn missing_values_are_named_together() {
    let mut findings = Findings::default();
    let cluster = Cluster::new(
        input::parse("tunnel: openvpn").unwrap(),
        true,
        &mut findings,
    );
    Target::new(&cluster, &mut findings);
    let found: Vec<String> = findings.problems.iter().map(ToString::to_string).collect();
    let required =
        |path, flag| format!("{path}: Required value: set it in the cluster file or with --{flag}");
    assert_eq!(
        found,
        [
            required("clusterID", "cluster-id"),
            required("externalName", "external-name"),
            required("addressIP", "address-ip"),
            required("kubernetesVersion", "kubernetes-version"),
            required("nodePorts.apiserver", "apiserver-node-port"),
            required("nodePorts.openvpnServer", "openvpn-node-port"),
            required("nodeNetworks", "node-network"),
        ]
    );
}

#[test]
fn stock_images_follow_the_versions_of_kkp_and_kubernetes() {
    let image = |kkp: &str, version: &str| {
        let more = format!("kkpVersion: '{kkp}'\nimages: {{agent: stock}}");
        let text = file("konnectivity", "NodePort", &more).replace("1.36.3", version);
        render(&text, |objects| {
            let agent = objects
                .iter()
                .find(|object| object.part == Part::Agent)
                .unwrap();
            let containers = &agent.value["spec"]["template"]["spec"]["containers"];
            containers[0]["image"].as_str().unwrap().to_owned()
        })
    };
    let stock = |version| format!("registry.k8s.io/kas-network-proxy/proxy-agent:{version}");
    assert_eq!(image("2.31", "1.36.3"), stock("v0.35.0"));
    assert_eq!(image("2.31", "1.33.1"), stock("v0.33.1"));
    assert_eq!(image("2.30", "1.35.1"), stock("v0.34.0"));
    assert_eq!(image("2.29", "1.31.1"), stock("v0.31.0"));
    assert_eq!(image("2.28", "1.30.1"), stock("v0.30.3"));
}

#[test]
fn stock_images_are_refused_with_openvpn() {
    let text = file(
        "openvpn",
        "NodePort",
        "images: {server: stock, agent: stock}",
    );
    let mut findings = Findings::default();
    let cluster = Cluster::new(input::parse(&text).unwrap(), true, &mut findings);
    Target::new(&cluster, &mut findings);
    let found: Vec<String> = findings.problems.iter().map(ToString::to_string).collect();
    let refused = |path| {
        format!(
            "{path}: Invalid value: \"stock\": Konnectivity's own programs have no OpenVPN tunnel; \
             leave the value out"
        )
    };
    assert_eq!(found, ["images.server", "images.agent"].map(refused));
}

#[test]
fn server_with_both_tunnels_needs_the_image_with_all_programs() {
    let problems = |image: &str| -> Vec<String> {
        let more = format!("images: {{server: '{image}'}}");
        let text = file("openvpn", "NodePort", &more);
        let mut findings = Findings::default();
        let cluster = Cluster::new(input::parse(&text).unwrap(), true, &mut findings);
        Target::new(&cluster, &mut findings);
        findings.problems.iter().map(ToString::to_string).collect()
    };
    let digest = format!("r/culvert-server@sha256:{}", "0".repeat(64));
    for image in [
        "culvert-server",
        "r.example.com:5000/a/culvert-server:v1",
        &digest,
    ] {
        let found = problems(image);
        assert!(
            found.len() == 1 && found[0].contains("set the image culvert"),
            "{found:?}"
        );
    }
    assert_eq!(problems("r.example.com/culvert:v1"), [""; 0]);
}

#[test]
fn names_that_no_cluster_can_use_are_errors_with_a_remedy() {
    let problem = |old: &str, new: &str| -> String {
        let text = file(
            "konnectivity",
            "NodePort",
            "registry: r.example.com:5000/culvert",
        );
        assert!(text.contains(old), "{old}");
        let mut findings = Findings::default();
        let input = input::parse(&text.replace(old, new)).unwrap();
        let cluster = Cluster::new(input, true, &mut findings);
        Target::new(&cluster, &mut findings);
        let problems = findings.problems.iter().map(ToString::to_string);
        problems.collect::<Vec<_>>().join("\n")
    };
    assert_eq!(problem("abc123", "abc123"), "");
    for (old, values, remedy) in [
        (
            "r.example.com:5000/culvert",
            ["https://r.example.com", "''", "/culvert", "a b"].as_slice(),
            "set it without a scheme",
        ),
        (
            "clusterID: abc123",
            &[
                "clusterID: a;id",
                "clusterID: Abc",
                "clusterID: -a",
                "clusterID: ''",
            ],
            "use lower-case letters",
        ),
        (
            "abc123.seed.example.com",
            &[
                "https://a.example.com",
                "a.example.com:6443",
                "a.example.com/b",
                "''",
            ],
            "leave out scheme, port and path",
        ),
        (
            "registry: r",
            &["images: {agent: 'https://r/a'}\nregistry: r"],
            "set it without a scheme",
        ),
    ] {
        for value in values {
            let problem = problem(old, value);
            assert!(problem.contains(remedy), "{value}: {problem}");
        }
    }
    let address = "2001:db8::1";
    assert_eq!(
        problem("abc123.seed.example.com", &format!("'{address}'")),
        ""
    );
    let registry = "registry: r.example.com:5000/culvert";
    for (new, expected) in [
        (
            "registry: Foo.com/BAR",
            [
                "registry: Invalid value: \"Foo.com/BAR\": the part \"BAR\"",
                "--registry",
            ],
        ),
        (
            "images: {server: 'reg/x@sha256:abc'}",
            ["images.server: Invalid", "the digest \"sha256:abc\""],
        ),
        (
            "images: {agent: r/UPPER/x}",
            ["the part \"UPPER\"", "--agent-image"],
        ),
        (
            "images: {door: 'r.example.com/x:'}",
            ["images.door: ", "--door-image"],
        ),
        (
            "images: {nodeTunnel: 'r.example.com:a/x'}",
            ["images.nodeTunnel: ", "--node-tunnel-image"],
        ),
    ] {
        let problem = problem(registry, new);
        for words in expected {
            assert!(problem.contains(words), "{new}: {problem}");
        }
        assert_eq!(problem.lines().count(), 1, "{new}: {problem}");
    }
}

#[test]
fn address_as_external_name_gets_brackets_and_no_dns_name() {
    let rendered = |tunnel: &str, strategy: &str, name: &str, address: &str| {
        let text = file(tunnel, strategy, "");
        let text = text.replace("abc123.seed.example.com", &format!("'{name}'"));
        text.replace("192.0.2.10", &format!("'{address}'"))
    };
    let names = |text: &str| {
        let requests = object(text, "ConfigMap", "tunnel-certificate-requests");
        let request = requests["data"]["konnectivityproxy-tls.cnf"].as_str();
        let mut lines = request.unwrap().lines();
        let names = lines.find_map(|line| line.strip_prefix("subjectAltName = "));
        names.unwrap().to_owned()
    };
    let ipv6 = "2001:db8::1";
    for (tunnel, remote) in [
        ("konnectivity", "--proxy-server-host=[2001:db8::1]"),
        ("openvpn", "--openvpn-remote=[2001:db8::1]:31002"),
    ] {
        for strategy in ["NodePort", "LoadBalancer"] {
            let text = rendered(tunnel, strategy, ipv6, ipv6);
            let lines = render(&text, command_lines).into_iter();
            let agents = ["konnectivity-agent", "openvpn-client"];
            let mut agents = lines.filter(|(name, _)| agents.contains(&name.as_str()));
            let (_, args) = agents.next().unwrap();
            assert!(args.iter().any(|arg| arg == remote), "{args:#?}");
            let root = Root::new();
            let line = root.move_into(&args);
            let outcome = culvert_agent::config::Config::from_args(&line).map(drop);
            assert_eq!(outcome.map_err(|exit| exit.text), Ok(()));

            let flags = object(&text, "ConfigMap", "kube-apiserver-tunnel-flags");
            let flags = flags["data"]["flags"].as_str().unwrap();
            let issuer = "--service-account-issuer=https://[2001:db8::1]:31000";
            assert!(flags.lines().any(|line| line == issuer), "{flags}");
            assert_eq!(names(&text), "IP:10.240.16.1, IP:127.0.0.1, IP:2001:db8::1");
        }
    }
    let text = rendered("konnectivity", "NodePort", "203.0.113.5", "192.0.2.10");
    assert_eq!(
        names(&text),
        "IP:10.240.16.1, IP:127.0.0.1, IP:192.0.2.10, IP:203.0.113.5"
    );
    // `getent hosts` fails for an address without a name.
    let plan = plan_of_file(&text, "c.yaml", Side::LoadBalancer, Side::NodePort).unwrap();
    assert!(!plan.contains("getent"), "{plan}");
}

#[test]
fn address_as_external_name_is_an_error_with_tunneling() {
    for address in ["203.0.113.5", "2001:db8::1"] {
        let text = file("konnectivity", "Tunneling", "");
        let text = text.replace("abc123.seed.example.com", &format!("'{address}'"));
        let mut findings = Findings::default();
        let cluster = Cluster::new(input::parse(&text).unwrap(), true, &mut findings);
        rules::check(&cluster, None, &mut findings);
        Target::new(&cluster, &mut findings);
        let problems: Vec<String> = findings.problems.iter().map(ToString::to_string).collect();
        let expected = format!("externalName: Invalid value: \"{address}\": is an address; ");
        assert!(
            problems.len() == 1 && problems[0].starts_with(&expected),
            "{problems:?}"
        );
        let mut warnings = findings.warnings.iter().map(ToString::to_string);
        assert!(!warnings.any(|it| it.contains("DNS must also resolve")));
    }
}

#[test]
fn syntax_and_type_errors_quote_their_line() {
    let error = |text: &str| input::parse(text).map(drop).unwrap_err().to_string();
    let why = error("clusterID: abc\nnodes: many\n");
    assert!(
        why.ends_with(" at line 2, column 8, in \"nodes: many\""),
        "{why}"
    );
    let why = error("clusterID: abc\nnodes: 1\nclusterID: def\n");
    assert_eq!(
        why,
        "duplicate mapping key: clusterID at line 3, column 1, in \"clusterID: def\"; delete one of the two keys"
    );
    let long = "n".repeat(200);
    let why = error(&format!("clusterID: abc\nnodes: {long}\n"));
    assert!(!why.contains(&long), "{why}");
}

#[test]
fn registry_is_part_of_every_default_image_or_missed_in_a_warning() {
    let warnings = |more: &str| -> Vec<String> {
        let text = file("konnectivity", "Tunneling", more);
        let mut findings = Findings::default();
        let cluster = Cluster::new(input::parse(&text).unwrap(), true, &mut findings);
        Target::new(&cluster, &mut findings);
        findings.warnings.iter().map(ToString::to_string).collect()
    };
    for (more, image) in [
        (
            "images: {server: r.example.com/s, agent: localhost/a}",
            "culvert-node-tunnel:v",
        ),
        (
            "images: {server: r/s}\nregistry: r.example.com",
            " r/s has no host",
        ),
        ("registry: foo", "registry: \"foo\": foo/culvert-server:v"),
    ] {
        let found = warnings(more);
        assert!(found.len() == 1 && found[0].contains(image), "{found:?}");
        assert!(found[0].contains("docker.io"), "{found:?}");
    }
    let registry = "registry: r.example.com/culvert/";
    assert_eq!(warnings(registry), [""; 0]);
    render(&file("konnectivity", "Tunneling", registry), |objects| {
        let images = objects.iter().filter_map(|object| {
            let containers = object.value.pointer("/spec/template/spec/containers")?;
            containers[0]["image"].as_str()
        });
        let images: Vec<&str> = images.collect();
        assert!(images.len() >= 3, "{images:?}");
        let has_registry = |image: &&str| image.starts_with("r.example.com/culvert/culvert-");
        assert!(images.iter().all(has_registry), "{images:?}");
    });
}

#[test]
fn default_images_are_those_of_the_image_scripts() {
    let description = include_str!("../../../images/images.toml");
    let mut seen = 0;
    each(|tunnel, strategy, objects| {
        for object in objects {
            let pod = &object.value["spec"]["template"]["spec"];
            for container in pod["containers"].as_array().into_iter().flatten() {
                let Some(image) = container["image"].as_str() else {
                    continue;
                };
                let (name, tag) = image.split_once(':').unwrap();
                assert!(
                    description.contains(&format!("name = \"{name}\"\n")),
                    "{tunnel} {strategy}: {image}"
                );
                assert_eq!(tag, format!("v{}", env!("CARGO_PKG_VERSION")));
                seen += 1;
            }
        }
    });
    assert!(seen > 0);
}

/// Returns the text of a plan.
fn plan_text(from: Side, to: Side) -> anyhow::Result<String> {
    let (tunnel, strategy) = match to {
        Side::Openvpn => ("openvpn", "NodePort"),
        Side::LoadBalancer => ("konnectivity", "LoadBalancer"),
        Side::Tunneling => ("konnectivity", "Tunneling"),
        Side::Konnectivity | Side::NodePort => ("konnectivity", "NodePort"),
    };
    plan_with(from, to, tunnel, strategy)
}

fn plan_with(from: Side, to: Side, tunnel: &str, strategy: &str) -> anyhow::Result<String> {
    plan_of("cluster.yaml", from, to, tunnel, strategy)
}

/// Returns the text of a plan for a cluster file with this name.
fn plan_of(
    path: &str,
    from: Side,
    to: Side,
    tunnel: &str,
    strategy: &str,
) -> anyhow::Result<String> {
    plan_of_file(&file(tunnel, strategy, ""), path, from, to)
}

/// Returns the text of a plan for a cluster file with this text and name.
fn plan_of_file(text: &str, path: &str, from: Side, to: Side) -> anyhow::Result<String> {
    let mut input = input::parse(text).unwrap();
    plan::apply(to, &mut input);
    let mut findings = Findings::default();
    let cluster = Cluster::new(input, true, &mut findings);
    rules::check(&cluster, None, &mut findings);
    let target = Target::new(&cluster, &mut findings);
    assert_eq!(findings.problems, []);
    Ok(Plan::new(from, to, &target, path)?.to_string())
}

#[test]
fn every_change_has_a_plan_with_commands_restarts_and_a_way_back() {
    use Side::{Konnectivity, LoadBalancer, NodePort, Openvpn, Tunneling};
    for (from, to) in [
        (Openvpn, Konnectivity),
        (Konnectivity, Openvpn),
        (NodePort, LoadBalancer),
        (NodePort, Tunneling),
        (LoadBalancer, NodePort),
        (LoadBalancer, Tunneling),
        (Tunneling, NodePort),
        (Tunneling, LoadBalancer),
    ] {
        let text = plan_text(from, to).unwrap();
        let steps = text
            .lines()
            .filter(|line| line.starts_with(char::is_numeric))
            .count();
        assert!(steps >= 5, "{text}");
        assert_eq!(text.matches("\n   restarts: ").count(), steps, "{text}");
        assert_eq!(text.matches("\n   back:     ").count(), steps, "{text}");
    }
    assert!(plan_text(Openvpn, Openvpn).is_err());
    assert!(plan_text(Openvpn, NodePort).is_err());
}

#[test]
fn way_back_of_a_strategy_sets_the_old_strategy() {
    use Side::{LoadBalancer, Tunneling};
    let text = plan_text(LoadBalancer, Tunneling).unwrap();
    let back = text
        .lines()
        .find(|line| line.contains("first command is then"));
    let spec =
        r#"{"spec":{"exposeStrategy":"LoadBalancer","clusterNetwork":{"tunnelingAgentIP":""}}}"#;
    assert!(back.unwrap().contains(spec), "{text}");
    let text = plan_text(Tunneling, LoadBalancer).unwrap();
    let back = text
        .lines()
        .find(|line| line.contains("first command is then"));
    let spec = r#"{"spec":{"exposeStrategy":"Tunneling"}}"#;
    assert!(back.unwrap().contains(spec), "{text}");
}

#[test]
fn plan_between_tunnels_replaces_the_node_tunnel() {
    let text = plan_with(
        Side::Openvpn,
        Side::Konnectivity,
        "konnectivity",
        "Tunneling",
    )
    .unwrap();
    let mut commands = text
        .lines()
        .filter(|line| line.contains("--part=node-tunnel"));
    assert!(commands.clone().count() > 0, "{text}");
    assert!(
        commands.all(|line| line.contains("replace --save-config -f -")),
        "{text}"
    );
}

#[test]
fn old_tunnel_is_removed_after_the_switch_to_the_new_one() {
    let text = plan_text(Side::Openvpn, Side::Konnectivity).unwrap();
    let at = |part: &str| {
        text.find(part)
            .unwrap_or_else(|| panic!("no {part} in {text}"))
    };
    let last = |part: &str| text.rfind(part).unwrap();
    let patch = "patch deployment apiserver --patch-file";
    let order = [
        at("--part=rbac"),
        at("replace --save-config -f cluster-abc123-openvpn/seed-server.yaml"),
        at("apply -f cluster-abc123-openvpn/seed-egress.yaml"),
        at(patch),
        at("rollout status deployment konnectivity-agent"),
        at("culvert switch --admin-uds=/run/culvert/admin.sock --to=prefer-konnectivity"),
        at("culvert switch --admin-uds=/run/culvert/admin.sock --to=konnectivity"),
        last(patch),
        at(r#"{"name":"openvpn-client","$patch":"delete"}"#),
        at("# repeat the command until it lists no internal-client"),
        at("delete deployment openvpn-client"),
    ];
    assert!(order.is_sorted(), "{order:?} in {text}");
    // KKP's Deployment has privileges, containers and probes that a merge would keep.
    assert!(
        !text.contains("apply -f cluster-abc123-openvpn/seed-server.yaml"),
        "{text}"
    );
    assert!(text.contains("openvpn-server -o yaml"), "{text}");
    for (from, to) in [
        (Side::Openvpn, Side::Konnectivity),
        (Side::Konnectivity, Side::Openvpn),
    ] {
        let text = plan_text(from, to).unwrap();
        let permitted = text.find("/seed-network-policies.yaml");
        let used = text.find("patch deployment apiserver --patch-file");
        assert!(permitted.is_some() && permitted < used, "{text}");
        let text = text
            .rsplit_once("patch deployment apiserver --patch-file")
            .unwrap()
            .0;
        let policies = text.matches("/seed-network-policies.yaml");
        let uses = text.matches("patch deployment apiserver --patch-file");
        assert_eq!(policies.count(), uses.count() + 1, "{text}");
    }
    // A stream for kubectl apply must not contain the patch of kube-apiserver's Deployment.
    let applied = text.lines().filter(|line| line.contains("apply -f -"));
    for line in applied {
        assert!(!line.contains("--part=server"), "{line}");
    }
    let text = plan_text(Side::Tunneling, Side::NodePort).unwrap();
    assert!(text.contains(r#""tunnelingAgentIP":"""#), "{text}");
    let text = plan_text(Side::Konnectivity, Side::Openvpn).unwrap();
    let sidecar = r#"{"name":"konnectivity-server","$patch":"delete"}"#;
    assert!(text.contains(sidecar), "{text}");
}

#[test]
fn plans_between_tunnels_remove_the_permissions_of_the_old_tunnel() {
    let nodes =
        "kubectl --kubeconfig=USER delete clusterrole,clusterrolebinding culvert-server-nodes";
    let policies = "features: {kubeSystemNetworkPolicies: true}";
    for (from, to, policy, title) in [
        (
            Side::Openvpn,
            Side::Konnectivity,
            "openvpn-client",
            "Remove the OpenVPN tunnel.",
        ),
        (
            Side::Konnectivity,
            Side::Openvpn,
            "konnectivity",
            "Remove the servers beside kube-apiserver",
        ),
    ] {
        let removal = |spec: &str| {
            let text = file(to.name(), spec, "");
            let text = plan_of_file(&text, "cluster.yaml", from, to).unwrap();
            text.split_once(title).unwrap().1.to_owned()
        };
        let policy =
            format!("kubectl --kubeconfig=USER -n kube-system delete networkpolicy {policy} ");
        let text = removal(&format!("NodePort, {policies}"));
        assert!(text.contains(&policy), "{text}");
        assert_eq!(text.contains(nodes), to == Side::Konnectivity, "{text}");
        // A policy of this name belongs to somebody else then.
        let text = removal("NodePort");
        assert!(!text.contains(&policy), "{text}");
    }
    // The way back of the step that adds the permission.
    let text = plan_text(Side::Konnectivity, Side::Openvpn).unwrap();
    assert_eq!(text.matches(nodes).count(), 1, "{text}");
    let text = plan_text(Side::Openvpn, Side::Konnectivity).unwrap();
    let saved = "cluster-abc123-openvpn-server-before-konnectivity.yaml";
    let back = format!(
        "rollout status deployment openvpn-server && {{ grep -q openvpn-watch-nodes {saved} || {nodes} --ignore-not-found; }} && rm -f {saved}  # unless the step was skipped\n"
    );
    assert_eq!(text.matches(&back).count(), 1, "{text}");
}

#[test]
fn plan_to_openvpn_removes_the_volumes_of_the_servers_beside_kube_apiserver() {
    // The volumes of a patch by name, and the mounts of kube-apiserver by path.
    let items = |patch: &Value, is_removal: bool| -> BTreeSet<String> {
        let pod = &patch["spec"]["template"]["spec"];
        let containers = pod["containers"].as_array().unwrap().iter();
        let mounts = containers
            .filter(|it| it["name"] == "apiserver")
            .flat_map(|it| it["volumeMounts"].as_array().unwrap());
        let items = pod["volumes"].as_array().unwrap().iter().chain(mounts);
        items
            .filter(|it| (it["$patch"] == "delete") == is_removal)
            .map(|it| it.get("mountPath").unwrap_or(&it["name"]).to_string())
            .collect()
    };
    let used = |tunnel: &str| {
        render(&file(tunnel, "NodePort", ""), |objects| {
            let patch = objects.iter().find(|it| it.is_patch).unwrap();
            items(&patch.value, false)
        })
    };
    let text = plan_text(Side::Konnectivity, Side::Openvpn).unwrap();
    let mut words = text.lines().filter_map(|line| line.split_once(" -p '"));
    let (_, patch) = words
        .find(|(command, _)| command.ends_with("patch deployment apiserver"))
        .unwrap();
    let (patch, _) = patch.split_once('\'').unwrap();
    let removed = items(&serde_json::from_str(patch).unwrap(), true);
    assert_eq!(removed, &used("konnectivity") - &used("openvpn"));
    assert_eq!(removed.len(), 4, "{removed:?}");
}

#[test]
fn plans_between_tunnels_pause_the_cluster() {
    let id = "patch clusters.kubermatic.k8c.io abc123 --type=merge -p";
    let commands = |from, to| -> Vec<String> {
        let text = plan_text(from, to).unwrap();
        let lines = text.lines().filter(|line| line.starts_with("     "));
        let patches = lines.filter_map(|line| Some(line.split_once(id)?.1.trim().to_owned()));
        patches.collect()
    };
    let pause = "'{\"spec\":{\"pause\":true}}'";
    let end = "'{\"spec\":{\"clusterNetwork\":{\"konnectivityEnabled\":true},\"pause\":false}}'";
    assert_eq!(commands(Side::Openvpn, Side::Konnectivity), [pause, end]);
    assert_eq!(commands(Side::Konnectivity, Side::Openvpn), [pause]);
}

#[test]
fn nodes_are_replaced_between_the_new_address_of_the_agents_and_their_rollout() {
    for (from, to) in [
        (Side::NodePort, Side::LoadBalancer),
        (Side::LoadBalancer, Side::Tunneling),
        (Side::Tunneling, Side::NodePort),
    ] {
        let text = plan_text(from, to).unwrap();
        let order = [
            "--part=certificates",
            "--part=services",
            "rollout status deployment apiserver",
            "# write USER again",
            "--part=agent",
            "get machinedeployments",
            "rollout status deployment konnectivity-agent",
        ];
        let mut rest = text.as_str();
        for part in order {
            let found = rest.split_once(part);
            let (_, after) = found.unwrap_or_else(|| panic!("no {part} in {rest}"));
            rest = after;
        }
    }
}

#[test]
fn rollouts_in_plans_wait_for_pods_with_a_readiness_probe() {
    use Side::{Konnectivity, LoadBalancer, NodePort, Openvpn, Tunneling};
    let mut rollouts = BTreeSet::new();
    for (from, to, tunnel, strategy) in [
        (Openvpn, Konnectivity, "konnectivity", "Tunneling"),
        (Konnectivity, Openvpn, "openvpn", "Tunneling"),
        (NodePort, LoadBalancer, "konnectivity", "LoadBalancer"),
        (NodePort, Tunneling, "openvpn", "Tunneling"),
    ] {
        let text = plan_with(from, to, tunnel, strategy).unwrap();
        for rollout in text.split("rollout status ").skip(1) {
            let words = rollout.split_whitespace().take(2);
            let workload: Vec<&str> = words.map(|word| word.trim_end_matches(';')).collect();
            rollouts.insert(workload.join(" "));
        }
    }
    let mut probed = BTreeSet::new();
    each(|_, _, objects| {
        for object in objects.iter().map(|it| &it.value) {
            let containers = object.pointer("/spec/template/spec/containers");
            let mut containers = containers.and_then(Value::as_array).into_iter().flatten();
            let kind = object["kind"].as_str().unwrap().to_lowercase();
            let name = object["metadata"]["name"].as_str().unwrap();
            let is_probed = |it: &Value| it["readinessProbe"]["httpGet"]["path"] == "/readyz";
            if containers.any(is_probed) {
                probed.insert(format!("{kind} {name}"));
            }
        }
    });
    let unprobed: Vec<&String> = rollouts.difference(&probed).collect();
    // The pods of kube-apiserver have KKP's probe of kube-apiserver. A server with both tunnels is ready once it has a
    // client, and its Service sends no client to a pod that is not ready.
    let expected = ["deployment apiserver", "deployment openvpn-server"];
    assert_eq!(unprobed, expected);
    let node_tunnel = "daemonset envoy-agent".to_owned();
    assert!(rollouts.contains(&node_tunnel), "{rollouts:?}");
}

/// Returns the commands of `culvert` in a text, without the program name.
fn commands(text: &str) -> Vec<String> {
    let lines = text
        .lines()
        .filter(|line| !line.trim_start().starts_with('#'));
    let lines = lines.filter_map(|line| line.split_once("culvert "));
    let lines = lines.map(|(_, command)| {
        command
            .split([';', '|', '#', '&'])
            .next()
            .unwrap_or(command)
    });
    lines.map(str::to_owned).collect()
}

#[derive(clap::Parser)]
enum Cli {
    Render(Box<Options>),
    Status(crate::status::Options),
    Switch(crate::switch::Options),
}

/// Parses a command line as a shell and the tool do.
fn parsed(command: &str) -> Options {
    let words = std::iter::once("culvert".to_owned()).chain(shlex::split(command).unwrap());
    match <Cli as clap::Parser>::try_parse_from(words) {
        Ok(Cli::Render(options)) => *options,
        Ok(_) => panic!("not culvert render: {command}"),
        Err(error) => panic!("culvert {command}: {error}"),
    }
}

#[test]
fn commands_of_a_plan_repeat_the_values_of_its_flags() {
    let options = parsed(
        "render 'my cluster.yaml' --facts=facts.yaml --apiserver-replicas=3 --tunnel=openvpn \
         --konnectivity-node-port=30100 --node-network=10.0.0.0/8 --node-network=10.1.0.0/16",
    );
    let file = options.input_arguments().unwrap();
    let again = parsed(&format!("render {file} --tunnel=konnectivity"));
    let facts = again.facts();
    assert_eq!(again.file, Path::new("my cluster.yaml"));
    assert_eq!(again.facts.as_deref(), Some(Path::new("facts.yaml")));
    // The command's own flag counts.
    assert_eq!(facts.tunnel.as_deref(), Some("konnectivity"));
    let tunnel = options.facts().tunnel;
    assert_eq!(facts::Facts { tunnel, ..facts }, options.facts());
}

#[test]
fn standard_input_is_one_input_at_most_and_no_input_of_a_plan() {
    let plan = "--diff-from=NodePort --to=Tunneling";
    for (flags, names) in [
        (format!("- {plan}"), "FILE: a migration plan cannot"),
        (format!("c.yaml --facts=- {plan}"), "--facts: a migration"),
        ("- --facts=-".to_owned(), "FILE and --facts: only one"),
        ("- --old=-".to_owned(), "FILE and --old: only one"),
        (
            "c.yaml --old=- --apiserver=-".to_owned(),
            "--old and --apiserver: only one",
        ),
    ] {
        let options = parsed(&format!("render {flags}"));
        // The files do not exist, so another error would be about a file.
        let error = super::render(&options).map(drop).unwrap_err();
        assert!(error.to_string().starts_with(names), "{flags}: {error}");
        assert_eq!(super::code(&error), 2);
    }
    for flags in [
        "-",
        "c.yaml --facts=-",
        "c.yaml --old=-",
        "c.yaml --apiserver=-",
    ] {
        let options = parsed(&format!("render {flags}"));
        options.check_standard_input().unwrap();
    }
}

#[test]
fn plan_repeats_every_flag_that_overrides_the_files() {
    let command = <Cli as clap::CommandFactory>::command();
    let render = command.find_subcommand("render").unwrap();
    let heading = Some("Values that override the files");
    let values = render
        .get_arguments()
        .filter(|it| it.get_help_heading() == heading);
    let flags: Vec<String> = values
        .map(|flag| format!("--{}=1", flag.get_long().unwrap()))
        .collect();
    assert!(flags.len() > 10, "{flags:?}");
    let options = parsed(&format!("render c.yaml {}", flags.join(" ")));
    let again = shlex::split(&options.input_arguments().unwrap()).unwrap();
    for flag in flags {
        assert!(again.contains(&flag), "{flag} in {again:?}");
    }
}

#[test]
fn only_our_programs_get_the_flags_of_their_drain() {
    let arguments = |part: Part, more: &str| {
        render(&file("konnectivity", "NodePort", more), |objects| {
            let object = objects.iter().find(|object| object.part == part);
            let containers = &object.unwrap().value["spec"]["template"]["spec"]["containers"];
            serde_json::from_value::<Vec<String>>(containers[0]["args"].clone()).unwrap()
        })
    };
    for (part, flag, [key, ours, stock]) in [
        (
            Part::Agent,
            "--drain-timeout=25s",
            ["agent", "culvert-agent", "proxy-agent"],
        ),
        (
            Part::Server,
            "--graceful-shutdown-timeout=25s",
            ["server", "culvert-server", "proxy-server"],
        ),
    ] {
        let other = "seed: {defaultComponentSettings: {konnectivityProxy: {args: [--graceful-shutdown-timeout=9s]}}}";
        let drains = arguments(part, other).into_iter();
        let drains: Vec<String> = drains.filter(|it| it.contains("-timeout=")).collect();
        assert_eq!(drains, ["--graceful-shutdown-timeout=9s"]);
        let has_flag = |more: &str| arguments(part, more).contains(&flag.to_owned());
        assert!(has_flag(""));
        assert!(has_flag(&format!(
            "images: {{{key}: mirror.local/{ours}:v1}}"
        )));
        for stock in ["stock".to_owned(), format!("mirror.local/{stock}:v0.33.0")] {
            assert!(!has_flag(&format!("images: {{{key}: '{stock}'}}")));
        }
    }
}

#[test]
fn plan_of_a_strategy_needs_the_file_of_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cluster.yaml");
    let path = path.display();
    let plan = parsed(&format!(
        "render {path} --diff-from=NodePort --to=Tunneling"
    ));
    std::fs::write(path.to_string(), file("konnectivity", "NodePort", "")).unwrap();
    let why = super::render(&plan).map(drop).unwrap_err().to_string();
    assert!(why.contains("after the migration"), "{why}");
    std::fs::write(path.to_string(), file("konnectivity", "Tunneling", "")).unwrap();
    super::render(&plan).map(drop).unwrap();
}

#[test]
fn folder_with_another_cluster_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cluster.yaml");
    let output = folder.path().join("out");
    let text = file("konnectivity", "NodePort", "");
    std::fs::write(&path, &text).unwrap();
    let line = format!(
        "render {} --output-dir={} --part=agent",
        path.display(),
        output.display()
    );
    for _ in 0..2 {
        super::render(&parsed(&line)).map(drop).unwrap();
    }
    let read = || std::fs::read_to_string(output.join("user-agent.yaml")).unwrap();
    let before = read();
    std::fs::write(&path, text.replace("abc123", "def456")).unwrap();
    let error = super::render(&parsed(&line)).map(drop).unwrap_err();
    let why = error.to_string();
    assert!(why.contains("objects of cluster-abc123"), "{why}");
    assert_eq!(super::code(&error), 2);
    assert_eq!(read(), before);
}

/// Returns the names in a folder.
fn names_in(folder: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name());
    names.map(|name| name.into_string().unwrap()).collect()
}

#[test]
fn files_that_no_earlier_run_wrote_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cluster.yaml");
    let output = folder.path().join("out");
    std::fs::write(&path, file("konnectivity", "NodePort", "")).unwrap();
    std::fs::create_dir(&output).unwrap();
    let options = parsed(&format!(
        "render {} --output-dir={}",
        path.display(),
        output.display()
    ));
    let own = output.join("user-agent.yaml");
    // No run of this cluster writes the part, so there is no warning either.
    std::fs::write(output.join("seed-door.yaml"), "kind: List\n").unwrap();
    for text in ["kind: List\n", ""] {
        std::fs::write(&own, text).unwrap();
        let error = super::render(&options).map(drop).unwrap_err();
        let expected = format!("{}: no earlier run of culvert render", own.display());
        assert!(error.to_string().starts_with(&expected), "{error}");
        assert_eq!(super::code(&error), 2);
        assert_eq!(std::fs::read_to_string(&own).unwrap(), text);
        assert_eq!(names_in(&output).len(), 2);
    }
    render(&file("konnectivity", "NodePort", ""), |objects| {
        let stale = output::stale(&output, objects, &[]);
        assert!(stale.is_empty(), "{stale:?}");
    });
    std::fs::remove_file(&own).unwrap();
    std::os::unix::fs::symlink(folder.path().join("missing"), &own).unwrap();
    super::render(&options).map(drop).unwrap_err();
    assert!(!folder.path().join("missing").exists());
}

#[test]
fn links_in_the_output_folder_are_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cluster.yaml");
    let output = folder.path().join("out");
    let target = folder.path().join("target.yaml");
    std::fs::write(&path, file("konnectivity", "NodePort", "")).unwrap();
    std::fs::create_dir(&output).unwrap();
    let text = "# cluster: cluster-abc123\nkind: List\n";
    std::fs::write(&target, text).unwrap();
    let link = output.join("user-agent.yaml");
    std::os::unix::fs::symlink(&target, &link).unwrap();
    let options = parsed(&format!(
        "render {} --output-dir={} --part=agent",
        path.display(),
        output.display()
    ));
    super::render(&options).map(drop).unwrap();
    assert_eq!(std::fs::read_to_string(&target).unwrap(), text);
    assert!(!link.is_symlink());
    let written = std::fs::read_to_string(&link).unwrap();
    assert!(written.contains("kind: Deployment"), "{written}");
    // No temporary file stays.
    let names = BTreeSet::from(["user-agent.yaml".to_owned()]);
    assert_eq!(names_in(&output), names);
}

#[test]
fn part_of_another_strategy_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cluster.yaml");
    for (strategy, part) in [("NodePort", "door"), ("LoadBalancer", "node-tunnel")] {
        std::fs::write(&path, file("konnectivity", strategy, "")).unwrap();
        let options = parsed(&format!("render {} --part={part}", path.display()));
        let error = super::render(&options).map(drop).unwrap_err();
        let expected = format!("--part={part}: only a cluster with the strategy ");
        assert!(error.to_string().starts_with(&expected), "{error}");
        assert_eq!(super::code(&error), 2);
    }
    for (strategy, part) in [("LoadBalancer", "door"), ("Tunneling", "node-tunnel")] {
        std::fs::write(&path, file("konnectivity", strategy, "")).unwrap();
        let options = parsed(&format!("render {} --part={part}", path.display()));
        super::render(&options).map(drop).unwrap();
    }
}

#[test]
fn exit_code_tells_errors_of_files_from_errors_of_their_content() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cluster.yaml");
    let code = |flags: &str| {
        let options = parsed(&format!("render {} {flags}", path.display()));
        super::code(&super::render(&options).map(drop).unwrap_err())
    };
    assert_eq!(code(""), 1);
    std::fs::write(&path, file("konnectivity", "NodePort", "")).unwrap();
    assert_eq!(code("--facts=no-such-file"), 1);
    assert_eq!(code("--diff-from=NodePort --to=NodePort"), 2);
    assert_eq!(code("--diff-from=NodePort --to=Tunneling"), 2);
    std::fs::write(&path, file("konnectivity", "NodePort", "noSuchField: 1")).unwrap();
    assert_eq!(code(""), 2);
}

#[test]
fn commands_in_plans_and_in_the_documentation_parse() {
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/render.md");
    let document = std::fs::read_to_string(document).unwrap();
    let blocks = document.lines().filter(|line| line.starts_with("    "));
    let blocks: Vec<&str> = blocks.collect();
    let mut found = commands(&blocks.join("\n"));
    assert!(found.len() >= 5);
    for (from, to) in [
        (Side::Openvpn, Side::Konnectivity),
        (Side::Konnectivity, Side::Openvpn),
        (Side::NodePort, Side::Tunneling),
    ] {
        found.extend(commands(&plan_text(from, to).unwrap()));
    }
    for command in found {
        let words = std::iter::once("culvert").chain(command.split_whitespace());
        let parsed = <Cli as clap::Parser>::try_parse_from(words);
        assert!(
            parsed.is_ok(),
            "culvert {command}: {}",
            parsed.err().unwrap()
        );
    }
}

#[test]
fn cluster_file_of_the_documentation_is_rendered() {
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/render.md");
    let document = std::fs::read_to_string(document).unwrap();
    let file = document
        .split("```yaml\n")
        .nth(1)
        .unwrap()
        .split("```")
        .next()
        .unwrap();
    let count = render(file, <[Object]>::len);
    assert!(count > 5, "{count}");
}

/// Returns the object of a kind and a name.
fn object(text: &str, kind: &str, name: &str) -> Value {
    render(text, |objects| {
        let mut values = objects.iter().map(|it| &it.value);
        let found = values.find(|it| it["kind"] == kind && it["metadata"]["name"] == name);
        found.unwrap_or_else(|| panic!("no {kind} {name}")).clone()
    })
}

#[test]
fn kube_apiserver_prefers_internal_addresses_with_each_tunnel() {
    for tunnel in TUNNELS {
        for (provider, types) in [("aws", "InternalIP,ExternalIP"), ("gcp", "InternalIP")] {
            let text = file(tunnel, "NodePort", &format!("provider: {provider}"));
            let flags = object(&text, "ConfigMap", "kube-apiserver-tunnel-flags");
            let flags = flags["data"]["flags"].as_str().unwrap();
            let flag = format!("--kubelet-preferred-address-types={types}");
            assert!(flags.lines().any(|line| line == flag), "{flags}");
        }
    }
}

/// Returns the issuers, the audiences and the number of warnings of a cluster with more fields of `spec`. The arguments
/// are those of the running kube-apiserver; without any, kube-apiserver does not run yet.
fn token_flags(spec: &str, running: &[&str]) -> (Vec<String>, String, usize) {
    let text = file("konnectivity", spec, "");
    let mut findings = Findings::default();
    let cluster = Cluster::new(input::parse(&text).unwrap(), true, &mut findings);
    let target = Target::new(&cluster, &mut findings);
    assert_eq!(findings.problems, []);
    findings.warnings.clear();
    let pod = serde_json::json!({"containers": [{"name": "apiserver", "args": running}]});
    let deployment = serde_json::json!({
        "kind": "Deployment",
        "metadata": {"name": "apiserver", "namespace": target.namespace},
        "spec": {"template": {"spec": pod}},
    });
    let apiserver = (!running.is_empty()).then(|| deployment.to_string());
    let apiserver = apiserver.map(|text| Apiserver::parse(&text, &target.namespace).unwrap());
    if let Some(apiserver) = &apiserver {
        tokens::check(&target, apiserver, &mut findings);
    }
    let objects = objects::all(&target, apiserver.as_ref());
    let of = |part: Part| objects.iter().find(|it| it.part == part).unwrap();
    let lines = of(Part::Apiserver).value["data"]["flags"].as_str().unwrap();
    if apiserver.is_some() {
        let containers = &of(Part::Server).value["spec"]["template"]["spec"]["containers"];
        let args = containers[1]["args"].as_array().unwrap();
        let args: Vec<&str> = args.iter().map(|arg| arg.as_str().unwrap()).collect();
        assert!(args.join("\n").ends_with(lines.trim_end()), "{args:?}");
    }
    let values = |name: &str| -> Vec<String> {
        let values = lines.lines().filter_map(|line| line.strip_prefix(name));
        values.map(str::to_owned).collect()
    };
    let issuers = values("--service-account-issuer=");
    let audiences = values("--api-audiences=").join(" ");
    (issuers, audiences, findings.warnings.len())
}

const AGENTS: &str = "system:konnectivity-server";
const NODE_PORT_URL: &str = "https://abc123.seed.example.com:31000";
const TUNNELING_URL: &str = "https://abc123.seed.example.com:6443";

#[test]
fn issuer_and_audiences_of_the_cluster_object_replace_the_url() {
    for (fields, issuer, audiences) in [
        ("", NODE_PORT_URL, NODE_PORT_URL),
        ("{}", NODE_PORT_URL, NODE_PORT_URL),
        ("{issuer: https://id}", "https://id", "https://id"),
        ("{apiAudiences: [a, b]}", NODE_PORT_URL, "a,b"),
        ("{issuer: https://id, apiAudiences: [a]}", "https://id", "a"),
    ] {
        let spec = format!("NodePort, serviceAccount: {fields}");
        let audiences = format!("{audiences},{AGENTS}");
        let expected = (vec![issuer.to_owned()], audiences, 0);
        assert_eq!(token_flags(&spec, &[]), expected, "{fields}");
    }
}

#[test]
fn tunnel_keeps_issuers_and_audiences_of_the_running_kube_apiserver() {
    let named = "NodePort, serviceAccount: {issuer: https://id}";
    let id = "--service-account-issuer=https://id";
    let url = format!("--service-account-issuer={NODE_PORT_URL}");
    let both = format!("{NODE_PORT_URL},{AGENTS}");
    // Arguments as KKP writes them.
    let kkp = ["--service-account-issuer", NODE_PORT_URL, "--api-audiences"];
    for (spec, running, issuers, audiences, warnings) in [
        (
            "NodePort",
            [&kkp[..], &[&both]].concat(),
            vec![NODE_PORT_URL],
            both.as_str(),
            0,
        ),
        (
            "NodePort",
            [&kkp[..], &[NODE_PORT_URL]].concat(),
            vec![NODE_PORT_URL],
            &both,
            0,
        ),
        ("NodePort", vec![&url], vec![NODE_PORT_URL], &both, 0),
        (
            "NodePort",
            vec!["--profiling=false"],
            vec![NODE_PORT_URL],
            &both,
            0,
        ),
        (
            named,
            vec![id, "--api-audiences=a"],
            vec!["https://id"],
            "a,system:konnectivity-server",
            0,
        ),
        // The cluster file does not name the issuer that signs tokens.
        (
            "NodePort",
            vec![id, "--api-audiences=a,b"],
            vec!["https://id"],
            "a,b,system:konnectivity-server",
            1,
        ),
        (
            "NodePort",
            vec![id],
            vec!["https://id"],
            "https://id,system:konnectivity-server",
            1,
        ),
        // A second issuer was added by hand.
        (
            "NodePort",
            vec![id, &url, "--api-audiences=a"],
            vec!["https://id", NODE_PORT_URL],
            "a,system:konnectivity-server",
            0,
        ),
        (
            named,
            vec![&url, id, "--api-audiences=a"],
            vec!["https://id", NODE_PORT_URL],
            "a,https://id,system:konnectivity-server",
            0,
        ),
    ] {
        let issuers = issuers.into_iter().map(str::to_owned).collect();
        let expected = (issuers, audiences.to_owned(), warnings);
        assert_eq!(token_flags(spec, &running), expected, "{spec} {running:?}");
    }
}

#[test]
fn new_address_signs_tokens_and_the_old_issuer_stays_valid() {
    let args = |issuers: &[&str], audiences: &str, name: &str, port: u16| -> Vec<String> {
        let issuers = issuers.iter();
        let issuers = issuers.map(|issuer| format!("--service-account-issuer={issuer}"));
        let more = [
            format!("--api-audiences={audiences}"),
            format!("--external-hostname={name}"),
            format!("--secure-port={port}"),
        ];
        issuers.chain(more).collect()
    };
    let check = |spec: &str, running: &[String], issuers: &[&str], audiences: &[&str]| {
        let running: Vec<&str> = running.iter().map(String::as_str).collect();
        let issuers = issuers.iter().map(|&issuer| issuer.to_owned()).collect();
        let expected = (issuers, audiences.join(","), 0);
        assert_eq!(token_flags(spec, &running), expected, "{spec} {running:?}");
    };
    let name = "abc123.seed.example.com";
    let audiences = format!("{NODE_PORT_URL},{AGENTS}");
    let old = args(&[NODE_PORT_URL], &audiences, name, 31000);
    let both = [TUNNELING_URL, NODE_PORT_URL];
    let all = [NODE_PORT_URL, AGENTS, TUNNELING_URL];
    check("Tunneling", &old, &both, &all);
    let new = args(&both, &all.join(","), name, 6443);
    check("Tunneling", &new, &both, &all);
    // The way back.
    check("NodePort", &new, &[NODE_PORT_URL, TUNNELING_URL], &all);
    // The name changes with a load balancer.
    let other = "https://192.0.2.1:31000";
    let balancer = args(&[other], other, "192.0.2.1", 31000);
    let all = [other, NODE_PORT_URL, AGENTS];
    check("NodePort", &balancer, &[NODE_PORT_URL, other], &all);
    // A named issuer does not depend on the address.
    let named = args(&["https://id"], "https://id", name, 31000);
    let spec = "Tunneling, serviceAccount: {issuer: https://id}";
    check(spec, &named, &["https://id"], &["https://id", AGENTS]);
}

#[test]
fn networks_of_the_seed_add_to_those_of_the_cluster_only() {
    let seed = "seed: {defaultAPIServerAllowedIPRanges: [203.0.113.0/24]}";
    let balancer = |ranges: &str| {
        let strategy = format!("LoadBalancer{ranges}");
        let text = file("konnectivity", &strategy, seed);
        object(&text, "Service", "front-loadbalancer")
    };
    let service = balancer("");
    assert_eq!(service["spec"]["loadBalancerSourceRanges"], Value::Null);
    assert_eq!(service["metadata"]["annotations"], Value::Null);
    let service = balancer(", apiServerAllowedIPRanges: {cidrBlocks: [198.51.100.0/24]}");
    let both = ["198.51.100.0/24", "203.0.113.0/24"];
    assert_eq!(
        service["spec"]["loadBalancerSourceRanges"],
        serde_json::json!(both)
    );
    let name = "service.beta.kubernetes.io/load-balancer-source-ranges";
    assert_eq!(service["metadata"]["annotations"][name], both.join(","));
    // KKP tests for the object, not for its networks.
    let service = balancer(", apiServerAllowedIPRanges: {}");
    assert_eq!(
        service["spec"]["loadBalancerSourceRanges"],
        serde_json::json!([both[1]])
    );
}

#[test]
fn load_balancer_has_the_annotations_of_the_seed_and_of_the_cloud() {
    let seed = "provider: aws\nseed: {nodeportProxy: {annotations: {a: old, b: old}, \
                envoy: {loadBalancerService: {annotations: {b: new}}}}}";
    let text = file("konnectivity", "LoadBalancer", seed);
    let service = object(&text, "Service", "front-loadbalancer");
    let aws = "service.beta.kubernetes.io/aws-load-balancer";
    let expected = serde_json::json!({
        "a": "old",
        "b": "new",
        format!("{aws}-type"): "nlb",
        format!("{aws}-connection-idle-timeout"): "3600",
        format!("{aws}-cross-zone-load-balancing-enabled"): "true",
    });
    assert_eq!(service["metadata"]["annotations"], expected);
}

#[test]
fn updater_keeps_every_port_of_the_rendered_load_balancer() {
    use culvert_door::config::{Config, Source};
    for tunnel in TUNNELS {
        let text = file(tunnel, "LoadBalancer", "");
        let service = object(&text, "Service", "front-loadbalancer");
        let lines = render(&text, command_lines);
        let (_, args) = lines.iter().find(|(name, _)| name == "lb-updater").unwrap();
        let program = std::iter::once("program".to_owned());
        let line: Vec<String> = program.chain(args.iter().cloned()).collect();
        let Source::Kubernetes(cluster) = Config::from_args(&line).unwrap().source else {
            panic!("{line:?}");
        };
        let options = cluster.balancer.unwrap().options;
        assert_eq!((options.sni_port, options.tunneling_port), (0, 0));
        let port = options.stats_port;
        let expected = serde_json::json!([
            {"name": "healthz", "port": port, "targetPort": port, "protocol": "TCP"},
        ]);
        assert_eq!(service["spec"]["ports"], expected);
    }
}

#[test]
fn pods_of_a_front_door_prefer_different_hosts_and_zones() {
    let text = file("konnectivity", "LoadBalancer", "");
    let door = object(&text, "Deployment", "nodeport-proxy-envoy");
    let affinity = &door["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"];
    let preferred = &affinity["preferredDuringSchedulingIgnoredDuringExecution"];
    let terms = preferred.as_array().unwrap().iter();
    let terms: Vec<&Value> = terms.map(|it| &it["podAffinityTerm"]).collect();
    let keys = ["kubernetes.io/hostname", "topology.kubernetes.io/zone"];
    assert_eq!(terms.len(), keys.len());
    for (term, key) in terms.into_iter().zip(keys) {
        assert_eq!(term["topologyKey"], key);
        let labels = &term["labelSelector"]["matchLabels"];
        assert_eq!(labels, &door["spec"]["template"]["metadata"]["labels"]);
    }
}

#[test]
fn server_with_both_tunnels_has_the_memory_of_the_chart() {
    let values = include_str!("../../../helm/culvert-server/values.yaml");
    let server = object(
        &file("openvpn", "NodePort", ""),
        "Deployment",
        "openvpn-server",
    );
    let container = &server["spec"]["template"]["spec"]["containers"][0];
    let memory = container["resources"]["limits"]["memory"].as_str().unwrap();
    assert!(values.contains(&format!("  limits: {{cpu: \"2\", memory: {memory}}}\n")));
}

#[test]
fn openvpn_networks_are_rendered_without_host_bits() {
    let spec = "NodePort, clusterNetwork: {pods: {cidrBlocks: [172.25.0.1/16]}, services: {cidrBlocks: [10.240.16.1/20]}}";
    let text = file("openvpn", spec, "nodeAccessNetwork: 10.254.0.1/16");
    for (name, args) in render(&text, command_lines) {
        let networks = args
            .iter()
            .filter(|arg| arg.contains('/') && arg.starts_with("--openvpn-"));
        let networks: Vec<&String> = networks.filter(|arg| !arg.contains("=/")).collect();
        assert!(!networks.is_empty(), "{name}");
        for argument in networks {
            assert!(!argument.contains(".1/"), "{argument}");
        }
    }
}

#[test]
fn default_limit_follows_a_given_request() {
    let resources = |given: &str| {
        let spec =
            format!("NodePort, componentsOverride: {{konnectivityProxy: {{resources: {given}}}}}");
        let text = file("konnectivity", &spec, "");
        let agent = object(&text, "Deployment", "konnectivity-agent");
        agent["spec"]["template"]["spec"]["containers"][0]["resources"].clone()
    };
    let raised = serde_json::json!({
        "requests": {"cpu": "3", "memory": "1Gi"}, "limits": {"cpu": "3", "memory": "1Gi"},
    });
    assert_eq!(resources("{requests: {cpu: 3, memory: 1Gi}}"), raised);
    let lowered = serde_json::json!({
        "requests": {"cpu": "10m", "memory": "5Mi"}, "limits": {"memory": "5Mi"},
    });
    assert_eq!(resources("{limits: {memory: 5Mi}}"), lowered);
}

#[test]
fn files_of_an_earlier_run_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let stale = |tunnel: &str, parts: &[Part]| {
        render(&file(tunnel, "NodePort", ""), |objects| {
            let stale = output::stale(folder, objects, parts);
            let names = stale.iter().map(|path| path.file_name().unwrap());
            let names: Vec<String> = names.map(|it| it.display().to_string()).collect();
            output::write(folder, "cluster-abc123", objects).unwrap();
            names
        })
    };
    assert_eq!(stale("openvpn", &[]), [""; 0]);
    std::fs::write(folder.join("notes.yaml"), "").unwrap();
    assert_eq!(stale("openvpn", &[]), [""; 0]);
    assert_eq!(stale("konnectivity", &[Part::Agent]), [""; 0]);
    assert_eq!(stale("konnectivity", &[]), ["seed-server.yaml"]);
}

#[test]
fn commands_of_a_plan_stop_at_a_failed_one() {
    let text = plan_text(Side::Konnectivity, Side::Openvpn).unwrap();
    let saved = "get deployment apiserver -o yaml > cluster-abc123-apiserver.yaml &&\n";
    assert!(text.contains(saved), "{text}");
    for from in [" > apiserver.yaml", " rendered/", "=rendered"] {
        assert!(!text.contains(from), "{text}");
    }
    for (from, to) in [
        (Side::Openvpn, Side::Konnectivity),
        (Side::Tunneling, Side::NodePort),
    ] {
        let text = plan_text(from, to).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        for pair in lines.windows(2) {
            let [command, next] = [pair[0], pair[1]].map(|line| line.strip_prefix("     "));
            let Some(command) = command else { continue };
            let next = next.filter(|next| !next.starts_with('#'));
            let is_joined = command.ends_with(" &&");
            assert_eq!(
                is_joined,
                next.is_some() && !command.contains('#'),
                "{command}"
            );
        }
    }
}

#[test]
fn name_of_the_cluster_file_does_not_change_which_commands_are_joined() {
    for (from, to, strategy) in [
        (Side::Openvpn, Side::Konnectivity, "NodePort"),
        (Side::NodePort, Side::Tunneling, "Tunneling"),
    ] {
        let plain = plan_with(from, to, "konnectivity", strategy).unwrap();
        let text = plan_of("'prod#1.yaml'", from, to, "konnectivity", strategy).unwrap();
        assert_eq!(text, plain.replace("cluster.yaml", "'prod#1.yaml'"));
    }
}

#[test]
fn plan_of_a_strategy_saves_the_secrets_that_its_way_back_restores() {
    let text = plan_text(Side::NodePort, Side::Tunneling).unwrap();
    let saved = "cluster-abc123-secrets-before-tunneling.yaml";
    let order = [
        "get secret apiserver-tls konnectivityproxy-tls konnectivity-kubeconfig",
        "--part=certificates",
        "# issue a certificate for each request",
        &format!("back:     kubectl --kubeconfig=SEED replace -f {saved} && rm -f {saved}"),
        "exposeStrategy",
        &format!("back:     kubectl --kubeconfig=SEED replace -f {saved}  # then run this step"),
        &format!("rm -f {saved} &&"),
    ];
    let mut rest = text.as_str();
    for part in order {
        let found = rest.split_once(part);
        rest = found.unwrap_or_else(|| panic!("no {part} in {rest}")).1;
    }
}

#[test]
fn all_pods_have_the_pull_secrets() {
    let secrets = |tunnel: &str, more: &str| -> BTreeSet<(bool, bool, String)> {
        render(&file(tunnel, "LoadBalancer", more), |objects| {
            let pods = objects.iter().filter_map(|object| {
                let pod = object.value.pointer("/spec/template/spec")?;
                let names = pod["imagePullSecrets"].as_array().into_iter().flatten();
                let names: Vec<&str> = names.filter_map(|it| it["name"].as_str()).collect();
                let is_seed = object.place == objects::Place::Seed;
                Some((is_seed, object.is_patch, names.join(",")))
            });
            pods.collect()
        })
    };
    let set = |list: &[(bool, bool, &str)]| -> BTreeSet<(bool, bool, String)> {
        let list = list.iter();
        list.map(|(seed, patch, names)| (*seed, *patch, (*names).to_owned()))
            .collect()
    };
    for tunnel in TUNNELS {
        let kkp = set(&[
            (true, false, "dockercfg"),
            (true, true, ""),
            (false, false, ""),
        ]);
        assert_eq!(secrets(tunnel, ""), kkp);
        let own = set(&[
            (true, false, "a,b"),
            (true, true, "a,b"),
            (false, false, "a,b"),
        ]);
        assert_eq!(secrets(tunnel, "imagePullSecrets: [a, b]"), own);
        let none = set(&[(true, false, ""), (true, true, ""), (false, false, "")]);
        assert_eq!(secrets(tunnel, "imagePullSecrets: []"), none);
    }
}
