//! The listeners that forward bytes unchanged: TLS by server name, and node ports.

use std::fmt::Display;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use culvert_host::net::admission::{Admission, AdmissionLimits, Unadmitted};
use culvert_host::net::listen::{Accepted, Listener, TOO_MANY_FILES};
use culvert_host::net::long_path;
use culvert_host::net::networks::Networks;
use culvert_host::net::proxy_protocol::{self, HeaderError, Origin, UNEXPECTED_HEADER, is_header};
use culvert_host::net::shares::Shares;
use culvert_host::net::socket::read_once;
use culvert_host::runtime::shards::{Seat, Shards, on_shard};
use culvert_stream::CloseReason;
use socket2::SockRef;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, warn};

use super::client_hello::{Hello, HelloError, HelloReader};
use super::config::Limits;
use super::metrics::{Entrance, ProxyMetrics, Refusal};
use super::relay::{Ended, Relay, write_all};
use super::table::Table;
use super::upstream::{ConnectError, Stats, Upstream};

/// Time limit for the first bytes of a client: its ClientHello or its request (Envoy's listener filter
/// timeout).
pub(crate) const FIRST_BYTES_TIMEOUT: Duration = Duration::from_secs(15);

/// Limits for clients that have sent a part of their ClientHello or request. Each occupies up to 64 KiB.
pub(crate) const ADMISSION: AdmissionLimits = AdmissionLimits {
    peers: 256,
    bytes: usize::MAX,
    deadline: FIRST_BYTES_TIMEOUT,
    grace: Duration::from_secs(1),
};

/// Buffer space for one read of a ClientHello. Most hellos are smaller.
const HELLO_READ_BYTES: usize = 2 * 1024;

/// Log text for a client that sent no hello.
const NO_HELLO: &str = "no ClientHello";

/// The shared state of all connections.
pub(crate) struct Front {
    pub table: Arc<Table>,
    /// Timeouts and keepalive.
    pub limits: Limits,
    pub metrics: Arc<ProxyMetrics>,
    /// Networks of load balancers that send the PROXY protocol.
    pub proxies: Networks,
    /// Shares of the clients' addresses in the descriptors.
    pub shares: Arc<Shares>,
    /// Slots for clients that have sent an incomplete ClientHello.
    pub hellos: Arc<Admission>,
    /// Threads for connections.
    pub shards: Shards,
    pub tasks: TaskTracker,
    /// Token to end all connections at once.
    pub cut: CancellationToken,
    /// Fires when the listeners close. HTTP/2 clients then get a GOAWAY.
    pub closing: CancellationToken,
}

impl Front {
    /// Accepts connections until `until` fires. Each connection runs on the thread picked by `seat`.
    pub(crate) async fn accept<C, T>(
        self: Arc<Self>,
        listener: Listener,
        until: CancellationToken,
        seat: fn(&Shards) -> Seat,
        entrance: Entrance,
        connection: C,
    ) where
        C: Fn(TcpStream, Origin) -> T + Clone + Send + 'static,
        T: Future<Output = ()> + Send + 'static,
    {
        let handle = |accepted| {
            let (seat, connection) = (seat(&self.shards), connection.clone());
            let (shard, front) = (seat.shard(), self.clone());
            let serve = move |accepted| async move {
                // Borrowed, because the task would keep a second copy of a moved value.
                let _seat = &seat;
                if let Accepted::Tcp(stream, peer) = accepted {
                    // Not `run_until_cancelled`: its future would reserve space for the connection's future
                    // twice.
                    tokio::select! {
                        () = front.begin(entrance, stream, peer, connection) => {}
                        () = front.cut.cancelled() => {}
                    }
                }
            };
            on_shard(&self.shards, shard, &self.tasks, accepted, serve);
        };
        let refused = || {
            self.metrics.refused(entrance, Refusal::TooManyConnections);
        };
        listener.serve(until, handle, refused).await;
    }

    /// Serves a connection once its client's address is known and has a share left.
    #[expect(
        clippy::manual_async_fn,
        reason = "an async fn would keep its arguments twice"
    )]
    fn begin<C, T>(
        &self,
        entrance: Entrance,
        stream: TcpStream,
        peer: SocketAddr,
        connection: C,
    ) -> impl Future<Output = ()>
    where
        C: FnOnce(TcpStream, Origin) -> T,
        T: Future<Output = ()>,
    {
        async move {
            long_path::tune_link(&stream);
            let _open = self.metrics.open(entrance);
            let origin =
                match proxy_protocol::origin(&stream, peer, &self.proxies, &self.hellos).await {
                    Ok(origin) => origin,
                    // A port check of the load balancer.
                    Err(HeaderError::Left) => return,
                    Err(HeaderError::Unadmitted(why)) => {
                        self.metrics.refused(entrance, Refusal::TooManyConnections);
                        debug!(%peer, %why, "connection refused before its PROXY protocol header");
                        return;
                    }
                    Err(why) => return self.refuse_header(entrance, peer, &why.to_string()),
                };
            // Held until the connection ends.
            let share = self.shares.take(origin.ip(), &stream);
            if share.is_some() {
                connection(stream, origin).await;
            } else {
                self.refuse_share(entrance, &origin);
            }
        }
    }

    /// Refuses a connection with a wrong PROXY protocol header.
    pub(crate) fn refuse_header(&self, entrance: Entrance, peer: impl Display, why: &str) {
        let listener = entrance.as_str();
        warn!(listener, %peer, why, "connection refused");
        self.metrics.refused(entrance, Refusal::ProxyHeader);
    }

    /// Refuses a connection of a source that has used up its share.
    pub(crate) fn refuse_share(&self, entrance: Entrance, client: &Origin) {
        let listener = entrance.as_str();
        warn!(listener, %client, "connection refused: the address has more connections than descriptors are free: {TOO_MANY_FILES}");
        self.metrics.refused(entrance, Refusal::TooManyConnections);
    }

    /// Forwards a TLS connection to the Service that its ClientHello names.
    #[expect(
        clippy::manual_async_fn,
        reason = "an async fn would keep its arguments twice"
    )]
    pub(crate) fn serve_sni(
        self: Arc<Self>,
        client: TcpStream,
        peer: Origin,
    ) -> impl Future<Output = ()> + Send {
        async move {
            if let Some((upstream, received)) = self.route(&client, &peer).await {
                self.forward(Entrance::Sni, client, peer, &upstream, received)
                    .await;
            }
        }
    }

    /// Reads a ClientHello. Returns the upstream that the hello names, and all received bytes.
    async fn route(&self, client: &TcpStream, peer: &Origin) -> Option<(Arc<Upstream>, Vec<u8>)> {
        let refuse = |reason, why: &str| {
            self.metrics.refused(Entrance::Sni, reason);
            debug!(%peer, why, "TLS connection refused");
        };
        let hello = timeout(FIRST_BYTES_TIMEOUT, self.read_hello(client, peer)).await;
        let (hello, received) = match hello {
            Ok(Ok(hello)) => hello,
            Ok(Err(none)) => {
                match none {
                    NoHello::Bad(error) => refuse(Refusal::Garbage, &error.to_string()),
                    NoHello::Left => refuse(Refusal::Garbage, NO_HELLO),
                    NoHello::Header => {
                        self.refuse_header(Entrance::Sni, peer, UNEXPECTED_HEADER);
                    }
                    NoHello::Unadmitted(why) => {
                        self.metrics
                            .refused(Entrance::Sni, Refusal::TooManyConnections);
                        warn!(%peer, reason = %why, "TLS connection refused");
                    }
                }
                return None;
            }
            Err(_) => {
                refuse(Refusal::Timeout, NO_HELLO);
                return None;
            }
        };
        let Some(name) = hello.server_name else {
            refuse(Refusal::NoServerName, "the client sent no server name");
            return None;
        };
        let Some(upstream) = self.table.by_server_name(&name) else {
            refuse(Refusal::Unknown, &format!("no Service has the name {name}"));
            return None;
        };
        Some((upstream, received))
    }

    /// Forwards a connection to the Service that owns the node port.
    #[expect(
        clippy::manual_async_fn,
        reason = "an async fn would keep its arguments twice"
    )]
    pub(crate) fn serve_node_port(
        self: Arc<Self>,
        client: TcpStream,
        peer: Origin,
        port: u16,
    ) -> impl Future<Output = ()> + Send {
        async move {
            match self.table.by_node_port(port) {
                Some(upstream) => {
                    self.forward(Entrance::NodePort, client, peer, &upstream, Vec::new())
                        .await;
                }
                // The port was closed after this connection was accepted.
                None => self.metrics.refused(Entrance::NodePort, Refusal::Unknown),
            }
        }
    }

    /// Reads until the hello is complete; returns the hello and all received bytes. An incomplete hello needs a
    /// slot, because it occupies memory. Most hellos arrive in one piece.
    async fn read_hello(
        &self,
        client: &TcpStream,
        peer: &Origin,
    ) -> Result<(Hello, Vec<u8>), NoHello> {
        let mut hello = Arriving::default();
        if let Some(whole) = hello.read(client).await? {
            return Ok((whole, hello.received));
        }
        let rest = async {
            let candidate = self.hellos.enter(peer.ip(), Instant::now()).await;
            let candidate = candidate.map_err(NoHello::Unadmitted)?;
            candidate.has_sent();
            loop {
                let read = candidate.run(hello.read(client)).await;
                if let Some(whole) = read.map_err(NoHello::Unadmitted)?? {
                    return Ok((whole, hello.received));
                }
            }
        };
        // In a box, because most connections do not need the space.
        Box::pin(rest).await
    }

    #[expect(
        clippy::manual_async_fn,
        reason = "an async fn would keep its arguments twice"
    )]
    fn forward(
        self: &Arc<Self>,
        entrance: Entrance,
        client: TcpStream,
        peer: Origin,
        upstream: &Arc<Upstream>,
        mut received: Vec<u8>,
    ) -> impl Future<Output = ()> + Send {
        async move {
            if !upstream.permits(peer.ip()) {
                self.metrics.refused(entrance, Refusal::Address);
                debug!(%peer, upstream = %upstream.key, "connection refused: the Service does not allow the address");
                return;
            }
            received = {
                let origin = match upstream.expects_header() {
                    true => peer.with_local(&client),
                    false => peer,
                };
                upstream.first_bytes(&origin, received)
            };
            let connected = match upstream.connect(peer.ip(), &received).await {
                Ok(connected) => connected,
                Err(error) => {
                    self.metrics.refused(entrance, refusal_of(error));
                    debug!(%peer, upstream = %upstream.key, %error, "connection refused");
                    return;
                }
            };
            long_path::limit_unread(&client, &connected.stream);
            let counted = self.metrics.count_connection();
            let unsent = received.get(connected.sent..).unwrap_or_default();
            if write_all(&connected.stream, unsent).await.is_err() {
                return counted.end(CloseReason::EndpointLost);
            }
            let stats = &upstream.stats;
            stats
                .sent
                .fetch_add(received.len() as u64, std::sync::atomic::Ordering::Relaxed);
            drop(received);
            let spreads = self.shards.count() > 1;
            let sides = (&client, &connected.stream);
            let mut ended = self.relay(entrance, sides, stats, spreads).run().await;
            if ended.reason.is_none() {
                let sides = (client, connected.stream);
                let rest = Box::pin(self.forward_bulk(entrance, sides, upstream.clone()));
                match rest.await {
                    Ok(rest) => {
                        ended = Ended {
                            reason: rest.reason,
                            sent: ended.sent + rest.sent,
                            received: ended.received + rest.received,
                        };
                    }
                    Err(error) => {
                        warn!(%peer, %error, "a connection could not continue on another thread");
                        ended.reason = Some(CloseReason::EndpointLost);
                    }
                }
            }
            debug!(%peer, upstream = %upstream.key, ?ended, "connection closed");
            if let Some(reason) = ended.reason {
                counted.end(reason);
            }
        }
    }

    /// Continues a bulk connection on the thread with the fewest bulk connections.
    async fn forward_bulk(
        self: &Arc<Self>,
        entrance: Entrance,
        (client, endpoint): (TcpStream, TcpStream),
        upstream: Arc<Upstream>,
    ) -> io::Result<Ended> {
        let seat = self.shards.bulk_seat();
        if Some(seat.shard()) == Shards::current() {
            let sides = (&client, &endpoint);
            let relay = self.relay(entrance, sides, &upstream.stats, false);
            return Ok(relay.run().await);
        }
        // If the registration on the other thread fails, the dropped sockets send resets. Otherwise both sides would
        // mistake the bytes so far for the complete stream.
        for socket in [&client, &endpoint] {
            SockRef::from(socket).set_linger(Some(Duration::ZERO))?;
        }
        let (client, endpoint) = (client.into_std()?, endpoint.into_std()?);
        let front = self.clone();
        let rest = async move {
            let client = TcpStream::from_std(client)?;
            let endpoint = TcpStream::from_std(endpoint)?;
            for socket in [&client, &endpoint] {
                SockRef::from(socket).set_linger(None)?;
            }
            let sides = (&client, &endpoint);
            let relay = front.relay(entrance, sides, &upstream.stats, false);
            Ok(relay.run().await)
        };
        self.shards.run_on(seat.shard(), rest).await?
    }

    fn relay<'a>(
        &'a self,
        entrance: Entrance,
        (client, endpoint): (&'a TcpStream, &'a TcpStream),
        stats: &'a Stats,
        stops_at_bulk: bool,
    ) -> Relay<'a> {
        let limits = &self.limits;
        Relay {
            client: limits.client(client),
            endpoint: limits.endpoint(endpoint),
            is_tls: matches!(entrance, Entrance::Sni),
            stops_at_bulk,
            idle: match entrance {
                Entrance::Sni => limits.sni_idle,
                _ => limits.node_port_idle,
            },
            sent: &stats.sent,
            received: &stats.received,
        }
    }
}

/// Returns the metric label for a failed connect.
pub(crate) fn refusal_of(error: ConnectError) -> Refusal {
    match error {
        ConnectError::Overflow | ConnectError::Share => Refusal::Overflow,
        _ => Refusal::Upstream,
    }
}

/// A ClientHello while it arrives.
#[derive(Default)]
struct Arriving {
    reader: HelloReader,
    received: Vec<u8>,
}

/// Reason for a missing hello.
enum NoHello {
    /// The bytes are not a ClientHello.
    Bad(HelloError),
    /// The client closed the connection.
    Left,
    /// The bytes are a PROXY protocol header.
    Header,
    /// The client sent an incomplete hello, and other clients got the slots.
    Unadmitted(Unadmitted),
}

impl Arriving {
    /// Reads the next bytes; returns the hello once it is complete.
    async fn read(&mut self, client: &TcpStream) -> Result<Option<Hello>, NoHello> {
        loop {
            client.readable().await.map_err(|_| NoHello::Left)?;
            self.received.reserve(HELLO_READ_BYTES);
            match read_once(client, &mut self.received) {
                Ok(1..) => {
                    let hello = self.reader.read(&self.received);
                    return hello.map_err(|error| match is_header(&self.received) {
                        true => NoHello::Header,
                        false => NoHello::Bad(error),
                    });
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                _ => return Err(NoHello::Left),
            }
        }
    }
}
