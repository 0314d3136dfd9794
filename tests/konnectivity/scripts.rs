//! Agents, front ends and servers whose every packet is decided by a test.

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

/// Capacity of a script's queues, in packets or calls.
const OUTGOING: usize = 64;

/// Id of a connection that does not exist. The server closes this connection to probe an agent.
pub(crate) const NO_CONNECTION: i64 = -1;

/// HTTP/2 window of scripted peers, in bytes. The protocol's default, so a peer that does not read is noticed
/// soon.
const WINDOW_BYTES: u32 = 65_535;

/// An open call, seen from the scripted side. Dropping the call aborts its connection without a close.
pub(crate) struct Peer {
    to: mpsc::Sender<Packet>,
    from: Streaming<Packet>,
    /// Headers of the server's answer.
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
    pub(crate) async fn say(&self, message: Message) {
        self.say_packet(message.into()).await;
    }

    /// Sends any packet.
    pub(crate) async fn say_packet(&self, packet: Packet) {
        self.to.send(packet).await.expect("an open call");
    }

    /// Waits for the next message that is not a probe. The server probes an agent that sends nothing for half a second while
    /// a dial waits for its answer. On a busy machine, any agent of a test may be so slow.
    pub(crate) async fn hear(&mut self) -> Message {
        let next = async {
            loop {
                let message = self.hear_any().await;
                if message != close_request(NO_CONNECTION) {
                    return message;
                }
            }
        };
        timely("a packet that is not a probe", next).await
    }

    /// Waits for the next message, which may be a probe.
    pub(crate) async fn hear_any(&mut self) -> Message {
        let next = timely("a packet for the script", self.from.message()).await;
        next.expect("a living call").expect("a packet").into()
    }

    /// Checks that the call ends. Returns the status unless the status is OK.
    pub(crate) async fn hear_end(&mut self) -> Option<Status> {
        let next = timely("the end of the call", self.from.message()).await;
        match next {
            Ok(None) => None,
            Ok(Some(packet)) => panic!("not the end: {:?}", Message::from(packet)),
            Err(status) => Some(status),
        }
    }

    /// Waits for a dial request and returns its id.
    pub(crate) async fn hear_dial(&mut self) -> DialId {
        match self.hear().await {
            Message::DialRequest { dial, .. } => dial,
            other => panic!("not a dial: {other:?}"),
        }
    }

    /// Checks that the call ends. The server may send close responses before the end.
    pub(crate) async fn hear_end_after_close(&mut self) {
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

    /// Reads as many bytes of one connection as `expected` has, in pieces of any size, and compares the
    /// bytes.
    pub(crate) async fn hear_bytes(&mut self, connection: i64, expected: &[u8]) {
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

    /// Ends the sending half of the call. The receiving half stays open.
    pub(crate) fn end_sending(&mut self) {
        self.to = mpsc::channel(1).0;
    }
}

/// Returns the answer to a successful dial.
pub(crate) fn opened(dial: DialId, connection: i64) -> Message {
    Message::DialResponse {
        dial,
        connection: ConnectId(connection),
        error: String::new(),
    }
}

/// Returns a dial request.
pub(crate) fn dial(random: i64, address: &str) -> Message {
    Message::DialRequest {
        protocol: "tcp".into(),
        address: address.into(),
        dial: DialId(random),
    }
}

/// Returns a message with bytes.
pub(crate) fn data(connection: i64, bytes: &[u8]) -> Message {
    Message::Data {
        connection: ConnectId(connection),
        bytes: bytes.to_vec().into(),
    }
}

/// Returns a request to close a connection.
pub(crate) fn close_request(connection: i64) -> Message {
    Message::CloseRequest {
        connection: ConnectId(connection),
    }
}

/// Returns a message about a closed connection.
pub(crate) fn close_response(connection: i64, error: &str) -> Message {
    Message::CloseResponse {
        connection: ConnectId(connection),
        error: error.into(),
    }
}

/// Connects an agent with an id to the first server.
pub(crate) async fn agent(topology: &Topology, id: &str) -> Peer {
    let connected = agent_with(topology, &[("agentid", id), ("agentidentifiers", "")]).await;
    connected.expect("an accepted agent")
}

/// Connects an agent with arbitrary metadata to the first server. The error is the server's refusal.
pub(crate) async fn agent_with(
    topology: &Topology,
    metadata: &[(&str, &str)],
) -> Result<Peer, Status> {
    agent_as(topology, &topology.pki().agent, metadata).await
}

/// Connects an agent like [`agent_with`], with the certificate `pair`.
pub(crate) async fn agent_as(
    topology: &Topology,
    pair: &Pair,
    metadata: &[(&str, &str)],
) -> Result<Peer, Status> {
    let socket = TcpStream::connect(topology.agent_address(0)).await.unwrap();
    let pki = topology.pki();
    let tls = TlsConnector::from(pki.client_tls(pair, &["h2"]).unwrap());
    let name = "localhost".try_into().unwrap();
    let (sender, connection) = http2_over(tls.connect(name, socket).await.unwrap()).await;
    let (to, request) = request(metadata);
    let service = service_fn(move |request| sender.clone().send_request(request));
    let origin = http::Uri::from_static("https://localhost");
    let mut client = AgentServiceClient::with_origin(service, origin);
    let answer = timely("the server's headers", client.connect(request)).await;
    Ok(peer(to, answer?, connection))
}

/// Opens a front-end call to the first server, which must listen on a Unix socket in gRPC mode.
pub(crate) async fn front(topology: &Topology) -> Peer {
    fronts(topology, 1).await.remove(0)
}

/// Opens several front-end calls over one connection to the first server.
pub(crate) async fn fronts(topology: &Topology, count: usize) -> Vec<Peer> {
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
pub(crate) struct Call {
    /// Metadata sent by the agent.
    pub metadata: MetadataMap,
    from: Streaming<Packet>,
    to: mpsc::Sender<Result<Packet, Status>>,
}

impl Call {
    /// Sends a message to the agent.
    pub(crate) async fn say(&self, message: Message) {
        self.to
            .send(Ok(message.into()))
            .await
            .expect("an open call");
    }

    /// Returns a future that sends the messages, so that the test can receive meanwhile.
    pub(crate) fn saying(&self, messages: Vec<Message>) -> impl Future<Output = ()> + use<> {
        let to = self.to.clone();
        async move {
            for message in messages {
                to.send(Ok(message.into())).await.expect("an open call");
            }
        }
    }

    /// Waits for the agent's next message.
    pub(crate) async fn hear(&mut self) -> Message {
        let next = timely("a packet of the agent", self.from.message()).await;
        next.expect("a living call").expect("a packet").into()
    }

    /// Checks that the agent ends its half of the call without an error, and ends the other half.
    pub(crate) async fn hear_last(mut self) {
        let next = timely("the end of the agent's packets", self.from.message()).await;
        let next = next.expect("an end without an error").map(Message::from);
        assert_eq!(next, None);
    }

    /// Checks that the agent ends the call, with or without an error.
    pub(crate) async fn hear_end(&mut self) {
        let next = timely("the end of the agent's call", self.from.message()).await;
        if let Ok(Some(packet)) = next {
            panic!("not the end: {:?}", Message::from(packet));
        }
    }
}

/// A scripted server for agents. The test processes each call.
pub(crate) struct Server {
    /// Address of the listener.
    pub addr: SocketAddr,
    calls: mpsc::Receiver<Call>,
    _stop: DropGuard,
}

/// Response headers of a scripted server, and the queue of its calls.
#[derive(Clone)]
struct Script {
    /// Server ids for the calls, in turn. The last id repeats forever.
    ids: Arc<[&'static str]>,
    count: &'static str,
    taken: Arc<std::sync::atomic::AtomicUsize>,
    calls: mpsc::Sender<Call>,
}

impl Server {
    /// Starts a server with a certificate. The server answers calls with the `ids` in turn, repeats the last
    /// id forever, and always sends `count`.
    pub(crate) async fn start(pair: &Pair, ids: &[&'static str], count: &'static str) -> Self {
        Self::after(pair, ids, count, |stream| async move { Some(stream) }).await
    }

    /// Starts a server like `start`, but `admit` first accepts or rejects each TCP connection.
    pub(crate) async fn after<F>(
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

    /// Waits for the next call of an agent.
    pub(crate) async fn call(&mut self) -> Call {
        let call = timely("a call of the agent", self.calls.recv()).await;
        call.expect("a running server")
    }

    /// Returns true if a call is waiting.
    pub(crate) fn has_call(&self) -> bool {
        !self.calls.is_empty()
    }
}

/// Returns a TLS acceptor with a server certificate and without client authentication.
pub(crate) fn acceptor(cert: &Path, key: &Path) -> TlsAcceptor {
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
    // Agents come and go. A broken connection appears as an error of the call.
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
