//! Tests of heads: requests that count as calls, and responses that a client accepts.

use std::convert::Infallible;
use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use culvert_proto::proxy_service_client::ProxyServiceClient;
use futures_util::FutureExt as _;
use h2::client::{ResponseFuture, SendRequest};
use h2::{RecvStream, SendStream};
use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::server::conn::http2 as server;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::DuplexStream;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};
use tokio_util::task::TaskTracker;
use tonic::Code;
use tonic::metadata::MetadataMap;
use tower::ServiceExt as _;

use super::super::pacer::{PATIENCE, Pacer};
use super::*;

const PATH: &str = "/ProxyService/Proxy";

/// Service that returns the received messages, after metadata.
struct Echo;

struct Replies<B>(Reader<B>);

impl<B> Stream for Replies<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Item = Result<Message, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_message(cx).map(Result::transpose)
    }
}

/// Returns the response of `Echo`, which never waits before its response.
fn answered<B: Send>(request: Request<B>) -> Response<PacketBody<Replies<B>>>
where
    Echo: Service<B, Replies = Replies<B>>,
{
    answer(&Echo, request).now_or_never().unwrap()
}

impl<B> Service<B> for Echo
where
    B: Body<Data = Bytes> + Unpin + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    const PATH: &'static str = PATH;

    type Replies = Replies<B>;

    async fn take(
        &self,
        request: tonic::Request<Reader<B>>,
    ) -> Result<tonic::Response<Self::Replies>, Status> {
        let who = request.metadata().get("who").cloned();
        let who = who.ok_or_else(|| Status::unknown("who are you?"))?;
        let mut response = tonic::Response::new(Replies(request.into_inner()));
        response.metadata_mut().insert("you", who);
        Ok(response)
    }
}

/// Serves one connection by hyper in its own task, and returns the other end.
fn served<F, B>(handle: F) -> DuplexStream
where
    F: Fn(Request<Incoming>) -> Response<B> + Send + Sync + 'static,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let (near, far) = tokio::io::duplex(1 << 16);
    let handle = Arc::new(handle);
    let service =
        hyper::service::service_fn(move |request| ready(Ok::<_, Infallible>(handle(request))));
    let connection = server::Builder::new(TokioExecutor::new());
    tokio::spawn(connection.serve_connection(TokioIo::new(far), service));
    near
}

async fn called<F, B>(handle: F, who: &str) -> Result<(MetadataMap, Reader<Received>), CallError>
where
    F: Fn(Request<Incoming>) -> Response<B> + Send + Sync + 'static,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    call_over(served(handle), who).await
}

async fn call_over(
    io: DuplexStream,
    who: &str,
) -> Result<(MetadataMap, Reader<Received>), CallError> {
    let (requests, connection) = h2::client::Builder::new().handshake(io).await.unwrap();
    tokio::spawn(connection);
    let mut metadata = MetadataMap::new();
    if !who.is_empty() {
        metadata.insert("who", who.parse().unwrap());
    }
    let origin = http::Uri::from_static("http://server/");
    let body = PacketBody::request(Rounds::new([said()]));
    let tasks = TaskTracker::new();
    let limits = SendLimits {
        queue: usize::MAX,
        ahead: || None,
    };
    call(requests, &origin, PATH, metadata, body, limits, &tasks).await
}

/// Serves the calls of one connection by [`serve`] in its own task, and returns the other end.
fn served_over_h2() -> DuplexStream {
    let (near, far) = tokio::io::duplex(1 << 16);
    tokio::spawn(async move {
        let mut connection = h2::server::Builder::new().handshake(far).await.unwrap();
        while let Some(Ok((request, respond))) = connection.accept().await {
            tokio::spawn(serve(Echo, request, respond));
        }
    });
    near
}

fn said() -> Vec<Message> {
    let dial = Message::CloseDial {
        dial: crate::message::DialId(5),
    };
    vec![dial, data(1, 100), data(2, 100_000), data(3, 0)]
}

#[tokio::test]
async fn our_client_calls_our_server() {
    for io in [served(answered), served_over_h2()] {
        let (metadata, mut reader) = call_over(io, "me").await.unwrap();
        assert_eq!(metadata.get("you").unwrap(), "me");
        for expected in said() {
            assert_eq!(reader.message().await.unwrap(), Some(expected));
        }
        assert_eq!(reader.message().await.unwrap(), None);
    }
}

#[tokio::test]
async fn a_tonic_client_calls_our_server() {
    for io in [served(answered), served_over_h2()] {
        tonic_calls(io).await;
    }
}

async fn tonic_calls(io: DuplexStream) {
    let io = TokioIo::new(io);
    let (sender, connection) =
        hyper::client::conn::http2::handshake::<_, _, tonic::body::Body>(TokioExecutor::new(), io)
            .await
            .unwrap();
    tokio::spawn(connection);
    let service = tower::service_fn(move |request| sender.clone().send_request(request));
    let mut client =
        ProxyServiceClient::with_origin(service.boxed_clone(), "http://server".parse().unwrap());
    let packets = || futures_util::stream::iter(said().into_iter().map(Packet::from));
    let refused = client.proxy(packets()).await.unwrap_err();
    assert_eq!(
        (refused.code(), refused.message()),
        (Code::Unknown, "who are you?")
    );
    let mut request = tonic::Request::new(packets());
    request.metadata_mut().insert("who", "me".parse().unwrap());
    let mut answer = client.proxy(request).await.unwrap().into_inner();
    for expected in said() {
        let packet = answer.message().await.unwrap().unwrap();
        assert_eq!(Message::from(packet), expected);
    }
    assert!(answer.message().await.unwrap().is_none());
    let trailers = answer.trailers().await.unwrap().unwrap();
    assert_eq!(trailers.get("grpc-status").unwrap(), "0");
}

#[tokio::test]
async fn a_refusal_reaches_the_client() {
    for io in [served(answered), served_over_h2()] {
        let error = call_over(io, "").await;
        let error = error.map(|_| ()).unwrap_err();
        assert!(error.to_string().starts_with("who are you? ("), "{error}");
    }
}

/// Service that never answers a call, and counts the calls that wait for an answer.
struct Silent(Arc<()>);

impl Service<Received> for Silent {
    const PATH: &'static str = PATH;

    type Replies = Replies<Received>;

    async fn take(
        &self,
        _request: tonic::Request<Reader<Received>>,
    ) -> Result<tonic::Response<Self::Replies>, Status> {
        let _waiting = self.0.clone();
        std::future::pending().await
    }
}

/// Begins a call, and leaves its messages to the caller.
async fn begin(requests: SendRequest<Bytes>) -> (ResponseFuture, SendStream<Bytes>) {
    let request = Request::post(format!("http://server{PATH}"));
    let request = request.header("content-type", "application/grpc");
    let request = request.body(()).unwrap();
    let mut requests = requests.ready().await.unwrap();
    requests.send_request(request, false).unwrap()
}

#[tokio::test]
async fn call_that_the_client_resets_ends_before_its_answer() {
    let (near, far) = tokio::io::duplex(1 << 16);
    let calls = Arc::new(());
    let service = Silent(calls.clone());
    let ended = tokio::spawn(async move {
        let mut connection = h2::server::Builder::new().handshake(far).await.unwrap();
        let (request, respond) = connection.accept().await.unwrap().unwrap();
        let call = tokio::spawn(serve(service, request, respond));
        tokio::spawn(async move { connection.accept().await.map(|_| ()) });
        call.await.unwrap();
    });
    let (requests, connection) = h2::client::handshake(near).await.unwrap();
    tokio::spawn(connection);
    let (_response, mut stream) = begin(requests).await;
    while Arc::strong_count(&calls) < 3 {
        tokio::task::yield_now().await;
    }
    stream.send_reset(h2::Reason::CANCEL);
    ended.await.unwrap();
    assert_eq!(Arc::strong_count(&calls), 1);
}

/// Service that reports the end of the messages of a call.
struct Ends(mpsc::UnboundedSender<Result<(), Code>>);

impl Service<Received> for Ends {
    const PATH: &'static str = PATH;

    type Replies = futures_util::stream::Pending<Result<Message, Status>>;

    async fn take(
        &self,
        request: tonic::Request<Reader<Received>>,
    ) -> Result<tonic::Response<Self::Replies>, Status> {
        let (ends, mut reader) = (self.0.clone(), request.into_inner());
        tokio::spawn(async move {
            let end = loop {
                match reader.message().await {
                    Ok(Some(_)) => {}
                    Ok(None) => break Ok(()),
                    Err(status) => break Err(status.code()),
                }
            };
            ends.send(end)
        });
        Ok(tonic::Response::new(futures_util::stream::pending()))
    }
}

/// The code is a label of a metric. A reset without an error is an ordinary end.
#[tokio::test]
async fn call_that_its_client_breaks_off_ends_as_cancelled() {
    for (reason, expected) in [
        (Some(h2::Reason::CANCEL), Err(Code::Cancelled)),
        (Some(h2::Reason::NO_ERROR), Ok(())),
        (Some(h2::Reason::INTERNAL_ERROR), Err(Code::Cancelled)),
        (None, Err(Code::Cancelled)),
    ] {
        let (near, far) = tokio::io::duplex(1 << 16);
        let (ends, mut ended) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            let mut connection = h2::server::Builder::new().handshake(far).await.unwrap();
            while let Some(Ok((request, respond))) = connection.accept().await {
                tokio::spawn(serve(Ends(ends.clone()), request, respond));
            }
        });
        let (requests, connection) = h2::client::handshake(near).await.unwrap();
        let connection = tokio::spawn(connection);
        let (response, mut stream) = begin(requests).await;
        response.await.unwrap();
        match reason {
            Some(reason) => stream.send_reset(reason),
            None => connection.abort(),
        }
        assert_eq!(ended.recv().await.unwrap(), expected, "{reason:?}");
    }
}

#[tokio::test]
async fn answer_that_its_server_breaks_off_ends_with_the_code_of_grpc() {
    for (reason, expected) in [
        (Some(h2::Reason::CANCEL), Code::Cancelled),
        (Some(h2::Reason::REFUSED_STREAM), Code::Unavailable),
        (Some(h2::Reason::INTERNAL_ERROR), Code::Internal),
        (None, Code::Unavailable),
    ] {
        let (near, far) = tokio::io::duplex(1 << 16);
        tokio::spawn(async move {
            let mut connection = h2::server::handshake(far).await.unwrap();
            let (_request, mut respond) = connection.accept().await.unwrap().unwrap();
            let mut stream = respond.send_response(Response::new(()), false).unwrap();
            // The head leaves before the reset or the end of the connection.
            let head = timeout(Duration::from_millis(10), connection.accept());
            head.await.map(|_| ()).unwrap_err();
            if let Some(reason) = reason {
                stream.send_reset(reason);
                connection.accept().await;
            }
        });
        let (_, mut reader) = call_over(near, "me").await.unwrap();
        let status = reader.message().await.unwrap_err();
        assert_eq!(status.code(), expected, "{reason:?}");
    }
}

#[tokio::test]
async fn an_answer_in_a_foreign_encoding_is_refused() {
    let handle = |_| {
        let response = Response::builder().header("grpc-encoding", "gzip");
        response.body(String::new()).unwrap()
    };
    let error = called(handle, "me").await.map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("compressed with `gzip`"));
}

/// A proxy or another server may answer in place of the gRPC server.
#[tokio::test]
async fn answer_with_an_http_error_is_not_grpc() {
    for http in [403, 404, 502] {
        let handle = move |_| {
            Response::builder()
                .status(http)
                .body(String::new())
                .unwrap()
        };
        let Err(CallError::NotGrpc(status)) = called(handle, "me").await else {
            panic!("the client must refuse the answer");
        };
        assert_eq!(status, http);
    }
}

#[tokio::test]
async fn an_answer_may_consist_of_its_head_only() {
    let handle = |_| {
        let response = Response::builder().header("grpc-status", "0");
        response.body(String::new()).unwrap()
    };
    let (_, mut reader) = called(handle, "me").await.unwrap();
    assert_eq!(reader.message().await.unwrap(), None);
}

#[test]
fn invalid_calls_are_refused_as_in_grpc_go() {
    let post = || {
        let request = Request::post(PATH).header("who", "me");
        request.header("content-type", "application/grpc+proto")
    };
    let kind = |kind: &str| {
        let request = Request::post(PATH).header("who", "me");
        request.header("content-type", kind)
    };
    let cases = [
        (post(), 200, None),
        (kind("application/grpc"), 200, None),
        (kind("application/grpc;x=y"), 200, None),
        (post().header("grpc-encoding", "identity"), 200, None),
        (kind("application/grpc-web"), 415, Some(3)),
        (kind("text/plain"), 415, Some(3)),
        (Request::post(PATH), 415, Some(3)),
        (post().method("GET"), 405, Some(13)),
        (post().uri("/ProxyService/Other"), 200, Some(12)),
        (post().uri("/"), 200, Some(12)),
        (post().header("grpc-encoding", "gzip"), 200, Some(12)),
    ];
    for (request, http, grpc) in cases {
        let request = request.body(Frames::new([])).unwrap();
        let shown = format!("{} {:?}", request.method(), request.headers());
        let response = answered(request);
        assert_eq!(response.status(), StatusCode::from_u16(http).unwrap());
        assert_eq!(response.headers()["content-type"], "application/grpc");
        let status = response.headers().get("grpc-status");
        let status = status.map(|value| value.to_str().unwrap().parse().unwrap());
        assert_eq!(status, grpc, "{shown}");
        assert_eq!(response.body().is_end_stream(), grpc.is_some(), "{shown}");
    }
}

/// Server that receives packets of 8 KiB, and returns them to its window only if the test does.
struct Slow {
    body: RecvStream,
    /// Bytes received so far.
    received: usize,
}

impl Slow {
    const PACKET: usize = 8 * 1024;

    /// Starts a call of `count` packets within `limits` to a server with a window.
    async fn start(
        window: u32,
        count: usize,
        limits: SendLimits<impl Fn() -> Option<usize> + Send + 'static>,
    ) -> Self {
        let (near, far) = tokio::io::duplex(1 << 22);
        let mut settings = h2::client::Builder::new();
        settings.max_send_buffer_size(1 << 25);
        let (requests, connection) = settings.handshake(near).await.unwrap();
        tokio::spawn(connection);
        let data = |_| Message::Data {
            connection: crate::message::ConnectId(1),
            bytes: vec![7; Self::PACKET].into(),
        };
        let body = PacketBody::request(Rounds::new((0..count).map(|at| vec![data(at)])));
        tokio::spawn(async move {
            let origin = http::Uri::from_static("http://server/");
            let (tasks, metadata) = (TaskTracker::new(), MetadataMap::new());
            call(requests, &origin, PATH, metadata, body, limits, &tasks).await
        });
        let mut settings = h2::server::Builder::new();
        settings
            .initial_window_size(window)
            .initial_connection_window_size(4 * window);
        let mut connection = settings.handshake::<_, Bytes>(far).await.unwrap();
        let (request, _respond) = connection.accept().await.unwrap().unwrap();
        tokio::spawn(async move { connection.accept().await.map(|_| ()) });
        Self {
            body: request.into_body(),
            received: 0,
        }
    }

    /// Receives until nothing has arrived for `pause`.
    async fn receive(&mut self, pause: Duration) {
        while let Ok(Some(frame)) = timeout(pause, self.body.data()).await {
            self.received += frame.unwrap().len();
        }
    }

    fn release(&mut self, count: usize) {
        self.body.flow_control().release_capacity(count).unwrap();
    }
}

fn ahead(limit: usize) -> SendLimits<impl Fn() -> Option<usize> + Send + 'static> {
    SendLimits {
        queue: usize::MAX,
        ahead: move || Some(limit),
    }
}

#[tokio::test(start_paused = true)]
async fn bytes_that_the_server_has_not_read_are_limited() {
    const LIMIT: usize = 128 * 1024;
    let mut server = Slow::start(256 * 1024, 256, ahead(LIMIT)).await;
    server.receive(PATIENCE / 2).await;
    let most = LIMIT + 2 * Slow::PACKET;
    assert!(
        (LIMIT..most).contains(&server.received),
        "{}",
        server.received
    );
    // A server that returns nothing still receives its whole window.
    server.receive(2 * PATIENCE).await;
    assert_eq!(server.received, 256 * 1024);
    server.release(server.received);
    while let Some(frame) = server.body.data().await {
        let count = frame.unwrap().len();
        server.release(count);
        server.received += count;
    }
    assert!(server.received > 256 * Slow::PACKET, "{}", server.received);
}

#[tokio::test(start_paused = true)]
async fn limit_follows_a_large_window() {
    const WINDOW: usize = 4 << 20;
    let mut server = Slow::start(WINDOW as u32, 1024, ahead(1)).await;
    server.receive(PATIENCE / 2).await;
    let limit = WINDOW / 16 * 5;
    let most = limit + 2 * Slow::PACKET;
    assert!(
        (limit..most).contains(&server.received),
        "{}",
        server.received
    );
}

/// Many programs return read bytes once they amount to half of the window.
#[tokio::test(start_paused = true)]
async fn server_that_returns_half_of_its_window_is_waited_for_once() {
    const WINDOW: usize = 1 << 20;
    let mut server = Slow::start(WINDOW as u32, 1024, ahead(1)).await;
    let started = Instant::now();
    let mut unreturned = 0;
    while let Some(frame) = server.body.data().await {
        let count = frame.unwrap().len();
        server.received += count;
        unreturned += count;
        if unreturned >= WINDOW / 2 {
            server.release(unreturned);
            unreturned = 0;
        }
    }
    assert!(server.received > 1024 * Slow::PACKET, "{}", server.received);
    assert!(started.elapsed() <= 2 * PATIENCE, "{:?}", started.elapsed());
}

#[tokio::test(start_paused = true)]
async fn bytes_in_the_send_queue_are_limited() {
    const LIMIT: usize = 64 * 1024;
    let (near, far) = tokio::io::duplex(1024);
    let (requests, connection) = h2::client::Builder::new()
        .max_send_buffer_size(1 << 25)
        .handshake::<_, Piece>(near)
        .await
        .unwrap();
    tokio::spawn(connection);
    let server = async {
        let mut settings = h2::server::Builder::new();
        settings.initial_window_size(1 << 20);
        let mut connection = settings.handshake::<_, Bytes>(far).await.unwrap();
        let call = connection.accept().await.unwrap().unwrap();
        // The server reads no more.
        (connection, call)
    };
    let client = async {
        let request = Request::new(());
        let mut requests = requests.ready().await.unwrap();
        let (_response, mut stream) = requests.send_request(request, false).unwrap();
        let mut pacer = Pacer::new(SendLimits {
            queue: LIMIT,
            ahead: || None,
        });
        let mut sent = 0;
        while let Ok(room) = timeout(PATIENCE, pacer.room(&mut stream)).await {
            room.unwrap();
            let mut piece = Piece::default();
            piece.head = vec![7; Slow::PACKET].into();
            piece.charge = Some(pacer.charge(Slow::PACKET));
            stream.send_data(piece, false).unwrap();
            sent += Slow::PACKET;
        }
        sent
    };
    let (sent, _server) = tokio::join!(client, server);
    assert!((LIMIT..2 * LIMIT).contains(&sent), "{sent}");
}
