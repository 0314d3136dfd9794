//! From an accepted socket to a served protocol: TLS, HTTP/2, and the deadlines and counters for
//! peers that never get that far.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use culvert_host::runtime::TrackedExecutor;
use culvert_host::tls;
use culvert_konnectivity::grpc;
use http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, warn};

use crate::metrics::{Listener, RejectReason, ServerMetrics};

/// How long a peer may take for its TLS handshake, and again until its first request.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(15);

/// How many TLS handshakes run at once on a listener; more wait their turn. Each costs about
/// 40 KiB and, if the peer stalls, [`HANDSHAKE_TIMEOUT`].
const MAX_HANDSHAKES: usize = 4096;

/// How long the peer may take to answer a ping, as upstream's.
const PING_TIMEOUT: Duration = Duration::from_secs(20);

/// Bytes that an agent may send ahead of our reading: its one stream carries all its connections.
/// Bounds throughput to two thirds of window / RTT, because `h2` gives a window back once that is
/// half of what is left of it: 16 MiB allow 106 MiB/s at 100 ms. As large as grpc-go's grows.
pub const AGENT_WINDOW_BYTES: u32 = 16 * 1024 * 1024;

/// The same for a front-end stream, which carries one connection and comes from the same machine
/// or network.
pub const CLIENT_WINDOW_BYTES: u32 = 1024 * 1024;

/// The same for all streams of a connection. It also sets the budget of small unread DATA frames,
/// beyond which `h2` ends the connection.
const CONNECTION_WINDOW_BYTES: u32 = 32 * 1024 * 1024;

/// The largest frame that we take; stock peers send 16 KiB at most.
const FRAME_BYTES: u32 = 64 * 1024;

/// The largest header block that we take; tokens make it a few KiB.
const HEADER_BYTES: u32 = 64 * 1024;

/// Cuts the connection that a request came in by; in the request's extensions.
#[derive(Clone)]
pub struct ConnectionCut(pub CancellationToken);

/// What the connections of one listener share.
pub struct Door {
    /// Names the listener in metrics and logs.
    pub kind: Listener,
    /// Terminates TLS, except on Unix sockets.
    pub tls: Option<TlsAcceptor>,
    /// Idle time after which a peer is pinged.
    pub keepalive: Duration,
    /// Owns the tasks.
    pub tasks: TaskTracker,
    /// Ends them at once.
    pub shutdown: CancellationToken,
    /// The server's series.
    pub metrics: Arc<ServerMetrics>,
    handshakes: Semaphore,
}

impl Door {
    /// A door for one listener.
    pub fn new(
        kind: Listener,
        tls: Option<Arc<rustls::ServerConfig>>,
        keepalive: Duration,
        tasks: TaskTracker,
        shutdown: CancellationToken,
        metrics: Arc<ServerMetrics>,
    ) -> Arc<Self> {
        Arc::new(Self {
            kind,
            tls: tls.map(TlsAcceptor::from),
            keepalive,
            tasks,
            shutdown,
            metrics,
            handshakes: Semaphore::new(MAX_HANDSHAKES),
        })
    }

    /// Counts a peer that was turned away, and says why once at a level that operators see. In the
    /// order that lets who sees the count find the line.
    pub fn reject(&self, reason: RejectReason, peer: &str, why: &str) {
        warn!(listener = ?self.kind, peer, why, "connection refused");
        self.metrics.rejected(self.kind, reason).increment(1);
    }

    /// Runs the TLS handshake; `None` if the peer failed it, which is counted and logged.
    pub async fn handshake<S>(&self, stream: S, peer: &str) -> Option<TlsStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let tls = self.tls.as_ref()?;
        let handshake = async {
            let _turn = self.handshakes.acquire().await.ok()?;
            Some(timeout(HANDSHAKE_TIMEOUT, tls.accept(stream)).await)
        };
        // A peer that stalls must not hold up the end of the program.
        let done = tokio::select! {
            done = handshake => done?,
            () = self.shutdown.cancelled() => return None,
        };
        match done {
            Ok(Ok(mut stream)) => {
                stream.get_mut().1.set_buffer_limit(Some(tls::BUFFER_BYTES));
                Some(stream)
            }
            // A load balancer's port check: connected and left without a word.
            Ok(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => {
                debug!(listener = ?self.kind, peer, "left during the TLS handshake");
                let counter = self
                    .metrics
                    .rejected(self.kind, RejectReason::HandshakeFailed);
                counter.increment(1);
                None
            }
            Ok(Err(error)) => {
                self.reject(RejectReason::HandshakeFailed, peer, &tls::explain(&error));
                None
            }
            Err(_) => {
                self.reject(
                    RejectReason::Timeout,
                    peer,
                    "the TLS handshake took too long",
                );
                None
            }
        }
    }

    /// Serves gRPC on one connection until it ends. A peer without a request is cut after
    /// [`HANDSHAKE_TIMEOUT`]; afterwards it may idle.
    pub async fn serve_grpc<I, S>(&self, io: I, peer: &str, service: S)
    where
        I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        S: grpc::Service + Clone + Send + Sync + 'static,
    {
        let asked = Arc::new(AtomicBool::new(false));
        let seen = asked.clone();
        let cut = CancellationToken::new();
        let of_connection = ConnectionCut(cut.clone());
        let service = hyper::service::service_fn(move |mut request: Request<Incoming>| {
            seen.store(true, Ordering::Relaxed);
            request.extensions_mut().insert(of_connection.clone());
            let service = service.clone();
            async move { Ok::<_, Infallible>(grpc::answer(&service, request).await) }
        });
        let window = match self.kind {
            Listener::Agent => AGENT_WINDOW_BYTES,
            _ => CLIENT_WINDOW_BYTES,
        };
        let connection = http2::Builder::new(TrackedExecutor(self.tasks.clone()))
            .timer(TokioTimer::new())
            .initial_stream_window_size(window)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .max_frame_size(FRAME_BYTES)
            .max_header_list_size(HEADER_BYTES)
            .max_concurrent_streams(None)
            .keep_alive_interval(self.keepalive)
            .keep_alive_timeout(PING_TIMEOUT)
            // No gRPC server sends one.
            .auto_date_header(false)
            .serve_connection(TokioIo::new(io), service);
        let idle = async {
            sleep(HANDSHAKE_TIMEOUT).await;
            if asked.load(Ordering::Relaxed) {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            ended = connection => match ended {
                Err(error) if !asked.load(Ordering::Relaxed) => {
                    self.reject(RejectReason::Garbage, peer, &format!("not gRPC: {error}"));
                }
                Err(error) => debug!(peer, %error, "connection broke"),
                Ok(()) => {}
            },
            () = idle => self.reject(RejectReason::Timeout, peer, "no request after connecting"),
            () = cut.cancelled() => {}
            () = self.shutdown.cancelled() => {}
        }
    }
}
