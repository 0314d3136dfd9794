//! The front ends: the listeners that kube-apiserver connects to. A front end turns its protocol into a
//! dial and the two halves of a connection; the shared part is here.

pub mod grpc;
pub mod http_connect;

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use culvert_konnectivity::metrics::Direction;
use culvert_stream::pump::{Meter, pump};
use culvert_stream::{CloseReason, Dial, Sink, Source};
use metrics::Counter;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, warn};

use crate::backend::{Connection, DialError};
use crate::metrics::ServerMetrics;
use crate::router::Router;

/// State shared by all front-end connections of a server.
pub struct Frontend {
    /// Router for dials.
    pub router: Arc<Router>,
    /// Tracks the tasks of streams and connections.
    pub tasks: TaskTracker,
    /// Ends all streams and connections at once.
    pub shutdown: CancellationToken,
    /// Metrics of the server.
    pub metrics: Arc<ServerMetrics>,
    closed: [(CloseReason, Counter); CloseReason::ALL.len()],
    next: AtomicI64,
}

// === impl Frontend ===

impl Frontend {
    /// Creates the shared part of a server's front ends.
    pub fn new(
        router: Arc<Router>,
        tasks: TaskTracker,
        shutdown: CancellationToken,
        metrics: Arc<ServerMetrics>,
    ) -> Arc<Self> {
        let closed = CloseReason::ALL
            .map(|reason| (reason, metrics.streams.connections_closed(reason.label())));
        Arc::new(Self {
            router,
            tasks,
            shutdown,
            metrics,
            closed,
            next: AtomicI64::new(1),
        })
    }

    /// Returns a number for a new connection, unique in this process.
    pub fn next_connection(&self) -> i64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Carries a connection to its end, then counts and logs the close reason. `client_gone` resolves when
    /// the client has left although nothing is read from the client.
    pub async fn carry<S: Source, K: Sink>(
        &self,
        id: i64,
        dial: &Dial,
        client: (&mut S, &mut K),
        client_gone: impl Future<Output = ()>,
        connection: Connection,
    ) -> CloseReason {
        let Connection {
            mut source,
            mut sink,
            cut,
        } = connection;
        let bytes = |direction| self.metrics.streams.tunnel_bytes(direction).clone();
        let mut up = Meter::new(bytes(Direction::ToEndpoint));
        let mut down = Meter::new(bytes(Direction::FromEndpoint));
        let started = Instant::now();
        let (reason, overdue) = tokio::select! {
            reason = pump(client, (&mut source, &mut sink), &mut up, &mut down) => (reason, false),
            reason = cut.due() => (reason, true),
            () = client_gone => (CloseReason::ClientLost, false),
            () = self.shutdown.cancelled() => (CloseReason::Shutdown, false),
        };
        if overdue && reason != CloseReason::Switched {
            warn!(
                connection = id,
                agent = sink.agent_id(),
                address = dial.address,
                reason = %reason,
                from_endpoint = down.bytes,
                "the client reads more slowly than its endpoint sends: closing this connection, other \
                 connections go on. A stock agent cannot be slowed down for one connection; a \
                 culvert-agent with flow control for each connection can. For longer bursts raise \
                 --excess-buffer-bytes or --stall-timeout"
            );
        }
        self.closed(reason);
        debug!(
            connection = id,
            agent = sink.agent_id(),
            agent_connection = sink.connection(),
            address = dial.address,
            reason = %reason,
            to_endpoint = up.bytes,
            from_endpoint = down.bytes,
            seconds = started.elapsed().as_secs_f64(),
            "connection closed"
        );
        sink.end(reason, &self.tasks);
        reason
    }

    /// Counts the end of a connection.
    pub fn closed(&self, reason: CloseReason) {
        if let Some((_, counter)) = self.closed.iter().find(|(r, _)| *r == reason) {
            counter.increment(1);
        }
    }

    /// Warns the operator about a dial without a connected peer. Other failures, such as errors that the
    /// agent reports about the endpoint, concern only the client.
    pub fn log_failure(&self, dial: &Dial, error: &DialError) {
        match error {
            DialError::NoAgent => warn!(
                address = dial.address,
                "no agent is connected: check that agents run, reach this server's agent port, \
                 and trust its certificate"
            ),
            DialError::NoClient => warn!(
                address = dial.address,
                "no OpenVPN client with a route to the address is connected: check that the client runs, \
                 reaches this server's OpenVPN port, and trusts its certificate"
            ),
            error => debug!(address = dial.address, %error, "dial failed"),
        }
    }
}
