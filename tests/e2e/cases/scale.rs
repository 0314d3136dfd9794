//! Hundreds of Services.

use std::net::Ipv4Addr;

use culvert_tests::{Program, eventually};
use serde_json::{Value, json};
use tokio::net::TcpStream;

use crate::lab::{Lab, PATIENCE};

/// Number of Services.
const COUNT: usize = 500;
/// First node port of the Services.
const FIRST_PORT: u16 = 30000;
/// Address of the front door.
const DOOR: Ipv4Addr = Ipv4Addr::LOCALHOST;
/// Memory limit of the front door of one cluster in the rendered objects, in bytes.
const DOOR_LIMIT: u64 = 64 << 20;
/// Memory limit of the updater in the rendered objects, in bytes.
const UPDATER_LIMIT: u64 = 32 << 20;

/// The front door listens on the port of every Service, and the updater gives all ports to the load balancer, within the
/// memory of the rendered objects.
pub(super) async fn front_door_serves_hundreds_of_services(lab: &mut Lab) {
    let balancer = json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": "front", "namespace": "default"},
        "spec": {
            "type": "LoadBalancer", "selector": {"app": "front"},
            "ports": [{"name": "healthz", "port": 8002, "targetPort": 8002}],
            "allocateLoadBalancerNodePorts": false,
        },
    });
    let mut objects = vec![balancer];
    objects.extend((0..COUNT).flat_map(service));
    create(lab, &objects).await;
    let kubeconfig = format!("--kubeconfig={}", lab.kubectl.kubeconfig.display());
    let bind = format!("--bind-address={DOOR}");
    let args = [kubeconfig.as_str(), &bind];
    let door = Program::spawn("culvert-nodeport-proxy", args, &[]);
    let args = [
        kubeconfig.as_str(),
        "-lb-namespace=default",
        "-lb-name=front",
        "--bind-address=127.0.0.2",
    ];
    let updater = Program::spawn("culvert-nodeport-proxy", args, &[]).named("the updater");
    for at in [0, COUNT / 2, COUNT - 1] {
        let port = port(at);
        let what = format!("the front door listens on port {port}");
        eventually(&what, PATIENCE, async || {
            TcpStream::connect((DOOR, port)).await
        })
        .await;
    }
    eventually("the load balancer has all ports", PATIENCE, async || {
        let service = lab.kubectl.get(&["service", "front"]).await?;
        let ports = service["spec"]["ports"].as_array().map_or(0, Vec::len);
        (ports == COUNT + 1).then_some(()).ok_or(ports.to_string())
    })
    .await;
    println!(
        "front door: {} KiB, updater: {} KiB with {COUNT} Services",
        door.rss() >> 10,
        updater.rss() >> 10
    );
    assert!(door.rss() < DOOR_LIMIT, "{}", door.rss());
    assert!(updater.rss() < UPDATER_LIMIT, "{}", updater.rss());
}

/// Creates objects.
pub(super) async fn create(lab: &Lab, objects: &[Value]) {
    let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
    let words = ["create", "-f", "-"];
    let created = lab.kubectl.bytes(&words, list.to_string().as_bytes()).await;
    created.unwrap_or_else(|why| panic!("kubectl create: {why}"));
}

fn port(at: usize) -> u16 {
    FIRST_PORT + u16::try_from(at).expect("a small number")
}

/// Returns a Service, and its endpoint.
fn service(at: usize) -> [Value; 2] {
    let name = format!("service-{at}");
    let endpoint = format!("10.244.{}.{}", 1 + at / 250, 1 + at % 250);
    [
        json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": {
                "name": name, "namespace": "default",
                "annotations": {"nodeport-proxy.k8s.io/expose": "NodePort"},
            },
            "spec": {
                "type": "NodePort",
                "ports": [{"name": "secure", "port": 443, "nodePort": port(at)}],
            },
        }),
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {
                "name": name, "namespace": "default",
                "labels": {"kubernetes.io/service-name": name},
            },
            "addressType": "IPv4",
            "endpoints": [{"addresses": [endpoint], "conditions": {"ready": true}}],
            "ports": [{"name": "secure", "port": 443, "protocol": "TCP"}],
        }),
    ]
}
