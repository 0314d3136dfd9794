//! Agents and node tunnel in the user cluster.

use serde_json::{Value, json};

use crate::render::arguments::{self, AGENT_ACCOUNT};
use crate::render::cluster::Tunnel;
use crate::render::target::{Program, Target};
use crate::render::tokens::AUDIENCE;

use super::{Object, Part, Place, affinity, liveness, pod_security, resources, security};

/// Namespace of all objects.
const NAMESPACE: &str = "kube-system";

/// Memory limit of an agent, as in the chart. The buffers may use 51 MiB for each server.
const MEMORY: &str = "256Mi";

pub(super) fn objects(target: &Target<'_>) -> Vec<Object> {
    let user = |part, value| Object::new(part, Place::User, value);
    let mut objects = match target.cluster.tunnel {
        Tunnel::Konnectivity => vec![
            user(Part::Agent, agent(target)),
            user(Part::Agent, budget()),
        ],
        Tunnel::Openvpn => vec![user(Part::Agent, openvpn_client(target))],
    };
    if target.cluster.is_tunneling() {
        objects.push(user(Part::NodeTunnel, node_tunnel(target)));
    }
    objects
}

fn agent(target: &Target<'_>) -> Value {
    let labels = json!({"app": "konnectivity-agent"});
    let token = format!("{AGENT_ACCOUNT}-token");
    let proxy = &target.cluster.spec.components_override.konnectivity_proxy;
    // KKP's limit of the stock agent.
    let memory = match target.is_stock(Program::Agent) {
        true => "100Mi",
        false => MEMORY,
    };
    let container = json!({
        "name": "konnectivity-agent",
        "image": target.image(Program::Agent),
        "imagePullPolicy": "IfNotPresent",
        "command": ["/proxy-agent"],
        "args": arguments::agent(target),
        "livenessProbe": liveness(8134, 15),
        "readinessProbe": probe("/readyz", 8134),
        "resources": resources(proxy.resources.as_ref(), ["10m", "10Mi"], ["2", memory]),
        "securityContext": security(),
        "volumeMounts": [{"name": token, "mountPath": "/var/run/secrets/tokens"}],
    });
    let pod = json!({
        "priorityClassName": "system-cluster-critical",
        "serviceAccountName": AGENT_ACCOUNT,
        "securityContext": pod_security(),
        "affinity": affinity(&labels, [&proxy.host_anti_affinity, &proxy.zone_anti_affinity]),
        "containers": [container],
        "volumes": [{"name": token, "projected": {
            "defaultMode": 420,
            "sources": [{"serviceAccountToken": {
                "audience": AUDIENCE,
                "expirationSeconds": 3600,
                "path": token,
            }}],
        }}],
    });
    json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "konnectivity-agent", "namespace": NAMESPACE, "labels": labels},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": labels},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxUnavailable": 1, "maxSurge": "25%"},
            },
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    })
}

fn probe(path: &str, port: u16) -> Value {
    json!({"httpGet": {"path": path, "port": port}, "periodSeconds": 10})
}

/// Returns the disruption budget of the agents. An agent that is not connected is not ready, and must not keep its node from
/// being drained.
fn budget() -> Value {
    json!({
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "konnectivity-agent", "namespace": NAMESPACE},
        "spec": {
            "minAvailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": {"app": "konnectivity-agent"}},
        },
    })
}

fn openvpn_client(target: &Target<'_>) -> Value {
    let labels = json!({"role": "openvpn-client"});
    let container = json!({
        "name": "openvpn-client",
        "image": target.image(Program::Agent),
        "imagePullPolicy": "IfNotPresent",
        "command": ["/proxy-agent"],
        "args": arguments::openvpn_client(target),
        "livenessProbe": probe("/healthz", 8134),
        "readinessProbe": probe("/readyz", 8134),
        "resources": resources(None, ["10m", "10Mi"], ["2", MEMORY]),
        "securityContext": security(),
        "volumeMounts": [{"name": "certificates", "mountPath": "/etc/openvpn/certs", "readOnly": true}],
    });
    let pod = json!({
        "priorityClassName": "system-cluster-critical",
        "automountServiceAccountToken": false,
        "securityContext": pod_security(),
        "terminationGracePeriodSeconds": 30,
        "containers": [container],
        "volumes": [{"name": "certificates", "secret": {
            "secretName": "openvpn-client-certificates",
            "defaultMode": 288,
        }}],
    });
    json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "openvpn-client", "namespace": NAMESPACE, "labels": labels},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    })
}

fn node_tunnel(target: &Target<'_>) -> Value {
    let labels = json!({"app": "envoy-agent", "app.kubernetes.io/name": "envoy-agent"});
    let given = &target.cluster.spec.components_override.envoy_agent;
    let container = json!({
        "name": "envoy-agent",
        "image": target.image(Program::NodeTunnel),
        "imagePullPolicy": "IfNotPresent",
        "args": arguments::node_tunnel(target),
        "livenessProbe": liveness(8002, 15),
        "readinessProbe": probe("/readyz", 8002),
        "resources": resources(given.resources.as_ref(), ["100m", "64Mi"], ["1", "512Mi"]),
        "securityContext": {
            "allowPrivilegeEscalation": false,
            "capabilities": {"drop": ["ALL"], "add": ["NET_ADMIN"]},
            "readOnlyRootFilesystem": true,
            "runAsUser": 0,
        },
    });
    json!({
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "envoy-agent", "namespace": NAMESPACE, "labels": labels},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {
                    "labels": labels,
                    "annotations": {
                        "prometheus.io/scrape": "true",
                        "prometheus.io/port": "8002",
                        "prometheus.io/path": "/stats/prometheus",
                    },
                },
                "spec": {
                    "hostNetwork": true,
                    "dnsPolicy": "ClusterFirst",
                    "automountServiceAccountToken": false,
                    "priorityClassName": "system-cluster-critical",
                    "terminationGracePeriodSeconds": 30,
                    "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
                    "tolerations": [
                        {"operator": "Exists", "effect": "NoSchedule"},
                        {"operator": "Exists", "effect": "NoExecute"},
                    ],
                    "containers": [container],
                },
            },
        },
    })
}
