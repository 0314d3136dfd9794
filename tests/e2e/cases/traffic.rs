//! Requests of kube-apiserver through the tunnel.

use culvert_kit::pattern::{Digest, Verifier, prefix};
use culvert_tests::eventually;
use serde_json::{Value, json};

use crate::lab::far_side::{GROUP_VERSION, REFUSAL};
use crate::lab::{Egress, FAR_SIDE, Lab, PATIENCE};

/// Path of the far side behind kube-apiserver's proxy for services.
pub(super) const FAR_SIDE_PROXY: &str =
    "/api/v1/namespaces/default/services/https:far-side:443/proxy";

/// Creates a ConfigMap with a generated name. The webhook receives `verdict`.
pub(crate) async fn create_config_map(lab: &Lab, verdict: &str) -> Result<(), String> {
    let object = json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"generateName": "ask-", "labels": {"ask": "far-side"}},
        "data": {"verdict": verdict},
    });
    let args = ["create", "-f", "-"];
    let object = object.to_string();
    let created = lab.kubectl.bytes(&args, object.as_bytes()).await;
    created.map(drop)
}

/// The far side allows one object and denies another, and its text reaches the user.
pub(super) async fn webhook_allows_and_denies(lab: &mut Lab, egress: Egress) {
    lab.tunnel(egress).await;
    lab.sources.take();
    create_config_map(lab, "allow").await.unwrap();
    let error = create_config_map(lab, "deny").await.unwrap_err();
    assert!(error.contains(REFUSAL), "{error}");
    // The agent dials from the node.
    let sources = lab.sources.take();
    assert!(!sources.is_empty());
    assert!(sources.iter().all(|it| it == FAR_SIDE.ip()), "{sources:?}");
}

/// The APIService becomes available, and its objects are listed.
pub(super) async fn aggregated_api_is_available(lab: &mut Lab, egress: Egress) {
    lab.tunnel(egress).await;
    greetings_are_listed(lab).await;
}

/// Waits until the APIService of the far side is available, and lists its objects.
pub(crate) async fn greetings_are_listed(lab: &Lab) {
    eventually("the APIService is available", PATIENCE, async || {
        let service = lab
            .kubectl
            .get(&["apiservice", "v1.greetings.culvert.test"]);
        let service = service.await?;
        let conditions = service["status"]["conditions"].as_array().cloned();
        let conditions = conditions.unwrap_or_default();
        let available = conditions.iter().find(|it| it["type"] == "Available");
        available
            .is_some_and(|it| it["status"] == "True")
            .then_some(())
            .ok_or(format!("{conditions:?}"))
    })
    .await;
    let path = format!("--raw=/apis/{GROUP_VERSION}/greetings");
    let list = lab.kubectl.must(&["get", &path]).await;
    let list: Value = serde_json::from_str(&list).unwrap();
    assert_eq!(list["items"][0]["metadata"]["name"], "hello");
    let names = lab.kubectl.must(&["get", "greetings", "-o", "name"]).await;
    assert_eq!(names.trim(), "greeting.greetings.culvert.test/hello");
}

/// Every byte of 20 MB arrives, in each direction.
pub(super) async fn service_proxy_carries_20_mb_each_way(lab: &mut Lab, egress: Egress) {
    const COUNT: u64 = 20_000_000;
    lab.tunnel(egress).await;
    let path = format!("--raw={FAR_SIDE_PROXY}/bytes/{COUNT}");
    let received = lab.kubectl.bytes(&["get", &path], &[]).await.unwrap();
    let mut verifier = Verifier::default();
    verifier.feed(&received).unwrap();
    assert_eq!(verifier.verified(), COUNT);
    let sent = prefix(COUNT);
    let path = format!("--raw={FAR_SIDE_PROXY}/digest");
    let answer = lab
        .kubectl
        .bytes(&["create", &path, "-f", "-"], &sent)
        .await;
    let answer: Value = serde_json::from_slice(&answer.unwrap()).unwrap();
    let mut digest = Digest::default();
    digest.update(&sent);
    assert_eq!(answer, json!({"count": COUNT, "digest": digest.finish()}));
}

/// kube-apiserver's own counters have the protocol and the transport of the egress, and no failed dials.
pub(super) async fn apiserver_counts_dials_of_the_egress(lab: &mut Lab, egress: Egress) {
    lab.tunnel(egress).await;
    create_config_map(lab, "allow").await.unwrap();
    let metrics = lab.apiserver_metrics().await;
    let name = "apiserver_egress_dialer_dial_start_total";
    let dials = metrics.value(name, &egress.labels()).unwrap_or_default();
    assert!(dials > 0.0, "{}", Lab::egress_metrics(&metrics));
    let all = metrics.value(name, &[]).unwrap_or_default();
    assert_eq!(dials, all, "{}", Lab::egress_metrics(&metrics));
}
