//! Envoy at both ends of a tunnel: as the front door of a seed and as the listener on a node.
//!
//! `tests/peers/install` brings the program. The configurations are those of a platform that Culvert
//! takes over from, with listeners on 127.0.0.1 instead of all addresses and nothing loaded at run
//! time but what [`Seed::following`] says. What they leave out has Envoy's default, such as 1,024
//! connections to a cluster, unless [`Bootstrap::allowing`] sets it.

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

/// What an Envoy that follows files finds in its folder.
const LISTENERS_FILE: &str = "listeners.json";
const CLUSTERS_FILE: &str = "clusters.json";

/// The installed program.
#[derive(Debug)]
pub struct Envoy {
    program: PathBuf,
}

impl Envoy {
    /// Installs it, once per process. Nothing, and a line on stderr, where it cannot be had.
    ///
    /// # Panics
    /// When it cannot be had though `CI=true`.
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

    /// Starts it with two workers and waits until it serves.
    ///
    /// # Panics
    /// When it does not come up in [`PATIENCE`], as with a configuration that it refuses.
    pub async fn start(&self, bootstrap: &Bootstrap) -> RunningEnvoy {
        self.start_with(bootstrap, &[]).await
    }

    /// The same with further flags.
    ///
    /// # Panics
    /// As [`start`](Self::start).
    pub async fn start_with(&self, bootstrap: &Bootstrap, flags: &[&str]) -> RunningEnvoy {
        let dir = tempfile::Builder::new().prefix("culvert-").tempdir();
        let dir = dir.expect("a temporary directory");
        // The name's ending tells Envoy what is in the file.
        let path = dir.path().join("envoy.json");
        std::fs::write(&path, bootstrap.config.to_string()).expect("writing Envoy's configuration");
        let path = path.to_str().expect("a path in UTF-8");
        // Without hot restart: it would leave a file in /dev/shm behind for every start.
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
                panic!("Envoy ended at its start: {status}");
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

/// Says that tests against a peer are skipped.
///
/// # Panics
/// If `CI=true`, which promises that the peers are there.
pub fn skip(why: &str) {
    let ci = std::env::var("CI").is_ok_and(|ci| ci == "true");
    assert!(!ci, "{why}, though CI=true");
    eprintln!("skipped: {why}");
}

/// A running Envoy. Dropping it kills the program.
#[derive(Debug)]
pub struct RunningEnvoy {
    /// The program, for its log and its footprint.
    pub program: Program,
    /// The admin listener, such as for `GET /stats/prometheus`.
    pub admin: SocketAddr,
    // Last, so that the program is gone before its files are.
    _dir: TempDir,
}

/// A configuration to start Envoy with.
#[derive(Debug, Clone, PartialEq)]
pub struct Bootstrap {
    /// The admin listener that `config` names.
    pub admin: SocketAddr,
    /// The bootstrap file. JSON, which is YAML too.
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

    /// Allows each cluster so many connections, and as many requests at once, instead of 1,024. Of a
    /// seed that follows a file only its own clusters are meant.
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

/// A node's Envoy: each connection to one of `listeners` becomes a CONNECT to the authority beside
/// it, in plain HTTP/2 to `upstream`. A connection to `upstream` that leaves a ping unanswered for
/// 5 s is given up; pings go out every 30 s.
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

/// A seed's Envoy, as its control plane configures it. Routes are added to the maps; a front
/// listener without any is left out, so that its port refuses connections.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seed {
    /// Where TLS clients are sent on by the server name they ask for; TLS is passed through.
    pub sni: SocketAddr,
    /// Where CONNECT is served in plain text, as HTTP/1.1 and as HTTP/2.
    pub tunnel: SocketAddr,
    /// `/healthz`, `/stats` and what lies below it.
    pub stats: SocketAddr,
    /// Clusters by server name.
    pub server_names: BTreeMap<String, String>,
    /// Clusters by the `host:port` of a CONNECT.
    pub authorities: BTreeMap<String, String>,
    /// Clusters by the port on 127.0.0.1 that leads to them.
    pub node_ports: BTreeMap<u16, String>,
    /// The endpoints of each cluster, used in turn.
    pub clusters: BTreeMap<String, Vec<SocketAddr>>,
    /// What an operator may set.
    pub settings: Settings,
    admin: SocketAddr,
}

/// What an operator of the platform sets; `None` is Envoy's default. Times are such as `5s`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Settings {
    /// How long nothing may move on a connection that came by its server name.
    pub sni_idle: Option<&'static str>,
    /// How long a connection may be without a CONNECT.
    pub connection_idle: Option<&'static str>,
    /// How long nothing may move in a CONNECT.
    pub stream_idle: Option<&'static str>,
    /// The most connections to each cluster. The platform has no setting for this.
    pub max_connections: Option<u32>,
}

impl Seed {
    /// A seed that exposes nothing yet.
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

    /// The configuration.
    pub fn bootstrap(&self) -> Bootstrap {
        let clusters = [self.stats_cluster()].into_iter().chain(self.clusters());
        Bootstrap::new(self.admin, self.listeners(), clusters.collect())
    }

    /// The same in files of `dir`, which Envoy follows as it would its control plane; they are written
    /// by this call.
    ///
    /// # Panics
    /// When they can not be written.
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

    /// Replaces the listeners that an Envoy follows in `dir`.
    ///
    /// # Panics
    /// When they can not be written.
    pub fn write_listeners(&self, dir: &Path) {
        let listeners = self.listeners().into_iter();
        publish(&dir.join(LISTENERS_FILE), "listener.v3.Listener", listeners);
    }

    /// Replaces the clusters that an Envoy follows in `dir`.
    ///
    /// # Panics
    /// When they can not be written.
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
                let thresholds = json!([{ "max_connections": most }]);
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

/// Writes resources for an Envoy that follows `file`: by a rename, it notices nothing else.
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

/// An extension: its type decides what it is, its name only has to be there.
fn filter(kind: &str, config: Value) -> Value {
    json!({ "name": kind, "typed_config": typed(kind, config) })
}

fn typed(kind: &str, mut config: Value) -> Value {
    config["@type"] = json!(format!("type.googleapis.com/envoy.{kind}"));
    config
}

#[cfg(test)]
pub(crate) mod tests;
