#![allow(clippy::unwrap_used)]

use super::super::initial::MIN_DATAGRAM_BYTES;
use super::super::initial::tests::{ID, crypto, datagram_of, message_for};
use super::*;

/// Returns two datagrams of one hello.
fn halves() -> [Vec<u8>; 2] {
    let hello = message_for("a.example");
    let (first, rest) = hello.split_at(30);
    let datagram = |number, frames: Vec<u8>| datagram_of(number, &frames, MIN_DATAGRAM_BYTES);
    [datagram(0, crypto(0, first)), datagram(1, crypto(30, rest))]
}

fn client(host: [u8; 4], port: u16) -> SocketAddr {
    (host, port).into()
}

fn is_empty(hellos: &Hellos) -> bool {
    let Hellos {
        clients,
        positions,
        sources,
        bytes,
        ..
    } = hellos;
    clients.is_empty() && positions.is_empty() && sources.is_empty() && *bytes == 0
}

#[test]
fn complete_hello_returns_its_datagrams_in_order_of_arrival() {
    let (mut hellos, now) = (Hellos::new(1), Instant::now());
    let [first, rest] = halves();
    let (a, b) = (client([192, 0, 2, 1], 1), client([192, 0, 2, 1], 2));
    for from in [a, b] {
        let kept = hellos.take(from, &ID, &rest, now);
        assert!(matches!(kept, Arrival::Kept { displaced: 0 }));
    }
    for from in [a, b] {
        let Arrival::Complete(hello, datagrams) = hellos.take(from, &ID, &first, now) else {
            panic!("the hello is complete");
        };
        assert_eq!(hello.server_name.unwrap(), "a.example");
        assert_eq!(datagrams, [rest.clone(), first.clone()]);
    }
    assert!(is_empty(&hellos));
}

#[test]
fn bad_datagram_does_not_end_an_incomplete_hello() {
    let (mut hellos, now) = (Hellos::new(1), Instant::now());
    let [first, rest] = halves();
    let from = client([192, 0, 2, 1], 1);
    hellos.take(from, &ID, &first, now);
    let bad = hellos.take(from, &ID, &[0xc0; MIN_DATAGRAM_BYTES], now);
    assert!(matches!(bad, Arrival::Bad(_)));
    let complete = hellos.take(from, &ID, &rest, now);
    assert!(matches!(complete, Arrival::Complete(_, datagrams) if datagrams.len() == 2));
}

#[test]
fn hello_has_a_limit_of_datagrams_and_a_deadline() {
    let (mut hellos, now) = (Hellos::new(1), Instant::now());
    let [first, _] = halves();
    let from = client([192, 0, 2, 1], 1);
    for _ in 1..MAX_DATAGRAMS {
        let kept = hellos.take(from, &ID, &first, now);
        assert!(matches!(kept, Arrival::Kept { displaced: 0 }));
    }
    assert!(matches!(
        hellos.take(from, &ID, &first, now),
        Arrival::TooMany
    ));
    assert_eq!(hellos.expire(now + DEADLINE / 2), 0);
    assert_eq!(hellos.expire(now + DEADLINE), 1);
    assert!(is_empty(&hellos));
}

#[test]
fn source_has_a_limit_and_the_oldest_clients_are_displaced() {
    let parts = 64;
    let (mut hellos, now) = (Hellos::new(parts), Instant::now());
    let [first, rest] = halves();
    let per_source = MAX_CLIENTS_OF_SOURCE / parts;
    for port in 0..2 * per_source {
        // Addresses of one /24 network.
        let host = u8::try_from(port).unwrap();
        let port = u16::try_from(port).unwrap();
        let arrival = hellos.take(client([192, 0, 2, host], port), &ID, &first, now);
        let expected = usize::from(usize::from(port) >= per_source);
        assert!(matches!(arrival, Arrival::Kept { displaced } if displaced == expected));
    }
    assert_eq!(hellos.clients.len(), per_source);
    // The newest client of the network can complete its hello.
    let newest = 2 * per_source - 1;
    let address = [192, 0, 2, u8::try_from(newest).unwrap()];
    let newest = client(address, u16::try_from(newest).unwrap());
    let complete = hellos.take(newest, &ID, &rest, now);
    assert!(matches!(complete, Arrival::Complete(..)));
    let mut displaced_clients = 0;
    for network in 0..2 * MAX_CLIENTS / parts {
        let [high, low] = u16::try_from(network).unwrap().to_be_bytes();
        let arrival = hellos.take(client([10, high, low, 1], 1), &ID, &first, now);
        let Arrival::Kept { displaced } = arrival else {
            panic!("a new client is kept");
        };
        displaced_clients += displaced;
    }
    assert_eq!(hellos.clients.len(), MAX_CLIENTS / parts);
    assert_eq!(displaced_clients, MAX_CLIENTS / parts + per_source - 1);
    assert!(hellos.bytes <= MAX_BYTES / parts);
    assert_eq!(hellos.expire(now + DEADLINE), MAX_CLIENTS / parts);
    assert!(is_empty(&hellos));
}

#[test]
fn bytes_have_a_limit() {
    let (mut hellos, now) = (Hellos::new(64), Instant::now());
    // The gap before the handshake byte occupies memory, too.
    let first = datagram_of(0, &crypto(4000, &[1]), MIN_DATAGRAM_BYTES);
    for network in 0..MAX_CLIENTS / 64 {
        let [high, low] = u16::try_from(network).unwrap().to_be_bytes();
        for _ in 1..MAX_DATAGRAMS {
            hellos.take(client([10, high, low, 1], 1), &ID, &first, now);
            assert!(hellos.bytes <= MAX_BYTES / 64);
        }
    }
    assert!(hellos.clients.len() < MAX_CLIENTS / 64);
}

#[test]
fn handshake_bytes_count_with_their_gaps() {
    let (mut hellos, now) = (Hellos::new(1), Instant::now());
    let datagram = datagram_of(0, &crypto(4000, &[1]), MIN_DATAGRAM_BYTES);
    hellos.take(client([192, 0, 2, 1], 1), &ID, &datagram, now);
    assert!(hellos.bytes > MIN_DATAGRAM_BYTES + 4000);
    hellos.expire(now + DEADLINE);
    assert!(is_empty(&hellos));
}

#[test]
fn networks_of_a_source() {
    let source = |text: &str| source_of(text.parse().unwrap());
    assert_eq!(source("192.0.2.1"), source("::ffff:192.0.2.200"));
    assert_ne!(source("192.0.2.1"), source("192.0.3.1"));
    assert_eq!(source("2001:db8:0:1::1"), source("2001:db8:0:ff::1"));
    assert_ne!(source("2001:db8:0:1::1"), source("2001:db8:0:100::1"));
}
