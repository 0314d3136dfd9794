//! Packets from one peer to another through firewall and address translation. A forwarded packet is well
//! formed, and either its source is the server's own address, or the packet is a reply and goes back to the
//! peer that sent the request. The input is a list of packets, each preceded by a length byte and a peer
//! byte. The target corrects the checksums.
#![no_main]

use std::net::Ipv4Addr;
use std::time::Instant;

use culvert_openvpn::firewall::Firewall;
use culvert_openvpn::forward::{Forward, Verdict};
use culvert_openvpn::ip::{Packet, Sum, protocol, pseudo};
use culvert_openvpn::routes::PeerId;
use libfuzzer_sys::fuzz_target;

const OWN: Ipv4Addr = Ipv4Addr::new(10, 20, 0, 1);

/// Corrects the checksums of the IP header and of TCP, UDP or ICMP: the fuzzer cannot guess valid checksums.
fn fix_checksums(packet: &mut [u8]) {
    let header_len = packet
        .first()
        .map_or(0, |first| usize::from(first & 15) * 4);
    let Some((header, payload)) = packet.split_at_mut_checked(header_len) else {
        return;
    };
    if header_len < 20 {
        return;
    }
    header[10..12].fill(0);
    let sum = Sum::of(header).checksum().to_be_bytes();
    header[10..12].copy_from_slice(&sum);
    let address =
        |at: usize| Ipv4Addr::new(header[at], header[at + 1], header[at + 2], header[at + 3]);
    let covered = pseudo(address(12), address(16), header[9], payload.len());
    let (covered, at) = match header[9] {
        protocol::TCP => (covered, 16),
        protocol::UDP => (covered, 6),
        protocol::ICMP => (Sum::default(), 2),
        _ => return,
    };
    if payload.len() < at + 2 {
        return;
    }
    payload[at..at + 2].fill(0);
    let sum = (covered + Sum::of(payload)).checksum().to_be_bytes();
    payload[at..at + 2].copy_from_slice(&sum);
}

fuzz_target!(|input: &[u8]| {
    let now = Instant::now();
    let net = |text: &str| text.parse().expect("a network");
    let pods = net("172.25.0.0/16");
    let firewall = Firewall {
        sources: vec![net("10.20.0.0/24")],
        destinations: vec![pods],
    };
    let mut forward = Forward::new(OWN, firewall, 16, now);
    forward
        .routes
        .add(PeerId(0), [10, 20, 0, 6].into(), &[pods]);
    forward.routes.add(PeerId(1), [10, 20, 0, 10].into(), &[]);

    let mut rest = input;
    while let [length, peer, behind @ ..] = rest {
        let (bytes, behind) = behind.split_at(behind.len().min((*length).into()));
        rest = behind;
        let mut packet = bytes.to_vec();
        fix_checksums(&mut packet);
        let before =
            Packet::parse(&packet).map(|view| (view.source(), view.destination(), view.ttl()));
        let from = PeerId((peer % 3).into());
        let verdict = forward.input(from, &mut packet, now);
        if verdict == Verdict::Dropped {
            continue;
        }
        let (source, destination, ttl) = before.expect("a malformed packet is dropped");
        assert!(forward.routes.permits(from, source));
        let Verdict::To(to) = verdict else {
            assert_eq!(destination, OWN);
            continue;
        };
        let view = Packet::parse(&packet).expect("a well-formed packet after translation");
        assert_eq!(view.ttl(), ttl - 1);
        assert_eq!(forward.routes.lookup(view.destination()), Some(to));
        if destination == OWN {
            assert_eq!(view.source(), source);
        } else {
            assert_eq!((view.source(), view.destination()), (OWN, destination));
        }
    }
    while forward.poll_reply().is_some() {}
    assert!(forward.stats().tracked <= 16);
});
