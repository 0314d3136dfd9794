//! Tests of the clients against small hand-written servers.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use bytes::{Buf as _, Bytes, BytesMut};
use culvert_proto::packet::Payload;
use culvert_proto::{CloseResponse, Data, DialResponse, Packet, PacketType};
use http::HeaderMap;
use rustls::ServerConfig;
use rustls::server::WebPkiClientVerifier;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, UnixListener};
use tokio_rustls::TlsAcceptor;

use super::*;
use crate::check;
use crate::pki::{self, Pki};
use crate::services::Services;

const LIMIT: Duration = Duration::from_secs(30);

/// A TLS listener with the lab's certificates.
struct TlsEnd {
    dir: TempDir,
    pki: Pki,
    listener: TcpListener,
    acceptor: TlsAcceptor,
}

impl TlsEnd {
    async fn new(alpn: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let pki = Pki::create(dir.path()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut roots = rustls::RootCertStore::empty();
        for cert in pki::load_certs(&pki.ca).unwrap() {
            roots.add(cert).unwrap();
        }
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider))
                .build()
                .unwrap();
        let certs = pki::load_certs(&pki.server.cert).unwrap();
        let key = pki::load_key(&pki.server.key).unwrap();
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_client_cert_verifier(verifier)
            .with_single_cert(certs, key)
            .unwrap();
        config.alpn_protocols = vec![alpn.as_bytes().to_vec()];
        Self {
            dir,
            pki,
            listener: TcpListener::bind("127.0.0.1:0").await.unwrap(),
            acceptor: Arc::new(config).into(),
        }
    }

    async fn accept(&self) -> tokio_rustls::server::TlsStream<TcpStream> {
        let (stream, _) = self.listener.accept().await.unwrap();
        self.acceptor.accept(stream).await.unwrap()
    }
}

fn grpc_front(end: &TlsEnd) -> FrontEnd {
    FrontEnd::GrpcTcp {
        addr: end.listener.local_addr().unwrap(),
        tls: end.pki.client_tls(&end.pki.client, &["h2"]).unwrap(),
        server_name: "localhost".try_into().unwrap(),
    }
}

/// The server's end of one RPC.
struct Rpc {
    recv: h2::RecvStream,
    send: h2::SendStream<Bytes>,
    buffer: BytesMut,
}

impl Rpc {
    /// Returns the next packet, or `None` after the end or a reset.
    async fn next(&mut self) -> Option<Packet> {
        loop {
            if let Some(packet) = framing::decode(&mut self.buffer).unwrap() {
                return Some(packet);
            }
            let chunk = self.recv.data().await?.ok()?;
            self.buffer.extend_from_slice(&chunk);
            self.recv
                .flow_control()
                .release_capacity(chunk.len())
                .unwrap();
        }
    }

    async fn send(&mut self, kind: PacketType, payload: Payload) {
        let mut bytes = BytesMut::new();
        let packet = Packet {
            r#type: kind.into(),
            payload: Some(payload),
        };
        framing::encode(&packet, &mut bytes).unwrap();
        while bytes.has_remaining() {
            self.send.reserve_capacity(bytes.len());
            let granted = std::future::poll_fn(|cx| self.send.poll_capacity(cx)).await;
            let Some(Ok(granted)) = granted else {
                // The client has closed the stream.
                return;
            };
            let n = granted.min(bytes.len());
            let part = bytes.split_to(n).freeze();
            self.send.send_data(part, false).unwrap();
        }
    }

    async fn answer_dial(&mut self, error: &str) -> String {
        let Some(Payload::DialRequest(dial)) = self.next().await.unwrap().payload else {
            panic!("the first packet is not a dial");
        };
        assert_eq!(dial.protocol, "tcp");
        assert!(dial.random > 0);
        let answer = DialResponse {
            error: error.to_owned(),
            connect_id: 7,
            random: dial.random,
        };
        self.send(PacketType::DialRsp, Payload::DialResponse(answer))
            .await;
        dial.address
    }
}

/// Accepts one connection and its only RPC.
async fn accept_rpc(end: &TlsEnd) -> Rpc {
    serve_rpc(end.accept().await).await
}

async fn serve_rpc(stream: impl ByteStream + 'static) -> Rpc {
    let mut connection = h2::server::handshake(stream).await.unwrap();
    let (request, mut respond) = connection.accept().await.unwrap().unwrap();
    assert_eq!(request.uri().path(), "/ProxyService/Proxy");
    assert_eq!(request.headers()["content-type"], "application/grpc");
    assert_eq!(request.headers()["te"], "trailers");
    let head = http::Response::builder().header("content-type", "application/grpc");
    let send = respond
        .send_response(head.body(()).unwrap(), false)
        .unwrap();
    // Moves the frames until the client closes the connection.
    tokio::spawn(async move { while connection.accept().await.is_some() {} });
    Rpc {
        recv: request.into_body(),
        send,
        buffer: BytesMut::new(),
    }
}

/// Acts as server and agent for one connection: makes the dial and copies bytes until either side closes.
async fn tunnel(end: &TlsEnd) {
    let mut rpc = accept_rpc(end).await;
    let target = rpc.answer_dial("").await;
    let mut endpoint = TcpStream::connect(target).await.unwrap();
    let mut buffer = vec![0; 10_000];
    loop {
        tokio::select! {
            packet = rpc.next() => match packet.expect("the client must send CLOSE_REQ").payload.unwrap() {
                Payload::Data(data) => {
                    assert_eq!(data.connect_id, 7);
                    assert!(data.data.len() <= 32 * 1024);
                    endpoint.write_all(&data.data).await.unwrap();
                }
                Payload::CloseRequest(close) => {
                    assert_eq!(close.connect_id, 7);
                    break;
                }
                other => panic!("{other:?}"),
            },
            n = endpoint.read(&mut buffer) => {
                let data = Bytes::copy_from_slice(&buffer[..n.unwrap()]);
                if data.is_empty() {
                    break;
                }
                let data = Data { connect_id: 7, error: String::new(), data };
                rpc.send(PacketType::Data, Payload::Data(data)).await;
            }
        }
    }
    let close = CloseResponse {
        error: String::new(),
        connect_id: 7,
    };
    rpc.send(PacketType::CloseRsp, Payload::CloseResponse(close))
        .await;
    // The client closes once it has received the end.
    while rpc.next().await.is_some() {}
}

#[tokio::test]
async fn grpc_carries_traffic_within_the_windows() {
    let services = Services::start().await.unwrap();
    let end = TlsEnd::new("h2").await;
    let front = grpc_front(&end);
    let raw = services.raw.to_string();
    let traffic = async {
        // More than the default windows of 64 KiB in each direction.
        let stream = connect(&front, &raw, LIMIT).await.unwrap();
        check::download(stream, 1_000_000).await.unwrap();
        let stream = connect(&front, &raw, LIMIT).await.unwrap();
        check::upload(stream, 1_000_000).await.unwrap();
        let stream = connect(&front, &raw, LIMIT).await.unwrap();
        check::echo(stream, 20, 3000).await.unwrap();
        let http = services.http.to_string();
        let stream = connect(&front, &http, LIMIT).await.unwrap();
        check::http_get(stream, "/bytes/100000").await.unwrap();
    };
    let serving = async {
        for _ in 0..4 {
            tunnel(&end).await;
        }
    };
    tokio::join!(traffic, serving);
}

#[tokio::test]
async fn grpc_shutdown_sends_a_close_request_and_still_reads_to_the_end() {
    let end = TlsEnd::new("h2").await;
    let front = grpc_front(&end);
    let client = async {
        let mut stream = connect(&front, "a:1", LIMIT).await.unwrap();
        stream.shutdown().await.unwrap();
        assert!(stream.write_all(b"x").await.is_err());
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).await.unwrap();
        assert_eq!(rest, b"late");
    };
    let server = async {
        let mut rpc = accept_rpc(&end).await;
        assert_eq!(rpc.answer_dial("").await, "a:1");
        let packet = rpc.next().await.unwrap();
        assert!(matches!(packet.payload, Some(Payload::CloseRequest(_))));
        let data = Data {
            connect_id: 7,
            error: String::new(),
            data: Bytes::from_static(b"late"),
        };
        rpc.send(PacketType::Data, Payload::Data(data)).await;
        let close = CloseResponse {
            error: String::new(),
            connect_id: 7,
        };
        rpc.send(PacketType::CloseRsp, Payload::CloseResponse(close))
            .await;
        while rpc.next().await.is_some() {}
    };
    tokio::join!(client, server);
}

#[tokio::test]
async fn grpc_refusals_and_early_ends_get_different_errors() {
    let end = TlsEnd::new("h2").await;
    let front = grpc_front(&end);
    let dial = async || connect(&front, "a:1", LIMIT).await.err().unwrap();

    let refusing = async {
        let mut rpc = accept_rpc(&end).await;
        rpc.answer_dial("no such thing").await;
        while rpc.next().await.is_some() {}
    };
    let (error, ()) = tokio::join!(dial(), refusing);
    assert!(matches!(&error, ClientError::Dial(text) if text == "no such thing"));
    assert_eq!(error.refusal(), Some("no such thing"));

    let ending = async {
        let mut rpc = accept_rpc(&end).await;
        rpc.next().await.unwrap();
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", "14".parse().unwrap());
        trailers.insert("grpc-message", "gone".parse().unwrap());
        rpc.send.send_trailers(trailers).unwrap();
        while rpc.next().await.is_some() {}
    };
    let (error, ()) = tokio::join!(dial(), ending);
    assert!(
        matches!(&error, ClientError::Status { status, message } if status == "14" && message == "gone"),
        "{error}"
    );
}

/// Runs in memory, so that the paused clock advances only when both sides are idle.
#[tokio::test(start_paused = true)]
async fn grpc_timeout_cancels_the_dial() {
    let (near, far) = tokio::io::duplex(64 * 1024);
    let server = async {
        let mut rpc = serve_rpc(far).await;
        let Some(Payload::DialRequest(dial)) = rpc.next().await.unwrap().payload else {
            panic!("the first packet is not a dial");
        };
        let Some(Payload::CloseDial(close)) = rpc.next().await.unwrap().payload else {
            panic!("the dial was not cancelled");
        };
        assert_eq!(close.random, dial.random);
        assert!(rpc.next().await.is_none());
    };
    let client = async {
        let opened = grpc::open(near, "localhost", "a:1", Instant::now() + LIMIT).await;
        assert!(matches!(opened, Err(ClientError::Timeout)));
    };
    tokio::join!(server, client);
}

/// Answers one CONNECT request with `answer`, sends `then`, and then echoes.
async fn answer_connect(
    mut stream: impl ByteStream,
    answer: &[u8],
    then: &[u8],
) -> std::io::Result<()> {
    let expected = b"CONNECT [::1]:80 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n";
    let mut head = vec![0; expected.len()];
    stream.read_exact(&mut head).await?;
    assert_eq!(head, expected);
    stream.write_all(answer).await?;
    stream.flush().await?;
    stream.write_all(then).await?;
    let (mut reader, mut writer) = tokio::io::split(stream);
    tokio::io::copy(&mut reader, &mut writer).await?;
    writer.shutdown().await
}

const AGREED: &[u8] = b"HTTP/1.1 200 Connection Established\r\n\r\n";

#[tokio::test]
async fn connect_consumes_no_tunnelled_bytes_over_unix_socket_and_tls() {
    let end = TlsEnd::new("http/1.1").await;
    let socket = end.dir.path().join("front.sock");
    let uds = UnixListener::bind(&socket).unwrap();
    let tls = FrontEnd::ConnectTcp {
        addr: end.listener.local_addr().unwrap(),
        tls: end.pki.client_tls(&end.pki.client, &[]).unwrap(),
        server_name: "localhost".try_into().unwrap(),
    };
    let client = async {
        for front in [FrontEnd::ConnectUds(socket), tls] {
            let mut stream = connect(&front, "[::1]:80", LIMIT).await.unwrap();
            stream.write_all(b" and back").await.unwrap();
            stream.shutdown().await.unwrap();
            let mut seen = String::new();
            stream.read_to_string(&mut seen).await.unwrap();
            assert_eq!(seen, "first and back");
        }
    };
    let server = async {
        let stream = uds.accept().await.unwrap().0;
        // One write, so that the head and the first tunnelled bytes arrive together.
        let joined = [AGREED, b"first"].concat();
        answer_connect(stream, &joined, b"").await.unwrap();
        answer_connect(end.accept().await, AGREED, b"first")
            .await
            .unwrap();
    };
    tokio::join!(client, server);
}

#[tokio::test]
async fn connect_reports_refusals_and_invalid_answers() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("front.sock");
    let uds = UnixListener::bind(&socket).unwrap();
    let front = FrontEnd::ConnectUds(socket);
    let ask = async |answer: &'static [u8]| {
        let server = async {
            let (mut stream, _) = uds.accept().await.unwrap();
            let mut head = [0; 40];
            stream.read_exact(&mut head).await.unwrap();
            stream.write_all(answer).await.unwrap();
            stream.shutdown().await.unwrap();
            // Keeps the socket open until the client has received the whole answer.
            stream.read_to_end(&mut Vec::new()).await.unwrap();
        };
        let (asked, ()) = tokio::join!(connect(&front, "a:1", LIMIT), server);
        asked.err().unwrap()
    };
    let error = ask(b"HTTP/1.1 502 Bad Gateway\r\nA: b\r\n\r\nno way").await;
    assert!(matches!(error, ClientError::Refused { status: 502, .. }));
    assert_eq!(error.refusal(), Some("no way"));
    let error = ask(b"SSH-2.0-x\r\n\r\n").await;
    assert!(matches!(error, ClientError::Protocol(_)), "{error}");
    let error = ask(b"HTTP/1.1 200 OK\r\n").await;
    assert!(matches!(error, ClientError::Io { .. }), "{error}");
}

#[tokio::test]
async fn connect_without_a_server_is_an_io_error() {
    let dir = tempfile::tempdir().unwrap();
    for front in [
        FrontEnd::GrpcUds(dir.path().join("none")),
        FrontEnd::ConnectUds(dir.path().join("none")),
    ] {
        let error = connect(&front, "a:1", LIMIT).await.err().unwrap();
        assert!(matches!(error, ClientError::Io { .. }), "{error}");
    }
}
