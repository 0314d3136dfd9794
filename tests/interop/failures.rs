//! Dials that fail, and dials that are given up.

use culvert_tests::{black_hole, eventually};
use serde_json::Value;

use crate::case::{Case, LIMIT, Make, Tunnel, server_value};

/// A port on which nothing listens.
const REFUSING: &str = "127.0.0.1:1";

/// A name that no resolver needs to ask anyone about.
const NO_NAME: &str = "no..such..name:80";

/// Refused, unknown, unanswered and given up, all at once.
pub async fn dials_that_fail(case: Case) {
    let Some(tunnel) = case.start(1, &[&[]]).await else {
        return;
    };
    let hole = black_hole().await;
    let nowhere = hole.addr().to_string();
    let (refused, unknown, unanswered, given_up) = tokio::join!(
        tunnel.run("dial", REFUSING, &[]),
        tunnel.run("dial", NO_NAME, &[]),
        // Far more than the agent's 5 s: the agent ends it.
        tunnel.run("dial", &nowhere, &["--timeout=25s"]),
        tunnel.run("cancel", &nowhere, &["--after=1s"]),
    );
    let text = refusal(case, &refused, 502);
    assert_eq!(text, "dial tcp 127.0.0.1:1: connect: connection refused");
    let text = refusal(case, &unknown, 502);
    assert!(text.contains("lookup"), "{unknown}");
    assert!(text.contains("no such host"), "{unknown}");
    let text = refusal(case, &unanswered, 504);
    assert_eq!(text, format!("dial tcp {nowhere}: i/o timeout"));
    assert_eq!(given_up["ok"], true, "{given_up}");
    assert_eq!(given_up["stage"], "proxy", "{given_up}");
    if case.server == Make::Ours {
        notices_the_given_up_dial(&tunnel).await;
    }
    tunnel.settles().await;
}

/// What the client was told, after a look at how it was told.
fn refusal(case: Case, result: &Value, status: u64) -> &str {
    assert_eq!(result["ok"], false, "{result}");
    if case.is_connect() {
        assert_eq!(result["status"], status, "{result}");
        return result["body"].as_str().unwrap_or_default();
    }
    assert_eq!(result["reason"], "endpoint", "{result}");
    result["error"].as_str().unwrap_or_default()
}

async fn notices_the_given_up_dial(tunnel: &Tunnel) {
    eventually("the server notices", LIMIT, async || {
        let metrics = tunnel.topology.server_metrics(0).await;
        let labels = [("reason", "frontend_close")];
        let given_up = server_value(&metrics, "dial_failure_count", &labels);
        (given_up == 1.0).then_some(()).ok_or(given_up)
    })
    .await;
}
