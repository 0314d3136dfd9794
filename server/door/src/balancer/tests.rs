//! Tests of the writer against an API in memory. The clock is paused, so a sleep ends once every task waits.
#![allow(clippy::unwrap_used)]

use std::convert::Infallible;
use std::sync::Arc;

use http::{Request, Response, StatusCode};
use kube::client::Body;
use parking_lot::Mutex;
use tokio_util::sync::DropGuard;
use tower::service_fn;

use super::*;
use crate::balancer_ports::tests::options;

/// A replica without an election, and the load balancer's Service, which its writes do not change.
struct Replica {
    service: Arc<Mutex<Option<Value>>>,
    metrics: Arc<ProxyMetrics>,
    reporter: Reporter,
    _stop: DropGuard,
}

impl Replica {
    /// Starts a replica that knows all Services.
    fn start(service: Option<Value>) -> Self {
        let service = Arc::new(Mutex::new(service));
        let stored = service.clone();
        let api = service_fn(move |_: Request<Body>| {
            let answer = answer(stored.lock().as_ref());
            async move { Ok::<_, Infallible>(answer) }
        });
        let config = BalancerConfig {
            only: true,
            namespace: "kubermatic".to_owned(),
            name: "nodeport-proxy".to_owned(),
            options: options(),
            election: None,
        };
        let metrics = ProxyMetrics::new().unwrap();
        let client = Client::new(api, "kubermatic");
        let (balancer, reporter) = Balancer::new(client, &config, &metrics);
        let stop = CancellationToken::new();
        tokio::spawn(balancer.run(stop.clone()));
        reporter.services(std::iter::empty());
        reporter.set_up(true);
        Self {
            service,
            metrics,
            reporter,
            _stop: stop.drop_guard(),
        }
    }

    /// Replaces the load balancer's Service, and reports the change.
    fn put(&self, service: Value) {
        *self.service.lock() = Some(service.clone());
        self.reporter
            .touched(&serde_json::from_value(service).unwrap());
    }

    /// Returns the value of a series.
    fn value(&self, series: &str) -> u64 {
        let page = self.metrics.registry().render();
        let mut lines = page.lines();
        let value = lines.find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        value.unwrap().parse().unwrap()
    }

    /// Returns the number of failed reads.
    fn failures(&self) -> u64 {
        self.value("culvert_nodeport_proxy_balancer_failures_total{step=\"read\"}")
    }

    /// Returns the number of writes.
    fn updates(&self) -> u64 {
        self.value("culvert_nodeport_proxy_balancer_updates_total")
    }
}

/// Returns the answer to a request for a Service.
fn answer(service: Option<&Value>) -> Response<Body> {
    let missing = json!({"kind": "Status", "status": "Failure", "code": 404, "reason": "NotFound"});
    let body = service.unwrap_or(&missing).to_string();
    let mut answer = Response::new(Body::from(body.into_bytes()));
    if service.is_none() {
        *answer.status_mut() = StatusCode::NOT_FOUND;
    }
    answer
}

fn balancer(ports: &Value) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"namespace": "kubermatic", "name": "nodeport-proxy"},
        "spec": {"ports": ports},
    })
}

/// Range of the alert's `rate` in docs/operations.md.
const ALERT: Duration = Duration::from_secs(600);

#[tokio::test(start_paused = true)]
async fn missing_service_is_counted_until_it_exists_and_then_updated_at_once() {
    let replica = Replica::start(None);
    for _ in 0..6 {
        let before = replica.failures();
        sleep(ALERT).await;
        let more = replica.failures() - before;
        assert!((15..=25).contains(&more), "{more}");
    }
    let before = replica.failures();
    replica.put(balancer(&json!([])));
    sleep(Duration::from_secs(1)).await;
    assert_eq!((replica.updates(), replica.failures()), (1, before));
    sleep(ALERT).await;
    assert_eq!((replica.updates(), replica.failures()), (1, before));
}

#[tokio::test(start_paused = true)]
async fn service_with_malformed_ports_is_counted_until_they_are_a_list() {
    let replica = Replica::start(Some(balancer(&json!("none"))));
    // The pauses grow in the first minute.
    sleep(ALERT).await;
    for _ in 0..6 {
        let before = replica.failures();
        sleep(ALERT).await;
        let more = replica.failures() - before;
        assert!((15..=25).contains(&more), "{more}");
    }
    assert_eq!(replica.updates(), 0);
    *replica.service.lock() = Some(balancer(&json!([])));
    sleep(ALERT).await;
    assert_eq!(replica.updates(), 1);
}

#[tokio::test(start_paused = true)]
async fn replica_whose_watch_fails_neither_reads_nor_writes() {
    let replica = Replica::start(Some(balancer(&json!([]))));
    sleep(Duration::from_secs(1)).await;
    assert_eq!(replica.updates(), 1);
    replica.reporter.set_up(false);
    assert_eq!(replica.value("culvert_nodeport_proxy_leader"), 1);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(replica.value("culvert_nodeport_proxy_leader"), 0);
    replica.put(balancer(&json!([])));
    sleep(ALERT).await;
    assert_eq!(replica.updates(), 1);
    replica.reporter.set_up(true);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(replica.updates(), 2);
}
