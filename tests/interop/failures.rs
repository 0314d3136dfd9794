//! Failed dials, and dials cancelled by the client.

use culvert_kit::services::Services;
use culvert_tests::interop::Interop;
use culvert_tests::{Executable, Mode, Topology, Transport, black_hole, eventually};
use serde_json::Value;

use crate::case::{Case, LIMIT, Make, Tunnel, server_value};

/// Address of a port on which nothing listens.
const REFUSING: &str = "127.0.0.1:1";

/// An invalid name, which a resolver rejects without a query.
const NO_NAME: &str = "no..such..name:80";

/// Runs four dials at the same time: refused, unknown name, unanswered, and cancelled by the client.
pub(crate) async fn dials_that_fail(case: Case) {
    let Some(tunnel) = case.start(1, &[&[]]).await else {
        return;
    };
    let hole = black_hole().await;
    let nowhere = hole.addr().to_string();
    let (refused, unknown, unanswered, given_up) = tokio::join!(
        tunnel.run("dial", REFUSING, &[]),
        tunnel.run("dial", NO_NAME, &[]),
        // Far longer than the agent's limit of 5 s, so the agent ends the dial.
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

/// Returns the client's error text, after a check of the form of the refusal.
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
    eventually("the server counts the cancelled dial", LIMIT, async || {
        let metrics = tunnel.topology.server_metrics(0).await;
        let labels = [("reason", "frontend_close")];
        let given_up = server_value(&metrics, "dial_failure_count", &labels);
        (given_up == 1.0).then_some(()).ok_or(given_up)
    })
    .await;
}

/// Returns the codes that a server counts for the streams of a client that leaves.
async fn codes_of_a_client_that_leaves(server: Executable, target: &str) -> Vec<String> {
    let builder = Topology::builder(Mode::Grpc, Transport::Uds).server(server, &[]);
    let topology = builder.agent(Executable::Ours, &[]).start().await;
    drop(topology.connect(target).await.unwrap());
    eventually("the server counts the end", LIMIT, async || {
        let metrics = topology.server_metrics(0).await;
        let name = "konnectivity_network_proxy_server_stream_errors_total";
        let samples = metrics.samples(name);
        let samples = samples.filter(|sample| sample.labels["segment"] == "from_client");
        let codes: Vec<_> = samples
            .map(|sample| sample.labels["code"].clone())
            .collect();
        (!codes.is_empty())
            .then_some(codes)
            .ok_or_else(|| metrics.text().to_owned())
    })
    .await
}

#[tokio::test]
async fn client_that_leaves_is_counted_with_the_code_of_the_stock_server() {
    let Some(interop) = Interop::get() else {
        return;
    };
    let services = Services::start().await.unwrap();
    let target = services.raw.to_string();
    let stock = Executable::At(interop.proxy_server.clone());
    let codes = codes_of_a_client_that_leaves(stock, &target).await;
    assert_eq!(codes, ["Canceled"]);
    let ours = codes_of_a_client_that_leaves(Executable::Ours, &target).await;
    assert_eq!(ours, codes);
}
