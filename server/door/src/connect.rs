//! The CONNECT listener: HTTP/1.1, and HTTP/2 with prior knowledge, in plain text or over TLS on the same
//! port.
//!
//! A CONNECT stream is the proxied connection of one CONNECT request: a whole HTTP/1.1 connection, or one
//! stream of an HTTP/2 connection.
//!
//! The responses match Envoy with KKP's configuration: 404 for an unknown authority and for every method
//! except CONNECT, 503 if no endpoint accepts the connection, 200 once an endpoint has accepted. Bytes
//! received before the response are kept.

mod http2;

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use bytes::{Bytes, BytesMut};
use culvert_host::net::connect::{self, ConnectError, RequestError};
use culvert_host::net::dial::split_host_port;
use culvert_host::net::listen::reset_on_close;
use culvert_host::net::pacing::disable_bbr_on_loopback;
use culvert_host::net::readahead::ReadAhead;
use culvert_host::telemetry::metrics::GaugeGuard;
use culvert_stream::allowance::Allowance;
use culvert_stream::connection::run_connection;
use culvert_stream::io::{ReadSource, WriteSink, linger_close};
use culvert_stream::{CloseReason, HALF_OPEN_IDLE, Sink, Source, log_closed};
use http::StatusCode;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tracing::debug;

use super::allowed::AllowedNetworks;
use super::front::{FIRST_BYTES_TIMEOUT, Front, refusal_of};
use super::metrics::{Entrance, Refusal, Tally};
use super::socket::Socket;
use super::upstream::Connected;
use super::watch::watch;

/// Largest head of an HTTP/1.1 request, in bytes; Envoy's limit is 60 KiB.
const MAX_HEAD_BYTES: usize = 64 * 1024;

/// First bytes of an HTTP/2 connection with prior knowledge (RFC 9113, section 3.4). No HTTP/1 method begins
/// with these letters.
const PRIOR_KNOWLEDGE: &[u8] = b"PRI ";

/// First byte of a TLS handshake.
const TLS_HANDSHAKE: u8 = 22;

/// Response to a request for an unknown authority or with another method.
const NOT_FOUND: &[u8] =
    b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";

pub(crate) struct ConnectListener {
    /// State shared with the other listeners.
    pub front: Arc<Front>,
    /// TLS for clients that begin with a TLS handshake; `None` without a certificate.
    pub tls: Option<TlsAcceptor>,
    /// Refuses plain-text clients.
    pub require_tls: bool,
    pub allowed: AllowedNetworks,
}

impl ConnectListener {
    /// Serves one connection to its end.
    pub(crate) async fn serve(self: Arc<Self>, stream: TcpStream, peer: SocketAddr) {
        let metrics = &self.front.metrics;
        let _open = metrics.open(Entrance::Tunneling);
        let _active = GaugeGuard::new(&metrics.http_active);
        if !self.allowed.contains(peer.ip()) {
            return self.refuse(
                Refusal::Address,
                peer,
                "not in --tunneling-allowed-networks",
            );
        }
        self.clone().begin(stream, peer).await;
    }

    fn refuse(&self, reason: Refusal, peer: SocketAddr, why: &str) {
        self.front.metrics.refused(Entrance::Tunneling, reason);
        debug!(%peer, why, "CONNECT refused");
    }

    async fn begin(self: Arc<Self>, stream: TcpStream, peer: SocketAddr) {
        let silent =
            |listener: &Self| listener.refuse(Refusal::Timeout, peer, "no request in time");
        let mut first = [0; PRIOR_KNOWLEDGE.len()];
        let peeked = timeout(FIRST_BYTES_TIMEOUT, stream.peek(&mut first)).await;
        match peeked {
            Ok(Ok(1..)) => {}
            // The client closed without sending anything: a port check.
            Ok(_) => return,
            Err(_) => return silent(&self),
        }
        disable_bbr_on_loopback(&stream);
        let socket = Arc::new(stream);
        let is_tls = first.starts_with(&[TLS_HANDSHAKE]);
        // A preface that arrives in pieces only needs more read calls.
        let stream = Socket::new(socket.clone(), is_tls || first == *PRIOR_KNOWLEDGE);
        match &self.tls {
            Some(tls) if is_tls => {
                let accept = tls.accept(ReadAhead::new(stream));
                match timeout(FIRST_BYTES_TIMEOUT, accept).await {
                    Ok(Ok(stream)) => self.serve_http(stream, &socket, peer).await,
                    Ok(Err(error)) => {
                        let why = culvert_host::tls::explain(&error);
                        self.refuse(Refusal::Tls, peer, &why);
                    }
                    Err(_) => silent(&self),
                }
            }
            _ if self.require_tls => self.refuse(Refusal::Tls, peer, "plain text, TLS is required"),
            _ => self.serve_http(stream, &socket, peer).await,
        }
    }

    /// Detects the HTTP version and serves the connection.
    async fn serve_http<S>(self: Arc<Self>, mut stream: S, socket: &TcpStream, peer: SocketAddr)
    where
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
        match timeout(FIRST_BYTES_TIMEOUT, first).await {
            Ok(Ok(())) if received.starts_with(PRIOR_KNOWLEDGE) => {
                self.http2(ReadAhead::behind(received, stream), peer).await;
            }
            Ok(Ok(())) => self.http1(stream, socket, received, peer).await,
            Ok(Err(_)) => self.refuse(Refusal::Garbage, peer, "left before its request"),
            Err(_) => self.refuse(Refusal::Timeout, peer, "no request in time"),
        }
    }

    async fn http1<S>(
        &self,
        stream: S,
        socket: &TcpStream,
        mut received: BytesMut,
        peer: SocketAddr,
    ) where
        S: AsyncRead + AsyncWrite + Unpin + Send,
    {
        let metrics = &self.front.metrics;
        let (mut read, mut write) = tokio::io::split(stream);
        let head = connect::read_request(&mut read, &mut received, MAX_HEAD_BYTES);
        let target = match timeout(FIRST_BYTES_TIMEOUT, head).await {
            Ok(Ok(target)) => target,
            Ok(Err(RequestError::Io(_))) => return,
            Ok(Err(RequestError::Bad(error))) => {
                metrics.http_requests.increment(1);
                self.refuse(Refusal::Garbage, peer, &error.to_string());
                let answer = match error {
                    ConnectError::Method => NOT_FOUND,
                    other => other.response(),
                };
                return respond_and_close(read, write, answer).await;
            }
            Err(_) => return self.refuse(Refusal::Timeout, peer, "no complete request in time"),
        };
        if split_host_port(&target).is_err() {
            metrics.http_requests.increment(1);
            self.refuse(Refusal::Garbage, peer, "the target is not host:port");
            let answer = ConnectError::Malformed.response();
            return respond_and_close(read, write, answer).await;
        }
        let connected = match self.connect(&target, peer).await {
            Ok(connected) => connected,
            Err(StatusCode::NOT_FOUND) => return respond_and_close(read, write, NOT_FOUND).await,
            Err(status) => {
                let answer = connect::failure(status.as_u16(), UNAVAILABLE);
                return respond_and_close(read, write, &answer).await;
            }
        };
        let counted = metrics.count_connection();
        let established = write.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await;
        if established.is_err() || write.flush().await.is_err() {
            return counted.end(CloseReason::ClientLost);
        }
        let lost = CloseReason::ClientLost;
        let mut source = ReadSource::new(read, received.freeze(), lost);
        let mut sink = WriteSink::new(write, lost);
        let client = (&mut source, &mut sink);
        let reason = self
            .run_connection(client, connected, &target, peer, Some(socket), None)
            .await;
        counted.end(reason);
        if reason == CloseReason::EndpointLost {
            linger_close(source.into_inner(), sink.into_inner()).await;
        }
    }

    /// Connects to an endpoint for a request. On failure, returns the status code of the response.
    async fn connect(&self, authority: &str, peer: SocketAddr) -> Result<Connected, StatusCode> {
        let front = &self.front;
        front.metrics.http_requests.increment(1);
        let Some(upstream) = front.table.by_authority(authority) else {
            self.refuse(
                Refusal::Unknown,
                peer,
                &format!("{authority} is not exposed"),
            );
            return Err(StatusCode::NOT_FOUND);
        };
        let connected = upstream.connect(&[]).await;
        connected.map_err(|error| {
            self.refuse(refusal_of(error), peer, &format!("{authority}: {error}"));
            StatusCode::SERVICE_UNAVAILABLE
        })
    }

    /// Carries an accepted request. `socket` is the client socket to check for a dead peer; `None` for HTTP/2,
    /// which has PINGs. `unread` is the budget for bytes on their way to the client, shared by all CONNECT
    /// streams of an HTTP/2 connection; `None` for HTTP/1.1.
    async fn run_connection<C, K>(
        &self,
        client: (&mut C, &mut K),
        connected: Connected,
        authority: &str,
        peer: SocketAddr,
        socket: Option<&TcpStream>,
        unread: Option<Arc<Allowance>>,
    ) -> CloseReason
    where
        C: Source,
        K: Sink,
    {
        let Connected {
            stream, upstream, ..
        } = connected;
        disable_bbr_on_loopback(&stream);
        let moved = Arc::<AtomicU64>::default();
        let [up, down] = Tally::both(&upstream, &self.front.metrics, &moved);
        let lost = CloseReason::EndpointLost;
        let mut source =
            ReadSource::new(Socket::new(&stream, false), Bytes::new(), lost).within(unread);
        let mut sink = WriteSink::new(Socket::new(&stream, false), lost);
        let endpoint = (&mut source, &mut sink);
        let limits = &self.front.limits;
        // Half-closed connections have the same idle limit as open connections, enforced by `watch` below.
        // This limit must not be shorter.
        let half_open = limits.stream_idle.max(HALF_OPEN_IDLE);
        let sides = [
            Some(limits.endpoint(&stream)),
            socket.map(|socket| limits.client(socket)),
        ];
        let cut = pin!(watch([&moved], limits.stream_idle, sides));
        let ended = run_connection(client, endpoint, [up, down], half_open, cut).await;
        if let Some(time) = ended.answer_time {
            upstream.stats.times.record(time);
        }
        log_closed!(ended, %peer, authority, upstream = %upstream.key);
        if !ended.is_complete() {
            reset_on_close(&stream);
        }
        ended.reason
    }
}

/// Body of the response if no endpoint accepts.
const UNAVAILABLE: &str = "no endpoint of the Service accepted the connection\n";

async fn respond_and_close<R, W>(read: R, mut write: W, answer: &[u8])
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    if write.write_all(answer).await.is_ok() && write.flush().await.is_ok() {
        linger_close(read, write).await;
    }
}
