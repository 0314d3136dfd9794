//! Hops between agent and server. The TLS handshake alone selects the transport.

use std::net::{Ipv4Addr, SocketAddr};

use culvert_kit::check;
use culvert_kit::services::Services;
use culvert_tests::balancer::Balancer;
use culvert_tests::{Mode, Topology, Transport};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;

use crate::endpoints::Endpoint;
use crate::scripts::acceptor;
use crate::searching::Lone;
use crate::support::*;

/// Starts an agent behind the hop at `by`, and checks the transport in the agent's log.
async fn around(topology: &Topology, by: SocketAddr, native: bool) -> Lone {
    let mut lone = Lone::new();
    lone.pki = topology.pki().clone();
    lone.start(&[&format!("--proxy-server-port={}", by.port())], &[]);
    let chosen = format!("native={native}");
    let line = lone.program().wait_for_log("connected to a server", LIMIT);
    let line = line.await;
    assert!(line.contains(&chosen), "{line}");
    server_shows(topology, "ready_backends", &[], 1.0).await;
    lone
}

async fn server_alone() -> Topology {
    let builder = Topology::builder(Mode::HttpConnect, Transport::Uds);
    builder.servers(1).start().await
}

async fn carries_everything(topology: &Topology) {
    let services = Services::start().await.unwrap();
    let raw = services.raw.to_string();
    let (size, mut innocent) = (8 << 20, Innocent::open(topology, services.raw).await);
    let download = check::download(open(topology, &raw).await, size);
    timely("a download", download).await.unwrap();
    let upload = check::upload(open(topology, &raw).await, size);
    timely("an upload", upload).await.unwrap();
    let error = refusal(topology, "127.0.0.1:1").await;
    let text = "dial tcp 127.0.0.1:1: connect: connection refused";
    assert_refused(&error, 502, text, text);

    let mut asks = open(topology, &services.half.to_string()).await;
    asks.write_all(&[7; 100_000]).await.unwrap();
    asks.shutdown().await.unwrap();
    assert_eq!(read_rest(&mut asks).await, b"100000\n");

    let endpoint = Endpoint::start().await;
    let mut stream = open(topology, &endpoint.addr().to_string()).await;
    let mut far = endpoint.accept().await;
    far.write_all(b"the last I say").await.unwrap();
    far.shutdown().await.unwrap();
    assert_eq!(read_rest(&mut stream).await, b"the last I say");
    stream.write_all(b"heard").await.unwrap();
    stream.shutdown().await.unwrap();
    let mut heard = Vec::new();
    timely("the end", far.read_to_end(&mut heard))
        .await
        .unwrap();
    assert_eq!(heard, b"heard");
    innocent.still_echoes("half closes").await;
    drop(innocent);
    server_is_idle(topology).await;
    let metrics = topology.server_metrics(0).await;
    let finished = [("reason", "finished")];
    let closed = value(&metrics, "culvert_connections_closed_total", &finished);
    assert!(closed >= 4.0, "only {closed} connections finished in order");
}

#[tokio::test]
async fn tcp_relay_keeps_the_native_transport() {
    let topology = server_alone().await;
    let relay = Balancer::start(vec![topology.agent_address(0)]).await;
    let _agent = around(&topology, relay.addr(), true).await;
    carries_everything(&topology).await;
}

/// Starts a hop that terminates TLS and offers only HTTP/2 on both sides, as a gRPC proxy does. Returns the
/// hop's address.
async fn tls_hop(topology: &Topology) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let addr = listener.local_addr().unwrap();
    let pki = topology.pki().clone();
    let server = topology.agent_address(0);
    let near = acceptor(&pki.cluster.cert, &pki.cluster.key);
    let far = TlsConnector::from(pki.client_tls(&pki.agent, &["h2"]).unwrap());
    tokio::spawn(async move {
        loop {
            let (agent, _) = listener.accept().await.unwrap();
            let (near, far) = (near.clone(), far.clone());
            tokio::spawn(async move {
                let mut agent = near.accept(agent).await?;
                let socket = TcpStream::connect(server).await?;
                let name = "localhost".try_into().unwrap();
                let mut server = far.connect(name, socket).await?;
                copy_bidirectional(&mut agent, &mut server).await
            });
        }
    });
    addr
}

/// Our programs fall back to the packet transport, which also carries half closes between our programs.
#[tokio::test]
async fn http2_only_tls_hop_causes_the_packet_transport() {
    let topology = server_alone().await;
    let hop = tls_hop(&topology).await;
    let _agent = around(&topology, hop, false).await;
    carries_everything(&topology).await;
}
