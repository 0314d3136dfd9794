//! Readers that stop reading.

use culvert::lab::client::BoxedStream;
use culvert::lab::services::Services;
use culvert_tests::{Mode, Topology, Transport, eventually};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::endpoints::Endpoint;
use crate::support::*;

const CLOSED: &str = "culvert_connections_closed_total";

/// More than all buffers on the way hold.
const FLOOD: u64 = 1 << 30;

/// A client that asks for a flood and reads nothing of it.
async fn stalled_reader(topology: &Topology, services: &Services) -> BoxedStream {
    let mut stream = open(topology, &services.raw.to_string()).await;
    stream
        .write_all(format!("download {FLOOD}\n").as_bytes())
        .await
        .unwrap();
    stream.flush().await.unwrap();
    stream
}

async fn server_closed_one(topology: &Topology) {
    eventually("the stalled connection is closed", LIMIT, async || {
        let metrics = topology.server_metrics(0).await;
        let stalled = value(&metrics, CLOSED, &[("reason", "stalled")]);
        (stalled == 1.0)
            .then_some(())
            .ok_or_else(|| stalled.to_string())
    })
    .await;
}

async fn a_client_that_stops_reading(mode: Mode, transport: Transport) {
    let services = Services::start().await.unwrap();
    let mut topology = Topology::simple(mode, transport).await;
    let mut innocent = Innocent::open(&topology, services.raw).await;
    let mut stalled = stalled_reader(&topology, &services).await;
    let full = [("service_method", "Connect")];
    server_shows(&topology, "full_receive_channels", &full, 1.0).await;
    // Waits at most for the stall limit, however much time the test has.
    innocent.still_echoes("the stall").await;
    server_closed_one(&topology).await;
    server_shows(&topology, "full_receive_channels", &full, 0.0).await;
    Innocent::open(&topology, services.raw)
        .await
        .still_echoes("the stall, anew")
        .await;
    // What was on its way is all that the client still gets.
    let mut nowhere = tokio::io::sink();
    let rest = tokio::io::copy(&mut stalled, &mut nowhere);
    let rest = timely("the stalled client's end", rest)
        .await
        .unwrap_or_default();
    assert!(rest < FLOOD);
    drop((stalled, innocent));
    server_is_idle(&topology).await;
    agent_shows(&topology, "open_endpoint_connections", &[], 0.0).await;
    let closed = async || services.open_connections() == 0;
    eventually("the endpoints' connections ended", LIMIT, closed).await;
    assert_unharmed(&mut topology);
}

#[tokio::test]
async fn connect_clients_that_stop_reading() {
    tokio::join!(
        a_client_that_stops_reading(Mode::HttpConnect, Transport::Uds),
        a_client_that_stops_reading(Mode::HttpConnect, Transport::Tcp),
    );
}

#[tokio::test]
async fn a_grpc_client_that_stops_reading() {
    a_client_that_stops_reading(Mode::Grpc, Transport::Uds).await;
}

#[tokio::test]
async fn an_endpoint_that_stops_reading() {
    let services = Services::start().await.unwrap();
    let mut topology = Topology::simple(Mode::HttpConnect, Transport::Uds).await;
    let mut innocent = Innocent::open(&topology, services.raw).await;
    let mut stream = open(&topology, &services.silent.to_string()).await;
    let flood = tokio::spawn(async move {
        let piece = vec![0; 64 * 1024];
        while stream.write_all(&piece).await.is_ok() {}
    });
    eventually(
        "the agent closes the stalled connection",
        LIMIT,
        async || {
            let metrics = topology.agent_metrics(0).await;
            value(&metrics, CLOSED, &[("reason", "stalled")]) == 1.0
        },
    )
    .await;
    timely("the flood ends", flood).await.unwrap();
    innocent.still_echoes("a stalled endpoint").await;
    drop(innocent);
    server_is_idle(&topology).await;
    agent_shows(&topology, "open_endpoint_connections", &[], 0.0).await;
    assert_unharmed(&mut topology);
}

#[tokio::test]
async fn a_slow_reader_is_no_stalled_one() {
    let services = Services::start().await.unwrap();
    let topology = Topology::simple(Mode::HttpConnect, Transport::Uds).await;
    let count = 64 * 1024 * 1024;
    let mut stream = open(&topology, &services.raw.to_string()).await;
    stream
        .write_all(format!("download {count}\n").as_bytes())
        .await
        .unwrap();
    let full = [("service_method", "Connect")];
    server_shows(&topology, "full_receive_channels", &full, 1.0).await;
    let mut received = 0;
    let mut buffer = vec![0; 64 * 1024];
    while received < count {
        // Another connection's round trip between any two reads.
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
async fn a_client_that_leaves_unread_bytes_behind_leaves_nothing_else() {
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
