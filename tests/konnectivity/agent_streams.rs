//! Packets of scripted agents, and the server's reaction to each.

use std::future::poll_fn;

use bytes::Bytes;
use culvert_konnectivity::message::{ConnectId, DialId, Message};
use culvert_proto::{Packet, PacketType};
use culvert_tests::{Mode, Topology, Transport};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tonic::Code;

use crate::scripts::{self, Peer, agent_with, close_request, close_response, data, opened};
use crate::support::*;

const TARGET: &str = "10.0.0.1:443";

async fn server_alone(mode: Mode) -> Topology {
    let builder = Topology::builder(mode, Transport::Uds);
    builder.servers(1).start().await
}

/// Opens a connection with the agent's connection id `connection`.
pub(crate) async fn open_as(
    topology: &Topology,
    agent: &mut Peer,
    connection: i64,
) -> culvert_kit::client::BoxedStream {
    let answers = async {
        let dial = agent.hear_dial().await;
        agent.say(opened(dial, connection)).await;
    };
    let (connected, ()) = tokio::join!(topology.connect(TARGET), answers);
    connected.unwrap()
}

/// Checks that bytes pass in both directions.
pub(crate) async fn works(
    agent: &mut Peer,
    connection: i64,
    stream: &mut culvert_kit::client::BoxedStream,
) {
    stream.write_all(b"question").await.unwrap();
    stream.flush().await.unwrap();
    agent.hear_bytes(connection, b"question").await;
    agent.say(data(connection, b"answer")).await;
    let mut answer = [0; 6];
    timely("an answer", stream.read_exact(&mut answer))
        .await
        .unwrap();
    assert_eq!(&answer, b"answer");
}

#[tokio::test]
async fn server_sends_its_id_and_count_at_once() {
    let topology = server_alone(Mode::Grpc).await;
    let Ok(agent) = agent_with(&topology, &[("agentid", "terse")]).await else {
        panic!("identifiers are optional");
    };
    let header = |name| agent.metadata.get_all(name).iter().collect::<Vec<_>>();
    assert_eq!(header("serverid"), ["server-0"]);
    assert_eq!(header("servercount"), ["1"]);
    assert!(header("culvert-half-close").is_empty());
    server_shows(
        &topology,
        "ready_backends",
        &[("proxy_strategy", "default")],
        1.0,
    )
    .await;
    server_shows(
        &topology,
        "grpc_connections",
        &[("service_method", "Connect")],
        1.0,
    )
    .await;
    drop(agent);
    server_shows(
        &topology,
        "ready_backends",
        &[("proxy_strategy", "default")],
        0.0,
    )
    .await;
    server_shows(
        &topology,
        "grpc_connections",
        &[("service_method", "Connect")],
        0.0,
    )
    .await;
}

#[tokio::test]
async fn refused_agent_keeps_the_default_window_and_two_streams() {
    let topology = server_alone(Mode::Grpc).await;
    let socket = TcpStream::connect(topology.agent_address(0)).await.unwrap();
    let pki = topology.pki();
    let tls = TlsConnector::from(pki.client_tls(&pki.agent, &["h2"]).unwrap());
    let name = "localhost".try_into().unwrap();
    let stream = timely("TLS", tls.connect(name, socket)).await.unwrap();
    let (requests, mut connection) = h2::client::handshake(stream).await.unwrap();
    let calls = async {
        let mut requests = timely("HTTP/2", requests.ready()).await.unwrap();
        let call = |requests: &mut h2::client::SendRequest<Bytes>| {
            // Without an id.
            let request = http::Request::post("https://localhost/AgentService/Connect")
                .header("te", "trailers")
                .header("content-type", "application/grpc");
            requests
                .send_request(request.body(()).unwrap(), false)
                .unwrap()
        };
        let (refused, _body) = call(&mut requests);
        let refused = timely("a refusal", refused).await.unwrap();
        assert!(refused.headers().contains_key("grpc-status"));
        let (_answer, mut body) = call(&mut requests);
        body.reserve_capacity(1 << 20);
        let room = poll_fn(|cx| body.poll_capacity(cx));
        timely("room in the window", room).await.unwrap().unwrap()
    };
    let capacity = tokio::select! {
        // Polled first: the answer to the second call ends its stream.
        biased;
        capacity = calls => capacity,
        ended = &mut connection => panic!("the connection ended: {ended:?}"),
    };
    assert_eq!(capacity, 65_535);
    assert_eq!(connection.max_concurrent_send_streams(), 2);
}

#[tokio::test]
async fn connection_of_an_agent_is_closed_after_its_call() {
    let topology = server_alone(Mode::Grpc).await;
    let socket = TcpStream::connect(topology.agent_address(0)).await.unwrap();
    let pki = topology.pki();
    let tls = TlsConnector::from(pki.client_tls(&pki.agent, &["h2"]).unwrap());
    let name = "localhost".try_into().unwrap();
    let stream = timely("TLS", tls.connect(name, socket)).await.unwrap();
    let (requests, connection) = h2::client::handshake(stream).await.unwrap();
    let mut connection = tokio::spawn(connection);
    let mut requests = timely("HTTP/2", requests.ready()).await.unwrap();
    let request = http::Request::post("https://localhost/AgentService/Connect")
        .header("te", "trailers")
        .header("content-type", "application/grpc")
        .header("agentid", "a");
    let (answer, mut body) = requests
        .send_request(request.body(()).unwrap(), false)
        .unwrap();
    let answer = timely("an answer", answer).await.unwrap();
    server_shows(&topology, "ready_backends", &[], 1.0).await;
    body.send_reset(h2::Reason::CANCEL);
    drop((answer, body));
    // The handle keeps the agent's end open.
    let _ = timely("the end of the connection", &mut connection).await;
    server_shows(&topology, "ready_backends", &[], 0.0).await;
    drop(requests);
}

#[tokio::test]
async fn agent_with_a_missing_or_repeated_id_is_refused() {
    let mut topology = server_alone(Mode::Grpc).await;
    let cases: [(&[(&str, &str)], &str); 3] = [
        (&[], "expected one agent ID in the context, got []"),
        (
            &[("agentid", "a"), ("agentid", "b")],
            "expected one agent ID in the context, got [a b]",
        ),
        (
            &[
                ("agentid", "a"),
                ("agentidentifiers", "x"),
                ("agentidentifiers", "y"),
            ],
            "expected at most one set of agent identifiers in the context, got [x y]",
        ),
    ];
    for (metadata, text) in cases {
        let status = agent_with(&topology, metadata).await.err().expect(text);
        assert_eq!((status.code(), status.message()), (Code::Unknown, text));
        topology.server(0).wait_for_log(text, LIMIT).await;
    }
    let garbage = [("listener", "agent"), ("reason", "garbage")];
    let metrics = topology.server_metrics(0).await;
    let refused = value(&metrics, "culvert_rejected_total", &garbage);
    assert_eq!(refused, 3.0);
    server_shows(&topology, "ready_backends", &[], 0.0).await;
}

#[tokio::test]
async fn stray_packets_are_ignored_or_answered_with_a_close() {
    for mode in MODES {
        let topology = server_alone(mode).await;
        let mut agent = scripts::agent(&topology, "stray").await;
        let mut stream = open_as(&topology, &mut agent, 7).await;
        // The server ignores these packets.
        let of_unknown_type = Packet {
            r#type: 99,
            payload: None,
        };
        agent.say_packet(of_unknown_type).await;
        let without_payload = |kind: PacketType| Packet {
            r#type: kind as i32,
            payload: None,
        };
        for kind in [PacketType::Data, PacketType::CloseRsp, PacketType::DialCls] {
            agent.say_packet(without_payload(kind)).await;
        }
        agent.say(data(0, b"nobody's")).await;
        agent.say(close_response(66, "never opened")).await;
        agent.say(close_request(7)).await;
        agent.say(Message::CloseDial { dial: DialId(12) }).await;
        agent.say(scripts::dial(3, TARGET)).await;
        agent
            .say(Message::HalfClose {
                connection: ConnectId(55),
            })
            .await;
        // The server answers each of these packets with a close.
        for _ in 0..2 {
            agent.say(data(99, b"whose?")).await;
            assert_eq!(agent.hear().await, close_request(99));
        }
        agent.say(opened(DialId(12345), 98)).await;
        assert_eq!(agent.hear().await, close_request(98));
        works(&mut agent, 7, &mut stream).await;
        drop(stream);
        assert_eq!(agent.hear().await, close_request(7));
        // The server ignores late packets of a closing connection.
        agent.say(data(7, b"late")).await;
        agent.say(close_response(7, "")).await;
        agent.say(close_response(7, "")).await;
        agent.say(data(97, b"fence")).await;
        assert_eq!(agent.hear().await, close_request(97));
        server_is_idle(&topology).await;
    }
}

#[tokio::test]
async fn answer_with_an_unusable_id_fails_only_that_dial() {
    for mode in MODES {
        let topology = server_alone(mode).await;
        let mut agent = scripts::agent(&topology, "confused").await;
        let mut stream = open_as(&topology, &mut agent, 7).await;
        for id in [0, 7] {
            let answers = async {
                let dial = agent.hear_dial().await;
                agent.say(opened(dial, id)).await;
            };
            let (error, ()) = tokio::join!(refusal(&topology, TARGET), answers);
            let text = format!("agent answered with an unusable connection id {id}");
            assert_refused(&error, 502, &text, &text);
        }
        works(&mut agent, 7, &mut stream).await;
    }
}

#[tokio::test]
async fn a_dial_abandoned_by_the_agent_fails_at_once() {
    for mode in MODES {
        let topology = server_alone(mode).await;
        let mut agent = scripts::agent(&topology, "fickle").await;
        let abandons = async {
            let dial = agent.hear_dial().await;
            agent.say(Message::CloseDial { dial }).await;
        };
        let (error, ()) = tokio::join!(refusal(&topology, TARGET), abandons);
        let text = "the agent abandoned the dial";
        assert_refused(&error, 502, text, text);
        assert_eq!(dial_failures(&topology, "backend_close").await, 1.0);
    }
}

#[tokio::test]
async fn last_bytes_of_an_endpoint_arrive_before_its_close() {
    for mode in MODES {
        let topology = server_alone(mode).await;
        let mut agent = scripts::agent(&topology, "orderly").await;
        let mut stream = open_as(&topology, &mut agent, 1).await;
        let bytes: Vec<u8> = (0..1_000_000_u32).map(|i| (i % 251) as u8).collect();
        let sends = async {
            for piece in bytes.chunks(4096) {
                agent.say(data(1, piece)).await;
            }
            agent.say(close_response(1, "")).await;
        };
        let (received, ()) = tokio::join!(read_rest(&mut stream), sends);
        assert_eq!(received, bytes);
        drop(stream);
        server_is_idle(&topology).await;
    }
}

#[tokio::test]
async fn a_packet_at_the_size_limit_passes() {
    for mode in MODES {
        let topology = server_alone(mode).await;
        let mut agent = scripts::agent(&topology, "large").await;
        let mut stream = open_as(&topology, &mut agent, 1).await;
        let bytes = vec![7; 4 * 1024 * 1024 - 64];
        agent.say(data(1, &bytes)).await;
        agent.say(close_response(1, "")).await;
        assert!(read_rest(&mut stream).await == bytes);
    }
}

#[tokio::test]
async fn packet_over_the_size_limit_ends_only_that_agents_stream() {
    let services = culvert_kit::services::Services::start().await.unwrap();
    for mode in MODES {
        let mut topology = Topology::simple(mode, Transport::Uds).await;
        let mut innocent = Innocent::open(&topology, services.raw).await;
        let mut agent = scripts::agent(&topology, "huge").await;
        server_shows(&topology, "ready_backends", &[], 2.0).await;
        agent.say(data(1, &vec![7; 5 * 1024 * 1024])).await;
        agent.hear_end().await;
        server_shows(&topology, "ready_backends", &[], 1.0).await;
        innocent.still_echoes("a packet of 5 MiB").await;
        assert_unharmed(&mut topology).await;
    }
}

#[tokio::test]
async fn close_of_a_tls_client_is_counted_as_its_close() {
    let builder = Topology::builder(Mode::HttpConnect, Transport::Tcp);
    let topology = builder.servers(1).start().await;
    let mut agent = scripts::agent(&topology, "scripted").await;
    let mut stream = open_as(&topology, &mut agent, 1).await;
    works(&mut agent, 1, &mut stream).await;
    timely("the end", stream.shutdown()).await.unwrap();
    assert_eq!(agent.hear().await, close_request(1));
    agent.say(data(1, b"the rest")).await;
    agent.say(close_response(1, "")).await;
    // The end of the connection is orderly.
    let mut rest = Vec::new();
    let read = stream.read_to_end(&mut rest);
    timely("the rest", read).await.unwrap();
    assert_eq!(rest, b"the rest");
    server_shows(&topology, "established_connections", &[], 0.0).await;
    let metrics = topology.server_metrics(0).await;
    let closed = |reason| {
        let name = "culvert_connections_closed_total";
        value(&metrics, name, &[("reason", reason)])
    };
    assert_eq!(closed("client_closed"), 1.0, "{}", metrics.text());
}
