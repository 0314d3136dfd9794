//! The CONNECT listener: HTTP/1.1, and HTTP/2 with prior knowledge, in plain text or over TLS on the same
//! port.
//!
//! A CONNECT stream is the proxied connection of one CONNECT request: a whole HTTP/1.1 connection, or one
//! stream of an HTTP/2 connection.
//!
//! The responses match Envoy with KKP's configuration: 404 for an unknown authority and for every method
//! except CONNECT, 503 if no endpoint accepts the connection, 200 once an endpoint has accepted. Bytes
//! received before the response are kept.

mod denial;
mod http2;
mod sessions;

use std::future::pending;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use bytes::{Bytes, BytesMut};
use culvert_host::net::admission::{Admission, Candidate, Unadmitted};
use culvert_host::net::congestion::disable_bbr_on_loopback;
use culvert_host::net::connect::{self, ConnectError, RequestError};
use culvert_host::net::dial::split_host_port;
use culvert_host::net::networks::Networks;
use culvert_host::net::proxy_protocol::{Origin, UNEXPECTED_HEADER, is_header};
use culvert_host::net::readahead::ReadAhead;
use culvert_host::net::silence::is_over;
use culvert_host::net::socket::{ResetOnDrop, Socket};
use culvert_host::telemetry::metrics::GaugeGuard;
use culvert_host::tls::reload::ServerTls;
use culvert_stream::allowance::Allowance;
use culvert_stream::connection::run_connection;
use culvert_stream::io::{RESET_LOOK, ReadSource, WriteSink, linger_close};
use culvert_stream::{CloseReason, HALF_OPEN_IDLE, Sink, Source, log_closed};
use rustix::net::{RecvFlags, recv};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tracing::{debug, info, warn};

use self::denial::Denial;
use self::sessions::Sessions;
use super::front::{FIRST_BYTES_TIMEOUT, Front, refusal_of};
use super::metrics::{Entrance, ProxyMetrics, Refusal, Tally};
use super::relay::{deliver_rest, write_all};
use super::upstream::{ConnectError as ConnectFailure, Connected, Upstream};
use super::watch::watch;

/// Largest head of an HTTP/1.1 request, in bytes; Envoy's limit is 60 KiB.
const MAX_HEAD_BYTES: usize = 64 * 1024;

/// First bytes of an HTTP/2 connection with prior knowledge (RFC 9113, section 3.4). No HTTP/1 method begins
/// with these letters.
const PRIOR_KNOWLEDGE: &[u8] = b"PRI ";

/// Bytes that show the protocol of a client: at most the signature of a PROXY protocol header.
const MAX_PEEK_BYTES: usize = 12;

/// Length of the whole preface of HTTP/2.
const PREFACE_BYTES: usize = 24;

/// Largest HTTP/1 head of a client that needs no slot, in bytes. Heads of CONNECT requests have a few hundred bytes.
const WHOLE_HEAD_BYTES: usize = 4096;

/// Memory for an HTTP/2 connection, in bytes: 32 KiB for the used pages of the buffers, the state of HTTP/2, the task and the
/// socket, and the largest frame, which waits in memory until it is complete. Streams that are undecided, remembered after
/// a reset, or wrong may add about 300 KiB; only hostile clients have as many at once.
const SESSION_BYTES: u64 = 32 * 1024 + http2::FRAME_BYTES as u64;

/// First byte of a TLS handshake.
const TLS_HANDSHAKE: u8 = 22;

/// Response to a request for an unknown authority or with another method.
const NOT_FOUND: &[u8] =
    b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";

pub(crate) struct ConnectListener {
    /// State shared with the other listeners.
    pub front: Arc<Front>,
    /// TLS for clients that begin with a TLS handshake; `None` without a certificate.
    pub tls: Option<ServerTls>,
    /// Refuses plain-text clients.
    pub require_tls: bool,
    /// Networks of permitted clients; an empty list permits all.
    pub allowed: Networks,
    /// Slots for clients that have sent a part of their request.
    pub requests: Arc<Admission>,
    /// HTTP/2 connections, bounded by the memory limit.
    pub sessions: Arc<Sessions>,
    /// Allowance for the bytes of all clients except uploads over HTTP/2, see [`unread`].
    pub unread: Arc<Allowance>,
}

/// Source of an HTTP/1.1 client's bytes, which notices a reset after their end.
struct ClientSource<'a, R> {
    inner: ReadSource<R>,
    socket: &'a TcpStream,
}

impl<R: AsyncRead + Unpin + Send> Source for ClientSource<'_, R> {
    async fn recv(&mut self) -> Result<Option<Bytes>, CloseReason> {
        self.inner.recv().await
    }

    async fn aborted(&mut self) -> CloseReason {
        while !is_over(self.socket) {
            sleep(RESET_LOOK).await;
        }
        CloseReason::ClientLost
    }
}

/// Returns the set of HTTP/2 connections with the bounds of a memory limit in bytes, and shows the number of connections that
/// fit in the metrics. `None` stands for no limit.
pub(crate) fn sessions(memory: Option<u64>, metrics: &ProxyMetrics) -> Arc<Sessions> {
    let most = memory.map(|bytes| bytes / SESSION_BYTES);
    if let Some(connections) = most {
        info!(
            connections,
            "the memory limit bounds the HTTP/2 connections of the CONNECT port"
        );
        metrics.http2_limit.set(connections as f64);
    }
    Sessions::new(most.unwrap_or(u64::MAX), unread(memory))
}

/// Returns an allowance of a quarter of the memory limit in bytes: one is for bytes on their way to clients that do not read,
/// and to endpoints of HTTP/1.1 clients, another one for uploads over HTTP/2. `None` stands for no limit.
pub(crate) fn unread(memory: Option<u64>) -> Arc<Allowance> {
    let most = memory.and_then(|bytes| usize::try_from(bytes / 4).ok());
    Allowance::new(most.unwrap_or(usize::MAX))
}

impl ConnectListener {
    /// Serves one connection to its end.
    pub(crate) async fn serve(self: Arc<Self>, stream: TcpStream, peer: Origin) {
        let _active = GaugeGuard::new(&self.front.metrics.http_active);
        if !self.allowed.is_empty() && !self.allowed.contains(peer.ip()) {
            return self.refuse(
                Refusal::Address,
                peer,
                "not in --tunneling-allowed-networks",
            );
        }
        self.clone().begin(stream, peer).await;
    }

    fn refuse(&self, reason: Refusal, peer: Origin, why: &str) {
        self.front.metrics.refused(Entrance::Tunneling, reason);
        match reason {
            // An alert of TLS has no details, so the operator of a node tunnel finds the cause only here. In an attack, the
            // operator needs the addresses.
            Refusal::Tls | Refusal::Flood | Refusal::TooManyConnections => {
                warn!(%peer, reason = why, "CONNECT refused")
            }
            _ => debug!(%peer, why, "CONNECT refused"),
        }
    }

    async fn begin(self: Arc<Self>, stream: TcpStream, peer: Origin) {
        let since = Instant::now();
        let mut first = [0; MAX_PEEK_BYTES];
        let peeked = timeout(FIRST_BYTES_TIMEOUT, stream.peek(&mut first)).await;
        let first = match peeked {
            Ok(Ok(count @ 1..)) => first.get(..count).unwrap_or_default(),
            // The client closed without sending anything: a port check.
            Ok(_) => return,
            Err(_) => return self.refuse(Refusal::Timeout, peer, "no request in time"),
        };
        let is_tls = first.starts_with(&[TLS_HANDSHAKE]);
        if is_header(first) {
            let front = &self.front;
            return front.refuse_header(Entrance::Tunneling, peer, UNEXPECTED_HEADER);
        }
        if is_tls && self.tls.is_none() {
            let why =
                "TLS, but the port has no certificate; set --tunneling-cert and --tunneling-key";
            return self.refuse(Refusal::Tls, peer, why);
        }
        // Streams of this connection may need the address, and have no socket.
        let peer = peer.with_local(&stream);
        // A preface that arrives in pieces only needs more read calls.
        let is_framed = is_tls || first.starts_with(PRIOR_KNOWLEDGE);
        // Boxed, so that a client that sends nothing does not occupy the memory of the later stages.
        Box::pin(self.begin_with(stream, is_tls, is_framed, peer, since)).await;
    }

    /// Serves a client that was accepted at `since` by its first bytes: TLS or plain text. `is_framed` is set for TLS
    /// and for HTTP/2.
    async fn begin_with(
        self: Arc<Self>,
        stream: TcpStream,
        is_tls: bool,
        is_framed: bool,
        peer: Origin,
        since: Instant,
    ) {
        disable_bbr_on_loopback(&stream);
        let socket = Arc::new(stream);
        let stream = Socket::new(socket.clone(), is_framed);
        let candidate = if !is_tls && has_request(&socket) {
            None
        } else {
            match self.requests.enter(peer.ip(), since).await {
                Ok(candidate) => Some(candidate),
                Err(why) => return self.unadmitted(why, peer),
            }
        };
        if let Some(candidate) = &candidate {
            candidate.has_sent();
        }
        let waiting = candidate.clone();
        let refused = async {
            match waiting {
                Some(waiting) => waiting.refused().await,
                None => pending().await,
            }
        };
        let served = async {
            match &self.tls {
                Some(tls) if is_tls => {
                    let acceptor = TlsAcceptor::from(tls.get());
                    // Boxed, so that plain-text clients do not occupy the memory for TLS.
                    let served = self.serve_tls(acceptor, stream, &socket, peer, candidate);
                    Box::pin(served).await;
                }
                _ if self.require_tls => {
                    self.refuse(Refusal::Tls, peer, "plain text, TLS is required");
                }
                _ => {
                    let served = self.clone().serve_http(stream, &socket, peer, candidate);
                    served.await;
                }
            }
        };
        tokio::select! {
            () = served => {}
            why = refused => self.unadmitted(why, peer),
        }
    }

    async fn serve_tls(
        self: &Arc<Self>,
        acceptor: TlsAcceptor,
        stream: Socket<Arc<TcpStream>>,
        socket: &TcpStream,
        peer: Origin,
        candidate: Option<Arc<Candidate>>,
    ) {
        match Box::pin(acceptor.accept(ReadAhead::new(stream))).await {
            Ok(stream) => {
                // Boxed, because the future of each stage keeps room for the stream after it has passed the stream on.
                let stream = Box::new(stream);
                let served = self.clone().serve_http(stream, socket, peer, candidate);
                served.await;
            }
            // A port check of a load balancer.
            Err(error) if has_left(&error) => {
                let metrics = &self.front.metrics;
                metrics.refused(Entrance::Tunneling, Refusal::Tls);
                debug!(%peer, "the peer left during the TLS handshake");
            }
            Err(error) => {
                let why = culvert_host::tls::explain(&error);
                self.refuse(Refusal::Tls, peer, &why);
            }
        }
    }

    fn unadmitted(&self, why: Unadmitted, peer: Origin) {
        let reason = match why {
            Unadmitted::Late => Refusal::Timeout,
            Unadmitted::Displaced => Refusal::TooManyConnections,
        };
        self.refuse(reason, peer, &why.to_string());
    }

    /// Detects the HTTP version and serves the connection. `candidate` is admitted once the first request of an
    /// HTTP/1.1 client, or the preface of an HTTP/2 client is complete; `None` for a client that needs no slot.
    async fn serve_http<S>(
        self: Arc<Self>,
        mut stream: S,
        socket: &TcpStream,
        peer: Origin,
        candidate: Option<Arc<Candidate>>,
    ) where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let mut received = BytesMut::with_capacity(4096);
        let first = async {
            while received.len() < PRIOR_KNOWLEDGE.len() {
                if stream.read_buf(&mut received).await? == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                if !PRIOR_KNOWLEDGE.starts_with(&received) {
                    break;
                }
            }
            Ok::<_, io::Error>(())
        };
        match first.await {
            Ok(()) if received.starts_with(PRIOR_KNOWLEDGE) => {
                let stream = ReadAhead::behind(received, stream);
                // Boxed, so that HTTP/1.1 clients do not occupy the memory for HTTP/2.
                Box::pin(self.http2(stream, peer, candidate)).await;
            }
            Ok(()) => {
                let served = self.http1(stream, socket, received, peer, candidate);
                Box::pin(served).await;
            }
            Err(_) => self.refuse(Refusal::Garbage, peer, "left before its request"),
        }
    }

    async fn http1<S>(
        &self,
        stream: S,
        socket: &TcpStream,
        mut received: BytesMut,
        peer: Origin,
        candidate: Option<Arc<Candidate>>,
    ) where
        S: AsyncRead + AsyncWrite + Unpin + Send,
    {
        let metrics = &self.front.metrics;
        let (mut read, mut write) = tokio::io::split(stream);
        let head = connect::read_request(&mut read, &mut received, MAX_HEAD_BYTES);
        let head = head.await;
        admit(candidate);
        let target = match head {
            Ok(target) => target,
            Err(RequestError::Io(_)) => {
                return self.refuse(
                    Refusal::Garbage,
                    peer,
                    "left before its request was complete",
                );
            }
            Err(RequestError::Bad(error)) => {
                metrics.http_requests.increment(1);
                self.refuse(Refusal::Garbage, peer, &error.to_string());
                let answer = match error {
                    ConnectError::Method => NOT_FOUND,
                    other => other.response(),
                };
                return respond_and_close(read, write, answer).await;
            }
        };
        if split_host_port(&target).is_err() {
            metrics.http_requests.increment(1);
            self.refuse(Refusal::Garbage, peer, "the target is not host:port");
            let answer = ConnectError::Malformed.response();
            return respond_and_close(read, write, answer).await;
        }
        let connected = match self.connect(&target, &peer).await {
            Ok(connected) => connected,
            Err(Denial::Unknown) => {
                return respond_and_close(read, write, NOT_FOUND).await;
            }
            Err(denial) => {
                let answer = connect::failure(denial.status().as_u16(), denial.body());
                return respond_and_close(read, write, &answer).await;
            }
        };
        let counted = metrics.count_connection();
        let established = write.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await;
        if established.is_err() || write.flush().await.is_err() {
            return counted.end(CloseReason::ClientLost);
        }
        let lost = CloseReason::ClientLost;
        let unread = &self.unread;
        let source = ReadSource::new(read, received.freeze(), lost);
        let mut source = ClientSource {
            inner: source.within(Some(unread.clone())),
            socket,
        };
        let mut sink = WriteSink::new(write, lost).within(Some(unread.clone()));
        let client = (&mut source, &mut sink);
        let reason = self
            .run_connection(
                client,
                &connected,
                &target,
                &peer,
                Some(socket),
                unread.clone(),
            )
            .await;
        // Frees the places within the limits before the client learns of the end and connects again.
        drop(connected);
        counted.end(reason);
        if reason == CloseReason::EndpointLost {
            linger_close(source.inner.into_inner(), sink.into_inner()).await;
        }
    }

    /// Connects to an endpoint for a request.
    async fn connect(&self, authority: &str, peer: &Origin) -> Result<Connected, Denial> {
        let upstream = self.find(authority, peer)?;
        self.dial(upstream, authority, peer).await
    }

    /// Returns the upstream for a request.
    fn find(&self, authority: &str, peer: &Origin) -> Result<Arc<Upstream>, Denial> {
        let front = &self.front;
        front.metrics.http_requests.increment(1);
        let Some(upstream) = front.table.by_authority(authority) else {
            self.refuse(
                Refusal::Unknown,
                *peer,
                &format!("{authority} is not exposed"),
            );
            return Err(Denial::Unknown);
        };
        if !upstream.permits(peer.ip()) {
            let why = format!("{authority} does not allow the address");
            self.refuse(Refusal::Address, *peer, &why);
            return Err(Denial::Address);
        }
        Ok(upstream)
    }

    async fn dial(
        &self,
        upstream: Arc<Upstream>,
        authority: &str,
        peer: &Origin,
    ) -> Result<Connected, Denial> {
        let front = &self.front;
        let first = upstream.first_bytes(peer, Vec::new());
        let unavailable = |error: ConnectFailure| {
            self.refuse(refusal_of(error), *peer, &format!("{authority}: {error}"));
            Denial::from(&error)
        };
        let mut connected = upstream
            .connect(peer.ip(), &first)
            .await
            .map_err(unavailable)?;
        let unsent = first.get(connected.sent..).unwrap_or_default();
        let written = write_all(&connected.stream, unsent).await;
        written.map_err(|_| unavailable(ConnectFailure::Refused))?;
        connected.share = front.shares.take(peer.ip(), &connected.stream);
        if connected.share.is_none() {
            front.refuse_share(Entrance::Tunneling, peer);
            return Err(Denial::TooMany);
        }
        Ok(connected)
    }

    /// Carries an accepted request. `socket` is the client socket to check for a dead peer; `None` for HTTP/2,
    /// which has PINGs. `unread` is the budget for bytes on their way to the client, and for HTTP/1.1 also for
    /// the bytes in the other direction; HTTP/2 bounds those by its windows and by [`Sessions`].
    #[expect(
        clippy::manual_async_fn,
        reason = "an async fn would keep its arguments twice"
    )]
    fn run_connection<C, K>(
        &self,
        client: (&mut C, &mut K),
        connected: &Connected,
        authority: &str,
        peer: &Origin,
        socket: Option<&TcpStream>,
        unread: Arc<Allowance>,
    ) -> impl Future<Output = CloseReason>
    where
        C: Source,
        K: Sink,
    {
        async move {
            let Connected {
                stream, upstream, ..
            } = connected;
            disable_bbr_on_loopback(stream);
            let mut reset = ResetOnDrop::new(stream);
            let moved = Arc::<AtomicU64>::default();
            let [up, down] = Tally::both(upstream, &self.front.metrics, &moved);
            let lost = CloseReason::EndpointLost;
            let both = Socket::new(stream, false);
            let uploads = socket.map(|_| unread.clone());
            let mut source = ReadSource::new(both.clone(), Bytes::new(), lost)
                .within(Some(unread))
                .watched(Socket::is_over);
            let mut sink = WriteSink::new(both, lost)
                .within(uploads)
                .measured(Socket::unacknowledged);
            let endpoint = (&mut source, &mut sink);
            let limits = &self.front.limits;
            // Half-closed connections have the same idle limit as open connections, enforced by `watch` below.
            // This limit must not be shorter.
            let half_open = limits.stream_idle.max(HALF_OPEN_IDLE);
            let client_side = socket.map(|socket| limits.client(socket));
            let endpoint_side = limits.endpoint(stream);
            let sides = [Some(&endpoint_side), client_side.as_ref()];
            let cut = pin!(watch([&moved], limits.stream_idle, sides));
            let ended = run_connection(client, endpoint, [up, down], half_open, cut).await;
            if let Some(time) = ended.answer_time {
                upstream.stats.times.record(time);
            }
            log_closed!(ended, %peer, authority, upstream = %upstream.key);
            if ended.is_complete() {
                reset.disarm();
            }
            let has_left = matches!(
                ended.reason,
                CloseReason::ClientLost | CloseReason::ClientClosed | CloseReason::IdleTimeout
            );
            if has_left && ended.client_ended {
                Box::pin(deliver_rest(stream)).await;
            }
            ended.reason
        }
    }
}

/// Returns true if the whole HTTP/1 head, or the whole preface of HTTP/2, has already arrived.
fn has_request(socket: &TcpStream) -> bool {
    let mut bytes = [0; WHOLE_HEAD_BYTES];
    let peeked = recv(socket, &mut bytes[..], RecvFlags::PEEK).map_or(0, |(peeked, _)| peeked);
    let received = bytes.get(..peeked).unwrap_or_default();
    match received.starts_with(PRIOR_KNOWLEDGE) {
        true => received.len() >= PREFACE_BYTES,
        // The preface contains an empty line, too.
        false => received.windows(4).any(|end| end == b"\r\n\r\n"),
    }
}

/// Admits a client that has a slot.
fn admit(candidate: Option<Arc<Candidate>>) {
    if let Some(candidate) = candidate {
        candidate.admit();
    }
}

async fn respond_and_close<R, W>(read: R, mut write: W, answer: &[u8])
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    if write.write_all(answer).await.is_ok() && write.flush().await.is_ok() {
        linger_close(read, write).await;
    }
}
/// Returns true if the client closed its connection during the TLS handshake.
fn has_left(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), UnexpectedEof | ConnectionReset | BrokenPipe)
}
