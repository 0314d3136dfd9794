//! Packets of scripted servers, and the agent's reaction to each.

use std::collections::HashSet;
use std::io::ErrorKind;

use culvert_konnectivity::message::{ConnectId, DialId, Message};
use culvert_tests::metrics::{http_get, scrape};
use culvert_tests::{Signal, eventually};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::endpoints::{Endpoint, reset};
use crate::scripts::{Call, Server, close_request, close_response, data, dial, opened};
use crate::searching::Lone;
use crate::support::*;

/// Starts a scripted server and an agent, and waits for the agent's call.
async fn connected() -> (Lone, Server, Call) {
    connected_with(&[]).await
}

async fn connected_with(args: &[&str]) -> (Lone, Server, Call) {
    let mut lone = Lone::new();
    let mut server = Server::start(&lone.pki.cluster, &["a"], "1").await;
    let port = format!("--proxy-server-port={}", server.addr.port());
    lone.start(&[&[port.as_str()], args].concat(), &[]);
    let call = server.call().await;
    (lone, server, call)
}

/// Makes the agent dial. Returns the connection id and the error text.
pub(crate) async fn dialed(
    call: &mut Call,
    random: i64,
    protocol: &str,
    address: &str,
) -> (i64, String) {
    let request = Message::DialRequest {
        protocol: protocol.into(),
        address: address.into(),
        dial: DialId(random),
    };
    call.say(request).await;
    match call.hear().await {
        Message::DialResponse {
            dial,
            connection,
            error,
        } => {
            assert_eq!(dial, DialId(random));
            (connection.0, error)
        }
        other => panic!("not an answer to a dial: {other:?}"),
    }
}

async fn hear_bytes(call: &mut Call, connection: i64, expected: &[u8]) {
    let mut seen = Vec::new();
    while seen.len() < expected.len() {
        match call.hear().await {
            Message::Data {
                connection: id,
                bytes,
            } if id.0 == connection => {
                seen.extend_from_slice(&bytes);
            }
            other => panic!("not bytes of {connection}: {other:?}"),
        }
    }
    assert_eq!(seen, expected);
}

#[tokio::test]
async fn agent_sends_its_id_and_identifiers() {
    let mut lone = Lone::new();
    let mut server = Server::start(&lone.pki.cluster, &["a"], "1").await;
    let port = format!("--proxy-server-port={}", server.addr.port());
    lone.start(
        &[&port, "--agent-identifiers=host=node-1&default-route=true"],
        &[],
    );
    let call = server.call().await;
    assert_eq!(call.metadata.get("agentid").unwrap(), "agent-0");
    let identifiers = call.metadata.get("agentidentifiers").unwrap();
    assert_eq!(identifiers, "host=node-1&default-route=true");
    assert!(call.metadata.get("authorization").is_none());
    lone.shows("open_server_connections", 1.0).await;
    lone.shows("known_server_count", 1.0).await;
    drop((call, server));
    lone.shows("open_server_connections", 0.0).await;
    let (status, _, body) = http_get(lone.health, "/readyz").await.unwrap();
    let body = String::from_utf8_lossy(&body).into_owned();
    assert_eq!(status, 503);
    assert!(
        body.contains("[-]server-connected failed: no servers connected"),
        "{body}"
    );
}

#[tokio::test]
async fn unknown_connections_are_answered_with_upstreams_texts() {
    let (lone, _server, mut call) = connected().await;
    call.say(data(42, b"whose?")).await;
    assert_eq!(
        call.hear().await,
        close_response(42, "unrecognized connectID")
    );
    call.say(close_request(43)).await;
    assert_eq!(call.hear().await, close_response(43, "Unknown connectID"));
    // The agent ignores these messages.
    call.say(data(0, b"nobody's")).await;
    call.say(close_response(42, "")).await;
    call.say(Message::Drain).await;
    call.say(Message::Unknown(99)).await;
    call.say(Message::CloseDial { dial: DialId(5) }).await;
    call.say(Message::HalfClose {
        connection: ConnectId(44),
    })
    .await;
    call.say(Message::DialResponse {
        dial: DialId(1),
        connection: ConnectId(1),
        error: String::new(),
    })
    .await;
    call.say(close_request(45)).await;
    assert_eq!(call.hear().await, close_response(45, "Unknown connectID"));
    lone.shows("open_endpoint_connections", 0.0).await;
}

#[tokio::test]
async fn connection_ids_count_up_and_failed_dials_use_one_each() {
    let endpoint = Endpoint::start().await;
    let target = endpoint.addr().to_string();
    let (lone, _server, mut call) = connected().await;
    let (first, error) = dialed(&mut call, 100, "tcp", &target).await;
    assert_eq!(error, "");
    let cases = [
        (
            "tcp",
            "127.0.0.1:1",
            "dial tcp 127.0.0.1:1: connect: connection refused",
        ),
        (
            "tcp",
            "127.0.0.1",
            "dial tcp: address 127.0.0.1: missing port in address",
        ),
        ("tcp", "", "dial tcp: missing address"),
    ];
    for (protocol, address, text) in cases {
        let answer = dialed(&mut call, 101, protocol, address).await;
        assert_eq!(answer, (0, text.to_owned()), "{address:?}");
    }
    for protocol in ["udp", "unix", ""] {
        let (id, text) = dialed(&mut call, 102, protocol, &target).await;
        assert_eq!(id, 0, "{protocol:?}");
        assert!(text.contains(protocol) && !text.is_empty(), "{text:?}");
    }
    assert_eq!(
        dialed(&mut call, 103, "tcp", &target).await,
        (first + 7, String::new())
    );
    lone.shows("open_endpoint_connections", 2.0).await;
    // The end of the call ends the endpoint connections.
    let mut far = endpoint.accept().await;
    drop(call);
    let ended = timely("the end", far.read(&mut [0; 1])).await;
    assert_eq!(ended.unwrap_err().kind(), ErrorKind::ConnectionReset);
    lone.shows("open_endpoint_connections", 0.0).await;
}

#[tokio::test]
async fn streams_do_not_share_connection_ids() {
    let endpoint = Endpoint::start().await;
    let target = endpoint.addr().to_string();
    let (_lone, mut server, mut call) = connected().await;
    let mut ids = HashSet::new();
    for round in 1..=3 {
        for _ in 0..2 {
            let id = dialed(&mut call, round, "tcp", &target).await.0;
            assert!(id > 0 && ids.insert(id), "{id} after {ids:?}");
        }
        drop(call);
        call = server.call().await;
    }
}

#[tokio::test]
async fn stock_server_gets_a_close_for_every_ended_connection() {
    let endpoint = Endpoint::start().await;
    let target = endpoint.addr().to_string();
    let (lone, _server, mut call) = connected().await;
    // The endpoint closes: its bytes arrive first, then the close.
    let (first, _) = dialed(&mut call, 1, "tcp", &target).await;
    let mut far = endpoint.accept().await;
    far.write_all(b"good bye").await.unwrap();
    far.shutdown().await.unwrap();
    hear_bytes(&mut call, first, b"good bye").await;
    assert_eq!(call.hear().await, close_response(first, ""));
    drop(far);
    // The endpoint resets the connection.
    let (second, _) = dialed(&mut call, 2, "tcp", &target).await;
    reset(endpoint.accept().await);
    assert_eq!(call.hear().await, close_response(second, ""));
    // The client closes: the last bytes still reach the endpoint.
    let (third, _) = dialed(&mut call, 3, "tcp", &target).await;
    let mut far = endpoint.accept().await;
    let bytes = vec![3; 1024 * 1024];
    for piece in bytes.chunks(64 * 1024) {
        call.say(data(third, piece)).await;
    }
    call.say(close_request(third)).await;
    let mut received = Vec::new();
    timely("the last bytes", far.read_to_end(&mut received))
        .await
        .unwrap();
    assert!(received == bytes, "{} bytes", received.len());
    assert_eq!(call.hear().await, close_response(third, ""));
    call.say(data(third, b"too late")).await;
    assert_eq!(
        call.hear().await,
        close_response(third, "unrecognized connectID")
    );
    lone.shows("open_endpoint_connections", 0.0).await;
}

/// Sends bytes and a close to an endpoint that does not read, and ends the stream. Returns once the agent has seen the end.
async fn end_with_unread_bytes(args: &[&str]) -> (Lone, Server, TcpStream, Vec<u8>) {
    let endpoint = Endpoint::start().await;
    let target = endpoint.addr().to_string();
    let (lone, mut server, mut call) = connected_with(args).await;
    let (id, _) = dialed(&mut call, 1, "tcp", &target).await;
    let far = endpoint.accept().await;
    // More than the kernel takes.
    let bytes = vec![3; 5 * 1024 * 1024];
    for piece in bytes.chunks(64 * 1024) {
        call.say(data(id, piece)).await;
    }
    call.say(close_request(id)).await;
    drop(call);
    server.call().await;
    (lone, server, far, bytes)
}

#[tokio::test]
async fn bytes_before_a_close_arrive_although_the_stream_ends() {
    let (_lone, _server, mut far, bytes) = end_with_unread_bytes(&[]).await;
    let mut received = Vec::new();
    let ended = timely("the last bytes", far.read_to_end(&mut received)).await;
    assert!(
        ended.is_ok() && received == bytes,
        "{ended:?} after {} bytes",
        received.len()
    );
}

#[tokio::test]
async fn agent_stops_although_an_endpoint_does_not_read_the_last_bytes() {
    let (mut lone, _server, mut far, _) = end_with_unread_bytes(&["--drain-timeout=1s"]).await;
    lone.program().signal(Signal::TERM);
    eventually("the end of the agent", LIMIT, async || {
        lone.program().exited().is_some()
    })
    .await;
    let ended = timely("the end", far.read_to_end(&mut Vec::new())).await;
    assert_eq!(ended.unwrap_err().kind(), ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn drain_waits_until_a_slow_server_has_the_last_bytes() {
    let endpoint = Endpoint::start().await;
    let target = endpoint.addr().to_string();
    let (mut lone, _server, mut call) = connected_with(&["--drain-linger=0"]).await;
    let (first, _) = dialed(&mut call, 1, "tcp", &target).await;
    let mut far = endpoint.accept().await;
    // More than the server's window, less than the agent keeps for the server.
    let answer = vec![5; 3 * 512 * 1024];
    timely("the answer", far.write_all(&answer)).await.unwrap();
    drop(far);
    lone.shows("open_endpoint_connections", 0.0).await;
    lone.program().signal(Signal::TERM);
    lone.program().wait_for_log("draining", LIMIT).await;
    // Late dials are served meanwhile.
    call.say(dial(2, &target)).await;
    let far = endpoint.accept().await;
    hear_bytes(&mut call, first, &answer).await;
    assert_eq!(call.hear().await, close_response(first, ""));
    assert_eq!(call.hear().await, Message::Drain);
    assert_eq!(call.hear().await, opened(DialId(2), first + 1));
    drop(far);
    assert_eq!(call.hear().await, close_response(first + 1, ""));
    call.hear_last().await;
    assert_eq!(lone.program().wait_exit(LIMIT).await.code(), Some(0));
    let log = lone.program().log();
    assert!(log.contains("drained") && !log.contains("lost"), "{log}");
}

#[tokio::test]
async fn upload_that_ends_with_its_stream_is_reset() {
    let endpoint = Endpoint::start().await;
    let target = endpoint.addr().to_string();
    let (_lone, _server, mut call) = connected().await;
    let (id, _) = dialed(&mut call, 1, "tcp", &target).await;
    let mut far = endpoint.accept().await;
    call.say(data(id, b"a part")).await;
    far.read_exact(&mut [0; 6]).await.unwrap();
    drop(call);
    let ended = timely("the end", far.read(&mut [0; 1])).await;
    assert_eq!(ended.unwrap_err().kind(), ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn pending_dial_is_cancelled_on_request() {
    let hole = culvert_tests::black_hole().await;
    let (_lone, _server, mut call) = connected().await;
    call.say(dial(9, &hole.addr().to_string())).await;
    call.say(Message::CloseDial { dial: DialId(9) }).await;
    // The agent sends no answer to the cancelled dial, and the connection id is unknown at once.
    call.say(close_request(1)).await;
    assert_eq!(call.hear().await, close_response(1, "Unknown connectID"));
}

#[tokio::test]
async fn packet_over_the_size_limit_ends_the_stream_and_the_agent_reconnects() {
    let (mut lone, mut server, call) = connected().await;
    call.say(data(1, &vec![0; 5 * 1024 * 1024])).await;
    let mut again = server.call().await;
    again.say(close_request(1)).await;
    assert_eq!(again.hear().await, close_response(1, "Unknown connectID"));
    drop(call);
    lone.shows("open_server_connections", 1.0).await;
    let errors = scrape(lone.health).await.unwrap();
    let name = agent_name("stream_errors_total");
    assert_eq!(errors.value(&name, &[("segment", "to_agent")]), Some(1.0));
    eventually("the agent is still running", LIMIT, async || {
        lone.program().exited().is_none()
    })
    .await;
}
