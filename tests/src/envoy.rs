//! Envoy at both ends of a tunnel: as the front door of a seed and as the listener on a node.
//!
//! `tests/peers/install` brings the program. The configurations are those of a platform that Culvert
//! takes over from, with listeners on 127.0.0.1 instead of all addresses and nothing loaded at run
//! time. What they leave out has Envoy's default, such as 1,024 connections to a cluster.

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
pub(crate) fn skip(why: &str) {
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
        Bootstrap::new(self.admin, self.listeners(), self.all_clusters())
    }

    /// A configuration that takes its listeners from a file and follows it, as the platform's
    /// Envoy follows its control plane: see [`publish`](Self::publish).
    ///
    /// # Panics
    /// When the file cannot be written.
    pub fn following(&self, file: &Path) -> Bootstrap {
        self.publish(file);
        let mut bootstrap = Bootstrap::new(self.admin, Vec::new(), self.all_clusters());
        let config = &mut bootstrap.config;
        config["node"] = json!({ "id": "kube", "cluster": "np-cluster" });
        config["dynamic_resources"] = json!({
            "lds_config": { "path_config_source": { "path": file } },
        });
        bootstrap
    }

    /// Replaces the listeners in a file that an Envoy follows.
    ///
    /// # Panics
    /// When the file cannot be written.
    pub fn publish(&self, file: &Path) {
        let listeners = self.listeners().into_iter().map(|mut listener| {
            listener["@type"] = json!("type.googleapis.com/envoy.config.listener.v3.Listener");
            listener
        });
        let resources = json!({ "resources": listeners.collect::<Vec<_>>() });
        let next = file.with_extension("next");
        std::fs::write(&next, resources.to_string()).expect("writing Envoy's listeners");
        // Envoy looks when a file is moved there, so that it never reads half of one.
        std::fs::rename(next, file).expect("moving Envoy's listeners");
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

    fn all_clusters(&self) -> Vec<Value> {
        let mut clusters = vec![cluster("service_stats", "0.05s", &[self.admin])];
        clusters.extend(self.clusters.iter().map(|(name, endpoints)| {
            let mut cluster = cluster(name, "1s", endpoints);
            if let Some(most) = self.settings.max_connections {
                let thresholds = json!([{ "max_connections": most }]);
                cluster["circuit_breakers"] = json!({ "thresholds": thresholds });
            }
            cluster
        }));
        clusters
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
pub(crate) mod tests {
    use std::sync::Arc;

    use culvert::lab::services::{BANNER, HELLO, Services};
    use rustls::{ClientConfig, ClientConnection, RootCertStore};
    use rustls_pki_types::ServerName;
    use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
    use tokio::net::TcpStream;

    use super::*;

    const AUTHORITY: &str = "web.ns.svc.cluster.local:80";

    /// The first bytes of a TLS client that asks for `name`.
    pub(crate) fn client_hello(name: &str) -> Vec<u8> {
        let provider = rustls::crypto::aws_lc_rs::default_provider();
        let config = ClientConfig::builder_with_provider(provider.into())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(RootCertStore::empty())
            .with_no_client_auth();
        let name = ServerName::try_from(name.to_owned()).unwrap();
        let mut client = ClientConnection::new(Arc::new(config), name).unwrap();
        let mut hello = Vec::new();
        client.write_tls(&mut hello).unwrap();
        hello
    }

    /// What a client that asks for `name` hears from the service that echoes after a banner; less when
    /// the connection is closed.
    pub(crate) async fn echoed(door: SocketAddr, name: &str) -> (Vec<u8>, Vec<u8>) {
        let hello = client_hello(name);
        let expected = [BANNER, &hello].concat();
        let mut stream = TcpStream::connect(door).await.unwrap();
        stream.write_all(&hello).await.unwrap();
        let mut heard = Vec::new();
        // A reset is an end as well.
        let limit = u64::try_from(expected.len()).unwrap();
        stream.take(limit).read_to_end(&mut heard).await.ok();
        (heard, expected)
    }

    /// The status line that a CONNECT is answered with.
    async fn connect(tunnel: SocketAddr, authority: &str) -> String {
        let mut stream = TcpStream::connect(tunnel).await.unwrap();
        let request = format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).await.unwrap();
        line
    }

    /// A seed with a web server behind the authority and a node port, and an echo behind a name.
    async fn seed(ports: &mut Ports, node_port: u16) -> (Seed, Services) {
        let services = Services::start().await.unwrap();
        let mut seed = Seed::new(ports);
        let clusters = [("ns/web", services.http), ("ns/echo", services.first)];
        seed.clusters = clusters
            .map(|(name, at)| (name.to_owned(), vec![at]))
            .into();
        seed.server_names = [("echo.example.com".to_owned(), "ns/echo".to_owned())].into();
        seed.authorities = [(AUTHORITY.to_owned(), "ns/web".to_owned())].into();
        seed.node_ports = [(node_port, "ns/web".to_owned())].into();
        (seed, services)
    }

    #[tokio::test]
    async fn the_seed_routes_by_name_authority_and_port() {
        let Some(envoy) = Envoy::get() else { return };
        let mut ports = Ports::default();
        let node_port = ports.next_port();
        let (seed, _services) = seed(&mut ports, node_port).await;
        let _running = envoy.start(&seed.bootstrap()).await;

        let (heard, expected) = echoed(seed.sni, "echo.example.com").await;
        assert_eq!(heard, expected);
        let (heard, _) = echoed(seed.sni, "other.example.com").await;
        assert_eq!(heard, b"");
        let known = connect(seed.tunnel, AUTHORITY).await;
        assert_eq!(known, "HTTP/1.1 200 OK\r\n");
        let unknown = connect(seed.tunnel, "web.ns.svc.cluster.local:81").await;
        assert_eq!(unknown, "HTTP/1.1 404 Not Found\r\n");
        let at = SocketAddr::from((Ipv4Addr::LOCALHOST, node_port));
        assert_eq!(http_get(at, "/").await.unwrap().2, HELLO);
        let (status, ..) = http_get(seed.stats, "/healthz").await.unwrap();
        assert!(status.is_success(), "{status}");
    }

    #[tokio::test]
    async fn a_node_reaches_a_service_through_the_seed() {
        let Some(envoy) = Envoy::get() else { return };
        let mut ports = Ports::default();
        let node_port = ports.next_port();
        let (seed, _services) = seed(&mut ports, node_port).await;
        let _seed = envoy.start(&seed.bootstrap()).await;
        let listen = local(&mut ports);
        let node = node(&mut ports, &[(listen, AUTHORITY)], seed.tunnel);
        let _node = envoy.start(&node).await;
        assert_eq!(http_get(listen, "/").await.unwrap().2, HELLO);
    }
}
