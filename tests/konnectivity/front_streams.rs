//! Packets of scripted gRPC front ends, and the server's reaction to each.

use std::time::Duration;

use culvert_konnectivity::message::{DialId, Message};
use culvert_proto::{Packet, PacketType};
use culvert_tests::{Mode, Signal, Topology, Transport};
use tokio::time::sleep;

use crate::scripts::{self, Peer, close_request, close_response, data, dial, front, opened};
use crate::support::*;

const TARGET: &str = "10.0.0.1:443";

async fn server_and_agent() -> (Topology, Peer) {
    server_with(&[]).await
}

/// Starts a server with `flags`, and a scripted agent.
async fn server_with(flags: &[&str]) -> (Topology, Peer) {
    let builder = Topology::builder(Mode::Grpc, Transport::Uds);
    let topology = builder.servers(1).server_args(flags).start().await;
    let agent = scripts::agent(&topology, "scripted").await;
    (topology, agent)
}

/// Opens a connection and returns its id on the front end's side.
async fn open_call(front: &mut Peer, agent: &mut Peer, connection: i64) -> i64 {
    front.say(dial(77, TARGET)).await;
    let dial = agent.hear_dial().await;
    agent.say(opened(dial, connection)).await;
    let Message::DialResponse {
        dial,
        connection,
        error,
    } = front.hear().await
    else {
        panic!("not an answer to a dial");
    };
    assert_eq!((dial, error.as_str()), (DialId(77), ""));
    assert_ne!(connection.0, 0);
    connection.0
}

#[tokio::test]
async fn data_before_a_dial_disables_dials_on_that_call() {
    let (topology, mut agent) = server_and_agent().await;
    let mut front = front(&topology).await;
    front.say(data(5, b"early")).await;
    assert_eq!(
        front.hear().await,
        close_response(5, "backend not initialized")
    );
    front.say(dial(1, TARGET)).await;
    let Message::DialResponse { dial, error, .. } = front.hear().await else {
        panic!("not an answer to a dial");
    };
    assert_eq!(dial, DialId(1));
    assert!(error.contains("open a stream for each dial"), "{error}");
    front.say(close_request(5)).await;
    assert_eq!(front.hear().await, close_response(5, ""));
    // The server passed no dial on: the agent's next message is the answer to the fence.
    agent.say(data(9, b"fence")).await;
    assert_eq!(agent.hear().await, scripts::close_request(9));
    drop(front);
    server_is_idle(&topology).await;
}

#[tokio::test]
async fn a_close_before_a_dial_is_answered() {
    let (topology, mut agent) = server_and_agent().await;
    let mut front = front(&topology).await;
    front.say(close_request(5)).await;
    assert_eq!(
        front.hear().await,
        close_response(5, "backend uninitialized")
    );
    let id = open_call(&mut front, &mut agent, 3).await;
    front.say(data(id, b"after all")).await;
    agent.hear_bytes(3, b"after all").await;
}

#[tokio::test]
async fn mismatched_ids_close_the_connection() {
    let (topology, mut agent) = server_and_agent().await;
    let mut front = front(&topology).await;
    let id = open_call(&mut front, &mut agent, 3).await;
    front.say(data(id, b"right")).await;
    agent.hear_bytes(3, b"right").await;
    front.say(data(id + 1000, b"wrong")).await;
    let text = "mismatched connection IDs";
    assert_eq!(front.hear().await, close_response(id, text));
    assert_eq!(front.hear().await, close_response(id + 1000, text));
    assert_eq!(agent.hear().await, close_request(3));
    server_shows(&topology, "established_connections", &[], 0.0).await;
}

#[tokio::test]
async fn unexpected_packets_do_not_disturb_the_connection() {
    let (topology, mut agent) = server_and_agent().await;
    let mut front = front(&topology).await;
    front
        .say_packet(Packet {
            r#type: 99,
            payload: None,
        })
        .await;
    let id = open_call(&mut front, &mut agent, 3).await;
    front.say(data(0, b"nobody's")).await;
    front.say(data(id, b"")).await;
    front
        .say_packet(Packet {
            r#type: 99,
            payload: None,
        })
        .await;
    front
        .say_packet(Packet {
            r#type: PacketType::Drain as i32,
            payload: None,
        })
        .await;
    front.say(Message::CloseDial { dial: DialId(77) }).await;
    front.say(close_response(id, "not yours to say")).await;
    front.say(opened(DialId(77), id)).await;
    front.say(dial(78, TARGET)).await;
    let Message::DialResponse {
        dial,
        connection,
        error,
    } = front.hear().await
    else {
        panic!("not an answer to a dial");
    };
    assert_eq!((dial.0, connection.0), (78, 0));
    assert!(error.contains("no dial any more"), "{error}");
    front.say(data(id, b"goes on")).await;
    agent.hear_bytes(3, b"goes on").await;
    agent.say(data(3, b"both ways")).await;
    front.hear_bytes(id, b"both ways").await;
}

#[tokio::test]
async fn close_is_answered_without_waiting_for_the_agent() {
    let (topology, mut agent) = server_and_agent().await;
    let mut front = front(&topology).await;
    let id = open_call(&mut front, &mut agent, 3).await;
    front.say(data(id, b"last words")).await;
    front.say(close_request(id)).await;
    // The server answers without any packet from the agent.
    assert_eq!(front.hear().await, close_response(id, ""));
    agent.hear_bytes(3, b"last words").await;
    assert_eq!(agent.hear().await, close_request(3));
    front.say(close_request(id)).await;
    assert_eq!(front.hear().await, close_response(id, ""));
    server_shows(&topology, "established_connections", &[], 0.0).await;
}

#[tokio::test]
async fn pending_dial_can_be_cancelled() {
    let (topology, mut agent) = server_and_agent().await;
    let front = front(&topology).await;
    front.say(dial(77, TARGET)).await;
    let pending = agent.hear_dial().await;
    front.say(Message::CloseDial { dial: DialId(78) }).await;
    front.say(Message::CloseDial { dial: DialId(77) }).await;
    assert_eq!(agent.hear().await, Message::CloseDial { dial: pending });
    agent.say(opened(pending, 3)).await;
    assert_eq!(agent.hear().await, close_request(3));
    server_shows(&topology, "pending_backend_dials", &[], 0.0).await;
    assert_eq!(dial_failures(&topology, "frontend_close").await, 1.0);
}

#[tokio::test]
async fn end_of_the_call_closes_the_connection() {
    let (topology, mut agent) = server_and_agent().await;
    let mut broken = front(&topology).await;
    open_call(&mut broken, &mut agent, 3).await;
    drop(broken);
    assert_eq!(agent.hear().await, close_request(3));
    let mut orderly = front(&topology).await;
    open_call(&mut orderly, &mut agent, 4).await;
    orderly.end_sending();
    assert_eq!(agent.hear().await, close_request(4));
    orderly.hear_end_after_close().await;
    server_is_idle(&topology).await;
}

#[tokio::test]
async fn close_by_the_agent_reaches_the_front_end() {
    let (topology, mut agent) = server_and_agent().await;
    let mut front = front(&topology).await;
    let id = open_call(&mut front, &mut agent, 3).await;
    agent.say(data(3, b"bye")).await;
    agent
        .say(close_response(3, "some error of the agent"))
        .await;
    front.hear_bytes(id, b"bye").await;
    assert_eq!(front.hear().await, close_response(id, ""));
    drop(agent);
    front.say(close_request(id)).await;
    assert_eq!(front.hear().await, close_response(id, ""));
}

#[tokio::test]
async fn loss_of_the_agent_reaches_the_front_end_as_a_close() {
    let (topology, mut agent) = server_and_agent().await;
    let mut front = front(&topology).await;
    let id = open_call(&mut front, &mut agent, 3).await;
    drop(agent);
    assert_eq!(front.hear().await, close_response(id, ""));
}

#[tokio::test]
async fn data_at_the_size_limit_passes_and_larger_data_ends_only_its_call() {
    let (topology, mut agent) = server_and_agent().await;
    let mut good = front(&topology).await;
    let good_id = open_call(&mut good, &mut agent, 1).await;
    let bytes: Vec<u8> = (0..4 * 1024 * 1024_u32).map(|i| (i % 251) as u8).collect();
    let (_, ()) = tokio::join!(good.say(data(good_id, &bytes)), agent.hear_bytes(1, &bytes));
    let mut bad = front(&topology).await;
    let bad_id = open_call(&mut bad, &mut agent, 2).await;
    bad.say(data(bad_id, &vec![0; 5 * 1024 * 1024])).await;
    assert_eq!(agent.hear().await, close_request(2));
    bad.hear_end_after_close().await;
    let refused = [("segment", "from_client"), ("packet_type", "Unknown")];
    assert!(server_value(&topology, "stream_errors_total", &refused).await > 0.0);
    good.say(data(good_id, b"unharmed")).await;
    agent.hear_bytes(1, b"unharmed").await;
}

#[tokio::test]
async fn many_calls_share_one_http2_connection() {
    let (topology, mut agent) = server_and_agent().await;
    let calls = scripts::fronts(&topology, 300).await;
    let mut open = Vec::new();
    for (mut call, connection) in calls.into_iter().zip(1..) {
        let id = open_call(&mut call, &mut agent, connection).await;
        open.push((call, id, connection));
    }
    for (call, id, connection) in &open {
        let text = connection.to_string();
        call.say(data(*id, text.as_bytes())).await;
        agent.hear_bytes(*connection, text.as_bytes()).await;
    }
    server_shows(&topology, "established_connections", &[], 300.0).await;
    server_shows(
        &topology,
        "grpc_connections",
        &[("service_method", "Proxy")],
        300.0,
    )
    .await;
    drop(open);
    server_is_idle(&topology).await;
}

#[tokio::test]
async fn a_drain_waits_for_a_client_that_still_reads() {
    const PIECES: usize = 10;
    const PIECE_BYTES: usize = 30_000;
    let (mut topology, mut agent) = server_with(&["--graceful-shutdown-timeout=10m"]).await;
    let mut front = front(&topology).await;
    let id = open_call(&mut front, &mut agent, 3).await;
    // More than the client's window, less than the server's queue.
    for _ in 0..PIECES {
        agent.say(data(3, &[7; PIECE_BYTES])).await;
    }
    agent.say(close_response(3, "")).await;
    server_shows(&topology, "established_connections", &[], 0.0).await;
    topology.server(0).signal(Signal::TERM);
    topology.server(0).wait_for_log("draining", LIMIT).await;
    // A server without connections ends after 5 s.
    sleep(Duration::from_secs(6)).await;
    front.hear_bytes(id, &[7; PIECES * PIECE_BYTES]).await;
    assert_eq!(front.hear().await, close_response(id, ""));
    drop(front);
    let status = topology.server(0).wait_exit(LIMIT).await;
    assert_eq!(status.code(), Some(0));
    assert!(topology.server(0).log().contains("drained"));
}

#[tokio::test]
async fn a_drain_waits_for_an_agent_that_still_reads() {
    const PIECES: usize = 20;
    const PIECE_BYTES: usize = 30_000;
    let (mut topology, mut agent) = server_with(&["--graceful-shutdown-timeout=10m"]).await;
    let mut front = front(&topology).await;
    let id = open_call(&mut front, &mut agent, 3).await;
    // More than the agent's window and HTTP/2, less than the server's queue.
    for _ in 0..PIECES {
        front.say(data(id, &[7; PIECE_BYTES])).await;
    }
    front.say(close_request(id)).await;
    assert_eq!(front.hear().await, close_response(id, ""));
    drop(front);
    server_shows(&topology, "established_connections", &[], 0.0).await;
    topology.server(0).signal(Signal::TERM);
    topology.server(0).wait_for_log("draining", LIMIT).await;
    // A server without connections ends after 5 s.
    sleep(Duration::from_secs(6)).await;
    agent.hear_bytes(3, &[7; PIECES * PIECE_BYTES]).await;
    assert_eq!(agent.hear().await, close_request(3));
    let status = topology.server(0).wait_exit(LIMIT).await;
    assert_eq!(status.code(), Some(0));
    assert!(topology.server(0).log().contains("drained"));
}
