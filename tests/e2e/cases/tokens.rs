//! TokenReviews of agents' tokens by the real API.

use std::path::Path;

use crate::lab::{ACCOUNT, AUDIENCE, Egress, Lab, PATIENCE};

/// Egress of these cases. The front end has no part in the review of tokens.
const EGRESS: Egress = Egress::GrpcUds;

/// Audience of tokens for the Kubernetes API.
const API_AUDIENCE: &str = "https://kubernetes.default.svc";

const SERVICE_ACCOUNT: &str = r#"{"apiVersion": "v1", "kind": "ServiceAccount",
    "metadata": {"name": "system-konnectivity-agent", "namespace": "kube-system"}}"#;

/// An agent with the token of its service account connects.
pub(super) async fn agent_connects_with_a_token_of_its_account(lab: &mut Lab) {
    lab.tunnel(EGRESS).await;
    lab.agent = None;
    lab.wait_for_agents(0).await;
    let token = lab.token(ACCOUNT, AUDIENCE).await;
    lab.agent = Some(lab.start_agent(&token, &[]));
    lab.wait_for_agents(1).await;
}

/// A token for the Kubernetes API does not authenticate an agent.
pub(super) async fn token_of_another_audience_is_refused(lab: &mut Lab) {
    lab.tunnel(EGRESS).await;
    let token = lab.token(ACCOUNT, API_AUDIENCE).await;
    is_refused(lab, &token, "audience").await;
}

/// A valid token of another service account in the same namespace does not authenticate an agent.
pub(super) async fn token_of_another_account_is_refused(lab: &mut Lab) {
    lab.tunnel(EGRESS).await;
    let token = lab.token("other-agent", AUDIENCE).await;
    is_refused(lab, &token, "other-agent").await;
}

/// A token does not outlive its service account, even if another account has the same name.
pub(super) async fn token_of_a_deleted_account_is_refused(lab: &mut Lab) {
    lab.tunnel(EGRESS).await;
    let token = lab.token(ACCOUNT, AUDIENCE).await;
    let delete = ["delete", "serviceaccount", "-n", "kube-system", ACCOUNT];
    lab.kubectl.must(&delete).await;
    is_refused(lab, &token, "validate").await;
    lab.kubectl.apply(SERVICE_ACCOUNT).await;
    is_refused(lab, &token, "validate").await;
    agent_connects_with_a_token_of_its_account(lab).await;
}

/// Without the role `system:auth-delegator`, a server refuses agents. With the role, the same agent connects.
pub(super) async fn server_needs_the_permission_to_review_tokens(lab: &mut Lab) {
    lab.tunnel(EGRESS).await;
    let binding = ["clusterrolebinding", "system:konnectivity-server"];
    lab.kubectl.must(&["delete", binding[0], binding[1]]).await;
    let token = lab.token(ACCOUNT, AUDIENCE).await;
    is_refused(lab, &token, "forbidden").await;
    let objects = include_str!("../objects/konnectivity.yaml");
    lab.agent = Some(lab.start_agent(&token, &[]));
    lab.kubectl.apply(objects).await;
    lab.wait_for_agents(1).await;
}

/// Starts an agent with a token, and checks the reason of the server.
async fn is_refused(lab: &mut Lab, token: &Path, reason: &str) {
    lab.agent = None;
    lab.wait_for_agents(0).await;
    let agent = lab.start_agent(token, &[]);
    let line = agent.wait_for_log("the server refused this agent", PATIENCE);
    let line = line.await;
    assert!(line.contains(reason), "{line}");
    lab.wait_for_agents(0).await;
}
