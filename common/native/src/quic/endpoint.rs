//! The UDP sockets and the settings of QUIC connections.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use quinn::crypto::rustls::{NoInitialCipherSuite, QuicClientConfig, QuicServerConfig};
use quinn::{
    ClientConfig, Connection, ConnectionId, ConnectionIdGenerator, Endpoint, EndpointConfig,
    Incoming, ServerConfig, TokioRuntime, TransportConfig, VarInt,
};
use quinn_proto::InvalidCid;
use socket2::{Domain, Protocol, SockRef, Type};

use super::ALPN;
use super::congestion::BoundedBbrConfig;
use super::connection_id::{self, CONNECTION_ID_BYTES, Tag};
use super::health::ASSUMED_ROUND_TRIP;
use super::keys::EndpointKeys;
use super::socket::Socket;

/// Window of a stream, in bytes. quinn cannot change the window of a stream. A stream moves at most a window for each
/// round trip, and less while a lost packet is sent again. A receiver that does not read holds a whole window.
pub const STREAM_WINDOW_BYTES: u32 = 2 << 20;

/// Window of all streams together, in bytes: so large that unread streams never use it up.
const CONNECTION_WINDOW_BYTES: u32 = 1 << 30;

/// Window of all streams of an agent that is not authenticated yet, in bytes: its introduction.
const HELLO_WINDOW_BYTES: u32 = 80 * 1024;

/// Largest number of bytes that wait for the peer's acknowledgements: 16 full windows of streams. Once they are used up,
/// small streams and the answers of dials wait, too.
pub(super) const SEND_WINDOW_BYTES: u32 = 16 * STREAM_WINDOW_BYTES;

/// Number of streams that an agent permits at first. quinn-proto has an entry for each permitted stream, open or not.
pub(super) const AGENT_STREAMS: u32 = 256;

/// Largest number of streams that an agent permits. More dials wait in the server.
pub(super) const MAX_STREAMS: u32 = 1 << 17;

/// Number of streams that a server permits: the control stream.
const SERVER_STREAMS: u32 = 1;

/// Time without a packet, or without an answer to a ping, after which both ends give the connection up.
pub(super) const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

/// Interval between packets of an idle agent. NAT devices forget UDP flows after 30 s.
const KEEPALIVE: Duration = Duration::from_secs(15);

/// Limits for peers between their first packet and the server's decision about them: number of peers, bytes that
/// wait for one peer, and bytes for all.
const WAITING_PEERS: usize = 256;
const WAITING_BYTES: u64 = 64 * 1024;
const ALL_WAITING_BYTES: u64 = 4 << 20;

/// Wanted size of the receive and send buffers of a socket, in bytes. The kernel grants at most the sysctls
/// `net.core.rmem_max` and `net.core.wmem_max`.
const SOCKET_BYTES: usize = 4 << 20;

/// The endpoint of a server.
pub struct ServerEndpoint {
    endpoint: Endpoint,
    local: Arc<Local>,
    transport: Arc<TransportConfig>,
    keys: EndpointKeys,
}

/// Address that agents connect to. A socket for all addresses learns the address from its peers.
#[derive(Debug)]
struct Local {
    port: u16,
    known: Mutex<Known>,
}

/// Address as far as it is known.
#[derive(Clone, Copy, Debug)]
struct Known {
    /// Tag of new connection ids.
    tag: Tag,
    /// True once an agent was admitted. Strangers then do not change the tag.
    is_proved: bool,
}

/// Generator of connection ids with the tag of the server's address.
struct Ids(Arc<Local>);

// === impl ServerEndpoint ===

impl ServerEndpoint {
    /// Opens the endpoint of a server on `socket`. `tls` is the configuration of the listener for agents.
    ///
    /// # Errors
    /// Fails if the socket cannot be used, or if `tls` has no suite of TLS 1.3.
    pub fn new(
        socket: UdpSocket,
        tls: &rustls::ServerConfig,
        keys: EndpointKeys,
    ) -> io::Result<Self> {
        let address = socket.local_addr()?;
        enlarge_buffers(&socket);
        let local = Arc::new(Local {
            port: address.port(),
            known: Mutex::new(Known {
                tag: Tag::of(address),
                is_proved: false,
            }),
        });
        let mut config = EndpointConfig::new(keys.reset.clone());
        let ids = local.clone();
        config.cid_generator(move || Box::new(Ids(ids.clone())));
        let mut transport = transport();
        transport
            .max_concurrent_bidi_streams(SERVER_STREAMS.into())
            .receive_window(HELLO_WINDOW_BYTES.into());
        let transport = Arc::new(transport);
        let server = server_config(tls, &keys, &transport).map_err(io::Error::other)?;
        let (runtime, socket) = (Arc::new(TokioRuntime), Socket::of_server(socket)?);
        let endpoint = Endpoint::new_with_abstract_socket(config, Some(server), socket, runtime)?;
        Ok(Self {
            endpoint,
            local,
            transport,
            keys,
        })
    }

    /// Returns the next peer that has proved its address. Other peers receive a Retry packet, which costs no memory.
    /// Returns `None` after [`close`](Self::close).
    pub async fn accept(&self) -> Option<Incoming> {
        loop {
            let incoming = self.endpoint.accept().await?;
            if incoming.remote_address_validated() {
                self.local.learn(incoming.local_ip(), false);
                return Some(incoming);
            }
            if let Err(error) = incoming.retry() {
                error.into_incoming().ignore();
            }
        }
    }

    /// Returns the configuration for a new connection, by the current TLS configuration of the listener for agents.
    ///
    /// # Errors
    /// Fails if `tls` has no suite of TLS 1.3.
    pub fn config(
        &self,
        tls: &rustls::ServerConfig,
    ) -> Result<Arc<ServerConfig>, NoInitialCipherSuite> {
        server_config(tls, &self.keys, &self.transport).map(Arc::new)
    }

    /// Opens the window of an agent's connection, once the agent is authenticated. New connection ids lead to the address
    /// that this agent has connected to.
    pub fn admit(&self, connection: &Connection) {
        self.local.learn(connection.local_ip(), true);
        connection.set_receive_window(CONNECTION_WINDOW_BYTES.into());
    }

    /// Ends all connections and refuses new ones.
    pub async fn close(&self, text: &str) {
        self.endpoint.close(super::NO_REASON, text.as_bytes());
        self.endpoint.wait_idle().await;
    }
}

// === impl Local ===

impl Local {
    /// Learns the address that a peer has connected to.
    fn learn(&self, ip: Option<IpAddr>, is_proved: bool) {
        let mut known = self.known.lock();
        if let Some(ip) = ip
            && (is_proved || !known.is_proved)
        {
            let tag = Tag::of((ip, self.port).into());
            *known = Known { tag, is_proved };
        }
    }

    fn tag(&self) -> Tag {
        self.known.lock().tag
    }
}

// === impl Ids ===

impl ConnectionIdGenerator for Ids {
    fn generate_cid(&mut self) -> ConnectionId {
        let id = connection_id::ConnectionId {
            tag: self.0.tag(),
            shard: 0,
            random: rand::random(),
        };
        ConnectionId::new(&id.to_bytes())
    }

    /// Accepts ids with the tag of this server's address. quinn answers packets with such ids and without a connection by a
    /// stateless reset: an earlier process had the connection. The connection of any other id may live in another replica.
    fn validate(&self, id: &ConnectionId) -> Result<(), InvalidCid> {
        let id = connection_id::ConnectionId::parse(id).ok_or(InvalidCid)?;
        (id.tag == self.0.tag()).then_some(()).ok_or(InvalidCid)
    }

    fn cid_len(&self) -> usize {
        CONNECTION_ID_BYTES
    }

    fn cid_lifetime(&self) -> Option<Duration> {
        None
    }
}

/// Opens the socket of a server. The IPv6 wildcard address accepts IPv4 too, regardless of the system's default.
///
/// # Errors
/// Fails if the address cannot be bound.
pub fn bind(address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = socket2::Socket::new(
        Domain::for_address(address),
        Type::DGRAM,
        Some(Protocol::UDP),
    )?;
    if address.is_ipv6() {
        socket.set_only_v6(!address.ip().is_unspecified())?;
    }
    socket.bind(&address.into())?;
    Ok(socket.into())
}

/// Opens the endpoint of an agent for one connection to `remote`.
///
/// # Errors
/// Fails if no socket can be opened.
pub fn client(remote: SocketAddr) -> io::Result<Endpoint> {
    let socket = client_socket(remote)?;
    let runtime = Arc::new(TokioRuntime);
    Endpoint::new_with_abstract_socket(EndpointConfig::default(), None, socket, runtime)
}

/// Moves the connection of an agent to a new socket, and thus to a new port. The server follows.
///
/// # Errors
/// Fails if no socket can be opened.
pub fn rebind(endpoint: &Endpoint, remote: SocketAddr) -> io::Result<()> {
    endpoint.rebind_abstract(client_socket(remote)?)
}

/// Returns the configuration of an agent's connection, by its TLS configuration for servers.
///
/// # Errors
/// Fails if `tls` has no suite of TLS 1.3.
pub fn client_config(tls: &rustls::ClientConfig) -> Result<ClientConfig, NoInitialCipherSuite> {
    let mut tls = tls.clone();
    tls.alpn_protocols = vec![ALPN.to_vec()];
    let crypto = QuicClientConfig::try_from(tls)?;
    let mut config = ClientConfig::new(Arc::new(crypto));
    let mut transport = transport();
    transport
        .max_concurrent_bidi_streams(AGENT_STREAMS.into())
        .keep_alive_interval(Some(KEEPALIVE));
    config.transport_config(Arc::new(transport));
    Ok(config)
}

fn server_config(
    tls: &rustls::ServerConfig,
    keys: &EndpointKeys,
    transport: &Arc<TransportConfig>,
) -> Result<ServerConfig, NoInitialCipherSuite> {
    let mut tls = tls.clone();
    tls.alpn_protocols = vec![ALPN.to_vec()];
    let crypto = QuicServerConfig::try_from(tls)?;
    let mut config = ServerConfig::new(Arc::new(crypto), keys.token.clone());
    config
        .transport_config(transport.clone())
        .max_incoming(WAITING_PEERS)
        .incoming_buffer_size(WAITING_BYTES)
        .incoming_buffer_size_total(ALL_WAITING_BYTES);
    Ok(config)
}

/// Returns the settings of both ends. Path MTU discovery and segmentation offload are on by default.
pub(super) fn transport() -> TransportConfig {
    let mut transport = TransportConfig::default();
    let idle = VarInt::from_u32(IDLE_TIMEOUT.as_millis() as u32);
    transport
        .stream_receive_window(STREAM_WINDOW_BYTES.into())
        .receive_window(CONNECTION_WINDOW_BYTES.into())
        .send_window(SEND_WINDOW_BYTES.into())
        .max_concurrent_uni_streams(0_u32.into())
        .datagram_receive_buffer_size(None)
        .max_idle_timeout(Some(idle.into()))
        .initial_rtt(ASSUMED_ROUND_TRIP)
        // A link over QUIC is for paths that lose packets.
        .congestion_controller_factory(Arc::new(BoundedBbrConfig::default()));
    transport
}

fn client_socket(remote: SocketAddr) -> io::Result<Arc<Socket>> {
    let any: SocketAddr = match remote.is_ipv4() {
        true => (Ipv4Addr::UNSPECIFIED, 0).into(),
        false => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let socket = UdpSocket::bind(any)?;
    enlarge_buffers(&socket);
    Socket::of_agent(socket)
}

fn enlarge_buffers(socket: &UdpSocket) {
    let socket = SockRef::from(socket);
    // The kernel silently grants less, and an error leaves the default.
    let _ = socket.set_recv_buffer_size(SOCKET_BYTES);
    let _ = socket.set_send_buffer_size(SOCKET_BYTES);
}

/// Returns the size of the receive buffer that the kernel has granted to a socket, in bytes.
pub fn receive_buffer(socket: &UdpSocket) -> usize {
    // The kernel reports twice the size, for its bookkeeping (socket(7)).
    SockRef::from(socket).recv_buffer_size().unwrap_or(0) / 2
}
