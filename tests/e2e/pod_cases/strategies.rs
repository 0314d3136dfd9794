//! Agents behind the front door, with KKP's strategies to expose servers.

use std::net::{Ipv4Addr, SocketAddr};

use culvert_tests::metrics::scrape;
use culvert_tests::namespace;
use culvert_tests::process::ours;
use culvert_tests::{Program, eventually};
use serde_json::{Value, json};

use crate::lab::cluster::Cluster;
use crate::lab::{Egress, PATIENCE, SEED, SERVERS, iptables};

/// Address of the front door.
const DOOR: Ipv4Addr = Ipv4Addr::new(192, 168, 77, 4);
/// Address of the cloud's load balancer.
const BALANCER: Ipv4Addr = Ipv4Addr::new(192, 168, 77, 5);
/// Address of the node tunnel, on every node.
const NODE_TUNNEL: Ipv4Addr = Ipv4Addr::new(100, 64, 30, 10);
/// Namespace of the control plane in the seed. Here, one kube-apiserver is that of seed and user cluster.
const NAMESPACE: &str = "cluster-e2e";
/// Prefix of the door's annotations.
const ANNOTATIONS: &str = "nodeport-proxy.k8s.io";

/// NodePort: the door listens on the node port of the Service.
pub(super) async fn node_port(cluster: &mut Cluster) {
    let annotations = json!({"nodeport-proxy.k8s.io/expose": "NodePort"});
    let port = expose(cluster, "NodePort", &annotations).await;
    let door = Door::start(cluster, &[]).await;
    connect_agents(cluster, DOOR, port).await;
    door.carries_agents().await;
}

/// LoadBalancer: the updater gives the load balancer of the cluster the ports of the door.
pub(super) async fn load_balancer(cluster: &mut Cluster) {
    let key = format!("-expose-annotation-key={ANNOTATIONS}/expose-namespaced");
    let annotations = json!({"nodeport-proxy.k8s.io/expose-namespaced": "true"});
    let port = expose(cluster, "NodePort", &annotations).await;
    let balancer = json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": "front-loadbalancer", "namespace": NAMESPACE},
        "spec": {
            "type": "LoadBalancer", "selector": {"app": "nodeport-proxy-envoy"},
            "ports": [{"name": "healthz", "port": 8002, "targetPort": 8002}],
        },
    });
    cluster.lab.kubectl.apply(&balancer.to_string()).await;
    let namespace = format!("-namespace={NAMESPACE}");
    let door = Door::start(cluster, &[&key, &namespace]).await;
    let updater = [
        format!("--kubeconfig={}", cluster.lab.kubectl.kubeconfig.display()),
        format!("-lb-namespace={NAMESPACE}"),
        "-lb-name=front-loadbalancer".to_owned(),
        key,
        "-namespaced=true".to_owned(),
        format!("--bind-address={BALANCER}"),
    ];
    address(BALANCER);
    let _updater = Program::spawn("culvert-nodeport-proxy", &updater, &[]).named("the updater");
    let service = ["service", "-n", NAMESPACE, "front-loadbalancer"];
    let target = eventually("the load balancer has the port", PATIENCE, async || {
        let service = cluster.lab.kubectl.get(&service).await?;
        let ports = service["spec"]["ports"].as_array().cloned();
        let ports = ports.unwrap_or_default();
        let found = ports.iter().find(|it| it["port"] == port);
        let target = found.and_then(|it| it["targetPort"].as_u64());
        target.ok_or(format!("{ports:?}"))
    })
    .await;
    // The load balancer of the cloud.
    let rule = format!(
        "-t nat -A PREROUTING -d {BALANCER} -p tcp --dport {port} -j DNAT --to-destination {DOOR}:{target}"
    );
    iptables(&rule);
    connect_agents(cluster, BALANCER, port).await;
    door.carries_agents().await;
}

/// Tunneling: agents connect by server name, and then through the node tunnel on their node.
pub(super) async fn tunneling(cluster: &mut Cluster) {
    let annotations = json!({
        "nodeport-proxy.k8s.io/expose": "SNI,Tunneling",
        "nodeport-proxy.k8s.io/port-mapping": json!({"secure": SERVERS}).to_string(),
    });
    expose(cluster, "ClusterIP", &annotations).await;
    let ports = ["-envoy-sni-port=7443", "-envoy-tunneling-port=8088"];
    let door = Door::start(cluster, &ports).await;
    connect_agents(cluster, DOOR, 7443).await;
    door.carries_agents().await;

    let node = &cluster.lab.node;
    node.address(NODE_TUNNEL);
    let authority = format!("konnectivity-server.{NAMESPACE}.svc.cluster.local:443");
    let args = [
        format!("--proxy={DOOR}:8088"),
        format!("--listen={NODE_TUNNEL}:6443={authority}"),
        "--stats-address=127.0.0.1".to_owned(),
    ];
    let _tunnel = node.spawn(&ours("culvert-node-tunnel"), &args);
    connect_agents(cluster, NODE_TUNNEL, 6443).await;
    let metrics = scrape(door.stats()).await.unwrap();
    let prefix = [("envoy_http_conn_manager_prefix", "ingress_http")];
    let requests = metrics.value("envoy_http_downstream_rq_total", &prefix);
    assert!(requests >= Some(2.0), "{requests:?}");
}

/// Creates the namespace, and the Service of the servers with these annotations. Returns its node port.
async fn expose(cluster: &mut Cluster, kind: &str, annotations: &Value) -> u16 {
    // Without agents, the aggregated API is away, and no namespace can be deleted completely.
    cluster.tunnel(Egress::GrpcUds).await;
    let kubectl = &cluster.lab.kubectl;
    let delete = ["delete", "namespace", NAMESPACE, "--ignore-not-found"];
    kubectl.must(&delete).await;
    let objects = json!({"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {
            "apiVersion": "v1", "kind": "Service",
            "metadata": {
                "name": "konnectivity-server", "namespace": NAMESPACE, "annotations": annotations,
            },
            "spec": {"type": kind, "ports": [{"name": "secure", "port": 443, "targetPort": 8132}]},
        },
        {
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {
                "name": "konnectivity-server", "namespace": NAMESPACE,
                "labels": {"kubernetes.io/service-name": "konnectivity-server"},
            },
            "addressType": "IPv4",
            "endpoints": [{"addresses": [SEED], "conditions": {"ready": true}}],
            "ports": [{"name": "secure", "port": 8132, "protocol": "TCP"}],
        },
    ]});
    kubectl.apply(&objects.to_string()).await;
    let service = ["service", "-n", NAMESPACE, "konnectivity-server"];
    let service = kubectl.get(&service).await.unwrap();
    let port = service["spec"]["ports"][0]["nodePort"].as_u64();
    u16::try_from(port.unwrap_or_default()).unwrap()
}

/// Changes the agents to another address of the servers, and waits until both are connected.
async fn connect_agents(cluster: &mut Cluster, to: Ipv4Addr, port: u16) {
    let values = json!({
        "server": {"host": SERVERS, "port": port},
        "hostAliases": [{"ip": to, "hostnames": [SERVERS]}],
    });
    cluster.install_agents(&values).await;
    cluster.has_agents(SEED, 2).await;
    let exec = ["exec", "far-side", "-c", "shell", "--", "echo", "hello"];
    assert_eq!(cluster.lab.kubectl.must(&exec).await, "hello\n");
}

/// Adds an address of the seed.
fn address(address: Ipv4Addr) {
    // Another case may have added the address.
    let added = namespace::ip(&format!("address replace {address}/24 dev node"));
    added.unwrap_or_else(|why| panic!("{address}: {why}"));
}

/// A running front door. Dropping the value ends the program.
struct Door(Program);

impl Door {
    async fn start(cluster: &Cluster, more: &[&str]) -> Self {
        address(DOOR);
        let kubeconfig = cluster.lab.kubectl.kubeconfig.display();
        let mut args = vec![
            format!("--kubeconfig={kubeconfig}"),
            format!("--bind-address={DOOR}"),
        ];
        args.extend(more.iter().copied().map(str::to_owned));
        let door = Self(Program::spawn("culvert-nodeport-proxy", &args, &[]));
        eventually("the door serves", PATIENCE, async || {
            scrape(door.stats()).await
        })
        .await;
        door
    }

    fn stats(&self) -> SocketAddr {
        (DOOR, 8002).into()
    }

    /// Checks that both agents are connected through the door.
    async fn carries_agents(&self) {
        let metrics = scrape(self.stats()).await.unwrap();
        let open = metrics.value("envoy_cluster_upstream_cx_active", &[]);
        assert_eq!(open, Some(2.0), "{}", self.0.log());
    }
}
