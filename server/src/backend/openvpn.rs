//! The tunnel of OpenVPN clients that connect to this server: stock clients, and Culvert agents in the client
//! role.
//!
//! ```text
//! dial -> client with the longest prefix, then the newest -> the client's task: TCP flow from the server's
//!         address
//! packet from a client -> to the server: a flow, or an echo request -> the flows of the same client
//!                      -> to another client -> rules, masquerade -> mailbox of the other client
//! ```
//!
//! | part | owns |
//! |---|---|
//! | `settings` | settings from flags and the configuration file |
//! | `clients` | connected clients; addresses, routes, rules |
//! | `role` | decisions for one client |
//! | `silence` | detection of clients that no longer answer |
//! | `listen`, `udp` | sockets |
//! | `certificate_reload` | the certificate files |
//! | `nodes`, `node_watch` | translation of ExternalIPs and names, from the Nodes of the user cluster |
//! | `pool`, `ccd`, `push` | addresses, per-client files, pushed options |

mod ccd;
mod certificate_reload;
mod clients;
mod listen;
pub mod metrics;
mod node_watch;
mod nodes;
mod pool;
mod push;
mod role;
pub mod settings;
mod silence;
mod udp;

use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use culvert_host::admin;
use culvert_host::file_follower::{SLOW_READ, read_in_background, too_slow};
use culvert_host::net::destinations::Destinations;
use culvert_host::net::listen::{Keepalive, Listener};
use culvert_host::net::networks::Networks;
use culvert_host::reload::Latest;
use culvert_host::runtime::shards::Shards;
use culvert_host::runtime::spawn_essential;
use culvert_host::telemetry::metrics::GaugeGuard;
use culvert_openvpn::Role;
use culvert_openvpn::flows::Closed;
use culvert_openvpn::nodes::Nodes;
use culvert_openvpn::options::Transport;
use culvert_openvpn::session::ServerConfig;
use culvert_openvpn::tls::ServerTls;
use culvert_openvpn_io::datagrams::Datagrams;
use culvert_openvpn_io::files;
use culvert_openvpn_io::stream::{Broken, Stream};
use culvert_stream::Dial;
use kube::Client;
use tokio::net::UdpSocket;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{info, warn};

use self::certificate_reload::TlsMaterial;
use self::clients::{Clients, Way};
use self::listen::Tcp;
use self::metrics::{NodeMetrics, OpenvpnMetrics};
use self::node_watch::NodeWatch;
use self::nodes::Known;
use self::settings::Settings;
use self::udp::Udp;
use super::{Connection, flow};
use crate::backend::dial::{Attempts, StreamDialError};
use crate::backend::{ClientSeat, DialError, Dialing, Tunnel};
use crate::files::{Files, Reloader};
use crate::metrics::{DialFailureReason, ServerMetrics};
use crate::tunnel::{Health, Peer};

/// Time after which an unanswered SYN fails a dial. Agents of the Konnectivity tunnel also use 5 s.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Buffer size requested for a UDP socket, in bytes: enough for a burst of all clients. The kernel limits the
/// size to `net.core.rmem_max` and `wmem_max`.
const UDP_BUFFER: usize = 4 << 20;

/// The OpenVPN tunnel, as used by the router.
pub struct Openvpn {
    clients: Arc<Clients>,
    nodes: Option<Nodes>,
    /// Translation of ExternalIPs and names; `None` if Nodes are not watched.
    known: Option<watch::Receiver<Arc<Known>>>,
    destinations: Arc<Destinations>,
    metrics: Arc<ServerMetrics>,
}

/// The tunnel with bound listeners that do not accept clients yet.
pub struct Bound {
    /// The tunnel, for the router.
    pub tunnel: Arc<Openvpn>,
    /// Listening addresses, in the order of the settings.
    pub addresses: Vec<SocketAddr>,
    sockets: Vec<(Socket, ConfigSender)>,
    tls: Latest<Arc<ServerTls>>,
    node_watch: Option<NodeWatch>,
    max_clients: usize,
    proxies: Arc<Networks>,
}

/// Session settings of one listener. The settings change when certificates are renewed.
type ConfigSender = watch::Sender<Arc<ServerConfig>>;

enum Socket {
    Tcp(Listener),
    Udp(Box<Datagrams>),
}

impl Bound {
    /// Loads keys and certificates, and opens the listeners.
    ///
    /// # Errors
    /// Fails if a file cannot be used or an address is in use. The error text names the cause and the remedy.
    pub async fn bind(
        settings: &Settings,
        destinations: Arc<Destinations>,
        metrics: Arc<ServerMetrics>,
        user_cluster: Option<Client>,
        reloader: &mut Reloader,
    ) -> anyhow::Result<Self> {
        let material = TlsMaterial::new(&settings.server)?;
        let latest = reloader.follow(Files::Openvpn, material).await?;
        let tls = latest.get();
        let mut sockets = Vec::new();
        let mut addresses = Vec::new();
        for listen in &settings.listen {
            let (owned, transport, tls) = (settings.clone(), listen.transport, tls.clone());
            let read = move || session(&owned, transport, tls);
            let config = read_in_background(read, || is_slow(settings)).await.0?;
            let config = watch::Sender::new(Arc::new(config));
            let bind = &listen.bind;
            let flag = "--openvpn-listen";
            let socket = match listen.transport {
                Transport::Tcp => {
                    let listener = admin::bind(&bind.host, bind.port, [flag; 2]).await?;
                    addresses.push(listener.local_addr()?);
                    Socket::Tcp(Listener::tcp(listener, &Keepalive::default()))
                }
                Transport::Udp => {
                    let socket = bind_udp(&bind.host, bind.port).await;
                    let socket = socket.with_context(|| {
                        format!("cannot listen on {listen}; check {flag} and which process uses the port")
                    })?;
                    addresses.push(socket.local_addr()?);
                    let socket = Datagrams::new(socket);
                    let socket = socket.with_context(|| format!("cannot use {listen}"))?;
                    Socket::Udp(Box::new(socket))
                }
            };
            sockets.push((socket, config));
        }
        let watched = user_cluster.filter(|_| settings.watch_nodes.is_some());
        let node_watch = watched.map(|client| {
            let mut direct = settings.server.routes.clone();
            direct.push(settings.network);
            NodeWatch::new(client, direct, NodeMetrics::new(metrics.registry()))
        });
        let known = node_watch.as_ref().map(NodeWatch::known);
        Ok(Self {
            tunnel: Arc::new(Openvpn::new(settings, known, destinations, metrics)),
            addresses,
            sockets,
            tls: latest,
            node_watch,
            max_clients: settings.max_clients,
            proxies: Arc::new(settings.proxies.clone()),
        })
    }

    /// Starts serving clients, with tasks on the tracker, until the token fires.
    pub fn serve(self, shards: &Arc<Shards>, tasks: &TaskTracker, shutdown: &CancellationToken) {
        let clients = &self.tunnel.clients;
        let mut configs = Vec::new();
        for ((socket, sender), address) in self.sockets.into_iter().zip(self.addresses) {
            let (clients, config) = (clients.clone(), sender.subscribe());
            configs.push(sender);
            match socket {
                Socket::Tcp(listener) => {
                    info!(%address, "serving OpenVPN over TCP");
                    let proxies = self.proxies.clone();
                    let tcp = Tcp {
                        clients,
                        config,
                        proxies,
                    };
                    let (shards, stop) = (shards.clone(), shutdown.clone());
                    let serve = tcp.serve(listener, shards, tasks.clone(), stop);
                    spawn_essential(tasks, "OpenVPN over TCP", shutdown, serve);
                }
                Socket::Udp(socket) => {
                    info!(%address, "serving OpenVPN over UDP");
                    let udp = Udp::new(*socket, config, clients, self.max_clients);
                    let serve = udp.serve(shutdown.clone());
                    spawn_essential(tasks, "OpenVPN over UDP", shutdown, serve);
                }
            }
        }
        let follow = certificate_reload::follow(self.tls, configs, shutdown.clone());
        spawn_essential(tasks, "OpenVPN certificates", shutdown, follow);
        if let Some(watch) = self.node_watch {
            spawn_essential(tasks, "Nodes", shutdown, watch.run(shutdown.clone()));
        }
    }
}

/// Creates the session settings of one listener.
fn session(
    settings: &Settings,
    transport: Transport,
    tls: Arc<ServerTls>,
) -> anyhow::Result<ServerConfig> {
    let mut config = ServerConfig::new(transport, tls);
    files::configure(&settings.server.common, Role::Server, &mut config.common)?;
    config.common.timers.ping = settings.ping;
    config.common.timers.ping_restart = settings.ping_restart.map(|time| 2 * time);
    Ok(config)
}

/// Logs that the key that wraps control packets is not read yet.
fn is_slow(settings: &Settings) {
    if let Some(key) = settings.server.common.wrap_key() {
        let why = too_slow(key, SLOW_READ);
        warn!("{why}; this server starts once the file is read");
    }
}

async fn bind_udp(host: &str, port: u16) -> std::io::Result<UdpSocket> {
    let socket = match host {
        "" => match UdpSocket::bind(("::", port)).await {
            Ok(socket) => socket,
            // The machine has no IPv6.
            Err(_) => UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)).await?,
        },
        host => UdpSocket::bind((host, port)).await?,
    };
    let options = socket2::SockRef::from(&socket);
    // Smaller buffers only reduce the speed.
    let _ = options.set_recv_buffer_size(UDP_BUFFER);
    let _ = options.set_send_buffer_size(UDP_BUFFER);
    Ok(socket)
}

impl Openvpn {
    fn new(
        settings: &Settings,
        known: Option<watch::Receiver<Arc<Known>>>,
        destinations: Arc<Destinations>,
        metrics: Arc<ServerMetrics>,
    ) -> Self {
        let access = settings.node_access;
        let routes = settings.server.routes.iter().copied();
        let (nodes, mut direct): (Vec<_>, Vec<_>) = routes.partition(|net| *net == access);
        direct.push(settings.network);
        let own = Arc::new(OpenvpnMetrics::new(metrics.registry()));
        Self {
            clients: Clients::new(settings.clone(), own),
            nodes: (!nodes.is_empty()).then(|| Nodes::new(access, direct)),
            known,
            destinations,
            metrics,
        }
    }

    async fn try_clients(&self, dial: &Dial, deadline: Instant) -> Result<Connection, DialError> {
        let _pending = GaugeGuard::new(&self.metrics.pending_backend_dials);
        let found = timeout_at(deadline, self.target(dial)).await;
        let target = found.map_err(|_| StreamDialError::TimedOut)??;
        let mut attempts = Attempts::new(DialError::NoClient);
        loop {
            let choose = |tried: &[_]| self.clients.way(*target.ip(), tried);
            let way = attempts.next(choose, |way| way.id)?;
            if let Some(error) = attempts.moved() {
                let from = error.peer();
                info!(from, to = %way.name, address = dial.address, %error, "dial moved to another OpenVPN client");
            }
            let suspect = async {
                loop {
                    way.suspect().await;
                    let other = self.clients.way(*target.ip(), attempts.tried());
                    let can_take = other.is_some_and(|other| other.is_healthy);
                    if attempts.may_move() && can_take {
                        return;
                    }
                }
            };
            let error = tokio::select! {
                biased;
                dialed = timeout_at(deadline, way.peer.dial(target)) => match dialed {
                    Ok(Ok(stream)) => return Ok(self.connection(stream, &way)),
                    Ok(Err(broken)) => self.failed(broken, &dial.address, &way),
                    Err(_) => StreamDialError::TimedOut.into(),
                },
                () = suspect => StreamDialError::TimedOut.into(),
            };
            let error = error.at(&way.name);
            if error.is_final() || Instant::now() >= deadline {
                return Err(error);
            }
            attempts.failed(error);
        }
    }

    /// Translates a dialed address into an address inside the VPN. An ExternalIP or name of a known node
    /// becomes its InternalIP, and the address of a node is mapped into the node access network. The policy for
    /// destinations applies to the address before this mapping.
    async fn target(&self, dial: &Dial) -> Result<SocketAddrV4, DialError> {
        let address = &dial.address;
        let known = self.known.as_ref().map(|known| known.borrow().clone());
        let named = known.as_ref().and_then(|known| known.named(address));
        let asked = match named {
            Some(node) => node,
            None => resolve(address).await.map_err(DialError::Uncarried)?,
        };
        let asked = known.map_or(asked, |known| known.internal(asked));
        let permitted = self.destinations.check(asked.into());
        permitted.map_err(|denial| DialError::denied(dial, denial))?;
        let nodes = self.nodes.as_ref();
        Ok(nodes.map_or(asked, |nodes| nodes.translate(asked)))
    }

    fn connection(&self, stream: Stream, way: &Way) -> Connection {
        flow::open(stream, way.name.clone(), &self.metrics).into()
    }

    /// Converts the error into the Go wording that the agents of the Konnectivity tunnel use.
    fn failed(&self, broken: Broken, address: &str, way: &Way) -> DialError {
        let text = match broken {
            Broken::Flow(Closed::Refused | Closed::Reset) => "connect: connection refused",
            Broken::Flow(Closed::Unreachable(_)) => "connect: no route to host",
            // The timeout of a silent client reveals nothing about the target.
            Broken::Flow(Closed::ConnectTimedOut(_)) if way.is_silent() => {
                return StreamDialError::TimedOut.into();
            }
            Broken::Flow(Closed::ConnectTimedOut(_)) => "i/o timeout",
            // The client has too many flows, or too many dials wait.
            Broken::Dial(_) | Broken::Busy => {
                return DialError::Uncarried(format!("dial tcp {address}: {broken}"));
            }
            _ => return StreamDialError::ClientLost.into(),
        };
        let reason = DialFailureReason::ErrorResponse;
        self.metrics.dial_failures(reason).increment(1);
        StreamDialError::Refused(format!("dial tcp {address}: {text}")).into()
    }
}

impl Tunnel for Openvpn {
    fn health(&self) -> Health {
        self.clients.health()
    }

    fn dial<'a>(&'a self, dial: &'a Dial, deadline: Instant) -> Dialing<'a> {
        Box::pin(self.try_clients(dial, deadline))
    }

    fn peers(&self) -> Vec<Peer> {
        self.clients.peers()
    }

    fn seat(&self) -> Option<ClientSeat> {
        self.clients.shard().map(ClientSeat::on)
    }
}

/// Resolves the dialed address. Names are resolved here, because nothing behind the tunnel can resolve names.
async fn resolve(address: &str) -> Result<SocketAddrV4, String> {
    let text = |why: &str| format!("dial tcp {address}: {why}");
    if let Ok(address) = address.parse::<SocketAddr>() {
        return match address.ip().to_canonical() {
            IpAddr::V4(ip) => Ok(SocketAddrV4::new(ip, address.port())),
            IpAddr::V6(_) => Err(text("the OpenVPN tunnel carries IPv4 only")),
        };
    }
    let found = tokio::net::lookup_host(address).await;
    let found = found.map_err(|error| text(&error.to_string()))?;
    found
        .filter_map(|address| match address {
            SocketAddr::V4(address) => Some(address),
            SocketAddr::V6(_) => None,
        })
        .next()
        .ok_or_else(|| text("no IPv4 address: the OpenVPN tunnel carries nothing else"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use culvert_openvpn::flows::Config;
    use culvert_openvpn_io::now;
    use culvert_openvpn_io::streams::Streams;

    use super::clients::tests::World;
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn pending_dial_reports_that_its_client_has_disconnected() {
        let world = World::new(|_| {});
        world.file("user", "iroute 172.25.0.0 255.255.0.0\n");
        let (admission, _) = world.admit("user").unwrap();
        let streams = Streams::new(Config::default(), now());
        admission.connected(streams.peer());
        let tunnel = Openvpn {
            clients: world.clients.clone(),
            nodes: None,
            known: None,
            destinations: Arc::default(),
            metrics: Arc::new(ServerMetrics::new(&[]).unwrap()),
        };
        let dial = Dial {
            protocol: "tcp".to_owned(),
            address: "172.25.3.4:10250".to_owned(),
        };
        let deadline = Instant::now() + Duration::from_secs(30);
        let leaves = async {
            tokio::task::yield_now().await;
            drop((admission, streams));
        };
        let (dialed, ()) = tokio::join!(tunnel.try_clients(&dial, deadline), leaves);
        let error = dialed.err().unwrap();
        assert_eq!(
            error,
            DialError::from(StreamDialError::ClientLost).at("user")
        );
        let text = "the OpenVPN client disconnected while the dial was pending";
        assert_eq!(error.to_string(), text);
    }
}
