//! One client: opens a CONNECT stream, then copies bytes both ways until either side ends.
//!
//! The node tunnel reads nothing from the client until the proxy has answered 200, so the client's first
//! bytes wait in the socket. A refused client and a client with a broken stream get an orderly close, as with
//! Envoy.

use std::collections::HashMap;
use std::future::pending;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use culvert_host::net::socket::Socket;
use culvert_host::telemetry::metrics::GaugeGuard;
use culvert_native::halves::{NativeSink, NativeSource, halves};
use culvert_stream::connection::run_connection;
use culvert_stream::io::{ReadSource, WriteSink, linger_close};
use culvert_stream::{CloseReason, log_closed};
use h2::Reason;
use http::{StatusCode, Uri};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, warn};

use super::config::Route;
use super::metrics::{Refusal, TunnelMetrics};
use super::pool::{ConnectionPool, PoolError, Reach, Seat, Stream};

/// Longest wait for the proxy's answer to a request. The proxy tries several endpoints, for one second each.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Longest time without movement in a half-closed connection, after one direction has ended: the idle limit of a node's
/// Envoy. The proxy's limit is configurable and should decide.
const HALF_CLOSED_IDLE: Duration = Duration::from_secs(3600);

/// Header of a 503 beyond a limit of connections, as in Envoy (`x-envoy-overloaded`).
const OVERLOADED_HEADER: &str = "x-envoy-overloaded";

/// Shortest time between two warnings about the same kind of refusal on one listener.
const WARN_INTERVAL: Duration = Duration::from_secs(10);

/// Carries the clients of one listener.
pub(crate) struct ClientHandler<R> {
    listener: String,
    target: Uri,
    pool: Arc<ConnectionPool<R>>,
    metrics: Arc<TunnelMetrics>,
    tasks: TaskTracker,
    cut: CancellationToken,
    warned: Mutex<HashMap<Refusal, Instant>>,
}

/// Returns the source and the sink of a client's socket.
pub(crate) fn client_halves(stream: TcpStream) -> Halves<ClientSocket, ClientSocket> {
    let socket = Socket::new(Arc::new(stream), false);
    let (source, sink) = halves_of(socket.clone(), socket);
    (
        source.watched(Socket::is_over),
        sink.measured(Socket::unacknowledged),
    )
}

/// Returns the source and the sink of a client.
fn halves_of<I, O>(read: I, write: O) -> Halves<I, O> {
    let lost = CloseReason::ClientLost;
    let source = ReadSource::new(read, Bytes::new(), lost);
    (source, WriteSink::new(write, lost))
}

/// Reason why a client got no stream.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refused {
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error(
        "the clients of this address have half of all streams, or as many as are free: check what opens them, and raise \
         --connections"
    )]
    Share,
    #[error(
        "the proxy answered 404, so this Service is not exposed: check the authority of --listen, \
         and on the seed the Service's annotation nodeport-proxy.k8s.io/expose, which must name \
         Tunneling"
    )]
    NotFound,
    #[error(
        "the proxy answered 503, so no endpoint of this Service accepts connections: check its \
         pods on the seed"
    )]
    Unavailable,
    #[error(
        "the proxy answered 503, because the Service or the address of this node has as many connections as the \
         proxy permits: raise --max-connections of the nodeport-proxy, or its limit of open files; its log names the limit"
    )]
    Overloaded,
    #[error(
        "the proxy answered 403, because this Service does not allow the address of this node: check the Service's \
         annotation nodeport-proxy.k8s.io/allowed-networks on the seed"
    )]
    Forbidden,
    #[error("the proxy answered {0}: check that --proxy is the CONNECT port of a nodeport-proxy")]
    Status(StatusCode),
    #[error("the proxy did not answer within {ANSWER_TIMEOUT:?}: check its load and its log")]
    NoAnswer,
    #[error(
        "the proxy is silent and answers no PING: check that it runs, and the network between this \
         node and the proxy"
    )]
    Silent,
    #[error("the proxy ended the stream before it answered ({0}): check its log")]
    Reset(h2::Error),
    #[error("the connection to the proxy ended before the answer ({0}): check the proxy's log")]
    Lost(h2::Error),
}

type ClientSocket = Socket<Arc<TcpStream>>;

/// Source and sink of a client.
type Halves<I, O> = (ReadSource<I>, WriteSink<O>);

/// A CONNECT stream that the proxy accepted.
struct AcceptedStream {
    source: NativeSource,
    sink: NativeSink,
    /// Counts the stream in the pool and in the metrics.
    counted: (Seat, GaugeGuard),
}

// === impl ClientHandler ===

impl<R: Reach> ClientHandler<R> {
    /// Creates a handler for the clients of `route`, with streams from `pool`. The caller must run
    /// [`Self::serve`] on `tasks`. The handler spawns more tasks on `tasks`: to serve a client on another
    /// thread, and to write the last bytes of a stream. Firing `cut` disconnects all clients at once.
    pub(crate) fn new(
        route: &Route,
        pool: Arc<ConnectionPool<R>>,
        metrics: Arc<TunnelMetrics>,
        tasks: TaskTracker,
        cut: CancellationToken,
    ) -> Self {
        Self {
            listener: route.listen.to_string(),
            target: Uri::from(route.authority.clone()),
            pool,
            metrics,
            tasks,
            cut,
            warned: Mutex::default(),
        }
    }

    /// Opens a stream for one client, then serves the client on the thread that drives the stream's
    /// connection. `client` returns the client's source and sink, for use on the thread that calls the
    /// closure.
    pub(crate) async fn serve<C, I, O>(self: Arc<Self>, client: C, peer: SocketAddr)
    where
        C: FnOnce() -> io::Result<Halves<I, O>> + Send + 'static,
        I: AsyncRead + Unpin + Send + 'static,
        O: AsyncWrite + Unpin + Send + 'static,
    {
        let counted = self.metrics.client();
        let share = self.pool.share(peer.ip());
        let open = async {
            match &share {
                Some(_) => self.open().await,
                None => Err(Refused::Share),
            }
        };
        let opened = tokio::select! {
            opened = open => opened,
            () = self.cut.cancelled() => return self.metrics.closed(CloseReason::Shutdown),
        };
        let stream = match opened {
            Ok(stream) => stream,
            Err(refused) => {
                drop(share);
                self.refuse(&refused, peer);
                if let Ok((source, sink)) = client() {
                    linger_close(source.into_inner(), sink.into_inner()).await;
                }
                return;
            }
        };
        let (shard, handler) = (stream.counted.0.shard(), self.clone());
        let served = handler.run_connection(stream, (counted, share), client, peer);
        self.pool.shards().spawn(shard, &self.tasks, served);
    }

    /// Opens a stream. Repeats the request once on another connection if the connection ended or became silent
    /// before the answer, which is safe because no client bytes were sent.
    async fn open(&self) -> Result<AcceptedStream, Refused> {
        match self.request(true).await {
            Err(error @ (Refused::Lost(_) | Refused::Silent)) => {
                debug!(%error, "no answer on this connection, repeating the request");
                self.request(false).await
            }
            answer => answer,
        }
    }

    /// Makes one request. Only a request that `may_move` ends early if its connection becomes silent: the proxy may
    /// answer the last request late.
    async fn request(&self, may_move: bool) -> Result<AcceptedStream, Refused> {
        let Stream {
            answer,
            send,
            inbound,
            seat,
        } = self.pool.open(&self.target).await?;
        self.metrics.requests.increment(1);
        let counted = (seat, GaugeGuard::new(&self.metrics.streams));
        let mut is_silent = false;
        let silent = async {
            counted.0.is_silent().await;
            is_silent = true;
            if !may_move {
                pending::<()>().await;
            }
        };
        let answer = tokio::select! {
            answer = timeout(ANSWER_TIMEOUT, answer) => answer,
            () = silent => return Err(Refused::Silent),
        };
        let late = |_| match is_silent {
            true => Refused::Silent,
            false => Refused::NoAnswer,
        };
        let answer = answer.map_err(late)?.map_err(|error| {
            // The proxy has not processed a stream reset with REFUSED_STREAM (RFC 9113, section 8.7), so the
            // request may be repeated on another connection.
            match error.is_reset() && error.reason() != Some(Reason::REFUSED_STREAM) {
                true => Refused::Reset(error),
                false => Refused::Lost(error),
            }
        })?;
        match answer.status() {
            status if status.is_success() => {}
            StatusCode::NOT_FOUND => return Err(Refused::NotFound),
            StatusCode::FORBIDDEN => return Err(Refused::Forbidden),
            StatusCode::SERVICE_UNAVAILABLE if answer.headers().contains_key(OVERLOADED_HEADER) => {
                return Err(Refused::Overloaded);
            }
            StatusCode::SERVICE_UNAVAILABLE => return Err(Refused::Unavailable),
            other => return Err(Refused::Status(other)),
        }
        let (source, sink) = halves(send, answer.into_body(), inbound, CloseReason::ServerLost);
        Ok(AcceptedStream {
            source,
            sink: sink.toward_any_peer(),
            counted,
        })
    }

    /// Carries the connection of a client over an accepted stream. `held` is dropped last.
    fn run_connection<H, C, I, O>(
        self: Arc<Self>,
        stream: AcceptedStream,
        held: H,
        client: C,
        peer: SocketAddr,
    ) -> impl Future<Output = ()> + Send + 'static
    where
        H: Send + Sync + 'static,
        C: FnOnce() -> io::Result<Halves<I, O>> + Send + 'static,
        I: AsyncRead + Unpin + Send + 'static,
        O: AsyncWrite + Unpin + Send + 'static,
    {
        let AcceptedStream {
            mut source,
            mut sink,
            counted,
        } = stream;
        // Not an async function, which would keep its arguments twice.
        async move {
            // Borrowed, because the task would keep a second copy of a moved value.
            let _held = &held;
            let (mut from_client, mut to_client) = match client() {
                Ok(halves) => halves,
                Err(error) => {
                    warn!(%peer, %error, "cannot serve an accepted connection");
                    self.metrics.closed(CloseReason::ClientLost);
                    return sink.end(CloseReason::ClientLost, &self.tasks);
                }
            };
            let cut = pin!(async {
                self.cut.cancelled().await;
                CloseReason::Shutdown
            });
            let ended = run_connection(
                (&mut from_client, &mut to_client),
                (&mut source, &mut sink),
                [self.metrics.sent.clone(), self.metrics.received.clone()],
                HALF_CLOSED_IDLE,
                cut,
            )
            .await;
            let reason = ended.reason;
            self.metrics.closed(reason);
            log_closed!(ended, %peer, listener = self.listener);
            sink.end(reason, &self.tasks);
            drop((source, counted));
            match reason {
                CloseReason::Finished | CloseReason::ClientLost | CloseReason::Shutdown => {}
                _ => linger_close(from_client.into_inner(), to_client.into_inner()).await,
            }
        }
    }

    fn refuse(&self, refused: &Refused, peer: SocketAddr) {
        let kind = refused.kind();
        self.metrics.refused.get(kind).increment(1);
        let (listener, target) = (&self.listener, &self.target);
        if self.is_warning_due(kind) {
            warn!(%peer, listener, destination = %target, reason = %refused, "closing a client");
        } else {
            debug!(%peer, listener, destination = %target, reason = %refused, "closing a client");
        }
    }

    fn is_warning_due(&self, kind: Refusal) -> bool {
        let now = Instant::now();
        let mut warned = self.warned.lock();
        let is_warning_due = warned
            .get(&kind)
            .is_none_or(|at| now - *at >= WARN_INTERVAL);
        if is_warning_due {
            warned.insert(kind, now);
        }
        is_warning_due
    }
}

// === impl Refused ===

impl Refused {
    fn kind(&self) -> Refusal {
        match self {
            Self::Pool(PoolError::Unreachable(_)) => Refusal::Unreachable,
            Self::Pool(PoolError::Full) => Refusal::Full,
            Self::Share => Refusal::TooManyConnections,
            Self::NotFound => Refusal::NotFound,
            Self::Unavailable | Self::Overloaded => Refusal::Unavailable,
            Self::Forbidden | Self::Status(_) => Refusal::OtherStatus,
            Self::NoAnswer | Self::Silent => Refusal::NoAnswer,
            Self::Reset(_) | Self::Lost(_) => Refusal::Lost,
        }
    }
}

#[cfg(test)]
mod tests;
