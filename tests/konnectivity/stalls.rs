//! Stalled readers between our programs.

use std::time::Duration;

use culvert_kit::client::{BoxedStream, FrontEnd, connect_tls};
use culvert_kit::services::Services;
use culvert_tests::{Mode, Topology, Transport, eventually};
use socket2::SockRef;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::Instant;

use crate::endpoints::Endpoint;
use crate::support::*;

/// Size of a download, in bytes. More than all buffers on the path can store.
const FLOOD: u64 = 1 << 30;

/// Time without progress after which a connection counts as stalled. Longer than the `--stall-timeout` of 1 s
/// in these tests, which would close a connection in a packet stream.
const STILL: Duration = Duration::from_millis(2500);

/// Opens a connection, requests a flood and reads nothing.
async fn stalled_reader(topology: &Topology, services: &Services) -> BoxedStream {
    let mut stream = open(topology, &services.raw.to_string()).await;
    stream
        .write_all(format!("download {FLOOD}\n").as_bytes())
        .await
        .unwrap();
    stream.flush().await.unwrap();
    stream
}

/// Between our programs, the server waits for a stalled client without a time limit. In the end, the client
/// leaves without reading the bytes.
async fn a_client_that_stops_reading(mode: Mode, transport: Transport) {
    let services = Services::start().await.unwrap();
    let builder = Topology::builder(mode, transport).servers(1).agents(1);
    // Far shorter than the stall, but without effect between our programs.
    let builder = builder.server_args(&["--stall-timeout=1s"]);
    let mut topology = builder.start().await;
    let mut innocent = Innocent::open(&topology, services.raw).await;
    let stalled = stalled_reader(&topology, &services).await;
    innocent.still_echoes("the stall").await;
    // Waits until TCP's buffers and the windows are full.
    nothing_moves(&topology).await;
    server_shows(&topology, "established_connections", &[], 2.0).await;
    Innocent::open(&topology, services.raw)
        .await
        .still_echoes("a new connection during the stall")
        .await;
    assert_eq!(closed_as_slow(&topology.server_metrics(0).await), 0.0);
    drop((stalled, innocent));
    server_is_idle(&topology).await;
    agent_shows(&topology, "open_endpoint_connections", &[], 0.0).await;
    let closed = async || services.open_connections() == 0;
    eventually("the endpoints' connections ended", LIMIT, closed).await;
    assert_unharmed(&mut topology).await;
}

/// Waits until the server has transferred nothing for `STILL`.
async fn nothing_moves(topology: &Topology) {
    let mut last = (f64::NAN, Instant::now());
    eventually("no more bytes move", LIMIT, async || {
        let metrics = topology.server_metrics(0).await;
        let bytes = value(&metrics, "culvert_tunnel_bytes_total", &[]);
        if bytes != last.0 {
            last = (bytes, Instant::now());
        }
        (last.1.elapsed() > STILL).then_some(()).ok_or(bytes)
    })
    .await;
}

#[tokio::test]
async fn connect_clients_that_stop_reading_stay_open() {
    tokio::join!(
        a_client_that_stops_reading(Mode::HttpConnect, Transport::Uds),
        a_client_that_stops_reading(Mode::HttpConnect, Transport::Tcp),
    );
}

#[tokio::test]
async fn grpc_client_that_stops_reading_stays_open() {
    a_client_that_stops_reading(Mode::Grpc, Transport::Uds).await;
}

#[tokio::test]
async fn endpoint_that_stops_reading_stays_open() {
    let services = Services::start().await.unwrap();
    let builder = Topology::builder(Mode::HttpConnect, Transport::Uds);
    let builder = builder.servers(1).agents(1);
    let builder = builder.agent_args(&["--stall-timeout=1s"]);
    let mut topology = builder.start().await;
    let mut innocent = Innocent::open(&topology, services.raw).await;
    let mut stream = open(&topology, &services.silent.to_string()).await;
    let flood = tokio::spawn(async move {
        let piece = vec![0; 64 * 1024];
        while stream.write_all(&piece).await.is_ok() {}
    });
    nothing_moves(&topology).await;
    innocent.still_echoes("a stalled endpoint").await;
    assert!(!flood.is_finished());
    assert_eq!(closed_as_slow(&topology.agent_metrics(0).await), 0.0);
    // The client leaves. The unread bytes must not keep the connection open.
    flood.abort();
    drop(innocent);
    server_is_idle(&topology).await;
    drop(services);
    agent_shows(&topology, "open_endpoint_connections", &[], 0.0).await;
    assert_unharmed(&mut topology).await;
}

/// A TLS client may leave before or after the end of its bytes, while the endpoint reads nothing.
#[tokio::test]
async fn reset_of_a_tls_client_is_noticed_beside_a_silent_endpoint() {
    let services = Services::start().await.unwrap();
    let topology = Topology::simple(Mode::HttpConnect, Transport::Tcp).await;
    let FrontEnd::ConnectTcp {
        addr,
        tls,
        server_name,
    } = topology.front_end()
    else {
        panic!("a CONNECT front end over TLS");
    };
    let open = async || {
        let mut stream = connect_tls(*addr, tls, server_name).await.unwrap();
        let request = format!("CONNECT {} HTTP/1.1\r\n\r\n", services.silent);
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut head = [0; 12];
        stream.read_exact(&mut head).await.unwrap();
        assert_eq!(&head, b"HTTP/1.1 200");
        let socket = SockRef::from(stream.get_ref().0);
        socket.set_linger(Some(Duration::ZERO)).unwrap();
        stream
    };
    let (mut flooding, mut ended) = (open().await, open().await);
    timely("the end", ended.shutdown()).await.unwrap();
    let flood = tokio::spawn(async move {
        let piece = vec![0; 64 * 1024];
        while flooding.write_all(&piece).await.is_ok() {}
    });
    nothing_moves(&topology).await;
    server_shows(&topology, "established_connections", &[], 2.0).await;
    flood.abort();
    drop(ended);
    server_is_idle(&topology).await;
    drop(services);
    agent_shows(&topology, "open_endpoint_connections", &[], 0.0).await;
}

#[tokio::test]
async fn slow_reader_is_not_closed_as_stalled() {
    let services = Services::start().await.unwrap();
    let topology = Topology::simple(Mode::HttpConnect, Transport::Uds).await;
    let count = 64 * 1024 * 1024;
    let mut stream = open(&topology, &services.raw.to_string()).await;
    stream
        .write_all(format!("download {count}\n").as_bytes())
        .await
        .unwrap();
    nothing_moves(&topology).await;
    let mut received = 0;
    let mut buffer = vec![0; 64 * 1024];
    while received < count {
        // Slows the reader down by a round trip of another connection.
        if received % (8 * 1024 * 1024) == 0 {
            topology.server_metrics(0).await;
        }
        let n = timely("bytes", stream.read(&mut buffer)).await.unwrap();
        assert_ne!(n, 0, "ended after {received}");
        received += n as u64;
    }
    assert!(read_rest(&mut stream).await.is_empty());
}

#[tokio::test]
async fn client_that_leaves_with_unread_bytes_leaks_nothing() {
    let endpoint = Endpoint::start().await;
    let topology = Topology::simple(Mode::HttpConnect, Transport::Uds).await;
    let mut stream = open(&topology, &endpoint.addr().to_string()).await;
    let mut far = endpoint.accept().await;
    far.write_all(&vec![1; 100_000]).await.unwrap();
    assert_eq!(timely("a byte", stream.read_u8()).await.unwrap(), 1);
    drop(stream);
    let mut rest = Vec::new();
    timely("the end at the endpoint", far.read_to_end(&mut rest))
        .await
        .ok();
    assert!(rest.is_empty());
    server_is_idle(&topology).await;
}
