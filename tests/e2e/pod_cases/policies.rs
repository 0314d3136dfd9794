//! The NetworkPolicy of the agents' chart in a namespace that denies everything else.

use culvert_tests::eventually;
use serde_json::json;

use super::agents::agents;
use crate::cases::traffic::{create_config_map, greetings_are_listed};
use crate::lab::cluster::{Cluster, Policies};
use crate::lab::{Egress, PATIENCE, SEED, ready_agents};

/// A policy without rules, for all pods of a namespace.
const NAME: &str = "default-deny";

/// With the policy of the chart, the agents connect and dial, and other pods do not reach them. Without the policy, the
/// agents do not connect.
pub(super) async fn policies_of_the_chart_are_enough_and_not_more(cluster: &mut Cluster) {
    cluster.tunnel(Egress::GrpcUds).await;
    let address = address(cluster).await;
    let reached = far_side_reaches(cluster, &address).await;
    reached.expect("no policy yet");
    let deny = json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"name": NAME, "namespace": "kube-system"},
        "spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]},
    });
    cluster.lab.kubectl.apply(&deny.to_string()).await;
    let policies = Policies::enforce(&cluster.lab.kubectl, &cluster.lab.node).await;

    cluster.serve(Egress::GrpcUds, &[]).await;
    cluster.has_agents(SEED, 2).await;
    create_config_map(&cluster.lab, "allow").await.unwrap();
    greetings_are_listed(&cluster.lab).await;
    let refused = far_side_reaches(cluster, &address).await.unwrap_err();
    assert!(refused.contains("Timeout exceeded"), "{refused}");
    assert_eq!(policies.dropped_from(&address).await, 0);

    let none = json!({"networkPolicy": {"enabled": false}});
    cluster.install_agents(&none).await;
    policies.are_in_force().await;
    cluster.serve(Egress::GrpcUds, &[]).await;
    let agents = async || ready_agents(SEED).await;
    eventually("the server answers", PATIENCE, agents).await;
    let address = self::address(cluster).await;
    eventually(
        "the packets of the agents are dropped",
        PATIENCE,
        async || policies.dropped_from(&address).await > 0,
    )
    .await;
    assert_eq!(agents().await, Ok(0.0));

    policies.stop().await;
    let delete = ["delete", "networkpolicy", "-n", "kube-system", NAME];
    cluster.lab.kubectl.must(&delete).await;
    cluster.install_agents(&json!({})).await;
    cluster.has_agents(SEED, 2).await;
}

/// Returns the address of an agent's pod.
async fn address(cluster: &Cluster) -> String {
    let agents = agents(cluster).await;
    agents[0]["status"]["podIP"].as_str().unwrap().to_owned()
}

/// Requests the health of an agent from a pod of another namespace.
async fn far_side_reaches(cluster: &Cluster, address: &str) -> Result<String, String> {
    let url = format!("http://{address}:8134/readyz");
    let get = ["pod", "get", &url];
    let exec = ["exec", "far-side", "-c", "shell", "--"];
    cluster.lab.kubectl.run(&[&exec[..], &get].concat()).await
}
