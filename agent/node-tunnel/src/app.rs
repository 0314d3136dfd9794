//! The wiring of the node tunnel: starts the interface, the listeners and the connections to the proxy, and
//! drains the clients at shutdown.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use culvert_host::admin::{self, Check};
use culvert_host::net::congestion::disable_bbr_on_loopback;
use culvert_host::net::listen::{Accepted, Keepalive, Listener, rebind};
use culvert_host::runtime::shards::Shards;
use culvert_host::runtime::spawn_essential;
use culvert_host::telemetry::metrics::Registry;
use tokio::net::TcpListener;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{info, warn};

use super::client::{ClientHandler, client_halves};
use super::config::{Config, Mode};
use super::files::Reloader;
use super::interface::Keeper;
use super::metrics::{Refusal, TunnelMetrics};
use super::pool::ConnectionPool;
use super::reach::SeedProxy;

/// Last part of the drain, without new clients: short requests end before the remaining clients are disconnected.
const LAST_REQUESTS: Duration = Duration::from_secs(2);

/// Time for the proxy to accept the last bytes after the drain, when the remaining clients are disconnected.
const CUT_TIMEOUT: Duration = Duration::from_secs(1);

/// Listen addresses of a bound node tunnel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// Listeners for clients, in the order of the configuration.
    pub listen: Vec<SocketAddr>,
    /// Listener for health and metrics.
    pub stats: SocketAddr,
}

/// A node tunnel with open listeners that does not accept clients yet.
pub struct Bound {
    /// Listen addresses.
    pub addresses: Addresses,
    config: Config,
    metrics: Arc<TunnelMetrics>,
    shards: Shards,
    keeper: Option<Keeper>,
    reach: SeedProxy,
    reloader: Reloader,
    listeners: Vec<TcpListener>,
    stats: TcpListener,
}

/// An interface without clients: the work of network-interface-manager.
pub struct InterfaceOnly {
    keeper: Keeper,
    mode: Mode,
}

impl Bound {
    /// Creates the interface, if configured, and opens every listener.
    ///
    /// # Errors
    /// Fails if the interface cannot be created, if a TLS file cannot be used, or if an address is already in use
    /// or does not belong to this node. The error text names the address and the remedy.
    pub async fn bind(config: Config) -> anyhow::Result<Self> {
        let metrics = TunnelMetrics::new()?;
        let mut reloader = Reloader::new(metrics.registry());
        let reach = SeedProxy::new(
            config.proxy.clone(),
            config.tls.clone(),
            config.link_congestion.choose()?,
            &mut reloader,
        )
        .await?;
        // A single thread does all the work of a connection to the proxy, so threads beyond the number of
        // connections would stay idle.
        let threads = Shards::default_count().map(|most| most.min(config.connections));
        let shards = threads.and_then(Shards::start);
        let shards = shards.context("cannot start threads")?;
        let keeper = match config.interface.clone() {
            Some(interface) => Some(Keeper::start(interface, metrics.clone()).await?),
            None => None,
        };
        let mut listeners = Vec::with_capacity(config.routes.len());
        for route in &config.routes {
            let bind = &route.listen;
            listeners.push(admin::bind(&bind.host, bind.port, ["--listen"; 2]).await?);
        }
        let stats = &config.stats;
        let flags = ["--stats-address", "--stats-port"];
        let stats = admin::bind(&stats.host, stats.port, flags).await?;
        let listen = listeners.iter().map(TcpListener::local_addr);
        Ok(Self {
            addresses: Addresses {
                listen: listen.collect::<io::Result<_>>()?,
                stats: stats.local_addr()?,
            },
            config,
            metrics,
            shards,
            keeper,
            reach,
            reloader,
            listeners,
            stats,
        })
    }

    /// Serves until `shutdown` fires, and then until no client is connected, at most for the drain timeout. Accepts no
    /// clients in the last two seconds of it, and then disconnects the remaining clients.
    pub async fn run(self, shutdown: CancellationToken) {
        let Config {
            routes,
            proxy,
            connections,
            pings,
            drain_timeout,
            ..
        } = self.config;
        let metrics = self.metrics;
        let registry = metrics.registry().clone();
        let Addresses { listen, stats } = &self.addresses;
        info!(?listen, %stats, %proxy, "serving");
        let (tasks, upkeep) = (TaskTracker::new(), TaskTracker::new());
        let [closing, cut, stop] = [(); 3].map(|()| CancellationToken::new());
        // Dropping this future also ends the tasks on other threads.
        let _ends = [&closing, &cut, &stop].map(|token| token.clone().drop_guard());
        let pool =
            ConnectionPool::new(self.reach, connections, pings, self.shards, metrics.clone());
        spawn_essential(&upkeep, "pool", &stop, pool.clone().run(stop.clone()));
        let interface = self.keeper.as_ref().map(Keeper::check);
        let pages = pages(&pool, interface, &registry, &shutdown);
        let serve = admin::serve(self.stats, pages, stop.clone());
        spawn_essential(&upkeep, "stats", &stop, serve);
        let run = registry.run_upkeep(stop.clone());
        spawn_essential(&upkeep, "metrics", &stop, run);
        let reload = self.reloader.run(stop.clone());
        spawn_essential(&upkeep, "reload", &stop, reload);
        if let Some(keeper) = self.keeper {
            spawn_essential(&upkeep, "interface", &stop, keeper.run(stop.clone()));
        }
        for (listener, route) in self.listeners.into_iter().zip(&routes) {
            let refusals = metrics.refused.get(Refusal::TooManyConnections).clone();
            let (pool, metrics) = (pool.clone(), metrics.clone());
            let handler = ClientHandler::new(route, pool, metrics, tasks.clone(), cut.clone());
            let (handler, tasks) = (Arc::new(handler), tasks.clone());
            let handle = move |accepted| {
                if let Accepted::Tcp(stream, peer) = accepted {
                    disable_bbr_on_loopback(&stream);
                    let accepted_by = Shards::current();
                    let client = move || {
                        let stream = match Shards::current() == accepted_by {
                            true => stream,
                            false => rebind(stream)?,
                        };
                        Ok(client_halves(stream))
                    };
                    tasks.spawn(handler.clone().serve(client, peer));
                }
            };
            // No TCP user timeout: a client may pause reading for any length of time.
            let keepalive = Keepalive {
                user_timeout: None,
                ..Keepalive::default()
            };
            let listener = Listener::tcp(listener, &keepalive);
            let refused = move || refusals.increment(1);
            let serve = listener.serve(closing.clone(), handle, refused);
            spawn_essential(&upkeep, "listener", &closing, serve);
        }

        shutdown.cancelled().await;
        info!(open = tasks.len(), "draining");
        tasks.close();
        // Nothing else on this node has the address, and the next program starts after the end of this one.
        let accepting = drain_timeout.saturating_sub(LAST_REQUESTS);
        let _ = timeout(accepting, tasks.wait()).await;
        closing.cancel();
        if timeout(drain_timeout - accepting, tasks.wait())
            .await
            .is_err()
        {
            warn!(
                open = tasks.len(),
                "the drain timeout passed: closing the remaining clients"
            );
        }
        cut.cancel();
        // Closing the connections drops any bytes the proxy has not accepted by then.
        let _ = timeout(CUT_TIMEOUT, tasks.wait()).await;
        stop.cancel();
        upkeep.close();
        upkeep.wait().await;
    }
}

// === impl InterfaceOnly ===

impl InterfaceOnly {
    /// Creates the interface.
    ///
    /// # Errors
    /// Fails if the interface is not configured or cannot be created. The error text names the remedy.
    pub async fn bind(config: Config) -> anyhow::Result<Self> {
        let interface = config.interface.context("--mode needs --if and --addr")?;
        let keeper = Keeper::start(interface, TunnelMetrics::new()?).await?;
        let mode = config.mode;
        Ok(Self { keeper, mode })
    }

    /// Maintains the interface until `shutdown` fires; returns at once with [`Mode::Init`].
    pub async fn run(self, shutdown: CancellationToken) {
        if self.mode != Mode::Init {
            self.keeper.run(shutdown).await;
        }
    }
}

fn pages(
    pool: &Arc<ConnectionPool<SeedProxy>>,
    interface: Option<Check>,
    registry: &Arc<Registry>,
    shutdown: &CancellationToken,
) -> admin::Routes {
    let (pool, page, shutdown) = (pool.clone(), registry.clone(), shutdown.clone());
    let ready = move || match (shutdown.is_cancelled(), pool.is_up()) {
        (true, _) => Err("draining".to_owned()),
        (false, false) => Err("no connection to the proxy".to_owned()),
        (false, true) => Ok(()),
    };
    let connected = Check {
        name: "proxy-connected",
        run: Box::new(ready),
    };
    let checks = [connected].into_iter().chain(interface).collect();
    admin::Routes::new()
        .with_healthz()
        .with_agent_readyz(checks)
        .with_metrics_at(&["/stats/prometheus", "/metrics"], move || page.render())
}
