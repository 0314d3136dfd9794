//! A Kubernetes API in memory, for programs that list, watch and write objects with `kube` or client-go.
//!
//! It speaks plain HTTP/1.1 on a port of 127.0.0.1 and belongs to the test's own process: the test
//! puts objects in, looks at what the program wrote and asked, and breaks the API whenever it likes.
//!
//! | module | what it holds |
//! |---|---|
//! | `address` | the kinds that are served, and what a URL names and selects |
//! | `serve` | connections, and the way of one request through faults and verbs |
//! | `verbs` | get, list, watch, create, update, patch, delete |
//! | `store` | the objects, their versions, and the log that watches resume from |
//! | `watch` | one watch: its events and its body |
//! | `tokens` | `TokenReview` |
//! | `fault` | what a test can break |
//! | `status` | errors as `Status` objects |
//! | `objects` | Services, EndpointSlices and Nodes to put in |
//!
//! Left out: authorization, admission, defaults, subresources, finalizers, paging (a list is always
//! whole), and every encoding but JSON. A body in protobuf gets 415, so stock programs need
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
use serde_json::Value;
use tokio::net::TcpListener;
use tokio_util::sync::{CancellationToken, DropGuard};

pub use self::fault::{Fault, Gone};
pub use self::objects::{ServiceBuilder, SliceBuilder, node, service, slice};
pub use self::tokens::{Review, TokenStatus};

use self::address::Kind;
use self::store::Store;

/// The bearer token in the kubeconfig file that [`KubeApi::kubeconfig`] writes.
pub const TOKEN: &str = "harness-token";

/// How many requests, and how many reviews, are remembered. The oldest are forgotten first.
const MAX_REMEMBERED: usize = 10_000;

/// A running API. Dropping it closes its port and every connection.
#[derive(Debug)]
pub struct KubeApi {
    addr: SocketAddr,
    state: Arc<Mutex<State>>,
    stop: CancellationToken,
    _stop: DropGuard,
}

/// One request as it came, whatever was answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recorded {
    /// The method, such as `GET`.
    pub method: String,
    /// Path and query as they were sent, not decoded.
    pub path: String,
    /// The `Authorization` header, such as `Bearer harness-token`.
    pub authorization: Option<String>,
}

#[derive(Debug)]
struct State {
    store: Store,
    faults: Vec<Fault>,
    tokens: HashMap<String, TokenStatus>,
    reviews: VecDeque<Review>,
    requests: VecDeque<Recorded>,
    /// Cancelled to close the connections that are open now.
    cut: CancellationToken,
}

// === impl KubeApi ===

impl KubeApi {
    /// Starts an API without objects on a port of 127.0.0.1 that the system chooses.
    ///
    /// # Panics
    /// When it cannot listen.
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

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The URL to reach it at, without a slash at the end.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Writes the file `kubeconfig` into `dir`: this API, and a user with the bearer token [`TOKEN`].
    /// Gives the file's path.
    ///
    /// # Panics
    /// When the file cannot be written.
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

    /// Creates or replaces an object, and gives it as it is stored. `resource` is a plural, such as
    /// `services`; version and times are filled in. A put that changes nothing makes no event.
    ///
    /// # Panics
    /// When the resource is not served, or the object lacks its name or namespace.
    pub fn put(&self, resource: &str, object: impl Into<Value>) -> Value {
        let (kind, object) = (Kind::of(resource), object.into());
        let (_, namespace, name) = store::key(kind, &object);
        assert!(!name.is_empty(), "without a name: {object}");
        assert!(
            !kind.namespaced || !namespace.is_empty(),
            "without a namespace: {object}"
        );
        self.state.lock().store.set(kind, object)
    }

    /// Deletes an object, and gives it as it was. The namespace of a node is empty.
    ///
    /// # Panics
    /// When the resource is not served, or there is no such object.
    pub fn delete(&self, resource: &str, namespace: &str, name: &str) -> Value {
        let kind = Kind::of(resource);
        let key = (kind.plural, namespace.to_owned(), name.to_owned());
        let removed = self.state.lock().store.remove(kind, &key);
        removed.unwrap_or_else(|| panic!("there is no {key:?} to delete"))
    }

    /// An object as it is stored now. The namespace of a node is empty.
    ///
    /// # Panics
    /// When the resource is not served.
    pub fn get(&self, resource: &str, namespace: &str, name: &str) -> Option<Value> {
        let plural = Kind::of(resource).plural;
        let key = (plural, namespace.to_owned(), name.to_owned());
        self.state.lock().store.get(&key).cloned()
    }

    /// Sends a bookmark with the present version to every open watch that allows them.
    pub fn bookmark(&self) {
        self.state.lock().store.bookmark();
    }

    /// Forgets the log of changes: a watch that resumes from any version known so far is told, in
    /// the way of `gone`, to list anew. Open watches go on; [`KubeApi::cut`] makes them resume.
    pub fn expire(&self, gone: Gone) {
        self.state.lock().store.expire(gone);
    }

    /// How many watches are open, without those that have fallen silent.
    pub fn watches(&self) -> usize {
        self.state.lock().store.watches()
    }

    /// Adds a fault. Of several that apply to one request, all delays add up and the first status
    /// is answered.
    pub fn fault(&self, fault: Fault) {
        let mut state = self.state.lock();
        if let Some(path) = fault.hangs() {
            state.store.silence(path);
        }
        state.faults.push(fault);
    }

    /// Ends all faults. Watches that have fallen silent stay so.
    pub fn clear_faults(&self) {
        self.state.lock().faults.clear();
    }

    /// Closes all connections that are open, in the middle of whatever they carry. No watch on them
    /// sees a change that is made after this call. New connections are accepted.
    pub fn cut(&self) {
        let mut state = self.state.lock();
        state.store.silence("");
        let next = self.stop.child_token();
        std::mem::replace(&mut state.cut, next).cancel();
    }

    /// The requests so far, oldest first: the last 10,000.
    pub fn requests(&self) -> Vec<Recorded> {
        self.state.lock().requests.iter().cloned().collect()
    }

    /// Says what a `TokenReview` of `token` is answered from now on. Other tokens are not known.
    pub fn token(&self, token: &str, status: TokenStatus) {
        self.state.lock().tokens.insert(token.to_owned(), status);
    }

    /// The token reviews that were answered, oldest first: the last 10,000.
    pub fn reviews(&self) -> Vec<Review> {
        self.state.lock().reviews.iter().cloned().collect()
    }
}

/// The text at `pointer`, a JSON pointer; empty if there is none.
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
