//! Agents with the same agent id, the same connection ids, or both; and draining agents.

use culvert_kit::client::BoxedStream;
use culvert_konnectivity::message::Message;
use culvert_tests::{Mode, Topology, Transport, eventually};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::scripts::{self, Peer, close_request, close_response, data, opened};
use crate::support::*;

const TARGET: &str = "10.0.0.1:443";

async fn server_alone(mode: Mode) -> Topology {
    let builder = Topology::builder(mode, Transport::Uds);
    builder.servers(1).start().await
}

/// Opens a connection, and expects the server to choose this agent.
async fn open_through(topology: &Topology, agent: &mut Peer, connection: i64) -> BoxedStream {
    let answers = async {
        let dial = agent.hear_dial().await;
        agent.say(opened(dial, connection)).await;
    };
    let (connected, ()) = tokio::join!(topology.connect(TARGET), answers);
    connected.unwrap()
}

async fn read(stream: &mut BoxedStream, expected: &[u8]) {
    let mut bytes = vec![0; expected.len()];
    timely("bytes", stream.read_exact(&mut bytes))
        .await
        .unwrap();
    assert_eq!(bytes, expected);
}

/// Makes the server prefer other agents. Returns after the server has answered a packet sent after the drain,
/// and therefore has processed the drain.
async fn drain(agent: &mut Peer) {
    agent.say(Message::Drain).await;
    agent.say(data(4711, b"fence")).await;
    assert_eq!(agent.hear().await, close_request(4711));
}

#[tokio::test]
async fn streams_of_agents_with_one_id_are_kept_apart() {
    for mode in MODES {
        let topology = server_alone(mode).await;
        let mut old = scripts::agent(&topology, "same").await;
        server_shows(&topology, "ready_backends", &[], 1.0).await;
        let mut new = scripts::agent(&topology, "same").await;
        let streams = [("service_method", "Connect")];
        server_shows(&topology, "grpc_connections", &streams, 2.0).await;
        // Several streams of one agent id count as one agent.
        server_shows(&topology, "ready_backends", &[], 1.0).await;
        let mut first = open_through(&topology, &mut old, 1).await;
        drain(&mut old).await;
        let mut second = open_through(&topology, &mut new, 1).await;

        old.say(data(1, b"from the old one")).await;
        new.say(data(1, b"from the new one")).await;
        read(&mut first, b"from the old one").await;
        read(&mut second, b"from the new one").await;
        for (stream, text) in [(&mut first, b"to the old"), (&mut second, b"to the new")] {
            stream.write_all(text).await.unwrap();
            stream.flush().await.unwrap();
        }
        old.hear_bytes(1, b"to the old").await;
        new.hear_bytes(1, b"to the new").await;

        // A close on one stream does not close the connection with the same id on the other stream.
        new.say(close_response(1, "")).await;
        assert!(read_rest(&mut second).await.is_empty());
        drop(second);
        old.say(data(1, b"still there")).await;
        read(&mut first, b"still there").await;
        let mut second = open_through(&topology, &mut new, 2).await;
        drop(old);
        assert!(read_rest(&mut first).await.is_empty());
        new.say(data(2, b"unharmed")).await;
        read(&mut second, b"unharmed").await;
        server_shows(&topology, "ready_backends", &[], 1.0).await;
        drop((first, second, new));
        server_is_idle(&topology).await;
    }
}

#[tokio::test]
async fn agent_cannot_touch_the_connections_of_another_agent() {
    for mode in MODES {
        let topology = server_alone(mode).await;
        let mut victim = scripts::agent(&topology, "victim").await;
        server_shows(&topology, "ready_backends", &[], 1.0).await;
        let dialed = async {
            let dial = victim.hear_dial().await;
            // Before the real answer, another agent answers with the same ids.
            let mut thief = scripts::agent(&topology, "victim").await;
            thief.say(opened(dial, 7)).await;
            assert_eq!(thief.hear().await, close_request(7));
            victim.say(opened(dial, 7)).await;
            thief
        };
        let (connected, mut thief) = tokio::join!(topology.connect(TARGET), dialed);
        let mut stream = connected.unwrap();
        thief.say(data(7, b"forged")).await;
        assert_eq!(thief.hear().await, close_request(7));
        thief.say(close_response(7, "forged")).await;
        thief.say(close_request(7)).await;
        victim.say(data(7, b"genuine")).await;
        read(&mut stream, b"genuine").await;
        stream.write_all(b"secret").await.unwrap();
        stream.flush().await.unwrap();
        victim.hear_bytes(7, b"secret").await;
        assert_eq!(dial_failures(&topology, "unrecognized_response").await, 1.0);
        // The thief has received nothing else.
        thief.say(data(8, b"fence")).await;
        assert_eq!(thief.hear().await, close_request(8));
    }
}

#[tokio::test]
async fn draining_agent_gets_dials_only_without_another_agent() {
    for mode in MODES {
        let topology = server_alone(mode).await;
        let mut draining = scripts::agent(&topology, "draining").await;
        let mut kept = open_through(&topology, &mut draining, 1).await;
        drain(&mut draining).await;
        let fallback = open_through(&topology, &mut draining, 2).await;
        let mut other = scripts::agent(&topology, "other").await;
        server_shows(&topology, "ready_backends", &[], 2.0).await;
        let mut held = vec![fallback];
        for connection in 1..=8 {
            held.push(open_through(&topology, &mut other, connection).await);
        }
        draining.say(data(1, b"served to its end")).await;
        read(&mut kept, b"served to its end").await;
        drop(other);
        server_shows(&topology, "ready_backends", &[], 1.0).await;
        held.push(open_through(&topology, &mut draining, 3).await);
        drop((held, kept, draining));
        server_is_idle(&topology).await;
    }
}

#[tokio::test]
async fn dials_spread_over_equal_agents() {
    let topology = server_alone(Mode::Grpc).await;
    let mut one = scripts::agent(&topology, "one").await;
    let mut two = scripts::agent(&topology, "two").await;
    server_shows(&topology, "ready_backends", &[], 2.0).await;
    let (mut first, mut second) = (0, 0);
    let mut held = Vec::new();
    eventually("both agents were chosen", LIMIT, async || {
        let answers = async {
            tokio::select! {
                dial = one.hear_dial() => { first += 1; one.say(opened(dial, first)).await }
                dial = two.hear_dial() => { second += 1; two.say(opened(dial, second)).await }
            }
        };
        let (connected, ()) = tokio::join!(topology.connect(TARGET), answers);
        held.push(connected.unwrap());
        first > 0 && second > 0
    })
    .await;
}

#[tokio::test]
async fn agent_cannot_claim_the_id_of_another_certificate() {
    let builder = Topology::builder(Mode::HttpConnect, Transport::Uds).servers(1);
    let builder = builder.server_args(&["--agent-id-from=certificate"]);
    let mut topology = builder.agents(1).start().await;
    server_shows(&topology, "ready_backends", &[], 1.0).await;
    // The common name of the native agent's certificate, which is the id of this agent.
    let id = "culvert lab agent";
    let claims = [("agentid", id), ("agentidentifiers", "")];
    let thief = scripts::agent_as(&topology, &topology.pki().client, &claims).await;
    let thief = thief.unwrap();
    server_shows(&topology, "ready_backends", &[], 2.0).await;
    // A second stream with the certificate of the native agent counts as the same agent.
    let second = scripts::agent(&topology, "other").await;
    let streams = [("service_method", "Connect")];
    server_shows(&topology, "grpc_connections", &streams, 3.0).await;
    server_shows(&topology, "ready_backends", &[], 2.0).await;
    let log = topology.server(0).log();
    for text in [id, "culvert lab client"] {
        let connected = |line: &&str| line.contains("agent connected") && line.contains(text);
        assert!(log.lines().any(|line| connected(&line)), "{log}");
    }
    drop((thief, second));
}
