//! Dials and their outcomes, in both modes.

use std::time::Duration;

use culvert_kit::services::Services;
use culvert_konnectivity::message::Message;
use culvert_tests::{Mode, Topology, Transport, black_hole, eventually};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::scripts::{self, NO_CONNECTION, close_request, opened};
use crate::support::*;

async fn server_alone(mode: Mode, args: &[&str]) -> Topology {
    let builder = Topology::builder(mode, Transport::Uds);
    builder.servers(1).server_args(args).start().await
}

#[tokio::test]
async fn dial_without_an_agent_is_refused() {
    for mode in MODES {
        let topology = server_alone(mode, &[]).await;
        let error = refusal(&topology, "10.0.0.1:443").await;
        let text = "currently no tunnels available: No agent available";
        assert_refused(&error, 500, text, "No agent available");
        assert_eq!(dial_failures(&topology, "no_agent").await, 1.0);
        server_is_idle(&topology).await;
    }
}

#[tokio::test]
async fn dial_refused_by_the_endpoint_reports_its_error() {
    for (mode, transport) in FRONTS {
        let topology = Topology::simple(mode, transport).await;
        let error = refusal(&topology, "127.0.0.1:1").await;
        let text = "dial tcp 127.0.0.1:1: connect: connection refused";
        assert_eq!(error.refusal(), Some(text));
        assert_refused(&error, 502, text, text);
        let error = refusal(&topology, "127.0.0.1").await;
        assert_refused(&error, 502, "missing port", "missing port");
        assert_eq!(dial_failures(&topology, "error_response").await, 2.0);
        agent_shows(
            &topology,
            "endpoint_dial_failure_total",
            &[("reason", "unknown")],
            2.0,
        )
        .await;
        server_is_idle(&topology).await;
    }
}

#[tokio::test]
async fn dial_of_a_too_long_address_reaches_no_agent() {
    let services = Services::start().await.unwrap();
    for mode in MODES {
        let topology = Topology::simple(mode, Transport::Uds).await;
        let mut stream = topology.connect(&services.raw.to_string()).await.unwrap();
        stream.write_all(b"echo\nx").await.unwrap();
        assert_eq!(timely("an echo", stream.read_u8()).await.unwrap(), b'x');
        for bytes in [5_000, 300_000] {
            let error = refusal(&topology, &format!("{}:443", "a".repeat(bytes))).await;
            let text = format!("the address or protocol to dial has {} bytes", bytes + 4);
            assert_refused(&error, 400, &text, &text);
        }
        stream.write_all(b"y").await.unwrap();
        assert_eq!(timely("an echo", stream.read_u8()).await.unwrap(), b'y');
        assert_eq!(dial_failures(&topology, "error_response").await, 2.0);
    }
}

#[tokio::test]
async fn a_target_that_does_not_answer_times_out_at_the_agent() {
    let hole = black_hole().await;
    let target = hole.addr().to_string();
    for mode in MODES {
        let topology = Topology::simple(mode, Transport::Uds).await;
        let error = refusal(&topology, &target).await;
        let text = format!("dial tcp {target}: i/o timeout");
        assert_refused(&error, 504, &text, &text);
        agent_shows(
            &topology,
            "endpoint_dial_failure_total",
            &[("reason", "timeout")],
            1.0,
        )
        .await;
    }
}

#[tokio::test]
async fn unanswered_dial_times_out_and_the_agent_stays_in_use() {
    for mode in MODES {
        let topology = server_alone(mode, &["--backend-dial-timeout=1s"]).await;
        let mut agent = scripts::agent(&topology, "mute").await;
        let error = refusal(&topology, "10.0.0.1:443").await;
        let text = "timed out waiting for backend dial";
        assert_refused(&error, 504, &format!("Backend dial timeout: {text}"), text);
        assert_eq!(dial_failures(&topology, "backend_dial_timeout").await, 1.0);
        let dial = agent.hear_dial().await;
        assert_eq!(agent.hear().await, Message::CloseDial { dial });
        // The agent stays in use, and the server closes the connection of a late answer.
        agent.say(opened(dial, 9)).await;
        assert_eq!(agent.hear().await, close_request(9));
        assert_eq!(dial_failures(&topology, "unrecognized_response").await, 1.0);
        let answers = async {
            let dial = agent.hear_dial().await;
            agent.say(opened(dial, 10)).await;
        };
        let (connected, ()) = tokio::join!(topology.connect("10.0.0.1:443"), answers);
        connected.unwrap();
    }
}

#[tokio::test]
async fn dials_beyond_the_limit_of_pending_dials_fail_at_once() {
    for mode in MODES {
        let topology = server_alone(mode, &["--max-pending-dials=1"]).await;
        let mut agent = scripts::agent(&topology, "slow").await;
        let pending = topology.connect("10.0.0.1:443");
        tokio::pin!(pending);
        let dial = tokio::select! {
            connected = &mut pending => panic!("connected: {}", connected.is_ok()),
            dial = agent.hear_dial() => dial,
        };
        server_shows(&topology, "pending_backend_dials", &[], 1.0).await;
        let error = refusal(&topology, "10.0.0.2:443").await;
        let text =
            "No agent available: 1 dials wait for an answer, the limit of --max-pending-dials";
        assert_refused(&error, 503, text, text);
        assert_eq!(dial_failures(&topology, "too_many_dials").await, 1.0);
        server_shows(&topology, "pending_backend_dials", &[], 1.0).await;
        agent.say(opened(dial, 1)).await;
        let _first = timely("the first connection", pending).await.unwrap();
        let answers = async {
            let dial = agent.hear_dial().await;
            agent.say(opened(dial, 2)).await;
        };
        let (third, ()) = tokio::join!(topology.connect("10.0.0.3:443"), answers);
        third.unwrap();
        assert_eq!(dial_failures(&topology, "too_many_dials").await, 1.0);
    }
}

#[tokio::test]
async fn agent_with_the_most_connections_gets_no_dial_until_one_closes() {
    let services = Services::start().await.unwrap();
    let target = services.raw.to_string();
    for mode in MODES {
        let topology = Topology::builder(mode, Transport::Uds)
            .servers(1)
            .server_args(&["--max-connections-per-agent=1"])
            .agents(1)
            .start()
            .await;
        let mut first = Innocent::open(&topology, services.raw).await;
        let error = refusal(&topology, &target).await;
        assert_refused(&error, 500, "No agent available", "No agent available");
        assert_eq!(dial_failures(&topology, "no_agent").await, 1.0);
        first.still_echoes("a refused dial").await;
        drop(first);
        let next = eventually("a dial succeeds", LIMIT, async || {
            topology.connect(&target).await
        })
        .await;
        Innocent::over(next).await;
    }
}

#[tokio::test]
async fn agent_that_stops_reading_is_retired() {
    let topology = server_alone(Mode::HttpConnect, &["--backend-dial-timeout=1s"]).await;
    let mut agent = scripts::agent(&topology, "deaf").await;
    let answers = async {
        let dial = agent.hear_dial().await;
        agent.say(opened(dial, 1)).await;
    };
    let (connected, ()) = tokio::join!(topology.connect("10.0.0.1:443"), answers);
    let mut stream = connected.unwrap();
    // From now on the agent reads nothing, so the sent bytes pile up to a limit.
    let flood = tokio::spawn(async move {
        let piece = vec![0; 64 * 1024];
        while stream.write_all(&piece).await.is_ok() {}
    });
    let text = "timed out waiting for backend dial";
    eventually("the stream is full", LIMIT, async || {
        let error = refusal(&topology, "10.0.0.1:443").await;
        let refused = error.refusal().unwrap_or_default().to_owned();
        (refused == format!("Failed to tunnel dial request: {text}"))
            .then_some(())
            .ok_or(refused)
    })
    .await;
    server_shows(&topology, "ready_backends", &[], 0.0).await;
    timely("the flooded connection is closed", flood)
        .await
        .unwrap();
    server_is_idle(&topology).await;
    let error = refusal(&topology, "10.0.0.1:443").await;
    assert_refused(&error, 500, "No agent available", "");
}

#[tokio::test]
async fn end_of_the_agent_stream_fails_its_pending_dials_at_once() {
    for mode in MODES {
        let topology = server_alone(mode, &[]).await;
        let mut agent = scripts::agent(&topology, "mortal").await;
        let dies = async {
            agent.hear_dial().await;
            drop(agent);
        };
        let (error, ()) = tokio::join!(refusal(&topology, "10.0.0.1:443"), dies);
        let text = "the agent's stream ended while the dial was pending";
        assert_refused(&error, 502, &format!("Backend context error: {text}"), text);
        assert_eq!(dial_failures(&topology, "backend_close").await, 1.0);
        server_is_idle(&topology).await;
    }
}

#[tokio::test]
async fn a_pending_dial_moves_to_another_agent_when_its_own_dies() {
    for mode in MODES {
        let topology = server_alone(mode, &[]).await;
        let mut one = scripts::agent(&topology, "one").await;
        let mut two = scripts::agent(&topology, "two").await;
        server_shows(&topology, "ready_backends", &[], 2.0).await;
        let survives = async {
            let (mut other, died) = tokio::select! {
                _ = one.hear_dial() => (two, one),
                _ = two.hear_dial() => (one, two),
            };
            drop(died);
            let dial = other.hear_dial().await;
            other.say(opened(dial, 1)).await;
            other
        };
        let (connected, mut agent) = tokio::join!(topology.connect("10.0.0.1:443"), survives);
        let mut stream = connected.unwrap();
        stream.write_all(b"hello").await.unwrap();
        stream.flush().await.unwrap();
        agent.hear_bytes(1, b"hello").await;
        server_shows(&topology, "ready_backends", &[], 1.0).await;
    }
}

#[tokio::test]
async fn client_that_leaves_cancels_its_pending_dial() {
    for mode in MODES {
        let topology = server_alone(mode, &[]).await;
        let mut agent = scripts::agent(&topology, "slow").await;
        let dial = {
            let connect = topology.connect("10.0.0.1:443");
            tokio::select! {
                connected = connect => panic!("connected: {}", connected.is_ok()),
                dial = agent.hear_dial() => dial,
            }
        };
        assert_eq!(agent.hear().await, Message::CloseDial { dial });
        server_shows(&topology, "pending_backend_dials", &[], 0.0).await;
        assert_eq!(dial_failures(&topology, "frontend_close").await, 1.0);
        agent.say(opened(dial, 5)).await;
        assert_eq!(agent.hear().await, close_request(5));
        assert_eq!(dial_failures(&topology, "unrecognized_response").await, 1.0);
        server_is_idle(&topology).await;
    }
}

#[tokio::test]
async fn killed_agent_ends_its_connections_and_a_new_agent_works() {
    for mode in MODES {
        let services = culvert_kit::services::Services::start().await.unwrap();
        let builder = Topology::builder(mode, Transport::Uds);
        let mut topology = builder.servers(1).agents(1).start().await;
        let mut stream = open(&topology, &services.raw.to_string()).await;
        stream.write_all(b"echo\n").await.unwrap();
        topology.kill_agent(0);
        assert!(read_rest(&mut stream).await.is_empty());
        drop(stream);
        server_is_idle(&topology).await;
        let closed = async || services.open_connections() == 0;
        eventually("the endpoint's connection ended", LIMIT, closed).await;
        topology.start_agent(0).await;
        topology.wait_for_agents().await;
        let mut innocent = Innocent::open(&topology, services.raw).await;
        innocent.still_echoes("a new agent").await;
    }
}

#[tokio::test]
async fn silent_agent_is_avoided_while_another_agent_answers() {
    let topology = server_alone(Mode::HttpConnect, &[]).await;
    let mut silent = scripts::agent(&topology, "silent").await;
    let dialing = topology.connect("10.0.0.1:443");
    tokio::pin!(dialing);
    tokio::select! {
        _ = &mut dialing => panic!("the dial ended without an answer"),
        _ = silent.hear_dial() => {}
    }
    assert_eq!(silent.hear_any().await, close_request(NO_CONNECTION));
    let mut other = scripts::agent(&topology, "other").await;
    // The pending dial moves to the other agent, because the silent agent does not answer the probe.
    let answers = async {
        let dial = other.hear_dial().await;
        other.say(opened(dial, 1)).await;
    };
    let (moved, ()) = tokio::join!(dialing, answers);
    let mut held = vec![moved.unwrap()];
    for connection in 2..=4 {
        let answers = async {
            let dial = other.hear_dial().await;
            other.say(opened(dial, connection)).await;
        };
        let target = "10.0.0.1:443";
        let limit = Duration::from_secs(20);
        let front = topology.front_end();
        let connect = culvert_kit::client::connect(front, target, limit);
        let (connected, ()) = tokio::join!(connect, answers);
        held.push(connected.unwrap());
    }
}
