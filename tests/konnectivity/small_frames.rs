//! Interactive traffic: every byte in a separate packet and HTTP/2 frame, sent to a peer that does not read.
//! The HTTP/2 library ends a connection with too many unread small frames, which would end all proxied
//! connections of that transport.

use std::future::poll_fn;
use std::task::Poll;

use bytes::Bytes;
use culvert_kit::client::FrontEnd;
use culvert_konnectivity::grpc;
use culvert_konnectivity::message::{ConnectId, DialId, Message};
use culvert_tests::{Mode, Topology, Transport};
use h2::{Ping, PingPong, RecvStream, SendStream};
use http::Request;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::task::AbortHandle;
use tokio_rustls::TlsConnector;

use crate::scripts::{self, NO_CONNECTION, close_request, data, dial, opened};
use crate::support::*;

const TARGET: &str = "10.0.0.1:443";

/// Number of bytes to send, one per packet: 10,000 more packets than fit into the queue to an agent that does
/// not read.
const FLOOD: usize = 18_000;

/// A call with every packet in a separate HTTP/2 frame.
struct Raw {
    frames: SendStream<Bytes>,
    answers: RecvStream,
    pings: PingPong,
    connection: AbortHandle,
}

impl Drop for Raw {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

impl Raw {
    async fn open<S>(io: S, path: &str, metadata: &[(&str, &str)]) -> Self
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (client, mut connection) = h2::client::handshake(io).await.unwrap();
        let pings = connection.ping_pong().unwrap();
        let connection = tokio::spawn(connection).abort_handle();
        let mut request = Request::post(format!("http://localhost{path}"))
            .header("te", "trailers")
            .header("content-type", "application/grpc");
        for (key, value) in metadata {
            request = request.header(*key, *value);
        }
        let mut client = client.ready().await.unwrap();
        let request = request.body(()).unwrap();
        let (answer, frames) = client.send_request(request, false).unwrap();
        let answer = timely("the server's headers", answer).await.unwrap();
        Self {
            frames,
            answers: answer.into_body(),
            pings,
            connection,
        }
    }

    /// Sends messages of `size` bytes until the window of the call is full, and returns the bytes.
    async fn fill(&mut self, connection: i64, size: usize) -> Vec<u8> {
        let mut sent = Vec::new();
        loop {
            let bytes: Vec<u8> = (sent.len()..).map(|i| (i % 251) as u8).take(size).collect();
            let frame = encoded(data(connection, &bytes));
            self.frames.reserve_capacity(frame.len());
            if self.frames.capacity() < frame.len() {
                // The answer follows the updates of the window for all earlier frames.
                self.ping().await;
                let more = poll_fn(|cx| Poll::Ready(self.frames.poll_capacity(cx)));
                if more.await.is_pending() && self.frames.capacity() < frame.len() {
                    return sent;
                }
                continue;
            }
            self.frames.send_data(frame.into(), false).unwrap();
            sent.extend(bytes);
        }
    }

    async fn ping(&mut self) {
        let pong = self.pings.ping(Ping::opaque());
        timely("an answer to a ping", pong).await.unwrap();
    }

    async fn say(&mut self, message: Message) {
        let frame = encoded(message);
        self.frames.reserve_capacity(frame.len());
        while self.frames.capacity() < frame.len() {
            let more = poll_fn(|cx| self.frames.poll_capacity(cx));
            let more = timely("room in the windows", more).await;
            more.expect("an open call").unwrap();
        }
        self.frames.send_data(frame.into(), false).unwrap();
    }

    /// Sends `bytes` one by one. Returns after the answer to a ping, when the HTTP/2 peer has received every
    /// byte.
    async fn say_bytes(&mut self, connection: i64, bytes: &[u8]) {
        for byte in bytes {
            self.say(data(connection, &[*byte])).await;
        }
        self.ping().await;
    }

    /// Waits for the next message that is not a probe. Each message must be alone in its frame.
    async fn hear(&mut self) -> Message {
        loop {
            let frame = timely("a frame", self.answers.data()).await;
            let frame = frame.expect("an open call").unwrap();
            self.answers
                .flow_control()
                .release_capacity(frame.len())
                .unwrap();
            let message = grpc::decode(frame.slice(5..)).unwrap();
            if message != close_request(NO_CONNECTION) {
                return message;
            }
        }
    }
}

fn encoded(message: Message) -> Vec<u8> {
    let mut frame = Vec::new();
    grpc::encode(message, &mut frame);
    frame
}

fn flood() -> Vec<u8> {
    (0..FLOOD).map(|i| (i % 251) as u8).collect()
}

async fn server_alone() -> Topology {
    let builder = Topology::builder(Mode::Grpc, Transport::Uds);
    builder.servers(1).start().await
}

#[tokio::test]
async fn small_frames_that_fill_the_window_to_an_agent_that_does_not_read_all_arrive() {
    let topology = server_alone().await;
    let mut agent = scripts::agent(&topology, "scripted").await;
    let (mut bulk, bulk_id) = opened_by(&topology, &mut agent, 1).await;
    let (mut front, id) = opened_by(&topology, &mut agent, 2).await;
    // The queue to the agent is full before the first small message.
    bulk.fill(bulk_id, 8 * 1024).await;
    let sent = front.fill(id, 1).await;
    assert!(sent.len() > FLOOD, "{} bytes fill the window", sent.len());
    let mut heard = Vec::new();
    while heard.len() < sent.len() {
        if let Message::Data {
            connection: ConnectId(2),
            bytes,
        } = agent.hear().await
        {
            heard.extend(bytes);
        }
    }
    assert!(heard == sent);
    agent.say(data(2, b"x")).await;
    assert_eq!(front.hear().await, data(id, b"x"));
}

/// Opens a connection on a call of its own, which the agent knows by `number`.
async fn opened_by(topology: &Topology, agent: &mut scripts::Peer, number: i64) -> (Raw, i64) {
    let FrontEnd::GrpcUds(path) = topology.front_end() else {
        panic!("not the front end of this test");
    };
    let socket = UnixStream::connect(path).await.unwrap();
    let mut front = Raw::open(socket, "/ProxyService/Proxy", &[]).await;
    front.say(dial(77, TARGET)).await;
    let asked = agent.hear_dial().await;
    agent.say(opened(asked, number)).await;
    let Message::DialResponse {
        dial: DialId(77),
        connection: ConnectId(id),
        ..
    } = front.hear().await
    else {
        panic!("not the answer to the dial");
    };
    (front, id)
}

#[tokio::test]
async fn small_frames_to_a_client_that_does_not_read_all_arrive() {
    let topology = server_alone().await;
    let socket = TcpStream::connect(topology.agent_address(0)).await.unwrap();
    let pki = topology.pki();
    let tls = TlsConnector::from(pki.client_tls(&pki.agent, &["h2"]).unwrap());
    let name = "localhost".try_into().unwrap();
    let stream = tls.connect(name, socket).await.unwrap();
    let metadata = [("agentid", "scripted"), ("agentidentifiers", "")];
    let mut agent = Raw::open(stream, "/AgentService/Connect", &metadata).await;
    let mut front = scripts::front(&topology).await;
    front.say(dial(77, TARGET)).await;
    let Message::DialRequest { dial: asked, .. } = agent.hear().await else {
        panic!("not a dial");
    };
    agent.say(opened(asked, 1)).await;
    let Message::DialResponse { connection, .. } = front.hear().await else {
        panic!("not the answer to the dial");
    };
    agent.say_bytes(1, &flood()).await;
    front.hear_bytes(connection.0, &flood()).await;
    front.say(data(connection.0, b"x")).await;
    assert_eq!(agent.hear().await, data(1, b"x"));
}
