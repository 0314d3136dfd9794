//! The Services of the seed with the annotations of the front door, and the front door of one cluster.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::render::arguments::{self, FRONT_END_PORT, STATS_PORT};
use crate::render::cluster::{Cluster, Tunnel};
use crate::render::target::{OPENVPN_PORT, Program, Target};

use super::{Object, Part, Place, affinity, pod_security, resources, security};

/// Annotation that exposes a Service through the front door of the seed.
const EXPOSE: &str = "nodeport-proxy.k8s.io/expose";
/// Annotation that exposes a Service through the front door of its cluster.
const EXPOSE_NAMESPACED: &str = "nodeport-proxy.k8s.io/expose-namespaced";
/// Annotation with the server name of each port.
const PORT_MAPPING: &str = "nodeport-proxy.k8s.io/port-mapping";
/// Annotation with the networks of a load balancer's clients, separated by commas.
const SOURCE_RANGES: &str = "service.beta.kubernetes.io/load-balancer-source-ranges";
/// Annotations of load balancers on AWS. KKP: `FrontLoadBalancerServiceReconciler` in
/// pkg/resources/nodeportproxy/nodeportproxy.go.
const AWS: [(&str, &str); 3] = [
    ("service.beta.kubernetes.io/aws-load-balancer-type", "nlb"),
    (
        "service.beta.kubernetes.io/aws-load-balancer-connection-idle-timeout",
        "3600",
    ),
    (
        "service.beta.kubernetes.io/aws-load-balancer-cross-zone-load-balancing-enabled",
        "true",
    ),
];

pub(super) fn objects(target: &Target<'_>) -> Vec<Object> {
    let mut objects: Vec<Object> = services(target)
        .into_iter()
        .map(|value| Object::new(Part::Services, Place::Seed, value))
        .collect();
    if target.cluster.is_load_balancer() {
        let own = |value| Object::new(Part::Door, Place::Seed, value);
        objects.extend(door(target).into_iter().map(own));
    }
    objects
}

/// A Service of the seed.
struct Exposed<'a> {
    name: &'a str,
    /// Value of the annotation with the strategy NodePort.
    node_port_value: &'a str,
    /// Name by which TLS clients reach the Service with Tunneling; `None` for a protocol that is not TLS.
    server_name: Option<String>,
    selector: &'a str,
    /// Port, target port, node port.
    ports: (u16, u16, Option<u16>),
    publish_not_ready: bool,
}

fn services(target: &Target<'_>) -> Vec<Value> {
    let ports = &target.cluster.facts().node_ports;
    let name = &target.external_name;
    let mut services = vec![exposed(
        target,
        &Exposed {
            name: "apiserver-external",
            node_port_value: "NodePort",
            server_name: Some(name.clone()),
            selector: "apiserver",
            ports: (443, target.apiserver_port, ports.apiserver),
            publish_not_ready: false,
        },
    )];
    match target.cluster.tunnel {
        Tunnel::Konnectivity => services.push(exposed(
            target,
            &Exposed {
                name: "konnectivity-server",
                node_port_value: "NodePort",
                server_name: Some(format!("konnectivity-server.{name}")),
                selector: "apiserver",
                ports: (443, 8132, ports.konnectivity_server),
                // A server that is not ready needs agents to become ready.
                publish_not_ready: true,
            },
        )),
        Tunnel::Openvpn => {
            services.push(exposed(
                target,
                &Exposed {
                    name: "openvpn-server",
                    node_port_value: "true",
                    server_name: None,
                    selector: "openvpn-server",
                    ports: (OPENVPN_PORT, OPENVPN_PORT, ports.openvpn_server),
                    publish_not_ready: false,
                },
            ));
            services.push(json!({
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": "culvert-front-end", "namespace": target.namespace},
                "spec": {
                    "type": "ClusterIP",
                    "selector": {"app": "openvpn-server"},
                    "ports": [{
                        "name": "secure",
                        "port": FRONT_END_PORT,
                        "targetPort": FRONT_END_PORT,
                        "protocol": "TCP",
                    }],
                },
            }));
        }
    }
    services
}

fn exposed(target: &Target<'_>, service: &Exposed<'_>) -> Value {
    let (port, target_port, node_port) = service.ports;
    let is_tunneling = target.cluster.is_tunneling();
    let annotations = match (
        target.cluster.spec.expose_strategy.as_str(),
        &service.server_name,
    ) {
        ("Tunneling", Some(name)) => json!({
            EXPOSE: "SNI,Tunneling",
            PORT_MAPPING: json!({"secure": name}).to_string(),
        }),
        ("Tunneling", None) => json!({EXPOSE: "Tunneling"}),
        ("LoadBalancer", _) => json!({EXPOSE_NAMESPACED: "true"}),
        _ => json!({EXPOSE: service.node_port_value}),
    };
    let mut entry = json!({
        "name": "secure",
        "port": port,
        "targetPort": target_port,
        "protocol": "TCP",
    });
    if let (Some(entry), Some(node_port)) =
        (entry.as_object_mut(), node_port.filter(|_| !is_tunneling))
    {
        entry.insert("nodePort".to_owned(), json!(node_port));
    }
    let mut spec = json!({
        "type": if is_tunneling { "ClusterIP" } else { "NodePort" },
        "selector": {"app": service.selector},
        "ports": [entry],
    });
    if let Some(spec) = spec.as_object_mut().filter(|_| service.publish_not_ready) {
        spec.insert("publishNotReadyAddresses".to_owned(), json!(true));
    }
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": service.name,
            "namespace": target.namespace,
            "annotations": annotations,
        },
        "spec": spec,
    })
}

/// Returns the front door of the cluster, and its load balancer.
fn door(target: &Target<'_>) -> Vec<Value> {
    let namespace = &target.namespace;
    let meta = |name: &str| json!({"name": name, "namespace": namespace});
    let subject =
        json!({"kind": "ServiceAccount", "name": "nodeport-proxy", "namespace": namespace});
    let given = &target
        .cluster
        .spec
        .components_override
        .node_port_proxy_envoy;
    let proxy = Workload {
        name: "nodeport-proxy-envoy",
        container: "envoy-manager",
        command: "/envoy-manager",
        args: arguments::door(target),
        replicas: given.replicas.unwrap_or(2),
        resources: resources(given.resources.as_ref(), ["50m", "32Mi"], ["100m", "64Mi"]),
    };
    let updater = Workload {
        name: "nodeport-proxy-lb-updater",
        container: "lb-updater",
        command: "/lb-updater",
        args: arguments::updater(target),
        replicas: 1,
        resources: resources(None, ["10m", "32Mi"], ["50m", "32Mi"]),
    };
    vec![
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta("nodeport-proxy")}),
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": meta("nodeport-proxy"),
            "rules": [
                {"apiGroups": [""], "resources": ["services"], "verbs": ["list", "get", "watch"]},
                {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "get", "watch"]},
                {"apiGroups": [""], "resources": ["services"], "resourceNames": ["front-loadbalancer"], "verbs": ["update"]},
            ],
        }),
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": meta("nodeport-proxy"),
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "nodeport-proxy"},
            "subjects": [subject],
        }),
        balancer(target),
        proxy.deployment(target),
        updater.deployment(target),
        json!({
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": meta("nodeport-proxy-envoy"),
            "spec": {
                "maxUnavailable": 1,
                // A door that is not ready must not keep its node from being drained.
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
                "selector": {"matchLabels": {"app": "nodeport-proxy-envoy"}},
            },
        }),
    ]
}

/// Returns the Service of the load balancer, with KKP's annotations and networks of clients.
fn balancer(target: &Target<'_>) -> Value {
    let Cluster { spec, provider, .. } = target.cluster;
    let seed = &target.cluster.facts().seed;
    let settings = &seed.nodeport_proxy.envoy.load_balancer_service;
    let mut ranges = BTreeSet::from_iter(&settings.source_ranges);
    // The seed's default adds to the networks of a cluster; alone, it would lock all others out.
    if let Some(own) = &spec.api_server_allowed_ip_ranges {
        ranges.extend(&own.cidr_blocks);
        ranges.extend(&seed.default_api_server_allowed_ip_ranges);
    }
    let mut annotations = seed.nodeport_proxy.annotations.clone();
    annotations.extend(settings.annotations.clone());
    // Some clouds read the annotation, and not the field of the Service.
    annotations.remove(SOURCE_RANGES);
    if !ranges.is_empty() {
        let list: Vec<&str> = ranges.iter().map(|range| range.as_str()).collect();
        annotations.insert(SOURCE_RANGES.to_owned(), list.join(","));
    }
    if provider == "aws" {
        annotations.extend(AWS.map(|(name, value)| (name.to_owned(), value.to_owned())));
    }
    let mut metadata = json!({"name": "front-loadbalancer", "namespace": target.namespace});
    if let Some(metadata) = metadata.as_object_mut().filter(|_| !annotations.is_empty()) {
        metadata.insert("annotations".to_owned(), json!(annotations));
    }
    let mut balancer = json!({
        "type": "LoadBalancer",
        "selector": {"app": "nodeport-proxy-envoy"},
        // The updater adds the other ports. It would remove any port but this one, and `kubectl apply` would add it again.
        "ports": [{
            "name": "healthz",
            "port": STATS_PORT,
            "targetPort": STATS_PORT,
            "protocol": "TCP",
        }],
    });
    if let Some(spec) = balancer.as_object_mut().filter(|_| !ranges.is_empty()) {
        spec.insert("loadBalancerSourceRanges".to_owned(), json!(ranges));
    }
    json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": balancer})
}

/// A Deployment of the front door.
struct Workload {
    name: &'static str,
    container: &'static str,
    command: &'static str,
    args: Vec<String>,
    replicas: i32,
    resources: Value,
}

impl Workload {
    fn deployment(&self, target: &Target<'_>) -> Value {
        let labels = json!({"app": self.name});
        let probe = |path: &str, period: u32, timeout: u32| {
            json!({
                "httpGet": {"path": path, "port": STATS_PORT},
                "periodSeconds": period,
                "timeoutSeconds": timeout,
                "failureThreshold": 3,
            })
        };
        let container = json!({
            "name": self.container,
            "image": target.image(Program::Door),
            "imagePullPolicy": "IfNotPresent",
            "command": [self.command],
            "args": self.args,
            "ports": [{"name": "stats", "containerPort": STATS_PORT, "protocol": "TCP"}],
            // The load balancer must not use a pod that does not know its ports yet.
            "readinessProbe": probe("/readyz", 3, 1),
            // A restart cuts all connections, and a pod that moves bulk with a small CPU limit answers late.
            "livenessProbe": probe("/healthz", 10, 5),
            "resources": self.resources,
            "securityContext": security(),
        });
        let mut pod = json!({
            "serviceAccountName": "nodeport-proxy",
            "securityContext": pod_security(),
            "terminationGracePeriodSeconds": 30,
            "containers": [container],
        });
        if let Some(pod) = pod.as_object_mut().filter(|_| self.replicas > 1) {
            pod.insert("affinity".to_owned(), affinity(&labels, ["preferred"; 2]));
        }
        json!({
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": self.name, "namespace": target.namespace, "labels": labels},
            "spec": {
                "replicas": self.replicas,
                "selector": {"matchLabels": labels},
                "template": {
                    "metadata": {
                        "labels": labels,
                        "annotations": {
                            "prometheus.io/scrape": "true",
                            "prometheus.io/port": STATS_PORT.to_string(),
                            "prometheus.io/path": "/stats/prometheus",
                        },
                    },
                    "spec": pod,
                },
            },
        })
    }
}
