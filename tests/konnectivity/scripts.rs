//! Agents, front ends and servers whose every packet a test decides.

use std::future::Future;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;

use culvert_kit::client::FrontEnd;
use culvert_kit::pki::{self, Pair};
use culvert_konnectivity::message::{ConnectId, DialId, Message};
use culvert_proto::Packet;
use culvert_proto::agent_service_client::AgentServiceClient;
use culvert_proto::agent_service_server::{AgentService, AgentServiceServer};
use culvert_proto::proxy_service_client::ProxyServiceClient;
use culvert_tests::Topology;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::body::Body;
use tonic::metadata::{MetadataKey, MetadataMap};
use tonic::{Request, Response, Status, Streaming};
use tower::{ServiceExt as _, service_fn};

use crate::support::timely;

/// How many packets may wait to be sent by a script.
const OUTGOING: usize = 64;

/// HTTP/2 window of scripted peers, in bytes: the protocol's default, so that one that does not
/// read is noticed soon.
const WINDOW_BYTES: u32 = 65_535;

/// One open call, seen from the scripted side. Dropping it breaks the connection without a word.
pub struct Peer {
    to: mpsc::Sender<Packet>,
    from: Streaming<Packet>,
    /// The headers of the answer.
    pub metadata: MetadataMap,
    connection: AbortHandle,
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

impl Peer {
    /// Sends a message.
    pub async fn say(&self, message: Message) {
        self.say_packet(message.into()).await;
    }

    /// Sends any packet.
    pub async fn say_packet(&self, packet: Packet) {
        self.to.send(packet).await.expect("an open call");
    }

    /// The next message.
    pub async fn hear(&mut self) -> Message {
        let next = timely("a packet for the script", self.from.message()).await;
        next.expect("a living call").expect("a packet").into()
    }

    /// Demands that the call ends, and gives its status unless that is OK.
    pub async fn hear_end(&mut self) -> Option<Status> {
        let next = timely("the end of the call", self.from.message()).await;
        match next {
            Ok(None) => None,
            Ok(Some(packet)) => panic!("not the end: {:?}", Message::from(packet)),
            Err(status) => Some(status),
        }
    }

    /// Demands a dial request and gives its id.
    pub async fn hear_dial(&mut self) -> DialId {
        match self.hear().await {
            Message::DialRequest { dial, .. } => dial,
            other => panic!("not a dial: {other:?}"),
        }
    }

    /// Demands that the call ends, after a word that its connection is closed or without it.
    pub async fn hear_end_after_close(&mut self) {
        loop {
            match timely("the end of the call", self.from.message()).await {
                Ok(Some(packet)) => match Message::from(packet) {
                    Message::CloseResponse { .. } => {}
                    other => panic!("not the end: {other:?}"),
                },
                Ok(None) | Err(_) => return,
            }
        }
    }

    /// Demands bytes of one connection, as many as `expected` has, in any pieces.
    pub async fn hear_bytes(&mut self, connection: i64, expected: &[u8]) {
        let mut seen = Vec::new();
        while seen.len() < expected.len() {
            match self.hear().await {
                Message::Data {
                    connection: id,
                    bytes,
                } if id.0 == connection => seen.extend_from_slice(&bytes),
                other => panic!("not bytes of {connection}: {other:?}"),
            }
        }
        assert_eq!(seen, expected);
    }

    /// Ends the sending half of the call; the other one goes on.
    pub fn end_sending(&mut self) {
        self.to = mpsc::channel(1).0;
    }
}

/// A message that answers a dial with a connection.
pub fn opened(dial: DialId, connection: i64) -> Message {
    Message::DialResponse {
        dial,
        connection: ConnectId(connection),
        error: String::new(),
    }
}

/// A message that asks for a connection.
pub fn dial(random: i64, address: &str) -> Message {
    Message::DialRequest {
        protocol: "tcp".into(),
        address: address.into(),
        dial: DialId(random),
    }
}

/// A message with bytes.
pub fn data(connection: i64, bytes: &[u8]) -> Message {
    Message::Data {
        connection: ConnectId(connection),
        bytes: bytes.to_vec().into(),
    }
}

/// A message that asks for a close.
pub fn close_request(connection: i64) -> Message {
    Message::CloseRequest {
        connection: ConnectId(connection),
    }
}

/// A message that says that a connection is closed.
pub fn close_response(connection: i64, error: &str) -> Message {
    Message::CloseResponse {
        connection: ConnectId(connection),
        error: error.into(),
    }
}

/// An agent with an id, connected to the first server.
pub async fn agent(topology: &Topology, id: &str) -> Peer {
    let connected = agent_with(topology, &[("agentid", id), ("agentidentifiers", "")]).await;
    connected.expect("an accepted agent")
}

/// An agent with any metadata.
pub async fn agent_with(topology: &Topology, metadata: &[(&str, &str)]) -> Result<Peer, Status> {
    let socket = TcpStream::connect(topology.agent_address(0)).await.unwrap();
    let pki = topology.pki();
    let tls = TlsConnector::from(pki.client_tls(&pki.agent, &["h2"]).unwrap());
    let name = "localhost".try_into().unwrap();
    let (sender, connection) = http2_over(tls.connect(name, socket).await.unwrap()).await;
    let (to, request) = request(metadata);
    let service = service_fn(move |request| sender.clone().send_request(request));
    let origin = http::Uri::from_static("https://localhost");
    let mut client = AgentServiceClient::with_origin(service, origin);
    let answer = timely("the server's headers", client.connect(request)).await;
    Ok(peer(to, answer?, connection))
}

/// A front end's call to the first server, which listens on a Unix socket in gRPC mode.
pub async fn front(topology: &Topology) -> Peer {
    fronts(topology, 1).await.remove(0)
}

/// Several calls on one connection to the first server.
pub async fn fronts(topology: &Topology, count: usize) -> Vec<Peer> {
    let FrontEnd::GrpcUds(path) = topology.front_end() else {
        panic!("scripted front ends use a Unix socket");
    };
    let socket = UnixStream::connect(path).await.unwrap();
    let (sender, connection) = http2_over(socket).await;
    let service = service_fn(move |request| sender.clone().send_request(request));
    let origin = http::Uri::from_static("http://localhost");
    let mut client = ProxyServiceClient::with_origin(service, origin);
    let mut calls = Vec::new();
    for _ in 0..count {
        let (to, request) = request(&[]);
        let answer = timely("the server's headers", client.proxy(request)).await;
        calls.push(peer(to, answer.unwrap(), connection.clone()));
    }
    calls
}

fn peer(
    to: mpsc::Sender<Packet>,
    answer: Response<Streaming<Packet>>,
    connection: AbortHandle,
) -> Peer {
    Peer {
        to,
        metadata: answer.metadata().clone(),
        from: answer.into_inner(),
        connection,
    }
}

fn request(metadata: &[(&str, &str)]) -> (mpsc::Sender<Packet>, Request<ReceiverStream<Packet>>) {
    let (to, packets) = mpsc::channel(OUTGOING);
    let mut request = Request::new(ReceiverStream::new(packets));
    for (key, value) in metadata {
        let key: MetadataKey<_> = key.parse().unwrap();
        request.metadata_mut().append(key, value.parse().unwrap());
    }
    (to, request)
}

async fn http2_over<S>(io: S) -> (http2::SendRequest<Body>, AbortHandle)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (sender, connection) = http2::Builder::new(TokioExecutor::new())
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .handshake(TokioIo::new(io))
        .await
        .expect("HTTP/2");
    (sender, tokio::spawn(connection).abort_handle())
}

/// A call of an agent, seen from a scripted server.
pub struct Call {
    /// What the agent said of itself.
    pub metadata: MetadataMap,
    from: Streaming<Packet>,
    to: mpsc::Sender<Result<Packet, Status>>,
}

impl Call {
    /// Sends a message to the agent.
    pub async fn say(&self, message: Message) {
        self.to
            .send(Ok(message.into()))
            .await
            .expect("an open call");
    }

    /// Sends messages while the test listens.
    pub fn saying(&self, messages: Vec<Message>) -> impl Future<Output = ()> + use<> {
        let to = self.to.clone();
        async move {
            for message in messages {
                to.send(Ok(message.into())).await.expect("an open call");
            }
        }
    }

    /// The agent's next message.
    pub async fn hear(&mut self) -> Message {
        let next = timely("a packet of the agent", self.from.message()).await;
        next.expect("a living call").expect("a packet").into()
    }

    /// Demands that the agent ends the call, in order or not.
    pub async fn hear_end(&mut self) {
        let next = timely("the end of the agent's call", self.from.message()).await;
        if let Ok(Some(packet)) = next {
            panic!("not the end: {:?}", Message::from(packet));
        }
    }
}

/// A server for agents; the test takes each call.
pub struct Server {
    /// Where it listens.
    pub addr: SocketAddr,
    calls: mpsc::Receiver<Call>,
    _stop: DropGuard,
}

/// What a scripted server says in its headers.
#[derive(Clone)]
struct Script {
    /// Serves calls with these ids in turn, the last one for ever.
    ids: Arc<[&'static str]>,
    count: &'static str,
    taken: Arc<std::sync::atomic::AtomicUsize>,
    calls: mpsc::Sender<Call>,
}

impl Server {
    /// Serves with a certificate. Calls are answered with the `ids` in turn, the last one for
    /// ever, and with `count`.
    pub async fn start(pair: &Pair, ids: &[&'static str], count: &'static str) -> Self {
        Self::after(pair, ids, count, |stream| async move { Some(stream) }).await
    }

    /// The same, but `admit` decides on each TCP connection before.
    pub async fn after<F>(
        pair: &Pair,
        ids: &[&'static str],
        count: &'static str,
        admit: impl Fn(TcpStream) -> F + Send + 'static,
    ) -> Self
    where
        F: Future<Output = Option<TcpStream>> + Send + 'static,
    {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (sender, calls) = mpsc::channel(OUTGOING);
        let script = Script {
            ids: ids.into(),
            count,
            taken: Arc::default(),
            calls: sender,
        };
        let tls = acceptor(&pair.cert, &pair.key);
        let stop = CancellationToken::new();
        let token = stop.clone();
        let accepting = async move {
            loop {
                let (stream, _) = listener.accept().await.expect("accepting");
                let admitted = admit(stream);
                let (tls, script) = (tls.clone(), script.clone());
                let serving = async move {
                    let Some(stream) = admitted.await else { return };
                    if let Ok(stream) = tls.accept(stream).await {
                        serve(stream, script).await;
                    }
                };
                tokio::spawn(token.clone().run_until_cancelled_owned(serving));
            }
        };
        tokio::spawn(stop.clone().run_until_cancelled_owned(accepting));
        Self {
            addr,
            calls,
            _stop: stop.drop_guard(),
        }
    }

    /// The next call of an agent.
    pub async fn call(&mut self) -> Call {
        let call = timely("a call of the agent", self.calls.recv()).await;
        call.expect("a running server")
    }

    /// Whether a call waits to be taken.
    pub fn has_call(&self) -> bool {
        !self.calls.is_empty()
    }
}

/// Accepts TLS with a certificate, and asks for none.
pub fn acceptor(cert: &Path, key: &Path) -> TlsAcceptor {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(pki::load_certs(cert).unwrap(), pki::load_key(key).unwrap())
        .unwrap();
    config.alpn_protocols = vec![b"h2".to_vec()];
    TlsAcceptor::from(Arc::new(config))
}

async fn serve<S>(stream: S, script: Script)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let service = AgentServiceServer::new(script);
    let service = hyper::service::service_fn(move |request| service.clone().oneshot(request));
    // Agents come and go; a broken connection shows in the call.
    hyper::server::conn::http2::Builder::new(TokioExecutor::new())
        .serve_connection(TokioIo::new(stream), service)
        .await
        .ok();
}

#[tonic::async_trait]
impl AgentService for Script {
    type ConnectStream = ReceiverStream<Result<Packet, Status>>;

    async fn connect(
        &self,
        request: Request<Streaming<Packet>>,
    ) -> Result<Response<Self::ConnectStream>, Status> {
        let turn = self
            .taken
            .fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let id = self.ids[turn.min(self.ids.len() - 1)];
        let (to, packets) = mpsc::channel(OUTGOING);
        let call = Call {
            metadata: request.metadata().clone(),
            from: request.into_inner(),
            to,
        };
        self.calls
            .send(call)
            .await
            .map_err(|_| Status::unknown("the test is over"))?;
        let mut response = Response::new(ReceiverStream::new(packets));
        response
            .metadata_mut()
            .insert("serverid", id.parse().unwrap());
        response
            .metadata_mut()
            .insert("servercount", self.count.parse().unwrap());
        Ok(response)
    }
}
