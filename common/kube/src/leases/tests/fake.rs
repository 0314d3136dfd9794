//! A Kubernetes API in memory that knows only leases, for tests with a paused clock.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use http::{Method, Request, Response, StatusCode};
use http_body_util::BodyExt as _;
use kube::Client;
use kube::client::Body;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::{oneshot, watch};
use tokio::time::timeout;
use tower::service_fn;

/// Label of the servers' leases, as a selector.
pub(super) const LABEL: &str = "k8s-app=konnectivity-server";

/// Lifetime of a watch without events.
const WATCH: Duration = Duration::from_secs(30);

#[derive(Clone)]
pub(super) struct Fake {
    state: Arc<Mutex<State>>,
    version: Arc<watch::Sender<u64>>,
}

#[derive(Default)]
struct State {
    version: u64,
    leases: BTreeMap<String, Value>,
    log: Vec<(u64, Value)>,
    faults: VecDeque<(Method, Fault)>,
    is_down: bool,
    calls: Vec<String>,
}

/// Fault of one request.
pub(super) enum Fault {
    Status(u16),
    /// The request is lost.
    Silent,
    /// The request is performed when the test sends this signal.
    Held(oneshot::Receiver<()>),
    /// Another writer changes the lease before the request is performed.
    Renewed(&'static str),
}

/// Returns a lease with the servers' label, renewed at a time by its holder's clock.
pub(super) fn lease(name: &str, renewed: &str) -> Value {
    json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name, "namespace": "n", "labels": {"k8s-app": "konnectivity-server"}},
        "spec": {
            "holderIdentity": name,
            "leaseDurationSeconds": 30,
            "renewTime": renewed,
        },
    })
}

impl Fake {
    pub(super) fn new() -> Self {
        Self {
            state: Arc::default(),
            version: Arc::new(watch::Sender::new(0)),
        }
    }

    pub(super) fn client(&self) -> Client {
        let fake = self.clone();
        let service = service_fn(move |request: Request<Body>| {
            let fake = fake.clone();
            async move { fake.answer(request).await }
        });
        Client::new(service, "n")
    }

    /// Adds a fault for the next request with this method.
    pub(super) fn fault(&self, method: Method, fault: Fault) {
        self.state.lock().faults.push_back((method, fault));
    }

    /// Makes all requests fail, or ends these failures.
    pub(super) fn set_down(&self, is_down: bool) {
        self.state.lock().is_down = is_down;
    }

    /// Creates or replaces a lease.
    pub(super) fn put(&self, lease: Value) {
        self.store(&text(&lease, "/metadata/name"), Some(lease));
    }

    pub(super) fn delete(&self, name: &str) {
        self.store(name, None);
    }

    pub(super) fn get(&self, name: &str) -> Option<Value> {
        self.state.lock().leases.get(name).cloned()
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.state.lock().leases.keys().cloned().collect()
    }

    /// Returns the methods of the received requests.
    pub(super) fn calls(&self) -> Vec<String> {
        self.state.lock().calls.clone()
    }

    /// Returns the number of received requests with this method.
    pub(super) fn count(&self, method: &str) -> usize {
        self.calls().iter().filter(|call| *call == method).count()
    }

    /// Makes all versions expire, so that the next watch gets 410.
    pub(super) fn expire(&self) {
        let mut state = self.state.lock();
        state.version += 1;
        state.log.clear();
    }

    fn store(&self, name: &str, lease: Option<Value>) -> Option<Value> {
        let mut state = self.state.lock();
        state.version += 1;
        let version = state.version;
        let before = state.leases.remove(name);
        let (kind, mut object) = match (&before, lease) {
            (_, Some(lease)) => ("MODIFIED", lease),
            (Some(before), None) => ("DELETED", before.clone()),
            (None, None) => return None,
        };
        let uid = before.map(|before| text(&before, "/metadata/uid"));
        object["metadata"]["uid"] = json!(uid.unwrap_or_else(|| format!("uid-{version}")));
        object["metadata"]["resourceVersion"] = json!(version.to_string());
        if kind == "MODIFIED" {
            state.leases.insert(name.to_owned(), object.clone());
        }
        let event = json!({"type": kind, "object": object});
        state.log.push((version, event));
        self.version.send_replace(version);
        Some(object)
    }

    async fn answer(&self, request: Request<Body>) -> Result<Response<Body>, std::io::Error> {
        let method = request.method().clone();
        let fault = {
            let mut state = self.state.lock();
            state.calls.push(method.to_string());
            let known = state.faults.iter().position(|(of, _)| *of == method);
            match state.is_down {
                true => return Err(std::io::Error::other("the API is down")),
                false => known.and_then(|known| state.faults.remove(known)),
            }
        };
        let path = request.uri().path().to_owned();
        let (_, name) = path.split_once("/leases").unwrap();
        let name = name.trim_start_matches('/').to_owned();
        match fault {
            Some((_, Fault::Status(code))) => return Ok(failure(code, "a fault")),
            Some((_, Fault::Silent)) => std::future::pending().await,
            Some((_, Fault::Held(signal))) => signal.await.unwrap(),
            Some((_, Fault::Renewed(name))) => self.put(lease(name, "2001-01-01T00:00:00.000000Z")),
            None => {}
        }
        let query = request.uri().query().unwrap_or_default().to_owned();
        let body = request.into_body().collect().await.unwrap().to_bytes();
        let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
        if query.contains("watch=true") {
            return Ok(self.watch(&query).await);
        }
        let known = self.get(&name);
        Ok(match (method, known) {
            (Method::GET, None) if name.is_empty() => self.list(&query),
            (Method::GET, Some(known)) => success(&known),
            (Method::POST, _) => {
                let name = text(&body, "/metadata/name");
                match self.get(&name) {
                    Some(_) => failure(409, "exists"),
                    None => success(&self.store(&name, Some(body)).unwrap()),
                }
            }
            (Method::PUT, Some(known)) if differs(&known, &body, "/metadata/resourceVersion") => {
                failure(409, "changed")
            }
            // As in Kubernetes, an update of a missing lease creates the lease.
            (Method::PUT, _) => success(&self.store(&name, Some(body)).unwrap()),
            (Method::DELETE, Some(known)) => {
                let wanted = json!({"metadata": body["preconditions"]});
                let fields = ["/metadata/resourceVersion", "/metadata/uid"];
                match fields.iter().any(|field| differs(&known, &wanted, field)) {
                    true => failure(409, "another version"),
                    false => {
                        self.delete(&name);
                        success(&json!({"kind": "Status", "status": "Success"}))
                    }
                }
            }
            _ => failure(404, "not found"),
        })
    }

    fn list(&self, query: &str) -> Response<Body> {
        let state = self.state.lock();
        let is_selected = |lease: &&Value| {
            let label = text(lease, "/metadata/labels/k8s-app");
            query.contains(&format!("labelSelector=k8s-app%3D{label}&"))
                || query.ends_with(&format!("labelSelector=k8s-app%3D{label}"))
        };
        let items: Vec<&Value> = state.leases.values().filter(is_selected).collect();
        let metadata = json!({"resourceVersion": state.version.to_string()});
        success(&json!({"kind": "LeaseList", "metadata": metadata, "items": items}))
    }

    /// Waits for changes, answers with them, and ends the watch.
    async fn watch(&self, query: &str) -> Response<Body> {
        let version = query
            .split('&')
            .find_map(|pair| pair.strip_prefix("resourceVersion="));
        let version: u64 = version.unwrap().parse().unwrap();
        let mut changes = self.version.subscribe();
        let waited = changes.wait_for(|now| *now > version);
        timeout(WATCH, waited).await.ok();
        let state = self.state.lock();
        let is_complete = state
            .log
            .first()
            .is_none_or(|(first, _)| *first <= version + 1);
        if state.version > version && (state.log.is_empty() || !is_complete) {
            return failure(410, "expired");
        }
        let events = state.log.iter().filter(|(at, _)| *at > version);
        let lines: String = events.map(|(_, event)| format!("{event}\n")).collect();
        Response::new(Body::from(lines.into_bytes()))
    }
}

fn text(value: &Value, pointer: &str) -> String {
    let text = value.pointer(pointer).and_then(Value::as_str);
    text.unwrap_or_default().to_owned()
}

/// Returns true if a field is set in `wanted` and has another value in `known`.
fn differs(known: &Value, wanted: &Value, field: &str) -> bool {
    let wanted = text(wanted, field);
    !wanted.is_empty() && wanted != text(known, field)
}

fn success(value: &Value) -> Response<Body> {
    Response::new(Body::from(value.to_string().into_bytes()))
}

fn failure(code: u16, message: &str) -> Response<Body> {
    let reason = if code == 404 { "NotFound" } else { "" };
    let status = json!({
        "kind": "Status",
        "status": "Failure",
        "code": code,
        "message": message,
        "reason": reason,
    });
    let mut answer = success(&status);
    *answer.status_mut() = StatusCode::from_u16(code).unwrap();
    answer
}
