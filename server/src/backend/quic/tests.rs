//! Dials of agents with both links.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

mod peer;
mod socket;

use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use culvert_native::hello::HelloError;
use culvert_native::quic::words::Preferred;
use culvert_stream::{CloseReason, Sink as _, Source as _};
use tokio::task::yield_now;
use tokio::time::{Instant, timeout};

use self::peer::{Server, until};
use self::socket::Losses;
use crate::tunnel::{Health, Peer};

const LIMIT: Duration = Duration::from_secs(30);

/// Longest time of a dial whose first link is silent: 0.7 s until the QUIC link counts as silent, 1.5 s until the TCP
/// connection does, and time for a busy machine. Without a look at the other link a dial needs at least 7 s.
const MOVED: Duration = Duration::from_secs(5);

const REQUESTS: [&str; 2] = ["to_agent", "DIAL_REQ"];

#[tokio::test]
async fn dial_that_moves_from_quic_to_tcp_counts_once() {
    let server = Server::start();
    let tcp = server.tcp("a").await;
    let quic = server.quic(&tcp, "a", Preferred::Quic).await.unwrap();
    let lost = async {
        let _unanswered = quic.connection.accept_bi().await.unwrap();
        quic.connection.close(0_u32.into(), b"test");
    };
    let (dialed, ()) = tokio::join!(server.dial(), lost);
    dialed.unwrap();
    assert_eq!(tcp.dials.load(Ordering::Relaxed), 1);
    assert_eq!(server.value("quic_dials_total", &["moved"]), 1.0);
    assert_eq!(server.value("stream_packets_total", &REQUESTS), 1.0);
}

#[tokio::test]
async fn dial_on_a_silent_tcp_connection_moves_to_quic() {
    let server = Server::start();
    let tcp = server.tcp("a").await;
    let quic = server.quic(&tcp, "a", Preferred::Tcp).await.unwrap();
    tcp.silence.cancel();
    let started = Instant::now();
    let (dialed, _stream) = tokio::join!(server.dial(), quic.accept());
    let lasted = started.elapsed();
    dialed.unwrap();
    assert!(lasted < MOVED, "{lasted:?}");
    assert_eq!(server.value("quic_dials_total", &["opened"]), 1.0);
    assert_eq!(server.value("stream_packets_total", &REQUESTS), 1.0);
}

#[tokio::test]
async fn dial_on_two_silent_links_reaches_another_agent_in_bounded_time() {
    let server = Server::start();
    let other = server.tcp("b").await;
    // The agent with fewer connections comes first.
    let _open = server.dial().await.unwrap();
    let tcp = server.tcp("a").await;
    let quic = server.quic(&tcp, "a", Preferred::Quic).await.unwrap();
    quic.socket.set(Losses::All);
    tcp.silence.cancel();
    let started = Instant::now();
    let _moved = server.dial().await.unwrap();
    let lasted = started.elapsed();
    assert!(lasted < MOVED, "{lasted:?}");
    assert_eq!(server.value("quic_dials_total", &["moved"]), 1.0);
    assert_eq!(other.dials.load(Ordering::Relaxed), 2);
    // The next dial avoids the silent agent: the only request goes to the other agent.
    let requests = server.value("stream_packets_total", &REQUESTS);
    server.dial().await.unwrap();
    assert_eq!(
        server.value("stream_packets_total", &REQUESTS),
        requests + 1.0
    );
    assert_eq!(server.value("quic_dials_total", &["moved"]), 1.0);
    assert_eq!(other.dials.load(Ordering::Relaxed), 3);
}

/// quinn ends a connection if one of its streams has more than 1,024 gaps.
#[tokio::test]
async fn dials_go_on_over_tcp_after_gaps_in_a_stream_have_ended_the_link() {
    let server = Server::start();
    let tcp = server.tcp("a").await;
    let quic = server.quic(&tcp, "a", Preferred::Quic).await.unwrap();
    let (dialed, (mut send, _receive)) = tokio::join!(server.dial(), quic.accept());
    let mut connection = dialed.unwrap();
    quic.socket.set(Losses::EverySecondSent);
    // Each write becomes a packet. All writes together fit into the window of the stream.
    let writes = async {
        for _ in 0..10_000 {
            send.write_all(&[7; 100]).await.unwrap();
            yield_now().await;
        }
        std::future::pending::<()>().await;
    };
    let end = async {
        loop {
            match connection.source.recv().await {
                Ok(Some(_)) => {}
                end => return end.err(),
            }
        }
    };
    let end = tokio::select! {
        end = timeout(LIMIT, end) => end.unwrap(),
        () = writes => None,
    };
    assert_eq!(end, Some(CloseReason::AgentLost));
    quic.socket.set(Losses::None);
    let cause = timeout(LIMIT, quic.connection.closed()).await.unwrap();
    let cause = cause.to_string();
    assert!(cause.contains("too many gaps in stream buffer"), "{cause}");
    let _open = server.dial().await.unwrap();
    assert_eq!(tcp.dials.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn agent_learns_that_packets_of_the_server_are_lost() {
    let server = Server::start();
    let tcp = server.tcp("a").await;
    let mut quic = server.quic(&tcp, "a", Preferred::Quic).await.unwrap();
    let (dialed, (_send, mut receive)) = tokio::join!(server.dial(), quic.accept());
    let mut connection = dialed.unwrap();
    quic.socket.set(Losses::HalfReceived);
    let send = async {
        for _ in 0..64 {
            let chunk = Bytes::from(vec![7; 64 * 1024]);
            connection.sink.send(chunk).await.unwrap();
        }
    };
    let mut bytes = vec![0; 4 << 20];
    let read = async { receive.read_exact(&mut bytes).await.unwrap() };
    let both = async { tokio::join!(send, read) };
    timeout(LIMIT, both).await.unwrap();
    let mut words = String::new();
    let reading = async {
        while !words.contains("slow\n") {
            let chunk = quic.control.1.read_chunk(usize::MAX, true).await.unwrap();
            words.push_str(std::str::from_utf8(&chunk.unwrap().bytes).unwrap());
        }
    };
    timeout(LIMIT, reading).await.unwrap();
}

#[tokio::test]
async fn link_without_tcp_connection_is_a_peer_until_its_last_stream_ends() {
    let server = Server::start();
    let tcp = server.tcp("a").await;
    let quic = server.quic(&tcp, "a", Preferred::Quic).await.unwrap();
    let (dialed, _stream) = tokio::join!(server.dial(), quic.accept());
    let connection = dialed.unwrap();
    let peers = || server.agents.registry.peers();
    let kinds: Vec<_> = peers().into_iter().map(|peer| peer.kind).collect();
    assert_eq!(kinds, ["agent, native and QUIC"]);
    tcp.task.abort();
    let address = quic.endpoint.local_addr().unwrap();
    let row = Peer {
        name: "a".to_owned(),
        kind: "agent, QUIC without TCP".to_owned(),
        health: Health::Draining,
        connections: 1,
        address: Some(address),
        identifiers: Vec::new(),
        more_identifiers: 0,
    };
    until(|| peers() == [row.clone()]).await;
    // The agent connects again, without QUIC.
    let _tcp = server.tcp("a").await;
    let kinds: Vec<_> = peers().into_iter().map(|peer| peer.kind).collect();
    assert_eq!(kinds, ["agent, native", row.kind.as_str()]);
    drop(connection);
    until(|| peers().len() == 1).await;
    timeout(LIMIT, quic.connection.closed()).await.unwrap();
}

#[tokio::test]
async fn session_of_another_agent_with_the_same_certificate_is_refused() {
    let server = Server::start();
    let tcp = server.tcp("a").await;
    let refused = server.quic(&tcp, "b", Preferred::Quic).await.err();
    let Some(HelloError::Refused(text)) = refused else {
        panic!("{refused:?}");
    };
    assert!(
        text.starts_with("the identity of the agent differs"),
        "{text}"
    );
    server.quic(&tcp, "a", Preferred::Quic).await.unwrap();
}
