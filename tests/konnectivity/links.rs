//! Server and agent on two sides of a link that loses, delays or stops packets.

use std::time::Duration;

use culvert_host::net::long_path;
use culvert_kit::check;
use culvert_kit::client::BoxedStream;
use culvert_kit::pki::CLUSTER_NAME;
use culvert_kit::services::Services;
use culvert_tests::link::{self, Conditions, FAR, Link, most_unsent_bytes, slow_path};
use culvert_tests::namespace::{alone, hosts};
use culvert_tests::skip::skip_for_kernel;
use culvert_tests::{Mode, Topology, Transport};
use socket2::{Domain, SockRef, Socket, Type};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::support::timely;

const MIB: u64 = 1024 * 1024;

/// Starts a server, and an agent that reaches the server over the link.
async fn start(mode: Mode) -> Topology {
    hosts(&[(CLUSTER_NAME, FAR)]);
    let host = format!("--proxy-server-host={CLUSTER_NAME}");
    let builder = Topology::builder(mode, Transport::Uds)
        .servers(1)
        .server_args(&["--agent-bind-address=0.0.0.0"]);
    builder.agent_args(&[&host]).agents(1).start().await
}

async fn open(topology: &Topology, services: &Services) -> BoxedStream {
    let target = services.raw.to_string();
    timely("a dial", topology.connect(&target)).await.unwrap()
}

/// Carries bytes in both directions while the link loses, delays and reorders packets.
async fn carry(mode: Mode) {
    let conditions = Conditions {
        delay: Duration::from_millis(10),
        jitter: Duration::from_millis(5),
        loss: 0.02,
        reorder: 0.01,
        rate: Some(12.5e6),
        ..Conditions::default()
    };
    let link = Link::start(conditions, 42).unwrap();
    let services = Services::start().await.unwrap();
    let topology = start(mode).await;
    let mut checks = JoinSet::new();
    for _ in 0..4 {
        checks.spawn(check::download(open(&topology, &services).await, MIB));
        checks.spawn(check::upload(open(&topology, &services).await, MIB));
        checks.spawn(check::echo(open(&topology, &services).await, 20, 500));
    }
    for checked in timely("all checks", checks.join_all()).await {
        checked.unwrap();
    }
    assert!(link.dropped() > 0);
}

#[test]
fn bytes_arrive_over_a_link_that_loses_packets_with_grpc() {
    if link::is_possible() {
        alone(async || carry(Mode::Grpc).await);
    }
}

#[test]
fn bytes_arrive_over_a_link_that_loses_packets_with_connect() {
    if link::is_possible() {
        alone(async || carry(Mode::HttpConnect).await);
    }
}

/// Starts a link with a round trip of 10 ms, and a listener. Returns the port, too.
async fn far_listener() -> (Link, TcpListener, u16) {
    let conditions = Conditions {
        delay: Duration::from_millis(5),
        ..Conditions::default()
    };
    let link = Link::start(conditions, 1).unwrap();
    let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    (link, listener, port)
}

#[test]
fn handshake_along_a_long_path_limits_unsent_bytes_at_both_ends() {
    if !link::is_possible() {
        return;
    }
    alone(async || {
        let (_link, listener, port) = far_listener().await;
        for (host, is_limited) in [("127.0.0.1", false), (FAR, true)] {
            let dialed = TcpStream::connect((host, port)).await.unwrap();
            let (accepted, _) = listener.accept().await.unwrap();
            for stream in [dialed, accepted] {
                let socket = SockRef::from(&stream);
                let unsent = || socket.tcp_notsent_lowat().unwrap();
                let before = unsent();
                long_path::tune_link(&stream);
                assert_eq!(unsent() != before, is_limited, "{host}");
                long_path::restore_unsent(&stream);
                assert_eq!(unsent(), before, "{host}");
            }
        }
    });
}

/// Returns the send buffer that the kernel grants on request, if it is larger than any that the kernel allocates by itself.
fn larger_send_buffer() -> Option<usize> {
    let limits = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_wmem").unwrap();
    let largest: usize = limits.split_whitespace().nth(2)?.parse().unwrap();
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.set_send_buffer_size(16 << 20).unwrap();
    let granted = socket.send_buffer_size().unwrap();
    (granted > largest).then_some(granted)
}

#[test]
fn link_along_a_long_path_gets_a_larger_send_buffer_with_bbr_only() {
    if !link::is_possible() {
        return;
    }
    alone(async || {
        let (_link, _listener, port) = far_listener().await;
        for (host, is_long) in [("127.0.0.1", false), (FAR, true)] {
            for (control, is_bbr) in [("reno", false), ("bbr", true)] {
                let stream = TcpStream::connect((host, port)).await.unwrap();
                let socket = SockRef::from(&stream);
                if socket.set_tcp_congestion(control.as_bytes()).is_err() {
                    skip_for_kernel(control);
                    continue;
                }
                let before = socket.send_buffer_size().unwrap();
                long_path::tune_link(&stream);
                let expected = larger_send_buffer().filter(|_| is_long && is_bbr);
                let buffer = socket.send_buffer_size().unwrap();
                assert_eq!(buffer, expected.unwrap_or(before), "{host}, {control}");
            }
        }
    });
}

#[test]
fn bulk_beyond_a_long_path_does_not_wait_in_the_kernel() {
    if !link::is_possible() {
        return;
    }
    alone(async || {
        let _link = Link::start(slow_path(), 1).unwrap();
        let services = Services::start().await.unwrap();
        let topology = start(Mode::HttpConnect).await;
        let mut bulk = JoinSet::new();
        for _ in 0..4 {
            bulk.spawn(check::download(open(&topology, &services).await, 64 * MIB));
            bulk.spawn(check::upload(open(&topology, &services).await, 64 * MIB));
        }
        let most = most_unsent_bytes().await;
        assert!(most > 0 && most < 384 * 1024, "{most} unsent bytes");
    });
}

#[test]
fn pause_of_the_link_cuts_no_stream_and_fails_no_dial() {
    if !link::is_possible() {
        return;
    }
    alone(async || {
        let link = Link::start(Conditions::default(), 1).unwrap();
        let services = Services::start().await.unwrap();
        let topology = start(Mode::HttpConnect).await;
        let mut streams = Vec::new();
        for _ in 0..20 {
            streams.push(open(&topology, &services).await);
        }
        link.set_dark(true);
        let pause = async {
            sleep(Duration::from_secs(5)).await;
            link.set_dark(false);
        };
        // This dial begins while the link carries nothing.
        let (late, ()) = tokio::join!(open(&topology, &services), pause);
        streams.push(late);
        let mut checks = JoinSet::new();
        for stream in streams {
            checks.spawn(check::echo(stream, 5, 10_000));
        }
        for checked in timely("all echoes", checks.join_all()).await {
            checked.unwrap();
        }
        assert_eq!(topology.ready_agents(0).await, 1.0);
    });
}
