//! CONNECT over HTTP/1.1 and HTTP/2, in plain text and over TLS.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use culvert_kit::check;
use culvert_kit::pki::Pki;
use culvert_kit::services::{BANNER, Services};
use http::{Request, StatusCode};
use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;

use crate::support::{Door, Http2, LIMIT, Upstream, converse, stands_still, timely};

const RAW: &str = "raw.demo.svc.cluster.local:443";
const HALF: &str = "half.demo.svc.cluster.local:443";
const FIRST: &str = "first.demo.svc.cluster.local:443";
const SILENT: &str = "silent.demo.svc.cluster.local:443";
const GONE: &str = "gone.demo.svc.cluster.local:443";

async fn routes(services: &Services) -> Vec<Upstream> {
    let gone = TcpListener::bind("127.0.0.1:0")
        .await
        .unwrap()
        .local_addr()
        .unwrap();
    vec![
        Upstream::new("demo/raw", services.raw).authority(RAW),
        Upstream::new("demo/half", services.half).authority(HALF),
        Upstream::new("demo/first", services.first).authority(FIRST),
        Upstream::new("demo/silent", services.silent).authority(SILENT),
        Upstream::new("demo/gone", gone).authority(GONE),
    ]
}

async fn start(flags: &[&str]) -> (Door, Services) {
    let services = Services::start().await.unwrap();
    let door = Door::start_with(&routes(&services).await, flags).await;
    (door, services)
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap()
}

/// Opens a tunnel over HTTP/1.1.
async fn http1(door: &Door, authority: &str) -> TcpStream {
    let mut stream = TcpStream::connect(door.tunneling).await.unwrap();
    let request = format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(timely("the answer", stream.read_u8()).await.unwrap());
    }
    let head = String::from_utf8(head).unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    stream
}

#[tokio::test]
async fn http1_tunnel_carries_bytes_and_half_closes() {
    let (door, _services) = start(&[]).await;
    check::echo(http1(&door, RAW).await, 20, 100_000)
        .await
        .unwrap();
    check::download(http1(&door, RAW).await, 20_000_000)
        .await
        .unwrap();
    check::upload(http1(&door, RAW).await, 20_000_000)
        .await
        .unwrap();
    let mut half = http1(&door, HALF).await;
    half.write_all(b"12345").await.unwrap();
    half.shutdown().await.unwrap();
    let mut answer = String::new();
    timely("the answer", half.read_to_string(&mut answer))
        .await
        .unwrap();
    assert_eq!(answer, "5\n");
    let mut first = http1(&door, &FIRST.to_uppercase().replace("FIRST", "First")).await;
    let mut banner = vec![0; BANNER.len()];
    timely("the banner", first.read_exact(&mut banner))
        .await
        .unwrap();
    assert_eq!(banner, BANNER);
    drop(first);
    door.is_idle().await;
    let labels = [("envoy_cluster_name", "demo/raw")];
    assert_eq!(
        door.value("envoy_cluster_upstream_rq_total", &labels).await,
        3.0
    );
    let received = door
        .value("envoy_cluster_upstream_cx_rx_bytes_total", &labels)
        .await;
    assert!(received > 22_000_000.0, "{received}");
    let http = [("envoy_http_conn_manager_prefix", "ingress_http")];
    assert_eq!(
        door.value("envoy_http_downstream_rq_total", &http).await,
        5.0
    );
    let closed = [("reason", "finished")];
    assert_eq!(
        door.value("culvert_connections_closed_total", &closed)
            .await,
        5.0
    );
}

#[tokio::test]
async fn bytes_sent_before_the_answer_are_kept() {
    let (door, _services) = start(&[]).await;
    let request = format!("CONNECT {RAW} HTTP/1.1\r\n\r\ndownload 10\n");
    let answer = converse(door.tunneling, request.as_bytes()).await;
    let body = answer.strip_prefix(b"HTTP/1.1 200 OK\r\n\r\n").unwrap();
    assert_eq!(body, culvert_kit::pattern::prefix(10));
    let client = Http2::connect(door.tunneling).await;
    let mut tunnel = client.open(RAW, b"download 10\n").await.unwrap();
    assert_eq!(tunnel.hear(100).await, culvert_kit::pattern::prefix(10));
}

#[tokio::test]
async fn refused_requests_are_answered_like_envoy() {
    let (door, _services) = start(&[]).await;
    let get = format!("GET / HTTP/1.1\r\nHost: {RAW}\r\n\r\n");
    for (request, answer) in [
        (
            "CONNECT other.demo.svc.cluster.local:443 HTTP/1.1\r\n\r\n",
            "HTTP/1.1 404 Not Found\r\n",
        ),
        (
            "CONNECT raw.demo.svc.cluster.local HTTP/1.1\r\n\r\n",
            "HTTP/1.1 400 Bad Request\r\n",
        ),
        (get.as_str(), "HTTP/1.1 404 Not Found\r\n"),
        (
            "CONNECT gone.demo.svc.cluster.local:443 HTTP/1.1\r\n\r\n",
            "HTTP/1.1 503 Service Unavailable\r\n",
        ),
        ("CONNECT / HTTP/1.1\r\n\r\n", "HTTP/1.1 400 Bad Request\r\n"),
        ("nonsense\r\n\r\n", "HTTP/1.1 400 Bad Request\r\n"),
    ] {
        let answered = text(converse(door.tunneling, request.as_bytes()).await);
        assert!(answered.starts_with(answer), "{request:?}: {answered:?}");
        assert_eq!(answered.matches("HTTP/1.1 ").count(), 1, "{answered}");
    }
    // The door ignores a second request after a refused request.
    let smuggled = format!("{get}CONNECT {RAW} HTTP/1.1\r\n\r\n");
    let answered = text(converse(door.tunneling, smuggled.as_bytes()).await);
    assert_eq!(answered.matches("HTTP/1.1 ").count(), 1, "{answered}");

    let client = Http2::connect(door.tunneling).await;
    let refused = async |authority| client.open(authority, b"").await.err().unwrap();
    assert_eq!(
        refused("other.demo.svc.cluster.local:443").await,
        StatusCode::NOT_FOUND
    );
    assert_eq!(
        refused("raw.demo.svc.cluster.local:444").await,
        StatusCode::NOT_FOUND
    );
    assert_eq!(refused(GONE).await, StatusCode::SERVICE_UNAVAILABLE);
    let get = Request::get(format!("http://{RAW}/")).body(()).unwrap();
    assert_eq!(client.ask(get).await, StatusCode::NOT_FOUND);
    // The connection still works.
    let mut tunnel = client.open(RAW, b"download 3\n").await.unwrap();
    assert_eq!(tunnel.hear(9).await.len(), 3);
    assert_eq!(door.refused("tunneling", "upstream").await, 2.0);
    assert_eq!(door.refused("tunneling", "unknown").await, 3.0);
}

#[tokio::test]
async fn http2_tunnel_half_closes_and_resets() {
    let (door, services) = start(&[]).await;
    let client = Http2::connect(door.tunneling).await;
    let mut half = client.open(HALF, b"").await.unwrap();
    half.say(b"123");
    half.finish();
    assert_eq!(half.hear(100).await, b"3\n");
    let first = client.open(FIRST, b"").await.unwrap();
    culvert_tests::eventually(
        "one connection to an endpoint is open",
        Duration::from_secs(10),
        async || {
            let open = services.open_connections();
            (open == 1).then_some(()).ok_or(open)
        },
    )
    .await;
    let mut send = first.send;
    send.send_reset(h2::Reason::CANCEL);
    culvert_tests::eventually(
        "the connection to the endpoint is closed",
        Duration::from_secs(10),
        async || {
            let open = services.open_connections();
            (open == 0).then_some(()).ok_or(open)
        },
    )
    .await;
    // A reset by the endpoint ends the stream, but not the HTTP/2 connection.
    let abrupt = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut upstreams = routes(&services).await;
    upstreams[4].endpoints = vec![abrupt.local_addr().unwrap()];
    door.route(&upstreams).await;
    let (tunnel, accepted) = tokio::join!(client.open(GONE, b""), abrupt.accept());
    let (socket, _) = accepted.unwrap();
    socket2::SockRef::from(&socket)
        .set_linger(Some(Duration::ZERO))
        .unwrap();
    drop(socket);
    let mut tunnel = tunnel.unwrap();
    let end = timely("the reset", tunnel.receive.data()).await;
    assert!(matches!(end, Some(Err(_))), "{end:?}");
    let mut tunnel = client.open(RAW, b"download 3\n").await.unwrap();
    assert_eq!(tunnel.hear(9).await.len(), 3);
}

#[tokio::test]
async fn an_unread_tunnel_stalls_only_itself() {
    let (door, _services) = start(&[]).await;
    let client = Http2::connect(door.tunneling).await;
    let mut stalled = Vec::new();
    for _ in 0..8 {
        stalled.push(client.open(RAW, b"download 1000000000\n").await.unwrap());
    }
    // Eight more tunnels have endpoints that read nothing.
    let filler = Bytes::from(vec![7; 1 << 20]);
    for _ in 0..8 {
        let mut tunnel = client.open(SILENT, b"").await.unwrap();
        for _ in 0..8 {
            tunnel.send.send_data(filler.clone(), false).unwrap();
        }
        stalled.push(tunnel);
    }
    stands_still(&door, LIMIT).await;
    let mut tunnel = client.open(RAW, b"download 5000000\n").await.unwrap();
    assert_eq!(tunnel.hear(6_000_000).await.len(), 5_000_000);
}

#[tokio::test]
async fn max_connections_limits_the_tunnels_of_an_upstream() {
    let (door, _services) = start(&["--max-connections=3"]).await;
    let client = Http2::connect(door.tunneling).await;
    let mut open = Vec::new();
    for _ in 0..3 {
        open.push(client.open(RAW, b"").await.unwrap());
    }
    let refused = client.open(RAW, b"").await.err();
    assert_eq!(refused, Some(StatusCode::SERVICE_UNAVAILABLE));
    client.open(FIRST, b"").await.unwrap();
    let metrics = door.metrics().await;
    for (upstream, is_full) in [("demo/raw", 1.0), ("demo/first", 0.0)] {
        let name = "envoy_cluster_circuit_breakers_default_cx_open";
        let shown = metrics.value(name, &[("envoy_cluster_name", upstream)]);
        assert_eq!(shown, Some(is_full), "{upstream}");
    }
    drop(open);
    culvert_tests::eventually(
        "a new tunnel opens again",
        Duration::from_secs(10),
        async || {
            client
                .open(RAW, b"")
                .await
                .map(|_| ())
                .map_err(|status| status.to_string())
        },
    )
    .await;
}

#[tokio::test]
async fn a_client_that_lost_its_endpoint_may_connect_again_at_once() {
    let endpoint = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let routes = [Upstream::new("demo/raw", endpoint.local_addr().unwrap()).authority(RAW)];
    let door = Door::start_with(&routes, &["--max-connections=1"]).await;
    let mut first = http1(&door, RAW).await;
    let (lost, _) = endpoint.accept().await.unwrap();
    // The close becomes a reset.
    socket2::SockRef::from(&lost)
        .set_linger(Some(Duration::ZERO))
        .unwrap();
    drop(lost);
    let end = timely("the end", first.read(&mut [0])).await;
    assert_eq!(end.unwrap_or(0), 0);
    // The first client has not closed its connection yet.
    http1(&door, RAW).await;
}

#[tokio::test]
async fn an_idle_tunnel_is_closed_and_a_busy_one_is_not() {
    let (door, _services) = start(&["--tunneling-stream-idle-timeout=3s"]).await;
    let client = Http2::connect(door.tunneling).await;
    let mut idle = client.open(RAW, b"echo\n").await.unwrap();
    let mut busy = client.open(RAW, b"echo\n").await.unwrap();
    for _ in 0..50 {
        busy.say(b"x");
        assert_eq!(busy.hear(1).await, b"x");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let end = timely("the end", idle.receive.data()).await;
    assert!(matches!(end, Some(Err(_))), "{end:?}");
    let labels = [("reason", "idle_timeout")];
    assert_eq!(
        door.value("culvert_connections_closed_total", &labels)
            .await,
        1.0
    );
}

#[tokio::test]
async fn tunnel_of_a_slow_reader_is_not_idle() {
    let (door, _services) = start(&["--tunneling-stream-idle-timeout=3s"]).await;
    let socket = TcpStream::connect(door.tunneling).await.unwrap();
    let client = Http2::with_window(socket, 65_535).await;
    let mut slow = client.open(RAW, b"download 100000000\n").await.unwrap();
    for _ in 0..20 {
        assert!(slow.hear(16 * 1024).await.len() >= 16 * 1024);
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

/// Resets a connection.
fn reset(stream: TcpStream) {
    let socket = socket2::SockRef::from(&stream);
    socket.set_linger(Some(Duration::ZERO)).unwrap();
    drop(stream);
}

#[tokio::test]
async fn reset_after_a_half_close_ends_a_tunnel() {
    let (door, services) = start(&[]).await;
    let mut client = http1(&door, SILENT).await;
    client.shutdown().await.unwrap();
    let abrupt = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut upstreams = routes(&services).await;
    upstreams[4].endpoints = vec![abrupt.local_addr().unwrap()];
    door.route(&upstreams).await;
    let http2 = Http2::connect(door.tunneling).await;
    let (tunnel, accepted) = tokio::join!(http2.open(GONE, b""), abrupt.accept());
    let (mut endpoint, mut tunnel) = (accepted.unwrap().0, tunnel.unwrap());
    endpoint.shutdown().await.unwrap();
    assert!(tunnel.hear(1).await.is_empty());
    reset(client);
    reset(endpoint);
    for reason in ["client_lost", "endpoint_lost"] {
        let lost = format!("a connection ends as {reason}");
        culvert_tests::eventually(&lost, LIMIT, async || {
            let closed = [("reason", reason)];
            let count = door
                .value("culvert_connections_closed_total", &closed)
                .await;
            (count == 1.0).then_some(()).ok_or(count)
        })
        .await;
    }
}

#[tokio::test]
async fn clients_outside_the_allowed_networks_are_refused() {
    let (door, _services) = start(&["--tunneling-allowed-networks=10.0.0.0/8,192.0.2.1"]).await;
    assert_eq!(converse(door.tunneling, b"").await, b"");
    door.has_refused("tunneling", "address", 1.0).await;
}

#[tokio::test]
async fn tls_and_plain_text_share_the_listener_unless_tls_is_required() {
    let dir = tempfile::tempdir().unwrap();
    let pki = Pki::create(dir.path()).unwrap();
    let cert = format!("--tunneling-cert={}", pki.server.cert.display());
    let key = format!("--tunneling-key={}", pki.server.key.display());
    let (door, _services) = start(&[&cert, &key]).await;
    check::echo(http1(&door, RAW).await, 2, 1000).await.unwrap();
    for (alpn, is_http2) in [("h2", true), ("http/1.1", false)] {
        let stream = tls(&door, pki.client_tls(&pki.client, &[alpn]).unwrap())
            .await
            .unwrap();
        let (_, session) = stream.get_ref();
        assert_eq!(session.alpn_protocol(), Some(alpn.as_bytes()));
        if is_http2 {
            let client = Http2::over(stream).await;
            let mut tunnel = client.open(RAW, b"download 7\n").await.unwrap();
            assert_eq!(tunnel.hear(9).await.len(), 7);
        } else {
            let mut stream = stream;
            let request = format!("CONNECT {RAW} HTTP/1.1\r\n\r\ndownload 7\n");
            stream.write_all(request.as_bytes()).await.unwrap();
            stream.flush().await.unwrap();
            let mut answer = Vec::new();
            timely("the answer", stream.read_to_end(&mut answer))
                .await
                .unwrap();
            assert!(answer.starts_with(b"HTTP/1.1 200 OK\r\n\r\n"));
        }
    }

    let ca = format!("--tunneling-client-ca={}", pki.ca.display());
    for flag in ["--tunneling-require-tls", ca.as_str()] {
        let (door, _services) = start(&[&cert, &key, flag]).await;
        for plain in [
            &b"CONNECT x:1 HTTP/1.1\r\n\r\n"[..],
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        ] {
            assert_eq!(converse(door.tunneling, plain).await, b"", "{flag}");
        }
        door.has_refused("tunneling", "tls", 2.0).await;
        let stream = tls(&door, pki.client_tls(&pki.client, &["h2"]).unwrap())
            .await
            .unwrap();
        let client = Http2::over(stream).await;
        assert!(client.open(RAW, b"").await.is_ok(), "{flag}");
        if flag != ca {
            continue;
        }
        let stranger = Pki::create_other(dir.path()).unwrap();
        let config = pki.client_tls(&stranger.client, &["h2"]).unwrap();
        if let Ok(mut stream) = tls(&door, config).await {
            // With TLS 1.3, the refusal arrives after the client has finished its handshake.
            assert!(stream.read_u8().await.is_err());
        }
        door.has_refused("tunneling", "tls", 3.0).await;
    }
}

async fn tls(
    door: &Door,
    config: Arc<ClientConfig>,
) -> std::io::Result<tokio_rustls::client::TlsStream<TcpStream>> {
    let stream = TcpStream::connect(door.tunneling).await?;
    let name = ServerName::try_from("localhost").unwrap();
    TlsConnector::from(config).connect(name, stream).await
}

#[tokio::test]
async fn a_client_with_small_windows_is_served() {
    let (door, _services) = start(&[]).await;
    let stream = TcpStream::connect(door.tunneling).await.unwrap();
    let client = Http2::with_window(stream, 1_000).await;
    let mut tunnel = client.open(RAW, b"download 200000\n").await.unwrap();
    assert_eq!(tunnel.hear(300_000).await.len(), 200_000);
}

#[tokio::test]
async fn tls_without_a_certificate_is_refused_and_clients_that_leave_early_are_counted() {
    let (door, _services) = start(&[]).await;
    // The first bytes of a ClientHello.
    let answer = converse(door.tunneling, &[22, 3, 1, 2, 0, 1]).await;
    assert_eq!(answer, b"");
    door.has_refused("tunneling", "tls", 1.0).await;
    let mut client = TcpStream::connect(door.tunneling).await.unwrap();
    client.write_all(b"CONNECT raw.demo").await.unwrap();
    drop(client);
    door.has_refused("tunneling", "garbage", 1.0).await;
}
