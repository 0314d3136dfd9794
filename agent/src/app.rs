//! The wiring of the agent: binds the listeners, searches for servers, drains and stops.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use culvert_host::admin::{self, Check};
use culvert_host::runtime::spawn_essential;
use culvert_konnectivity::excess::OverflowBudget;
use culvert_konnectivity::memory::{Buffers, Stream, connection_bytes};
use culvert_konnectivity::queue::ANSWER_BYTES;
use culvert_native::link::AGENT_SEND_BYTES;
use culvert_native::quic;
use culvert_native::resume::buffer_bytes;
use culvert_native::window::{PACKETS_LONG_PATH_BYTES, TAKER_HELD_BYTES};
use metrics::Gauge;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{info, warn};

use crate::agent::{Agent, Limits};
use crate::config::{Config, LinkTransport, OpenVpn};
use crate::connect::Connector;
use crate::files::Reloader;
use crate::leases::Leases;
use crate::metrics::AgentMetrics;
use crate::openvpn::client::Client;
use crate::openvpn::tunnel::Tunnel;
use crate::packet::OUTGOING_BYTES;
use crate::server_count::ServerCount;
use crate::servers::{ServerSearch, Servers};

/// Interval between two looks at the connections whose last bytes are still on their way.
const LEAVING_CHECK: Duration = Duration::from_millis(100);

/// Listen addresses of a bound agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// Listener for health and metrics.
    pub health: SocketAddr,
    /// Admin listener.
    pub admin: SocketAddr,
}

/// An agent with open listeners and no server connection yet.
pub struct Bound {
    /// Listen addresses.
    pub addresses: Addresses,
    agent: Arc<Agent>,
    servers: Arc<Servers>,
    search: Option<ServerSearch>,
    leases: Option<Leases>,
    reloader: Reloader,
    openvpn: Option<(Arc<Tunnel>, Client)>,
    config: Config,
    health: TcpListener,
    admin: TcpListener,
}

impl Bound {
    /// Reads certificates and opens the listeners.
    ///
    /// # Errors
    /// Fails if a file cannot be used or an address is already in use. The error text names the file or
    /// address and the remedy.
    pub async fn bind(config: Config, shutdown: CancellationToken) -> anyhow::Result<Self> {
        let metrics = Arc::new(AgentMetrics::new()?);
        let limits = Limits {
            connection_bytes: connection_bytes(config.xfr_channel_size),
            stall: config.stall_timeout,
            excess: OverflowBudget::new(
                config.excess_buffer_bytes,
                metrics.streams.excess_bytes.clone(),
                Gauge::noop(),
            ),
        };
        let agent = Agent::new(metrics, shutdown, limits, config.destinations.clone());
        let servers = Servers::new(agent.clone());
        let mut reloader = Reloader::new(agent.metrics.registry());
        let (mut search, mut leases) = (None, None);
        if config.ca_cert.is_some() {
            let connector = Connector::new(agent.clone(), config.clone(), &mut reloader);
            let connector = Box::pin(connector).await?;
            let count = ServerCount::new(&config, agent.metrics.known_server_count.clone());
            if let Some(settings) = config.leases.clone() {
                let counted = Leases::new(settings, &agent.metrics, count.clone(), &mut reloader);
                leases = Some(counted.await?);
            }
            search = Some(ServerSearch::new(
                servers.clone(),
                connector,
                &config,
                count,
            ));
        }
        let mut openvpn = None;
        if let Some(OpenVpn { client, nodes }) = config.openvpn.clone() {
            let tunnel = Tunnel::new(agent.clone(), nodes);
            let client = Client::new(tunnel.clone(), client, &mut reloader);
            let client = Box::pin(client).await?;
            openvpn = Some((tunnel, client));
        }
        let health = admin::bind(
            &config.health.host,
            config.health.port,
            ["--health-server-host", "--health-server-port"],
        )
        .await?;
        let flags = ["--admin-bind-address", "--admin-server-port"];
        let admin = admin::bind(&config.admin.host, config.admin.port, flags).await?;
        Ok(Self {
            addresses: Addresses {
                health: health.local_addr()?,
                admin: admin.local_addr()?,
            },
            agent,
            servers,
            search,
            leases,
            reloader,
            openvpn,
            config,
            health,
            admin,
        })
    }

    /// Serves until `shutdown` fires, or until `drain` has fired and no connection is left. Waits for every
    /// task to end.
    pub async fn run(self, drain: CancellationToken) {
        let Agent {
            tasks,
            shutdown,
            metrics,
            ..
        } = &*self.agent;
        let page = metrics.registry().clone();
        let upkeep = page.clone().run_upkeep(shutdown.clone());
        spawn_essential(tasks, "metrics", shutdown, upkeep);
        let reload = self.reloader.run(shutdown.clone());
        spawn_essential(tasks, "reload", shutdown, reload);
        let tunnel = self.openvpn.as_ref().map(|(tunnel, _)| tunnel.clone());
        let servers = self.search.is_some().then(|| self.servers.clone());
        let health = admin::Routes::new()
            .with_healthz()
            .with_agent_readyz(checks(servers, tunnel))
            .with_metrics(page);
        let health_port = self.addresses.health.port();
        let admin = admin::Routes::new().with_redirect_to_port("/metrics", health_port);
        let serve = admin::serve(self.health, health, shutdown.clone());
        spawn_essential(tasks, "health", shutdown, serve);
        let serve = admin::serve(self.admin, admin, shutdown.clone());
        spawn_essential(tasks, "admin", shutdown, serve);
        buffers(&self.config).log();
        let searching = shutdown.child_token();
        if let Some(search) = self.search {
            info!(
                server = format!("{}:{}", self.config.server_host, self.config.server_port),
                agent_id = self.config.agent_id,
                "connecting"
            );
            spawn_essential(tasks, "servers", &searching, search.run(searching.clone()));
        }
        if let Some(leases) = self.leases {
            spawn_essential(tasks, "leases", &searching, leases.run(searching.clone()));
        }
        if let Some((_, client)) = self.openvpn {
            info!("connecting to an OpenVPN server");
            spawn_essential(tasks, "OpenVPN", &searching, client.run(searching.clone()));
        }
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = drain.cancelled() => {
                let Config { drain_timeout, drain_linger, .. } = self.config;
                info!(?drain_timeout, ?drain_linger, "draining");
                searching.cancel();
                self.servers.drain();
                let drained = async {
                    idle(self.agent.active(), &self.agent.leaving, drain_linger).await;
                    self.servers.finish().await;
                };
                tokio::select! {
                    () = drained => info!("drained"),
                    () = tokio::time::sleep(drain_timeout) => {
                        match *self.agent.active().borrow() {
                            0 => info!("drained"),
                            open => warn!(
                                connections = open,
                                "the drain timeout passed: closing the connections that are still open"
                            ),
                        }
                    }
                    () = shutdown.cancelled() => {}
                }
            }
        }
        shutdown.cancel();
        tasks.close();
        tasks.wait().await;
    }
}

/// Returns the buffer sizes for the memory report in the log; docs/architecture.md explains them.
fn buffers(config: &Config) -> Buffers {
    let (quic_connection, quic_link) = match config.transport {
        LinkTransport::Tcp => (0, 0),
        LinkTransport::Auto | LinkTransport::Quic => (quic::CONNECTION_BYTES, quic::LINK_BYTES),
    };
    Buffers {
        connection_budget: connection_bytes(config.xfr_channel_size),
        client: Stream::default(),
        stream: Stream {
            window: PACKETS_LONG_PATH_BYTES as usize,
            outgoing: OUTGOING_BYTES + ANSWER_BYTES,
            http: AGENT_SEND_BYTES,
        },
        excess: config.excess_buffer_bytes,
        native_connection: culvert_native::CONNECTION_BYTES.max(quic_connection),
        native_held: TAKER_HELD_BYTES + buffer_bytes(config.resume_grace) + quic_link,
    }
}

/// Returns the readiness checks. As in the stock agent, at least one server must be connected. The OpenVPN
/// tunnel, if configured, must be up too.
fn checks(servers: Option<Arc<Servers>>, tunnel: Option<Arc<Tunnel>>) -> Vec<Check> {
    let mut checks = vec![Check {
        name: "ping",
        run: Box::new(|| Ok(())),
    }];
    checks.extend(servers.map(|servers| Check {
        name: "server-connected",
        run: Box::new(move || match servers.count() {
            0 => Err("no servers connected".into()),
            _ => Ok(()),
        }),
    }));
    checks.extend(tunnel.map(|tunnel| Check {
        name: "openvpn-connected",
        run: Box::new(move || match tunnel.is_up() {
            false => Err("the OpenVPN tunnel is not up".into()),
            true => Ok(()),
        }),
    }));
    checks
}

/// Resolves once no connection has been open, and no task of `leaving` has run, for the whole linger time. Servers without
/// another agent keep sending dials to a draining agent.
async fn idle(mut active: watch::Receiver<usize>, leaving: &TaskTracker, linger: Duration) {
    loop {
        if active.wait_for(|count| *count == 0).await.is_err() {
            return;
        }
        if !leaving.is_empty() {
            sleep(LEAVING_CHECK).await;
            continue;
        }
        let changed = timeout(linger, active.changed()).await;
        if !matches!(changed, Ok(Ok(()))) && leaving.is_empty() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use tokio::time::Instant;

    use super::*;

    #[test]
    fn architecture_page_has_the_bound_of_a_native_server() {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
        let document = std::fs::read_to_string(format!("{root}/docs/architecture.md")).unwrap();
        let ca = format!("--ca-cert={root}/Cargo.toml");
        for (name, transport) in [("agent", "auto"), ("agent, `--transport=tcp`", "tcp")] {
            let [plain, resumable] = ["0", "30s"].map(|grace| {
                let (transport, grace) = (
                    format!("--transport={transport}"),
                    format!("--resume-grace={grace}"),
                );
                let config = Config::from_args(["culvert-agent", &ca, &transport, &grace]);
                buffers(&config.unwrap()).native_held / (1024 * 1024)
            });
            let first = format!("| {name} | ");
            let row = document.lines().find(|line| line.starts_with(&first));
            let row = row.unwrap();
            let expected = format!(" | {plain} MiB | {resumable} MiB |");
            assert!(row.ends_with(&expected), "{row} must end with {expected}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn late_dial_restarts_the_linger_time() {
        let (tx, rx) = watch::channel(1);
        let leaving = TaskTracker::new();
        let linger = Duration::from_secs(5);
        let started = Instant::now();
        let traffic = async {
            sleep(Duration::from_secs(1)).await;
            tx.send(0).unwrap();
            sleep(Duration::from_secs(3)).await;
            tx.send(1).unwrap();
            sleep(Duration::from_secs(2)).await;
            tx.send(0).unwrap();
            sleep(Duration::from_secs(10)).await;
        };
        tokio::select! {
            () = idle(rx, &leaving, linger) => {}
            () = traffic => unreachable!("the agent must be idle before the traffic ends"),
        }
        assert_eq!(started.elapsed(), Duration::from_secs(11));
    }

    #[tokio::test(start_paused = true)]
    async fn last_bytes_on_their_way_are_waited_for() {
        let (_tx, rx) = watch::channel(0);
        let linger = Duration::from_secs(5);
        let started = Instant::now();
        let leaving = TaskTracker::new();
        leaving.spawn(sleep(Duration::from_secs(20)));
        idle(rx, &leaving, linger).await;
        let end = started.elapsed();
        let range = Duration::from_secs(25)..Duration::from_secs(26);
        assert!(range.contains(&end), "{end:?}");
    }
}
