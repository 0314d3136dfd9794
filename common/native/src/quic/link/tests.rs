//! Links between two endpoints on loopback.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

mod random;
mod replicas;
mod sockets;
mod wire;

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};

use bytes::Bytes;
use culvert_stream::{Sink, Source};
use quinn::Endpoint;
use rcgen::{CertifiedKey, generate_simple_self_signed};
use rustls::pki_types::PrivateKeyDer;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::task::{JoinSet, yield_now};
use tokio::time::timeout;
use tokio_util::task::TaskTracker;

use super::*;
use crate::quic::endpoint::{ServerEndpoint, client, client_config};
use crate::quic::keys::EndpointKeys;
use crate::quic::streams::AHEAD_BYTES;
use crate::quic::words::{End, Preferred};

const LIMIT: Duration = Duration::from_secs(30);
const MIB: usize = 1 << 20;

struct Pair {
    server: Arc<Link>,
    agent: Arc<Link>,
    agent_connection: Connection,
    agent_endpoint: Endpoint,
    address: SocketAddr,
    words: mpsc::UnboundedReceiver<Word>,
    _server_endpoint: Arc<ServerEndpoint>,
}

fn tls() -> (ServerConfig, ClientConfig) {
    let CertifiedKey { cert, signing_key } =
        generate_simple_self_signed(["server".to_owned()]).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let key = PrivateKeyDer::try_from(signing_key.serialize_der()).unwrap();
    let server = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![cert.der().clone()], key)
        .unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(cert.der().clone()).unwrap();
    let client = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    (server, client)
}

/// The two ends of a connection without links, each with its control stream.
struct Ends {
    server: (Connection, (SendStream, RecvStream)),
    agent: (Connection, (SendStream, RecvStream)),
    address: SocketAddr,
    server_endpoint: Arc<ServerEndpoint>,
}

impl Ends {
    async fn connect(agent_endpoint: &Endpoint) -> Self {
        let (server_tls, client_tls) = tls();
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = socket.local_addr().unwrap();
        let keys = EndpointKeys::derive(b"key");
        let endpoint = Arc::new(ServerEndpoint::new(socket, &server_tls, keys).unwrap());
        let config = client_config(&client_tls).unwrap();
        let connecting = agent_endpoint
            .connect_with(config, address, "server")
            .unwrap();
        let accept = async {
            let incoming = endpoint.accept().await.unwrap();
            let config = endpoint.config(&server_tls).unwrap();
            let connection = incoming.accept_with(config).unwrap().await.unwrap();
            let control = connection.accept_bi().await.unwrap();
            (connection, control)
        };
        let connect = async {
            let connection = connecting.await.unwrap();
            let mut control = connection.open_bi().await.unwrap();
            control.0.write_all(&Word::Ping.to_line()).await.unwrap();
            (connection, control)
        };
        let (server, agent) = tokio::join!(accept, connect);
        endpoint.admit(&server.0);
        Self {
            server,
            agent,
            address,
            server_endpoint: endpoint,
        }
    }
}

impl Pair {
    async fn new() -> Self {
        Self::with_held(64 * MIB).await
    }

    /// Connects two links. Streams whose receivers do not read may hold `held` bytes at each.
    async fn with_held(held: usize) -> Self {
        let any = (Ipv4Addr::UNSPECIFIED, 0).into();
        Self::over(client(any).unwrap(), held).await
    }

    /// Connects two links over an endpoint of the agent.
    async fn over(agent_endpoint: Endpoint, held: usize) -> Self {
        let ends = Ends::connect(&agent_endpoint).await;
        let ((server, server_control), (agent, agent_control)) = (ends.server, ends.agent);
        let agent_connection = agent.clone();
        let (server, server_words) = Link::new(server, held, CloseReason::AgentLost);
        let (agent, agent_words) = Link::new(agent, held, CloseReason::ServerLost);
        let (sender, words) = mpsc::unbounded_channel();
        for (link, control, outgoing) in [
            (server.clone(), server_control, server_words),
            (agent.clone(), agent_control, agent_words),
        ] {
            let sender = sender.clone();
            tokio::spawn(async move {
                let on_word = |word| {
                    let _ = sender.send(word);
                };
                link.run(control, outgoing, on_word, |_| {}).await
            });
        }
        Self {
            server,
            agent,
            agent_connection,
            agent_endpoint,
            address: ends.address,
            words,
            _server_endpoint: ends.server_endpoint,
        }
    }

    /// Dials, and accepts the dial. Returns the halves of the server and of the agent.
    async fn open(&self) -> ((QuicSource, QuicSink), (QuicSource, QuicSink)) {
        let dial = dial("10.0.0.1:443");
        let accept = async {
            let (mut source, mut sink) = self.agent.accept().await.unwrap();
            assert_eq!(read_dial(&mut source).await.unwrap(), dial);
            answer(&mut sink, &dial::accepted()).await.unwrap();
            (source, sink)
        };
        let both = async { tokio::join!(self.server.dial(&dial), accept) };
        let (dialed, accepted) = timeout(LIMIT, both).await.unwrap();
        (dialed.unwrap(), accepted)
    }
}

fn dial(address: &str) -> Dial {
    Dial {
        protocol: "tcp".into(),
        address: address.into(),
    }
}

fn pattern(bytes: usize) -> Bytes {
    (0..bytes).map(|n| (n % 251) as u8).collect()
}

/// Reads to the end. Returns the bytes and the reason of the end.
async fn read(source: &mut QuicSource) -> (Vec<u8>, Option<CloseReason>) {
    let mut bytes = Vec::new();
    let reading = async {
        loop {
            match source.recv().await {
                Ok(Some(chunk)) => bytes.extend_from_slice(&chunk),
                Ok(None) => return None,
                Err(reason) => return Some(reason),
            }
        }
    };
    let end = timeout(LIMIT, reading).await.unwrap();
    (bytes, end)
}

#[tokio::test]
async fn bytes_arrive_both_ways_and_each_direction_ends_separately() {
    let pair = Pair::new().await;
    let ((mut from_agent, mut to_agent), (mut from_server, mut to_server)) = pair.open().await;
    let sent = pattern(3 * MIB);
    let ask = async {
        to_agent.send(sent.clone()).await.unwrap();
        to_agent.finish().await.unwrap();
    };
    let ((), (asked, end)) = tokio::join!(ask, read(&mut from_server));
    assert!(asked == sent && end.is_none());
    let reply = async {
        to_server.send(sent.clone()).await.unwrap();
        to_server.finish().await.unwrap();
    };
    let ((), (answered, end)) = tokio::join!(reply, read(&mut from_agent));
    assert!(answered == sent && end.is_none());
    let tasks = TaskTracker::new();
    to_agent.end(CloseReason::Finished, &tasks);
    to_server.end(CloseReason::Finished, &tasks);
    tasks.close();
    timeout(LIMIT, tasks.wait()).await.unwrap();
}

#[tokio::test]
async fn reason_arrives_after_all_bytes_and_stops_the_opposite_direction() {
    let pair = Pair::new().await;
    for bytes in [0, 1, 700_000] {
        let ((mut from_agent, mut to_agent), (_source, mut to_server)) = pair.open().await;
        let sent = pattern(bytes);
        to_server.send(sent.clone()).await.unwrap();
        to_server.end(CloseReason::EndpointLost, &TaskTracker::new());
        drop(_source);
        let (received, end) = read(&mut from_agent).await;
        assert!(received == sent, "{} of {bytes} bytes", received.len());
        assert_eq!(end, Some(CloseReason::EndpointLost));
        let write = async {
            loop {
                if let Err(reason) = to_agent.send(pattern(1000)).await {
                    return reason;
                }
            }
        };
        let stopped = timeout(LIMIT, write).await.unwrap();
        assert_eq!(stopped, CloseReason::EndpointLost);
    }
}

#[tokio::test]
async fn half_closed_peer_learns_the_reason_of_an_abort() {
    let pair = Pair::new().await;
    let ((from_agent, mut to_agent), (mut from_server, _to_server)) = pair.open().await;
    to_agent.finish().await.unwrap();
    assert_eq!(read(&mut from_server).await, (Vec::new(), None));
    to_agent.end(CloseReason::ClientLost, &TaskTracker::new());
    drop(from_agent);
    let reason = timeout(LIMIT, from_server.aborted()).await.unwrap();
    assert_eq!(reason, CloseReason::ClientLost);
}

#[tokio::test]
async fn dropped_connection_is_not_a_complete_one() {
    let pair = Pair::new().await;
    let (server, (mut from_server, to_server)) = pair.open().await;
    drop(server);
    timeout(LIMIT, to_server.stopped()).await.unwrap();
    let (bytes, end) = read(&mut from_server).await;
    assert_eq!((bytes.len(), end), (0, Some(CloseReason::ServerLost)));
}

#[tokio::test]
async fn failed_dial_returns_the_text_of_the_agent() {
    let pair = Pair::new().await;
    let refuse = async {
        let (mut source, mut sink) = pair.agent.accept().await.unwrap();
        assert_eq!(read_dial(&mut source).await.unwrap(), dial(""));
        let refusal = dial::refusal(false, "no route to host");
        answer(&mut sink, &refusal).await.unwrap();
        sink.finish().await.unwrap();
    };
    let nowhere = dial("");
    let (dialed, ()) = tokio::join!(pair.server.dial(&nowhere), refuse);
    let refused = LinkDialError::Refused("no route to host".into());
    assert_eq!(dialed.err(), Some(refused));
}

#[tokio::test]
async fn dial_on_an_ended_link_is_unusable() {
    let pair = Pair::new().await;
    pair.agent.close("test");
    let target = dial("10.0.0.1:1");
    let dialed = timeout(LIMIT, pair.server.dial(&target)).await.unwrap();
    assert_eq!(dialed.err(), Some(LinkDialError::Unusable));
}

#[tokio::test]
async fn more_streams_than_permitted_at_first_are_open_at_once() {
    let pair = Pair::new().await;
    let mut open = Vec::new();
    for _ in 0..4 * AGENT_STREAMS {
        open.push(pair.open().await);
    }
    let ((from_agent, _), (_, to_server)) = &mut open[0];
    to_server.send(pattern(10)).await.unwrap();
    let first = timeout(LIMIT, from_agent.recv()).await.unwrap().unwrap();
    assert_eq!(first, Some(pattern(10)));
    let count = open.len();
    assert_eq!((pair.server.open(), pair.agent.open()), (count, count));
    drop(open);
    assert_eq!((pair.server.open(), pair.agent.open()), (0, 0));
}

#[tokio::test]
async fn ten_thousand_streams_one_after_another_leave_nothing_behind() {
    let pair = Pair::new().await;
    let tasks = TaskTracker::new();
    for _ in 0..10_000 {
        let ((mut from_agent, mut to_agent), (mut from_server, mut to_server)) = pair.open().await;
        to_agent.finish().await.unwrap();
        assert_eq!(from_server.recv().await, Ok(None));
        to_server.finish().await.unwrap();
        assert_eq!(from_agent.recv().await, Ok(None));
        to_agent.end(CloseReason::Finished, &tasks);
        to_server.end(CloseReason::Finished, &tasks);
    }
    tasks.close();
    timeout(LIMIT, tasks.wait()).await.unwrap();
    assert_eq!((pair.server.open(), pair.agent.open()), (0, 0));
    assert!(pair.server.is_healthy() && pair.agent.is_healthy());
}

#[tokio::test]
async fn agent_may_open_no_stream_but_the_control_stream() {
    let pair = Pair::new().await;
    let opening = pair.agent_connection.open_bi();
    timeout(Duration::from_millis(200), opening)
        .await
        .unwrap_err();
}

#[tokio::test]
async fn words_about_the_link_reach_the_peer() {
    let mut pair = Pair::new().await;
    let word = Word::Prefer(Preferred::Quic);
    pair.agent.send(word);
    let received = timeout(LIMIT, pair.words.recv()).await.unwrap();
    assert_eq!(received, Some(word));
}

#[tokio::test]
async fn link_to_a_peer_that_reads_no_words_ends_with_the_cause() {
    let endpoint = client((Ipv4Addr::UNSPECIFIED, 0).into()).unwrap();
    let Ends {
        server: (connection, control),
        agent: (agent, _unread),
        server_endpoint: _endpoint,
        ..
    } = Ends::connect(&endpoint).await;
    let (link, words) = Link::new(connection, 0, CloseReason::AgentLost);
    let end = End {
        stream: u64::MAX,
        reason: Some(CloseReason::EndpointLost),
        offset: u64::MAX,
    };
    let mut sent = 0;
    let send = async {
        while link.is_healthy() {
            for _ in 0..64 {
                link.send(Word::End(end));
                sent += 1;
            }
            yield_now().await;
        }
    };
    let run = link.run(control, words, |_| {}, |_| {});
    let both = async { tokio::join!(run, send) };
    let (cause, ()) = timeout(LIMIT, both).await.unwrap();
    let expected = "does not read its control stream";
    assert!(cause.contains(expected), "{cause}");
    // The window of the control stream and the queue have room for so many.
    assert!((WAITING_WORDS..2 * WAITING_WORDS).contains(&sent), "{sent}");
    let closed = timeout(LIMIT, agent.closed()).await.unwrap().to_string();
    assert!(closed.contains(expected), "{closed}");
}

/// A sender fills the windows of streams whose receivers do not read; the first stalled streams end, the others go on.
#[tokio::test]
async fn stalled_streams_over_the_bound_end_as_buffer_exceeded() {
    let pair = Pair::with_held(16 * MIB).await;
    let mut stalled = JoinSet::new();
    let mut senders = Vec::new();
    for _ in 0..12 {
        let ((from_agent, to_agent), (from_server, mut to_server)) = pair.open().await;
        senders.push(tokio::spawn(async move {
            while to_server.send(pattern(AHEAD_BYTES)).await.is_ok() {}
            drop((from_server, to_agent));
        }));
        stalled.spawn(async move {
            let mut source = from_agent;
            let cut = source.cut();
            source.recv().await.unwrap();
            tokio::select! {
                // A receiver that never accepts the first chunk.
                () = source.fill() => {}
                () = sleep(LIMIT) => panic!("neither stalled nor evicted"),
            }
            timeout(LIMIT, cut.due()).await.unwrap();
            source.recv().await.err()
        });
    }
    for _ in 0..5 {
        let ended = timeout(LIMIT, stalled.join_next()).await.unwrap();
        assert_eq!(ended.unwrap().unwrap(), Some(CloseReason::BufferExceeded));
    }
    // Seven streams hold less than the bound, and none of these ends.
    timeout(Duration::from_secs(2), stalled.join_next())
        .await
        .unwrap_err();
    let _open = pair.open().await;
    for sender in senders {
        sender.abort();
    }
}
