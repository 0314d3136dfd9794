//! The seed's front door and a node tunnel, used as in a real user cluster: users and an agent connect by
//! server name, nodes by CONNECT.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use culvert_door::app as door;
use culvert_door::config as door_config;
use culvert_host::flags::HostPort;
use culvert_host::net::congestion::LinkCongestion;
use culvert_host::net::networks::Networks;
use culvert_host::telemetry::logging::LogConfig;
use culvert_kit::pki::{CLUSTER_NAME, KONNECTIVITY_NAME};
use culvert_kit::services::Services;
use culvert_node_tunnel::app as node;
use culvert_node_tunnel::config as node_config;
use http::uri::Authority;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::settings::any_port;

/// Authority of the HTTP service in CONNECT requests.
pub(super) const WEB: &str = "web.cluster-dev.svc.cluster.local:80";

/// Authority of the raw service in CONNECT requests; the node tunnel's only target.
pub(super) const RAW: &str = "raw.cluster-dev.svc.cluster.local:443";

/// Name of the agents' upstream in the metrics of the nodeport-proxy.
pub(super) const KONNECTIVITY: &str = "cluster-dev/konnectivity-server-secure";

/// Time for connections to end at shutdown. Both ends of a connection stop at the same time.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// Connection limit of one Service port: the default of the nodeport-proxy.
const MAX_CONNECTIONS: u64 = 1024;

/// A running nodeport-proxy, and a node tunnel to the proxy.
pub(super) struct Door {
    pub routes: PathBuf,
    /// Listener for TLS by server name.
    pub sni: SocketAddr,
    /// Listener for CONNECT.
    pub tunneling: SocketAddr,
    /// Listener for health and metrics of the nodeport-proxy.
    pub stats: SocketAddr,
    /// Listener of the node tunnel.
    pub node: SocketAddr,
    /// Listener for health and metrics of the node tunnel.
    pub node_stats: SocketAddr,
    /// Stops the node tunnel.
    node_shutdown: CancellationToken,
    node_tunnel: JoinHandle<()>,
}

impl Door {
    /// Starts the nodeport-proxy and the node tunnel; writes the routes file into `folder`. `https` is the
    /// service in place of an API server, `agents` are the servers' listeners for agents.
    pub(super) async fn start(
        folder: &Path,
        services: &Services,
        https: SocketAddr,
        agents: &[SocketAddr],
        tasks: &TaskTracker,
        shutdown: &CancellationToken,
    ) -> anyhow::Result<Self> {
        let routes = folder.join("door.yaml");
        std::fs::write(&routes, routes_of(services, https, agents))
            .with_context(|| format!("cannot write {}", routes.display()))?;
        let bound = door::Bound::bind(door_settings(&routes)).await?;
        let door::Addresses {
            sni: Some(sni),
            tunneling: Some(tunneling),
            stats,
            ..
        } = bound.addresses
        else {
            anyhow::bail!("the front door must have both listeners");
        };
        tasks.spawn(bound.run(shutdown.clone()));
        let bound = node::Bound::bind(node_settings(tunneling)).await?;
        let node::Addresses {
            listen,
            stats: node_stats,
        } = bound.addresses.clone();
        let node_shutdown = shutdown.child_token();
        let node_tunnel = tasks.spawn(bound.run(node_shutdown.clone()));
        Ok(Self {
            routes,
            sni,
            tunneling,
            stats,
            node: listen
                .first()
                .copied()
                .context("the node tunnel has no listener")?,
            node_stats,
            node_shutdown,
            node_tunnel,
        })
    }

    /// Stops the node tunnel. While the proxy is still there, the node tunnel does not warn about a lost proxy.
    pub(super) async fn stop_node_tunnel(self) {
        self.node_shutdown.cancel();
        // Fails only after a panic, and then the process ends.
        let _ = self.node_tunnel.await;
    }

    /// Returns the curl arguments for the HTTP service through the CONNECT listener.
    pub(super) fn curl(&self) -> [String; 4] {
        let proxy = format!("http://{}", self.tunneling);
        let url = format!("http://{WEB}/");
        ["--proxytunnel".to_owned(), "-x".to_owned(), proxy, url]
    }
}

/// Returns the content of the routes file, with the names of a user cluster's Services.
fn routes_of(services: &Services, https: SocketAddr, agents: &[SocketAddr]) -> String {
    let (http, raw) = (services.http, services.raw);
    let agents: Vec<String> = agents.iter().map(ToString::to_string).collect();
    let agents = agents.join(", ");
    format!(
        r#"# Changes take effect while the proxy runs.
upstreams:
  - name: cluster-dev/apiserver-external-secure
    endpoints: [{https}]
    serverNames: [{CLUSTER_NAME}]
    authorities: ["apiserver-external.cluster-dev.svc.cluster.local:443"]
  - name: {KONNECTIVITY}
    endpoints: [{agents}]
    serverNames: [{KONNECTIVITY_NAME}]
    authorities: ["konnectivity-server.cluster-dev.svc.cluster.local:443"]
  - name: cluster-dev/web
    endpoints: [{http}]
    authorities: ["{WEB}"]
  - name: cluster-dev/raw
    endpoints: [{raw}]
    authorities: ["{RAW}"]
"#
    )
}

fn door_settings(routes: &Path) -> door_config::Config {
    door_config::Config {
        source: door_config::Source::File(routes.to_owned()),
        sni: Some(any_port()),
        sni_quic: None,
        tunneling: Some(door_config::Tunneling {
            bind: any_port(),
            tls: None,
            client_ca: None,
            require_tls: false,
            allowed: Networks::default(),
        }),
        proxies: Networks::default(),
        stats: any_port(),
        admin: None,
        node_port_host: "127.0.0.1".to_owned(),
        link_congestion: LinkCongestion::System,
        limits: door_config::Limits::default(),
        max_connections: MAX_CONNECTIONS,
        drain_timeout: DRAIN_TIMEOUT,
        drain_delay: Duration::ZERO,
        worker_threads: 1,
        logging: LogConfig::default(),
        warnings: Vec::new(),
    }
}

fn node_settings(door: SocketAddr) -> node_config::Config {
    node_config::Config {
        mode: node_config::Mode::Tunnel,
        routes: vec![node_config::Route {
            listen: any_port(),
            authority: Authority::from_static(RAW),
        }],
        proxy: HostPort::new(&door.ip().to_string(), door.port()),
        tls: None,
        pings: node_config::PINGS,
        connections: 2,
        interface: None,
        stats: any_port(),
        drain_timeout: DRAIN_TIMEOUT,
        link_congestion: LinkCongestion::System,
        logging: LogConfig::default(),
        warnings: Vec::new(),
    }
}
