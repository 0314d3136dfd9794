//! Accounts and permissions, and NetworkPolicies.

use serde_json::{Value, json};

use crate::render::arguments::AGENT_ACCOUNT;
use crate::render::cluster::Tunnel;
use crate::render::target::Target;
use crate::render::tokens::AUDIENCE;

use super::{Object, Part, Place};

pub(super) fn objects(target: &Target<'_>) -> Vec<Object> {
    let user = |value| Object::new(Part::Rbac, Place::User, value);
    let mut objects = vec![
        user(json!({
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": AGENT_ACCOUNT, "namespace": "kube-system"},
        })),
        user(binding(
            "system:konnectivity-server",
            "system:auth-delegator",
        )),
    ];
    if target.cluster.tunnel == Tunnel::Openvpn {
        objects.push(user(json!({
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": "culvert-server-nodes"},
            "rules": [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch"]}],
        })));
        objects.push(user(binding(
            "culvert-server-nodes",
            "culvert-server-nodes",
        )));
    }
    objects.extend(policies(target));
    objects
}

/// Returns a binding for the account of the server.
fn binding(name: &str, role: &str) -> Value {
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": AUDIENCE}],
    })
}

fn policies(target: &Target<'_>) -> Vec<Object> {
    let namespace = &target.namespace;
    let seed = |name: &str, to: &str| {
        let value = json!({
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {
                "podSelector": {"matchLabels": {"app": "apiserver"}},
                "policyTypes": ["Egress"],
                "egress": [{"to": [{"podSelector": {"matchLabels": {"app": to}}}]}],
            },
        });
        Object::new(Part::NetworkPolicies, Place::Seed, value)
    };
    let mut objects = Vec::new();
    // Where no other policy allows the egress of kube-apiserver, this one alone would deny etcd.
    if target.has_seed_policy() {
        objects.push(match target.cluster.tunnel {
            Tunnel::Konnectivity => seed("apiserver-internal-allow", "apiserver"),
            Tunnel::Openvpn => seed("openvpn-server-allow", "openvpn-server"),
        });
    }
    if target.has_user_policy() {
        let (name, labels) = match target.cluster.tunnel {
            Tunnel::Konnectivity => ("konnectivity", json!({"app": "konnectivity-agent"})),
            Tunnel::Openvpn => ("openvpn-client", json!({"role": "openvpn-client"})),
        };
        let value = json!({
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": name, "namespace": "kube-system"},
            "spec": {
                "podSelector": {"matchLabels": labels},
                "policyTypes": ["Ingress", "Egress"],
                "egress": [{}],
            },
        });
        objects.push(Object::new(Part::NetworkPolicies, Place::User, value));
    }
    objects
}
