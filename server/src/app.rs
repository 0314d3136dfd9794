//! Wires the server: binds every listener first, then runs them until shutdown.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use culvert_common::admin;
use culvert_common::net::listen::{Accepted, Listener};
use culvert_common::tls::{self, Identity, TrustBundle};
use culvert_common::wire::authority::AuthorityStream;
use culvert_common::wire::{MAX_DATA_BYTES, MAX_MESSAGE_BYTES};
use culvert_proto::agent_service_server::AgentServiceServer;
use culvert_proto::proxy_service_server::ProxyServiceServer;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::info;

use crate::backend::Registry;
use crate::backend::agent::Limits;
use crate::backend::service::Agents;
use crate::config::{self, Config, Mode};
use crate::frontend::{Frontend, grpc::Proxy, http_connect};
use crate::listener::Door;
use crate::metrics::{self, ServerMetrics, Strategy};
use crate::router::Router;

/// How long a connection that is full may hold up its agent's stream while its client takes
/// nothing; then it alone is closed. Clients of kube-apiserver's library give up after the same
/// time.
const STALL: Duration = Duration::from_secs(10);

/// Bounds of what may wait for one connection, in bytes; `--xfr-channel-size` moves between them.
const CONNECTION_BYTES: std::ops::RangeInclusive<usize> = 256 * 1024..=16 * 1024 * 1024;

/// What `/readyz` says without agents, as upstream.
const NOT_READY: &str = "no connection to any proxy agent";

/// Where a bound server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// The front end, on TCP.
    pub frontend: Option<SocketAddr>,
    /// The front end, on a Unix socket.
    pub frontend_socket: Option<PathBuf>,
    /// Where agents connect.
    pub agent: SocketAddr,
    /// Health and metrics.
    pub health: SocketAddr,
    /// Admin.
    pub admin: SocketAddr,
}

/// A server whose listeners are open and not served yet.
pub struct Bound {
    /// Where it listens.
    pub addresses: Addresses,
    config: Config,
    metrics: Arc<ServerMetrics>,
    frontend: Listener,
    frontend_tls: Option<Arc<rustls::ServerConfig>>,
    agent: Listener,
    agent_tls: Arc<rustls::ServerConfig>,
    health: TcpListener,
    admin: TcpListener,
}

impl Bound {
    /// Reads certificates and opens every listener.
    ///
    /// # Errors
    /// When a file can not be used or an address is taken; the text says which and what to do.
    pub async fn bind(config: Config) -> anyhow::Result<Self> {
        let metrics = Arc::new(ServerMetrics::new(&[Strategy::Default])?);
        let agent_files = &config.agent_listener;
        let agent_ca = agent_files.ca.as_ref().map(TrustBundle::load).transpose()?;
        let identity = Identity::load(&agent_files.cert, &agent_files.key)
            .context("agents connect over TLS: give --cluster-cert and --cluster-key")?;
        let agent_tls = tls::server_config(&identity, agent_ca.as_ref(), &[b"h2"], &config.tls)?;
        let (frontend, frontend_tls) = bind_frontend(&config).await?;
        let agent = admin::bind(
            &agent_files.bind.host,
            agent_files.bind.port,
            "--agent-port",
        )
        .await?;
        let admin = admin::bind(&config.admin.host, config.admin.port, "--admin-port").await?;
        let health = admin::bind(&config.health.host, config.health.port, "--health-port").await?;
        let frontend_socket = match &config.frontend {
            config::Frontend::Uds { path, .. } => Some(path.clone()),
            config::Frontend::Tcp { .. } => None,
        };
        Ok(Self {
            addresses: Addresses {
                frontend: frontend.tcp_address(),
                frontend_socket,
                agent: agent.local_addr()?,
                health: health.local_addr()?,
                admin: admin.local_addr()?,
            },
            config,
            metrics,
            frontend,
            frontend_tls,
            agent: Listener::Tcp(agent),
            agent_tls,
            health,
            admin,
        })
    }

    /// Serves until the token fires, then cuts what is left and awaits every task.
    pub async fn run(self, shutdown: CancellationToken) {
        let tasks = TaskTracker::new();
        let metrics = self.metrics;
        let config = self.config;
        let registry = Registry::new(metrics.clone());
        let agents = Agents {
            registry: registry.clone(),
            server_id: config.server_id.clone(),
            server_count: config.server_count,
            limits: Limits {
                connection_bytes: connection_bytes(config.xfr_channel_size),
                stall: STALL,
            },
            tasks: tasks.clone(),
            metrics: metrics.clone(),
        };
        let frontend = Frontend::new(
            Router::new(
                registry.clone(),
                config.backend_dial_timeout,
                metrics.clone(),
            ),
            tasks.clone(),
            shutdown.clone(),
            metrics.clone(),
        );
        let door = |kind, tls, keepalive| {
            Door::new(
                kind,
                tls,
                keepalive,
                tasks.clone(),
                shutdown.clone(),
                metrics.clone(),
            )
        };
        let front_door = door(
            metrics::Listener::Frontend,
            self.frontend_tls,
            config.frontend_keepalive_time,
        );
        let agent_door = door(
            metrics::Listener::Agent,
            Some(self.agent_tls),
            config.keepalive_time,
        );
        info!(
            frontend = self.frontend.address(),
            mode = config.mode.name(),
            agents = self.agent.address(),
            server_id = config.server_id,
            "serving"
        );
        tasks.spawn(serve_frontend(
            self.frontend,
            config.mode,
            front_door,
            frontend,
        ));
        tasks.spawn(serve_agents(self.agent, agent_door, agents));
        let page = metrics.registry().clone();
        tasks.spawn({
            let (page, shutdown) = (page.clone(), shutdown.clone());
            async move { page.run_upkeep(shutdown).await }
        });
        let health = admin::Routes::new()
            .with_healthz()
            .with_server_readyz(move || (!registry.is_ready()).then_some(NOT_READY))
            .with_metrics(page.clone());
        let admin_routes = admin::Routes::new().with_metrics(page);
        tasks.spawn(admin::serve(self.health, health, shutdown.clone()));
        tasks.spawn(admin::serve(self.admin, admin_routes, shutdown.clone()));
        shutdown.cancelled().await;
        info!("stopping");
        tasks.close();
        tasks.wait().await;
    }
}

async fn bind_frontend(
    config: &Config,
) -> anyhow::Result<(Listener, Option<Arc<rustls::ServerConfig>>)> {
    match &config.frontend {
        config::Frontend::Uds {
            path,
            delete_existing,
        } => Ok((Listener::unix(path, *delete_existing)?, None)),
        config::Frontend::Tcp { bind, tls: files } => {
            let trust = TrustBundle::load(&files.ca)?;
            let identity = Identity::load(&files.cert, &files.key)
                .context("a TCP front end needs --server-cert and --server-key")?;
            let alpn: &[u8] = match config.mode {
                Mode::Grpc => b"h2",
                Mode::HttpConnect => b"http/1.1",
            };
            let tls = tls::server_config(&identity, Some(&trust), &[alpn], &config.tls)?;
            let listener = admin::bind(&bind.host, bind.port, "--server-port").await?;
            Ok((Listener::Tcp(listener), Some(tls)))
        }
    }
}

async fn serve_frontend(listener: Listener, mode: Mode, door: Arc<Door>, frontend: Arc<Frontend>) {
    let service = ProxyServiceServer::new(Proxy::new(frontend.clone()))
        .max_decoding_message_size(MAX_MESSAGE_BYTES);
    let (tasks, shutdown) = (door.tasks.clone(), door.shutdown.clone());
    let handle = |accepted| {
        let (door, frontend, service) = (door.clone(), frontend.clone(), service.clone());
        tasks.spawn(async move {
            match (accepted, mode) {
                (Accepted::Unix(stream), Mode::Grpc) => {
                    let stream = AuthorityStream::new(stream);
                    door.serve_grpc(stream, "unix", service).await;
                }
                (Accepted::Unix(stream), Mode::HttpConnect) => {
                    let (read, write) = stream.into_split();
                    http_connect::serve(&door, &frontend, read, write, "unix").await;
                }
                (Accepted::Tcp(stream, peer), mode) => {
                    let peer = peer.to_string();
                    let Some(stream) = door.handshake(stream, &peer).await else {
                        return;
                    };
                    match mode {
                        Mode::Grpc => {
                            let stream = AuthorityStream::new(stream);
                            door.serve_grpc(stream, &peer, service).await;
                        }
                        Mode::HttpConnect => {
                            let (read, write) = tokio::io::split(stream);
                            http_connect::serve(&door, &frontend, read, write, &peer).await;
                        }
                    }
                }
            }
        });
    };
    listener.serve(shutdown, handle).await;
}

async fn serve_agents(listener: Listener, door: Arc<Door>, agents: Agents) {
    let service = AgentServiceServer::new(agents).max_decoding_message_size(MAX_MESSAGE_BYTES);
    let (tasks, shutdown) = (door.tasks.clone(), door.shutdown.clone());
    let handle = |accepted| {
        let Accepted::Tcp(stream, peer) = accepted else {
            return;
        };
        let (door, service) = (door.clone(), service.clone());
        tasks.spawn(async move {
            let peer = peer.to_string();
            if let Some(stream) = door.handshake(stream, &peer).await {
                door.serve_grpc(stream, &peer, service).await;
            }
        });
    };
    listener.serve(shutdown, handle).await;
}

/// Upstream's flag counts packets; ours are bounded in bytes.
fn connection_bytes(packets: usize) -> usize {
    packets
        .saturating_mul(MAX_DATA_BYTES / 2)
        .clamp(*CONNECTION_BYTES.start(), *CONNECTION_BYTES.end())
}
