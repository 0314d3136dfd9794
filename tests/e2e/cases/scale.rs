//! Hundreds of nodes and Services. kwok plays the kubelets: it keeps the nodes ready and renews their leases.

use std::net::Ipv4Addr;

use culvert_tests::metrics::scrape;
use culvert_tests::openvpn::Pki;
use culvert_tests::{Program, eventually};
use serde_json::{Value, json};
use tokio::net::TcpStream;

use crate::lab::{Egress, Lab, PATIENCE, SEED, ServerOptions};

/// Number of nodes, and of Services.
const COUNT: usize = 500;
/// First node port of the Services.
const FIRST_PORT: u16 = 30000;
/// Address of the front door.
const DOOR: Ipv4Addr = Ipv4Addr::LOCALHOST;
/// Memory limit of the server in the rendered objects, in bytes.
const SERVER_LIMIT: u64 = 200 << 20;
/// Memory limit of the front door of one cluster in the rendered objects, in bytes.
const DOOR_LIMIT: u64 = 64 << 20;
/// Memory limit of the updater in the rendered objects, in bytes.
const UPDATER_LIMIT: u64 = 32 << 20;

/// The server with the OpenVPN tunnel knows every node soon after its creation, and forgets removed nodes.
pub(super) async fn server_follows_hundreds_of_nodes(lab: &mut Lab) {
    lab.no_tunnel().await;
    let _kwok = lab.kwok();
    let objects: Vec<Value> = (0..COUNT).map(node).collect();
    create(lab, &objects).await;
    eventually("all nodes are ready", PATIENCE, async || {
        let nodes = lab.kubectl.run(&["get", "nodes", "--no-headers"]).await?;
        let ready = nodes.lines().filter(|line| line.contains(" Ready "));
        (ready.count() == COUNT).then_some(()).ok_or(nodes)
    })
    .await;
    let role = include_str!("../objects/nodes-role.yaml");
    lab.kubectl.apply(role).await;
    let pki = Pki::create();
    let args = [
        "--tunnel-mode=prefer-konnectivity".to_owned(),
        "--openvpn-listen=tcp::1194".to_owned(),
        format!("--openvpn-ca={}", pki.ca.display()),
        format!("--openvpn-cert={}", pki.server.cert.display()),
        format!("--openvpn-key={}", pki.server.key.display()),
        "--openvpn-route=10.254.0.0/16".to_owned(),
        "--openvpn-watch-nodes=true".to_owned(),
    ];
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let options = ServerOptions {
        args: &args,
        ..ServerOptions::default()
    };
    let server = lab.start_server(Egress::GrpcUds, &options);
    knows(COUNT).await;
    println!("server: {} KiB with {COUNT} nodes", server.rss() >> 10);
    assert!(server.rss() < SERVER_LIMIT, "{}", server.rss());
    let removed: Vec<String> = (0..COUNT / 2)
        .map(|at| format!("node/{}", name(at)))
        .collect();
    let mut delete = vec!["delete", "--wait=false"];
    delete.extend(removed.iter().map(String::as_str));
    lab.kubectl.must(&delete).await;
    knows(COUNT - COUNT / 2).await;
}

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

/// Waits until the server knows this number of nodes.
async fn knows(count: usize) {
    let what = format!("the server knows {count} nodes");
    eventually(&what, PATIENCE, async || {
        let metrics = scrape((SEED, 8134).into()).await;
        let metrics = metrics.map_err(|error| format!("{error:#}"))?;
        let nodes = metrics.value("culvert_openvpn_nodes", &[]);
        (nodes == Some(count as f64))
            .then_some(())
            .ok_or(format!("{nodes:?}"))
    })
    .await;
}

async fn create(lab: &Lab, objects: &[Value]) {
    let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
    let words = ["create", "-f", "-"];
    let created = lab.kubectl.bytes(&words, list.to_string().as_bytes()).await;
    created.unwrap_or_else(|why| panic!("kubectl create: {why}"));
}

fn name(at: usize) -> String {
    format!("node-{at}")
}

fn port(at: usize) -> u16 {
    FIRST_PORT + u16::try_from(at).expect("a small number")
}

fn node(at: usize) -> Value {
    let address = format!("10.250.{}.{}", 1 + at / 250, 1 + at % 250);
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name(at), "annotations": {"kwok.x-k8s.io/node": "fake"}},
        "status": {"addresses": [{"type": "InternalIP", "address": address}]},
    })
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
