//! The CONNECT streams of one HTTP/2 connection, with limits on the work caused by a client.

use std::future::{pending, poll_fn};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use culvert_host::net::admission::Candidate;
use culvert_host::net::proxy_protocol::Origin;
use culvert_host::telemetry::metrics::GaugeGuard;
use culvert_native::halves::NativeSource;
use culvert_native::link::{Incoming, Taker, TakerLimits};
use culvert_native::requests::UndecidedRequest;
use culvert_native::window::{Inbound, Pings, TAKER_HELD_BYTES, UNCONFIRMED, WindowProfile};
use culvert_stream::allowance::Allowance;
use culvert_stream::io::LINGER;
use culvert_stream::{CloseReason, Sink as _, Source as _};
use http::{HeaderValue, Method, Response, StatusCode};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::coop::consume_budget;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::{debug, warn};

use super::denial::Denial;
use super::sessions::SessionStream;
use super::{ConnectListener, admit};
use crate::metrics::{Entrance, Refusal};

/// Maximum number of bytes kept for a stalled client by all CONNECT streams of an HTTP/2 connection together, as long as
/// all connections of the process keep at most a quarter of the memory limit.
/// Once half of the total is used, each stream reads less at a time. Each stream may keep 8 KiB in addition.
const UNREAD_BYTES: usize = 16 * 1024 * 1024;

/// Maximum number of simultaneous CONNECT streams per HTTP/2 connection, as in Envoy; a node opens more
/// connections if needed.
const MAX_STREAMS: u32 = 1024;

/// Receive window of a stream on a short path, in bytes.
const WINDOW_BYTES: u32 = 1024 * 1024;

/// Maximum number of bytes per CONNECT stream in HTTP/2's send queue. The limit is small because a client may
/// leave many streams unread.
const SEND_BYTES: usize = 64 * 1024;

/// Maximum number of streams of a connection that the client has reset by its own errors. Each may occupy 1.4 KiB while the
/// client does not read. Well-behaved clients cause such an error only by a frame that arrives after [`RESET_TIME`].
const ERROR_RESETS: usize = 64;

/// Part of `h2`'s error if a client has caused more than [`ERROR_RESETS`] errors.
const TOO_MANY_ERRORS: &str = "too_many_internal_resets";

/// Number of streams that the front door resets at once, although their clients may still send. More resets wait until
/// earlier ones are [`RESET_TIME`] old; their streams stay open meanwhile.
const PACED_RESETS: usize = 128;

/// Number of reset streams to remember. Each occupies 0.4 KiB. Denied requests whose clients have not ended them count as
/// reset streams, too.
const RESET_STREAMS: usize = 4 * PACED_RESETS;

/// Number of undecided requests of a connection: new ones, denied ones whose answer is not written yet, and all that `h2`
/// refuses. More requests are not read. A request that causes a dial is decided.
const UNDECIDED: usize = 16;

/// Number of streams that a client may reset before they are accepted. [`UNDECIDED`] permits fewer.
const UNACCEPTED_RESETS: usize = 4096;

/// Time for which a reset stream is remembered. Frames that a client sent before it learned of the reset arrive within
/// this time, unless the path is interrupted. The first frame that arrives later is an error of the client.
const RESET_TIME: Duration = Duration::from_secs(5);

/// Largest frame payload that a client may send, in bytes. A frame that is not complete occupies memory. With Envoy's limit of
/// 16 KiB, uploads of a node tunnel cost 1.7 times as much processor time as without a limit, with this one 1.2 times.
pub(super) const FRAME_BYTES: u32 = 64 * 1024;

/// Budget for unread small DATA frames of a connection, in bytes as `h2` counts them: 8,200 frames of one byte, which
/// occupy about 4 MiB. A stream reads its frames at once. The budget covers the one-byte frames of [`READ_QUOTA`]; the streams
/// read before more input arrives.
const SMALL_FRAMES: usize = 2 * 1024 * 1024;

/// Largest header list of a request, in bytes. A node's request has two fields of less than 400 bytes together.
const HEADER_BYTES: u32 = 8 * 1024;

/// Number of bytes to read from a client before the requests in them are accepted, and their header fields dropped. So
/// many bytes may encode header fields of 5 MiB.
const READ_QUOTA: usize = 64 * 1024;

/// Time for a client to confirm SETTINGS that shrink the windows of its streams.
const CONFIRM_TIME: Duration = Duration::from_secs(10);

/// A stream counts as premature if the client resets the stream within this time and before a response
/// (Envoy's `overload.premature_reset_min_stream_lifetime_seconds`).
const PREMATURE: Duration = Duration::from_secs(1);

/// Minimum for the number of opened streams in the flood check: a smaller number counts as this value (Envoy's
/// `overload.premature_reset_total_stream_count`).
const JUDGED_FROM: u64 = 500;

/// Header of a 503 beyond a limit of connections, as in Envoy.
const OVERLOADED_HEADER: &str = "x-envoy-overloaded";

/// The shared state of all streams of a connection.
struct Shared {
    peer: Origin,
    inbound: Arc<Inbound>,
    unread: Arc<Allowance>,
    /// Number of streams so far.
    opened: AtomicU64,
    /// Number of premature streams.
    premature: AtomicU64,
}

impl Shared {
    /// Returns true if the client opens streams only to cause work: more than half of its streams are
    /// premature. The rule and its numbers are Envoy's.
    fn is_flood(&self) -> bool {
        let opened = self.opened.load(Ordering::Relaxed).max(JUDGED_FROM);
        self.premature.load(Ordering::Relaxed) * 2 > opened
    }
}

/// Returns the limits of an HTTP/2 connection.
fn taker_limits() -> TakerLimits {
    TakerLimits {
        held_bytes: TAKER_HELD_BYTES,
        streams: MAX_STREAMS,
        send_bytes: SEND_BYTES,
        error_resets: Some(ERROR_RESETS),
        reset_streams: RESET_STREAMS,
        reset_time: RESET_TIME,
        frame_bytes: FRAME_BYTES,
        small_frames: SMALL_FRAMES,
        header_bytes: HEADER_BYTES,
        read_quota: Some(READ_QUOTA),
        unaccepted_resets: UNACCEPTED_RESETS,
        pings: Pings::default(),
        confirm_time: Some(CONFIRM_TIME),
    }
}

impl ConnectListener {
    /// Serves the streams of an HTTP/2 connection until the connection ends.
    pub(super) async fn http2<S>(
        self: Arc<Self>,
        stream: S,
        peer: Origin,
        candidate: Option<Arc<Candidate>>,
    ) where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let Some(session) = self.sessions.enter(peer.ip()) else {
            return self.refuse_session(peer);
        };
        let _open = GaugeGuard::new(&self.front.metrics.http2_open);
        let inbound = Inbound::new(WindowProfile::Fixed(WINDOW_BYTES));
        let inbound = inbound.within(session.uploads());
        let inbound = inbound.pacing_resets(PACED_RESETS, RESET_TIME);
        let inbound = Arc::new(inbound.limiting_undecided(UNDECIDED));
        let limits = taker_limits();
        // Boxed, so that an open connection does not occupy the memory of its handshake.
        let taker = Box::pin(Taker::new(stream, inbound.clone(), limits));
        let mut taker = match taker.await {
            Ok(taker) => taker,
            Err(error) => return self.refuse(Refusal::Garbage, peer, &error.to_string()),
        };
        admit(candidate);
        let closing = self.front.closing.clone();
        let shared = Arc::new(Shared {
            peer,
            inbound,
            unread: self.unread.part(UNREAD_BYTES),
            opened: AtomicU64::new(0),
            premature: AtomicU64::new(0),
        });
        let (mut was_idle, mut is_draining) = (false, false);
        // End of a connection whose place is taken.
        let mut end = None;
        loop {
            let next = tokio::select! {
                next = taker.next() => next,
                () = session.exceeded() => {
                    warn!(%peer, "HTTP/2 connection ended: unread uploads of all clients exceed a quarter of the memory limit, and this connection is the largest of the address with the most; check the endpoints that do not read, or raise the memory limit");
                    self.front.metrics.refused(Entrance::Tunneling, Refusal::BufferExceeded);
                    return Box::pin(end_refused(&mut taker)).await;
                }
                () = session.displaced(), if end.is_none() => {
                    warn!(%peer, "HTTP/2 connection without streams ended: a client of an address with fewer connections needs its place; raise the memory limit");
                    self.front.metrics.refused(Entrance::Tunneling, Refusal::TooManyConnections);
                    end = Some(Instant::now() + LINGER);
                    is_draining = true;
                    shared.inbound.lift_undecided();
                    taker.drain();
                    continue;
                }
                // The client does not answer the GOAWAY. Streams that it has opened just before it may finish.
                () = sleep_until(end.unwrap_or_else(Instant::now)), if end.is_some() => {
                    if session.is_idle() {
                        return;
                    }
                    end = Some(Instant::now() + LINGER);
                    continue;
                }
                () = closing.cancelled(), if !is_draining => {
                    is_draining = true;
                    shared.inbound.lift_undecided();
                    taker.drain();
                    continue;
                }
                () = sleep(self.front.limits.connection_idle), if !is_draining => {
                    let is_idle = session.is_idle();
                    is_draining = was_idle && is_idle;
                    was_idle = is_idle;
                    if is_draining {
                        shared.inbound.lift_undecided();
                        taker.drain();
                    }
                    continue;
                }
            };
            match next {
                Ok(Some(incoming)) => {
                    let undecided = shared.inbound.undecided_request();
                    was_idle = false;
                    shared.opened.fetch_add(1, Ordering::Relaxed);
                    if shared.is_flood() {
                        // Its header fields may be large.
                        drop(incoming);
                        self.refuse(Refusal::Flood, peer, "most streams are reset at once");
                        return Box::pin(end_refused(&mut taker)).await;
                    }
                    let (listener, shared) = (self.clone(), shared.clone());
                    let served = listener.stream(incoming, undecided, shared, session.stream());
                    self.front.tasks.spawn(served);
                    // Lets the tasks of the accepted streams run, so that the tasks count premature resets
                    // before many more streams are accepted.
                    consume_budget().await;
                }
                Ok(None) => {
                    if taker.is_refused() {
                        self.refuse(Refusal::Flood, peer, "HTTP/2 refuses its requests");
                    }
                    return;
                }
                Err(error) => return self.failed(peer, &error),
            }
        }
    }

    /// Logs and counts a failed HTTP/2 connection.
    fn failed(&self, peer: Origin, error: &str) {
        if error.contains(TOO_MANY_ERRORS) {
            self.refuse(Refusal::Flood, peer, error);
        } else if error.contains(UNCONFIRMED) {
            warn!(%peer, error, "HTTP/2 connection ended");
            let metrics = &self.front.metrics;
            metrics.refused(Entrance::Tunneling, Refusal::BufferExceeded);
        } else {
            debug!(%peer, error, "an HTTP/2 connection failed");
        }
    }

    /// Refuses an HTTP/2 connection beyond the memory limit.
    fn refuse_session(&self, peer: Origin) {
        warn!(%peer, "HTTP/2 connection refused: the connections that fit the memory limit are used up, or the address has most of them; raise the memory limit, which allows one connection for each 96 KiB");
        let metrics = &self.front.metrics;
        metrics.refused(Entrance::Tunneling, Refusal::TooManyConnections);
    }

    /// Serves a stream of an HTTP/2 connection.
    fn stream(
        self: Arc<Self>,
        (request, mut respond): Incoming,
        undecided: UndecidedRequest,
        shared: Arc<Shared>,
        session: SessionStream,
    ) -> impl Future<Output = ()> + Send + 'static {
        // The rest of the head is dropped at once: the head may be large, and endpoints may be slow to accept.
        let (method, authority, body) = {
            let (head, body) = request.into_parts();
            let authority = head.uri.authority().map(ToString::to_string);
            (head.method, authority, body)
        };
        let (inbound, lost) = (shared.inbound.clone(), CloseReason::ClientLost);
        let mut source = NativeSource::unanswered(body, inbound, lost);
        // Not an async function, which would keep its arguments twice.
        async move {
            let metrics = &self.front.metrics;
            let (peer, cut) = (&shared.peer, &self.front.cut);
            let mut undecided = Some(undecided);
            let since = Instant::now();
            let connected = async {
                match (method, authority.as_deref()) {
                    (Method::CONNECT, Some(authority)) => {
                        let upstream = self.find(authority, peer)?;
                        undecided = None;
                        self.dial(upstream, authority, peer).await
                    }
                    _ => {
                        metrics.http_requests.increment(1);
                        self.refuse(Refusal::Garbage, *peer, "not a CONNECT request");
                        Err(Denial::Unknown)
                    }
                }
            };
            let connected = tokio::select! {
                // Polled first: a stream that is already reset or cut must not cause a connection to an endpoint.
                biased;
                reset = poll_fn(|cx| respond.poll_reset(cx)) => {
                    if reset.is_ok() && since.elapsed() < PREMATURE {
                        shared.premature.fetch_add(1, Ordering::Relaxed);
                    }
                    return;
                }
                () = cut.cancelled() => return,
                connected = connected => connected,
                // The bytes must not wait in HTTP/2, where they do not count.
                () = async { source.fill().await; pending().await } => return,
                () = session.exceeded() => return,
            };
            let mut connected = match connected {
                Ok(connected) => connected,
                Err(denial) => {
                    let mut response = answer(denial.status());
                    if denial == Denial::TooMany {
                        let value = HeaderValue::from_static("true");
                        response.headers_mut().insert(OVERLOADED_HEADER, value);
                    }
                    let inbound = &shared.inbound;
                    let undecided = undecided.unwrap_or_else(|| inbound.undecided_again());
                    // Fails if the client is gone.
                    if let Ok(send) = respond.send_response(response, false) {
                        let mut sink = source.answered(send);
                        let _ = sink.finish().await;
                        // A task of its own needs less memory than this one.
                        self.front.tasks.spawn(async move {
                            sink.written().await;
                            drop((sink, undecided));
                        });
                    }
                    return;
                }
            };
            let counted = metrics.count_connection();
            let Ok(send) = respond.send_response(answer(StatusCode::OK), false) else {
                return counted.end(CloseReason::ClientLost);
            };
            let mut sink = source
                .answered(send)
                .toward_any_peer()
                .within(shared.unread.clone());
            let authority = authority.unwrap_or_default();
            let (client, unread) = ((&mut source, &mut sink), shared.unread.clone());
            // A stream whose reset waits counts as a connection of the client.
            let share = connected.share.take();
            let reason = tokio::select! {
                reason = self.run_connection(client, &connected, &authority, peer, None, unread) => reason,
                () = session.exceeded() => CloseReason::BufferExceeded,
                () = cut.cancelled() => return,
            };
            drop(connected);
            counted.end(reason);
            sink.end_holding((share, session), reason, &self.front.tasks);
        }
    }
}

/// Ends a connection with ENHANCE_YOUR_CALM.
async fn end_refused<S: AsyncRead + AsyncWrite + Unpin>(taker: &mut Taker<S>) {
    taker.refuse();
    let ended = async { while matches!(taker.next().await, Ok(Some(_))) {} };
    // A client that does not read never receives the refusal.
    let _ = timeout(LINGER, ended).await;
}

fn answer(status: StatusCode) -> Response<()> {
    let mut response = Response::new(());
    *response.status_mut() = status;
    response
}
