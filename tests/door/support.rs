//! A running nodeport-proxy with routes, endpoints and clients.

use std::fmt::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use culvert_tests::kube_api::KubeApi;
use culvert_tests::metrics::{Metrics, http_get, scrape};
use culvert_tests::ports::Ports;
use culvert_tests::process::ours;
use culvert_tests::{Program, eventually};
use h2::client::SendRequest;
use h2::{RecvStream, SendStream};
use http::{HeaderMap, Request, StatusCode};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::time::timeout;
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// Time limit of each step, far longer than any step takes.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

/// Awaits `work`, and panics after [`LIMIT`].
pub(crate) async fn timely<T>(what: &str, work: impl Future<Output = T>) -> T {
    let done = timeout(LIMIT, work).await;
    done.unwrap_or_else(|_| panic!("{what}: not within {LIMIT:?}"))
}

/// Waits until the endpoints of `demo/raw` have sent something and stop sending.
pub(crate) async fn stands_still(door: &Door, limit: Duration) {
    let labels = [("envoy_cluster_name", "demo/raw")];
    let mut before = 0.0;
    eventually("the endpoints stop sending", limit, async || {
        tokio::time::sleep(Duration::from_millis(500)).await;
        let sent = door
            .value("envoy_cluster_upstream_cx_rx_bytes_total", &labels)
            .await;
        let last = std::mem::replace(&mut before, sent);
        (last == sent && sent > 0.0).then_some(()).ok_or(sent)
    })
    .await;
}

/// One upstream in the file of routes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Upstream {
    pub name: String,
    pub endpoints: Vec<SocketAddr>,
    pub server_names: Vec<String>,
    pub authorities: Vec<String>,
    pub node_ports: Vec<u16>,
    pub allowed_networks: Option<&'static str>,
    pub proxy_protocol: Option<&'static str>,
    pub quic_port: Option<String>,
}

impl Upstream {
    pub(crate) fn new(name: &str, endpoint: SocketAddr) -> Self {
        Self {
            name: name.to_owned(),
            endpoints: vec![endpoint],
            ..Self::default()
        }
    }

    pub(crate) fn server_name(mut self, name: &str) -> Self {
        self.server_names.push(name.to_owned());
        self
    }

    pub(crate) fn authority(mut self, authority: &str) -> Self {
        self.authorities.push(authority.to_owned());
        self
    }

    /// Permits only clients in `networks`, a comma-separated list.
    pub(crate) fn allowed(mut self, networks: &'static str) -> Self {
        self.allowed_networks = Some(networks);
        self
    }

    /// Sends the PROXY protocol, `v1` or `v2`, to the endpoint.
    pub(crate) fn proxy_protocol(mut self, version: &'static str) -> Self {
        self.proxy_protocol = Some(version);
        self
    }

    /// Serves QUIC by the endpoints' UDP port: a number, or `same`.
    pub(crate) fn quic_port(mut self, port: &str) -> Self {
        self.quic_port = Some(port.to_owned());
        self
    }

    pub(crate) fn node_port(mut self, port: u16) -> Self {
        self.node_ports.push(port);
        self
    }
}

fn yaml(upstreams: &[Upstream]) -> String {
    let mut text = String::from("upstreams:\n");
    for upstream in upstreams {
        let _ = writeln!(text, "  - name: {}", upstream.name);
        let endpoints: Vec<String> = upstream
            .endpoints
            .iter()
            .map(|e| format!("'{e}'"))
            .collect();
        let _ = writeln!(text, "    endpoints: [{}]", endpoints.join(", "));
        let quoted = |texts: &[String]| {
            let texts: Vec<String> = texts.iter().map(|text| format!("'{text}'")).collect();
            texts.join(", ")
        };
        let _ = writeln!(
            text,
            "    serverNames: [{}]",
            quoted(&upstream.server_names)
        );
        let _ = writeln!(text, "    authorities: [{}]", quoted(&upstream.authorities));
        let _ = writeln!(text, "    nodePorts: {:?}", upstream.node_ports);
        if let Some(networks) = upstream.allowed_networks {
            let _ = writeln!(text, "    allowedNetworks: [{networks}]");
        }
        if let Some(version) = upstream.proxy_protocol {
            let _ = writeln!(text, "    proxyProtocol: {version}");
        }
        if let Some(port) = &upstream.quic_port {
            let _ = writeln!(text, "    quicPort: {port}");
        }
    }
    text
}

/// A running front door.
pub(crate) struct Door {
    pub program: Program,
    pub ports: Ports,
    pub sni: SocketAddr,
    pub tunneling: SocketAddr,
    pub stats: SocketAddr,
    pub dir: TempDir,
}

impl Door {
    pub(crate) async fn start(upstreams: &[Upstream]) -> Self {
        Self::start_with(upstreams, &[]).await
    }

    /// Starts a front door with a QUIC listener on the port of the listener for server names.
    pub(crate) async fn start_quic(upstreams: &[Upstream], flags: &[&str]) -> Self {
        Self::start_with(upstreams, &[&["--sni-quic-port={sni}"], flags].concat()).await
    }

    pub(crate) async fn start_with(upstreams: &[Upstream], flags: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("door.yaml");
        std::fs::write(&file, yaml(upstreams)).unwrap();
        let config = format!("--config={}", file.display());
        let flags: Vec<&str> = [config.as_str()].iter().chain(flags).copied().collect();
        Self::start_in(dir, &flags).await
    }

    /// Starts a front door with routes from a Kubernetes API. On return, the front door serves health and
    /// metrics, but may not be ready.
    pub(crate) async fn watching(api: &KubeApi, flags: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let kubeconfig = format!("--kubeconfig={}", api.kubeconfig(dir.path()).display());
        let flags: Vec<&str> = [kubeconfig.as_str()].iter().chain(flags).copied().collect();
        Self::start_in(dir, &flags).await
    }

    /// Starts a front door that may open at most `limit` files.
    pub(crate) async fn start_limited(upstreams: &[Upstream], limit: u32) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("door.yaml");
        std::fs::write(&file, yaml(upstreams)).unwrap();
        let config = format!("--config={}", file.display());
        let program = ours("culvert-nodeport-proxy").display().to_string();
        let script = format!("ulimit -n {limit}; exec \"$0\" \"$@\"");
        Self::spawn_in(dir, "/bin/sh", &["-c", &script, &program], &[&config]).await
    }

    async fn start_in(dir: TempDir, flags: &[&str]) -> Self {
        Self::spawn_in(dir, "culvert-nodeport-proxy", &[], flags).await
    }

    async fn spawn_in(dir: TempDir, program: &str, before: &[&str], flags: &[&str]) -> Self {
        let mut ports = Ports::default();
        let [sni, tunneling, stats] =
            [(); 3].map(|()| SocketAddr::from((Ipv4Addr::LOCALHOST, ports.next_port())));
        let mut args = vec![
            "--bind-address=127.0.0.1".to_owned(),
            format!("--envoy-sni-port={}", sni.port()),
            format!("--envoy-tunneling-port={}", tunneling.port()),
            format!("--envoy-stats-port={}", stats.port()),
            "-v=4".to_owned(),
        ];
        let sni_port = sni.port().to_string();
        args.extend(flags.iter().map(|flag| flag.replace("{sni}", &sni_port)));
        let before = before.iter().map(|arg| (*arg).to_owned());
        let program = Program::spawn(program, before.chain(args), &[]);
        let door = Self {
            program,
            ports,
            sni,
            tunneling,
            stats,
            dir,
        };
        eventually("the proxy serves", LIMIT, async || scrape(stats).await).await;
        door
    }

    /// Returns status and body of `/readyz`.
    pub(crate) async fn readiness(&self) -> (StatusCode, String) {
        let (status, _, body) = http_get(self.stats, "/readyz").await.unwrap();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    pub(crate) async fn is_ready(&self) {
        eventually("the proxy is ready", LIMIT, async || {
            let (status, text) = self.readiness().await;
            (status == StatusCode::OK).then_some(()).ok_or(text)
        })
        .await;
    }

    /// Returns the path of the file of routes.
    pub(crate) fn file(&self) -> PathBuf {
        self.dir.path().join("door.yaml")
    }

    /// Replaces the routes and waits until they are in force.
    pub(crate) async fn route(&self, upstreams: &[Upstream]) {
        let before = self
            .value("culvert_nodeport_proxy_changes_total", &[])
            .await;
        let next = self.dir.path().join("next.yaml");
        std::fs::write(&next, yaml(upstreams)).unwrap();
        std::fs::rename(next, self.file()).unwrap();
        eventually("the change is in force", LIMIT, async || {
            let now = self
                .value("culvert_nodeport_proxy_changes_total", &[])
                .await;
            (now > before).then_some(()).ok_or(now)
        })
        .await;
    }

    pub(crate) async fn metrics(&self) -> Metrics {
        scrape(self.stats).await.unwrap()
    }

    pub(crate) async fn value(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.metrics().await.value(name, labels).unwrap_or_default()
    }

    pub(crate) async fn refused(&self, listener: &str, reason: &str) -> f64 {
        let labels = [("listener", listener), ("reason", reason)];
        self.value("culvert_nodeport_proxy_refused_total", &labels)
            .await
    }

    /// Waits until `expected` connections were refused.
    pub(crate) async fn has_refused(&self, listener: &str, reason: &str, expected: f64) {
        let what = format!("{expected} refused on {listener} for {reason}");
        eventually(&what, LIMIT, async || {
            let refused = self.refused(listener, reason).await;
            (refused == expected).then_some(()).ok_or(refused)
        })
        .await;
    }

    /// Waits until no client has an open connection.
    pub(crate) async fn is_idle(&self) {
        eventually("no connection is open", LIMIT, async || {
            let metrics = self.metrics().await;
            let open: f64 = ["sni", "quic", "tunneling", "node_port"]
                .iter()
                .filter_map(|listener| {
                    let labels = [("listener", *listener)];
                    metrics.value("culvert_nodeport_proxy_connections", &labels)
                })
                .sum();
            (open == 0.0).then_some(()).ok_or(open)
        })
        .await;
    }
}

/// An endpoint that terminates TLS for one name. The answer to each line is the name, followed by the line.
pub(crate) struct TlsEndpoint {
    pub address: SocketAddr,
    pub certificate: CertificateDer<'static>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for TlsEndpoint {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl TlsEndpoint {
    pub(crate) async fn start(name: &'static str) -> Self {
        let key = rcgen::generate_simple_self_signed([name.to_owned()]).unwrap();
        let certificate = key.cert.der().clone();
        let private = PrivatePkcs8KeyDer::from(key.signing_key.serialize_der());
        let config = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate.clone()], private.into())
            .unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let acceptor = acceptor.clone();
                tokio::spawn(async move {
                    let mut stream = acceptor.accept(stream).await?;
                    let mut byte = [0];
                    let mut line = name.as_bytes().to_vec();
                    while stream.read(&mut byte).await? == 1 {
                        line.extend(byte);
                        if byte == *b"\n" {
                            stream.write_all(&line).await?;
                            stream.flush().await?;
                            line.truncate(name.len());
                        }
                    }
                    std::io::Result::Ok(())
                });
            }
        });
        Self {
            address,
            certificate,
            task,
        }
    }

    /// Connects through `door` with the server name `name`, and asserts that this endpoint answers.
    pub(crate) async fn answers(&self, door: SocketAddr, name: &str) {
        let mut stream = self
            .connect(door, name, rustls::ALL_VERSIONS)
            .await
            .unwrap();
        ask(&mut stream).await;
    }

    pub(crate) async fn connect(
        &self,
        door: SocketAddr,
        name: &str,
        versions: &[&'static rustls::SupportedProtocolVersion],
    ) -> std::io::Result<TlsStream<TcpStream>> {
        self.connect_over(TcpStream::connect(door).await?, name, versions)
            .await
    }

    /// Runs a TLS handshake over a connection to the front door.
    pub(crate) async fn connect_over(
        &self,
        stream: TcpStream,
        name: &str,
        versions: &[&'static rustls::SupportedProtocolVersion],
    ) -> std::io::Result<TlsStream<TcpStream>> {
        let mut roots = RootCertStore::empty();
        roots.add(self.certificate.clone()).unwrap();
        let config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(versions)
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = ServerName::try_from(name.to_owned()).unwrap();
        let connect = TlsConnector::from(Arc::new(config)).connect(name, stream);
        timely("a TLS handshake", connect).await
    }
}

/// Sends a line, and returns the answer without that line.
pub(crate) async fn ask(stream: &mut TlsStream<TcpStream>) -> String {
    stream.write_all(b" hello\n").await.unwrap();
    stream.flush().await.unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b" hello\n") {
        let read = timely("an answer", stream.read_buf(&mut answer))
            .await
            .unwrap();
        assert!(read > 0, "closed after {answer:?}");
    }
    let answer = String::from_utf8(answer).unwrap();
    answer.strip_suffix(" hello\n").unwrap().to_owned()
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

/// An HTTP/2 client that starts without negotiation (prior knowledge).
pub(crate) struct Http2 {
    requests: SendRequest<Bytes>,
    task: tokio::task::JoinHandle<Result<(), h2::Error>>,
}

impl Drop for Http2 {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A CONNECT tunnel over HTTP/2.
pub(crate) struct Tunnel {
    /// Header fields of the answer.
    pub headers: HeaderMap,
    pub receive: RecvStream,
    pub send: SendStream<Bytes>,
}

impl Http2 {
    pub(crate) async fn connect(door: SocketAddr) -> Self {
        Self::over(TcpStream::connect(door).await.unwrap()).await
    }

    pub(crate) async fn over<S>(stream: S) -> Self
    where
        S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
    {
        // RFC 9113's default.
        Self::with_window(stream, 65_535).await
    }

    /// Starts HTTP/2 on `stream`, with `window` as the initial window of each HTTP/2 stream, in bytes.
    pub(crate) async fn with_window<S>(stream: S, window: u32) -> Self
    where
        S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
    {
        // Unread streams must not use up the window of the connection.
        let (requests, connection) = h2::client::Builder::new()
            .initial_window_size(window)
            .initial_connection_window_size(1 << 30)
            .handshake(stream)
            .await
            .unwrap();
        Self {
            requests,
            task: tokio::spawn(connection),
        }
    }

    /// Requests a tunnel, and sends `early` before the answer arrives. Returns the status if the tunnel is
    /// refused.
    pub(crate) async fn open(
        &self,
        authority: &str,
        early: &'static [u8],
    ) -> Result<Tunnel, StatusCode> {
        let answer = self.connect_to(authority, early).await.unwrap();
        match answer {
            (StatusCode::OK, tunnel) => Ok(tunnel),
            (status, _) => Err(status),
        }
    }

    /// Requests a tunnel like [`Http2::open`], and returns any answer. Fails if the stream or the connection
    /// ends before the answer.
    pub(crate) async fn connect_to(
        &self,
        authority: &str,
        early: &'static [u8],
    ) -> Result<(StatusCode, Tunnel), h2::Error> {
        let request = Request::connect(authority).body(()).unwrap();
        let mut requests = timely("room for a stream", self.requests.clone().ready()).await?;
        let (response, mut send) = requests.send_request(request, false)?;
        if !early.is_empty() {
            send.send_data(Bytes::from_static(early), false)?;
        }
        let response = timely("an answer", response).await?;
        let (head, receive) = response.into_parts();
        let headers = head.headers;
        let tunnel = Tunnel {
            headers,
            receive,
            send,
        };
        Ok((head.status, tunnel))
    }

    /// Sends a request, and returns the status.
    pub(crate) async fn ask(&self, request: Request<()>) -> StatusCode {
        let mut requests = timely("room for a stream", self.requests.clone().ready())
            .await
            .unwrap();
        let (response, _) = requests.send_request(request, true).unwrap();
        timely("an answer", response).await.unwrap().status()
    }
}

impl Tunnel {
    pub(crate) fn say(&mut self, bytes: &'static [u8]) {
        self.send
            .send_data(Bytes::from_static(bytes), false)
            .unwrap();
    }

    pub(crate) fn finish(&mut self) {
        self.send.send_data(Bytes::new(), true).unwrap();
    }

    /// Reads until at least `count` bytes have arrived or the stream has ended.
    pub(crate) async fn hear(&mut self, count: usize) -> Vec<u8> {
        let mut heard = Vec::new();
        while heard.len() < count {
            let Some(bytes) = timely("bytes", self.receive.data()).await else {
                break;
            };
            let bytes = bytes.unwrap();
            self.receive
                .flow_control()
                .release_capacity(bytes.len())
                .unwrap();
            heard.extend_from_slice(&bytes);
        }
        heard
    }
}

/// Connects from a loopback address.
pub(crate) async fn connect_from(from: [u8; 4], to: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(SocketAddr::from((from, 0))).unwrap();
    timely("a connection", socket.connect(to)).await.unwrap()
}

/// Sends bytes to a listener, and reads the answer until the end of the stream or a reset.
pub(crate) async fn converse(door: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(door).await.unwrap();
    let mut answer = Vec::new();
    let _ = stream.write_all(bytes).await;
    let _ = timely("the end of the answer", stream.read_to_end(&mut answer)).await;
    answer
}
