//! Closes and the bytes before them, with our programs at both ends.

use std::net::SocketAddr;

use culvert_kit::check;
use culvert_kit::client::BoxedStream;
use culvert_kit::pattern::{self, Digest};
use culvert_kit::services::{BANNER, Services};
use culvert_tests::{Mode, Topology, Transport};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use crate::endpoints::{Endpoint, reset};
use crate::support::*;

const MIB: u64 = 1024 * 1024;

/// Both kinds of front-end sockets in CONNECT mode. Only CONNECT mode has half closes.
const CONNECTS: [Transport; 2] = [Transport::Uds, Transport::Tcp];

async fn send(stream: &mut (impl AsyncWrite + Unpin), count: u64) {
    for piece in pattern::pieces(count) {
        stream.write_all(&piece).await.expect("sending");
    }
    stream.flush().await.expect("flushing");
}

fn digest_of(count: u64) -> String {
    let mut digest = Digest::default();
    for piece in pattern::pieces(count) {
        digest.update(&piece);
    }
    digest.finish()
}

/// Reads to the end. Returns the number of bytes and their digest.
async fn digest_to_end(stream: &mut (impl AsyncRead + Unpin)) -> (u64, String) {
    let mut digest = Digest::default();
    let mut buffer = vec![0; 64 * 1024];
    let mut count = 0;
    loop {
        match timely("bytes or an end", stream.read(&mut buffer)).await {
            Ok(0) | Err(_) => return (count, digest.finish()),
            Ok(n) => {
                count += n as u64;
                digest.update(&buffer[..n]);
            }
        }
    }
}

#[tokio::test]
async fn client_that_half_closes_gets_its_answer() {
    let services = Services::start().await.unwrap();
    for transport in CONNECTS {
        let topology = Topology::simple(Mode::HttpConnect, transport).await;
        let mut stream = open(&topology, &services.half.to_string()).await;
        send(&mut stream, MIB).await;
        stream.shutdown().await.unwrap();
        let answer = read_rest(&mut stream).await;
        assert_eq!(
            String::from_utf8_lossy(&answer),
            format!("{MIB}\n"),
            "{transport:?}"
        );
        drop(stream);
        server_is_idle(&topology).await;
        let reasons = topology.server_metrics(0).await;
        let finished = [("reason", "finished")];
        let count = reasons.value("culvert_connections_closed_total", &finished);
        assert_eq!(count, Some(1.0), "{}", reasons.text());
    }
}

#[tokio::test]
async fn endpoint_that_half_closes_still_receives() {
    for transport in CONNECTS {
        let endpoint = Endpoint::start().await;
        let topology = Topology::simple(Mode::HttpConnect, transport).await;
        let mut stream = open(&topology, &endpoint.addr().to_string()).await;
        let mut far = endpoint.accept().await;
        far.write_all(b"last bytes").await.unwrap();
        far.shutdown().await.unwrap();
        assert_eq!(read_rest(&mut stream).await, b"last bytes");
        let sends = async {
            send(&mut stream, MIB).await;
            stream.shutdown().await.unwrap();
        };
        let ((), received) = tokio::join!(sends, digest_to_end(&mut far));
        assert_eq!(received, (MIB, digest_of(MIB)), "{transport:?}");
        drop(far);
        server_is_idle(&topology).await;
        agent_shows(&topology, "open_endpoint_connections", &[], 0.0).await;
    }
}

#[tokio::test]
async fn bytes_before_the_clients_close_arrive() {
    for (mode, transport) in FRONTS {
        let endpoint = Endpoint::start().await;
        let topology = Topology::simple(mode, transport).await;
        for round in 0..5 {
            let mut stream = open(&topology, &endpoint.addr().to_string()).await;
            let mut far = endpoint.accept().await;
            let sends = async {
                send(&mut stream, MIB).await;
                stream.shutdown().await.unwrap();
                // A gRPC client waits for the answer to its close, as the stock client does.
                if mode == Mode::Grpc {
                    assert!(read_rest(&mut stream).await.is_empty());
                }
                drop(stream);
            };
            let ((), received) = tokio::join!(sends, digest_to_end(&mut far));
            let expected = (MIB, digest_of(MIB));
            assert_eq!(received, expected, "{mode:?} {transport:?}, round {round}");
        }
        server_is_idle(&topology).await;
        let reasons = topology.server_metrics(0).await;
        let lost = [("reason", "client_lost")];
        let count = reasons.value("culvert_connections_closed_total", &lost);
        assert_eq!(count.unwrap_or_default(), 0.0, "{}", reasons.text());
    }
}

#[tokio::test]
async fn bytes_before_the_endpoints_close_arrive() {
    for (mode, transport) in FRONTS {
        let endpoint = Endpoint::start().await;
        let topology = Topology::simple(mode, transport).await;
        for round in 0..5 {
            let mut stream = open(&topology, &endpoint.addr().to_string()).await;
            let mut far = endpoint.accept().await;
            let sends = async {
                send(&mut far, MIB).await;
                drop(far);
            };
            let ((), received) = tokio::join!(sends, digest_to_end(&mut stream));
            let expected = (MIB, digest_of(MIB));
            assert_eq!(received, expected, "{mode:?} {transport:?}, round {round}");
        }
        server_is_idle(&topology).await;
        // gRPC has no half close.
        if mode == Mode::Grpc {
            let metrics = topology.server_metrics(0).await;
            let labels = [("reason", "endpoint_closed")];
            let closed = value(&metrics, "culvert_connections_closed_total", &labels);
            assert_eq!(closed, 5.0, "{transport:?}: {}", metrics.text());
        }
    }
}

#[tokio::test]
async fn ten_mib_transfers_arrive_intact_in_every_mode() {
    let services = Services::start().await.unwrap();
    let raw = services.raw.to_string();
    for (mode, transport) in FRONTS {
        let topology = Topology::simple(mode, transport).await;
        let download = check::download(open(&topology, &raw).await, 10 * MIB);
        timely("a download", download).await.unwrap();
        let upload = check::upload(open(&topology, &raw).await, 10 * MIB);
        timely("an upload", upload).await.unwrap();
        server_is_idle(&topology).await;
        let metrics = topology.server_metrics(0).await;
        for direction in ["to_endpoint", "from_endpoint"] {
            let labels = [("direction", direction)];
            let bytes = value(&metrics, "culvert_tunnel_bytes_total", &labels);
            assert!(bytes >= (10 * MIB) as f64, "{direction}: {bytes}");
        }
    }
}

#[tokio::test]
async fn concurrent_echoes_keep_their_bytes_apart() {
    let services = Services::start().await.unwrap();
    for (mode, transport) in FRONTS {
        let topology = Topology::simple(mode, transport).await;
        let mut echoes = tokio::task::JoinSet::new();
        for size in 1..=20_u64 {
            let stream = open(&topology, &services.raw.to_string()).await;
            echoes.spawn(check::echo(stream, 5, size * 10_007));
        }
        while let Some(echoed) = timely("echoes", echoes.join_next()).await {
            echoed.unwrap().unwrap();
        }
        server_is_idle(&topology).await;
    }
}

#[tokio::test]
async fn first_bytes_of_an_endpoint_reach_a_client_that_has_sent_nothing() {
    let services = Services::start().await.unwrap();
    for (mode, transport) in FRONTS {
        let topology = Topology::simple(mode, transport).await;
        for _ in 0..10 {
            let mut stream = open(&topology, &services.first.to_string()).await;
            let mut banner = vec![0; BANNER.len()];
            timely("a banner", stream.read_exact(&mut banner))
                .await
                .unwrap();
            assert_eq!(banner, BANNER);
        }
    }
}

/// Opens one connection and returns both ends.
async fn pair(topology: &Topology, endpoint: &Endpoint) -> (BoxedStream, tokio::net::TcpStream) {
    let target: SocketAddr = endpoint.addr();
    let stream = open(topology, &target.to_string()).await;
    (stream, endpoint.accept().await)
}

#[tokio::test]
async fn resets_are_forwarded_as_closes() {
    for (mode, transport) in FRONTS {
        let endpoint = Endpoint::start().await;
        let topology = Topology::simple(mode, transport).await;
        let (mut stream, far) = pair(&topology, &endpoint).await;
        reset(far);
        assert!(read_rest(&mut stream).await.is_empty());
        drop(stream);
        let (stream, mut far) = pair(&topology, &endpoint).await;
        drop(stream);
        let (count, _) = digest_to_end(&mut far).await;
        assert_eq!(count, 0);
        drop(far);
        server_is_idle(&topology).await;
        agent_shows(&topology, "open_endpoint_connections", &[], 0.0).await;
    }
}

/// Models an HTTP service that refuses an upload: the service answers, then closes without reading the rest.
#[tokio::test]
async fn early_answer_arrives_although_the_upload_was_not_read() {
    const ANSWER: &[u8] = b"413 too large\n";
    for (mode, transport) in FRONTS {
        let topology = Topology::simple(mode, transport).await;
        let endpoint = Endpoint::start().await;
        let stream = open(&topology, &endpoint.addr().to_string()).await;
        let (mut read, mut write) = tokio::io::split(stream);
        let upload = async {
            for piece in pattern::pieces(8 * MIB) {
                // The tunnel may close the connection during the upload.
                if write.write_all(&piece).await.is_err() {
                    return;
                }
            }
        };
        let refuse = async {
            let mut socket = endpoint.accept().await;
            let mut first = [0; 1024];
            socket.read_exact(&mut first).await.expect("an upload");
            socket.write_all(ANSWER).await.expect("answering");
            // Unread input turns this close into a reset.
            drop(socket);
        };
        let answer = async {
            let mut answer = vec![0; ANSWER.len()];
            let read = timely("the answer", read.read_exact(&mut answer)).await;
            read.expect("the whole answer");
            answer
        };
        let ((), (), answer) = tokio::join!(upload, refuse, answer);
        assert_eq!(answer, ANSWER, "{mode:?} {transport:?}");
        drop((read, write));
        server_is_idle(&topology).await;
    }
}

/// Models an HTTP service that ends its answer, and closes without reading the upload.
#[tokio::test]
async fn end_of_an_answer_reaches_a_client_although_the_endpoint_resets_afterwards() {
    let topology = Topology::simple(Mode::HttpConnect, Transport::Tcp).await;
    let endpoint = Endpoint::start().await;
    let (mut stream, mut far) = pair(&topology, &endpoint).await;
    let answer = vec![2; MIB as usize];
    let answering = tokio::spawn({
        let answer = answer.clone();
        async move {
            far.write_all(&answer).await.unwrap();
            far.shutdown().await.unwrap();
            far
        }
    });
    // The client reads until the server has written the last byte, so that the kernel holds the rest of the answer.
    let (mut received, labels) = (Vec::new(), [("direction", "from_endpoint")]);
    loop {
        let metrics = topology.server_metrics(0).await;
        if value(&metrics, "culvert_tunnel_bytes_total", &labels) == answer.len() as f64 {
            break;
        }
        let mut piece = [0; 16 * 1024];
        let read = timely("the answer", stream.read(&mut piece)).await;
        received.extend_from_slice(&piece[..read.unwrap()]);
    }
    assert!(received.len() < answer.len(), "the kernel holds no answer");
    reset(answering.await.unwrap());
    // The agent learns of the reset by a write. The upload ends with bytes that the server has not read.
    let labels = [("reason", "endpoint_lost")];
    loop {
        send(&mut stream, 1024).await;
        let metrics = topology.server_metrics(0).await;
        if value(&metrics, "culvert_connections_closed_total", &labels) == 1.0 {
            break;
        }
    }
    let _ = stream.write_all(&[1; 1024]).await;
    received.extend(read_rest(&mut stream).await);
    assert!(received == answer, "{} bytes", received.len());
}
