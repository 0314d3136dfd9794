//! The front ends: the listeners that kube-apiserver connects to. A front end turns its protocol into a
//! dial and the two halves of a connection; the shared part is here.

pub(crate) mod grpc;
pub(crate) mod http_connect;

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use culvert_stream::connection::run_connection;
use culvert_stream::{CloseReason, Dial, HALF_OPEN_IDLE, Sink, Source, log_closed};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{info, warn};

use crate::backend::{Connection, DialError};
use crate::metrics::ServerMetrics;
use crate::router::Router;

/// State shared by all front-end connections of a server.
pub(crate) struct Frontend {
    /// Router for dials.
    pub router: Arc<Router>,
    /// Tracks the tasks of streams and connections.
    pub tasks: TaskTracker,
    /// Ends all streams and connections at once.
    pub shutdown: CancellationToken,
    /// Metrics of the server.
    pub metrics: Arc<ServerMetrics>,
    /// Tracks the calls of gRPC clients. A client ends its call once it has read the last bytes.
    pub calls: TaskTracker,
    /// Tracks ended connections whose last bytes are still on their way to an agent or an OpenVPN client.
    pub leaving: TaskTracker,
    next: AtomicI64,
}

// === impl Frontend ===

impl Frontend {
    /// Creates the shared part of a server's front ends.
    pub(crate) fn new(
        router: Arc<Router>,
        tasks: TaskTracker,
        shutdown: CancellationToken,
        metrics: Arc<ServerMetrics>,
    ) -> Arc<Self> {
        Arc::new(Self {
            router,
            tasks,
            shutdown,
            metrics,
            calls: TaskTracker::new(),
            leaving: TaskTracker::new(),
            next: AtomicI64::new(1),
        })
    }

    /// Returns a number for a new connection, unique in this process.
    pub(crate) fn next_connection(&self) -> i64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Carries a connection to its end, then counts and logs the close reason. `client_gone` resolves once
    /// the client has left, even while nothing is read from the client. Returns the reason for the end toward the
    /// client: a close by the endpoint is orderly, also if the client ended first.
    pub(crate) async fn run<S: Source, K: Sink>(
        &self,
        id: i64,
        dial: &Dial,
        client: (&mut S, &mut K),
        client_gone: Pin<&mut impl Future<Output = ()>>,
        mut connection: Box<Connection>,
    ) -> CloseReason {
        let mut ended = {
            let Connection { source, sink, cut } = &mut *connection;
            let cut = pin!(async {
                tokio::select! {
                    reason = cut.due() => reason,
                    () = client_gone => CloseReason::ClientLost,
                    () = self.shutdown.cancelled() => CloseReason::Shutdown,
                }
            });
            let bytes = self.metrics.streams.both_directions();
            run_connection(client, (source, sink), bytes, HALF_OPEN_IDLE, cut).await
        };
        let (reason, sink) = (ended.reason, connection.sink);
        if ended.is_overdue() {
            warn!(
                connection = id,
                agent = sink.agent_id(),
                address = dial.address,
                reason = %reason,
                from_endpoint = ended.from_endpoint,
                "the client reads more slowly than its endpoint sends: closing this connection, other \
                 connections continue. {}",
                sink.advice_for_slow_client()
            );
        }
        if reason == CloseReason::EndpointClosed && sink.client_ended() {
            ended.reason = CloseReason::ClientClosed;
        }
        self.closed(ended.reason);
        log_closed!(
            ended,
            connection = id,
            agent = sink.agent_id(),
            agent_connection = sink.connection(),
            address = dial.address
        );
        sink.end(reason, &self.leaving);
        reason
    }

    /// Counts the end of a connection.
    pub(crate) fn closed(&self, reason: CloseReason) {
        self.metrics.streams.closed.get(reason).increment(1);
    }

    /// Logs a failed dial, as a warning if the tunnel or a flag is the cause. The log limits the number of lines.
    pub(crate) fn log_failure(&self, dial: &Dial, error: &DialError) {
        match error {
            DialError::NoAgent => warn!(
                address = dial.address,
                "no agent for the address is available: check that agents run, reach this server's agent \
                 port, and trust its certificate; check --agent-identifiers of the agents if \
                 --proxy-strategies is set (the lines \"agent connected\" and `culvert status` show them), and \
                 --max-connections-per-agent"
            ),
            DialError::NoClient => warn!(
                address = dial.address,
                "no OpenVPN client with a route to the address is connected: check that the client runs, \
                 reaches this server's OpenVPN port, and trusts its certificate"
            ),
            DialError::TooManyDials(limit) => warn!(
                limit,
                "dial refused: too many dials wait for an answer; check that agents answer, or raise \
                 --max-pending-dials"
            ),
            DialError::TooLong(_) => warn!(%error, "dial refused"),
            DialError::Denied(_) => warn!(address = dial.address, %error, "dial denied"),
            DialError::Stream(_, Some(peer)) => {
                info!(peer, address = dial.address, %error, "dial failed");
            }
            error => info!(address = dial.address, %error, "dial failed"),
        }
    }
}
