//! CONNECT in the streams of one HTTP/2 connection, and what its client may make the proxy do.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use culvert_native::halves::halves;
use culvert_native::link::{Incoming, Taker, TakerLimits};
use culvert_native::window::Inbound;
use culvert_stream::CloseReason;
use culvert_stream::allowance::Allowance;
use culvert_stream::io::LINGER;
use http::{Method, Response, StatusCode};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::coop::consume_budget;
use tokio::time::{Instant, sleep, timeout};
use tracing::debug;

use super::{Tunnel, Tunnels};
use crate::front::FIRST_WORD_TIMEOUT;
use crate::metrics::Refusal;

/// Bytes that all tunnels of one HTTP/2 connection together may hold for endpoints that do not
/// read, before each may hold no more than 64 KiB.
const HELD_BYTES: usize = 16 * 1024 * 1024;

/// Bytes that they may hold for a client that does not read; from half of it on each takes less at a
/// time. 8 KiB for each tunnel come on top.
const UNREAD_BYTES: usize = 16 * 1024 * 1024;

/// The most tunnels at once in one HTTP/2 connection, as Envoy's; a node opens further ones.
const MAX_STREAMS: u32 = 1024;

/// How far a client may send ahead on a stream of a short path.
const WINDOW_BYTES: u32 = 512 * 1024;

/// Bytes of one tunnel that may wait in HTTP/2's send queue. A client may leave many unread.
const SEND_BYTES: usize = 64 * 1024;

/// A stream that its client resets sooner than this, without an answer, was not meant (Envoy's
/// `overload.premature_reset_min_stream_lifetime_seconds`).
const PREMATURE: Duration = Duration::from_secs(1);

/// How many streams a connection has to have opened before it is judged by them (Envoy's
/// `overload.premature_reset_total_stream_count`).
const JUDGED_FROM: u64 = 500;

/// What the streams of one connection share.
struct Shared {
    peer: SocketAddr,
    inbound: Arc<Inbound>,
    unread: Arc<Allowance>,
    /// Streams so far.
    opened: AtomicU64,
    /// Those that were not meant.
    premature: AtomicU64,
}

impl Shared {
    /// Whether the client makes work for its own sake: more than half of its streams were not meant.
    /// The rule and its figures are Envoy's.
    fn is_flood(&self) -> bool {
        let opened = self.opened.load(Ordering::Relaxed).max(JUDGED_FROM);
        self.premature.load(Ordering::Relaxed) * 2 > opened
    }
}

impl Tunnels {
    pub(super) async fn http2<S>(self: Arc<Self>, stream: S, peer: SocketAddr)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let inbound = Arc::new(Inbound::new(WINDOW_BYTES));
        let limits = TakerLimits {
            held_bytes: HELD_BYTES,
            streams: MAX_STREAMS,
            send_bytes: SEND_BYTES,
        };
        let taker = Taker::new(stream, inbound.clone(), limits);
        let mut taker = match timeout(FIRST_WORD_TIMEOUT, taker).await {
            Ok(Ok(taker)) => taker,
            Ok(Err(error)) => return self.refuse(Refusal::Garbage, peer, &error.to_string()),
            Err(_) => return self.refuse(Refusal::Timeout, peer, "no HTTP/2 settings in time"),
        };
        let draining = self.front.draining.clone();
        // Each stream holds one.
        let shared = Arc::new(Shared {
            peer,
            inbound,
            unread: Allowance::new(UNREAD_BYTES),
            opened: AtomicU64::new(0),
            premature: AtomicU64::new(0),
        });
        let (mut was_alone, mut told) = (false, false);
        loop {
            let next = tokio::select! {
                next = taker.next() => next,
                () = draining.cancelled(), if !told => {
                    told = true;
                    taker.drain();
                    continue;
                }
                () = unused(self.front.limits.connection_idle), if !told => {
                    let is_alone = Arc::strong_count(&shared) == 1;
                    told = was_alone && is_alone;
                    was_alone = is_alone;
                    if told {
                        taker.drain();
                    }
                    continue;
                }
            };
            match next {
                Ok(Some(incoming)) => {
                    was_alone = false;
                    shared.opened.fetch_add(1, Ordering::Relaxed);
                    if shared.is_flood() {
                        self.refuse(Refusal::Flood, peer, "most streams are reset at once");
                        return end(taker).await;
                    }
                    let (tunnels, shared) = (self.clone(), shared.clone());
                    self.front.tasks.spawn(async move {
                        tokio::select! {
                            () = tunnels.stream(incoming, &shared) => {}
                            () = tunnels.front.cut.cancelled() => {}
                        }
                    });
                    // So that streams begin, and are judged, while many more wait.
                    consume_budget().await;
                }
                Ok(None) => return,
                Err(error) => {
                    debug!(%peer, error, "an HTTP/2 connection broke");
                    return;
                }
            }
        }
    }

    /// One stream of an HTTP/2 connection.
    async fn stream(&self, (request, mut respond): Incoming, shared: &Shared) {
        let metrics = &self.front.metrics;
        let peer = shared.peer;
        // Not the rest of the head: it may be large, and endpoints take their time.
        let (method, authority, body) = {
            let (head, body) = request.into_parts();
            let authority = head.uri.authority().map(ToString::to_string);
            (head.method, authority, body)
        };
        let since = Instant::now();
        let connected = async {
            match (method, authority.as_deref()) {
                (Method::CONNECT, Some(authority)) => self.connect(authority, peer).await,
                _ => {
                    metrics.http.requests.fetch_add(1, Ordering::Relaxed);
                    self.refuse(Refusal::Garbage, peer, "not a CONNECT request");
                    Err(StatusCode::NOT_FOUND)
                }
            }
        };
        let connected = tokio::select! {
            // First: a stream that is gone already costs no endpoint a connection.
            biased;
            reset = poll_fn(|cx| respond.poll_reset(cx)) => {
                if reset.is_ok() && since.elapsed() < PREMATURE {
                    shared.premature.fetch_add(1, Ordering::Relaxed);
                }
                return;
            }
            connected = connected => connected,
        };
        let connected = match connected {
            Ok(connected) => connected,
            Err(status) => {
                // Fails if the client has gone.
                let _ = respond.send_response(answer(status), true);
                return;
            }
        };
        let carried = metrics.carried();
        let Ok(send) = respond.send_response(answer(StatusCode::OK), false) else {
            return carried.end(CloseReason::ClientLost);
        };
        let inbound = shared.inbound.clone();
        let (mut source, sink) = halves(send, body, inbound, CloseReason::ClientLost);
        let mut sink = sink.toward_any_peer().within(shared.unread.clone());
        let tunnel = Tunnel {
            connected,
            authority: &authority.unwrap_or_default(),
            peer,
            client: None,
            unread: Some(shared.unread.clone()),
        };
        let reason = self.carry((&mut source, &mut sink), tunnel).await;
        carried.end(reason);
        sink.end(reason, &self.front.tasks);
    }
}

/// Ends a connection whose client floods it.
async fn end<S: AsyncRead + AsyncWrite + Unpin>(mut taker: Taker<S>) {
    taker.refuse();
    let told = async { while matches!(taker.next().await, Ok(Some(_))) {} };
    // A client that reads nothing is not told.
    let _ = timeout(LINGER, told).await;
}

async fn unused(bound: Option<Duration>) {
    match bound {
        Some(bound) => sleep(bound).await,
        None => std::future::pending().await,
    }
}

fn answer(status: StatusCode) -> Response<()> {
    let mut response = Response::new(());
    *response.status_mut() = status;
    response
}
