#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use culvert_host::tls::{Identity, TlsOptions, server_config};

use super::*;
use crate::check;
use crate::client::connect_tls;
use crate::pattern::{self, Digest};
use crate::pki::{CLUSTER_NAME, Pki};

async fn connect(address: SocketAddr) -> TcpStream {
    TcpStream::connect(address).await.unwrap()
}

/// Sends `request`, ends the sending side and reads to the end.
async fn exchange(address: SocketAddr, request: &[u8]) -> Vec<u8> {
    let mut stream = connect(address).await;
    stream.write_all(request).await.unwrap();
    stream.shutdown().await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    answer
}

#[tokio::test]
async fn raw_commands_answer_as_documented() {
    let services = Services::start().await.unwrap();
    let download = exchange(services.raw, b"download 300000\n").await;
    assert_eq!(download, pattern::prefix(300_000));

    let body = pattern::prefix(300_000);
    let mut digest = Digest::default();
    digest.update(&body);
    let upload = exchange(services.raw, &[b"upload 300000\n", &body[..]].concat()).await;
    assert_eq!(upload, format!("{}\n", digest.finish()).into_bytes());

    assert_eq!(exchange(services.raw, b"echo\nabc").await, b"abc");
    assert_eq!(exchange(services.raw, b"download 0\n").await, b"");
}

#[tokio::test]
async fn raw_closes_without_an_answer_after_an_invalid_command() {
    let services = Services::start().await.unwrap();
    let long = [b'a'; 200];
    for line in [b"download x\n".as_slice(), b"\n", b"echo", b"upload 5\nabc"] {
        assert_eq!(exchange(services.raw, line).await, b"", "{line:?}");
    }
    let mut stream = connect(services.raw).await;
    stream.write_all(&long).await.unwrap();
    // The rest of the line is still unread when the service closes, so the client may get a reset.
    let ended = stream.read(&mut [0; 8]).await;
    assert!(matches!(ended, Ok(0) | Err(_)), "{ended:?}");
}

#[tokio::test]
async fn first_sends_its_banner_and_half_counts_bytes() {
    let services = Services::start().await.unwrap();
    let mut stream = connect(services.first).await;
    let mut banner = vec![0; BANNER.len()];
    stream.read_exact(&mut banner).await.unwrap();
    assert_eq!(banner, BANNER);
    stream.write_all(b"x").await.unwrap();
    assert_eq!(stream.read_u8().await.unwrap(), b'x');

    assert_eq!(exchange(services.half, b"12345").await, b"5\n");
}

#[tokio::test]
async fn http_paths_answer_as_documented() {
    let services = Services::start().await.unwrap();
    for path in ["/", "/bytes/0", "/bytes/1000000"] {
        check::http_get(connect(services.http).await, path)
            .await
            .unwrap();
    }
    let request = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc";
    let answer = String::from_utf8(exchange(services.http, request).await).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert!(answer.ends_with("\r\n\r\nabc"), "{answer}");
    let missing = exchange(services.http, b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n").await;
    assert!(missing.starts_with(b"HTTP/1.1 404 "));
}

#[tokio::test]
async fn https_serves_the_http_paths_over_tls() {
    let dir = tempfile::tempdir().unwrap();
    let pki = Pki::create(dir.path()).unwrap();
    let identity = Identity::load(&pki.server.cert, &pki.server.key).unwrap();
    let config = server_config(&identity, None, &[b"http/1.1"], &TlsOptions::default());
    let services = Services::start().await.unwrap();
    let address = services.start_https(config.unwrap()).await.unwrap();
    let tls = pki.client_tls(&pki.client, &["http/1.1"]).unwrap();
    for path in ["/", "/bytes/1000000"] {
        let name = CLUSTER_NAME.try_into().unwrap();
        let stream = connect_tls(address, &tls, &name).await.unwrap();
        check::http_get(stream, path).await.unwrap();
    }
    // A request without TLS gets no answer.
    let refused = check::http_get(connect(address).await, "/").await;
    assert!(refused.is_err(), "{refused:?}");
}

#[tokio::test]
async fn shutdown_closes_open_connections() {
    let services = Services::start().await.unwrap();
    let mut silent = connect(services.silent).await;
    let mut first = connect(services.first).await;
    first.read_exact(&mut [0; BANNER.len()]).await.unwrap();
    assert!(services.open_connections() >= 1);
    let address = services.raw;
    services.shutdown().await;
    for stream in [&mut silent, &mut first] {
        assert!(matches!(stream.read(&mut [0; 1]).await, Ok(0) | Err(_)));
    }
    assert!(TcpStream::connect(address).await.is_err());
}

#[tokio::test]
async fn drop_ends_listeners_and_connections() {
    let services = Services::start().await.unwrap();
    let tasks = services.host.tasks.clone();
    let connections = services.host.connections.clone();
    let mut stream = connect(services.first).await;
    stream.read_exact(&mut [0; BANNER.len()]).await.unwrap();
    drop(services);
    tasks.close();
    tasks.wait().await;
    connections.close();
    connections.wait().await;
    assert!(matches!(stream.read(&mut [0; 1]).await, Ok(0) | Err(_)));
}
