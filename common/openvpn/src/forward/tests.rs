#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::net::SocketAddrV4;

use proptest::prelude::*;

use super::*;
use crate::ip::build::{Numbers, echo, icmp, tcp, udp};
use crate::ip::{Icmp, Segment, flags};

const OWN: Ipv4Addr = Ipv4Addr::new(10, 20, 0, 1);
const CLUSTER: PeerId = PeerId(1);
const SEED: PeerId = PeerId(2);

fn at(text: &str) -> SocketAddrV4 {
    text.parse().unwrap()
}

/// KKP's server with two peers: one client of the user cluster, one of the seed.
fn server(now: Instant) -> Forward {
    let nets = |texts: &[&str]| {
        texts
            .iter()
            .map(|text| text.parse().unwrap())
            .collect::<Vec<_>>()
    };
    let cluster = nets(&["172.25.0.0/16", "10.240.16.0/20", "10.254.0.0/16"]);
    let firewall = Firewall {
        sources: nets(&["10.20.0.0/24"]),
        destinations: cluster.clone(),
    };
    let mut forward = Forward::new(OWN, firewall, 1000, now);
    forward.routes.add(CLUSTER, [10, 20, 0, 6].into(), &cluster);
    forward.routes.add(SEED, [10, 20, 0, 10].into(), &[]);
    forward
}

fn syn(from: SocketAddrV4, to: SocketAddrV4) -> Vec<u8> {
    tcp(from, to, Numbers(1, 0, 1000), flags::SYN, &[], b"")
}

#[test]
fn a_seed_client_reaches_a_pod_and_gets_the_answer() {
    let now = Instant::now();
    let mut forward = server(now);
    let (client, pod) = (at("10.20.0.10:45678"), at("172.25.0.7:443"));
    let mut packet = syn(client, pod);
    assert_eq!(forward.input(SEED, &mut packet, now), Verdict::To(CLUSTER));
    let view = Packet::parse(&packet).unwrap();
    assert_eq!(view.ttl(), 63);
    let segment = Segment::parse(&view).unwrap();
    let own = segment.source();
    assert_eq!((*own.ip(), segment.destination()), (OWN, pod));
    assert!(!FLOW_PORTS.contains(&own.port()));

    let mut answer = tcp(
        pod,
        own,
        Numbers(5, 2, 1000),
        flags::SYN | flags::ACK,
        &[],
        b"",
    );
    assert_eq!(forward.input(CLUSTER, &mut answer, now), Verdict::To(SEED));
    let view = Packet::parse(&answer).unwrap();
    let segment = Segment::parse(&view).unwrap();
    assert_eq!((segment.source(), segment.destination()), (pod, client));
    let stats = forward.stats();
    assert_eq!((stats.forwarded, stats.tracked), (2, 1));

    // A router behind the cluster's client reports that the pod is unreachable.
    let mut packet = syn(client, pod);
    forward.input(SEED, &mut packet, now);
    let mut error = icmp(
        at("172.25.0.1:0"),
        SocketAddrV4::new(OWN, 0),
        [3, 1],
        [0; 4],
        &packet,
    );
    assert_eq!(forward.input(CLUSTER, &mut error, now), Verdict::To(SEED));
}

#[test]
fn user_cluster_cannot_open_connections() {
    let now = Instant::now();
    let mut forward = server(now);
    // To a client of the seed: from a pod, and from the client of the user cluster.
    for from in ["172.25.0.7:5000", "10.20.0.6:5000"] {
        let mut packet = syn(at(from), at("10.20.0.10:443"));
        assert_eq!(forward.input(CLUSTER, &mut packet, now), Verdict::Dropped);
        // To the server.
        let mut packet = syn(at(from), SocketAddrV4::new(OWN, 1194));
        assert_eq!(forward.input(CLUSTER, &mut packet, now), Verdict::Dropped);
        let mut packet = udp(at(from), SocketAddrV4::new(OWN, 53), b"");
        assert_eq!(forward.input(CLUSTER, &mut packet, now), Verdict::Dropped);
    }
    assert_eq!(forward.stats().filtered, 6);
    // Pings of the client are answered, and segments of the server's own flows arrive.
    let mut ping = echo(at("10.20.0.6:0"), SocketAddrV4::new(OWN, 0), false, 1);
    assert_eq!(forward.input(CLUSTER, &mut ping, now), Verdict::Local);
    let own = SocketAddrV4::new(OWN, 40_000);
    let mut packet = tcp(
        at("172.25.0.7:443"),
        own,
        Numbers(1, 1, 1),
        flags::ACK,
        &[],
        b"",
    );
    assert_eq!(forward.input(CLUSTER, &mut packet, now), Verdict::Local);
    assert_eq!(forward.stats().local, 2);
}

#[test]
fn foreign_sources_are_dropped_and_counted() {
    let now = Instant::now();
    let mut forward = server(now);
    let pod = at("172.25.0.7:443");
    for (peer, from) in [
        (SEED, "10.20.0.6:1"),
        (SEED, "172.25.0.9:1"),
        (SEED, "10.20.0.1:1"),
        (SEED, "8.8.8.8:1"),
        (CLUSTER, "10.20.0.10:1"),
        (PeerId(9), "10.20.0.10:1"),
    ] {
        let mut packet = syn(at(from), pod);
        assert_eq!(
            forward.input(peer, &mut packet, now),
            Verdict::Dropped,
            "{from}"
        );
    }
    assert_eq!(forward.stats().bad_source, 6);
    assert_eq!(forward.stats().tracked, 0);
}

#[test]
fn malformed_and_unroutable_packets_are_counted() {
    let now = Instant::now();
    let mut forward = server(now);
    let client = at("10.20.0.10:45678");
    let mut packet = syn(client, at("9.9.9.9:443"));
    assert_eq!(forward.input(SEED, &mut packet, now), Verdict::Dropped);
    let mut packet = syn(client, at("172.25.0.7:443"));
    packet[33] ^= 1;
    assert_eq!(forward.input(SEED, &mut packet, now), Verdict::Dropped);
    let mut packet = syn(client, at("172.25.0.7:443"));
    assert_eq!(
        forward.input(SEED, &mut packet[..30], now),
        Verdict::Dropped
    );
    let stats = forward.stats();
    assert_eq!(
        (stats.no_route, stats.bad_checksum, stats.malformed),
        (1, 1, 1)
    );
}

#[test]
fn exhausted_ttl_is_reported_to_the_sender() {
    let now = Instant::now();
    let mut forward = server(now);
    let client = at("10.20.0.10:45678");
    let mut packet = syn(client, at("172.25.0.7:443"));
    while Packet::parse(&packet).unwrap().ttl() > 1 {
        Rewrite::new(&mut packet).unwrap().decrement_ttl();
    }
    assert_eq!(forward.input(SEED, &mut packet, now), Verdict::Dropped);
    assert_eq!(forward.stats().ttl_exceeded, 1);
    let (peer, reply) = forward.poll_reply().unwrap();
    assert_eq!(peer, SEED);
    let view = Packet::parse(&reply).unwrap();
    assert_eq!((view.source(), view.destination()), (OWN, *client.ip()));
    let message = Icmp::parse(&view).unwrap();
    assert_eq!(message.kind(), kind::TIME_EXCEEDED);
    assert_eq!(message.body(), packet);
    assert_eq!(forward.poll_reply(), None);
}

#[test]
fn connections_survive_a_reconnect_of_their_peers() {
    let now = Instant::now();
    let mut forward = server(now);
    let (client, pod) = (at("10.20.0.10:45678"), at("172.25.0.7:443"));
    let mut packet = syn(client, pod);
    forward.input(SEED, &mut packet, now);
    let own = Segment::parse(&Packet::parse(&packet).unwrap())
        .unwrap()
        .source();
    let cluster = forward.routes.networks(CLUSTER).to_vec();
    forward.routes.remove(CLUSTER);
    forward
        .routes
        .add(PeerId(3), [10, 20, 0, 14].into(), &cluster);
    let mut answer = tcp(
        pod,
        own,
        Numbers(5, 2, 1000),
        flags::SYN | flags::ACK,
        &[],
        b"",
    );
    assert_eq!(
        forward.input(PeerId(3), &mut answer, now),
        Verdict::To(SEED)
    );
}

proptest! {
    #[test]
    fn any_bytes_never_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..100), peer in 0..3_u64) {
        let now = Instant::now();
        let mut forward = server(now);
        forward.input(PeerId(peer), &mut bytes, now);
        while forward.poll_reply().is_some() {}
    }
}
