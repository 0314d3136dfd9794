//! Introductions on the native transport: invalid, refused and accepted.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use culvert_host::tls::{Identity, TlsOptions, TrustBundle, server_config};
use culvert_kit::pki::{self, Pair};
use culvert_kit::services::Services;
use culvert_native::{COUNT_PUSHED_HEADER, hello, resume};
use culvert_tests::{Mode, Topology, Transport, eventually};
use rustls::ServerConfig;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_rustls::{TlsAcceptor, TlsConnector, server};

use crate::searching::Lone;
use crate::support::*;

const ALPN: &str = "culvert/1";

/// Sends bytes to the first server's agent listener after the TLS handshake, and returns the answer.
pub(crate) async fn answer_to(topology: &Topology, says: &[u8]) -> String {
    let socket = TcpStream::connect(topology.agent_address(0)).await.unwrap();
    let pki = topology.pki();
    let tls = TlsConnector::from(pki.client_tls(&pki.agent, &[ALPN]).unwrap());
    let name = "localhost".try_into().unwrap();
    let mut stream = tls.connect(name, socket).await.unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(ALPN.as_bytes()));
    // The server may close the connection before the last byte.
    stream.write_all(says).await.ok();
    stream.flush().await.ok();
    let mut answer = Vec::new();
    timely(
        "the end of the server's answer",
        stream.read_to_end(&mut answer),
    )
    .await
    .ok();
    String::from_utf8(answer).unwrap()
}

#[tokio::test]
async fn invalid_introductions_are_counted_and_disturb_no_other_connection() {
    let services = Services::start().await.unwrap();
    let mut topology = Topology::simple(Mode::HttpConnect, Transport::Uds).await;
    let mut innocent = Innocent::open(&topology, services.raw).await;
    let oversized = format!(
        "GET /agent HTTP/1.1\r\nagentid: {}\r\n\r\n",
        "a".repeat(70_000)
    );
    let lines = "x: y\r\n".repeat(65);
    let many = format!("GET /agent HTTP/1.1\r\nagentid: a\r\n{lines}\r\n");
    let cases = [
        "\x16\x03\x01 hello\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        &oversized,
        &many,
        "GET /agent HTTP/1.1\r\nagentid: a\u{1}b\r\n\r\n",
    ];
    for (count, says) in (1..).zip(cases) {
        assert_eq!(answer_to(&topology, says.as_bytes()).await, "");
        refused_as_garbage(&topology, f64::from(count)).await;
        innocent.still_echoes("an invalid introduction").await;
    }
    let twice = "GET /agent HTTP/1.1\r\nagentid: a\r\nagentid: b\r\n\r\n";
    let answer = answer_to(&topology, twice.as_bytes()).await;
    let (head, text) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 403 "), "{head}");
    assert_eq!(text, "expected one agent ID in the context, got [a b]");
    refused_as_garbage(&topology, 1.0 + cases.len() as f64).await;
    server_shows(&topology, "ready_backends", &[], 1.0).await;
    innocent.still_echoes("all invalid introductions").await;
    assert_unharmed(&mut topology).await;
}

async fn refused_as_garbage(topology: &Topology, count: f64) {
    let labels = [("listener", "agent"), ("reason", "garbage")];
    eventually("the rejection is counted", LIMIT, async || {
        let metrics = topology.server_metrics(0).await;
        let seen = value(&metrics, "culvert_rejected_total", &labels);
        (seen == count).then_some(()).ok_or(seen)
    })
    .await;
}

/// A server for native agents with only the TLS handshake implemented. The test does the rest.
struct Scripted {
    listener: TcpListener,
    tls: TlsAcceptor,
}

impl Scripted {
    async fn start(pair: &Pair) -> Self {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let (certs, key) = (pki::load_certs(&pair.cert), pki::load_key(&pair.key));
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(certs.unwrap(), key.unwrap())
            .unwrap();
        config.alpn_protocols = vec![ALPN.into()];
        Self {
            listener: TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap(),
            tls: TlsAcceptor::from(Arc::new(config)),
        }
    }

    fn flag(&self) -> String {
        let port = self.listener.local_addr().unwrap().port();
        format!("--proxy-server-port={port}")
    }

    /// Accepts the next agent and reads its introduction.
    async fn agent(&self) -> (server::TlsStream<TcpStream>, http::HeaderMap) {
        let (socket, _) = timely("an agent", self.listener.accept()).await.unwrap();
        let mut stream = timely("TLS", self.tls.accept(socket)).await.unwrap();
        let hello = timely("an introduction", hello::read(&mut stream)).await;
        (stream, hello.unwrap())
    }
}

#[tokio::test]
async fn agent_logs_a_refusal_and_keeps_retrying() {
    let mut lone = Lone::new();
    let token = lone.dir.path().join("token");
    std::fs::write(&token, "secret\n").unwrap();
    let server = Scripted::start(&lone.pki.cluster).await;
    let token = format!("--service-account-token-path={}", token.display());
    lone.start(&[&server.flag(), &token, "--agent-identifiers=host=a"], &[]);
    let (mut stream, said) = server.agent().await;
    assert_eq!(said["agentid"], "agent-0");
    assert_eq!(said["agentidentifiers"], "host=a");
    assert_eq!(said["authorization"], "Bearer secret");
    assert_eq!(said["upgrade"], ALPN);
    hello::refuse(&mut stream, "no such cluster").await.unwrap();
    drop(stream);
    let told = "the server refused this agent: no such cluster";
    lone.program().wait_for_log(told, LIMIT).await;

    for (answer, told) in [
        (
            "SSH-2.0\r\n\r\n",
            "not an introduction of the native protocol",
        ),
        (
            "HTTP/1.1 101 Switching Protocols\r\nserverid: a\r\n\r\n",
            "expected one server count, got 0",
        ),
        (
            "HTTP/1.1 101 Switching Protocols\r\nservercount: 1\r\n\r\n",
            "expected one server ID in the context, got []",
        ),
        ("", "the connection ended before the server's answer"),
    ] {
        let (mut stream, _) = server.agent().await;
        stream.write_all(answer.as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
        lone.program().wait_for_log(told, LIMIT).await;
    }
    lone.shows("open_server_connections", 0.0).await;
    // After every failure, the agent still connects to a server with a valid answer.
    let (mut stream, _) = server.agent().await;
    let mut answer = http::HeaderMap::new();
    answer.insert("serverid", "late".parse().unwrap());
    answer.insert("servercount", 1.into());
    hello::accept(&mut stream, &answer).await.unwrap();
    let opened = timely("HTTP/2", h2::client::handshake(stream)).await;
    let (_requests, connection) = opened.unwrap();
    let driving = tokio::spawn(connection);
    lone.shows("open_server_connections", 1.0).await;
    driving.abort();
    lone.shows("open_server_connections", 0.0).await;
}

#[tokio::test]
async fn agent_that_lacks_a_client_certificate_names_its_flags() {
    let mut lone = Lone::new();
    let Pair { cert, key } = &lone.pki.cluster;
    let identity = Identity::load(cert, key).unwrap();
    let trust = TrustBundle::load(&lone.pki.ca).unwrap();
    for transport in [ALPN, "h2"] {
        let options = TlsOptions::default();
        let config = server_config(&identity, Some(&trust), &[transport.as_bytes()], &options);
        let tls = TlsAcceptor::from(config.unwrap());
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let flag = format!("--proxy-server-port={port}");
        lone.start(&[&flag, "--agent-cert=", "--agent-key="], &[]);
        let (socket, _) = timely("an agent", listener.accept()).await.unwrap();
        let refused = timely("TLS", tls.accept(socket).into_fallible()).await;
        // A close with unread bytes would reset the connection, and the agent might lose the alert.
        let (_error, _socket) = refused.expect_err("an agent with a certificate");
        let told = "TLS handshake with the server failed: the peer requires a client certificate";
        let line = lone.program().wait_for_log(told, LIMIT).await;
        assert!(line.contains("(--agent-cert, --agent-key)"), "{line}");
        lone.kill();
    }
}

#[tokio::test]
async fn agent_does_not_wait_for_a_link_that_breaks_before_http2_begins() {
    let mut lone = Lone::new();
    let server = Scripted::start(&lone.pki.cluster).await;
    lone.start(&[&server.flag(), "--resume-grace=30s"], &[]);
    let (mut stream, said) = server.agent().await;
    assert_eq!(said["culvert-resume"], "1");
    let process = said["culvert-process"].clone();
    let mut answer = answer("a", 1);
    resume::add_ticket(&mut answer, &resume::Ticket::random().unwrap());
    hello::accept(&mut stream, &answer).await.unwrap();
    drop(stream);
    let started = Instant::now();
    let (_stream, said) = server.agent().await;
    assert!(started.elapsed() < Duration::from_secs(15));
    assert_eq!(said["culvert-process"], process);
    lone.shows("open_server_connections", 0.0).await;
}

/// Returns a server's answer to an introduction.
fn answer(id: &str, count: u16) -> http::HeaderMap {
    let mut answer = http::HeaderMap::new();
    answer.insert("serverid", id.parse().unwrap());
    answer.insert("servercount", count.into());
    answer
}

/// An accepted agent, seen from a scripted server.
struct Accepted {
    requests: h2::client::SendRequest<bytes::Bytes>,
    connection: JoinSet<Result<(), h2::Error>>,
}

impl Accepted {
    /// Waits until the agent has closed the connection.
    async fn ended(mut self) {
        self.connection.join_next().await;
    }

    /// Opens the control stream and sends these lines. The stream ends with the returned value.
    async fn says(&mut self, lines: &'static str) -> h2::SendStream<bytes::Bytes> {
        let mut control = http::Request::new(());
        *control.uri_mut() = "https://agent/control".parse().unwrap();
        let (response, mut says) = self.requests.send_request(control, false).unwrap();
        timely("the control stream", response).await.unwrap();
        says.send_data(lines.into(), false).unwrap();
        says
    }
}

/// Accepts an agent as the server `id`, which announces `count` servers and maybe pushes changes.
async fn accept(
    mut stream: server::TlsStream<TcpStream>,
    id: &str,
    count: u16,
    pushes: bool,
) -> Accepted {
    let mut answer = answer(id, count);
    if pushes {
        answer.insert(COUNT_PUSHED_HEADER, "1".parse().unwrap());
    }
    hello::accept(&mut stream, &answer).await.unwrap();
    let opened = timely("HTTP/2", h2::client::handshake(stream)).await;
    let (requests, driver) = opened.unwrap();
    let mut connection = JoinSet::new();
    connection.spawn(driver);
    Accepted {
        requests,
        connection,
    }
}

/// Returns the servers that an introduction lists.
fn listed(said: &http::HeaderMap) -> Vec<&str> {
    let listed = said.get_all("culvert-connected").iter();
    listed.map(|id| id.to_str().unwrap()).collect()
}

#[tokio::test]
async fn agent_lists_its_servers_and_accepts_that_it_is_connected() {
    let mut lone = Lone::new();
    let server = Scripted::start(&lone.pki.cluster).await;
    lone.start(&[&server.flag()], &[]);
    let (stream, said) = server.agent().await;
    assert_eq!(listed(&said), [""; 0]);
    let _first = accept(stream, "a", 2, false).await;
    let (stream, said) = server.agent().await;
    assert_eq!(listed(&said), ["a"]);
    // Servers of older versions ignore the list. The agent leaves such a duplicate.
    let duplicate = accept(stream, "a", 2, false).await;
    timely("the end of the duplicate", duplicate.ended()).await;
    let (mut stream, said) = server.agent().await;
    assert_eq!(listed(&said), ["a"]);
    // The server now announces another number.
    let again = answer("a", 3);
    hello::already_connected(&mut stream, &again).await.unwrap();
    drop(stream);
    lone.shows("known_server_count", 3.0).await;
    lone.shows("open_server_connections", 1.0).await;
    let (stream, _) = server.agent().await;
    let _second = accept(stream, "b", 3, false).await;
    lone.shows("open_server_connections", 2.0).await;
    let log = lone.program().log();
    assert!(!log.contains("cannot connect"), "{log}");
}

#[tokio::test]
async fn agents_of_our_servers_leave_duplicates_early() {
    let mut topology = Topology::builder(Mode::HttpConnect, Transport::Uds)
        .servers(2)
        .server_args(&["--server-count=3", "--v=4"])
        .agents(1)
        .start()
        .await;
    // A third server is missing, so the agent keeps reaching connected servers.
    for server in 0..2 {
        let program = topology.server(server);
        let early = "the agent is already connected";
        program.wait_for_log(early, LIMIT).await;
    }
    assert_unharmed(&mut topology).await;
}

#[tokio::test]
async fn pushed_number_of_servers_starts_a_search() {
    let mut lone = Lone::new();
    let server = Scripted::start(&lone.pki.cluster).await;
    lone.start(&[&server.flag()], &[]);
    let (stream, _) = server.agent().await;
    let mut first = accept(stream, "a", 1, true).await;
    lone.shows("open_server_connections", 1.0).await;
    let _control = first.says("servers 2\n").await;
    lone.shows("known_server_count", 2.0).await;
    let (stream, said) = server.agent().await;
    assert_eq!(listed(&said), ["a"]);
    let _second = accept(stream, "b", 2, true).await;
    lone.shows("open_server_connections", 2.0).await;
}

#[tokio::test]
async fn drain_notice_starts_a_search() {
    let mut lone = Lone::new();
    let server = Scripted::start(&lone.pki.cluster).await;
    lone.start(&[&server.flag()], &[]);
    let (stream, _) = server.agent().await;
    let mut first = accept(stream, "a", 1, false).await;
    lone.shows("open_server_connections", 1.0).await;
    let _control = first.says("drain\n").await;
    let (stream, said) = server.agent().await;
    assert_eq!(listed(&said), ["a"]);
    let _second = accept(stream, "b", 1, false).await;
    // The agent stays connected to the draining server.
    lone.shows("open_server_connections", 2.0).await;
}

#[tokio::test]
async fn lost_server_is_replaced_although_the_others_announce_fewer() {
    let mut lone = Lone::new();
    let server = Scripted::start(&lone.pki.cluster).await;
    lone.start(&[&server.flag()], &[]);
    let (stream, _) = server.agent().await;
    let mut first = accept(stream, "a", 2, false).await;
    let (stream, _) = server.agent().await;
    let second = accept(stream, "b", 2, false).await;
    lone.shows("open_server_connections", 2.0).await;
    let _control = first.says("servers 1\n").await;
    drop(second);
    lone.shows("known_server_count", 1.0).await;
    // An attempt from before the loss may wait for the test.
    loop {
        let (stream, said) = server.agent().await;
        if listed(&said) == ["a"] {
            let _third = accept(stream, "c", 1, false).await;
            return lone.shows("open_server_connections", 2.0).await;
        }
    }
}
