//! Agents as pods of the chart.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::time::Duration;

use serde_json::Value;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::lab::cluster::{Cluster, NODE_ADDRESS, is_true};
use crate::lab::{Egress, SEED};

/// Label of the agents' pods, which no pod of another release has.
const LABEL: &str = "app.kubernetes.io/instance=konnectivity-agent";

/// Time for a connect. A connect on this machine takes less than a millisecond.
const CONNECT: Duration = Duration::from_secs(2);

/// A connect from the seed to the kubelet or to a pod gets no answer, and a connect from the node succeeds.
pub(super) async fn seed_cannot_reach_the_node_or_a_pod(cluster: &mut Cluster) {
    let pod = cluster.lab.kubectl.get(&["pod", "far-side"]).await.unwrap();
    let pod: Ipv4Addr = pod["status"]["podIP"].as_str().unwrap().parse().unwrap();
    for to in [
        SocketAddrV4::new(NODE_ADDRESS, 10250),
        SocketAddrV4::new(pod, 8080),
    ] {
        cluster.lab.node.connect(to).await.unwrap();
        let from_seed = timeout(CONNECT, TcpStream::connect(to)).await;
        assert!(from_seed.is_err(), "{to}: not a timeout: {from_seed:?}");
    }
    let api = SocketAddrV4::new(SEED, 6443);
    cluster.lab.node.connect(api).await.unwrap();
}

/// Both agents are ready under the profile "restricted", and did not restart.
pub(super) async fn chart_installs_ready_agents(cluster: &mut Cluster) {
    let pods = agents(cluster).await;
    assert_eq!(pods.len(), 2);
    for pod in pods {
        is_true(&pod, "Ready").unwrap();
        let status = &pod["status"]["containerStatuses"][0];
        assert_eq!(status["restartCount"], 0, "{status}");
        assert_ne!(pod["spec"]["hostNetwork"], true);
    }
    let namespace = ["namespace", "kube-system"];
    let namespace = cluster.lab.kubectl.get(&namespace).await.unwrap();
    let label = &namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"];
    assert_eq!(label, "restricted");
}

/// A pod receives requests of kube-apiserver from the address of an agent's pod.
pub(super) async fn dials_come_from_the_pods_of_agents(cluster: &mut Cluster, egress: Egress) {
    cluster.tunnel(egress).await;
    let path = "--raw=/api/v1/namespaces/default/pods/far-side:8080/proxy/source";
    let source = cluster.lab.kubectl.must(&["get", path]).await;
    let source: SocketAddr = source.parse().unwrap();
    let agents = agents(cluster).await;
    let agents: Vec<&str> = agents
        .iter()
        .filter_map(|pod| pod["status"]["podIP"].as_str())
        .collect();
    let source = source.ip().to_string();
    assert!(
        agents.contains(&source.as_str()),
        "{source}, not {agents:?}"
    );
}

/// Returns the pods of the agents that do not end.
pub(super) async fn agents(cluster: &Cluster) -> Vec<Value> {
    let args = ["pods", "-n", "kube-system", "-l", LABEL];
    let list = cluster.lab.kubectl.get(&args).await.unwrap();
    let mut pods = list["items"].as_array().cloned().unwrap();
    pods.retain(|pod| pod["metadata"]["deletionTimestamp"].is_null());
    pods
}
