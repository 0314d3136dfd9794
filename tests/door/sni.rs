//! TLS connections, routed by server name.

use culvert_tests::eventually;
use culvert_tests::hello::client_hello;
use culvert_tests::metrics::http_get;
use culvert_tests::skip::skip;
use rustix::process::{Resource, getrlimit};
use rustls::version::{TLS12, TLS13};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::{Door, LIMIT, TlsEndpoint, Upstream, ask, connect_from, converse, timely};

async fn two() -> (Door, TlsEndpoint, TlsEndpoint) {
    let one = TlsEndpoint::start("one.example.com").await;
    let other = TlsEndpoint::start("two.apps.example.com").await;
    let door = Door::start(&[
        Upstream::new("ns/one", one.address).server_name("One.example.com"),
        Upstream::new("ns/two", other.address).server_name("*.apps.example.com"),
    ])
    .await;
    (door, one, other)
}

#[tokio::test]
async fn each_name_reaches_its_service_without_decryption() {
    let (door, one, other) = two().await;
    for versions in [&[&TLS12][..], &[&TLS13], &[&TLS13, &TLS12]] {
        // The client checks the endpoint's own certificate.
        let mut stream = one
            .connect(door.sni, "one.example.com", versions)
            .await
            .unwrap();
        assert_eq!(ask(&mut stream).await, "one.example.com");
        let mut stream = other
            .connect(door.sni, "two.apps.example.com", versions)
            .await
            .unwrap();
        assert_eq!(ask(&mut stream).await, "two.apps.example.com");
    }
    let mut shouting = one
        .connect(door.sni, "ONE.Example.COM", &[&TLS13])
        .await
        .unwrap();
    assert_eq!(ask(&mut shouting).await, "one.example.com");
    drop(shouting);
    door.is_idle().await;
    let labels = [("envoy_cluster_name", "ns/one")];
    assert_eq!(
        door.value("envoy_cluster_upstream_cx_total", &labels).await,
        4.0
    );
    assert_eq!(
        door.value("envoy_cluster_upstream_cx_active", &labels)
            .await,
        0.0
    );
    assert!(
        door.value("envoy_cluster_upstream_cx_tx_bytes_total", &labels)
            .await
            > 500.0
    );
}

#[tokio::test]
async fn connections_without_a_known_name_are_closed_and_counted() {
    let (door, one, _other) = two().await;
    let unknown = one.connect(door.sni, "example.com", &[&TLS13]).await;
    assert!(unknown.is_err());
    door.has_refused("sni", "unknown", 1.0).await;
    // An IP address is not a valid server name, so the client omits the extension.
    let nameless = one.connect(door.sni, "127.0.0.1", &[&TLS13]).await;
    assert!(nameless.is_err());
    door.has_refused("sni", "no_server_name", 1.0).await;
    assert_eq!(converse(door.sni, b"GET / HTTP/1.1\r\n\r\n").await, b"");
    assert_eq!(converse(door.sni, b"\x16\x03\x01\x00\x05hello").await, b"");
    door.has_refused("sni", "garbage", 2.0).await;
    one.answers(door.sni, "one.example.com").await;
}

#[tokio::test]
async fn a_client_hello_in_single_bytes_is_routed() {
    let (door, one, _other) = two().await;
    // The relay sends each byte separately.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let relay = listener.local_addr().unwrap();
    let sni = door.sni;
    tokio::spawn(async move {
        let (mut client, _) = listener.accept().await.unwrap();
        let mut server = TcpStream::connect(sni).await.unwrap();
        server.set_nodelay(true).unwrap();
        let (mut client_read, mut client_write) = client.split();
        let (mut server_read, mut server_write) = server.split();
        let up = async {
            let mut byte = [0];
            while client_read.read(&mut byte).await? == 1 {
                server_write.write_all(&byte).await?;
                tokio::task::yield_now().await;
            }
            std::io::Result::Ok(())
        };
        let _ = tokio::join!(up, tokio::io::copy(&mut server_read, &mut client_write));
    });
    one.answers(relay, "one.example.com").await;
}

/// Number of silent connections to open.
const SILENT: usize = 10_000;

/// Returns [`SILENT`], or a smaller number if the limit of open files is too low. The test and the proxy both
/// raise their limits. The margin is for other tests in this process.
fn many() -> usize {
    culvert_host::runtime::set_open_file_limit();
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    // Five addresses get five sixths of the descriptors, apart from the reserve.
    if limit >= SILENT + 4_000 {
        return SILENT;
    }
    let count = limit / 2;
    skip(&format!(
        "the limit of {limit} open files allows only {count} of {SILENT} silent connections"
    ));
    count
}

#[tokio::test]
async fn thousands_of_silent_connections_do_not_affect_other_clients() {
    let (door, one, _other) = two().await;
    let resident = door.value("process_resident_memory_bytes", &[]).await;
    let count = many();
    let mut silent = Vec::new();
    // From several addresses: one address may use only a part of the descriptors.
    for host in (1..=5).cycle().take(count) {
        silent.push(connect_from([127, 0, 0, host], door.sni).await);
    }
    one.answers(door.sni, "one.example.com").await;
    let open = [("listener", "sni")];
    culvert_tests::eventually("all connections are accepted", LIMIT, async || {
        let open = door
            .value("culvert_nodeport_proxy_connections", &open)
            .await;
        (open >= count as f64).then_some(()).ok_or(open)
    })
    .await;
    let each = (door.value("process_resident_memory_bytes", &[]).await - resident) / count as f64;
    assert!(each < 8_192.0, "{each} bytes per connection");
    // The door closes a silent connection after 15 s; `timely` waits slightly longer.
    timely("the end of the silent connections", async {
        for stream in &mut silent {
            assert_eq!(stream.read(&mut [0]).await.unwrap_or(0), 0);
        }
    })
    .await;
    assert_eq!(door.refused("sni", "timeout").await, count as f64);
}

#[tokio::test]
async fn connections_to_endpoints_leave_descriptors_for_health_checks() {
    const NAME: &str = "api.example.com";
    let endpoint = TlsEndpoint::start(NAME).await;
    let upstream = Upstream::new("ns/api", endpoint.address).server_name(NAME);
    let door = Door::start_limited(&[upstream], 300).await;
    let mut clients = Vec::new();
    for host in 10..60 {
        for _ in 0..4 {
            clients.push(connect_from([127, 0, 0, host], door.sni).await);
        }
    }
    let labels = [("listener", "sni")];
    eventually("all clients are accepted", LIMIT, async || {
        let open = door
            .value("culvert_nodeport_proxy_connections", &labels)
            .await;
        (open == 200.0).then_some(()).ok_or(open)
    })
    .await;
    // The connections to the endpoint come after the clients, and need more descriptors than are free.
    let hello = client_hello(NAME);
    for client in &mut clients {
        client.write_all(&hello).await.unwrap();
    }
    eventually("connections to the endpoint fail", LIMIT, async || {
        let refused = door.refused("sni", "upstream").await;
        (refused > 10.0).then_some(()).ok_or(refused)
    })
    .await;
    let mut idle = Vec::new();
    for _ in 0..5 {
        idle.push(TcpStream::connect(door.stats).await.unwrap());
    }
    let answer = timely("an answer", http_get(door.stats, "/healthz")).await;
    assert!(answer.unwrap().0.is_success());
}
