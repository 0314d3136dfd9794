#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::net::SocketAddrV4;

use proptest::prelude::*;

use super::build::{Numbers, echo, icmp, tcp, udp};
use super::*;

fn at(text: &str) -> SocketAddrV4 {
    text.parse().unwrap()
}

/// The checksum as specified in RFC 1071: 16-bit words, end-around carry.
fn slow_checksum(bytes: &[u8]) -> u16 {
    let mut sum = 0_u32;
    for pair in bytes.chunks(2) {
        sum += u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0));
    }
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[test]
fn checksum_of_a_known_header() {
    // The example of RFC 1071, section 3, and a header from many textbooks.
    assert_eq!(
        Sum::of(&[0, 1, 0xf2, 3, 0xf4, 0xf5, 0xf6, 0xf7]).fold(),
        0xddf2
    );
    let header = [
        0x45, 0, 0, 0x73, 0, 0, 0x40, 0, 0x40, 0x11, 0, 0, 0xc0, 0xa8, 0, 1, 0xc0, 0xa8, 0, 0xc7,
    ];
    assert_eq!(Sum::of(&header).checksum(), 0xb861);
}

#[test]
fn malformed_option_ends_the_options() {
    // Option lengths of 0, 1 and beyond the end, and a missing length.
    for malformed in [[3, 0], [3, 1], [3, 40]] {
        let options = [&malformed[..], &[3, 3, 7]].concat();
        assert_eq!(window_scale(&options), None, "{options:?}");
    }
    assert_eq!(window_scale(&[1, 3]), None);
    assert_eq!(window_scale(&[1, 1, 3, 3, 7, 0, 3, 0]), Some(7));
}

#[test]
fn parsed_fields_equal_the_written_fields() {
    let (from, to) = (at("10.20.0.6:40000"), at("172.25.0.7:443"));
    let packet = tcp(
        from,
        to,
        Numbers(7, 9, 500),
        flags::SYN,
        &[1, 3, 3, 15, 2, 4, 5, 0x50],
        b"",
    );
    let view = Packet::parse(&packet).unwrap();
    let segment = Segment::parse(&view).unwrap();
    assert_eq!((segment.source(), segment.destination()), (from, to));
    assert_eq!((segment.sequence(), segment.window()), (7, 500));
    assert_eq!(
        segment.window_scale(),
        Some(14),
        "a larger scale counts as 14"
    );
    assert!(segment.opens() && segment.length() == 1);

    let packet = udp(from, to, b"query");
    let view = Packet::parse(&packet).unwrap();
    view.check_udp().unwrap();
    assert_eq!(view.ports(), Some((40000, 443)));

    let packet = icmp(
        to,
        from,
        [kind::UNREACHABLE, 3],
        [0; 4],
        &udp(from, to, b"query"),
    );
    let view = Packet::parse(&packet).unwrap();
    let quote = Icmp::parse(&view).unwrap().quote().unwrap();
    assert_eq!((quote.source, quote.destination), (from, to));
    assert_eq!(quote.protocol, protocol::UDP);
    // Bytes after the end of the packet are ignored.
    let mut longer = packet.clone();
    longer.extend([1, 2, 3]);
    assert_eq!(Packet::parse(&longer).unwrap().bytes(), packet);
}

#[test]
fn udp_packet_without_a_checksum_stays_without() {
    let (from, to) = (at("10.20.0.6:40000"), at("172.25.0.7:53"));
    let mut packet = udp(from, to, b"query");
    packet[26..28].fill(0);
    Packet::parse(&packet).unwrap().check_udp().unwrap();
    let mut rewrite = Rewrite::new(&mut packet).unwrap();
    rewrite.set_source([10, 20, 0, 1].into());
    rewrite.set_source_port(1024);
    assert_eq!(packet[26..28], [0, 0]);
    Packet::parse(&packet).unwrap().check_udp().unwrap();
}

#[test]
fn ttl_of_one_is_not_decremented() {
    let mut packet = echo(at("10.0.0.1:0"), at("10.0.0.2:0"), false, 1);
    for ttl in (1..64).rev() {
        assert!(Rewrite::new(&mut packet).unwrap().decrement_ttl());
        assert_eq!(Packet::parse(&packet).unwrap().ttl(), ttl);
    }
    assert!(!Rewrite::new(&mut packet).unwrap().decrement_ttl());
    assert_eq!(Packet::parse(&packet).unwrap().ttl(), 1);
}

proptest! {
    #[test]
    fn fast_checksum_equals_the_slow_checksum(
        bytes in proptest::collection::vec(any::<u8>(), 0..200),
        more in proptest::collection::vec(any::<u8>(), 0..50),
    ) {
        prop_assert_eq!(Sum::of(&bytes).checksum(), slow_checksum(&bytes));
        // Sums of an even number of bytes can be added.
        let even = &bytes[..bytes.len() / 2 * 2];
        let joined = [even, &more].concat();
        prop_assert_eq!((Sum::of(even) + Sum::of(&more)).checksum(), slow_checksum(&joined));
    }

    #[test]
    fn rewritten_packets_have_right_checksums(
        source in any::<u32>(), port in 1..u16::MAX, to_port in 1..u16::MAX,
        which in 0..3_usize, data in proptest::collection::vec(any::<u8>(), 0..64),
    ) {
        let (from, to) = (at("10.20.0.6:40000"), at("172.25.0.7:443"));
        let mut packet = match which {
            0 => tcp(from, to, Numbers(1, 2, 3), flags::ACK, &[], &data),
            1 => udp(from, to, &data),
            _ => echo(from, to, false, 77),
        };
        let source = Ipv4Addr::from_bits(source | 0x0100_0000 & 0x7fff_ffff);
        prop_assume!(unicast(source));
        let mut rewrite = Rewrite::new(&mut packet).unwrap();
        rewrite.set_source(source);
        rewrite.set_source_port(port);
        rewrite.set_destination([10, 0, 0, 9].into());
        rewrite.set_destination_port(to_port);
        rewrite.decrement_ttl();
        let view = Packet::parse(&packet).unwrap();
        prop_assert_eq!(view.source(), source);
        match which {
            0 => {
                let segment = Segment::parse(&view).unwrap();
                prop_assert_eq!(segment.source(), SocketAddrV4::new(source, port));
                prop_assert_eq!(segment.destination().port(), to_port);
                prop_assert_eq!(segment.payload(), &data[..]);
            }
            1 => {
                view.check_udp().unwrap();
                prop_assert_eq!(view.ports(), Some((port, to_port)));
            }
            _ => prop_assert_eq!(Icmp::parse(&view).unwrap().identifier(), to_port),
        }
    }

    #[test]
    fn any_bytes_never_panic(
        mut bytes in proptest::collection::vec(any::<u8>(), 0..100),
        port in any::<u16>(),
    ) {
        if let Ok(view) = Packet::parse(&bytes) {
            let _ = Segment::parse(&view).map(|segment| segment.window_scale());
            let _ = Icmp::parse(&view).map(|icmp| icmp.quote());
            let _ = view.check_udp();
        }
        if let Some(mut rewrite) = Rewrite::new(&mut bytes) {
            rewrite.set_source_port(port);
            rewrite.set_destination([1, 2, 3, 4].into());
            rewrite.decrement_ttl();
            if let Some(mut quoted) = rewrite.quoted() {
                quoted.set_source([4, 3, 2, 1].into());
                quoted.set_destination_port(port);
            }
            rewrite.fill_icmp_checksum();
        }
    }
}
