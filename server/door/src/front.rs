//! The listeners that forward bytes unchanged: TLS by server name, and node ports.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use culvert_host::net::listen::{Accepted, Listener};
use culvert_host::runtime::shards::{Seat, Shards, on_shard};
use culvert_stream::CloseReason;
use socket2::SockRef;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, warn};

use super::client_hello::{Hello, HelloError, HelloReader};
use super::config::Limits;
use super::metrics::{Entrance, ProxyMetrics, Refusal};
use super::relay::{Ended, Relay, write_all};
use super::socket::read_once;
use super::table::Table;
use super::upstream::{ConnectError, Stats, Upstream};

/// Time limit for the first bytes of a client: its ClientHello or its request (Envoy's listener filter
/// timeout).
pub(crate) const FIRST_BYTES_TIMEOUT: Duration = Duration::from_secs(15);

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
    /// Threads for connections.
    pub shards: Shards,
    pub tasks: TaskTracker,
    /// Token to end all connections at once.
    pub cut: CancellationToken,
    /// Token for the start of the drain.
    pub draining: CancellationToken,
}

impl Front {
    /// Accepts connections until `until` fires. Each connection runs on the thread picked by `seat`.
    pub(crate) async fn accept<C, T>(
        self: Arc<Self>,
        listener: Listener,
        until: CancellationToken,
        seat: fn(&Shards) -> Seat,
        connection: C,
    ) where
        C: Fn(TcpStream, SocketAddr) -> T + Clone + Send + 'static,
        T: Future<Output = ()> + Send + 'static,
    {
        let handle = |accepted| {
            let (seat, connection) = (seat(&self.shards), connection.clone());
            let (shard, cut) = (seat.shard(), self.cut.clone());
            let serve = move |accepted| async move {
                let _seat = seat;
                if let Accepted::Tcp(stream, peer) = accepted {
                    // Not `run_until_cancelled`: its future would reserve space for the connection's future
                    // twice.
                    tokio::select! {
                        () = connection(stream, peer) => {}
                        () = cut.cancelled() => {}
                    }
                }
            };
            on_shard(&self.shards, shard, &self.tasks, accepted, serve);
        };
        listener.serve(until, handle).await;
    }

    /// Forwards a TLS connection to the Service that its ClientHello names.
    pub(crate) async fn serve_sni(self: Arc<Self>, client: TcpStream, peer: SocketAddr) {
        let _open = self.metrics.open(Entrance::Sni);
        let refuse = |reason, why: &str| {
            self.metrics.refused(Entrance::Sni, reason);
            debug!(%peer, why, "TLS connection refused");
        };
        let hello = timeout(FIRST_BYTES_TIMEOUT, read_hello(&client)).await;
        let (hello, received) = match hello {
            Ok(Ok(hello)) => hello,
            Ok(Err(error)) => {
                let why = error.map_or(NO_HELLO.to_owned(), |error| error.to_string());
                return refuse(Refusal::Garbage, &why);
            }
            Err(_) => return refuse(Refusal::Timeout, NO_HELLO),
        };
        let Some(name) = hello.server_name else {
            return refuse(Refusal::NoServerName, "the client sent no server name");
        };
        let Some(upstream) = self.table.by_server_name(&name) else {
            return refuse(Refusal::Unknown, &format!("no Service has the name {name}"));
        };
        self.forward(Entrance::Sni, client, peer, &upstream, received)
            .await;
    }

    /// Forwards a connection to the Service that owns the node port.
    pub(crate) async fn serve_node_port(
        self: Arc<Self>,
        client: TcpStream,
        peer: SocketAddr,
        port: u16,
    ) {
        let _open = self.metrics.open(Entrance::NodePort);
        match self.table.by_node_port(port) {
            Some(upstream) => {
                self.forward(Entrance::NodePort, client, peer, &upstream, Vec::new())
                    .await;
            }
            // The port was closed after this connection was accepted.
            None => self.metrics.refused(Entrance::NodePort, Refusal::Unknown),
        }
    }

    async fn forward(
        self: &Arc<Self>,
        entrance: Entrance,
        client: TcpStream,
        peer: SocketAddr,
        upstream: &Arc<Upstream>,
        received: Vec<u8>,
    ) {
        let connected = match upstream.connect(&received).await {
            Ok(connected) => connected,
            Err(error) => {
                self.metrics.refused(entrance, refusal_of(error));
                debug!(%peer, upstream = %upstream.key, %error, "connection refused");
                return;
            }
        };
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
                }
            }
        }
        debug!(%peer, upstream = %upstream.key, ?ended, "connection closed");
        if let Some(reason) = ended.reason {
            counted.end(reason);
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
        // If the registration on the other thread fails, the dropped socket sends a reset. Otherwise the
        // endpoint would mistake the bytes so far for the complete stream.
        SockRef::from(&endpoint).set_linger(Some(Duration::ZERO))?;
        let (client, endpoint) = (client.into_std()?, endpoint.into_std()?);
        let front = self.clone();
        let rest = async move {
            let client = TcpStream::from_std(client)?;
            let endpoint = TcpStream::from_std(endpoint)?;
            SockRef::from(&endpoint).set_linger(None)?;
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
        ConnectError::Overflow => Refusal::Overflow,
        _ => Refusal::Upstream,
    }
}

/// Reads until the hello is complete; returns the hello and all received bytes. The error is `None` if the
/// client closed the connection.
async fn read_hello(client: &TcpStream) -> Result<(Hello, Vec<u8>), Option<HelloError>> {
    let mut reader = HelloReader::default();
    let mut received = Vec::new();
    loop {
        client.readable().await.map_err(|_| None)?;
        received.reserve(HELLO_READ_BYTES);
        match read_once(client, &mut received) {
            Ok(1..) => {
                if let Some(hello) = reader.read(&received)? {
                    return Ok((hello, received));
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            _ => return Err(None),
        }
    }
}
