//! Requests from a node to a seed: from a stock Envoy, and from our node tunnel.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use culvert_tests::envoy::{self, Envoy};
use culvert_tests::ports::Ports;
use culvert_tests::{Program, eventually};
use http::{Response, Version};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::timeout;

use super::{Verdicts, authority};
use crate::support::{LIMIT, timely};

/// Starts a seed that sends a description of each request to the receiver, answers with 200 after at most 500
/// ms, and echoes.
async fn seed() -> (SocketAddr, UnboundedReceiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (sees, seen) = unbounded_channel();
    tokio::spawn(async move {
        for connection in 0.. {
            let (stream, _) = listener.accept().await.unwrap();
            let sees = sees.clone();
            tokio::spawn(async move {
                let mut server = h2::server::handshake(stream).await?;
                while let Some(incoming) = server.accept().await {
                    tokio::spawn(serve(incoming?, connection, sees.clone()));
                }
                Ok::<_, h2::Error>(())
            });
        }
    });
    (address, seen)
}

async fn serve(
    (request, mut respond): (
        http::Request<h2::RecvStream>,
        h2::server::SendResponse<Bytes>,
    ),
    connection: usize,
    sees: tokio::sync::mpsc::UnboundedSender<String>,
) -> Result<(), h2::Error> {
    assert_eq!(request.version(), Version::HTTP_2);
    let (head, mut body) = request.into_parts();
    let uri = &head.uri;
    let path = uri.path_and_query().map_or("", |path| path.as_str());
    let request = format!(
        "{} {} scheme {:?} path {path:?}",
        head.method,
        uri.authority().map_or("", |authority| authority.as_str()),
        uri.scheme_str(),
    );
    let early = timeout(Duration::from_millis(500), body.data()).await;
    let early = early.map_or("held back", |_| "sent ahead");
    // The test may have ended.
    sees.send(format!("{connection}: {request}, payload {early}"))
        .ok();
    let mut send = respond.send_response(Response::new(()), false)?;
    while let Some(bytes) = body.data().await {
        let bytes = bytes?;
        body.flow_control().release_capacity(bytes.len())?;
        send.send_data(bytes, false)?;
    }
    send.send_data(Bytes::new(), true)
}

/// Opens 20 connections through a node. Returns the distinct requests at the seed, and `few` or `many` for the
/// number of connections from the node.
async fn look(node: SocketAddr, seen: &mut UnboundedReceiver<String>) -> String {
    let mut clients = Vec::new();
    for _ in 0..20 {
        let mut stream = TcpStream::connect(node).await.unwrap();
        stream.write_all(b"x").await.unwrap();
        clients.push(stream);
    }
    let (mut requests, mut connections) = (Vec::new(), Vec::new());
    for _ in 0..20 {
        let saw = timely("a request", seen.recv()).await.unwrap();
        let (connection, request) = saw.split_once(": ").unwrap();
        connections.push(connection.to_owned());
        requests.push(request.to_owned());
    }
    for mut stream in clients {
        // The seed does not echo early data.
        stream.write_all(b"y").await.unwrap();
        timely("an echo", stream.read_u8()).await.unwrap();
    }
    connections.sort();
    connections.dedup();
    requests.sort();
    requests.dedup();
    let few = if connections.len() <= 2 {
        "few"
    } else {
        "many"
    };
    format!("{}; {few} connections", requests.join(" and "))
}

#[tokio::test]
async fn node_tunnel_requests_look_like_envoys() {
    let Some(envoy) = Envoy::get() else { return };
    let target = authority("raw");
    let mut ports = Ports::default();
    let mut next = || SocketAddr::from(([127, 0, 0, 1], ports.next_port()));
    let [theirs, own, stats] = [(); 3].map(|()| next());

    let (address, mut seen) = seed().await;
    let bootstrap = envoy::node(&mut ports, &[(theirs, target.as_str())], address);
    let _envoy = envoy.start(&bootstrap).await;
    let at_envoy = look(theirs, &mut seen).await;

    let (address, mut seen) = seed().await;
    let args = [
        format!("--proxy={address}"),
        format!("--listen={own}={target}"),
        "--stats-address=127.0.0.1".to_owned(),
        format!("--stats-port={}", stats.port()),
    ];
    let _node = Program::spawn("culvert-node-tunnel", &args, &[]);
    eventually("the node tunnel listens", LIMIT, async || {
        TcpStream::connect(stats).await.map(|_| ())
    })
    .await;
    let at_ours = look(own, &mut seen).await;
    Verdicts::default().differ(
        "a node's request",
        [at_envoy, at_ours],
        "CONNECT raw.demo.svc.cluster.local:443 scheme None path \"\", payload held back; few connections",
        "CONNECT raw.demo.svc.cluster.local:443 scheme None path \"\", payload held back; few connections",
    );
}
