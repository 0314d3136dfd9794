//! The server in the seed, and the settings of kube-apiserver.

use serde_json::{Map, Value, json};

use crate::render::apiserver::{self, Apiserver};
use crate::render::arguments::{self, FRONT_END_PORT, SOCKET_FOLDER};
use crate::render::cluster::Tunnel;
use crate::render::target::{OPENVPN_PORT, Program, Target};

use super::{Object, Part, Place, liveness, pod_security, resources, security};

/// Folder of the egress file in the pod of kube-apiserver.
const EGRESS_FOLDER: &str = "/etc/kubernetes/konnectivity";
/// Folder of the client certificate with which kube-apiserver reaches a server outside of its pod.
const CLIENT_FOLDER: &str = "/etc/kubernetes/culvert-front-end";
/// Secret and volume of this certificate.
const CLIENT_SECRET: &str = "culvert-front-end-client";

/// Memory limit of the server, as in the chart. The buffers of one agent may use 64 MiB, and the buffers of an OpenVPN client
/// 256 MiB.
const MEMORY: &str = "512Mi";
/// KKP's memory limit of the stock server.
const STOCK_MEMORY: &str = "200Mi";

pub(super) fn objects(target: &Target<'_>, running: Option<&Apiserver>) -> Vec<Object> {
    let seed = |part, value| Object::new(part, Place::Seed, value);
    let flags = arguments::kube_apiserver(target, running);
    let mut objects = vec![
        seed(Part::Egress, egress(target)),
        seed(
            Part::Apiserver,
            config_map(
                target,
                "kube-apiserver-tunnel-flags",
                json!({"flags": lines(&flags)}),
            ),
        ),
    ];
    if target.cluster.tunnel == Tunnel::Openvpn {
        objects.push(seed(Part::Server, client_configs(target)));
        objects.push(seed(Part::Server, deployment(target)));
    }
    objects.push(Object {
        is_patch: true,
        ..seed(Part::Server, patch(target, running, &flags))
    });
    objects
}

fn config_map(target: &Target<'_>, name: &str, data: Value) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": target.namespace},
        "data": data,
    })
}

fn lines(list: &[String]) -> String {
    let mut text = list.join("\n");
    text.push('\n');
    text
}

fn egress(target: &Target<'_>) -> Value {
    let connection = match target.cluster.tunnel {
        Tunnel::Konnectivity => json!({
            "proxyProtocol": "GRPC",
            "transport": {"uds": {"udsName": format!("{SOCKET_FOLDER}/konnectivity-server.socket")}},
        }),
        Tunnel::Openvpn => json!({
            "proxyProtocol": "HTTPConnect",
            "transport": {"tcp": {
                "url": format!("https://culvert-front-end.{}.svc:{FRONT_END_PORT}", target.namespace),
                "tlsConfig": {
                    "caBundle": format!("{CLIENT_FOLDER}/ca.crt"),
                    "clientKey": format!("{CLIENT_FOLDER}/tls.key"),
                    "clientCert": format!("{CLIENT_FOLDER}/tls.crt"),
                },
            }},
        }),
    };
    let file = json!({
        "apiVersion": "apiserver.k8s.io/v1beta1",
        "kind": "EgressSelectorConfiguration",
        "egressSelections": [{"name": "cluster", "connection": connection}],
    });
    // JSON is YAML, and the file stays readable inside of the ConfigMap.
    let text = serde_saphyr::to_string(&file).unwrap_or_else(|_| file.to_string());
    let data = json!({"egress-selector-configuration.yaml": text});
    config_map(target, "kube-apiserver-egress", data)
}

/// Returns the per-client file of the OpenVPN server: the networks behind the client in the user cluster.
fn client_configs(target: &Target<'_>) -> Value {
    let routes = target.openvpn_routes();
    let nets = routes
        .iter()
        .filter_map(|route| route.parse::<ipnet::Ipv4Net>().ok());
    let file: Vec<String> = nets
        .map(|net| format!("iroute {} {}", net.network(), net.netmask()))
        .collect();
    config_map(
        target,
        "openvpn-client-configs",
        json!({"user-cluster-client": lines(&file)}),
    )
}

fn secret(name: &str, secret: &str) -> Value {
    json!({"name": name, "secret": {"secretName": secret}})
}

/// Volumes of the server's credentials.
fn credentials() -> [Value; 2] {
    [
        secret("konnectivity-kubeconfig", "konnectivity-kubeconfig"),
        secret("konnectivityproxy-tls", "konnectivityproxy-tls"),
    ]
}

fn mount(name: &str, path: &str) -> Value {
    json!({"name": name, "mountPath": path, "readOnly": true})
}

/// Returns a container of the server.
fn container(target: &Target<'_>, name: &str, mounts: Vec<Value>) -> Value {
    let memory = match target.is_stock(Program::Server) {
        true => STOCK_MEMORY,
        false => MEMORY,
    };
    let port =
        |name: &str, port: u16| json!({"name": name, "containerPort": port, "protocol": "TCP"});
    let mut ports = vec![
        port("agentport", 8132),
        port("adminport", 8133),
        port("healthport", 8134),
    ];
    if target.cluster.tunnel == Tunnel::Openvpn {
        ports.extend([
            port("openvpn", OPENVPN_PORT),
            port("frontend", FRONT_END_PORT),
        ]);
    }
    let mut all = vec![
        mount("konnectivity-kubeconfig", "/etc/kubernetes/kubeconfig"),
        mount("konnectivityproxy-tls", "/etc/kubernetes/pki/"),
    ];
    all.extend(mounts);
    let proxy = &target.cluster.spec.components_override.konnectivity_proxy;
    json!({
        "name": name,
        "image": target.image(Program::Server),
        "imagePullPolicy": "IfNotPresent",
        "command": ["/proxy-server"],
        "args": arguments::server(target),
        "ports": ports,
        "livenessProbe": liveness(8134, 15),
        "resources": resources(proxy.resources.as_ref(), ["10m", "10Mi"], ["2", memory]),
        "volumeMounts": all,
    })
}

/// Returns the patch of the Deployment of kube-apiserver. A patch cannot merge flags, so they need the `running`
/// Deployment; the part `apiserver` lists them.
fn patch(target: &Target<'_>, running: Option<&Apiserver>, flags: &[String]) -> Value {
    let mut volumes = vec![json!({
        "name": "kube-apiserver-egress",
        "configMap": {"name": "kube-apiserver-egress"},
    })];
    let mut mounts = vec![mount("kube-apiserver-egress", EGRESS_FOLDER)];
    let mut containers = Vec::new();
    match target.cluster.tunnel {
        Tunnel::Konnectivity => {
            let socket = json!({"name": "konnectivity-uds", "mountPath": SOCKET_FOLDER});
            volumes.push(json!({"name": "konnectivity-uds", "emptyDir": {}}));
            volumes.extend(credentials());
            containers.push(container(
                target,
                "konnectivity-server",
                vec![socket.clone()],
            ));
            mounts.push(socket);
            // A merge would keep the volume of a server outside of the pod, and pods do not start without its Secret.
            volumes.push(json!({"name": CLIENT_SECRET, "$patch": "delete"}));
            mounts.push(json!({"mountPath": CLIENT_FOLDER, "$patch": "delete"}));
        }
        Tunnel::Openvpn => {
            volumes.push(secret(CLIENT_SECRET, CLIENT_SECRET));
            mounts.push(mount(CLIENT_SECRET, CLIENT_FOLDER));
        }
    }
    let mut fields = running.map_or_else(Map::new, |it| it.fields(flags, target.apiserver_port));
    fields.insert("name".to_owned(), json!(apiserver::CONTAINER));
    fields.insert("volumeMounts".to_owned(), json!(mounts));
    containers.push(Value::Object(fields));
    json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "apiserver", "namespace": target.namespace},
        "spec": {"template": {"spec": {"containers": containers, "volumes": volumes}}},
    })
}

/// Returns the Deployment of a server with both tunnels. One replica, because an OpenVPN client connects to one
/// server.
fn deployment(target: &Target<'_>) -> Value {
    let mounts = vec![
        mount("culvert-front-end", "/etc/culvert/front-end"),
        mount("openvpn-ca", "/etc/openvpn/pki/ca"),
        mount("openvpn-server-certificates", "/etc/openvpn/pki/server"),
        mount("openvpn-client-configs", "/etc/openvpn/clients"),
        json!({"name": "state", "mountPath": "/run/culvert"}),
    ];
    let mut container = container(target, "openvpn-server", mounts);
    if let Some(fields) = container.as_object_mut() {
        fields.insert("securityContext".to_owned(), security());
    }
    let mut volumes = vec![
        secret("culvert-front-end", "culvert-front-end"),
        json!({"name": "openvpn-ca", "secret": {
            "secretName": "openvpn-ca",
            "items": [{"key": "ca.crt", "path": "ca.crt"}],
        }}),
        secret("openvpn-server-certificates", "openvpn-server-certificates"),
        json!({"name": "openvpn-client-configs", "configMap": {"name": "openvpn-client-configs"}}),
        json!({"name": "state", "emptyDir": {}}),
    ];
    volumes.extend(credentials());
    let labels = json!({"app": "openvpn-server"});
    // The policies of KKP select this label too.
    let id = target
        .namespace
        .strip_prefix("cluster-")
        .unwrap_or(&target.namespace);
    let pod_labels = json!({"app": "openvpn-server", "cluster": id});
    json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "openvpn-server", "namespace": target.namespace, "labels": labels},
        "spec": {
            "replicas": 1,
            // Two servers at once would share the clients.
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": pod_labels},
                "spec": {
                    "automountServiceAccountToken": false,
                    "securityContext": pod_security(),
                    "containers": [container],
                    "volumes": volumes,
                },
            },
        },
    })
}
