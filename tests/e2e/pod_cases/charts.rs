//! The charts of all programs as pods, and their `helm test`.

use std::net::Ipv4Addr;

use culvert_tests::eventually;
use culvert_tests::metrics::Metrics;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::lab::cluster::{AGENTS, Cluster, POD_IMAGE, image};
use crate::lab::kubectl::Kubectl;
use crate::lab::{Egress, PATIENCE};

/// Address of the node tunnel.
const NODE_TUNNEL: Ipv4Addr = Ipv4Addr::new(100, 64, 30, 11);
/// Namespace of the node tunnel, which needs the network of the node.
const NODE_TUNNELS: &str = "node-tunnels";

/// The pod of `helm test` reaches the agents by name.
pub(super) async fn helm_test_of_the_agents_passes(cluster: &mut Cluster) {
    cluster.tunnel(Egress::GrpcUds).await;
    cluster.helm.test(AGENTS).await;
}

/// Agents connect to the node tunnel, the node tunnel to the front door, and the front door to the servers. All of them
/// are pods of our charts.
pub(super) async fn every_chart_runs_as_pods_and_passes_its_helm_test(cluster: &mut Cluster) {
    cluster.tunnel(Egress::GrpcUds).await;
    for name in [
        "culvert-server",
        "culvert-door",
        "culvert-agent",
        "culvert-node-tunnel",
    ] {
        cluster.worker.import(&image(name));
    }
    let own = json!({"registry": "docker.io/library", "pullPolicy": "Never"});
    let tests = json!({"image": POD_IMAGE});
    let kubectl = &cluster.lab.kubectl;
    cluster.lab.chart_secrets(&NODE_TUNNEL.to_string()).await;
    let servers = json!({
        "image": own, "tests": tests, "replicas": 2,
        "fullnameOverride": "servers",
        "expose": {"strategy": "Tunneling", "serverName": "servers.culvert.test"},
    });
    let started = Instant::now();
    let since = |what: &str| {
        println!(
            "{what} {:?} after the installation began",
            started.elapsed()
        )
    };
    // A server is ready when the first agent is connected.
    cluster
        .helm
        .apply("servers", "culvert-server", &servers)
        .await;
    let door = json!({
        "image": own, "tests": tests, "replicas": 2,
        "fullnameOverride": "front-door",
        "serviceAccount": {"name": "front-door"},
        "service": {"name": "front-door", "type": "ClusterIP"},
    });
    cluster
        .helm
        .install("front-door", "culvert-door", &door)
        .await;
    since("front doors are ready");

    let namespace =
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NODE_TUNNELS}});
    kubectl.apply(&namespace.to_string()).await;
    cluster
        .lab
        .node
        .ip(&format!("address replace {NODE_TUNNEL}/32 dev lo"));
    let mut helm = cluster.helm.clone();
    helm.namespace = NODE_TUNNELS;
    let node_tunnel = json!({
        "image": own, "tests": tests,
        "door": {"host": "front-door.kube-system.svc.cluster.local"},
        "addresses": [NODE_TUNNEL],
        "interface": {"create": false},
        "stats": {"port": 8003},
        "listeners": [{"port": 6443, "authority": "servers.kube-system.svc.cluster.local:443"}],
    });
    helm.install("node-tunnel", "culvert-node-tunnel", &node_tunnel)
        .await;
    since("the node tunnel is ready");

    let agents = json!({
        "image": own, "tests": tests,
        "fullnameOverride": "chart-agents",
        "server": {"host": NODE_TUNNEL, "port": 6443},
        "sync": {"interval": "500ms", "intervalCap": "1s"},
        "serviceAccount": {"create": false},
        "rbac": {"create": false},
    });
    cluster
        .helm
        .install("chart-agents", "culvert-agent", &agents)
        .await;
    eventually("each server has both agents", PATIENCE, async || {
        let counts = agents_of_servers(kubectl).await?;
        (counts == [2.0, 2.0])
            .then_some(())
            .ok_or(format!("{counts:?}"))
    })
    .await;
    since("each server has both agents");
    for release in ["servers", "front-door", "chart-agents"] {
        cluster.helm.test(release).await;
    }
    helm.test("node-tunnel").await;
    for release in ["chart-agents", "servers", "front-door"] {
        cluster.helm.uninstall(release).await;
    }
    helm.uninstall("node-tunnel").await;
}

/// Returns the number of agents of each server pod.
async fn agents_of_servers(kubectl: &Kubectl) -> Result<Vec<f64>, String> {
    let label = "app.kubernetes.io/instance=servers";
    let pods = kubectl
        .get(&["pods", "-n", "kube-system", "-l", label])
        .await?;
    let pods = pods["items"].as_array().cloned().unwrap_or_default();
    let names = pods.iter().filter_map(|it| it["metadata"]["name"].as_str());
    let mut counts = Vec::new();
    for pod in names {
        let path = format!("--raw=/api/v1/namespaces/kube-system/pods/{pod}:8134/proxy/metrics");
        let text = kubectl.run(&["get", &path]).await?;
        let metrics = Metrics::parse(&text).map_err(|error| error.to_string())?;
        let name = "konnectivity_network_proxy_server_ready_backend_connections";
        counts.push(
            metrics
                .value(name, &[])
                .ok_or(Value::from(text).to_string())?,
        );
    }
    Ok(counts)
}
