//! Envoy at both ends of a tunnel: as the front door of a seed and as the listener on a node.
//!
//! `tests/peers/install` installs Envoy. The configurations are copied from the platform that Culvert
//! replaces. Two things differ: listeners are on 127.0.0.1 instead of all addresses, and Envoy loads nothing
//! at run time except the files of [`Seed::following`]. Unset options have Envoy's defaults, such as 1,024
//! connections per cluster, unless [`Bootstrap::allowing`] sets a limit.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::metrics::http_get;
use crate::ports::Ports;
use crate::process::Program;
use crate::skip::skip;
use crate::topology::PATIENCE;
use crate::wait::eventually;

const TCP_PROXY: &str = "extensions.filters.network.tcp_proxy.v3.TcpProxy";
const HTTP_MANAGER: &str =
    "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager";
const ROUTER: &str = "extensions.filters.http.router.v3.Router";
const HEALTH_CHECK: &str = "extensions.filters.http.health_check.v3.HealthCheck";
const TLS_INSPECTOR: &str = "extensions.filters.listener.tls_inspector.v3.TlsInspector";
const ACCESS_LOG: &str = "extensions.access_loggers.file.v3.FileAccessLog";
const HTTP_OPTIONS: &str = "extensions.upstreams.http.v3.HttpProtocolOptions";

/// Names of the files that Envoy watches for changes; see [`Seed::following`].
const LISTENERS_FILE: &str = "listeners.json";
const CLUSTERS_FILE: &str = "clusters.json";

/// The installed Envoy program.
#[derive(Debug)]
pub struct Envoy {
    program: PathBuf,
}

impl Envoy {
    /// Installs Envoy, once per process. If the installation fails, returns `None` and prints the reason on
    /// stderr.
    ///
    /// # Panics
    /// If the installation fails and `CI=true`.
    pub fn get() -> Option<&'static Self> {
        static INSTALLED: OnceLock<Result<Envoy, String>> = OnceLock::new();
        let installed = INSTALLED.get_or_init(Self::install);
        installed.as_ref().inspect_err(|why| skip(why)).ok()
    }

    fn install() -> Result<Self, String> {
        let peers = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers");
        let output = Command::new(peers.join("install"))
            .stdin(Stdio::null())
            .output()
            .expect("starting tests/peers/install");
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).trim().to_owned());
        }
        Ok(Self {
            program: peers.join("bin/envoy"),
        })
    }

    /// Starts Envoy with two workers and waits until Envoy is live.
    ///
    /// # Panics
    /// If Envoy is not live within [`PATIENCE`], for example because Envoy rejects the configuration.
    pub async fn start(&self, bootstrap: &Bootstrap) -> RunningEnvoy {
        self.start_with(bootstrap, &[]).await
    }

    /// Does the same as [`start`](Self::start), with additional flags.
    ///
    /// # Panics
    /// As [`start`](Self::start).
    pub async fn start_with(&self, bootstrap: &Bootstrap, flags: &[&str]) -> RunningEnvoy {
        let dir = tempfile::Builder::new().prefix("culvert-").tempdir();
        let dir = dir.expect("a temporary directory");
        // Envoy derives the format of the file from the extension.
        let path = dir.path().join("envoy.json");
        std::fs::write(&path, bootstrap.config.to_string()).expect("writing Envoy's configuration");
        let path = path.to_str().expect("a path in UTF-8");
        // Hot restart would leave a file in /dev/shm at every start.
        #[rustfmt::skip]
        let mut args = vec![
            "--config-path", path, "--disable-hot-restart", "--concurrency", "2", "--log-level", "warning",
        ];
        args.extend(flags);
        let mut running = RunningEnvoy {
            program: Program::spawn(&self.program, args, &[]),
            admin: bootstrap.admin,
            _dir: dir,
        };
        eventually("Envoy is live", PATIENCE, async || {
            if let Some(status) = running.program.exited() {
                panic!("Envoy exited during startup: {status}");
            }
            match http_get(running.admin, "/ready").await {
                Ok((_, _, body)) if body.starts_with(b"LIVE") => Ok(()),
                Ok((status, ..)) => Err(status.to_string()),
                Err(error) => Err(format!("{error:#}")),
            }
        })
        .await;
        running
    }
}

/// A running Envoy. Dropping the value kills the program.
#[derive(Debug)]
pub struct RunningEnvoy {
    /// The program, for its log and its resource use.
    pub program: Program,
    /// Address of the admin listener, for example for `GET /stats/prometheus`.
    pub admin: SocketAddr,
    // Last field, so that the program is killed before its files are deleted.
    _dir: TempDir,
}

/// A configuration for starting Envoy.
#[derive(Debug, Clone, PartialEq)]
pub struct Bootstrap {
    /// Address of the admin listener in `config`.
    pub admin: SocketAddr,
    /// Contents of the bootstrap file, as JSON, which is also valid YAML.
    pub config: Value,
}

impl Bootstrap {
    fn new(admin: SocketAddr, listeners: Vec<Value>, clusters: Vec<Value>) -> Self {
        let config = json!({
            "admin": { "address": address(admin) },
            "static_resources": { "listeners": listeners, "clusters": clusters },
        });
        Self { admin, config }
    }

    /// Limits each cluster to this number of connections, and to as many concurrent requests, instead of
    /// 1,024. For a bootstrap from [`Seed::following`], the limit applies only to the clusters in the
    /// bootstrap, not to those in files.
    #[must_use]
    pub fn allowing(mut self, connections: u32) -> Self {
        let limits = json!({
            "max_connections": connections,
            "max_pending_requests": connections,
            "max_requests": connections,
        });
        let clusters = self.config["static_resources"]["clusters"].as_array_mut();
        for cluster in clusters.into_iter().flatten() {
            cluster["circuit_breakers"] = json!({ "thresholds": [limits] });
        }
        self
    }
}

/// Returns the configuration of a node's Envoy: each connection to one of the `listeners` becomes a CONNECT
/// to the authority next to the listener, in plain-text HTTP/2 to `upstream`. Every 30 s, Envoy pings
/// `upstream`; a ping without an answer for 5 s ends the connection.
pub fn node(
    ports: &mut Ports,
    listeners: &[(SocketAddr, &str)],
    upstream: SocketAddr,
) -> Bootstrap {
    let listeners = listeners.iter().enumerate().map(|(i, (at, authority))| {
        let mut proxy = tcp_proxy("tcp_stats", "proxy_cluster");
        proxy["tunneling_config"] = json!({ "hostname": authority });
        listener(&format!("listener_{i}"), *at, &filter(TCP_PROXY, proxy))
    });
    let mut cluster = cluster("proxy_cluster", "5s", &[upstream]);
    cluster["type"] = json!("LOGICAL_DNS");
    let keepalive = json!({ "interval": "30s", "timeout": "5s" });
    let http2 = json!({ "http2_protocol_options": { "connection_keepalive": keepalive } });
    cluster["typed_extension_protocol_options"] = json!({
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions":
            typed(HTTP_OPTIONS, json!({ "explicit_http_config": http2 })),
    });
    Bootstrap::new(local(ports), listeners.collect(), vec![cluster])
}

/// A seed's Envoy, with the configuration from the platform's control plane. Add routes to the maps. A front
/// listener without routes is left out, so that its port refuses connections.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seed {
    /// Listener for TLS clients, routed by server name. TLS is passed through.
    pub sni: SocketAddr,
    /// Listener for CONNECT in plain text, over HTTP/1.1 and HTTP/2.
    pub tunnel: SocketAddr,
    /// Listener for `/healthz`, and for `/stats` and the paths below it.
    pub stats: SocketAddr,
    /// Cluster names by server name.
    pub server_names: BTreeMap<String, String>,
    /// Cluster names by the `host:port` of a CONNECT.
    pub authorities: BTreeMap<String, String>,
    /// Cluster names by the port on 127.0.0.1 that leads to the cluster.
    pub node_ports: BTreeMap<u16, String>,
    /// Endpoints of each cluster, used in turn.
    pub clusters: BTreeMap<String, Vec<SocketAddr>>,
    /// Settings that an operator may change.
    pub settings: Settings,
    admin: SocketAddr,
}

/// Settings that an operator of the platform may change. `None` is Envoy's default. Times have a unit, for
/// example `5s`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Settings {
    /// Idle time after which a connection that was routed by server name is closed.
    pub sni_idle: Option<&'static str>,
    /// Time without any CONNECT after which a client's connection is closed.
    pub connection_idle: Option<&'static str>,
    /// Idle time after which a CONNECT stream is closed.
    pub stream_idle: Option<&'static str>,
    /// Largest number of connections to each cluster. One more request may wait for a connection. The platform has no
    /// such setting.
    pub max_connections: Option<u32>,
}

impl Seed {
    /// Creates a seed without routes.
    pub fn new(ports: &mut Ports) -> Self {
        Self {
            sni: local(ports),
            tunnel: local(ports),
            stats: local(ports),
            server_names: BTreeMap::new(),
            authorities: BTreeMap::new(),
            node_ports: BTreeMap::new(),
            clusters: BTreeMap::new(),
            settings: Settings::default(),
            admin: local(ports),
        }
    }

    /// Returns a configuration with all routes in the bootstrap file.
    pub fn bootstrap(&self) -> Bootstrap {
        let clusters = [self.stats_cluster()].into_iter().chain(self.clusters());
        Bootstrap::new(self.admin, self.listeners(), clusters.collect())
    }

    /// Writes the listeners and the clusters to files in `dir`, and returns a configuration that makes Envoy
    /// watch these files as a replacement for the control plane.
    ///
    /// # Panics
    /// If the files cannot be written.
    pub fn following(&self, dir: &Path) -> Bootstrap {
        self.write_listeners(dir);
        self.write_clusters(dir);
        let mut bootstrap = Bootstrap::new(self.admin, Vec::new(), vec![self.stats_cluster()]);
        let source = |file: &str| {
            json!({
                "resource_api_version": "V3",
                "path_config_source": { "path": dir.join(file) },
            })
        };
        bootstrap.config["node"] = json!({ "id": "kube", "cluster": "np-cluster" });
        bootstrap.config["dynamic_resources"] = json!({
            "lds_config": source(LISTENERS_FILE),
            "cds_config": source(CLUSTERS_FILE),
        });
        bootstrap
    }

    /// Replaces the listeners in the files of `dir`, which a running Envoy picks up.
    ///
    /// # Panics
    /// If the file cannot be written.
    pub fn write_listeners(&self, dir: &Path) {
        let listeners = self.listeners().into_iter();
        publish(&dir.join(LISTENERS_FILE), "listener.v3.Listener", listeners);
    }

    /// Replaces the clusters in the files of `dir`, which a running Envoy picks up.
    ///
    /// # Panics
    /// If the file cannot be written.
    pub fn write_clusters(&self, dir: &Path) {
        let file = dir.join(CLUSTERS_FILE);
        publish(&file, "cluster.v3.Cluster", self.clusters());
    }

    fn stats_cluster(&self) -> Value {
        cluster("service_stats", "0.05s", &[self.admin])
    }

    fn clusters(&self) -> impl Iterator<Item = Value> {
        self.clusters.iter().map(|(name, endpoints)| {
            let mut cluster = cluster(name, "1s", endpoints);
            if let Some(most) = self.settings.max_connections {
                let thresholds = json!([{ "max_connections": most, "max_pending_requests": 1 }]);
                cluster["circuit_breakers"] = json!({ "thresholds": thresholds });
            }
            cluster
        })
    }

    fn listeners(&self) -> Vec<Value> {
        let mut listeners = vec![self.stats_listener()];
        listeners.extend(self.node_ports.iter().map(|(port, cluster)| {
            let at = SocketAddr::from((Ipv4Addr::LOCALHOST, *port));
            let proxy = filter(TCP_PROXY, tcp_proxy("ingress_tcp", cluster));
            listener(&format!("node_port_{port}"), at, &proxy)
        }));
        if !self.server_names.is_empty() {
            listeners.push(self.sni_listener());
        }
        if !self.authorities.is_empty() {
            listeners.push(self.tunnel_listener());
        }
        listeners
    }

    fn sni_listener(&self) -> Value {
        let chains = self.server_names.iter().map(|(name, cluster)| {
            let mut proxy = tcp_proxy("ingress_tcp", cluster);
            proxy["access_log"] = access_log();
            if let Some(idle) = self.settings.sni_idle {
                proxy["idle_timeout"] = json!(idle);
            }
            json!({
                "filter_chain_match": { "server_names": [name], "transport_protocol": "tls" },
                "filters": [filter(TCP_PROXY, proxy)],
            })
        });
        json!({
            "name": "sni_listener",
            "address": address(self.sni),
            "listener_filters": [filter(TLS_INSPECTOR, json!({}))],
            "filter_chains": chains.collect::<Vec<_>>(),
        })
    }

    fn tunnel_listener(&self) -> Value {
        let hosts = self.authorities.iter().map(|(authority, cluster)| {
            let upgrade = json!({ "upgrade_type": "CONNECT", "connect_config": {} });
            json!({
                "name": authority,
                "domains": [authority],
                "routes": [{
                    "match": { "connect_matcher": {} },
                    "route": { "cluster": cluster, "upgrade_configs": [upgrade] },
                }],
            })
        });
        let router = filter(
            ROUTER,
            json!({ "reject_connect_request_early_data": false }),
        );
        let mut manager = json!({
            "codec_type": "AUTO",
            "stat_prefix": "ingress_http",
            "route_config": { "name": "http2_connect", "virtual_hosts": hosts.collect::<Vec<_>>() },
            "access_log": access_log(),
            "http_filters": [router],
            "http2_protocol_options": { "allow_connect": true },
            "upgrade_configs": [{ "upgrade_type": "CONNECT" }],
        });
        if let Some(idle) = self.settings.connection_idle {
            manager["common_http_protocol_options"] = json!({ "idle_timeout": idle });
        }
        if let Some(idle) = self.settings.stream_idle {
            manager["stream_idle_timeout"] = json!(idle);
        }
        let manager = filter(HTTP_MANAGER, manager);
        listener("tunneling_listener", self.tunnel, &manager)
    }

    fn stats_listener(&self) -> Value {
        let health = json!({
            "pass_through_mode": false,
            "headers": [{ "name": ":path", "string_match": { "exact": "/healthz" } }],
        });
        let host = json!({
            "name": "backend",
            "domains": ["*"],
            "routes": [{
                "match": { "prefix": "/stats" },
                "route": { "cluster": "service_stats" },
            }],
        });
        let manager = json!({
            "codec_type": "AUTO",
            "stat_prefix": "service_stats",
            "route_config": { "virtual_hosts": [host] },
            "http_filters": [filter(HEALTH_CHECK, health), filter(ROUTER, json!({}))],
        });
        listener("service_stats", self.stats, &filter(HTTP_MANAGER, manager))
    }
}

/// Writes resources to `file` by renaming a new file: Envoy notices no other kind of change.
fn publish(file: &Path, kind: &str, resources: impl Iterator<Item = Value>) {
    let resources = resources.map(|mut resource| {
        resource["@type"] = json!(format!("type.googleapis.com/envoy.config.{kind}"));
        resource
    });
    let text = json!({ "resources": resources.collect::<Vec<_>>() }).to_string();
    let new = file.with_extension("new");
    std::fs::write(&new, text).expect("writing Envoy's resources");
    std::fs::rename(&new, file).expect("replacing Envoy's resources");
}

// === Pieces of a configuration ===

fn local(ports: &mut Ports) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, ports.next_port()))
}

fn address(at: SocketAddr) -> Value {
    json!({ "socket_address": { "address": at.ip().to_string(), "port_value": at.port() } })
}

fn cluster(name: &str, connect_timeout: &str, endpoints: &[SocketAddr]) -> Value {
    let endpoints = endpoints
        .iter()
        .map(|at| json!({ "endpoint": { "address": address(*at) } }));
    let locality = json!({ "lb_endpoints": endpoints.collect::<Vec<_>>() });
    json!({
        "name": name,
        "type": "STATIC",
        "lb_policy": "ROUND_ROBIN",
        "connect_timeout": connect_timeout,
        "load_assignment": { "cluster_name": name, "endpoints": [locality] },
    })
}

fn listener(name: &str, at: SocketAddr, filter: &Value) -> Value {
    json!({
        "name": name,
        "address": address(at),
        "filter_chains": [{ "filters": [filter] }],
    })
}

fn tcp_proxy(stat_prefix: &str, cluster: &str) -> Value {
    json!({ "stat_prefix": stat_prefix, "cluster": cluster })
}

fn access_log() -> Value {
    json!([filter(ACCESS_LOG, json!({ "path": "/dev/stdout" }))])
}

/// Returns an extension. Its type selects the implementation; its name is required but otherwise unused.
fn filter(kind: &str, config: Value) -> Value {
    json!({ "name": kind, "typed_config": typed(kind, config) })
}

fn typed(kind: &str, mut config: Value) -> Value {
    config["@type"] = json!(format!("type.googleapis.com/envoy.{kind}"));
    config
}

#[cfg(test)]
pub(crate) mod tests;
