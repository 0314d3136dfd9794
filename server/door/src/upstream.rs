//! The endpoints of one Service port, and the connections to them.

mod flows;
mod metrics;
mod times;

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use culvert_host::net::listen::is_last;
use culvert_host::net::proxy_protocol::Origin;
use culvert_host::net::shares::{Share, Shares};
use parking_lot::{Mutex, RwLock};
use rustix::io::Errno;
use socket2::{Domain, Socket, Type};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

pub(crate) use self::flows::FlowPlace;
pub(crate) use self::metrics::add_metrics;
use self::times::Times;
use super::routes::{Backend, UpstreamKey};

/// Time limit for one endpoint to accept a connection (KKP's connect timeout for Envoy).
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum number of endpoints tried for one connection; a Service with only dead endpoints fails within
/// seconds.
const ATTEMPTS: usize = 3;

/// Connections that an address may have for each free place of an upstream. One address thus leaves a ninth of the
/// places for others: all clients of a cluster may have one address.
const SHARE_FACTOR: u64 = 8;

/// Shortest time between two warnings about the limit of an upstream.
const WARN_INTERVAL: Duration = Duration::from_secs(10);

/// Pause between two probes of a silent endpoint.
const PROBE_PAUSE: Duration = Duration::from_secs(1);

/// The endpoints of one key. An upstream lives as long as any connection uses it; its endpoints may change
/// during that time.
#[derive(Debug)]
pub(crate) struct Upstream {
    /// Name in metrics and logs.
    pub key: UpstreamKey,
    pub stats: Stats,
    backend: RwLock<Arc<Backend>>,
    /// Endpoints that did not answer a connect in time. Only probes reach them while another endpoint answers.
    silent: RwLock<HashSet<SocketAddr>>,
    /// Number of connects so far; decides the first endpoint of the next connect.
    turn: AtomicUsize,
    /// Maximum number of simultaneous connections.
    limit: u64,
    /// Shares of source addresses in the limit.
    shares: Arc<Shares>,
    /// Number of QUIC flows with a place; the same limit applies.
    flows: AtomicU64,
    flow_shares: Arc<Shares>,
    /// Time of the last warning about the limit.
    warned: Mutex<Option<Instant>>,
}

/// The counters of one upstream; [`add_metrics`] renders them under Envoy's names.
#[derive(Debug, Default)]
pub(crate) struct Stats {
    /// Open connections.
    pub active: AtomicU64,
    /// Opened connections.
    pub opened: AtomicU64,
    /// Attempts refused by an endpoint.
    pub failed: AtomicU64,
    /// Timed-out attempts.
    pub timed_out: AtomicU64,
    /// Connections refused because of the limit, or of the share in the limit.
    pub overflowed: AtomicU64,
    /// Bytes sent to endpoints.
    pub sent: AtomicU64,
    /// Bytes received from endpoints.
    pub received: AtomicU64,
    /// Times from the end of a client's bytes to the end of the endpoint's bytes, for CONNECT streams whose
    /// client ended first.
    pub times: Times,
}

/// An open connection to an endpoint; counted until dropped.
#[derive(Debug)]
pub(crate) struct Connected {
    pub stream: TcpStream,
    /// Number of the client's first bytes already sent.
    pub sent: usize,
    pub upstream: Arc<Upstream>,
    /// Place in the share of the client's address, for a CONNECT stream.
    pub share: Option<Share>,
    _place: Share,
    _open: Open,
}

/// A place within the connection limit of an upstream.
#[derive(Debug)]
struct Open(Arc<Upstream>);

/// Reason why a connection to an endpoint failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ConnectError {
    #[error("the upstream has as many connections as --max-connections allows")]
    Overflow,
    #[error("the address has its share of the connections that --max-connections allows")]
    Share,
    #[error("the upstream has no ready endpoint")]
    NoEndpoint,
    #[error("no endpoint accepted the connection")]
    Refused,
    #[error("no descriptor is free for the connection; raise the limit of open files")]
    NoDescriptor,
    #[error("the endpoint did not answer within {CONNECT_TIMEOUT:?}")]
    TimedOut,
}

// === impl Upstream ===

impl Upstream {
    /// Creates an upstream that allows `limit` simultaneous connections.
    pub(crate) fn new(key: UpstreamKey, backend: &Backend, limit: u64) -> Arc<Self> {
        Arc::new(Self {
            key,
            stats: Stats::default(),
            backend: RwLock::new(Arc::new(backend.clone())),
            silent: RwLock::default(),
            turn: AtomicUsize::new(0),
            limit,
            shares: Shares::of(limit, SHARE_FACTOR),
            flows: AtomicU64::new(0),
            flow_shares: Shares::of(limit, SHARE_FACTOR),
            warned: Mutex::default(),
        })
    }

    /// Sets the endpoints and conditions of new connections; open connections stay. Returns true if anything
    /// differs.
    pub(crate) fn set_backend(&self, backend: &Backend) -> bool {
        let mut current = self.backend.write();
        let changed = **current != *backend;
        if changed {
            *current = Arc::new(backend.clone());
        }
        changed
    }

    /// Removes the endpoints of an upstream that has left the routes.
    pub(crate) fn retire(&self) {
        let allowed = self.backend.read().allowed.clone();
        self.set_backend(&Backend {
            allowed,
            ..Backend::default()
        });
    }

    /// Returns true if a client with this address may connect.
    pub(crate) fn permits(&self, address: IpAddr) -> bool {
        let backend = self.backend.read();
        let allowed = backend.allowed.as_ref();
        allowed.is_none_or(|networks| networks.contains(address))
    }

    /// Returns true if the endpoints expect a PROXY protocol header.
    pub(crate) fn expects_header(&self) -> bool {
        self.backend.read().header.is_some()
    }

    /// Returns the first bytes for an endpoint: a PROXY protocol header, if the endpoints expect one, and the
    /// `received` bytes.
    pub(crate) fn first_bytes(&self, client: &Origin, received: Vec<u8>) -> Vec<u8> {
        match self.backend.read().header {
            Some(version) => [client.header(version), received].concat(),
            None => received,
        }
    }

    /// Opens a connection for `client` to the next endpoint in the rotation, or to a later endpoint after a failure,
    /// and begins to send the client's `first` bytes. [`watch`](super::watch::watch) sets the keepalive options
    /// of the socket.
    ///
    /// # Errors
    /// Fails if no endpoint accepts in time.
    pub(crate) async fn connect(
        self: &Arc<Self>,
        client: IpAddr,
        first: &[u8],
    ) -> Result<Connected, ConnectError> {
        let before = self.stats.active.fetch_add(1, Ordering::Relaxed);
        let place = Open(self.clone());
        if before >= self.limit {
            return Err(self.overflow(client, ConnectError::Overflow));
        }
        let Some(share) = self.shares.take_at(client, before) else {
            return Err(self.overflow(client, ConnectError::Share));
        };
        let mut failed = ConnectError::NoEndpoint;
        for endpoint in self.candidates() {
            match timeout(CONNECT_TIMEOUT, open(endpoint, first)).await {
                Ok(Ok((stream, sent))) => {
                    self.stats.opened.fetch_add(1, Ordering::Relaxed);
                    return Ok(Connected {
                        stream,
                        sent,
                        upstream: self.clone(),
                        share: None,
                        _place: share,
                        _open: place,
                    });
                }
                Ok(Err(error)) if error.raw_os_error() == Some(Errno::MFILE.raw_os_error()) => {
                    return Err(ConnectError::NoDescriptor);
                }
                Ok(Err(error)) => {
                    self.stats.failed.fetch_add(1, Ordering::Relaxed);
                    failed = ConnectError::Refused;
                    if is_unreachable(&error) {
                        self.avoid(endpoint);
                    }
                }
                Err(_) => {
                    self.stats.timed_out.fetch_add(1, Ordering::Relaxed);
                    failed = ConnectError::TimedOut;
                    self.avoid(endpoint);
                }
            }
        }
        Err(failed)
    }

    /// Counts a refusal because of the limit, and logs a warning at most every [`WARN_INTERVAL`].
    fn overflow(&self, client: IpAddr, error: ConnectError) -> ConnectError {
        self.stats.overflowed.fetch_add(1, Ordering::Relaxed);
        let now = Instant::now();
        let mut warned = self.warned.lock();
        if warned.is_none_or(|at| now - at >= WARN_INTERVAL) {
            *warned = Some(now);
            warn!(upstream = %self.key, %client, %error, limit = self.limit, "connection refused: raise --max-connections");
        }
        error
    }

    /// Returns the endpoints to try for one connection: in the order of the rotation, silent endpoints last.
    fn candidates(&self) -> Vec<SocketAddr> {
        let (backend, silent) = (self.backend.read().clone(), self.silent.read());
        let endpoints = &backend.endpoints;
        let (turn, count) = (self.turn.fetch_add(1, Ordering::Relaxed), endpoints.len());
        let in_order = (0..count).map(|offset| turn.wrapping_add(offset) % count);
        let in_order = in_order.filter_map(|index| endpoints.get(index).copied());
        if silent.is_empty() {
            return in_order.take(ATTEMPTS).collect();
        }
        let is_silent = |endpoint: &SocketAddr| silent.contains(endpoint);
        let answering = in_order.clone().filter(|endpoint| !is_silent(endpoint));
        let last = in_order.filter(is_silent);
        answering.chain(last).take(ATTEMPTS).collect()
    }

    /// Avoids a silent endpoint until it answers. Probes find out, not the connections of clients.
    fn avoid(self: &Arc<Self>, endpoint: SocketAddr) {
        if !self.silent.write().insert(endpoint) {
            return;
        }
        let (upstream, key) = (Arc::downgrade(self), self.key.clone());
        warn!(upstream = %key, %endpoint, "the endpoint is silent or unreachable: new connections use other endpoints, if there are any");
        tokio::spawn(async move {
            loop {
                sleep(PROBE_PAUSE).await;
                let opened = timeout(CONNECT_TIMEOUT, open(endpoint, &[])).await;
                let answers = match opened {
                    Ok(Ok(_)) => true,
                    // A refusal is an answer too.
                    Ok(Err(error)) => error.kind() == io::ErrorKind::ConnectionRefused,
                    Err(_) => false,
                };
                let Some(upstream) = upstream.upgrade() else {
                    return;
                };
                let is_used = upstream.backend.read().endpoints.contains(&endpoint);
                if answers || !is_used {
                    upstream.silent.write().remove(&endpoint);
                    return info!(upstream = %key, %endpoint, answers, "end of the endpoint's probes");
                }
            }
        });
    }

    pub(crate) fn endpoint_count(&self) -> usize {
        self.backend.read().endpoints.len()
    }
}

/// Connects, and returns the socket and the number of sent `first` bytes. A connection to an endpoint on the
/// same host is open when `connect(2)` returns, so the immediate send saves a wait and two system calls; for
/// other endpoints the immediate send costs a system call.
async fn open(endpoint: SocketAddr, first: &[u8]) -> io::Result<(TcpStream, usize)> {
    let kind = Type::STREAM.nonblocking();
    let socket = Socket::new(Domain::for_address(endpoint), kind, None)?;
    if is_last(&socket) {
        return Err(Errno::MFILE.into());
    }
    socket.set_tcp_nodelay(true)?;
    if !first.is_empty() {
        // The last acknowledgement of the handshake then travels with these bytes, which saves a packet.
        socket.set_tcp_quickack(false)?;
    }
    if let Err(error) = socket.connect(&endpoint.into())
        && error.raw_os_error() != Some(Errno::INPROGRESS.raw_os_error())
    {
        return Err(error);
    }
    // Called even without bytes to send: the result shows whether the connection is open.
    match socket.send(first) {
        Ok(sent) => Ok((TcpStream::from_std(socket.into())?, sent)),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            let stream = TcpStream::from_std(socket.into())?;
            stream.writable().await?;
            match stream.take_error()? {
                Some(error) => Err(error),
                None => Ok((stream, 0)),
            }
        }
        Err(error) => Err(error),
    }
}

/// Returns true if a connect failed because nothing answers at the address, for example after the end of a node.
fn is_unreachable(error: &io::Error) -> bool {
    use io::ErrorKind::{HostUnreachable, NetworkUnreachable, TimedOut};
    matches!(
        error.kind(),
        HostUnreachable | NetworkUnreachable | TimedOut
    )
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.stats.active.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
