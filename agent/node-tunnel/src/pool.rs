//! The connections to the proxy: a few persistent connections, shared by all streams.
//!
//! A single task ([`ConnectionPool::run`]) makes the dials, one at a time, so that all waiting clients share
//! a dial and learn of a failed dial at once. A client also waits for a second dial, unless the dial before its
//! request failed. The pool keeps one connection open even without clients, and opens more connections, up to the
//! limit, while each open connection carries a stream. A connection gets no new streams and is replaced if it
//! broke, received GOAWAY, or does not answer a PING. A connection gets no new streams, and another one is opened, while
//! it is suspect: a request and a probe had no answer. After its next byte the connection is used again, and connections
//! beyond the limit are closed once they carry no stream.

use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use culvert_host::net::shares::{Share, Shares};
use culvert_host::runtime::shards::{ShardId, Shards};
use culvert_host::telemetry::log_once::LogOnce;
use culvert_host::telemetry::metrics::GaugeGuard;
use culvert_host::tls;
use culvert_native::halves::Chunk;
use culvert_native::link::{Opener, Requests};
use culvert_native::window::{Inbound, Pings, WindowProfile};
use culvert_stream::suspicion::Suspicion;
use futures_util::FutureExt as _;
use h2::SendStream;
use h2::client::ResponseFuture;
use http::{Method, Request, Uri};
use parking_lot::{Mutex, MutexGuard};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, info, warn};

use super::metrics::TunnelMetrics;

/// Longest duration of a dial, name lookup included, and longest wait of a client for a connection. KKP sets
/// the same connect timeout for Envoy.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Shortest and longest pause after a dial. The pause doubles with each dial, and returns to the shortest
/// pause if the pool then needs no dial for [`LAST_PAUSE`]. Up to half of the pause is cut at random: after a
/// restart of the proxy, all nodes connect at the same time.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LAST_PAUSE: Duration = Duration::from_secs(5);

/// Bytes the proxy may send ahead on each stream, equal to the window of a node's Envoy. If the endpoint
/// closes first, an Envoy at the seed loses the bytes beyond the window: with 1 MiB, a download of 20 MiB was
/// cut; with 16 MiB, between two Envoys, a download of 60 MB to a slow reader was cut.
const WINDOW_BYTES: u32 = 16 * 1024 * 1024;

/// Streams that a proxy permits in a connection: the limit of the nodeport-proxy and of KKP's Envoy.
const STREAMS: u64 = 1024;

/// Streams that the clients of one address may have for each free stream: half of all streams.
const SHARE_FACTOR: u64 = 1;

/// Pause between two checks for connections that accept no new streams. `h2` reports a GOAWAY only when asked.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Pause between two checks of a waiting client for a connection that has recovered.
const WAITING_LOOK: Duration = Duration::from_millis(100);

/// Time for unused connections to close at shutdown.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Advice for a proxy that cannot be reached.
pub(crate) const ADVICE: &str = "check --proxy, and that this node reaches that address";

/// Connections for each permitted connection, suspect ones included. The suspect ones have streams, and may recover.
const WITH_SUSPECTS: usize = 2;

/// Way to dial the proxy.
pub(crate) trait Reach: Send + Sync + 'static {
    /// Connection below HTTP/2.
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// Makes one attempt to connect, name lookup included.
    fn reach(&self) -> impl Future<Output = Result<Self::Stream, String>> + Send;
}

pub(crate) struct ConnectionPool<R> {
    reach: R,
    limit: usize,
    pings: Pings,
    shards: Shards,
    links: Mutex<Vec<Arc<Link>>>,
    /// Shares of the clients' addresses in all streams.
    shares: Arc<Shares>,
    /// Wakes the dialing task to check for missing connections.
    look: Notify,
    /// Result of the last dial: the reason for a failure, or `None` after a success. Changes with each dial.
    dialed: watch::Sender<Option<String>>,
    metrics: Arc<TunnelMetrics>,
    tasks: TaskTracker,
}

/// A connection to the proxy.
struct Link {
    serial: u64,
    /// The thread that drives the connection.
    shard: ShardId,
    requests: Requests,
    inbound: Arc<Inbound>,
    suspicion: Suspicion,
    streams: AtomicUsize,
}

/// A requested stream.
pub(crate) struct Stream {
    pub answer: ResponseFuture,
    /// Sends bytes to the proxy.
    pub send: SendStream<Chunk>,
    /// Counts the bytes of all streams of the connection.
    pub inbound: Arc<Inbound>,
    /// Counts the stream in its connection; must live as long as the stream.
    pub seat: Seat,
}

/// Guard that counts one stream of a connection.
pub(crate) struct Seat(Arc<Link>);

/// Reason why a stream could not be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PoolError {
    /// No connection is open, and the last dial failed or took too long.
    #[error("cannot connect to the proxy: {0}")]
    Unreachable(String),
    #[error(
        "every connection carries as many streams as the proxy allows: raise --connections, or the \
         proxy's limit of concurrent streams"
    )]
    Full,
}

// === impl ConnectionPool ===

impl<R: Reach> ConnectionPool<R> {
    /// Creates a pool of at most `limit` connections, spread over `shards`. [`run`](Self::run) opens the
    /// connections.
    pub(crate) fn new(
        reach: R,
        limit: usize,
        pings: Pings,
        shards: Shards,
        metrics: Arc<TunnelMetrics>,
    ) -> Arc<Self> {
        Arc::new(Self {
            reach,
            limit,
            pings,
            shards,
            links: Mutex::default(),
            shares: Shares::of(limit as u64 * STREAMS, SHARE_FACTOR),
            look: Notify::new(),
            dialed: watch::Sender::new(None),
            metrics,
            tasks: TaskTracker::new(),
        })
    }

    pub(crate) fn shards(&self) -> &Shards {
        &self.shards
    }

    /// Counts a stream of a client; returns `None` if the clients of the address have their share of all streams.
    pub(crate) fn share(&self, client: IpAddr) -> Option<Share> {
        self.shares.take_place(client)
    }

    /// True if a connection accepts new streams.
    pub(crate) fn is_up(&self) -> bool {
        self.links.lock().iter().any(|link| link.takes_streams())
    }

    /// Requests a stream to `target` on the connection with the fewest streams. Without a connection, waits
    /// up to [`CONNECT_TIMEOUT`] for one.
    ///
    /// # Errors
    /// See [`PoolError`].
    pub(crate) async fn open(&self, target: &Uri) -> Result<Stream, PoolError> {
        let opened = timeout(CONNECT_TIMEOUT, self.open_or_wait(target)).await;
        opened.unwrap_or_else(|_| {
            let last = self.dialed.borrow().clone();
            let reason = last.unwrap_or_else(|| format!("the dial takes too long; {ADVICE}"));
            Err(PoolError::Unreachable(reason))
        })
    }

    async fn open_or_wait(&self, target: &Uri) -> Result<Stream, PoolError> {
        // Subscribed before the first attempt, so that no dial result is missed.
        let mut dialed = self.dialed.subscribe();
        // If the last dial succeeded, one failed dial may have met a replica that ends.
        let mut may_fail = dialed.borrow().is_none();
        loop {
            let opened = self.try_open(target);
            self.look.notify_one();
            if let Some(stream) = opened? {
                return Ok(stream);
            }
            // A silent connection may recover without a dial.
            if timeout(WAITING_LOOK, dialed.changed()).await.is_err() {
                continue;
            }
            let failed = dialed.borrow_and_update().clone();
            if let Some(reason) = failed
                && !std::mem::take(&mut may_fail)
            {
                return Err(PoolError::Unreachable(reason));
            }
        }
    }

    fn try_open(&self, target: &Uri) -> Result<Option<Stream>, PoolError> {
        let links = self.open_links();
        let most = self.limit * WITH_SUSPECTS;
        let usable = || links.iter().filter(|link| !link.is_suspect());
        let link = usable().min_by_key(|link| link.count());
        // Without room for another connection, only a suspect one is left.
        let suspect = links.iter().filter(|_| links.len() >= most);
        let Some(link) = link.or_else(|| suspect.min_by_key(|link| link.count())) else {
            return Ok(None);
        };
        let mut requests = link.requests.clone();
        if link.count() >= requests.current_max_send_streams() {
            // Below the limit, the pool opens another connection: the caller waits for the dial.
            return match usable().count() < self.limit && links.len() < most {
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

    /// Connects as needed until the token fires, then closes the connections. Streams should have ended by
    /// then; streams still open are cut after one second.
    pub(crate) async fn run(self: Arc<Self>, stop: CancellationToken) {
        stop.run_until_cancelled(self.keep(&stop)).await;
        // An unused connection closes gracefully once its last handle is dropped.
        self.links.lock().clear();
        self.tasks.close();
        self.tasks.wait().await;
    }

    async fn keep(self: &Arc<Self>, stop: &CancellationToken) {
        let mut failures = LogOnce::default();
        let mut pause = FIRST_PAUSE;
        for serial in 1.. {
            let contented = Instant::now();
            while !self.is_short() {
                let _ = timeout(LOOK_INTERVAL, self.look.notified()).await;
            }
            if contented.elapsed() >= LAST_PAUSE {
                pause = FIRST_PAUSE;
            }
            let failed = self.connect(serial, stop).await.err();
            if let Some(reason) = &failed {
                self.metrics.connect_failed.increment(1);
                match failures.failed(reason) {
                    Some(due) => warn!(
                        reason,
                        attempts = due.attempts,
                        failing_seconds = due.failing_seconds,
                        "cannot connect to the proxy, trying again"
                    ),
                    None => debug!(reason, "still no connection to the proxy"),
                }
            } else {
                // The new connection is already logged.
                failures.has_recovered();
            }
            self.dialed.send_replace(failed);
            sleep(pause.mul_f64(rand::random_range(0.5..1.0))).await;
            pause = (pause * 2).min(LAST_PAUSE);
        }
    }

    /// True if the pool is below its limits and has no idle connection.
    fn is_short(&self) -> bool {
        let links = self.open_links();
        let usable = || links.iter().filter(|link| !link.is_suspect());
        let has_room = usable().count() < self.limit && links.len() < self.limit * WITH_SUSPECTS;
        has_room && usable().all(|link| link.count() > 0)
    }

    /// Returns the connections, without those that are of no further use: broken ones, and unused ones that are suspect or
    /// beyond the limit.
    fn open_links(&self) -> MutexGuard<'_, Vec<Arc<Link>>> {
        let mut links = self.links.lock();
        links.retain(|link| link.is_open() && !(link.is_suspect() && link.count() == 0));
        let usable = links.iter().filter(|link| !link.is_suspect()).count();
        let mut excess = usable.saturating_sub(self.limit);
        links.retain(|link| {
            let is_excess = excess > 0 && link.count() == 0;
            excess -= usize::from(is_excess);
            !is_excess
        });
        links
    }

    fn emptiest_shard(&self) -> Option<ShardId> {
        let links = self.links.lock();
        let count = |shard: &ShardId| links.iter().filter(|link| link.shard == *shard).count();
        self.shards.ids().min_by_key(count)
    }

    async fn connect(
        self: &Arc<Self>,
        serial: u64,
        stop: &CancellationToken,
    ) -> Result<(), String> {
        let inbound = Arc::new(Inbound::new(WindowProfile::Fixed(WINDOW_BYTES)));
        let shard = self.emptiest_shard().ok_or("the pool has no thread")?;
        let begin = timeout(CONNECT_TIMEOUT, self.clone().begin(inbound.clone()));
        let begun = self.shards.run_on(shard, begin).await;
        let begun = begun.map_err(|error| error.to_string())?;
        let (requests, opener) = begun.unwrap_or_else(|_| {
            Err(format!(
                "no connection within {CONNECT_TIMEOUT:?}; {ADVICE}"
            ))
        })?;
        self.metrics.connected.increment(1);
        info!(connection = serial, "connected to the proxy");
        self.links.lock().push(Arc::new(Link {
            serial,
            shard,
            requests,
            inbound,
            suspicion: Suspicion::none(),
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
        let refused = |why: String| match tls::explain_refusal(&why) {
            Some(why) => format!("TLS handshake failed: {why} (--proxy-cert, --proxy-key)"),
            None => format!(
                "the proxy ended the connection before HTTP/2 began ({why}): check the proxy's log; a proxy that \
                 requires TLS needs --proxy-ca, and --proxy-cert if it requires a certificate"
            ),
        };
        let opened = Opener::new(stream, inbound, self.pings).await;
        let (requests, mut opener) = opened.map_err(|error| refused(error.to_string()))?;
        opener.first_bytes().await.map_err(refused)?;
        Ok((requests, opener))
    }

    async fn drive(
        self: Arc<Self>,
        serial: u64,
        mut opener: Opener<R::Stream>,
        stop: CancellationToken,
    ) {
        let _active = GaugeGuard::new(&self.metrics.connections);
        let mut run = pin!(opener.run());
        let ended = tokio::select! {
            ended = &mut run => ended,
            () = stop.cancelled() => timeout(CLOSE_TIMEOUT, run).await.unwrap_or(Ok(())),
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
    /// True if the connection is neither broken nor ended by GOAWAY. `h2` reports both states without waiting.
    fn is_open(&self) -> bool {
        let ready = self.requests.clone().ready().now_or_never();
        matches!(ready, Some(Ok(_)))
    }

    fn is_suspect(&self) -> bool {
        self.suspicion.is_raised(self.inbound.heard())
    }

    fn takes_streams(&self) -> bool {
        self.is_open() && !self.is_suspect()
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

    /// Returns the thread that drives the stream's connection.
    pub(crate) fn shard(&self) -> ShardId {
        self.0.shard
    }

    /// Resolves once the proxy sends nothing for some time, not even the answer to a PING. The connection then
    /// gets no new streams until the proxy sends something.
    pub(crate) async fn is_silent(&self) {
        let Link {
            serial,
            inbound,
            suspicion,
            ..
        } = &*self.0;
        let probe = || {
            inbound.probe();
            true
        };
        if suspicion.wait(|| inbound.heard(), probe).await {
            info!(
                connection = serial,
                "a connection to the proxy is silent: new streams use another connection"
            );
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.streams.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
pub(super) mod tests;
