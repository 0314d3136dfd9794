//! The watch of the user cluster's Nodes. Publishes the translation of node addresses. While the API is
//! unreachable, the last known nodes stay in force; before the first list, no node is known.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use culvert_kube::object_cache::{ObjectCache, objects};
use futures_util::StreamExt as _;
use ipnet::Ipv4Net;
use k8s_openapi::api::core::v1 as core;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::metrics::NodeMetrics;
use super::nodes::{Known, Node};

/// Time to collect changes before they are applied together.
const COLLECT: Duration = Duration::from_millis(200);

/// Largest number of stored Nodes, some 500 bytes each. Kubernetes is designed for 5,000.
const MAX_NODES: usize = 50_000;

/// Watch of the Nodes; see the module.
pub(super) struct NodeWatch {
    api: Api<core::Node>,
    cache: ObjectCache<Node>,
    /// Networks whose addresses are dialed without translation.
    direct: Vec<Ipv4Net>,
    known: watch::Sender<Arc<Known>>,
    metrics: NodeMetrics,
    /// Problems that were already logged.
    problems: Vec<String>,
}

impl NodeWatch {
    /// Creates the watch.
    pub(super) fn new(client: Client, direct: Vec<Ipv4Net>, metrics: NodeMetrics) -> Self {
        Self {
            api: Api::all(client),
            cache: ObjectCache::new("Nodes").at_most(MAX_NODES),
            direct,
            known: watch::Sender::default(),
            metrics,
            problems: Vec::new(),
        }
    }

    /// Returns a receiver for the current and all later translations.
    pub(super) fn known(&self) -> watch::Receiver<Arc<Known>> {
        self.known.subscribe()
    }

    /// Watches until the token fires.
    pub(super) async fn run(mut self, shutdown: CancellationToken) {
        let mut nodes = pin!(objects(self.api.clone()));
        // Instant at which the collected changes are applied; `None` without changes.
        let mut due: Option<Instant> = None;
        loop {
            let changed = tokio::select! {
                Some(event) = nodes.next() => self.cache.take(event, Node::of),
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                    due = None;
                    self.apply();
                    false
                }
                () = shutdown.cancelled() => return,
            };
            let up = self.cache.is_synced() && self.cache.is_up();
            self.metrics.watch_up.set(if up { 1.0 } else { 0.0 });
            if changed && self.cache.is_synced() {
                due.get_or_insert(Instant::now() + COLLECT);
            }
        }
    }

    fn apply(&mut self) {
        let (known, problems) = Known::of(self.cache.values(), &self.direct);
        info!(nodes = known.nodes, "addresses of nodes changed");
        self.metrics.nodes.set(known.nodes as f64);
        for problem in &problems {
            if !self.problems.contains(problem) {
                // The limit of the log counts by reason.
                warn!(
                    reason = problem,
                    "a Node has an address or name that is not translated as requested"
                );
            }
        }
        self.problems = problems;
        self.known.send_replace(Arc::new(known));
    }
}
