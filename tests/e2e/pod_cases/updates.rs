//! Changes of the tunnel's parts while `kubectl` is in use.

use culvert_tests::metrics::scrape;
use culvert_tests::{Signal, eventually};
use serde_json::Value;
use tokio::time::Instant;

use super::agents::agents;
use crate::cases::traffic::create_config_map;
use crate::lab::cluster::{AGENTS, Cluster, start_server};
use crate::lab::kubectl::Kubectl;
use crate::lab::load::Load;
use crate::lab::{Egress, FRONT_PORT, PATIENCE, SECOND_SEED, SEED, iptables};

/// Number of calls before and after a change.
const CALLS: usize = 8;

/// A rolling update replaces both agents, and no call fails.
pub(super) async fn rolling_update_of_agents_fails_no_call(cluster: &mut Cluster) {
    cluster.tunnel(Egress::GrpcUds).await;
    let kubectl = &cluster.lab.kubectl;
    let names = async || {
        let pods = agents(cluster).await;
        let name = |pod: &Value| pod["metadata"]["name"].as_str().map(str::to_owned);
        pods.iter().filter_map(name).collect::<Vec<_>>()
    };
    let before = names().await;
    let load = Load::start(kubectl);
    load.more(CALLS).await;
    restart_agents(kubectl).await;
    load.more(CALLS).await;
    load.has_not_failed().await;
    let after = names().await;
    assert_eq!(after.len(), 2);
    assert!(after.iter().all(|name| !before.contains(name)), "{after:?}");
    cluster.has_agents(SEED, 2).await;
}

/// Two servers restart one after the other, and no call fails, except one in progress when the grace of a server is over:
/// kube-apiserver uses some connections for one request after the other. kube-apiserver opens no connection to a server
/// that ends, as behind a Service.
pub(super) async fn rolling_restart_of_two_servers_fails_no_call(cluster: &mut Cluster) {
    let egress = Egress::ConnectTcp;
    cluster.tunnel(egress).await;
    let count = ["--server-count=2"];
    cluster.serve(egress, &count).await;
    cluster.second = Some(start_server(&cluster.lab, egress, SECOND_SEED, &count));
    cluster.has_agents(SEED, 2).await;
    cluster.has_agents(SECOND_SEED, 2).await;
    let load = Load::start(&cluster.lab.kubectl);
    load.more(CALLS).await;
    let mut ends = Vec::new();
    for address in [SEED, SECOND_SEED] {
        let server = match address {
            SEED => &mut cluster.lab.server,
            _ => &mut cluster.second,
        };
        let mut stopped = server.take().unwrap();
        let rule = format!(
            "INPUT -d {address} -p tcp --dport {FRONT_PORT} --syn -j REJECT --reject-with tcp-reset"
        );
        iptables(&format!("-I {rule}"));
        stopped.signal(Signal::TERM);
        assert!(stopped.wait_exit(PATIENCE).await.success());
        ends.push(Instant::now());
        let started = start_server(&cluster.lab, egress, address, &count);
        match address {
            SEED => cluster.lab.server = Some(started),
            _ => cluster.second = Some(started),
        }
        cluster.has_agents(address, 2).await;
        iptables(&format!("-D {rule}"));
        load.more(CALLS).await;
    }
    load.has_failed_only_at(&ends).await;
}

/// The servers' certificate is replaced. The server presents the new certificate without a restart.
pub(super) async fn certificate_is_replaced_while_serving(cluster: &mut Cluster) {
    cluster.tunnel(Egress::GrpcUds).await;
    let load = Load::start(&cluster.lab.kubectl);
    let before = cluster.lab.presented_certificate().await;
    let issued = cluster.lab.replace_certificate();
    assert_ne!(before, issued);
    eventually(
        "the server presents the new certificate",
        PATIENCE,
        async || cluster.lab.presented_certificate().await == issued,
    )
    .await;
    restart_agents(&cluster.lab.kubectl).await;
    load.more(CALLS).await;
    load.has_not_failed().await;
    cluster.has_agents(SEED, 2).await;
}

/// The authority of the servers' certificate is replaced: first the pods get the certificates of both authorities, then
/// the servers get a certificate of the new one. The agents follow both changes without a restart.
pub(super) async fn authority_is_replaced_without_new_pods(cluster: &mut Cluster) {
    cluster.tunnel(Egress::GrpcUds).await;
    let (next, both) = cluster.lab.another_authority();
    cluster.replace_root_certificates(&both);
    let kubectl = &cluster.lab.kubectl;
    let wanted = std::fs::read_to_string(both).unwrap();
    eventually("the new certificates are spread", PATIENCE, async || {
        let map = ["configmap", "-n", "kube-system", "kube-root-ca.crt"];
        let map = kubectl.get(&map).await?;
        let text = map["data"]["ca.crt"].as_str().unwrap_or_default();
        (text == wanted).then_some(()).ok_or(text.to_owned())
    })
    .await;
    // A change of a pod makes the kubelet write the pod's files again.
    let words = ["annotate", "pods", "--all", "-n", "kube-system", "now=1"];
    kubectl.must(&words).await;
    cluster.lab.replace_certificate_by(&next);
    cluster.serve(Egress::GrpcUds, &[]).await;
    cluster.has_agents(SEED, 2).await;
    for pod in agents(cluster).await {
        let status = &pod["status"]["containerStatuses"][0];
        assert_eq!(status["restartCount"], 0, "{status}");
    }
    let logs = ["logs", "far-side", "-c", "shell"];
    cluster.lab.kubectl.must(&logs).await;
    cluster.lab.replace_certificate();
    cluster.serve(Egress::GrpcUds, &[]).await;
    cluster.has_agents(SEED, 2).await;
}

/// kube-apiserver gets another key for tokens, so that all earlier tokens are invalid, and the kubelet renews the
/// agents' tokens. Agents connect to a restarted server with the new tokens.
pub(super) async fn agents_use_renewed_tokens(cluster: &mut Cluster) {
    cluster.tunnel(Egress::GrpcUds).await;
    cluster.lab.replace_token_key().await;
    cluster.serve(Egress::GrpcUds, &[]).await;
    let server = cluster.lab.server.as_ref().unwrap();
    server.wait_for_log("token", PATIENCE).await;
    cluster.worker.restart_kubelet().await;
    cluster.has_agents(SEED, 2).await;
    cluster
        .lab
        .kubectl
        .must(&["logs", "far-side", "-c", "shell"])
        .await;
    for pod in agents(cluster).await {
        let status = &pod["status"]["containerStatuses"][0];
        assert_eq!(status["restartCount"], 0, "{status}");
    }
}

/// The node loses its power. The server drops its agents, calls fail without a hang, and after the next start of the
/// node everything is back without further work.
pub(super) async fn tunnel_returns_after_a_power_failure_of_the_node(cluster: &mut Cluster) {
    cluster.tunnel(Egress::GrpcUds).await;
    let exec = ["exec", "far-side", "-c", "shell", "--", "echo", "back"];
    cluster.lab.kubectl.must(&exec).await;
    cluster.worker.power_off();
    cluster.has_agents(SEED, 0).await;
    let error = cluster.lab.kubectl.run(&exec).await.unwrap_err();
    assert!(!error.contains("did not end"), "{error}");
    cluster.worker.power_on().await;
    cluster.has_agents(SEED, 2).await;
    eventually("a container runs again", PATIENCE, async || {
        cluster.lab.kubectl.run(&exec).await
    })
    .await;
    let health = (SEED, 8134).into();
    let metrics = scrape(health).await.unwrap();
    let name = "konnectivity_network_proxy_server_ready_backend_connections";
    assert_eq!(metrics.value(name, &[]), Some(2.0));
}

/// Without kube-proxy, as where the CNI plugin replaces it by eBPF, and without any such plugin: new agents connect, and
/// kube-apiserver reaches kubelets, pods, webhooks and aggregated APIs.
pub(super) async fn tunnel_works_without_kube_proxy(cluster: &mut Cluster) {
    cluster.tunnel(Egress::GrpcUds).await;
    let kubectl = cluster.lab.kubectl.clone();
    let service = kubectl.get(&["service", "far-side"]).await.unwrap();
    let address = service["spec"]["clusterIP"].as_str().unwrap();
    let url = format!("http://{address}/bytes/1");
    let get = ["pod", "get", &url];
    let shell = ["exec", "far-side", "-c", "shell", "--"];
    let ask = [&shell[..], &get].concat();
    kubectl.must(&ask).await;
    cluster.worker.stop_proxy().await;
    assert!(
        kubectl.run(&ask).await.is_err(),
        "a Service without kube-proxy"
    );
    restart_agents(&kubectl).await;
    cluster.has_agents(SEED, 2).await;
    let load = Load::start(&kubectl);
    load.more(CALLS).await;
    load.has_not_failed().await;
    create_config_map(&cluster.lab, "allow").await.unwrap();
    cluster.worker.start_proxy();
    eventually("Services have addresses again", PATIENCE, async || {
        kubectl.run(&ask).await
    })
    .await;
}

/// The pod network of the node changes, and all pods are deleted. New agents connect without further work.
pub(super) async fn tunnel_returns_after_a_change_of_the_pod_network(cluster: &mut Cluster) {
    cluster.tunnel(Egress::GrpcUds).await;
    let network = cluster.worker.replace_pod_network();
    let kubectl = &cluster.lab.kubectl;
    for namespace in ["kube-system", "default"] {
        let delete = ["delete", "pods", "--all", "-n", namespace];
        kubectl.must(&delete).await;
    }
    cluster.create_pods().await;
    eventually("all agents are in the new network", PATIENCE, async || {
        let pods = agents(cluster).await;
        let addresses: Vec<_> = pods.iter().map(|pod| &pod["status"]["podIP"]).collect();
        let is_new = |it: &&&Value| it.as_str().is_some_and(|it| it.starts_with(network.prefix));
        (addresses.iter().filter(is_new).count() == 2)
            .then_some(())
            .ok_or(format!("{addresses:?}"))
    })
    .await;
    cluster.has_agents(SEED, 2).await;
    cluster.pod_is_ready("far-side").await;
    let exec = ["exec", "far-side", "-c", "shell", "--", "echo", "back"];
    cluster.lab.kubectl.must(&exec).await;
}

/// Replaces the pods of the agents one after the other, and waits for the new ones.
async fn restart_agents(kubectl: &Kubectl) {
    let deployment = format!("deployment/{AGENTS}");
    let rollout = ["rollout", "restart", "-n", "kube-system", &deployment];
    kubectl.must(&rollout).await;
    let rollout = [
        "rollout",
        "status",
        "-n",
        "kube-system",
        &deployment,
        "--timeout=80s",
    ];
    kubectl.must(&rollout).await;
}
