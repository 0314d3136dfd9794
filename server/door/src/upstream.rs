//! The endpoints of one Service port, and the connections to them.

mod flows;
mod times;

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use culvert_host::net::proxy_protocol::Origin;
use culvert_host::net::shares::{Share, Shares};
use culvert_host::telemetry::metrics::{Kind, Page};
use parking_lot::RwLock;
use rustix::io::Errno;
use socket2::{Domain, Socket, Type};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

pub(crate) use self::flows::FlowPlace;
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
            self.stats.overflowed.fetch_add(1, Ordering::Relaxed);
            return Err(ConnectError::Overflow);
        }
        let Some(share) = self.shares.take_at(client, before) else {
            self.stats.overflowed.fetch_add(1, Ordering::Relaxed);
            return Err(ConnectError::Share);
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
        warn!(upstream = %key, %endpoint, "the endpoint is silent: new connections use other endpoints");
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

/// Label of every metric here, with the upstream's key.
const CLUSTER: &str = "envoy_cluster_name";

/// A metric of every upstream: name, type, help, value.
type Metric = (&'static str, Kind, &'static str, fn(&Upstream) -> u64);

/// Metrics that KKP's dashboards read, and related Envoy metrics.
const METRICS: [Metric; 11] = [
    (
        "envoy_cluster_membership_total",
        Kind::Gauge,
        "Endpoints.",
        |upstream| upstream.endpoint_count() as u64,
    ),
    (
        "envoy_cluster_membership_healthy",
        Kind::Gauge,
        "Ready endpoints; those that are not ready are no members.",
        |upstream| upstream.endpoint_count() as u64,
    ),
    (
        "envoy_cluster_upstream_cx_active",
        Kind::Gauge,
        "Open connections to endpoints, and those being opened.",
        |upstream| upstream.stats.active.load(Ordering::Relaxed),
    ),
    (
        "envoy_cluster_upstream_cx_total",
        Kind::Counter,
        "Attempts to connect to endpoints.",
        |upstream| {
            let Stats {
                opened,
                failed,
                timed_out,
                ..
            } = &upstream.stats;
            let all = [opened, failed, timed_out];
            all.iter().map(|count| count.load(Ordering::Relaxed)).sum()
        },
    ),
    (
        "envoy_cluster_upstream_cx_connect_fail",
        Kind::Counter,
        "Attempts to connect that failed, those that timed out included.",
        |upstream| {
            let stats = &upstream.stats;
            stats.failed.load(Ordering::Relaxed) + stats.timed_out.load(Ordering::Relaxed)
        },
    ),
    (
        "envoy_cluster_upstream_cx_connect_timeout",
        Kind::Counter,
        "Attempts to connect that timed out.",
        |upstream| upstream.stats.timed_out.load(Ordering::Relaxed),
    ),
    (
        "envoy_cluster_upstream_cx_overflow",
        Kind::Counter,
        "Connections refused because of --max-connections.",
        |upstream| upstream.stats.overflowed.load(Ordering::Relaxed),
    ),
    (
        "envoy_cluster_upstream_cx_rx_bytes_total",
        Kind::Counter,
        "Bytes received from endpoints.",
        |upstream| upstream.stats.received.load(Ordering::Relaxed),
    ),
    (
        "envoy_cluster_upstream_cx_tx_bytes_total",
        Kind::Counter,
        "Bytes sent to endpoints.",
        |upstream| upstream.stats.sent.load(Ordering::Relaxed),
    ),
    (
        "envoy_cluster_upstream_rq_total",
        Kind::Counter,
        "Connections and CONNECT requests that reached an endpoint.",
        |upstream| upstream.stats.opened.load(Ordering::Relaxed),
    ),
    (
        "envoy_cluster_circuit_breakers_default_cx_open",
        Kind::Gauge,
        "1 while --max-connections are open.",
        |upstream| u64::from(upstream.stats.active.load(Ordering::Relaxed) >= upstream.limit),
    ),
];

/// Adds the metrics of all `upstreams`. Computed on request, so the metrics of a removed Service disappear
/// together with the Service.
pub(crate) fn add_metrics(upstreams: &[Arc<Upstream>], page: &mut Page) {
    for (name, kind, help, value) in METRICS {
        let mut series = page.family(name, kind, help);
        for upstream in upstreams {
            series.value((CLUSTER, upstream.key.as_str()), value(upstream));
        }
    }
    let help = "Milliseconds from a tunnel's client's end to its endpoint's.";
    let mut series = page.family(times::NAME, Kind::Histogram, help);
    for upstream in upstreams {
        upstream.stats.times.write(&upstream.key, &mut series);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]

    use culvert_host::telemetry::metrics::Registry;
    use tokio::io::AsyncReadExt as _;
    use tokio::net::TcpListener;

    use super::*;
    use crate::relay::write_all;

    async fn listener() -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        (listener, address)
    }

    fn backend(endpoints: &[SocketAddr]) -> Backend {
        Backend {
            endpoints: endpoints.to_vec(),
            ..Backend::default()
        }
    }

    const CLIENT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));

    fn upstream(endpoints: &[SocketAddr], limit: u64) -> Arc<Upstream> {
        let key = UpstreamKey::of_service("cluster-a", "apiserver-external", "secure");
        Upstream::new(key, &backend(endpoints), limit)
    }

    #[tokio::test]
    async fn endpoints_rotate_and_a_refusing_endpoint_is_skipped() {
        let (_a, a) = listener().await;
        let (_b, b) = listener().await;
        let (gone, c) = listener().await;
        drop(gone);
        let upstream = upstream(&[a, b, c], 100);
        let mut peers = Vec::new();
        for _ in 0..6 {
            let connected = upstream.connect(CLIENT, b"hello").await.unwrap();
            peers.push(connected.stream.peer_addr().unwrap());
        }
        // Every third connection finds its endpoint gone and uses the next endpoint.
        assert_eq!(peers, [a, b, a, a, b, a]);
        assert_eq!(upstream.stats.failed.load(Ordering::Relaxed), 2);
        upstream.set_backend(&backend(&[c]));
        let refused = upstream.connect(CLIENT, &[]).await;
        assert_eq!(refused.err(), Some(ConnectError::Refused));
        upstream.set_backend(&Backend::default());
        let none = upstream.connect(CLIENT, &[]).await;
        assert_eq!(none.err(), Some(ConnectError::NoEndpoint));
        assert_eq!(upstream.stats.active.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn one_address_leaves_places_for_others() {
        let (_a, a) = listener().await;
        let upstream = upstream(&[a], 18);
        let mut open = Vec::new();
        let refused = loop {
            match upstream.connect(CLIENT, &[]).await {
                Ok(connected) => open.push(connected),
                Err(error) => break error,
            }
        };
        assert_eq!((open.len(), refused), (16, ConnectError::Share));
        let other = IpAddr::from([192, 0, 2, 2]);
        open.push(upstream.connect(other, &[]).await.unwrap());
        drop(open);
        assert!(upstream.connect(CLIENT, &[]).await.is_ok());
        assert_eq!(upstream.stats.active.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn no_more_connections_are_open_than_the_limit_allows() {
        let (_a, a) = listener().await;
        let upstream = upstream(&[a], 1);
        let first = upstream.connect(CLIENT, &[]).await.unwrap();
        let second = upstream.connect(CLIENT, &[]).await;
        assert_eq!(second.err(), Some(ConnectError::Overflow));
        drop(first);
        assert!(upstream.connect(CLIENT, &[]).await.is_ok());
        let page = Registry::new(&[])
            .unwrap()
            .render_with(|page| add_metrics(&[upstream], page));
        let line = "envoy_cluster_upstream_cx_overflow{envoy_cluster_name=\
                    \"cluster-a/apiserver-external-secure\"} 1\n";
        assert!(page.contains(line), "{page}");
    }

    /// Sends the rest of `first` after the handshake; returns true if the endpoint receives all of `first`.
    async fn arrives(listener: &TcpListener, opened: (TcpStream, usize), first: &[u8]) -> bool {
        let (stream, sent) = opened;
        let rest = write_all(&stream, &first[sent..]);
        let receive = async {
            let (mut accepted, _) = listener.accept().await.unwrap();
            let mut received = vec![0; first.len()];
            accepted.read_exact(&mut received).await.unwrap();
            received
        };
        let (written, received) = tokio::join!(rest, receive);
        written.unwrap();
        received == first
    }

    #[tokio::test]
    async fn the_first_bytes_arrive_once_with_the_handshake_or_after_it() {
        let mut at_once = 0;
        for host in ["127.0.0.1:0", "[::1]:0"] {
            let listener = TcpListener::bind(host).await.unwrap();
            let address = listener.local_addr().unwrap();
            for length in [0, 1, 500, 16 * 1024 * 1024] {
                let first: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
                let opened = super::open(address, &first).await.unwrap();
                at_once += usize::from(opened.1 > 0);
                assert!(arrives(&listener, opened, &first).await, "{length} bytes");
            }
        }
        // The kernel may be too busy in one of the cases, but not in all.
        assert!(at_once > 0);
    }

    /// Returns a listener that answers no SYN until its first connection is accepted: the queue has room for a
    /// single connection. Clients repeat a SYN after a second.
    async fn full_listener() -> (TcpListener, SocketAddr, TcpStream) {
        let listener = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
        listener.bind(&any.into()).unwrap();
        listener.listen(0).unwrap();
        listener.set_nonblocking(true).unwrap();
        let listener = TcpListener::from_std(listener.into()).unwrap();
        let address = listener.local_addr().unwrap();
        let first = TcpStream::connect(address).await.unwrap();
        (listener, address, first)
    }

    #[tokio::test]
    async fn silent_endpoint_costs_one_timeout_until_it_answers_probes() {
        let (full, a, _first) = full_listener().await;
        let (_b, b) = listener().await;
        let upstream = upstream(&[a, b], 100);
        let connect = async || {
            let connected = upstream.connect(CLIENT, &[]).await.unwrap();
            connected.stream.peer_addr().unwrap()
        };
        for _ in 0..6 {
            assert_eq!(connect().await, b);
        }
        assert_eq!(upstream.stats.timed_out.load(Ordering::Relaxed), 1);
        // Accepting frees the queue, and the next probe has an answer. From now on the queue has room for all
        // connections.
        socket2::SockRef::from(&full).listen(128).unwrap();
        let accept = async { while full.accept().await.is_ok() {} };
        let recovers = async {
            while connect().await != a {
                sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::select! {
            () = accept => unreachable!(),
            () = recovers => {}
        }
        assert_eq!(upstream.stats.timed_out.load(Ordering::Relaxed), 1);
    }

    #[tokio::test]
    async fn slow_endpoint_is_waited_for() {
        let (listener, address, _first) = full_listener().await;
        let mut slow = std::pin::pin!(super::open(address, b"hello"));
        let early = timeout(Duration::from_millis(100), &mut slow).await;
        assert!(early.is_err(), "the queue has room");
        let _first = listener.accept().await.unwrap();
        let opened = slow.await.unwrap();
        assert_eq!(opened.1, 0);
        assert!(arrives(&listener, opened, b"hello").await);
    }
}
