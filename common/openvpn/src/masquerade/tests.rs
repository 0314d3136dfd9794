#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use proptest::prelude::*;

use super::*;
use crate::ip::build::{Numbers, echo, icmp, tcp, udp};

const OWN: Ipv4Addr = Ipv4Addr::new(10, 20, 0, 1);
const SECOND: Duration = Duration::from_secs(1);

fn at(text: &str) -> SocketAddrV4 {
    text.parse().unwrap()
}

fn ends(packet: &[u8]) -> (SocketAddrV4, SocketAddrV4) {
    match Kind::of(packet).unwrap() {
        Kind::Packet(ends) => (ends.source, ends.destination),
        _ => panic!("not a packet of a connection"),
    }
}

fn segment(from: SocketAddrV4, to: SocketAddrV4, flags: u8) -> Vec<u8> {
    tcp(from, to, Numbers(1, 1, 1000), flags, &[], b"data")
}

#[test]
fn each_protocol_is_translated_there_and_back() {
    let now = Instant::now();
    let (client, pod) = (at("10.20.0.6:45678"), at("172.25.0.7:443"));
    let mut table = Masquerade::new(OWN, 100);

    for tcp in [true, false] {
        let make = |from, to| match tcp {
            true => segment(from, to, flags::SYN),
            false => udp(from, to, b"query"),
        };
        let mut packet = make(client, pod);
        table.outward(&mut packet, true, now).unwrap();
        let (from, to) = ends(&packet);
        assert_eq!((*from.ip(), to), (OWN, pod));
        assert!(MASQUERADE_PORTS.contains(&from.port()));
        // The second packet gets the same translation.
        let mut again = make(client, pod);
        table.outward(&mut again, false, now).unwrap();
        assert_eq!(again, packet);
        let mut answer = make(pod, from);
        assert_eq!(table.inward(&mut answer, now), Ok(*client.ip()));
        assert_eq!(ends(&answer), (pod, client));
        // An answer from another host is not translated.
        let mut foreign = make(at("172.25.0.8:443"), from);
        assert_eq!(table.inward(&mut foreign, now), Err(Untracked::Unknown));
    }

    let mut ping = echo(client, pod, false, 7);
    table.outward(&mut ping, true, now).unwrap();
    assert_eq!(
        ends(&ping).0,
        SocketAddrV4::new(OWN, 7),
        "a free port is kept"
    );
    let mut other = echo(at("10.20.0.10:0"), pod, false, 7);
    table.outward(&mut other, true, now).unwrap();
    let id = ends(&other).0.port();
    assert_ne!(id, 7);
    let mut pong = echo(pod, SocketAddrV4::new(OWN, 0), true, id);
    assert_eq!(table.inward(&mut pong, now), Ok([10, 20, 0, 10].into()));
    assert_eq!(ends(&pong).1, at("10.20.0.10:7"));
    assert_eq!(table.len(), 4);
}

#[test]
fn replies_and_invalid_packets_open_no_connection() {
    let now = Instant::now();
    let (client, pod) = (at("10.20.0.6:45678"), at("172.25.0.7:443"));
    let mut table = Masquerade::new(OWN, 100);
    let mut pong = echo(client, pod, true, 7);
    assert_eq!(table.outward(&mut pong, true, now), Err(Untracked::Unknown));
    let mut packet = segment(client, pod, flags::SYN);
    assert_eq!(
        table.outward(&mut packet, false, now),
        Err(Untracked::Unknown)
    );
    // A ping from a pod to the server's address is for the server itself.
    let mut ping = echo(pod, SocketAddrV4::new(OWN, 0), false, 7);
    assert_eq!(table.inward(&mut ping, now), Err(Untracked::Unknown));
    packet[25] ^= 1;
    assert_eq!(
        table.outward(&mut packet, true, now),
        Err(Untracked::Malformed(Malformed::Checksum))
    );
    assert_eq!(table.len(), 0);
}

#[test]
fn clients_with_the_same_port_get_different_local_ports() {
    let now = Instant::now();
    let pod = at("172.25.0.7:443");
    let mut table = Masquerade::new(OWN, 100);
    let mut ports = Vec::new();
    for client in ["10.20.0.6:2000", "10.20.0.10:2000"] {
        let mut packet = segment(at(client), pod, flags::SYN);
        table.outward(&mut packet, true, now).unwrap();
        let from = ends(&packet).0;
        ports.push(from.port());
        let mut answer = segment(pod, from, flags::SYN | flags::ACK);
        table.inward(&mut answer, now).unwrap();
        assert_eq!(ends(&answer).1, at(client));
    }
    assert_eq!(ports[0], 2000, "a free port is kept");
    assert_ne!(ports[1], 2000);
}

#[test]
fn icmp_errors_reach_the_original_sender() {
    let now = Instant::now();
    let (client, pod) = (at("10.20.0.6:45678"), at("172.25.0.7:443"));
    let router = at("172.25.0.1:0");
    let mut table = Masquerade::new(OWN, 100);
    for packet in [
        segment(client, pod, flags::SYN),
        udp(client, pod, b"a question"),
        echo(client, pod, false, 7),
    ] {
        let mut translated = packet.clone();
        table.outward(&mut translated, true, now).unwrap();
        // Routers quote at least a header and eight bytes.
        for quoted in [28, translated.len()] {
            let mut error = icmp(
                router,
                SocketAddrV4::new(OWN, 0),
                [3, 1],
                [0; 4],
                &translated[..quoted],
            );
            assert_eq!(table.inward(&mut error, now), Ok(*client.ip()));
            let view = Packet::parse(&error).unwrap();
            assert_eq!(view.destination(), *client.ip());
            assert_eq!(view.source(), *router.ip());
            let message = Icmp::parse(&view).unwrap();
            assert_eq!(
                message.body(),
                &packet[..quoted],
                "the quote is translated back"
            );
        }
    }
    // The error quotes a packet that was never sent.
    let other = segment(SocketAddrV4::new(OWN, 5000), pod, flags::SYN);
    let mut error = icmp(router, SocketAddrV4::new(OWN, 0), [3, 1], [0; 4], &other);
    assert_eq!(table.inward(&mut error, now), Err(Untracked::Unknown));
}

#[test]
fn icmp_errors_about_answers_are_translated() {
    let now = Instant::now();
    let (client, pod) = (at("10.20.0.6:45678"), at("172.25.0.7:53"));
    let mut table = Masquerade::new(OWN, 100);
    let mut query = udp(client, pod, b"query");
    table.outward(&mut query, true, now).unwrap();
    let own = ends(&query).0;
    let sent = udp(pod, own, b"answer");
    let mut answer = sent.clone();
    table.inward(&mut answer, now).unwrap();
    // The client has closed its port in the meantime.
    let mut error = icmp(client, pod, [3, 3], [0; 4], &answer);
    table.outward(&mut error, false, now).unwrap();
    let view = Packet::parse(&error).unwrap();
    assert_eq!((view.source(), view.destination()), (OWN, *pod.ip()));
    assert_eq!(Icmp::parse(&view).unwrap().body(), sent);
}

#[test]
fn connections_expire_after_their_timeout() {
    let start = Instant::now();
    let (client, pod) = (at("10.20.0.6:45678"), at("172.25.0.7:443"));
    let mut table = Masquerade::new(OWN, 100);
    let mut packet = udp(client, pod, b"query");
    table.outward(&mut packet, true, start).unwrap();
    let own = ends(&packet).0;
    table.expire(start + 29 * SECOND);
    assert_eq!(table.len(), 1);
    table
        .inward(&mut udp(pod, own, b"answer"), start + 29 * SECOND)
        .unwrap();
    table.expire(start + 200 * SECOND);
    assert_eq!(table.len(), 1, "an answered connection is kept longer");
    table.expire(start + 210 * SECOND);
    assert_eq!(table.len(), 0);

    table
        .outward(&mut segment(client, pod, flags::SYN), true, start)
        .unwrap();
    let mut packet = segment(client, pod, flags::ACK);
    table.outward(&mut packet, false, start).unwrap();
    let own = ends(&packet).0;
    table
        .inward(&mut segment(pod, own, flags::ACK), start)
        .unwrap();
    table.expire(start + 23 * 3600 * SECOND);
    assert_eq!(table.len(), 1, "established");
    let end = start + 23 * 3600 * SECOND;
    let fin = flags::FIN | flags::ACK;
    table
        .outward(&mut segment(client, pod, fin), false, end)
        .unwrap();
    table.inward(&mut segment(pod, own, fin), end).unwrap();
    table.expire(end + 119 * SECOND);
    assert_eq!(table.len(), 1, "closing");
    table.expire(end + 120 * SECOND);
    assert_eq!(table.len(), 0);

    table
        .outward(&mut segment(client, pod, flags::SYN), true, end)
        .unwrap();
    table
        .outward(&mut segment(client, pod, flags::RST), false, end)
        .unwrap();
    table.expire(end + 31 * SECOND);
    assert_eq!(table.len(), 0);
}

#[test]
fn full_table_evicts_unanswered_connections_only() {
    let now = Instant::now();
    let mut table = Masquerade::new(OWN, 1000);
    let client = |i: u32| SocketAddrV4::new(Ipv4Addr::from_bits(0x0a14_0100 + i % 7), 1 + i as u16);
    let pod = |i: u32| SocketAddrV4::new(Ipv4Addr::from_bits(0xac19_0000 + i), 443);
    // An established connection.
    let mut packet = segment(client(0), pod(0), flags::SYN);
    table.outward(&mut packet, true, now).unwrap();
    let own = ends(&packet).0;
    table
        .inward(&mut segment(pod(0), own, flags::ACK), now)
        .unwrap();
    for i in 1..20_000 {
        let now = now + Duration::from_micros(i.into());
        table
            .outward(&mut segment(client(i), pod(i), flags::SYN), true, now)
            .unwrap();
        assert!(table.len() <= 1000);
    }
    assert_eq!(table.evicted(), 19_000);
    assert!(
        table
            .outward(&mut segment(client(0), pod(0), flags::ACK), false, now)
            .is_ok()
    );

    // One client gets a quarter of the table, and established connections are not evicted.
    let mut table = Masquerade::new(OWN, 100);
    let mut full = 0;
    for i in 0..200 {
        let from = SocketAddrV4::new([10, 20, 0, 6].into(), 1000 + i);
        let mut packet = segment(from, pod(i.into()), flags::SYN);
        match table.outward(&mut packet, true, now) {
            Ok(()) => {
                let own = ends(&packet).0;
                table
                    .inward(&mut segment(pod(i.into()), own, flags::ACK), now)
                    .unwrap();
            }
            Err(why) => {
                assert_eq!(why, Untracked::Full);
                full += 1;
            }
        }
    }
    assert_eq!((table.len(), full), (25, 175));
}

/// Opens a TCP connection and answers it, so that it is not displaced.
fn establish(
    table: &mut Masquerade,
    from: SocketAddrV4,
    to: SocketAddrV4,
) -> Result<(), Untracked> {
    let now = Instant::now();
    let mut packet = segment(from, to, flags::SYN);
    table.outward(&mut packet, true, now)?;
    let own = ends(&packet).0;
    let mut answer = segment(to, own, flags::ACK);
    table.inward(&mut answer, now).unwrap();
    Ok(())
}

/// Returns the address of the connection `number` of a client. Its port is not one of [`MASQUERADE_PORTS`].
fn client(host: u8, number: u16) -> SocketAddrV4 {
    SocketAddrV4::new([10, 20, 0, host].into(), 32_768 + number)
}

#[test]
fn one_client_cannot_use_all_ports_toward_a_destination() {
    let mut table = Masquerade::new(OWN, 65_536);
    let pod = at("172.25.0.7:443");
    let mut full = 0;
    for number in 0..32_000 {
        match establish(&mut table, client(6, number), pod) {
            Ok(()) => {}
            Err(why) => {
                assert_eq!(why, Untracked::Full);
                full += 1;
            }
        }
    }
    assert_eq!(full, 32_000 - 16_384);
    for number in 0..1000 {
        assert_eq!(establish(&mut table, client(10, number), pod), Ok(()));
    }
}

#[test]
fn closed_connections_make_room_for_new_connections_of_the_same_client() {
    let start = Instant::now();
    let mut table = Masquerade::new(OWN, 400);
    let pod = at("172.25.0.7:443");
    let fin = flags::FIN | flags::ACK;
    for number in 0..100 {
        establish(&mut table, client(6, number), pod).unwrap();
    }
    // All timers have fired once, so that they have a later time.
    table.expire(start + 40 * SECOND);
    let over = Err(Untracked::Full);
    assert_eq!(establish(&mut table, client(6, 100), pod), over);
    let end = start + 50 * SECOND;
    let mut packet = segment(client(6, 7), pod, fin);
    table.outward(&mut packet, false, end).unwrap();
    let own = ends(&packet).0;
    assert_eq!(
        establish(&mut table, client(6, 100), pod),
        over,
        "half-closed"
    );
    table.inward(&mut segment(pod, own, fin), end).unwrap();
    let mut packet = segment(client(6, 8), pod, flags::RST);
    table.outward(&mut packet, false, end).unwrap();
    // The connection that was reset has expired, and the other closed connection may be displaced.
    table.expire(start + 165 * SECOND);
    assert_eq!(table.len(), 99);
    for number in 100..102 {
        assert_eq!(establish(&mut table, client(6, number), pod), Ok(()));
    }
    assert_eq!((table.len(), table.evicted()), (100, 1));
    assert_eq!(establish(&mut table, client(6, 102), pod), over);
}

#[test]
fn syn_flood_of_one_client_displaces_only_its_own_unanswered_connections() {
    let now = Instant::now();
    let mut table = Masquerade::new(OWN, 65_536);
    let pod = at("172.25.0.7:443");
    establish(&mut table, client(6, 0), pod).unwrap();
    let mut other = segment(client(10, 0), pod, flags::SYN);
    table.outward(&mut other, true, now).unwrap();
    for number in 1..32_000 {
        let mut packet = segment(client(6, number), pod, flags::SYN);
        table.outward(&mut packet, true, now).unwrap();
    }
    assert_eq!(table.len(), 16_384 + 1);
    for from in [client(6, 0), client(10, 0)] {
        let mut packet = segment(from, pod, flags::ACK);
        assert_eq!(table.outward(&mut packet, false, now), Ok(()));
    }
}

#[test]
fn ports_run_out_for_one_destination_only() {
    let mut table = Masquerade::new(OWN, 1 << 20);
    let pod = at("172.25.0.7:443");
    let mut failed = 0;
    for number in 0..33_000_u32 {
        let host = u8::try_from(number / 1000).unwrap();
        let from = client(100 + host, u16::try_from(number % 1000).unwrap());
        match establish(&mut table, from, pod) {
            Ok(()) => {}
            Err(why) => {
                assert_eq!(why, Untracked::PortsExhausted);
                // The search is random, but finds a port while half of the ports are free.
                assert!(number > 31_744 / 2, "{number}");
                failed += 1;
            }
        }
    }
    assert!(failed >= 33_000 - 31_744, "{failed}");
    establish(&mut table, client(9, 0), at("172.25.0.7:80")).unwrap();
    // Unanswered connections to the destination give way.
    let mut table = Masquerade::new(OWN, 1 << 20);
    let now = Instant::now();
    for number in 0..40_000_u32 {
        let host = u8::try_from(number / 1000).unwrap();
        let from = client(100 + host, u16::try_from(number % 1000).unwrap());
        let mut packet = segment(from, pod, flags::SYN);
        table.outward(&mut packet, true, now).unwrap();
    }
    assert!(table.len() <= 31_744);
}

proptest! {
    /// Answers to translated packets return to the sender, and no two connections share a local endpoint.
    #[test]
    fn answers_are_translated_back(
        packets in proptest::collection::vec((0..4_u8, 1..200_u16, 0..3_u8, 1..4_u16, 0..3_usize), 1..60),
    ) {
        let now = Instant::now();
        let mut table = Masquerade::new(OWN, 1000);
        let mut seen = std::collections::HashMap::new();
        for (host, port, pod_host, pod_port, which) in packets {
            let client = SocketAddrV4::new([10, 20, 0, 6 + host].into(), 1000 + port);
            let pod = SocketAddrV4::new([172, 25, 0, pod_host + 1].into(), pod_port);
            let packet = match which {
                0 => segment(client, pod, flags::ACK),
                1 => udp(client, pod, b"data"),
                _ => echo(client, pod, false, port),
            };
            let mut translated = packet.clone();
            table.outward(&mut translated, true, now).unwrap();
            let (own, to) = ends(&translated);
            let mut answer = match which {
                0 => segment(to, own, flags::ACK),
                1 => udp(to, own, b"data"),
                _ => echo(to, own, true, own.port()),
            };
            prop_assert_eq!(table.inward(&mut answer, now), Ok(*client.ip()));
            prop_assert_eq!(ends(&answer), (ends(&packet).1, ends(&packet).0));
            let (from, to) = (ends(&packet).0, ends(&packet).1.ip().to_owned());
            let at = if which == 2 { 0 } else { pod.port() };
            prop_assert_eq!(*seen.entry((which, own, to, at)).or_insert(from), from);
        }
    }

    #[test]
    fn any_bytes_never_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..100), open in any::<bool>()) {
        let mut table = Masquerade::new(OWN, 10);
        let _ = table.outward(&mut bytes, open, Instant::now());
        let _ = table.inward(&mut bytes, Instant::now());
    }
}
