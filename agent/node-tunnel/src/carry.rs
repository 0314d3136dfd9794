//! One client: a CONNECT stream is asked for, then bytes pass both ways until either side ends.
//!
//! Nothing is read from the client before the proxy has answered 200, so its first bytes wait in
//! its socket. A client that is turned away, or whose stream breaks, is closed in order, as Envoy
//! does.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use culvert_host::telemetry::metrics::GaugeGuard;
use culvert_native::halves::{NativeSink, NativeSource, halves};
use culvert_stream::CloseReason;
use culvert_stream::io::{ReadSource, WriteSink, leave};
use culvert_stream::pump::{Meter, pump};
use h2::Reason;
use http::{StatusCode, Uri};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, warn};

use super::config::Route;
use super::metrics::{Refusal, TunnelMetrics};
use super::pool::{Pool, PoolError, Reach, Seat, Stream};

/// How long the proxy may take to answer a request. It tries several endpoints, a second each.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// How often one kind of refusal is told, for each listener.
const TELL_EVERY: Duration = Duration::from_secs(10);

/// Carries the clients of one listener.
pub struct Carrier<R> {
    listener: String,
    target: Uri,
    pool: Arc<Pool<R>>,
    metrics: Arc<TunnelMetrics>,
    tasks: TaskTracker,
    cut: CancellationToken,
    told: Mutex<HashMap<Refusal, Instant>>,
}

/// Why a client got no stream.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// There is no connection to ask on.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The proxy knows no such Service.
    #[error(
        "the proxy answered 404, so this Service is not exposed: check the authority of --listen, \
         and on the seed the Service's annotation nodeport-proxy.k8s.io/expose, which has to name \
         Tunneling"
    )]
    NotFound,
    /// No endpoint of the Service accepts.
    #[error(
        "the proxy answered 503, so no endpoint of this Service accepts connections: check its \
         pods on the seed"
    )]
    Unavailable,
    /// The proxy gave another answer.
    #[error("the proxy answered {0}: check that --proxy is the CONNECT port of a nodeport-proxy")]
    Status(StatusCode),
    /// The proxy gave no answer in time.
    #[error("the proxy did not answer within {ANSWER_TIMEOUT:?}: check its load and its log")]
    NoAnswer,
    /// The proxy gave the stream up.
    #[error("the proxy ended the stream before it answered ({0}): check its log")]
    Reset(h2::Error),
    /// The connection took the request with it.
    #[error("the connection to the proxy ended before the answer ({0}): check the proxy's log")]
    Lost(h2::Error),
}

/// A stream that the proxy has accepted.
struct Tunnel {
    source: NativeSource,
    sink: NativeSink,
    /// Counts the stream, at the pool and in the metrics.
    counted: (Seat, GaugeGuard),
}

// === impl Carrier ===

impl<R: Reach> Carrier<R> {
    /// Serves the clients of `route` with streams of `pool`. `tasks`, which has to track what serves a
    /// client, gets what goes on elsewhere or later; `cut` ends all clients at once.
    pub fn new(
        route: &Route,
        pool: Arc<Pool<R>>,
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
            told: Mutex::default(),
        }
    }

    /// Opens a stream for one client, which is then served to its end by the thread of the connection
    /// that has the stream. `client` gives the ways from and to the client, on the thread that calls it.
    pub async fn serve<C, I, O>(self: Arc<Self>, client: C, peer: SocketAddr)
    where
        C: FnOnce() -> io::Result<(I, O)> + Send + 'static,
        I: AsyncRead + Unpin + Send + 'static,
        O: AsyncWrite + Unpin + Send + 'static,
    {
        let counted = self.metrics.client();
        let opened = tokio::select! {
            opened = self.open() => opened,
            () = self.cut.cancelled() => return self.metrics.closed(CloseReason::Shutdown),
        };
        let tunnel = match opened {
            Ok(tunnel) => tunnel,
            Err(refused) => {
                self.refuse(&refused, peer);
                if let Ok((read, write)) = client() {
                    leave(read, write).await;
                }
                return;
            }
        };
        let (shard, carrier) = (tunnel.counted.0.shard(), self.clone());
        self.pool.shards().spawn(shard, &self.tasks, async move {
            let _counted = counted;
            match client() {
                Ok((read, write)) => carrier.carry(tunnel, read, write, peer).await,
                Err(error) => {
                    warn!(%peer, %error, "cannot serve an accepted connection");
                    carrier.metrics.closed(CloseReason::ClientLost);
                    tunnel.sink.end(CloseReason::ClientLost, &carrier.tasks);
                }
            }
        });
    }

    /// Asks once more if the connection took the request with it: nothing of the client was sent.
    async fn open(&self) -> Result<Tunnel, Refused> {
        match self.ask().await {
            Err(Refused::Lost(error)) => {
                debug!(%error, "the connection ended before the answer, asking again");
                self.ask().await
            }
            asked => asked,
        }
    }

    async fn ask(&self) -> Result<Tunnel, Refused> {
        let Stream {
            answer,
            send,
            inbound,
            seat,
        } = self.pool.open(&self.target).await?;
        self.metrics.requests.increment(1);
        let counted = (seat, GaugeGuard::new(&self.metrics.streams));
        let answer = timeout(ANSWER_TIMEOUT, answer).await;
        let answer = answer.map_err(|_| Refused::NoAnswer)?.map_err(|error| {
            // A refused stream was not looked at: another connection may take it.
            match error.is_reset() && error.reason() != Some(Reason::REFUSED_STREAM) {
                true => Refused::Reset(error),
                false => Refused::Lost(error),
            }
        })?;
        match answer.status() {
            status if status.is_success() => {}
            StatusCode::NOT_FOUND => return Err(Refused::NotFound),
            StatusCode::SERVICE_UNAVAILABLE => return Err(Refused::Unavailable),
            other => return Err(Refused::Status(other)),
        }
        let (source, sink) = halves(send, answer.into_body(), inbound, CloseReason::ServerLost);
        Ok(Tunnel {
            source,
            sink: sink.toward_any_peer(),
            counted,
        })
    }

    async fn carry<I, O>(&self, tunnel: Tunnel, read: I, write: O, peer: SocketAddr)
    where
        I: AsyncRead + Unpin + Send,
        O: AsyncWrite + Unpin + Send,
    {
        let Tunnel {
            mut source,
            mut sink,
            counted,
        } = tunnel;
        let mut up = Meter::new(self.metrics.sent.clone());
        let mut down = Meter::new(self.metrics.received.clone());
        let mut from_client = ReadSource::new(read, Bytes::new(), CloseReason::ClientLost);
        let mut to_client = WriteSink::new(write, CloseReason::ClientLost);
        let reason = tokio::select! {
            reason = pump(
                (&mut from_client, &mut to_client),
                (&mut source, &mut sink),
                &mut up,
                &mut down,
            ) => reason,
            () = self.cut.cancelled() => CloseReason::Shutdown,
        };
        self.metrics.closed(reason);
        debug!(
            %peer,
            listener = self.listener,
            %reason,
            to_proxy = up.bytes,
            from_proxy = down.bytes,
            "connection closed"
        );
        sink.end(reason, &self.tasks);
        drop((source, counted));
        match reason {
            CloseReason::Finished | CloseReason::ClientLost | CloseReason::Shutdown => {}
            _ => leave(from_client.into_inner(), to_client.into_inner()).await,
        }
    }

    fn refuse(&self, refused: &Refused, peer: SocketAddr) {
        let kind = refused.kind();
        self.metrics.refused(kind);
        let (listener, target) = (&self.listener, &self.target);
        if self.is_news(kind) {
            warn!(%peer, listener, %target, reason = %refused, "closing a client");
        } else {
            debug!(%peer, listener, %target, reason = %refused, "closing a client");
        }
    }

    fn is_news(&self, kind: Refusal) -> bool {
        let now = Instant::now();
        let mut told = self.told.lock();
        let is_news = told.get(&kind).is_none_or(|at| now - *at >= TELL_EVERY);
        if is_news {
            told.insert(kind, now);
        }
        is_news
    }
}

// === impl Refused ===

impl Refused {
    fn kind(&self) -> Refusal {
        match self {
            Self::Pool(PoolError::Unreachable(_)) => Refusal::Unreachable,
            Self::Pool(PoolError::Full) => Refusal::Full,
            Self::NotFound => Refusal::NotFound,
            Self::Unavailable => Refusal::Unavailable,
            Self::Status(_) => Refusal::OtherStatus,
            Self::NoAnswer => Refusal::NoAnswer,
            Self::Reset(_) | Self::Lost(_) => Refusal::Lost,
        }
    }
}

#[cfg(test)]
mod tests;
