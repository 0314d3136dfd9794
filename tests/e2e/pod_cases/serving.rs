//! Requests of kube-apiserver to services of pods.

use culvert_tests::eventually;

use crate::cases::traffic::{create_config_map, greetings_are_listed};
use crate::lab::cluster::{Cluster, NODE};
use crate::lab::far_side::REFUSAL;
use crate::lab::{Egress, PATIENCE};

/// A webhook in a pod allows one object and denies another, and its text reaches the user.
pub(super) async fn webhook_allows_and_denies(cluster: &mut Cluster, egress: Egress) {
    cluster.tunnel(egress).await;
    create_config_map(&cluster.lab, "allow").await.unwrap();
    let error = create_config_map(&cluster.lab, "deny").await.unwrap_err();
    assert!(error.contains(REFUSAL), "{error}");
}

/// The APIService of a pod becomes available, and its objects are listed.
pub(super) async fn aggregated_api_is_available(cluster: &mut Cluster, egress: Egress) {
    cluster.tunnel(egress).await;
    greetings_are_listed(&cluster.lab).await;
}

/// metrics-server starts. It needs some time until it has figures.
pub(super) async fn metrics_server_starts(cluster: &mut Cluster) {
    let objects = include_str!("../objects/metrics-server.yaml");
    cluster.lab.kubectl.apply(objects).await;
}

/// metrics-server is available, and `kubectl top` shows the usage of the node and of the agents.
pub(super) async fn kubectl_top_shows_nodes_and_pods(cluster: &mut Cluster) {
    cluster.tunnel(Egress::GrpcUds).await;
    eventually("kubectl top shows figures", PATIENCE, async || {
        let nodes = cluster
            .lab
            .kubectl
            .run(&["top", "nodes", "--no-headers"])
            .await?;
        let args = ["top", "pods", "-n", "kube-system", "--no-headers"];
        let pods = cluster.lab.kubectl.run(&args).await?;
        let agents = pods
            .lines()
            .filter(|it| it.starts_with("konnectivity-agent-"));
        (nodes.starts_with(NODE) && agents.count() == 2)
            .then_some(())
            .ok_or(format!("{nodes}\n{pods}"))
    })
    .await;
}
