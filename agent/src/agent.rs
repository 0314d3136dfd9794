//! What all streams and connections of one agent share.

use std::sync::Arc;
use std::time::Duration;

use culvert_konnectivity::excess::Pool;
use culvert_stream::CloseReason;
use metrics::Counter;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::metrics::AgentMetrics;

/// The shared part of one agent.
pub struct Agent {
    /// The agent's series.
    pub metrics: Arc<AgentMetrics>,
    /// Owns the tasks of streams and connections.
    pub tasks: TaskTracker,
    /// Ends them at once.
    pub shutdown: CancellationToken,
    /// What may wait for endpoints.
    pub limits: Limits,
    closed: [(CloseReason, Counter); CloseReason::ALL.len()],
    active: watch::Sender<usize>,
}

/// What may wait for endpoints, and for how long.
pub struct Limits {
    /// Bytes for one endpoint without borrowing.
    pub connection_bytes: usize,
    /// How long a connection may exceed them without a pause.
    pub stall: Duration,
    /// What connections borrow from.
    pub excess: Arc<Pool>,
}

/// Counts one connection, from its dial on, until it is dropped.
pub struct Activity(Arc<Agent>);

impl Agent {
    /// An agent without streams.
    pub fn new(
        metrics: Arc<AgentMetrics>,
        shutdown: CancellationToken,
        limits: Limits,
    ) -> Arc<Self> {
        let closed = CloseReason::ALL
            .map(|reason| (reason, metrics.streams.connections_closed(reason.label())));
        Arc::new(Self {
            metrics,
            tasks: TaskTracker::new(),
            shutdown,
            limits,
            closed,
            active: watch::Sender::new(0),
        })
    }

    /// A connection is there until the guard is dropped.
    pub fn activity(self: &Arc<Self>) -> Activity {
        self.active.send_modify(|count| *count += 1);
        Activity(self.clone())
    }

    /// The number of connections, to watch.
    pub fn active(&self) -> watch::Receiver<usize> {
        self.active.subscribe()
    }

    /// Counts the end of a connection.
    pub fn closed(&self, reason: CloseReason) {
        if let Some((_, counter)) = self.closed.iter().find(|(r, _)| *r == reason) {
            counter.increment(1);
        }
    }
}

impl Drop for Activity {
    fn drop(&mut self) {
        self.0.active.send_modify(|count| *count -= 1);
    }
}
