//! The wiring of the proxy: opens the listeners, follows the source of routes, and drains at the end.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Context as _;
use culvert_host::admin::{self, BindError};
use culvert_host::flags::HostPort;
use culvert_host::net::admission::Admission;
use culvert_host::net::congestion::ChosenCongestion;
use culvert_host::net::listen::Listener;
use culvert_host::net::shares::Shares;
use culvert_host::runtime::shards::Shards;
use culvert_host::runtime::{essential, memory_limit, spawn_essential};
use culvert_host::tls::reload::{ServerFiles, ServerTls};
use culvert_host::tls::{TlsError, TlsOptions};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::field::display;
use tracing::{info, warn};

use super::balancer::Balancer;
use super::config::{Config, HOST_FLAG, Source, Tunneling};
use super::connect::{self, ConnectListener};
use super::discovery::Discovery;
use super::file::Follower;
use super::files::{Files, Reloader};
use super::front::{self, Front};
use super::metrics::{Entrance, ProxyMetrics};
use super::pages;
use super::ports::NodePorts;
use super::quic;
use super::table::Table;
use super::upstream::CONNECT_TIMEOUT;

/// The addresses of a bound proxy. Node ports are not included: they come and go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// Listener for TLS connections, routed by server name.
    pub sni: Option<SocketAddr>,
    /// Listener for QUIC connections, routed by server name.
    pub quic: Option<SocketAddr>,
    /// Listener for CONNECT requests.
    pub tunneling: Option<SocketAddr>,
    /// Listener for health and metrics.
    pub stats: SocketAddr,
    /// Listener for changes of the health.
    pub admin: Option<SocketAddr>,
}

/// The source of the routes.
enum Feed {
    File(Follower),
    Kubernetes(Box<Discovery>, Option<Box<Balancer>>),
}

/// A proxy with open listeners, before it accepts connections.
pub struct Bound {
    /// The addresses of the open listeners.
    pub addresses: Addresses,
    config: Config,
    metrics: Arc<ProxyMetrics>,
    table: Arc<Table>,
    feed: Feed,
    shards: Shards,
    sni: Option<TcpListener>,
    /// One socket for each thread; empty without the listener.
    quic: Vec<UdpSocket>,
    tunneling: Option<(TcpListener, Option<ServerTls>)>,
    reloader: Reloader,
    stats: TcpListener,
    admin: Option<TcpListener>,
    congestion: ChosenCongestion,
}

impl Bound {
    /// Reads the routes (from their file) or the Kubernetes credentials, reads the certificates, and opens
    /// every listener except node ports.
    ///
    /// # Errors
    /// Fails if a file cannot be used or an address is in use; the text contains the cause and the remedy.
    pub async fn bind(config: Config) -> anyhow::Result<Self> {
        let shards = Shards::start(config.worker_threads)
            .context("cannot start --worker-threads threads")?;
        let metrics = ProxyMetrics::new()?;
        let table = Arc::new(Table::new(config.max_connections));
        let mut reloader = Reloader::new(metrics.registry());
        let feed = match &config.source {
            Source::File(path) => {
                let follower = Follower::load(path, table.clone(), metrics.clone());
                Feed::File(follower.await?)
            }
            Source::Kubernetes(cluster) => {
                let (table, metrics) = (table.clone(), metrics.clone());
                let discovery = Discovery::new(cluster.clone(), table, metrics, &mut reloader);
                let mut discovery = Box::new(discovery.await?);
                let balancer = discovery.balancer().map(Box::new);
                Feed::Kubernetes(discovery, balancer)
            }
        };
        let sni = match &config.sni {
            Some(bind) => Some(listen(bind, "--envoy-sni-port").await?),
            None => None,
        };
        let quic = match (&config.sni_quic, &sni) {
            // The name in --bind-address is resolved once.
            (Some(bind), Some(sni)) => {
                let address = SocketAddr::new(sni.local_addr()?.ip(), bind.port);
                quic::bind(address, shards.count())?
            }
            _ => Vec::new(),
        };
        let tunneling = match &config.tunneling {
            Some(tunneling) => {
                let listener = listen(&tunneling.bind, "--envoy-tunneling-port").await?;
                Some((listener, connect_tls(tunneling, &mut reloader).await?))
            }
            None => None,
        };
        let stats = listen(&config.stats, "--envoy-stats-port").await?;
        let admin = match &config.admin {
            Some(bind) => {
                let flags = ["--envoy-admin-port"; 2];
                Some(admin::bind(&bind.host, bind.port, flags).await?)
            }
            None => None,
        };
        let congestion = config.link_congestion.choose()?;
        for listener in sni
            .iter()
            .chain(tunneling.iter().map(|(listener, _)| listener))
        {
            congestion.apply_to_listener(listener);
        }
        let local = |listener: &TcpListener| listener.local_addr();
        Ok(Self {
            addresses: Addresses {
                sni: sni.as_ref().map(local).transpose()?,
                quic: quic.first().map(UdpSocket::local_addr).transpose()?,
                tunneling: tunneling.as_ref().map(|(l, _)| local(l)).transpose()?,
                stats: stats.local_addr()?,
                admin: admin.as_ref().map(local).transpose()?,
            },
            config,
            metrics,
            table,
            feed,
            shards,
            sni,
            quic,
            tunneling,
            reloader,
            stats,
            admin,
            congestion,
        })
    }

    /// Serves until `shutdown` fires, and still accepts connections for the drain delay. Waits for connections to end, up
    /// to the drain timeout after `shutdown`, and then cuts the remaining connections.
    pub async fn run(self, shutdown: CancellationToken) {
        let closing = CancellationToken::new();
        // Dropping this future also closes the listeners of other threads.
        let _closes = closing.clone().drop_guard();
        let front = Arc::new(Front {
            table: self.table,
            limits: self.config.limits,
            metrics: self.metrics,
            proxies: self.config.proxies,
            shares: Shares::new(),
            hellos: Admission::new(front::ADMISSION),
            shards: self.shards,
            tasks: TaskTracker::new(),
            cut: CancellationToken::new(),
            closing: closing.clone(),
        });
        let Addresses {
            sni,
            quic,
            tunneling,
            stats,
            admin,
        } = self.addresses;
        let [sni, quic, tunneling, admin] =
            [sni, quic, tunneling, admin].map(|address| address.map(display));
        info!(sni, quic, tunneling, admin, %stats, "serving");
        let (accepting, upkeep) = (TaskTracker::new(), TaskTracker::new());
        let stop = CancellationToken::new();
        let (changes, changed) = watch::channel(0);
        match self.feed {
            Feed::File(follower) => {
                let run = follower.run(changes, stop.clone());
                spawn_essential(&upkeep, "routes", &stop, run);
            }
            Feed::Kubernetes(discovery, balancer) => {
                if let Some(balancer) = balancer {
                    // The balancer stops when the drain begins, so that another replica can lead at once.
                    let run = balancer.run(shutdown.clone());
                    spawn_essential(&upkeep, "balancer", &shutdown, run);
                }
                let run = discovery.run(changes, stop.clone());
                spawn_essential(&upkeep, "discovery", &stop, run);
            }
        }
        let ports = NodePorts::new(front.clone(), &self.config.node_port_host, self.congestion);
        spawn_essential(&accepting, "node ports", &closing, ports.run(changed));
        let serve = admin::serve(self.stats, pages::stats(&front), stop.clone());
        spawn_essential(&upkeep, "stats", &stop, serve);
        if let Some(listener) = self.admin {
            let serve = admin::serve(listener, pages::admin(&front), stop.clone());
            spawn_essential(&upkeep, "admin", &stop, serve);
        }
        for shard in front.shards.ids() {
            front.shards.spawn(shard, &upkeep, pulse(stop.clone()));
        }
        let registry = front.metrics.registry().clone();
        let run = registry.run_upkeep(stop.clone());
        spawn_essential(&upkeep, "metrics", &stop, run);
        let reload = self.reloader.run(stop.clone());
        spawn_essential(&upkeep, "reload", &stop, reload);

        if let Some(listener) = self.sni {
            serve_sni(&front, listener, &accepting);
        }
        serve_quic(&front, self.quic, &accepting);
        if let (Some((listener, tls)), Some(tunneling)) = (self.tunneling, self.config.tunneling) {
            let connect = connect_listener(&front, tls, tunneling);
            let bound = connect.sessions.clone().bound_uploads(stop.clone());
            spawn_essential(&upkeep, "uploads", &stop, bound);
            serve_connect(connect, listener, &accepting);
        }

        shutdown.cancelled().await;
        let (delay, timeout) = (self.config.drain_delay, self.config.drain_timeout);
        drain(&front, &accepting, delay, timeout).await;
        stop.cancel();
        upkeep.close();
        upkeep.wait().await;
    }
}

/// Accepts TLS connections, routed by server name, on all threads.
fn serve_sni(front: &Arc<Front>, listener: TcpListener, accepting: &TaskTracker) {
    let (own, until) = (front.clone(), front.closing.clone());
    let accept = move |listener| {
        let front = own.clone();
        let connection = move |stream, peer| front.clone().serve_sni(stream, peer);
        let listener = Listener::tcp(listener, &own.limits.downstream_keepalive);
        let (front, until) = (own.clone(), until.clone());
        let (seat, entrance) = (Shards::seat_nearby, Entrance::Sni);
        let accept = front.accept(listener, until.clone(), seat, entrance, connection);
        essential("server names", until, accept)
    };
    // All threads wait on the same listening socket, and the first thread to wake up accepts and usually serves the
    // connection. Most connections to this listener are short; a hand-over to another thread would be an eighth of the cost
    // of such a connection.
    for shard in front.shards.ids().skip(1) {
        let (shared, accept) = (listener.as_fd().try_clone_to_owned(), accept.clone());
        front.shards.spawn(shard, accepting, async move {
            match shared.and_then(|shared| TcpListener::from_std(shared.into())) {
                Ok(listener) => accept(listener).await,
                Err(error) => {
                    warn!(%error, "a thread cannot accept connections; the other threads continue")
                }
            }
        });
    }
    accepting.spawn(accept(listener));
}

/// Serves each UDP socket on a thread of its own.
fn serve_quic(front: &Arc<Front>, sockets: Vec<UdpSocket>, accepting: &TaskTracker) {
    quic::check_buffers(&sockets);
    let parts = sockets.len();
    let drain = quic::Drain::of(parts);
    for (shard, socket) in front.shards.ids().zip(sockets) {
        let until = front.closing.clone();
        let serve = quic::serve(front.clone(), socket, parts, drain.clone(), until);
        front.shards.spawn(shard, accepting, serve);
    }
}

/// Returns the shared state of the connections of the CONNECT listener.
fn connect_listener(
    front: &Arc<Front>,
    tls: Option<ServerTls>,
    tunneling: Tunneling,
) -> Arc<ConnectListener> {
    let memory = memory_limit();
    Arc::new(ConnectListener {
        front: front.clone(),
        tls,
        require_tls: tunneling.require_tls,
        allowed: tunneling.allowed,
        requests: Admission::new(front::ADMISSION),
        sessions: connect::sessions(memory, &front.metrics),
        unread: connect::unread(memory),
    })
}

/// Accepts connections with CONNECT requests.
fn serve_connect(connect: Arc<ConnectListener>, listener: TcpListener, accepting: &TaskTracker) {
    let (front, until) = (connect.front.clone(), connect.front.closing.clone());
    let listener = Listener::tcp(listener, &front.limits.downstream_keepalive);
    let connection = move |stream, peer| connect.clone().serve(stream, peer);
    let (seat, entrance) = (Shards::seat, Entrance::Tunneling);
    let accept = front.accept(listener, until.clone(), seat, entrance, connection);
    spawn_essential(accepting, "CONNECT", &until, accept);
}

/// Accepts connections for `delay`, then waits for connections to end, until `timeout` has passed since the start. Cuts the
/// remaining connections.
async fn drain(front: &Front, accepting: &TaskTracker, delay: Duration, timeout: Duration) {
    front.metrics.draining.store(true, Ordering::Relaxed);
    info!(open = front.tasks.len(), "draining");
    let cut_at = Instant::now() + timeout;
    sleep(delay.min(timeout)).await;
    front.closing.cancel();
    accepting.close();
    front.tasks.close();
    let drained = async {
        // A connection accepted shortly before is drained as well.
        accepting.wait().await;
        front.tasks.wait().await;
    };
    let is_over = timeout_at(cut_at, drained).await.is_ok();
    if !is_over && !front.tasks.is_empty() {
        warn!(
            open = front.tasks.len(),
            "cutting the remaining connections"
        );
    }
    front.cut.cancel();
    front.tasks.wait().await;
    accepting.wait().await;
}

/// Binds a TCP listener. Errors name `--bind-address`, or the flag of the port.
async fn listen(bind: &HostPort, port: &str) -> Result<TcpListener, BindError> {
    admin::bind(&bind.host, bind.port, [HOST_FLAG, port]).await
}

/// Runs a short recurring timer on this thread, to save system calls. Whenever a new timer is due before all
/// other timers, tokio wakes its driver, which costs two system calls. Without the recurring timer, the
/// timeout of nearly every connect would be due first.
async fn pulse(stop: CancellationToken) {
    let beat = async {
        loop {
            sleep(CONNECT_TIMEOUT / 2).await;
        }
    };
    stop.run_until_cancelled(beat).await;
}

/// Loads and follows the certificates of the CONNECT listener; returns `None` if the listener has no TLS.
async fn connect_tls(
    tunneling: &Tunneling,
    reloader: &mut Reloader,
) -> anyhow::Result<Option<ServerTls>> {
    let Some((cert, key)) = &tunneling.tls else {
        return Ok(None);
    };
    let (ca, options) = (tunneling.client_ca.as_deref(), TlsOptions::default());
    let set = ServerFiles::new(cert, key, ca, &[b"h2", b"http/1.1"], &options)?;
    let followed = reloader.follow(Files::Tunneling, set).await;
    let followed = followed.map_err(|error| {
        let flags = match error {
            TlsError::Ca(_) => "--tunneling-client-ca",
            _ => "--tunneling-cert and --tunneling-key",
        };
        anyhow::Error::new(error).context(flags)
    });
    followed.map(Some)
}

#[cfg(test)]
mod tests;
