//! A user cluster behind a VPN client, and the seed in front of the cluster.
//!
//! ```text
//! sidecar --192.168.78.0/24-- seed --192.168.77.0/24-- client --172.25.0.0/24-- node
//!                          VPN server                VPN client             pod, Service, kubelet
//! ```
//! The seed has no route to the networks behind the client, so they can be reached only through a tunnel.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use culvert_kit::pki as lab;
use culvert_kit::services::Services;
use parking_lot::Mutex;
use rustls::ServerConfig;
use rustls_pki_types::ServerName;
use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncWrite, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::network::{Namespace, directory};
use super::pki::Pki;
use crate::topology::PATIENCE;

/// The network of the pods, with its mask.
pub const PODS: (&str, &str) = ("172.25.0.0", "255.255.0.0");
/// The network of the Services, with its mask.
pub const SERVICES: (&str, &str) = ("10.240.16.0", "255.255.240.0");
/// The network of the node addresses on the seed's side, with its mask.
pub const NODE_ACCESS: (&str, &str) = ("10.254.0.0", "255.255.0.0");

/// Address of the seed's VPN server, for clients in the user cluster.
pub const SEED: Ipv4Addr = Ipv4Addr::new(192, 168, 77, 1);
/// Address of the seed's VPN server, for sidecars.
pub const SEED_INSIDE: Ipv4Addr = Ipv4Addr::new(192, 168, 78, 1);
/// The VPN client's own address in the cluster. Pods and nodes see this address as the source.
pub const CLIENT: Ipv4Addr = Ipv4Addr::new(172, 25, 0, 2);
/// Address of a pod that runs the cluster's services.
pub const POD: Ipv4Addr = Ipv4Addr::new(172, 25, 1, 10);
/// Address of a Service in front of the pod. The Service has the single port [`HTTPS`].
pub const SERVICE: Ipv4Addr = Ipv4Addr::new(10, 240, 16, 10);
/// Internal address of a node. The kubelet of the node serves [`KUBELET`].
pub const NODE: Ipv4Addr = Ipv4Addr::new(192, 168, 1, 11);
/// Address of the node on the seed's side, translated from [`NODE`].
pub const NODE_ACCESSED: Ipv4Addr = Ipv4Addr::new(10, 254, 1, 11);

/// Port of HTTP/1.1 over TLS, served by [`Services::http`].
pub const HTTPS: u16 = 443;
/// Port of the same service on a node.
pub const KUBELET: u16 = 10250;
/// Port of [`Services::raw`].
pub const RAW: u16 = 7001;
/// Port of [`Services::first`].
pub const FIRST: u16 = 7002;
/// Port of [`Services::half`].
pub const HALF: u16 = 7003;
/// Port of [`Services::silent`].
pub const SILENT: u16 = 7004;
/// Port of `iperf3` during a measurement.
const IPERF: u16 = 5201;

/// Serves [`RAW`], [`FIRST`], [`HALF`] and [`SILENT`] on every address of a namespace, until the result is
/// dropped.
pub async fn serve(at: &Namespace) -> (Services, JoinSet<()>) {
    let services = Services::start().await.expect("services");
    let mut tasks = JoinSet::new();
    relays(at, &plain(&services), &Arc::default(), &mut tasks);
    (services, tasks)
}

/// A connection that arrived at the far end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrival {
    /// Source address, as the service saw it.
    pub from: SocketAddr,
    /// Address of the service that the connection reached.
    pub at: SocketAddr,
}

/// The networks, the services at the far end and the certificates. All end with the test.
#[derive(Debug)]
pub struct Cluster {
    /// Namespace of the VPN server.
    pub seed: Namespace,
    /// Namespace of a pod in the seed. Its VPN client reaches the cluster through the server.
    pub sidecar: Namespace,
    /// Namespace of the cluster's VPN client.
    pub client: Namespace,
    /// Namespace of the far end.
    pub node: Namespace,
    /// The tunnel's certificates.
    pub pki: Pki,
    arrivals: Arc<Mutex<Vec<Arrival>>>,
    https: lab::Pki,
    dir: TempDir,
    services: Services,
    tasks: JoinSet<()>,
}

impl Cluster {
    /// Creates everything except the tunnel.
    ///
    /// # Panics
    /// If the caller is not inside [`alone`](crate::namespace::alone).
    pub async fn start() -> Self {
        let dir = directory();
        let [seed, sidecar, client, node] =
            ["seed", "sidecar", "client", "node"].map(Namespace::add);
        seed.link("192.168.77.1/24", &client, "192.168.77.2/24");
        seed.link("192.168.78.1/24", &sidecar, "192.168.78.2/24");
        client.link("172.25.0.2/24", &node, "172.25.0.1/24");
        for net in ["172.25.0.0/16", "10.240.16.0/20", "192.168.1.0/24"] {
            client.ip(&format!("route add {net} via 172.25.0.1"));
        }
        // The kernel translates addresses only after it has found a route.
        sidecar.ip(&format!("route add default via {SEED_INSIDE}"));
        client.forward();
        node_access(&client);
        node.address(POD);
        node.address(NODE);
        // The same rule as from kube-proxy.
        node.iptables(&format!(
            "-t nat -A PREROUTING -d {SERVICE} -p tcp --dport {HTTPS} -j DNAT --to-destination {POD}"
        ));
        let https = lab::Pki::create(dir.path()).expect("certificates");
        let services = Services::start().await.expect("services");
        let mut cluster = Self {
            seed,
            sidecar,
            client,
            node,
            pki: Pki::create(),
            arrivals: Arc::default(),
            https,
            dir,
            services,
            tasks: JoinSet::new(),
        };
        cluster.serve().await;
        cluster
    }

    /// Creates a directory for the files of a program.
    ///
    /// # Panics
    /// If the directory cannot be created.
    pub fn dir(&self, name: &str) -> PathBuf {
        let dir = self.dir.path().join(name);
        std::fs::create_dir_all(&dir).expect("a directory");
        dir
    }

    /// Returns the connections that have arrived at the far end since the last call.
    pub fn arrivals(&self) -> Vec<Arrival> {
        std::mem::take(&mut self.arrivals.lock())
    }

    /// Measures the throughput from a namespace to the pod with `iperf3` for a second. `options` are further
    /// options, for example `-R`. Returns bits per second.
    ///
    /// # Panics
    /// If the measurement fails; the panic has the output of `iperf3`.
    pub async fn iperf3(&self, from: &Namespace, options: &str) -> f64 {
        // Every run has a new server: while a server finishes a client, it refuses the next client.
        let port = IPERF.to_string();
        let args = ["-s", "-1", "--forceflush", "-p", &port];
        let mut server = self.node.spawn(Path::new("/usr/bin/iperf3"), &args);
        server.wait_for_log("Server listening", PATIENCE).await;
        let words = format!("-c {POD} -p {IPERF} -t 1 --json {options}");
        let said = from.run("iperf3", words.trim()).await;
        let said = said.unwrap_or_else(|why| panic!("iperf3 {words}: {why}"));
        server.wait_exit(PATIENCE).await;
        let report: serde_json::Value = serde_json::from_str(&said).expect("a report");
        let bits = report["end"]["sum_received"]["bits_per_second"].as_f64();
        bits.unwrap_or_else(|| panic!("iperf3 {words}: {said}"))
    }

    /// Adds TLS to a stream to [`HTTPS`] or [`KUBELET`].
    ///
    /// # Errors
    /// If the stream breaks, or its far end is another service.
    ///
    /// # Panics
    /// If the client's own certificate is unusable.
    pub async fn tls<S>(&self, stream: S) -> io::Result<TlsStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let config = self.https.client_tls(&self.https.client, &[]);
        let connector = TlsConnector::from(config.expect("a TLS client"));
        let name = ServerName::try_from("localhost").expect("a name");
        connector.connect(name, stream).await
    }

    async fn serve(&mut self) {
        let services = &self.services;
        let https = services.start_https(self.server_config()).await;
        let https = https.expect("an HTTPS service");
        let web = [(HTTPS, https), (KUBELET, https)];
        for ports in [web.as_slice(), &plain(services)] {
            relays(&self.node, ports, &self.arrivals, &mut self.tasks);
        }
    }

    fn server_config(&self) -> Arc<ServerConfig> {
        let pair = &self.https.server;
        let certs = lab::load_certs(&pair.cert).expect("a certificate");
        let key = lab::load_key(&pair.key).expect("a key");
        let provider = rustls::crypto::aws_lc_rs::default_provider();
        let config = ServerConfig::builder_with_provider(provider.into())
            .with_safe_default_protocol_versions()
            .and_then(|builder| builder.with_no_client_auth().with_single_cert(certs, key));
        Arc::new(config.expect("a TLS server"))
    }
}

/// Translates the seed's address of the node to the node's own address, as the platform's controller does
/// beside the VPN client.
fn node_access(client: &Namespace) {
    client.iptables("-t nat -N host_dnat");
    client.iptables("-t nat -I PREROUTING -j host_dnat");
    let rule = format!("-d {NODE_ACCESSED} -j DNAT --to-destination {NODE}");
    client.iptables(&format!("-t nat -A host_dnat {rule}"));
}

fn plain(services: &Services) -> [(u16, SocketAddr); 4] {
    [
        (RAW, services.raw),
        (FIRST, services.first),
        (HALF, services.half),
        (SILENT, services.silent),
    ]
}

fn relays(
    at: &Namespace,
    ports: &[(u16, SocketAddr)],
    arrivals: &Arc<Mutex<Vec<Arrival>>>,
    tasks: &mut JoinSet<()>,
) {
    for (port, service) in ports {
        let listener = at.listen(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, *port));
        tasks.spawn(relay(listener, *service, Arc::clone(arrivals)));
    }
}

/// Forwards connections of a listener to a service, which listens in the test's own network.
async fn relay(listener: TcpListener, to: SocketAddr, arrivals: Arc<Mutex<Vec<Arrival>>>) {
    let mut connections = JoinSet::new();
    while let Ok((mut stream, from)) = listener.accept().await {
        let at = stream.local_addr().expect("a connected socket");
        arrivals.lock().push(Arrival { from, at });
        connections.spawn(async move {
            let mut service = TcpStream::connect(to).await?;
            stream.set_nodelay(true)?;
            service.set_nodelay(true)?;
            // The client reports errors of its connection.
            copy_bidirectional(&mut stream, &mut service).await
        });
        while connections.try_join_next().is_some() {}
    }
}
