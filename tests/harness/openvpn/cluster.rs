//! A user cluster behind a VPN client, and the seed in front of it.
//!
//! ```text
//! sidecar --192.168.78.0/24-- seed --192.168.77.0/24-- client --172.25.0.0/24-- node
//!                          VPN server                VPN client             pod, Service, kubelet
//! ```
//! The seed has no route to what lies behind the client: only a tunnel leads there.

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

/// The pods' network and its mask.
pub const PODS: (&str, &str) = ("172.25.0.0", "255.255.0.0");
/// The Services' network.
pub const SERVICES: (&str, &str) = ("10.240.16.0", "255.255.240.0");
/// The network in which the seed knows the nodes.
pub const NODE_ACCESS: (&str, &str) = ("10.254.0.0", "255.255.0.0");

/// Where the seed's VPN server is for clients in the user cluster.
pub const SEED: Ipv4Addr = Ipv4Addr::new(192, 168, 77, 1);
/// Where it is for sidecars.
pub const SEED_INSIDE: Ipv4Addr = Ipv4Addr::new(192, 168, 78, 1);
/// The VPN client's own address in the cluster: what its pods and nodes see.
pub const CLIENT: Ipv4Addr = Ipv4Addr::new(172, 25, 0, 2);
/// A pod. It has the cluster's services.
pub const POD: Ipv4Addr = Ipv4Addr::new(172, 25, 1, 10);
/// A Service in front of that pod, for [`HTTPS`] alone.
pub const SERVICE: Ipv4Addr = Ipv4Addr::new(10, 240, 16, 10);
/// A node's internal address. Its kubelet serves [`KUBELET`].
pub const NODE: Ipv4Addr = Ipv4Addr::new(192, 168, 1, 11);
/// What the seed's side makes of that.
pub const NODE_ACCESSED: Ipv4Addr = Ipv4Addr::new(10, 254, 1, 11);

/// HTTP/1.1 over TLS: what [`Services::http`] serves.
pub const HTTPS: u16 = 443;
/// The same on a node.
pub const KUBELET: u16 = 10250;
/// [`Services::raw`].
pub const RAW: u16 = 7001;
/// [`Services::first`].
pub const FIRST: u16 = 7002;
/// [`Services::half`].
pub const HALF: u16 = 7003;
/// [`Services::silent`].
pub const SILENT: u16 = 7004;
/// `iperf3`, while it measures.
const IPERF: u16 = 5201;

/// Serves [`RAW`], [`FIRST`], [`HALF`] and [`SILENT`] on every address of a namespace, as long as the result lives.
pub async fn serve(at: &Namespace) -> (Services, JoinSet<()>) {
    let services = Services::start().await.expect("services");
    let mut tasks = JoinSet::new();
    relays(at, &plain(&services), &Arc::default(), &mut tasks);
    (services, tasks)
}

/// A connection that arrived at the far end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrival {
    /// From where, as the service saw it.
    pub from: SocketAddr,
    /// At which of its addresses.
    pub at: SocketAddr,
}

/// The networks, the services at the far end and the certificates. All end with the test.
#[derive(Debug)]
pub struct Cluster {
    /// Where the VPN server goes.
    pub seed: Namespace,
    /// A pod of the seed whose VPN client reaches the cluster through the server.
    pub sidecar: Namespace,
    /// Where the cluster's VPN client goes.
    pub client: Namespace,
    /// The far end.
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
    /// Builds all but the tunnel.
    ///
    /// # Panics
    /// Outside of [`alone`](crate::namespace::alone).
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
        // Addresses are translated only after a route was found.
        sidecar.ip(&format!("route add default via {SEED_INSIDE}"));
        client.forward();
        node_access(&client);
        node.address(POD);
        node.address(NODE);
        // As kube-proxy does.
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

    /// A directory of its own for the files of a program.
    ///
    /// # Panics
    /// When it cannot be made.
    pub fn dir(&self, name: &str) -> PathBuf {
        let dir = self.dir.path().join(name);
        std::fs::create_dir_all(&dir).expect("a directory");
        dir
    }

    /// Whoever has connected to the far end since it was asked last.
    pub fn arrivals(&self) -> Vec<Arrival> {
        std::mem::take(&mut self.arrivals.lock())
    }

    /// What `iperf3` measures for a second from a namespace to the pod, with further options such as `-R`, in
    /// bits per second.
    ///
    /// # Panics
    /// When it does not measure, with what it says.
    pub async fn iperf3(&self, from: &Namespace, options: &str) -> f64 {
        // One server for each run: it refuses a client while it still ends with the one before.
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

    /// Turns a stream to [`HTTPS`] or [`KUBELET`] into one that TLS protects.
    ///
    /// # Errors
    /// When it breaks, or leads elsewhere.
    ///
    /// # Panics
    /// When the client's own certificate is unusable.
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

/// What the platform's controller does beside the VPN client: the seed's name of a node leads to the node.
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

/// The services listen in the test's own network; this brings their connections there.
async fn relay(listener: TcpListener, to: SocketAddr, arrivals: Arc<Mutex<Vec<Arrival>>>) {
    let mut connections = JoinSet::new();
    while let Ok((mut stream, from)) = listener.accept().await {
        let at = stream.local_addr().expect("a connected socket");
        arrivals.lock().push(Arrival { from, at });
        connections.spawn(async move {
            let mut service = TcpStream::connect(to).await?;
            stream.set_nodelay(true)?;
            service.set_nodelay(true)?;
            // Errors of a connection are its client's business.
            copy_bidirectional(&mut stream, &mut service).await
        });
        while connections.try_join_next().is_some() {}
    }
}
