//! Peers that vanish while bytes are on the way to them, and live peers that do not read. Every test runs in a
//! separate network namespace.

use std::sync::Arc;
use std::time::Duration;

use culvert_tests::eventually;
use culvert_tests::namespace::{Direction, alone, can_cut_off, cut_off, restore};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::time::sleep;

use crate::support::{Door, LIMIT, Upstream, timely};

const NAME: &str = "raw.example.com";
const AUTHORITY: &str = "raw.demo.svc.cluster.local:443";

/// Address of the clients; a test can isolate this address.
const CLIENT: &str = "127.0.0.2";
/// Address of the endpoint; a test can isolate this address.
const ENDPOINT: &str = "127.0.0.3";

/// Flags with which a peer is lost after 4 s of silence.
const FLAGS: [&str; 6] = [
    "--downstream-tcp-keepalive-time=1s",
    "--downstream-tcp-keepalive-interval=1s",
    "--downstream-tcp-keepalive-probes=3",
    "--upstream-tcp-keepalive-time=1s",
    "--upstream-tcp-keepalive-interval=1s",
    "--upstream-tcp-keepalive-probes=3",
];
const PATIENCE: Duration = Duration::from_secs(4);

/// Both directions of packets.
const BOTH: &[Direction] = &[Direction::From, Direction::To];

/// A front door with two connections: one by server name, and one by HTTP/1.1 CONNECT.
struct Pairs {
    door: Door,
    /// Sockets of client and endpoint for each connection.
    pairs: [(TcpStream, TcpStream); 2],
}

impl Pairs {
    async fn start() -> Self {
        let listener = TcpListener::bind((ENDPOINT, 0)).await.unwrap();
        let upstream = Upstream::new("demo/raw", listener.local_addr().unwrap())
            .server_name(NAME)
            .authority(AUTHORITY);
        let door = Door::start_with(&[upstream], &FLAGS).await;

        let hello = hello();
        let mut by_name = connect(door.sni).await;
        by_name.write_all(&hello).await.unwrap();
        let (mut first, _) = timely("a connection", listener.accept()).await.unwrap();
        let mut heard = vec![0; hello.len()];
        timely("the hello", first.read_exact(&mut heard))
            .await
            .unwrap();

        let mut by_connect = connect(door.tunneling).await;
        let request = format!("CONNECT {AUTHORITY} HTTP/1.1\r\nHost: {AUTHORITY}\r\n\r\n");
        by_connect.write_all(request.as_bytes()).await.unwrap();
        let (second, _) = timely("a connection", listener.accept()).await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(timely("the answer", by_connect.read_u8()).await.unwrap());
        }
        let pairs = [(by_name, first), (by_connect, second)];
        Self { door, pairs }
    }

    /// Waits until both connections have ended with this close reason.
    async fn have_ended(&self, reason: &str) {
        eventually(reason, LIMIT, async || {
            let labels = [("reason", reason)];
            let name = "culvert_connections_closed_total";
            let ended = self.door.value(name, &labels).await;
            (ended == 2.0).then_some(()).ok_or(ended)
        })
        .await;
        self.door.is_idle().await;
    }
}

/// Connects with a small receive buffer.
async fn connect(door: std::net::SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(256 * 1024).unwrap();
    let here = format!("{CLIENT}:0").parse().unwrap();
    socket.bind(here).unwrap();
    timely("a connection", socket.connect(door)).await.unwrap()
}

fn hello() -> Vec<u8> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    let name = ServerName::try_from(NAME).unwrap();
    let mut client = ClientConnection::new(Arc::new(config), name).unwrap();
    let mut hello = Vec::new();
    client.write_tls(&mut hello).unwrap();
    hello
}

/// Reads until the end of the stream or a reset.
async fn ends(stream: &mut TcpStream) {
    let mut rest = Vec::new();
    let _ = timely("the end", stream.read_to_end(&mut rest)).await;
}

#[test]
fn a_client_that_vanishes_with_bytes_in_flight_is_detected() {
    if !can_cut_off() {
        return;
    }
    alone(async || {
        let mut pairs = Pairs::start().await;
        cut_off(CLIENT, BOTH);
        for (_, endpoint) in &mut pairs.pairs {
            endpoint.write_all(b"nobody hears this").await.unwrap();
        }
        for (_, endpoint) in &mut pairs.pairs {
            ends(endpoint).await;
        }
        pairs.have_ended("client_lost").await;
    });
}

#[test]
fn an_endpoint_that_vanishes_with_bytes_in_flight_is_detected() {
    if !can_cut_off() {
        return;
    }
    alone(async || {
        let mut pairs = Pairs::start().await;
        cut_off(ENDPOINT, BOTH);
        for (client, _) in &mut pairs.pairs {
            client.write_all(b"nobody hears this").await.unwrap();
        }
        for (client, _) in &mut pairs.pairs {
            ends(client).await;
        }
        pairs.have_ended("endpoint_lost").await;
    });
}

#[test]
fn a_client_that_does_not_read_is_kept_until_it_vanishes() {
    const BYTES: usize = 32 << 20;
    if !can_cut_off() {
        return;
    }
    alone(async || {
        let Pairs { door, pairs } = Pairs::start().await;
        let [(mut reader, endpoint), (mut vanishing, other)] = pairs;
        let [mut first, second] = [endpoint, other].map(|mut endpoint| {
            tokio::spawn(async move {
                // Fails once the client is gone.
                let _ = endpoint.write_all(&vec![7; BYTES]).await;
                endpoint
            })
        });
        // The kernel probes the full receive window after 6, 13 and 25 s. Between two probes, the client is
        // silent for longer than 4 s.
        sleep(PATIENCE * 5).await;
        assert!(!first.is_finished() && !second.is_finished());
        let mut read = vec![0; BYTES];
        timely("the waiting bytes", reader.read_exact(&mut read))
            .await
            .unwrap();
        assert!(read.iter().all(|byte| *byte == 7));
        let mut endpoint = timely("the rest", &mut first).await.unwrap();
        // The other client is still connected, too. It begins to read just before the cut.
        vanishing.read_exact(&mut read[..1 << 20]).await.unwrap();
        reader.write_all(b"here").await.unwrap();
        timely("four bytes", endpoint.read_exact(&mut read[..4]))
            .await
            .unwrap();
        cut_off(CLIENT, BOTH);
        let mut other = timely("the end", second).await.unwrap();
        ends(&mut other).await;
        drop(door);
    });
}

#[test]
fn an_endpoint_that_only_sends_survives_a_short_packet_loss() {
    if !can_cut_off() {
        return;
    }
    alone(async || {
        let Pairs { door, pairs } = Pairs::start().await;
        let mut clients = Vec::new();
        let mut heard = Vec::new();
        for (client, endpoint) in pairs {
            let (mut reads, writes) = client.into_split();
            tokio::spawn(async move { tokio::io::copy(&mut reads, &mut tokio::io::sink()).await });
            let (mut asks, mut says) = endpoint.into_split();
            tokio::spawn(async move {
                while says.write_all(b".").await.is_ok() {
                    sleep(PATIENCE / 20).await;
                }
            });
            heard.push(tokio::spawn(async move { asks.read_u8().await }));
            clients.push(writes);
        }
        sleep(PATIENCE * 2).await;
        cut_off(ENDPOINT, BOTH);
        for client in &mut clients {
            client.write_all(b"!").await.unwrap();
        }
        // The kernel sends the byte again three times within 1.4 s, and once more after 3 s.
        sleep(Duration::from_millis(1600)).await;
        restore();
        for byte in heard {
            assert_eq!(timely("a byte", byte).await.unwrap().unwrap(), b'!');
        }
        drop(door);
    });
}
