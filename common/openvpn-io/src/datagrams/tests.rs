#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::future::poll_fn;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use socket2::{Domain, SockRef, Socket, Type};
use tokio::time::timeout;

use super::*;

const PATIENCE: Duration = Duration::from_secs(10);

/// Prints the reason why a test does not run; fails in CI.
fn skip(why: &str) {
    let ci = std::env::var("CI").is_ok_and(|ci| ci == "true");
    assert!(!ci, "{why}, though CI=true");
    eprintln!("skipped: {why}");
}

async fn bind() -> (Datagrams, SocketAddr) {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = socket.local_addr().unwrap();
    (Datagrams::new(socket).unwrap(), address)
}

fn content(length: usize, tag: usize) -> Vec<u8> {
    (0..length).map(|i| (i * 31 + tag) as u8).collect()
}

impl Datagrams {
    fn append(&mut self, to: SocketAddr, datagram: &[u8]) {
        let start = self.len();
        self.out().extend_from_slice(datagram);
        self.cut(to, start);
    }

    async fn flush(&mut self) {
        let flushed = poll_fn(|cx| self.poll_flush(cx));
        timeout(PATIENCE, flushed).await.unwrap();
        assert!(self.is_empty());
    }

    /// Receives at least `count` datagrams.
    async fn receive(&mut self, count: usize) -> Vec<(SocketAddr, Vec<u8>)> {
        let mut received = Vec::new();
        while received.len() < count {
            timeout(PATIENCE, poll_fn(|cx| self.poll_receive(cx)))
                .await
                .unwrap();
            received.append(&mut self.rest());
        }
        received
    }

    /// Returns the remaining datagrams of the last batch.
    fn rest(&mut self) -> Vec<(SocketAddr, Vec<u8>)> {
        let mut rest = Vec::new();
        while let Some((from, datagram)) = self.take() {
            rest.push((from.remote, datagram.to_vec()));
        }
        rest
    }
}

#[tokio::test]
async fn datagrams_of_all_sizes_arrive_complete_and_in_order() {
    let (mut sender, own) = bind().await;
    let (mut one, to_one) = bind().await;
    // A plain socket without batching.
    let other = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let to_other = other.local_addr().unwrap();
    let sizes = [
        1448, 1448, 1448, 1448, 700, 80, 80, 80, 1, 1448, 1448, 1449, 9000, 20_000, 40_000, 52, 52,
    ];
    for round in 0..20 {
        let mut tag = 100 * round;
        for (to, count) in [(to_one, 9), (to_other, 5), (to_one, 8), (to_other, 12)] {
            let skip = if count == 8 { 9 } else { 0 };
            for size in sizes.iter().skip(skip).take(count) {
                sender.append(to, &content(*size, tag));
                tag += 1;
            }
        }
        sender.flush().await;
        let mut tags = (100 * round..).filter(|tag| !(9..14).contains(&(tag % 100)));
        for ((from, datagram), size) in one.receive(17).await.into_iter().zip(sizes) {
            assert_eq!(from, own);
            assert!(datagram == content(size, tags.next().unwrap()), "{size}");
        }
        let mut buffer = vec![0; BUFFER];
        let tags = (9..14).chain(22..34).map(|tag| 100 * round + tag);
        for (tag, size) in tags.zip(sizes.iter().take(5).chain(sizes.iter().take(12))) {
            let received = timeout(PATIENCE, other.recv_from(&mut buffer)).await;
            let (length, from) = received.unwrap().unwrap();
            assert_eq!(from, own);
            assert!(buffer[..length] == content(*size, tag), "{size}");
        }
    }
}

#[tokio::test]
async fn dual_stack_socket_reports_mapped_ipv4_addresses() {
    let Ok(socket) = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)).await else {
        return skip("no IPv6");
    };
    let port = socket.local_addr().unwrap().port();
    let mut both = Datagrams::new(socket).unwrap();
    let (mut peer, own) = bind().await;
    let mapped = Ipv4Addr::LOCALHOST.to_ipv6_mapped();
    for tag in 0..5 {
        peer.append((Ipv4Addr::LOCALHOST, port).into(), &content(1000, tag));
    }
    peer.flush().await;
    for (tag, (from, datagram)) in both.receive(5).await.into_iter().enumerate() {
        assert_eq!(from, SocketAddr::from((mapped, own.port())));
        assert!(datagram == content(1000, tag));
        both.append(from, &datagram);
    }
    both.flush().await;
    for (tag, (from, datagram)) in peer.receive(5).await.into_iter().enumerate() {
        assert_eq!(from, SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
        assert!(datagram == content(1000, tag));
    }
}

#[tokio::test]
async fn answer_comes_from_the_address_that_the_peer_has_used() {
    for any in [
        IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        Ipv6Addr::UNSPECIFIED.into(),
    ] {
        let Ok(socket) = UdpSocket::bind((any, 0)).await else {
            skip("no IPv6");
            continue;
        };
        let port = socket.local_addr().unwrap().port();
        let mut server = Datagrams::new(socket).unwrap();
        for used in [1, 2, 1].map(|last| SocketAddr::from(([127, 0, 0, last], port))) {
            let peer = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
            for _ in 0..3 {
                peer.send_to(b"question", used).await.unwrap();
            }
            let mut answered = 0;
            while answered < 3 {
                let received = poll_fn(|cx| server.poll_receive(cx));
                timeout(PATIENCE, received).await.unwrap();
                while let Some((path, _)) = server.take() {
                    let start = server.len();
                    server.out().extend_from_slice(b"answer");
                    server.cut(path, start);
                    answered += 1;
                }
            }
            server.flush().await;
            for _ in 0..3 {
                let mut buffer = [0; 10];
                let received = timeout(PATIENCE, peer.recv_from(&mut buffer)).await;
                let (length, from) = received.unwrap().unwrap();
                assert_eq!((&buffer[..length], from), (&b"answer"[..], used));
            }
        }
    }
}

#[tokio::test]
async fn error_of_an_earlier_datagram_loses_no_other_datagram() {
    // The reserved socket is connected to itself, so the kernel refuses the datagrams of other sockets.
    let reserved = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = reserved.local_addr().unwrap();
    reserved.connect(address).await.unwrap();
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    socket.connect(address).await.unwrap();
    let mut sender = Datagrams::new(socket).unwrap();
    sender.append(address, b"to nobody");
    sender.flush().await;
    let refused = sender.socket.ready(Interest::ERROR);
    timeout(PATIENCE, refused).await.unwrap().unwrap();
    // Both sockets need the option to share the port. No other socket can bind the port.
    SockRef::from(&reserved).set_reuse_address(true).unwrap();
    let back = Socket::new(Domain::IPV4, Type::DGRAM.nonblocking(), None).unwrap();
    back.set_reuse_address(true).unwrap();
    back.bind(&address.into()).unwrap();
    let back = UdpSocket::from_std(back.into()).unwrap();
    let mut back = Datagrams::new(back).unwrap();
    for tag in 0..10 {
        sender.append(address, &content(100, tag));
    }
    sender.flush().await;
    for (tag, (_, datagram)) in back.receive(10).await.into_iter().enumerate() {
        assert!(datagram == content(100, tag));
    }
}

#[tokio::test]
async fn oversized_and_empty_datagrams_are_skipped() {
    let (mut sender, own) = bind().await;
    let (mut receiver, address) = bind().await;
    sender.append(address, &content(70_000, 0));
    sender.append(address, b"");
    sender.append(address, b"small");
    sender.append(address, &content(65_507, 0));
    sender.flush().await;
    let received = receiver.receive(2).await;
    assert!(received == [(own, b"small".to_vec()), (own, content(65_507, 0))]);
    let plain = std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    plain.send_to(b"", address).unwrap();
    plain.send_to(b"more", address).unwrap();
    let from = plain.local_addr().unwrap();
    assert_eq!(receiver.receive(1).await, [(from, b"more".to_vec())]);
}

#[tokio::test]
async fn datagrams_may_be_fragmented() {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let before = sockopt::ip_mtu_discover(&socket).unwrap();
    let datagrams = Datagrams::new(socket).unwrap();
    let after = sockopt::ip_mtu_discover(&datagrams.socket).unwrap();
    assert_eq!(after, before);
    let Ok(socket) = UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).await else {
        return skip("no IPv6");
    };
    let before = sockopt::ipv6_mtu_discover(&socket).unwrap();
    let own = socket.local_addr().unwrap();
    let mut datagrams = Datagrams::new(socket).unwrap();
    let after = sockopt::ipv6_mtu_discover(&datagrams.socket).unwrap();
    assert_eq!(after, before);
    // With headers, the datagram exceeds the MTU of the loopback device.
    let large = content(65_500, 0);
    datagrams.append(own, &large);
    datagrams.flush().await;
    assert!(datagrams.receive(1).await == [(own, large)]);
}

#[tokio::test]
async fn batch_is_sent_and_received_by_one_call() {
    let (mut sender, _) = bind().await;
    let (mut receiver, address) = bind().await;
    if sender.state.max_gso_segments() == 1 || receiver.state.gro_segments() == 1 {
        return skip("this kernel neither splits nor joins datagrams");
    }
    for tag in 0..40 {
        sender.append(address, &content(1448, tag));
    }
    sender.flush().await;
    let received = poll_fn(|cx| receiver.poll_receive(cx));
    timeout(PATIENCE, received).await.unwrap();
    assert_eq!((receiver.filled, receiver.metas[0].stride), (1, 1448));
    assert_eq!(receiver.received(), 40 * 1448);
    for (tag, (_, datagram)) in receiver.rest().into_iter().enumerate() {
        assert!(datagram == content(1448, tag));
    }
}

#[tokio::test]
async fn datagram_without_a_source_port_is_skipped() {
    let raw = socket2::Socket::new(
        socket2::Domain::IPV4,
        socket2::Type::RAW,
        Some(socket2::Protocol::UDP),
    );
    let Ok(raw) = raw else {
        return skip("a raw socket needs CAP_NET_RAW");
    };
    let (mut receiver, address) = bind().await;
    // UDP header: source port 0, destination port, length 12, no checksum.
    let mut datagram = vec![0, 0];
    datagram.extend_from_slice(&address.port().to_be_bytes());
    datagram.extend_from_slice(&[0, 12, 0, 0, 1, 2, 3, 4]);
    raw.send_to(&datagram, &address.into()).unwrap();
    let (mut sender, own) = bind().await;
    sender.append(address, b"next");
    sender.flush().await;
    assert_eq!(receiver.receive(1).await, [(own, b"next".to_vec())]);
}

#[tokio::test]
async fn refused_source_address_ends_the_offload_only_for_a_moment() {
    let Ok(socket) = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)).await else {
        return skip("no IPv6");
    };
    let mut server = Datagrams::new(socket).unwrap();
    let offload = server.state.max_gso_segments();
    let Ok(peer) = UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).await else {
        return skip("no IPv6 loopback");
    };
    let remote = peer.local_addr().unwrap();
    let answer = |server: &mut Datagrams, local: Option<&str>| {
        let start = server.len();
        server.out().extend_from_slice(b"answer");
        let local = local.map(|ip| ip.parse().unwrap());
        server.cut(Path { remote, local }, start);
    };
    // An address that this machine does not have (RFC 3849).
    answer(&mut server, Some("2001:db8::1"));
    server.flush().await;
    let mut buffer = [0; 16];
    let received = timeout(PATIENCE, peer.recv_from(&mut buffer)).await;
    assert_eq!(received.unwrap().unwrap().0, 6);
    assert!(server.source_refused.is_some());
    tokio::time::pause();
    tokio::time::advance(NEW_STATE_PAUSE).await;
    answer(&mut server, None);
    server.flush().await;
    assert_eq!(server.state.max_gso_segments(), offload);
    assert!(server.source_refused.is_none());
}
