//! The seed's front door, and a node's way to it, as the tunnel's user cluster would use them:
//! users and an agent come by server name, nodes by CONNECT.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use culvert_door::allowed::AllowedNetworks;
use culvert_door::app as door;
use culvert_door::config as door_config;
use culvert_host::flags::HostPort;
use culvert_host::telemetry::logging::LogConfig;
use culvert_kit::pki::{CLUSTER_NAME, KONNECTIVITY_NAME};
use culvert_node_tunnel::app as node;
use culvert_node_tunnel::config as node_config;
use http::uri::Authority;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::tunnel::any_port;

/// What CONNECT is asked for to reach the HTTP service.
pub const WEB: &str = "web.cluster-dev.svc.cluster.local:80";

/// What CONNECT is asked for to reach the raw service; the node tunnel's only target.
pub const RAW: &str = "raw.cluster-dev.svc.cluster.local:443";

/// The upstream of agents, as the proxy's metrics name it.
pub const KONNECTIVITY: &str = "cluster-dev/konnectivity-server-secure";

/// How long connections may take to end at the stop; both their ends stop at the same time.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// The connections that one Service port may have; the proxy's default.
const MAX_CONNECTIONS: u64 = 1024;

/// What is behind the door.
pub struct Endpoints {
    /// HTTP over TLS, in the place of an API server.
    pub https: SocketAddr,
    /// Plain HTTP.
    pub http: SocketAddr,
    /// The raw service.
    pub raw: SocketAddr,
    /// Where the servers take agents.
    pub agents: Vec<SocketAddr>,
}

/// A running nodeport-proxy and a node tunnel that leads to it.
pub struct Door {
    /// The file of routes.
    pub routes: PathBuf,
    /// TLS by server name.
    pub sni: SocketAddr,
    /// CONNECT.
    pub tunneling: SocketAddr,
    /// Health and metrics of the nodeport-proxy.
    pub stats: SocketAddr,
    /// The node tunnel's listener.
    pub node: SocketAddr,
    /// Health and metrics of the node tunnel.
    pub node_stats: SocketAddr,
}

impl Door {
    /// Starts both; the file of routes goes into `folder`.
    pub async fn start(
        folder: &Path,
        endpoints: &Endpoints,
        tasks: &TaskTracker,
        shutdown: &CancellationToken,
    ) -> anyhow::Result<Self> {
        let routes = folder.join("door.yaml");
        std::fs::write(&routes, endpoints.routes())
            .with_context(|| format!("cannot write {}", routes.display()))?;
        let bound = door::Bound::bind(door_settings(&routes)).await?;
        let door::Addresses {
            sni: Some(sni),
            tunneling: Some(tunneling),
            stats,
        } = bound.addresses
        else {
            anyhow::bail!("the front door has both listeners");
        };
        tasks.spawn(bound.run(shutdown.clone()));
        let bound = node::Bound::bind(node_settings(tunneling)).await?;
        let node::Addresses {
            listen,
            stats: node_stats,
        } = bound.addresses.clone();
        tasks.spawn(bound.run(shutdown.clone()));
        Ok(Self {
            routes,
            sni,
            tunneling,
            stats,
            node: listen.first().copied().context("a route has a listener")?,
            node_stats,
        })
    }

    /// The arguments by which curl reaches the HTTP service through the CONNECT listener.
    pub fn curl(&self) -> [String; 4] {
        let proxy = format!("http://{}", self.tunneling);
        let url = format!("http://{WEB}/");
        ["--proxytunnel".to_owned(), "-x".to_owned(), proxy, url]
    }
}

impl Endpoints {
    /// The file of routes, with the names that a user cluster's Services have.
    fn routes(&self) -> String {
        let Self {
            https,
            http,
            raw,
            agents,
        } = self;
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
}

fn door_settings(routes: &Path) -> door_config::Config {
    door_config::Config {
        source: door_config::Source::File(routes.to_owned()),
        sni: Some(any_port()),
        tunneling: Some(door_config::Tunneling {
            bind: any_port(),
            tls: None,
            client_ca: None,
            require_tls: false,
            allowed: AllowedNetworks::default(),
        }),
        stats: any_port(),
        node_port_host: "127.0.0.1".to_owned(),
        limits: door_config::Limits::default(),
        max_connections: MAX_CONNECTIONS,
        drain_timeout: DRAIN_TIMEOUT,
        worker_threads: 1,
        logging: LogConfig::default(),
        warnings: Vec::new(),
    }
}

fn node_settings(door: SocketAddr) -> node_config::Config {
    node_config::Config {
        routes: vec![node_config::Route {
            listen: any_port(),
            authority: Authority::from_static(RAW),
        }],
        proxy: HostPort::new(&door.ip().to_string(), door.port()),
        connections: 2,
        interface: None,
        stats: any_port(),
        drain_timeout: DRAIN_TIMEOUT,
        logging: LogConfig::default(),
        warnings: Vec::new(),
    }
}
