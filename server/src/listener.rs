//! The way from an accepted socket to a served protocol: TLS, HTTP/2, and the deadlines and counters for
//! peers that never get that far.

mod calls;
pub(crate) mod path_aware;

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use culvert_host::net::admission::{Admission, AdmissionLimits, Candidate, Gated, Unadmitted};
use culvert_host::net::networks::Networks;
use culvert_host::net::proxy_protocol::{self, HeaderError, Refused};
use culvert_host::tls;
use culvert_host::tls::reload::ServerTls;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::sleep;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, warn};

pub(crate) use self::calls::PeerConnection;
use crate::metrics::{Listener, RejectReason, ServerMetrics};

/// Longest time for a peer's first request on an authenticated connection.
pub(crate) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(15);

/// Limits for peers that are not authenticated yet. A peer costs about 40 KiB in the TLS handshake. The header fields of its
/// first request, and the errors of its streams, cost at most 200 KiB in HTTP/2, so all slots together cost at most 60 MiB.
/// The deadline leaves an agent 5 s for the handshake, if the review of its token takes the longest possible time of 25 s.
pub(crate) const ADMISSION: AdmissionLimits = AdmissionLimits {
    peers: 256,
    bytes: 80 * 1024,
    deadline: Duration::from_secs(30),
    grace: Duration::from_secs(1),
};

/// State shared by the connections of a listener.
pub(crate) struct ListenerContext {
    /// Name of the listener in metrics and logs.
    pub kind: Listener,
    /// TLS configuration; `None` on Unix sockets.
    pub tls: Option<ServerTls>,
    /// Idle time before a peer is pinged.
    pub keepalive: Duration,
    /// Tracks the tasks.
    pub tasks: TaskTracker,
    /// Ends all tasks at once.
    pub shutdown: CancellationToken,
    /// Metrics of the server.
    pub metrics: Arc<ServerMetrics>,
    /// Slots for peers before their admission.
    pub admission: Arc<Admission>,
    /// Networks of load balancers that send the PROXY protocol.
    proxies: Networks,
}

/// Logs a refused peer with the reason as a warning, then counts the peer. When the count changes, the log line is thus
/// already written.
fn reject(metrics: &ServerMetrics, kind: Listener, reason: RejectReason, peer: &str, why: &str) {
    let (listener, label) = (kind.as_str(), reason.as_str());
    warn!(listener, reason = label, peer, why, "connection refused");
    metrics.rejected.get((kind, reason)).increment(1);
}

/// Logs and counts a peer whose TLS handshake failed.
pub(crate) fn handshake_failed(
    metrics: &ServerMetrics,
    kind: Listener,
    peer: &str,
    error: &io::Error,
) {
    let reason = match error.kind() {
        // A load balancer's port check connects and leaves without sending a byte.
        io::ErrorKind::UnexpectedEof
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::BrokenPipe => {
            debug!(
                listener = kind.as_str(),
                peer, "the peer left during the TLS handshake"
            );
            let labels = (kind, RejectReason::HandshakeFailed);
            return metrics.rejected.get(labels).increment(1);
        }
        io::ErrorKind::TimedOut => RejectReason::Timeout,
        _ => RejectReason::HandshakeFailed,
    };
    reject(metrics, kind, reason, peer, &tls::explain(error));
}

impl ListenerContext {
    /// Creates the shared state of a listener.
    pub(crate) fn new(
        kind: Listener,
        tls: Option<ServerTls>,
        keepalive: Duration,
        tasks: TaskTracker,
        shutdown: CancellationToken,
        metrics: Arc<ServerMetrics>,
        proxies: Networks,
    ) -> Arc<Self> {
        Arc::new(Self {
            kind,
            tls,
            keepalive,
            tasks,
            shutdown,
            metrics,
            admission: Admission::new(ADMISSION),
            proxies,
        })
    }

    /// Counts a refused peer.
    pub(crate) fn count(&self, reason: RejectReason) {
        self.metrics.rejected.get((self.kind, reason)).increment(1);
    }

    /// Logs and counts a refused peer.
    pub(crate) fn reject(&self, reason: RejectReason, peer: &str, why: &str) {
        reject(&self.metrics, self.kind, reason, peer, why);
    }

    /// Takes a slot for a new peer and limits what the peer may send before its admission. Returns also the
    /// address: behind a load balancer, it is the client's. Returns `None` at shutdown and for a refused peer,
    /// which is counted and logged.
    pub(crate) async fn accept(
        &self,
        stream: TcpStream,
        peer: SocketAddr,
    ) -> Option<(Gated<TcpStream>, Arc<Candidate>, SocketAddr)> {
        let entering = proxy_protocol::enter(&stream, peer, &self.proxies, &self.admission);
        match self.shutdown.run_until_cancelled(entering).await? {
            Ok((source, candidate)) => {
                let stream = self.admission.gate(stream, &candidate);
                Some((stream, candidate, source))
            }
            Err(Refused { peer, why }) => {
                match why {
                    HeaderError::Left => {
                        debug!(listener = self.kind.as_str(), %peer, "the peer left before its PROXY protocol header");
                    }
                    HeaderError::Unadmitted(why) => self.refuse(why, &peer.to_string()),
                    why => {
                        let reason = RejectReason::ProxyHeader;
                        self.reject(reason, &peer.to_string(), &why.to_string());
                    }
                }
                None
            }
        }
    }

    /// Logs and counts a peer that was not admitted.
    pub(crate) fn refuse(&self, why: Unadmitted, peer: &str) {
        let reason = match why {
            Unadmitted::Late => RejectReason::Timeout,
            Unadmitted::Displaced => RejectReason::TooManyConnections,
        };
        self.reject(reason, peer, &why.to_string());
    }

    /// Runs the TLS handshake. Returns `None` after a failure, which is counted and logged.
    pub(crate) async fn handshake<S>(
        &self,
        stream: S,
        peer: &str,
        candidate: &Candidate,
    ) -> Option<TlsStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let tls = TlsAcceptor::from(self.tls.as_ref()?.get());
        // A peer that stalls must not delay shutdown.
        let done = tokio::select! {
            done = candidate.run(tls.accept(stream)) => done,
            () = self.shutdown.cancelled() => return None,
        };
        match done {
            Ok(Ok(mut stream)) => {
                stream.get_mut().1.set_buffer_limit(Some(tls::BUFFER_BYTES));
                Some(stream)
            }
            Ok(Err(error)) => {
                handshake_failed(&self.metrics, self.kind, peer, &error);
                None
            }
            Err(why) => {
                self.refuse(why, peer);
                None
            }
        }
    }

    /// Resolves when a connection ends, or after [`HANDSHAKE_TIMEOUT`] if no request has arrived by then. A peer without
    /// a request is counted and logged.
    async fn ends_or_asks(
        &self,
        connection: Pin<&mut impl Future<Output = Result<(), String>>>,
        asked: &AtomicBool,
        peer: &str,
    ) {
        let first_request = async {
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
            () = first_request => {
                self.reject(RejectReason::Timeout, peer, "no request after connecting");
            }
        }
    }
}
