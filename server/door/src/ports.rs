//! The listeners of node ports, opened and closed independently as Services come and go.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use culvert_host::admin;
use culvert_host::net::congestion::ChosenCongestion;
use culvert_host::net::listen::Listener;
use culvert_host::runtime::shards::Shards;
use culvert_host::runtime::spawn_essential;
use culvert_host::telemetry::log_once::LogOnce;
use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{info, warn};

use super::config::HOST_FLAG;
use super::front::Front;
use super::metrics::Entrance;

/// Pause before another attempt to open a port; its previous owner may be about to close it.
const RETRY: Duration = Duration::from_secs(5);

pub(crate) struct NodePorts {
    front: Arc<Front>,
    host: String,
    listeners: TaskTracker,
    open: HashMap<u16, CancellationToken>,
    /// Ports that could not be opened, with their errors.
    failed: HashMap<u16, LogOnce>,
    congestion: ChosenCongestion,
}

impl NodePorts {
    /// Creates a set without open ports.
    pub(crate) fn new(front: Arc<Front>, host: &str, congestion: ChosenCongestion) -> Self {
        Self {
            front,
            host: host.to_owned(),
            listeners: TaskTracker::new(),
            open: HashMap::new(),
            failed: HashMap::new(),
            congestion,
        }
    }

    /// Opens and closes ports as the table changes, until the listeners close; `changed` fires after each change
    /// of the table. Returns when every listener is closed.
    pub(crate) async fn run(mut self, mut changed: watch::Receiver<u64>) {
        let closing = self.front.closing.clone();
        while !closing.is_cancelled() {
            self.follow().await;
            tokio::select! {
                alive = changed.changed() => if alive.is_err() { break },
                () = sleep(RETRY), if !self.failed.is_empty() => {}
                () = closing.cancelled() => break,
            }
        }
        for token in self.open.values() {
            token.cancel();
        }
        self.listeners.close();
        self.listeners.wait().await;
    }

    async fn follow(&mut self) {
        let wanted = self.front.table.node_ports();
        let is_wanted = |port: &u16| wanted.binary_search(port).is_ok();
        self.failed.retain(|port, _| is_wanted(port));
        self.open.retain(|port, token| {
            let stays = is_wanted(port);
            if !stays {
                info!(port, "node port closed");
                token.cancel();
            }
            stays
        });
        for port in wanted {
            if self.open.contains_key(&port) {
                continue;
            }
            let flags = [HOST_FLAG, "the Service's node port"];
            match admin::bind(&self.host, port, flags).await {
                Ok(listener) => {
                    self.failed.remove(&port);
                    info!(port, "node port opened");
                    let keepalive = &self.front.limits.downstream_keepalive;
                    self.congestion.apply_to_listener(&listener);
                    self.serve(port, Listener::tcp(listener, keepalive));
                }
                Err(error) => {
                    let text = error.to_string();
                    if let Some(due) = self.failed.entry(port).or_default().failed(&text) {
                        warn!(
                            port,
                            reason = text,
                            attempts = due.attempts,
                            failing_seconds = due.failing_seconds,
                            "cannot open the node port; trying again every {RETRY:?}"
                        );
                    }
                }
            }
        }
        self.front
            .metrics
            .closed_ports
            .set(self.failed.len() as f64);
    }

    fn serve(&mut self, port: u16, listener: Listener) {
        let token = CancellationToken::new();
        self.open.insert(port, token.clone());
        let own = self.front.clone();
        let connection = move |stream, peer| own.clone().serve_node_port(stream, peer, port);
        let accepting = self.front.clone();
        let (seat, entrance) = (Shards::seat_nearby, Entrance::NodePort);
        let accepting = accepting.accept(listener, token.clone(), seat, entrance, connection);
        spawn_essential(&self.listeners, "node port", &token, accepting);
    }
}
