//! The objects of one user cluster.

mod agent;
mod door;
mod rbac;
mod server;
mod trust;

use std::collections::BTreeMap;

use clap::ValueEnum;
use serde_json::{Value, json};

use super::apiserver::Apiserver;
use super::spec::{Resources, quantity};
use super::target::Target;

/// Secret for registries that KKP keeps in the namespace of every cluster in the seed: `ImagePullSecretName` in
/// pkg/resources/resources.go.
const PULL_SECRET: &str = "dockercfg";

/// A part of the rendered objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(super) enum Part {
    /// ConfigMap with kube-apiserver's EgressSelectorConfiguration.
    Egress,
    /// ConfigMap with kube-apiserver's flags for the tunnel.
    Apiserver,
    /// The server: a patch of the Deployment apiserver, or the Deployment openvpn-server.
    Server,
    /// Services in the seed, with the annotations of the front door.
    Services,
    /// ConfigMap with the requests of all certificates.
    Certificates,
    /// The front door of this cluster; with LoadBalancer only.
    Door,
    /// The agents in the user cluster.
    Agent,
    /// The node tunnel in the user cluster; with Tunneling only.
    NodeTunnel,
    /// Accounts and permissions in the user cluster.
    Rbac,
    /// NetworkPolicies of the seed and the user cluster.
    NetworkPolicies,
}

/// The cluster that gets an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Place {
    Seed,
    User,
}

/// A rendered object.
pub(super) struct Object {
    pub(super) part: Part,
    pub(super) place: Place,
    /// True for a strategic merge patch of an object that exists.
    pub(super) is_patch: bool,
    pub(super) value: Value,
}

/// Renders all objects, in the order in which they can be applied.
pub(super) fn all(target: &Target<'_>, running: Option<&Apiserver>) -> Vec<Object> {
    let mut objects = Vec::new();
    objects.extend(rbac::objects(target));
    objects.extend(trust::objects(target));
    objects.extend(server::objects(target, running));
    objects.extend(door::objects(target));
    objects.extend(agent::objects(target));
    for object in &mut objects {
        object.add_pull_secrets(target);
    }
    objects
}

impl Object {
    fn new(part: Part, place: Place, value: Value) -> Self {
        Self {
            part,
            place,
            is_patch: false,
            value,
        }
    }

    /// Gives the pods of a workload their Secrets for the registry.
    fn add_pull_secrets(&mut self, target: &Target<'_>) {
        let names: Vec<&str> = match &target.cluster.facts().image_pull_secrets {
            Some(names) => names.iter().map(String::as_str).collect(),
            // KKP's own Deployment of kube-apiserver, which the patch changes, has the Secret already.
            None if self.place == Place::Seed && !self.is_patch => vec![PULL_SECRET],
            None => Vec::new(),
        };
        let pod = self.value.pointer_mut("/spec/template/spec");
        if let Some(pod) = pod.and_then(Value::as_object_mut)
            && !names.is_empty()
        {
            let names: Vec<Value> = names.iter().map(|name| json!({"name": name})).collect();
            pod.insert("imagePullSecrets".to_owned(), json!(names));
        }
    }
}

/// Returns requests and limits, replaced by the settings of the cluster. The API refuses a request above its limit, so the
/// defaults follow a given request or limit.
fn resources(given: Option<&Resources>, requests: [&str; 2], limits: [&str; 2]) -> Value {
    let of = |given: Option<&BTreeMap<String, String>>, [cpu, memory]: [&str; 2]| {
        let given = given.filter(|given| !given.is_empty());
        given.cloned().unwrap_or_else(|| {
            let defaults = [("cpu", cpu), ("memory", memory)];
            BTreeMap::from(defaults.map(|(name, value)| (name.to_owned(), value.to_owned())))
        })
    };
    let mut requests = of(given.map(|given| &given.requests), requests);
    let mut limits = of(given.map(|given| &given.limits), limits);
    let has_limits = given.is_some_and(|given| !given.limits.is_empty());
    for (name, request) in &mut requests {
        match limits.get_mut(name) {
            Some(limit) if quantity(request) > quantity(limit) => match has_limits {
                true => request.clone_from(limit),
                false => limit.clone_from(request),
            },
            _ => {}
        }
    }
    json!({"requests": requests, "limits": limits})
}

/// Returns the affinity of pods that avoid each other's hosts and zones: required, or preferred with any other value.
fn affinity(labels: &Value, [host, zone]: [&str; 2]) -> Value {
    let mut required = Vec::new();
    let mut preferred = Vec::new();
    for (key, value) in [
        ("kubernetes.io/hostname", host),
        ("topology.kubernetes.io/zone", zone),
    ] {
        let term = json!({"labelSelector": {"matchLabels": labels}, "topologyKey": key});
        match value {
            "required" => required.push(term),
            _ => preferred.push(json!({"weight": 100, "podAffinityTerm": term})),
        }
    }
    json!({"podAntiAffinity": {
        "preferredDuringSchedulingIgnoredDuringExecution": preferred,
        "requiredDuringSchedulingIgnoredDuringExecution": required,
    }})
}

fn liveness(port: u16, initial: u32) -> Value {
    json!({
        "httpGet": {"path": "/healthz", "port": port, "scheme": "HTTP"},
        "initialDelaySeconds": initial,
        "timeoutSeconds": 15,
        "periodSeconds": 10,
        "successThreshold": 1,
        "failureThreshold": 3,
    })
}

/// Returns the security context of a container that needs no permission.
fn security() -> Value {
    json!({
        "allowPrivilegeEscalation": false,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": true,
    })
}

/// Returns the security context of a pod under Pod Security *restricted*.
fn pod_security() -> Value {
    json!({
        "runAsNonRoot": true,
        "runAsUser": 65532,
        "fsGroup": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    })
}
