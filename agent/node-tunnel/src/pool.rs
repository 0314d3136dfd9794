//! The connections to the proxy: a few, kept, and shared by all streams.
//!
//! One task dials, one dial at a time ([`Pool::run`]), so that all who wait share it and hear of
//! its failure at once. It keeps one connection open even when nobody needs it, and opens further
//! ones, up to the limit, while each carries a stream. A connection that broke, was told to end
//! (GOAWAY) or does not answer a PING gets no new streams and is replaced.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use culvert_host::flags::HostPort;
use culvert_host::net::dial::dial;
use culvert_host::net::pacing::spare_pacing;
use culvert_host::net::readahead::ReadAhead;
use culvert_host::runtime::shards::Shards;
use culvert_host::telemetry::metrics::GaugeGuard;
use culvert_native::halves::Chunk;
use culvert_native::link::{Opener, Requests};
use culvert_native::window::Inbound;
use futures_util::FutureExt as _;
use h2::SendStream;
use h2::client::ResponseFuture;
use http::{Method, Request, Uri};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, info, warn};

use super::metrics::TunnelMetrics;

/// How long a dial may take, name lookup included, and how long a client waits for a connection
/// (the connect timeout that KKP gives Envoy).
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the proxy may take to answer a PING (KKP's setting for Envoy).
const PING_TIMEOUT: Duration = Duration::from_secs(5);

/// The pause behind a dial; it doubles from the first to the last as long as connections do not
/// last either. Half of it is jitter: after a restart of the proxy all nodes come at once.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LAST_PAUSE: Duration = Duration::from_secs(5);

/// Bytes that all streams of one connection together may hold for clients that do not read, before
/// each may hold no more than [`culvert_native::window::CROWDED_BYTES`].
const HELD_BYTES: usize = 64 * 1024 * 1024;

/// How far the proxy may send ahead on each stream, as a node's Envoy lets it. An Envoy at the seed
/// loses what this holds back when the endpoint closes first: with 1 MiB a download of 20 MiB was
/// cut, with 16 MiB, between two Envoys, one of 60 MB to a slow reader.
const WINDOW_BYTES: u32 = 16 * 1024 * 1024;

/// How long connections may take to close once nobody uses them any more.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);

/// How the proxy is reached.
pub trait Reach: Send + Sync + 'static {
    /// What lies below HTTP/2.
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// One try, name lookup included.
    fn reach(&self) -> impl Future<Output = Result<Self::Stream, String>> + Send;
}

/// TCP in plain text.
pub struct PlainTcp(pub HostPort);

/// The connections to one proxy.
pub struct Pool<R> {
    reach: R,
    limit: usize,
    shards: Shards,
    links: Mutex<Vec<Arc<Link>>>,
    /// The task that dials is to look again.
    look: Notify,
    /// Changes with each dial: why it failed, or `None` after a success.
    dialed: watch::Sender<Option<String>>,
    metrics: Arc<TunnelMetrics>,
    tasks: TaskTracker,
}

/// One connection that takes new streams.
struct Link {
    serial: u64,
    /// The thread that drives it.
    shard: usize,
    requests: Requests,
    inbound: Arc<Inbound>,
    streams: AtomicUsize,
}

/// A stream that was asked for.
pub struct Stream {
    /// What the proxy says to it.
    pub answer: ResponseFuture,
    /// The way to the proxy.
    pub send: SendStream<Chunk>,
    /// What counts the bytes of all streams of its connection.
    pub inbound: Arc<Inbound>,
    /// Its place in the connection, to be kept as long as the stream.
    pub seat: Seat,
}

/// Counts one stream of a connection.
pub struct Seat(Arc<Link>);

/// Why there is no stream.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    /// There is no connection, and the last dial failed or took too long.
    #[error(
        "cannot connect to the proxy: {0}; check --proxy, and that this node reaches that address"
    )]
    Unreachable(String),
    /// The proxy allows no more streams.
    #[error(
        "every connection carries as many streams as the proxy allows: raise --connections, or the \
         proxy's limit of concurrent streams"
    )]
    Full,
}

// === impl PlainTcp ===

impl Reach for PlainTcp {
    type Stream = ReadAhead<TcpStream>;

    async fn reach(&self) -> Result<Self::Stream, String> {
        let dialed = dial("tcp", &self.0.to_string(), CONNECT_TIMEOUT).await;
        let stream = dialed.map_err(|error| error.text)?;
        spare_pacing(&stream);
        Ok(ReadAhead::new(stream))
    }
}

// === impl Pool ===

impl<R: Reach> Pool<R> {
    /// A pool of at most `limit` connections, which `shards` share; [`run`](Self::run) opens them.
    pub fn new(reach: R, limit: usize, shards: Shards, metrics: Arc<TunnelMetrics>) -> Arc<Self> {
        Arc::new(Self {
            reach,
            limit,
            shards,
            links: Mutex::default(),
            look: Notify::new(),
            dialed: watch::Sender::new(None),
            metrics,
            tasks: TaskTracker::new(),
        })
    }

    /// The threads that drive connections.
    pub fn shards(&self) -> &Shards {
        &self.shards
    }

    /// Whether there is a connection for new streams.
    pub fn is_up(&self) -> bool {
        self.links.lock().iter().any(|link| link.takes_streams())
    }

    /// Asks for a stream to `target` on the connection with the fewest; without a connection it
    /// waits for one, [`CONNECT_TIMEOUT`] at most.
    ///
    /// # Errors
    /// See [`PoolError`].
    pub async fn open(&self, target: &Uri) -> Result<Stream, PoolError> {
        let opened = timeout(CONNECT_TIMEOUT, self.open_or_wait(target)).await;
        opened.unwrap_or_else(|_| {
            let last = self.dialed.borrow().clone();
            let reason = last.unwrap_or_else(|| "it takes too long".to_owned());
            Err(PoolError::Unreachable(reason))
        })
    }

    async fn open_or_wait(&self, target: &Uri) -> Result<Stream, PoolError> {
        // What is dialed from here on is heard of.
        let mut dialed = self.dialed.subscribe();
        loop {
            let opened = self.try_open(target);
            self.look.notify_one();
            if let Some(stream) = opened? {
                return Ok(stream);
            }
            // Never an error: the sender is `self`'s.
            let _ = dialed.changed().await;
            let failed = dialed.borrow_and_update().clone();
            if let Some(reason) = failed {
                return Err(PoolError::Unreachable(reason));
            }
        }
    }

    fn try_open(&self, target: &Uri) -> Result<Option<Stream>, PoolError> {
        let mut links = self.links.lock();
        links.retain(|link| link.takes_streams());
        let Some(link) = links.iter().min_by_key(|link| link.count()) else {
            return Ok(None);
        };
        let mut requests = link.requests.clone();
        if link.count() >= requests.current_max_send_streams() {
            // There may be one more soon.
            return match links.len() < self.limit {
                true => Ok(None),
                false => Err(PoolError::Full),
            };
        }
        let mut request = Request::new(());
        *request.method_mut() = Method::CONNECT;
        *request.uri_mut() = target.clone();
        // Fails if the connection broke a moment ago.
        let opened = requests.send_request(request, false).ok();
        Ok(opened.map(|(answer, send)| Stream {
            answer,
            send,
            inbound: link.inbound.clone(),
            seat: Seat::take(link),
        }))
    }

    /// Connects as needed until the token fires; then closes what is open. Streams should have
    /// ended by then: those that have not are cut after a second.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        stop.run_until_cancelled(self.keep(&stop)).await;
        // A connection that nobody can use any more ends in order, by itself.
        self.links.lock().clear();
        self.tasks.close();
        self.tasks.wait().await;
    }

    async fn keep(self: &Arc<Self>, stop: &CancellationToken) {
        let mut told = None;
        let mut pause = FIRST_PAUSE;
        for serial in 1.. {
            let contented = Instant::now();
            while !self.is_short() {
                self.look.notified().await;
            }
            if contented.elapsed() >= LAST_PAUSE {
                pause = FIRST_PAUSE;
            }
            let failed = self.connect(serial, stop).await.err();
            if let Some(reason) = &failed {
                self.metrics.connect_failed.increment(1);
                // The same failure again and again is told once.
                if failed == told {
                    debug!(reason, "still no connection to the proxy");
                } else {
                    warn!(
                        reason,
                        "cannot connect to the proxy, trying again: check --proxy, and that this \
                         node reaches that address"
                    );
                }
            }
            told.clone_from(&failed);
            self.dialed.send_replace(failed);
            sleep(pause.mul_f64(rand::random_range(0.5..1.0))).await;
            pause = (pause * 2).min(LAST_PAUSE);
        }
    }

    /// There is room for one more connection, and no idle one.
    fn is_short(&self) -> bool {
        let mut links = self.links.lock();
        links.retain(|link| link.takes_streams());
        links.len() < self.limit && links.iter().all(|link| link.count() > 0)
    }

    fn emptiest_shard(&self) -> usize {
        let links = self.links.lock();
        let count = |shard: &usize| links.iter().filter(|link| link.shard == *shard).count();
        (0..self.shards.count()).min_by_key(count).unwrap_or(0)
    }

    async fn connect(
        self: &Arc<Self>,
        serial: u64,
        stop: &CancellationToken,
    ) -> Result<(), String> {
        let inbound = Arc::new(Inbound::new(WINDOW_BYTES));
        let shard = self.emptiest_shard();
        let begin = timeout(CONNECT_TIMEOUT, self.clone().begin(inbound.clone()));
        let begun = self.shards.run_on(shard, begin).await;
        let begun = begun.map_err(|error| error.to_string())?;
        let (requests, opener) =
            begun.unwrap_or_else(|_| Err(format!("no connection within {CONNECT_TIMEOUT:?}")))?;
        self.metrics.connected.increment(1);
        info!(connection = serial, "connected to the proxy");
        self.links.lock().push(Arc::new(Link {
            serial,
            shard,
            requests,
            inbound,
            streams: AtomicUsize::new(0),
        }));
        let drive = self.clone().drive(serial, opener, stop.clone());
        self.shards.spawn(shard, &self.tasks, drive);
        Ok(())
    }

    async fn begin(
        self: Arc<Self>,
        inbound: Arc<Inbound>,
    ) -> Result<(Requests, Opener<R::Stream>), String> {
        let stream = self.reach.reach().await?;
        let opener = Opener::new(stream, inbound, HELD_BYTES, PING_TIMEOUT).await;
        opener.map_err(|error| error.to_string())
    }

    async fn drive(
        self: Arc<Self>,
        serial: u64,
        opener: Opener<R::Stream>,
        stop: CancellationToken,
    ) {
        let _active = GaugeGuard::new(&self.metrics.connections);
        let mut run = pin!(opener.run());
        let ended = tokio::select! {
            ended = &mut run => ended,
            () = stop.cancelled() => timeout(LEAVE_TIMEOUT, run).await.unwrap_or(Ok(())),
        };
        self.links.lock().retain(|link| link.serial != serial);
        self.look.notify_one();
        match ended {
            Ok(()) => info!(connection = serial, "a connection to the proxy was closed"),
            Err(reason) => warn!(
                connection = serial,
                reason, "a connection to the proxy broke"
            ),
        }
    }
}

// === impl Link ===

impl Link {
    /// Whether it is neither broken nor told to end. HTTP/2 knows at once.
    fn takes_streams(&self) -> bool {
        let ready = self.requests.clone().ready().now_or_never();
        matches!(ready, Some(Ok(_)))
    }

    fn count(&self) -> usize {
        self.streams.load(Ordering::Relaxed)
    }
}

// === impl Seat ===

impl Seat {
    fn take(link: &Arc<Link>) -> Self {
        link.streams.fetch_add(1, Ordering::Relaxed);
        Self(link.clone())
    }

    /// The thread that drives the stream's connection.
    pub fn shard(&self) -> usize {
        self.0.shard
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.streams.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
pub(super) mod tests;
