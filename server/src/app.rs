//! Wires the server: opens every listener first, then serves them until shutdown.

mod accept;
mod credentials;
mod drain;
mod quic;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use culvert_host::admin;
use culvert_host::net::congestion::congestion;
use culvert_host::net::listen::{Keepalive, Listener};
use culvert_host::net::networks::Networks;
use culvert_host::runtime::shards::Shards;
use culvert_host::runtime::{memory_limit, spawn_essential};
use culvert_host::tls::reload::ServerTls;
use culvert_konnectivity::excess::OverflowBudget;
use culvert_konnectivity::memory::{Buffers, Stream, connection_bytes};
use culvert_konnectivity::queue::ANSWER_BYTES;
use culvert_kube::tokens::Tokens;
use culvert_native::link::{CLIENT_WINDOW_BYTES, SERVER_SEND_BYTES};
use culvert_native::resume::buffer_bytes;
use culvert_native::window::{OPENER_HELD_BYTES, PACKETS_LONG_PATH_BYTES};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::info;

use crate::backend::agent::{self, Limits};
use crate::backend::announced::Announced;
use crate::backend::identity::AgentPeer;
use crate::backend::konnectivity::Konnectivity;
use crate::backend::registry::{AgentLimits, CONNECTION_BYTES};
use crate::backend::resume::Sessions;
use crate::backend::service::Agents;
use crate::backend::{Registry, Tunnel, openvpn};
use crate::config::{self, Config, Mode};
use crate::files::{Files, Reloader};
use crate::frontend::{Frontend, grpc};
use crate::leases::Leases;
use crate::listener::{self, ListenerContext};
use crate::metrics::{self, ServerMetrics, ServiceMethod};
use crate::router::{DialLimits, Router};
use crate::switch::driver::{self, Driver, Switcher};
use crate::switch::pages;
use crate::switch::start::Start;

/// Body of `/readyz` while no peer is connected; the text is upstream's.
const NOT_READY: &str = "no connection to any proxy agent";

/// Body of `/readyz` while the server drains.
const DRAINING: &str = "this server drains: it stops soon";

/// Addresses of a bound server's listeners.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// Front end on TCP; `None` if it listens on a Unix socket.
    pub frontend: Option<SocketAddr>,
    /// Path of the front end's Unix socket; `None` on TCP.
    pub frontend_socket: Option<PathBuf>,
    /// Listener for agents.
    pub agent: SocketAddr,
    /// UDP socket for QUIC links of agents; `None` without QUIC.
    pub quic: Option<SocketAddr>,
    /// Listeners for OpenVPN clients, in the order of the flag.
    pub openvpn: Vec<SocketAddr>,
    /// Health and metrics listener.
    pub health: SocketAddr,
    /// Admin listener.
    pub admin: SocketAddr,
}

/// A server with open listeners that are not yet served.
pub struct Bound {
    /// Addresses of the listeners.
    pub addresses: Addresses,
    config: Config,
    metrics: Arc<ServerMetrics>,
    frontend: Listener,
    frontend_tls: Option<ServerTls>,
    agent: Listener,
    agent_tls: ServerTls,
    quic: Option<quic::Bound>,
    reloader: Reloader,
    tokens: Option<Arc<Tokens>>,
    leases: Option<Leases>,
    health: TcpListener,
    admin: admin::AdminSocket,
    admin_socket: Option<admin::UnixSocket>,
    registry: Arc<Registry>,
    openvpn: Option<openvpn::Bound>,
    router: Arc<Router>,
    switcher: Switcher,
    driver: Driver,
    shards: Arc<Shards>,
}

impl Bound {
    /// Reads certificates and opens every listener.
    ///
    /// # Errors
    /// Fails if a file cannot be used or an address is already in use; the error text names the problem and
    /// the remedy.
    pub async fn bind(config: Config) -> anyhow::Result<Self> {
        let shards = Shards::start(config.worker_threads)
            .context("cannot start --worker-threads threads")?;
        let metrics = Arc::new(ServerMetrics::new(&config.strategies)?);
        let mut reloader = Reloader::new(metrics.registry());
        let agent_files = &config.agent_listener;
        let agent_tls = credentials::agent_tls(&mut reloader, agent_files, &config.tls).await?;
        let user_cluster = credentials::user_cluster(&mut reloader, &config).await?;
        let tokens = match &config.agent_auth {
            Some(auth) => {
                let client = user_cluster.clone();
                let client = client.context("agent authentication needs a Kubernetes account")?;
                Some(Arc::new(Tokens::new(client, auth.clone())))
            }
            None => None,
        };
        let leases = match &config.lease {
            Some(lease) => {
                let client = user_cluster.clone();
                let client = client.context("leases need a Kubernetes account")?;
                Some(Leases::new(client, lease, &config.server_id, &metrics))
            }
            None => None,
        };
        let strategies = config.strategies.clone();
        let registry = Registry::new(strategies, agent_limits(&config), metrics.clone());
        let timeout = config.backend_dial_timeout;
        let konnectivity = Konnectivity::new(registry.clone(), timeout);
        let destinations = Arc::new(config.destinations.clone());
        let openvpn = match &config.openvpn {
            Some(settings) => {
                let (destinations, metrics) = (destinations.clone(), metrics.clone());
                let bound = openvpn::Bound::bind(
                    settings,
                    destinations,
                    metrics,
                    user_cluster,
                    &mut reloader,
                );
                Some(bound.await?)
            }
            None => None,
        };
        let clients = openvpn.as_ref().map(|bound| bound.tunnel.clone());
        let clients = clients.map(|tunnel| tunnel as Arc<dyn Tunnel>);
        let limits = DialLimits {
            timeout,
            pending: config.limits.pending_dials,
            destinations,
        };
        let router = Router::new(konnectivity, clients, limits, metrics.clone());
        let start = Start::load(config.switch.clone()).await?;
        let (mut switcher, driver) = driver::start(start, router.clone(), metrics.clone())?;
        let agent = admin::bind(
            &agent_files.bind.host,
            agent_files.bind.port,
            ["--agent-bind-address", "--agent-port"],
        )
        .await?;
        config.link_congestion.choose()?.apply_to_listener(&agent);
        switcher.link_congestion = Some(congestion(&agent).into());
        switcher.server_id = Some(config.server_id.as_str().into());
        let quic = quic::bind(agent_files, agent.local_addr()?, &agent_tls).await?;
        let (admin_address, admin) = bind_admin(&config, &mut reloader, &metrics).await?;
        let socket = config.admin_uds.as_deref();
        let admin_socket = socket
            .map(|path| admin::UnixSocket::bind(path, "--admin-uds"))
            .transpose()?;
        let flags = ["--health-bind-address", "--health-port"];
        let health = admin::bind(&config.health.host, config.health.port, flags).await?;
        // Bound last: this replaces the socket file of a server that still runs, so a start that fails earlier leaves that
        // file alone.
        let (frontend, frontend_tls) = bind_frontend(&config, &mut reloader).await?;
        let frontend_socket = match &config.frontend {
            config::Frontend::Uds { path, .. } => Some(path.clone()),
            config::Frontend::Tcp { .. } => None,
        };
        Ok(Self {
            addresses: Addresses {
                frontend: frontend.tcp_address(),
                frontend_socket,
                agent: agent.local_addr()?,
                quic: quic.as_ref().map(|bound| bound.address),
                openvpn: openvpn
                    .as_ref()
                    .map(|bound| bound.addresses.clone())
                    .unwrap_or_default(),
                health: health.local_addr()?,
                admin: admin_address,
            },
            config,
            metrics,
            frontend,
            frontend_tls,
            agent: Listener::tcp(agent, &Keepalive::default()),
            agent_tls,
            quic,
            reloader,
            tokens,
            leases,
            health,
            admin,
            admin_socket,
            registry,
            openvpn,
            router,
            switcher,
            driver,
            shards: Arc::new(shards),
        })
    }

    /// Serves until `drain` fires and the connections have ended or `--graceful-shutdown-timeout` has passed. Then
    /// closes the remaining connections and waits for every task.
    pub async fn run(self, drain: CancellationToken) {
        let shutdown = CancellationToken::new();
        let shards = self.shards;
        let tasks = TaskTracker::new();
        let metrics = self.metrics;
        let config = self.config;
        let (router, switcher) = (self.router, self.switcher);
        let announce = watch::Sender::new(Announced {
            servers: config.server_count,
            follows: false,
            draining: false,
        });
        let agents = Agents {
            registry: self.registry,
            server_id: config.server_id.clone(),
            announced: announce.subscribe(),
            limits: stream_limits(&config, &metrics),
            sessions: Sessions::new(config.resume_grace, metrics.clone()),
            tokens: self.tokens,
            id_from: config.agent_id_from,
            peer: AgentPeer::default(),
            second_links: self.quic.as_ref().map(|bound| bound.second_links.clone()),
            tasks: tasks.clone(),
            metrics: metrics.clone(),
        };
        let frontend = Frontend::new(
            router.clone(),
            tasks.clone(),
            shutdown.clone(),
            metrics.clone(),
        );
        let context = |kind, tls, keepalive, proxies| {
            ListenerContext::new(
                kind,
                tls,
                keepalive,
                tasks.clone(),
                shutdown.clone(),
                metrics.clone(),
                proxies,
            )
        };
        let frontend_context = context(
            metrics::Listener::Frontend,
            self.frontend_tls,
            config.frontend_keepalive_time,
            Networks::default(),
        );
        let agent_context = context(
            metrics::Listener::Agent,
            Some(self.agent_tls),
            config.keepalive_time,
            config.agent_listener.proxies.clone(),
        );
        info!(
            frontend = self.frontend.address(),
            mode = config.mode.name(),
            tunnel_mode = switcher.status().mode.as_str(),
            agents = self.agent.address(),
            quic = self.addresses.quic.map(tracing::field::display),
            link_congestion = switcher.link_congestion.as_deref(),
            server_id = config.server_id,
            "serving"
        );
        buffers(&config).log();
        let serve = accept::serve_frontend(
            self.frontend,
            config.mode,
            frontend_context,
            frontend.clone(),
            config.limits.frontend_connections,
            shards.clone(),
        );
        spawn_essential(&tasks, "front end", &shutdown, serve);
        let switch = self.driver.run(shutdown.clone());
        spawn_essential(&tasks, "switch", &shutdown, switch);
        if let Some(openvpn) = self.openvpn {
            openvpn.serve(&shards, &tasks, &shutdown);
        }
        if let Some(quic) = self.quic {
            let (context, agents) = (agent_context.clone(), agents.clone());
            let serve = accept::serve_quic(quic.endpoint, context, agents, shards.clone());
            spawn_essential(&tasks, "QUIC links", &shutdown, serve);
        }
        let agents = accept::serve_agents(self.agent, agent_context, agents, shards.clone());
        spawn_essential(&tasks, "agents", &shutdown, agents);
        if let Some(leases) = self.leases {
            // The drain gives the lease up, so that agents do not count this server anymore.
            let keep = leases.run(announce.clone(), drain.clone());
            spawn_essential(&tasks, "leases", &drain, keep);
        }
        let reload = self.reloader.run(shutdown.clone());
        spawn_essential(&tasks, "reload", &shutdown, reload);
        let upkeep = metrics.registry().clone().run_upkeep(shutdown.clone());
        spawn_essential(&tasks, "metrics", &shutdown, upkeep);
        let drained = drain::drained(
            frontend,
            config.graceful_shutdown_timeout,
            config.drain_linger,
        );
        let pages = || metrics_page(&router, &metrics);
        let not_ready = readiness(router.clone(), drain.clone(), config.ready_without_agents);
        let health = pages().with_healthz().with_server_readyz(not_ready);
        let admin = match &self.admin {
            admin::AdminSocket::Plain(_) => pages(),
            _ => pages::add(pages(), &switcher),
        };
        if let Some(socket) = self.admin_socket {
            let routes = pages::add(pages(), &switcher);
            let socket = admin::AdminSocket::Unix(socket);
            let serve = admin::serve(socket, routes, shutdown.clone());
            spawn_essential(&tasks, "admin socket", &shutdown, serve);
        }
        let serve = admin::serve(self.health, health, shutdown.clone());
        spawn_essential(&tasks, "health", &shutdown, serve);
        let serve = admin::serve(self.admin, admin, shutdown.clone());
        spawn_essential(&tasks, "admin", &shutdown, serve);
        drain.cancelled().await;
        announce.send_modify(|announced| announced.draining = true);
        drained.await;
        info!("stopping");
        shutdown.cancel();
        tasks.close();
        tasks.wait().await;
        // The threads end with the last reference: until here, their tasks deliver the last bytes of connections.
        drop(shards);
    }
}

/// Returns the limits for agents. The memory limit can have room for fewer than `--max-agents`.
fn agent_limits(config: &Config) -> AgentLimits {
    let agents = config.limits.agents.unwrap_or(usize::MAX);
    let memory = memory_limit().unwrap_or(u64::MAX);
    let room = memory / CONNECTION_BYTES;
    if memory != u64::MAX && room < agents as u64 {
        info!(
            agents = room,
            "the memory limit bounds the number of agents, below --max-agents"
        );
    }
    AgentLimits {
        agents,
        memory,
        connections: config.limits.connections_per_agent.unwrap_or(usize::MAX),
    }
}

/// Returns the limits for the connections in each agent's streams.
fn stream_limits(config: &Config, metrics: &ServerMetrics) -> Limits {
    Limits {
        connection_bytes: connection_bytes(config.xfr_channel_size),
        stall: config.stall_timeout,
        excess: OverflowBudget::new(
            config.excess_buffer_bytes,
            metrics.streams.excess_bytes.clone(),
            metrics
                .full_receive_channels
                .get(ServiceMethod::Connect)
                .clone(),
        ),
    }
}

/// Returns a function that returns the reason why the server is not ready; `None` if the server is ready.
fn readiness(
    router: Arc<Router>,
    drain: CancellationToken,
    ready_without_agents: bool,
) -> impl Fn() -> Option<&'static str> {
    move || {
        if drain.is_cancelled() {
            Some(DRAINING)
        } else if ready_without_agents || router.is_ready() {
            None
        } else {
            Some(NOT_READY)
        }
    }
}

/// Returns the page `/metrics`.
fn metrics_page(router: &Arc<Router>, metrics: &Arc<ServerMetrics>) -> admin::Routes {
    let (router, metrics) = (router.clone(), metrics.clone());
    admin::Routes::new().with_metrics_at(&["/metrics"], move || {
        metrics
            .tunnel_ready
            .set(f64::from(u8::from(router.is_ready())));
        metrics.set_peers(&router.tunnels());
        metrics.registry().render()
    })
}

/// Opens the admin listener, with TLS if the configuration has certificates for it. Returns the listener's address, too.
async fn bind_admin(
    config: &Config,
    reloader: &mut Reloader,
    metrics: &Arc<ServerMetrics>,
) -> anyhow::Result<(SocketAddr, admin::AdminSocket)> {
    let flags = ["--admin-bind-address", "--admin-port"];
    let listener = admin::bind(&config.admin.host, config.admin.port, flags).await?;
    let address = listener.local_addr()?;
    let Some(paths) = &config.admin_tls else {
        return Ok((address, admin::AdminSocket::Plain(listener)));
    };
    let (files, alpn) = (Files::Admin, b"http/1.1");
    let flags = "--admin-cert and --admin-key";
    let tls = credentials::mutual_tls(reloader, files, paths, alpn, &config.tls, flags).await?;
    let counted = metrics.clone();
    let on_refused = move |peer: SocketAddr, error: &io::Error| {
        let kind = metrics::Listener::Admin;
        listener::handshake_failed(&counted, kind, &peer.to_string(), error);
    };
    let socket = admin::AdminSocket::Tls(listener, tls, Arc::new(on_refused));
    Ok((address, socket))
}

/// Opens the listener of the front end.
async fn bind_frontend(
    config: &Config,
    reloader: &mut Reloader,
) -> anyhow::Result<(Listener, Option<ServerTls>)> {
    match &config.frontend {
        config::Frontend::Uds {
            path,
            delete_existing,
        } => Ok((Listener::unix(path, *delete_existing)?, None)),
        config::Frontend::Tcp { bind, tls: paths } => {
            let alpn: &[u8] = match config.mode {
                Mode::Grpc => b"h2",
                Mode::HttpConnect => b"http/1.1",
            };
            let flags = "--server-cert and --server-key";
            let files = Files::Frontend;
            let tls =
                credentials::mutual_tls(reloader, files, paths, alpn, &config.tls, flags).await?;
            let flags = ["--server-bind-address", "--server-port"];
            let listener = admin::bind(&bind.host, bind.port, flags).await?;
            // A gRPC client always reads, so TCP's user timeout only closes connections to dead clients. A
            // CONNECT client may stop reading for any length of time, so CONNECT has no user timeout.
            let keepalive = match config.mode {
                Mode::Grpc => Keepalive::default(),
                Mode::HttpConnect => Keepalive {
                    user_timeout: None,
                    ..Keepalive::default()
                },
            };
            Ok((Listener::tcp(listener, &keepalive), Some(tls)))
        }
    }
}

/// Returns the buffer sizes described in docs/architecture.md.
fn buffers(config: &Config) -> Buffers {
    let quic = quic::Buffers::of(&config.agent_listener);
    Buffers {
        connection_budget: connection_bytes(config.xfr_channel_size),
        client: match config.mode {
            Mode::Grpc => Stream {
                window: CLIENT_WINDOW_BYTES as usize,
                outgoing: grpc::OUTGOING_BYTES,
                http: SERVER_SEND_BYTES,
            },
            Mode::HttpConnect => Stream::default(),
        },
        stream: Stream {
            window: PACKETS_LONG_PATH_BYTES as usize,
            outgoing: agent::OUTGOING_BYTES + ANSWER_BYTES,
            http: SERVER_SEND_BYTES,
        },
        excess: config.excess_buffer_bytes,
        native_connection: culvert_native::CONNECTION_BYTES.max(quic.connection),
        native_held: OPENER_HELD_BYTES + buffer_bytes(config.resume_grace) + quic.peer,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn architecture_page_has_the_bound_of_a_native_agent() {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
        let document = std::fs::read_to_string(format!("{root}/docs/architecture.md")).unwrap();
        let [plain, resumable] = ["0", "30s"].map(|grace| {
            let config = Config::from_args([
                "culvert-server".to_owned(),
                "--uds-name=/run/s.sock".to_owned(),
                "--server-port=0".to_owned(),
                format!("--cluster-cert={root}/Cargo.toml"),
                format!("--cluster-key={root}/Cargo.toml"),
                format!("--resume-grace={grace}"),
            ]);
            buffers(&config.unwrap()).native_held / (1024 * 1024)
        });
        let rows = document
            .lines()
            .filter(|line| line.starts_with("| server, "));
        let expected = format!(" | {plain} MiB | {resumable} MiB |");
        let fitting = rows.filter(|row| row.ends_with(&expected));
        assert_eq!(fitting.count(), 2, "{expected}");
    }
}
