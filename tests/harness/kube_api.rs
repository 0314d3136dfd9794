//! A Kubernetes API in memory, for programs that list, watch and write objects with `kube` or client-go.
//!
//! The API serves HTTP/1.1 on a port of 127.0.0.1, inside the test's own process, in plain text or over TLS. The
//! test adds objects, inspects the requests and writes of the program under test, and injects faults at any time.
//!
//! | module | contents |
//! |---|---|
//! | `address` | the supported kinds, and the objects that a URL names and selects |
//! | `serve` | connections, and the path of a request through faults and verbs |
//! | `verbs` | get, list, watch, create, update, patch, delete |
//! | `store` | the objects, their versions, and the log that watches resume from |
//! | `watch` | a single watch: its events and its body |
//! | `tokens` | `TokenReview` |
//! | `fault` | faults that a test can inject |
//! | `status` | errors as `Status` objects |
//! | `objects` | builders for Services, EndpointSlices, Nodes and Leases |
//!
//! Not supported: authorization, admission, defaults, subresources, finalizers, paging (a list is always
//! complete), and all encodings except JSON. A body in protobuf gets 415, so stock programs need
//! `--kube-api-content-type=application/json`.

mod address;
mod fault;
mod objects;
mod serve;
mod status;
mod store;
mod tokens;
mod verbs;
mod watch;

use std::collections::{HashMap, VecDeque};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use rustls::ServerConfig;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio_util::sync::{CancellationToken, DropGuard};

pub use self::fault::{Fault, Gone};
pub use self::objects::{ServiceBuilder, SliceBuilder, node, server_lease, service, slice};
pub use self::tokens::{Review, TokenStatus};

use self::address::Kind;
use self::store::Store;

/// The bearer token in the kubeconfig file of [`KubeApi::kubeconfig`].
pub const TOKEN: &str = "harness-token";

/// Largest number of requests, and of reviews, that the API records. The oldest records are dropped first.
const MAX_REMEMBERED: usize = 10_000;

/// A running API. Dropping the value closes the port and all connections.
#[derive(Debug)]
pub struct KubeApi {
    addr: SocketAddr,
    state: Arc<Mutex<State>>,
    stop: CancellationToken,
    _stop: DropGuard,
}

/// A received request, recorded even if a fault makes the request fail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recorded {
    /// The method, for example `GET`.
    pub method: String,
    /// Path and query as sent, without decoding.
    pub path: String,
    /// The `Authorization` header, for example `Bearer harness-token`.
    pub authorization: Option<String>,
}

#[derive(Debug)]
struct State {
    store: Store,
    faults: Vec<Fault>,
    tokens: HashMap<String, TokenStatus>,
    reviews: VecDeque<Review>,
    requests: VecDeque<Recorded>,
    /// TLS configuration of new connections; `None` means plain text.
    tls: Option<Arc<ServerConfig>>,
    /// Cancelled to close all connections that are open now.
    cut: CancellationToken,
}

// === impl KubeApi ===

impl KubeApi {
    /// Starts an API without objects on a port of 127.0.0.1 that the system chooses.
    ///
    /// # Panics
    /// If the API cannot listen.
    pub async fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await;
        let listener = listener.expect("a Kubernetes API's listener");
        let addr = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let state = Arc::new(Mutex::new(State {
            store: Store::new(),
            faults: Vec::new(),
            tokens: HashMap::new(),
            reviews: VecDeque::new(),
            requests: VecDeque::new(),
            tls: None,
            cut: stop.child_token(),
        }));
        let accepting = serve::accept(listener, Arc::clone(&state));
        tokio::spawn(stop.clone().run_until_cancelled_owned(accepting));
        Self {
            addr,
            state,
            stop: stop.clone(),
            _stop: stop.drop_guard(),
        }
    }

    /// Returns the address of the listener.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Returns the base URL, without a slash at the end.
    pub fn url(&self) -> String {
        let scheme = match self.state.lock().tls {
            Some(_) => "https",
            None => "http",
        };
        format!("{scheme}://{}", self.addr)
    }

    /// Uses TLS with this configuration for all connections from now on, and closes the open connections.
    pub fn use_tls(&self, config: Arc<ServerConfig>) {
        self.state.lock().tls = Some(config);
        self.cut();
    }

    /// Writes the file `kubeconfig` into `dir`, with this API and a user with the bearer token [`TOKEN`].
    /// Returns the path of the file.
    ///
    /// # Panics
    /// If the file cannot be written.
    pub fn kubeconfig(&self, dir: &Path) -> PathBuf {
        let url = self.url();
        let text = format!(
            "apiVersion: v1
kind: Config
clusters:
- name: harness
  cluster:
    server: {url}
users:
- name: harness
  user:
    token: {TOKEN}
contexts:
- name: harness
  context:
    cluster: harness
    user: harness
current-context: harness
"
        );
        let path = dir.join("kubeconfig");
        std::fs::write(&path, text).expect("writing a kubeconfig file");
        path
    }

    /// Creates or replaces an object, and returns the stored object. `resource` is a plural, for example
    /// `services`; the API sets version and times. A call that changes nothing creates no event.
    ///
    /// # Panics
    /// If the resource is not supported, or the object lacks its name or namespace.
    pub fn put(&self, resource: &str, object: impl Into<Value>) -> Value {
        let (kind, object) = (Kind::of(resource), object.into());
        let (_, namespace, name) = store::key(kind, &object);
        assert!(!name.is_empty(), "the object has no name: {object}");
        assert!(
            !kind.namespaced || !namespace.is_empty(),
            "the object has no namespace: {object}"
        );
        self.state.lock().store.set(kind, object)
    }

    /// Deletes an object, and returns its last state. The namespace of a node is empty.
    ///
    /// # Panics
    /// If the resource is not supported, or the object does not exist.
    pub fn delete(&self, resource: &str, namespace: &str, name: &str) -> Value {
        let kind = Kind::of(resource);
        let key = (kind.plural, namespace.to_owned(), name.to_owned());
        let removed = self.state.lock().store.remove(kind, &key);
        removed.unwrap_or_else(|| panic!("cannot delete {key:?}: no such object"))
    }

    /// Returns an object as stored now. The namespace of a node is empty.
    ///
    /// # Panics
    /// If the resource is not supported.
    pub fn get(&self, resource: &str, namespace: &str, name: &str) -> Option<Value> {
        let plural = Kind::of(resource).plural;
        let key = (plural, namespace.to_owned(), name.to_owned());
        self.state.lock().store.get(&key).cloned()
    }

    /// Returns the names of the objects in a namespace, in alphabetical order.
    ///
    /// # Panics
    /// If the resource is not supported.
    pub fn names(&self, resource: &str, namespace: &str) -> Vec<String> {
        self.state.lock().store.names(Kind::of(resource), namespace)
    }

    /// Sends a bookmark with the current version to every open watch that allows bookmarks.
    pub fn bookmark(&self) {
        self.state.lock().store.bookmark();
    }

    /// Drops the log of changes. A watch that resumes from any version known so far gets the error that
    /// `gone` selects, and its client lists again. Open watches continue; [`KubeApi::cut`] makes their
    /// clients resume.
    pub fn expire(&self, gone: Gone) {
        self.state.lock().store.expire(gone);
    }

    /// Returns the number of open watches, not counting silent watches.
    pub fn watches(&self) -> usize {
        self.state.lock().store.watches()
    }

    /// Adds a fault. If several faults apply to a request, the delays add up and the first status is the
    /// answer.
    pub fn fault(&self, fault: Fault) {
        let mut state = self.state.lock();
        if let Some(path) = fault.hangs() {
            state.store.silence(path);
        }
        state.faults.push(fault);
    }

    /// Removes all faults. Watches that were made silent stay silent.
    pub fn clear_faults(&self) {
        self.state.lock().faults.clear();
    }

    /// Closes all open connections, even in the middle of an answer. Their watches see no change that is made
    /// after this call. New connections are accepted.
    pub fn cut(&self) {
        let mut state = self.state.lock();
        state.store.silence("");
        let next = self.stop.child_token();
        std::mem::replace(&mut state.cut, next).cancel();
    }

    /// Returns the received requests, oldest first; at most the last 10,000.
    pub fn requests(&self) -> Vec<Recorded> {
        self.state.lock().requests.iter().cloned().collect()
    }

    /// Sets the result of a `TokenReview` of `token` from now on. All other tokens are invalid.
    pub fn token(&self, token: &str, status: TokenStatus) {
        self.state.lock().tokens.insert(token.to_owned(), status);
    }

    /// Returns the answered token reviews, oldest first; at most the last 10,000.
    pub fn reviews(&self) -> Vec<Review> {
        self.state.lock().reviews.iter().cloned().collect()
    }
}

/// Returns the text at the JSON pointer `pointer`; empty if the text is missing.
fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    let found = object.pointer(pointer).and_then(Value::as_str);
    found.unwrap_or_default()
}

fn remember<T>(memory: &mut VecDeque<T>, item: T) {
    if memory.len() == MAX_REMEMBERED {
        memory.pop_front();
    }
    memory.push_back(item);
}

#[cfg(test)]
mod tests;
