//! Watches the Nodes of the user cluster, and publishes whose an address is. While the API can not
//! be reached the last known nodes stay in force; before the first list none are known.

use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use culvert_kube::client::client;
use culvert_kube::mirror::{Mirror, objects};
use futures_util::StreamExt as _;
use ipnet::Ipv4Net;
use k8s_openapi::api::core::v1 as core;
use kube::Api;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::metrics::NodeMetrics;
use super::nodes::{Known, Node};

/// How long changes are collected before they are put in force together.
const COLLECT: Duration = Duration::from_millis(200);

/// How many Nodes are remembered, some 500 bytes each. Kubernetes itself is made for 5,000.
const MAX_NODES: usize = 50_000;

/// See the module.
pub struct NodeWatch {
    api: Api<core::Node>,
    mirror: Mirror<Node>,
    /// Where addresses are dialed as they are.
    direct: Vec<Ipv4Net>,
    known: watch::Sender<Arc<Known>>,
    metrics: NodeMetrics,
    /// What the log has named.
    problems: Vec<String>,
}

impl NodeWatch {
    /// Reads the account's credentials.
    ///
    /// # Errors
    /// When they can not be used.
    pub async fn new(
        kubeconfig: &Path,
        direct: Vec<Ipv4Net>,
        metrics: NodeMetrics,
    ) -> anyhow::Result<Self> {
        Ok(Self {
            api: Api::all(client(Some(kubeconfig)).await?),
            mirror: Mirror::new("Nodes").at_most(MAX_NODES),
            direct,
            known: watch::Sender::default(),
            metrics,
            problems: Vec::new(),
        })
    }

    /// What is known, from now on.
    pub fn known(&self) -> watch::Receiver<Arc<Known>> {
        self.known.subscribe()
    }

    /// Watches until the token fires.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let mut nodes = pin!(objects(self.api.clone()));
        // When what has changed is put in force.
        let mut due: Option<Instant> = None;
        loop {
            let changed = tokio::select! {
                Some(event) = nodes.next() => self.mirror.take(event, Node::of),
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                    due = None;
                    self.apply();
                    false
                }
                () = shutdown.cancelled() => return,
            };
            let up = self.mirror.is_synced() && self.mirror.is_up();
            self.metrics.watch_up.set(if up { 1.0 } else { 0.0 });
            if changed && self.mirror.is_synced() {
                due.get_or_insert(Instant::now() + COLLECT);
            }
        }
    }

    fn apply(&mut self) {
        let (known, problems) = Known::of(self.mirror.values(), &self.direct);
        info!(nodes = known.nodes, "addresses of nodes changed");
        self.metrics.nodes.set(known.nodes as f64);
        for problem in &problems {
            if !self.problems.contains(problem) {
                warn!("{problem}");
            }
        }
        self.problems = problems;
        self.known.send_replace(Arc::new(known));
    }
}
