//! Tests against bytes that a real kernel has sent or accepted.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use proptest::prelude::*;

use super::*;

const V4: Address = Address {
    ip: IpAddr::V4(Ipv4Addr::new(100, 64, 30, 10)),
    prefix: 32,
};

/// Encodes a message like the kernel does.
fn message(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(HEADER + body.len()).unwrap();
    let mut bytes = length.to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes.extend(5_u32.to_ne_bytes());
    bytes.extend(77_u32.to_ne_bytes());
    bytes.extend(body);
    bytes.resize(bytes.len().next_multiple_of(ALIGNMENT), 0);
    bytes
}

/// Encodes the request for one step of a dummy interface with the index 7.
fn step(name: &str, step: Step, number: u32) -> Vec<u8> {
    let interface = Interface {
        name: name.to_owned(),
        kind: "dummy",
        addresses: Vec::new(),
    };
    Request::Change(&interface, 7, step).encode(number)
}

fn one(datagram: &[u8]) -> Incoming<'_> {
    let messages: Vec<_> = decode(datagram).collect();
    assert_eq!(messages.len(), 1, "{messages:?}");
    messages[0].incoming
}

#[test]
#[cfg(target_endian = "little")]
fn requests_match_iproute2_bytes() {
    // ip addr add 100.64.30.10/32 scope host dev ... (index 7)
    let expected = [
        40, 0, 0, 0, 20, 0, 0x05, 0x06, 9, 0, 0, 0, 0, 0, 0, 0, // header
        2, 32, 0, 254, 7, 0, 0, 0, // ifaddrmsg
        8, 0, 2, 0, 100, 64, 30, 10, // IFA_LOCAL
        8, 0, 1, 0, 100, 64, 30, 10, // IFA_ADDRESS
    ];
    assert_eq!(step("d0", Step::Add(V4), 9), expected);
    // ip link add d0 up type dummy
    let expected = [
        56, 0, 0, 0, 16, 0, 0x05, 0x06, 9, 0, 0, 0, 0, 0, 0, 0, // header
        0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, // ifinfomsg
        7, 0, 3, 0, b'd', b'0', 0, 0, // IFLA_IFNAME
        16, 0, 18, 0, 10, 0, 1, 0, b'd', b'u', b'm', b'm', b'y', 0, 0, 0, // IFLA_LINKINFO
    ];
    assert_eq!(step("d0", Step::Create, 9), expected);
}

/// A request has the same layout as the answer about the same object, so requests can be decoded.
#[test]
fn requests_decode_to_their_own_content() {
    let head = |name, kind, index| LinkHead {
        index,
        name,
        kind,
        is_up: true,
    };
    let bytes = step("envoyagent", Step::Create, 1);
    let link = head("envoyagent", Some("dummy"), 0);
    assert_eq!(one(&bytes), Incoming::Link(link));
    let v6 = Address::host("fd00::10".parse().unwrap());
    for address in [V4, v6] {
        for change in [Step::Add(address), Step::Remove(address)] {
            let bytes = step("d0", change, 1);
            assert_eq!(
                one(&bytes),
                Incoming::Address { index: 7, address },
                "{change}"
            );
        }
    }
    // No duplicate address detection, since the interface has no neighbors.
    assert_eq!(step("d0", Step::Add(v6), 1)[HEADER + 2], IFA_F_NODAD);
}

#[test]
fn unknown_link_attributes_are_skipped() {
    let mut body = vec![0, 0, 1, 0];
    body.extend(7_u32.to_ne_bytes());
    body.extend([0x82, 0, 0, 0]);
    body.extend([0; 4]);
    attribute(&mut body, 200, b"from a later kernel");
    attribute(&mut body, IFLA_IFNAME, b"br0\0");
    let mut info = Vec::new();
    attribute(&mut info, 99, &[1, 2, 3]);
    attribute(&mut info, IFLA_INFO_KIND, b"bridge\0");
    attribute(&mut body, IFLA_LINKINFO | 0x8000, &info);
    for kind in [RTM_NEWLINK, RTM_DELLINK] {
        let bytes = message(kind, 0, &body);
        let link = LinkHead {
            index: 7,
            name: "br0",
            kind: Some("bridge"),
            is_up: false,
        };
        assert_eq!(one(&bytes), Incoming::Link(link));
    }
}

#[test]
fn device_has_no_kind_and_nameless_link_is_ignored() {
    let mut body = link(1, IFF_UP);
    let bytes = message(RTM_NEWLINK, 0, &body);
    assert_eq!(one(&bytes), Incoming::Other);
    attribute(&mut body, IFLA_IFNAME, b"lo\0");
    let bytes = message(RTM_NEWLINK, 0, &body);
    assert!(matches!(one(&bytes), Incoming::Link(lo) if lo.kind.is_none() && lo.name == "lo"));
}

#[test]
fn peer_of_point_to_point_link_is_not_the_address() {
    let mut body = vec![AF_INET, 32, 0, 0];
    body.extend(7_u32.to_ne_bytes());
    attribute(&mut body, IFA_ADDRESS, &[10, 0, 0, 2]);
    attribute(&mut body, IFA_LOCAL, &[100, 64, 30, 10]);
    let bytes = message(RTM_NEWADDR, 0, &body);
    let expected = Incoming::Address {
        index: 7,
        address: V4,
    };
    assert_eq!(one(&bytes), expected);
}

#[test]
fn outcomes_and_interruptions_are_decoded() {
    let refused = message(NLMSG_ERROR, 0, &(-17_i32).to_ne_bytes());
    let done = message(NLMSG_DONE, NLM_F_DUMP_INTR, &0_i32.to_ne_bytes());
    let other = message(99, 0, b"x");
    let datagram = [other, refused, done].concat();
    let messages: Vec<_> = decode(&datagram).collect();
    let incoming: Vec<_> = messages.iter().map(|message| message.incoming).collect();
    let expected = [Incoming::Other, Incoming::Outcome(17), Incoming::Outcome(0)];
    assert_eq!(incoming, expected);
    assert!(messages.iter().all(|message| message.number == 5));
    let interrupted: Vec<_> = messages.iter().map(|one| one.is_interrupted).collect();
    assert_eq!(interrupted, [false, false, true]);
}

#[test]
fn truncated_messages_are_dropped() {
    let bytes = step("d0", Step::Add(V4), 1);
    for length in 0..bytes.len() {
        assert_eq!(decode(&bytes[..length]).count(), 0, "{length}");
    }
}

proptest! {
    #[test]
    fn decode_terminates_on_random_bytes(
        kind in 0_u16..32,
        body in prop::collection::vec(any::<u8>(), 0..120),
        tail in prop::collection::vec(any::<u8>(), 0..40),
    ) {
        let datagram = [message(kind, 0, &body), tail].concat();
        let messages = decode(&datagram).count();
        prop_assert!((1..=4).contains(&messages), "{messages}");
    }
}
