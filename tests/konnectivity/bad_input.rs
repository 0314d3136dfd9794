//! Peers with invalid input. After each attempt, an open connection still echoes, the programs are running
//! and have not panicked, and the rejection is counted.

use std::net::SocketAddr;

use culvert_kit::client::{BoxedStream, FrontEnd};
use culvert_kit::pki::{Pair, Pki};
use culvert_kit::services::Services;
use culvert_tests::{Mode, Topology, Transport, eventually};
use rand::RngCore as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;

use crate::support::*;

/// Returns the number of peers rejected by a listener of the first server, for `reason` or in total.
async fn rejected(topology: &Topology, listener: &str, reason: Option<&str>) -> f64 {
    let mut labels = vec![("listener", listener)];
    labels.extend(reason.map(|reason| ("reason", reason)));
    let metrics = topology.server_metrics(0).await;
    value(&metrics, "culvert_rejected_total", &labels)
}

async fn becomes_rejected(topology: &Topology, listener: &str, reason: Option<&str>, count: f64) {
    eventually(
        &format!("{count} peers rejected at {listener}, reason {reason:?}"),
        LIMIT,
        async || {
            let seen = rejected(topology, listener, reason).await;
            (seen >= count).then_some(()).ok_or(seen.to_string())
        },
    )
    .await;
}

/// Opens a raw connection to the first server's front end, without TLS and without any protocol.
async fn raw_front(topology: &Topology) -> BoxedStream {
    match topology.front_end() {
        FrontEnd::GrpcUds(path) | FrontEnd::ConnectUds(path) => {
            Box::new(UnixStream::connect(path).await.unwrap())
        }
        FrontEnd::GrpcTcp { addr, .. } | FrontEnd::ConnectTcp { addr, .. } => {
            Box::new(TcpStream::connect(addr).await.unwrap())
        }
    }
}

/// Opens a connection to the front end, and completes the TLS handshake if the front end uses TLS.
async fn front_stream(topology: &Topology) -> BoxedStream {
    match topology.front_end() {
        FrontEnd::GrpcTcp {
            addr,
            tls,
            server_name,
        }
        | FrontEnd::ConnectTcp {
            addr,
            tls,
            server_name,
        } => {
            let stream = TcpStream::connect(addr).await.unwrap();
            let tls = TlsConnector::from(tls.clone());
            Box::new(tls.connect(server_name.clone(), stream).await.unwrap())
        }
        _ => raw_front(topology).await,
    }
}

/// Sends `bytes`, ends the sending direction, and returns everything received.
async fn provoke(mut stream: BoxedStream, bytes: &[u8]) -> Vec<u8> {
    // The server may close the connection before the last byte.
    if stream.write_all(bytes).await.is_ok() {
        stream.flush().await.ok();
        stream.shutdown().await.ok();
    }
    read_rest(&mut stream).await
}

fn nonsense() -> Vec<Vec<u8>> {
    let mut random = vec![0; 100_000];
    rand::rng().fill_bytes(&mut random);
    // Prevents a valid TLS record or request by chance.
    random[0] = 0xff;
    vec![
        b"\0".to_vec(),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\xff\xff\xff\xff\xff\xff".to_vec(),
        b"\x16\x03\x01\x00\x05hello".to_vec(),
        b"SSH-2.0-OpenSSH_9.9\r\n".to_vec(),
        vec![b'\n'; 70_000],
        random,
    ]
}

#[tokio::test]
async fn garbage_at_any_port_is_rejected_and_counted() {
    let services = Services::start().await.unwrap();
    for (mode, transport) in FRONTS {
        let mut topology = Topology::simple(mode, transport).await;
        let mut innocent = Innocent::open(&topology, services.raw).await;
        let mut told = 0.0;
        for bytes in nonsense() {
            let agents = TcpStream::connect(topology.agent_address(0)).await.unwrap();
            provoke(Box::new(agents), &bytes).await;
            provoke(raw_front(&topology).await, &bytes).await;
            if transport == Transport::Tcp {
                provoke(front_stream(&topology).await, &bytes).await;
            }
            innocent.still_echoes("nonsense").await;
            told += 1.0;
            becomes_rejected(&topology, "agent", None, told).await;
        }
        assert!(rejected(&topology, "frontend", None).await >= 3.0);
        assert_unharmed(&mut topology).await;
        drop(innocent);
        server_is_idle(&topology).await;
    }
}

/// A port check connects and leaves without a byte.
#[tokio::test]
async fn port_check_of_a_unix_socket_is_not_refused() {
    for mode in MODES {
        let topology = Topology::simple(mode, Transport::Uds).await;
        provoke(raw_front(&topology).await, b"").await;
        // The server has seen the end of the check, because it closes the connection only then.
        assert_eq!(rejected(&topology, "frontend", None).await, 0.0);
    }
}

#[tokio::test]
async fn invalid_connect_requests_are_rejected_and_counted() {
    let services = Services::start().await.unwrap();
    for transport in [Transport::Uds, Transport::Tcp] {
        let mut topology = Topology::simple(Mode::HttpConnect, transport).await;
        let mut innocent = Innocent::open(&topology, services.raw).await;
        let padded = |bytes: usize| {
            let line = format!("X-Padding: {}\r\n", "x".repeat(1000));
            let lines = line.repeat(bytes / line.len());
            format!("CONNECT 127.0.0.1:1 HTTP/1.1\r\n{lines}\r\n")
        };
        let cases = [
            ("GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_owned(), "405"),
            (
                "POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".to_owned(),
                "405",
            ),
            (padded(2 << 20), "431"),
            ("CONNECT / HTTP/1.1\r\n\r\n".to_owned(), "400"),
            ("CONNECT 127.0.0.1:1 HTTP/2.0\r\n\r\n".to_owned(), "505"),
            ("what ever\r\n\r\n".to_owned(), "400"),
        ];
        for (count, (request, status)) in (1..).zip(cases) {
            let answer = provoke(front_stream(&topology).await, request.as_bytes()).await;
            let answer = String::from_utf8_lossy(&answer).into_owned();
            let expected = format!("HTTP/1.1 {status} ");
            assert!(
                answer.starts_with(&expected),
                "{transport:?} {status}: {answer:?}"
            );
            becomes_rejected(&topology, "frontend", Some("garbage"), f64::from(count)).await;
            innocent.still_echoes(status).await;
        }
        // A request cut off at any point leaves nothing behind.
        let head = "CONNECT 127.0.0.1:1 HTTP/1.1\r\nHost: x\r\n\r\n";
        for end in 0..head.len() {
            provoke(front_stream(&topology).await, &head.as_bytes()[..end]).await;
        }
        drop(innocent);
        server_is_idle(&topology).await;
        assert_unharmed(&mut topology).await;
    }
}

#[tokio::test]
async fn wrong_method_gets_the_same_answer_as_upstream() {
    let topology = Topology::simple(Mode::HttpConnect, Transport::Uds).await;
    let request = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n";
    let answer = provoke(raw_front(&topology).await, request).await;
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert_eq!(body, "this proxy only supports CONNECT passthrough\n");
    assert!(head.contains("Content-Type: text/plain"), "{head}");
}

#[tokio::test]
async fn connect_answer_is_a_bare_status_line_and_early_bytes_are_forwarded() {
    let services = Services::start().await.unwrap();
    let topology = Topology::simple(Mode::HttpConnect, Transport::Uds).await;
    let request = format!(
        "CONNECT {} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\necho\nearly",
        services.raw
    );
    let mut stream = raw_front(&topology).await;
    stream.write_all(request.as_bytes()).await.unwrap();
    let expected = b"HTTP/1.1 200 Connection Established\r\n\r\nearly";
    let mut answer = vec![0; expected.len()];
    timely("an answer", stream.read_exact(&mut answer))
        .await
        .unwrap();
    assert_eq!(answer, expected);
}

#[tokio::test]
async fn stalled_handshakes_time_out_without_disturbing_others() {
    let services = Services::start().await.unwrap();
    let mut topology = Topology::simple(Mode::HttpConnect, Transport::Tcp).await;
    let mut innocent = Innocent::open(&topology, services.raw).await;
    let mut stalled = Vec::new();
    for _ in 0..50 {
        let mut to_agents = TcpStream::connect(topology.agent_address(0)).await.unwrap();
        to_agents.write_all(b"\x16\x03\x01").await.unwrap();
        stalled.push(Box::new(to_agents) as BoxedStream);
        stalled.push(raw_front(&topology).await);
    }
    innocent.still_echoes("100 stalled handshakes").await;
    Innocent::open(&topology, services.raw)
        .await
        .still_echoes("a new handshake")
        .await;
    for stream in &mut stalled {
        assert!(read_rest(stream).await.is_empty());
    }
    for listener in ["agent", "frontend"] {
        becomes_rejected(&topology, listener, Some("timeout"), 50.0).await;
    }
    innocent
        .still_echoes("the end of the stalled handshakes")
        .await;
    assert_unharmed(&mut topology).await;
}

async fn tls_refused(topology: &Topology, addr: SocketAddr, pair: &Pair) {
    let tls = TlsConnector::from(
        topology
            .pki()
            .client_tls(pair, &["h2", "http/1.1"])
            .unwrap(),
    );
    let stream = TcpStream::connect(addr).await.unwrap();
    let name = "localhost".try_into().unwrap();
    // With TLS 1.3, the refusal may arrive after the client has completed the handshake.
    if let Ok(mut stream) = timely("a handshake", tls.connect(name, stream)).await {
        let mut rest = Vec::new();
        timely("a refusal", stream.read_to_end(&mut rest))
            .await
            .unwrap_err();
    }
}

fn front_addr(topology: &Topology) -> SocketAddr {
    match topology.front_end() {
        FrontEnd::GrpcTcp { addr, .. } | FrontEnd::ConnectTcp { addr, .. } => *addr,
        other => panic!("no address: {other:?}"),
    }
}

#[tokio::test]
async fn certificates_of_an_unknown_ca_are_refused() {
    let services = Services::start().await.unwrap();
    for mode in MODES {
        let mut topology = Topology::simple(mode, Transport::Tcp).await;
        let mut innocent = Innocent::open(&topology, services.raw).await;
        let stranger = Pki::create_other(topology.dir()).unwrap();
        for (listener, addr) in [
            ("agent", topology.agent_address(0)),
            ("frontend", front_addr(&topology)),
        ] {
            tls_refused(&topology, addr, &stranger.client).await;
            becomes_rejected(&topology, listener, Some("handshake_failed"), 1.0).await;
        }
        let log = topology.server(0).log();
        assert!(
            log.contains("signed by a CA that is not in our CA bundle"),
            "{log}"
        );
        innocent.still_echoes("certificates of an unknown CA").await;
        assert_unharmed(&mut topology).await;
    }
}

#[tokio::test]
async fn clients_without_a_certificate_are_refused() {
    use rustls::{ClientConfig, RootCertStore};
    let mut topology = Topology::simple(Mode::Grpc, Transport::Tcp).await;
    let mut roots = RootCertStore::empty();
    for cert in culvert_kit::pki::load_certs(&topology.pki().ca).unwrap() {
        roots.add(cert).unwrap();
    }
    let provider = rustls::crypto::aws_lc_rs::default_provider();
    let config = ClientConfig::builder_with_provider(provider.into())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let tls = TlsConnector::from(std::sync::Arc::new(config));
    for addr in [topology.agent_address(0), front_addr(&topology)] {
        let stream = TcpStream::connect(addr).await.unwrap();
        let connected = tls.connect("localhost".try_into().unwrap(), stream).await;
        if let Ok(mut stream) = connected {
            let mut rest = Vec::new();
            timely("a refusal", stream.read_to_end(&mut rest))
                .await
                .unwrap_err();
        }
    }
    for listener in ["agent", "frontend"] {
        becomes_rejected(&topology, listener, Some("handshake_failed"), 1.0).await;
    }
    let text = "the peer presented no client certificate";
    topology.server(0).wait_for_log(text, LIMIT).await;
    assert_unharmed(&mut topology).await;
}
