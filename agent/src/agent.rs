//! Shared state of an agent's streams and connections.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use culvert_host::net::destinations::Destinations;
use culvert_host::net::dial::{DialError, dial_permitted};
use culvert_host::net::options::unacknowledged;
use culvert_host::net::silence::is_over;
use culvert_host::telemetry::metrics::GaugeGuard;
use culvert_konnectivity::excess::OverflowBudget;
use culvert_stream::io::{ReadSource, WriteSink};
use culvert_stream::{AGENT_DIAL_TIMEOUT, CloseReason};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{info, warn};

use crate::metrics::AgentMetrics;

/// Shared state of an agent.
pub(crate) struct Agent {
    /// The agent's metrics.
    pub metrics: Arc<AgentMetrics>,
    /// Tracks the tasks of streams and connections.
    pub tasks: TaskTracker,
    /// Tracks ended connections whose last bytes are still on their way to a server.
    pub leaving: TaskTracker,
    /// Ends the calls of all packet streams, once their queues are empty.
    pub finish: CancellationToken,
    /// Ends all streams and connections at once.
    pub shutdown: CancellationToken,
    /// Bounds on the bytes that wait for endpoints.
    pub limits: Limits,
    /// Destinations that servers may dial.
    pub destinations: Destinations,
    active: watch::Sender<usize>,
}

/// Returns the source and the sink of an endpoint's socket.
pub(crate) fn endpoint_halves(
    socket: TcpStream,
) -> (ReadSource<OwnedReadHalf>, WriteSink<OwnedWriteHalf>) {
    let (read, write) = socket.into_split();
    let lost = CloseReason::EndpointLost;
    let source = ReadSource::new(read, Bytes::new(), lost);
    let sink = WriteSink::new(write, lost);
    (
        source.watched(|read| is_over(read.as_ref())),
        sink.measured(|write| unacknowledged(write.as_ref())),
    )
}

/// A connection to an endpoint.
pub(crate) struct Dialed {
    pub socket: TcpStream,
    /// Counts the connection as open until dropped.
    pub open: GaugeGuard,
}

/// Bounds on the bytes that wait for slow endpoints.
pub(crate) struct Limits {
    /// Budget of one connection, in bytes. A connection borrows from `excess` beyond its budget.
    pub connection_bytes: usize,
    /// Longest uninterrupted time that a connection may exceed its budget; the connection is then closed.
    pub stall: Duration,
    /// Budget that connections borrow from beyond their budgets.
    pub excess: Arc<OverflowBudget>,
}

/// Guard that counts a connection, from the start of the dial until the guard is dropped.
pub(crate) struct Activity(Arc<Agent>);

impl Agent {
    /// Creates an agent without streams.
    pub(crate) fn new(
        metrics: Arc<AgentMetrics>,
        shutdown: CancellationToken,
        limits: Limits,
        destinations: Destinations,
    ) -> Arc<Self> {
        Arc::new(Self {
            metrics,
            tasks: TaskTracker::new(),
            leaving: TaskTracker::new(),
            finish: CancellationToken::new(),
            shutdown,
            limits,
            destinations,
            active: watch::Sender::new(0),
        })
    }

    /// Dials an endpoint. The outcome is logged and counted.
    ///
    /// # Errors
    /// Returns the error for the server.
    pub(crate) async fn dial(&self, protocol: &str, address: &str) -> Result<Dialed, DialError> {
        let started = Instant::now();
        // Boxed, because a dial needs more memory than the connection after it.
        let dialed = dial_permitted(protocol, address, AGENT_DIAL_TIMEOUT, &self.destinations);
        match Box::pin(dialed).await {
            Ok(socket) => {
                let elapsed = started.elapsed().as_secs_f64();
                self.metrics.dial_duration.record(elapsed);
                let open = GaugeGuard::new(&self.metrics.open_endpoint_connections);
                Ok(Dialed { socket, open })
            }
            Err(error) => {
                match error.denial {
                    Some(_) => warn!(address, error = error.text, "dial denied"),
                    None => info!(address, error = error.text, "dial failed"),
                }
                self.metrics.dial_failures((&error).into()).increment(1);
                Err(error)
            }
        }
    }

    /// Counts a connection until the returned guard is dropped.
    pub(crate) fn activity(self: &Arc<Self>) -> Activity {
        self.active.send_modify(|count| *count += 1);
        Activity(self.clone())
    }

    /// Returns a watch on the number of connections.
    pub(crate) fn active(&self) -> watch::Receiver<usize> {
        self.active.subscribe()
    }

    /// Waits until `ended` fires because the agent connection ended. Returns the close reason for the
    /// connections that the agent connection carried.
    pub(crate) async fn server_lost(&self, ended: &CancellationToken) -> CloseReason {
        ended.cancelled().await;
        match self.shutdown.is_cancelled() {
            true => CloseReason::Shutdown,
            false => CloseReason::ServerLost,
        }
    }

    /// Counts a closed connection by its reason.
    pub(crate) fn closed(&self, reason: CloseReason) {
        self.metrics.streams.closed.get(reason).increment(1);
    }
}

impl Drop for Activity {
    fn drop(&mut self) {
        self.0.active.send_modify(|count| *count -= 1);
    }
}
