//! Metrics of the calls to a Kubernetes API, with the codes and reasons of the answers.

use std::sync::Arc;
use std::time::Duration;

use culvert_host::telemetry::metrics::Registry;
use http::{Method, Request, Response};
use http_body_util::{BodyExt as _, Limited};
use kube::Client;
use kube::client::Body;
use kube::core::Status;
use tokio::time::Instant;
use tower::service_fn;

use crate::client::is_watch;

/// Largest error text to read for its reason, in bytes. Errors have a few hundred bytes.
const MAX_ERROR: usize = 64 * 1024;

/// Reasons in the label of metrics: the reasons of `k8s.io/apimachinery` (`pkg/apis/meta/v1/types.go`). An unknown
/// reason counts as an empty one, so that the set of series is closed.
const REASONS: [&str; 19] = [
    "AlreadyExists",
    "BadRequest",
    "Conflict",
    "Expired",
    "Forbidden",
    "Gone",
    "InternalError",
    "Invalid",
    "MethodNotAllowed",
    "NotAcceptable",
    "NotFound",
    "RequestEntityTooLarge",
    "ServerTimeout",
    "ServiceUnavailable",
    "StoreReadError",
    "Timeout",
    "TooManyRequests",
    "Unauthorized",
    "UnsupportedMediaType",
];

/// Codes in the label of metrics: the codes of Kubernetes, and of proxies in front of it. Another code counts as the
/// first code of its class.
const CODES: [u16; 20] = [
    200, 201, 202, 400, 401, 403, 404, 405, 406, 408, 409, 410, 413, 415, 422, 429, 500, 502, 503,
    504,
];

/// Kind of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// A list of objects, or the read of one object.
    List,
    /// The start of a watch.
    Watch,
    /// A deletion.
    Delete,
    /// Any write.
    Write,
}

/// An answered call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Kind of the call.
    pub verb: Verb,
    /// HTTP status of the answer; a rare status is replaced by the first status of its class.
    pub code: u16,
    /// Reason of an error; empty for a success and for an unknown reason.
    pub reason: &'static str,
    /// Time from the request to the head of the answer.
    pub elapsed: Duration,
}

/// Returns a client that reports each answered call to `observe`. As in upstream, a call without an answer is not
/// reported.
pub fn observed(client: Client, observe: impl Fn(&Call) + Send + Sync + 'static) -> Client {
    let (namespace, observe) = (client.default_namespace().to_owned(), Arc::new(observe));
    let service = service_fn(move |request: Request<Body>| {
        let (client, observe) = (client.clone(), Arc::clone(&observe));
        async move {
            let verb = verb(&request);
            let sent = Instant::now();
            let answer = client.send(request).await?;
            let elapsed = sent.elapsed();
            let code = known(answer.status().as_u16());
            let (answer, reason) = match answer.status().is_success() {
                true => (answer, ""),
                false => with_reason(answer).await,
            };
            observe(&Call {
                verb,
                code,
                reason,
                elapsed,
            });
            Ok::<_, kube::Error>(answer)
        }
    });
    Client::new(service, namespace)
}

fn known(code: u16) -> u16 {
    match CODES.contains(&code) {
        true => code,
        false => code / 100 * 100,
    }
}

fn verb(request: &Request<Body>) -> Verb {
    match *request.method() {
        _ if is_watch(request) => Verb::Watch,
        Method::GET => Verb::List,
        Method::DELETE => Verb::Delete,
        _ => Verb::Write,
    }
}

/// Returns an error with its reason. The body of the error is read for this purpose.
async fn with_reason(answer: Response<Body>) -> (Response<Body>, &'static str) {
    let (head, body) = answer.into_parts();
    let body = Limited::new(body, MAX_ERROR).collect().await;
    let body = body.map(|body| body.to_bytes()).unwrap_or_default();
    let status = serde_json::from_slice::<Status>(&body).unwrap_or_default();
    let reason = REASONS.into_iter().find(|known| *known == status.reason);
    let answer = Response::from_parts(head, Body::from(body));
    (answer, reason.unwrap_or_default())
}

/// Metrics of the calls of one kind. Each series appears with its first call, as in upstream.
pub struct CallMetrics {
    /// Registry of the series.
    pub registry: Arc<Registry>,
    /// Name of the label with the code.
    pub code: &'static str,
    /// Name and help text of the counter, by code and reason.
    pub total: [&'static str; 2],
    /// Name and help text of the latency in seconds, by code; `None` if the latency is not measured.
    pub latency: Option<[&'static str; 2]>,
}

impl CallMetrics {
    /// Counts a call.
    pub fn count(&self, call: &Call) {
        let code = call.code.to_string();
        let [name, help] = self.total;
        let labels = [(self.code, code.as_str()), ("reason", call.reason)];
        self.registry.counter(name, &labels, help).increment(1);
        if let Some([name, help]) = self.latency {
            let labels = [(self.code, code.as_str())];
            let latency = self.registry.histogram(name, &labels, help);
            latency.record(call.elapsed);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use k8s_openapi::api::coordination::v1::Lease;
    use kube::Api;
    use kube::api::{DeleteParams, ListParams, PostParams, WatchParams};
    use parking_lot::Mutex;
    use serde_json::json;

    use super::*;

    /// Returns the calls that a list, a watch, a deletion and a write report if the API answers in this way, and
    /// the text of the list's error.
    async fn calls(code: u16, body: String) -> (Vec<(Verb, u16, &'static str)>, String) {
        let answer = move |_: Request<Body>| {
            let body = Body::from(body.clone().into_bytes());
            let answer = Response::builder().status(code).body(body).unwrap();
            async move { Ok::<_, std::io::Error>(answer) }
        };
        let seen = Arc::new(Mutex::new(Vec::new()));
        let notes = Arc::clone(&seen);
        let client = observed(Client::new(service_fn(answer), "x"), move |call| {
            notes.lock().push((call.verb, call.code, call.reason));
        });
        let api: Api<Lease> = Api::default_namespaced(client);
        let error = api.list(&ListParams::default()).await.err();
        let watched = api.watch(&WatchParams::default(), "0").await;
        drop(watched);
        api.delete("a", &DeleteParams::default()).await.ok();
        api.create(&PostParams::default(), &Lease::default())
            .await
            .ok();
        let seen = seen.lock().clone();
        (seen, error.map_or_else(String::new, |it| it.to_string()))
    }

    #[tokio::test]
    async fn answered_calls_are_reported_with_code_and_reason() {
        let verbs = [Verb::List, Verb::Watch, Verb::Delete, Verb::Write];
        let status = |reason: &str| json!({"kind": "Status", "status": "Failure", "code": 429, "message": "slow down", "reason": reason});
        let list = json!({"kind": "LeaseList", "metadata": {"resourceVersion": "1"}, "items": []});
        for (code, body, reason) in [
            (200, list, ""),
            (429, status("TooManyRequests"), "TooManyRequests"),
            (429, status("made-up"), ""),
            (502, json!("a proxy's page"), ""),
            (599, json!("unknown"), ""),
        ] {
            let (seen, error) = calls(code, body.to_string()).await;
            let shown = if code == 599 { 500 } else { code };
            assert_eq!(seen, verbs.map(|verb| (verb, shown, reason)));
            // The client still gets the error.
            assert_eq!(error.contains("slow down"), code == 429, "{error}");
        }
    }

    #[tokio::test]
    async fn call_without_an_answer_is_not_reported() {
        let fail =
            |_: Request<Body>| async { Err::<Response<Body>, _>(std::io::Error::other("no")) };
        let client = observed(Client::new(service_fn(fail), "x"), |call| {
            unreachable!("{call:?}")
        });
        let api: Api<Lease> = Api::default_namespaced(client);
        assert!(api.list(&ListParams::default()).await.is_err());
    }

    #[test]
    fn series_have_the_configured_names() {
        let registry = Registry::new(&[]).unwrap();
        let metrics = CallMetrics {
            registry: Arc::clone(&registry),
            code: "status",
            total: ["lists", "Lists."],
            latency: Some(["list_seconds", "Latency."]),
        };
        metrics.count(&Call {
            verb: Verb::List,
            code: 403,
            reason: "Forbidden",
            elapsed: Duration::from_millis(20),
        });
        let page = registry.render();
        for line in [
            r#"lists{status="403",reason="Forbidden"} 1"#,
            r#"list_seconds_bucket{status="403",le="0.025"} 1"#,
            "# HELP list_seconds Latency.",
        ] {
            assert!(page.lines().any(|shown| shown == line), "{page}");
        }
    }
}
