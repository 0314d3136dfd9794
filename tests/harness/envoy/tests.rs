use culvert_kit::services::{BANNER, HELLO, Services};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;

use super::*;
use crate::hello::client_hello;

const AUTHORITY: &str = "web.ns.svc.cluster.local:80";

/// Connects to the service that echoes after a banner, by the server name `name`. Returns the received bytes,
/// which are fewer if the connection is closed early, and the expected bytes.
pub(crate) async fn echoed(door: SocketAddr, name: &str) -> (Vec<u8>, Vec<u8>) {
    let hello = client_hello(name);
    let expected = [BANNER, &hello].concat();
    let mut stream = TcpStream::connect(door).await.unwrap();
    stream.write_all(&hello).await.unwrap();
    let mut heard = Vec::new();
    // A reset also ends the stream.
    let limit = u64::try_from(expected.len()).unwrap();
    stream.take(limit).read_to_end(&mut heard).await.ok();
    (heard, expected)
}

/// Sends a CONNECT and returns the status line of the answer.
async fn connect(tunnel: SocketAddr, authority: &str) -> String {
    let mut stream = TcpStream::connect(tunnel).await.unwrap();
    let request = format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).await.unwrap();
    line
}

/// Creates a seed with a web server behind the authority and a node port, and an echo service behind a server
/// name.
async fn seed(ports: &mut Ports, node_port: u16) -> (Seed, Services) {
    let services = Services::start().await.unwrap();
    let mut seed = Seed::new(ports);
    let clusters = [("ns/web", services.http), ("ns/echo", services.first)];
    seed.clusters = clusters
        .map(|(name, at)| (name.to_owned(), vec![at]))
        .into();
    seed.server_names = [("echo.example.com".to_owned(), "ns/echo".to_owned())].into();
    seed.authorities = [(AUTHORITY.to_owned(), "ns/web".to_owned())].into();
    seed.node_ports = [(node_port, "ns/web".to_owned())].into();
    (seed, services)
}

#[tokio::test]
async fn seed_routes_by_server_name_authority_and_node_port() {
    let Some(envoy) = Envoy::get() else { return };
    let mut ports = Ports::default();
    let node_port = ports.next_port();
    let (seed, _services) = seed(&mut ports, node_port).await;
    let _running = envoy.start(&seed.bootstrap()).await;

    let (heard, expected) = echoed(seed.sni, "echo.example.com").await;
    assert_eq!(heard, expected);
    let (heard, _) = echoed(seed.sni, "other.example.com").await;
    assert_eq!(heard, b"");
    let known = connect(seed.tunnel, AUTHORITY).await;
    assert_eq!(known, "HTTP/1.1 200 OK\r\n");
    let unknown = connect(seed.tunnel, "web.ns.svc.cluster.local:81").await;
    assert_eq!(unknown, "HTTP/1.1 404 Not Found\r\n");
    let at = SocketAddr::from((Ipv4Addr::LOCALHOST, node_port));
    assert_eq!(http_get(at, "/").await.unwrap().2, HELLO);
    let (status, ..) = http_get(seed.stats, "/healthz").await.unwrap();
    assert!(status.is_success(), "{status}");
}

#[tokio::test]
async fn envoy_follows_changes_of_the_seed_files() {
    let Some(envoy) = Envoy::get() else { return };
    let mut ports = Ports::default();
    let node_port = ports.next_port();
    let (mut seed, services) = seed(&mut ports, node_port).await;
    let dir = tempfile::tempdir().unwrap();
    let bootstrap = seed.following(dir.path()).allowing(2000);
    let _running = envoy.start(&bootstrap).await;
    let at = SocketAddr::from((Ipv4Addr::LOCALHOST, node_port));
    assert_eq!(http_get(at, "/").await.unwrap().2, HELLO);

    seed.clusters.insert("ns/web".into(), vec![services.first]);
    seed.write_clusters(dir.path());
    eventually(
        "the node port leads to the other service",
        PATIENCE,
        async || {
            let mut banner = vec![0; BANNER.len()];
            let mut stream = TcpStream::connect(at).await?;
            stream.write_all(b"GET / HTTP/1.0\r\n\r\n").await?;
            stream.read_exact(&mut banner).await?;
            anyhow::ensure!(banner == BANNER, "{banner:?}");
            anyhow::Ok(())
        },
    )
    .await;
}

#[tokio::test]
async fn a_node_reaches_a_service_through_the_seed() {
    let Some(envoy) = Envoy::get() else { return };
    let mut ports = Ports::default();
    let node_port = ports.next_port();
    let (seed, _services) = seed(&mut ports, node_port).await;
    let _seed = envoy.start(&seed.bootstrap()).await;
    let listen = local(&mut ports);
    let node = node(&mut ports, &[(listen, AUTHORITY)], seed.tunnel);
    let _node = envoy.start(&node).await;
    assert_eq!(http_get(listen, "/").await.unwrap().2, HELLO);
}
