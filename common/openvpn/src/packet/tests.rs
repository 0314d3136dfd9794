#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use proptest::prelude::*;
use rand::{RngCore, SeedableRng};

use super::*;

const OPCODES: [Opcode; 5] = [
    Opcode::SoftResetV1,
    Opcode::ControlV1,
    Opcode::AckV1,
    Opcode::HardResetClientV2,
    Opcode::HardResetServerV2,
];

fn hex(text: &str) -> Vec<u8> {
    text.as_bytes()
        .chunks(2)
        .map(|two| u8::from_str_radix(std::str::from_utf8(two).unwrap(), 16).unwrap())
        .collect()
}

/// The packet is from stock 2.6.14, without a wrap.
#[test]
fn parses_the_first_packet_of_a_stock_client() {
    let bytes = hex("38461cf6379aaa06ec0000000000");
    let packet = ControlPacket::parse(&bytes).unwrap();
    assert_eq!(
        packet,
        ControlPacket {
            opcode: Opcode::HardResetClientV2,
            key_id: KeyId::FIRST,
            session: SessionId([0x46, 0x1c, 0xf6, 0x37, 0x9a, 0xaa, 0x06, 0xec]),
            acks: Vec::new(),
            peer_session: None,
            id: Some(0),
            payload: &[],
        }
    );
    let mut out = BytesMut::new();
    packet.write(&mut out);
    assert_eq!(out, bytes);
}

#[test]
fn acknowledgements_include_the_receivers_session() {
    let bytes = hex("2b0102030405060708020000000500000006a1a2a3a4a5a6a7a8");
    let packet = ControlPacket::parse(&bytes).unwrap();
    assert_eq!(packet.opcode, Opcode::AckV1);
    assert_eq!(packet.key_id.get(), 3);
    assert_eq!(packet.acks.as_slice(), [5, 6]);
    assert_eq!(
        packet.peer_session,
        Some(SessionId([0xa1, 0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7, 0xa8]))
    );
    assert_eq!((packet.id, packet.payload), (None, &[][..]));
}

#[test]
fn unsupported_opcodes_have_distinct_errors() {
    let refused = |first: u8| {
        ControlPacket::parse(&[first, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0]).unwrap_err()
    };
    assert_eq!(refused(1 << 3), PacketError::KeyMethod1);
    assert_eq!(refused(2 << 3), PacketError::KeyMethod1);
    assert_eq!(refused(6 << 3), PacketError::Data);
    assert_eq!(refused(9 << 3), PacketError::Data);
    assert_eq!(refused(10 << 3), PacketError::TlsCryptV2);
    assert_eq!(refused(11 << 3), PacketError::TlsCryptV2);
    assert_eq!(refused(0), PacketError::Opcode(0));
    assert_eq!(refused(31 << 3), PacketError::Opcode(31));
}

#[test]
fn malformed_packets_are_rejected() {
    let whole = hex("2001020304050607080100000005a1a2a3a4a5a6a7a800000001");
    assert!(ControlPacket::parse(&whole).is_ok());
    for len in 0..whole.len() {
        assert_eq!(
            ControlPacket::parse(&whole[..len]),
            Err(PacketError::Truncated),
            "{len}"
        );
    }
    let nine = hex("200102030405060708090000000000");
    assert_eq!(
        ControlPacket::parse(&nine),
        Err(PacketError::TooManyAcks(9))
    );
    let zero = hex("2000000000000000000000000001");
    assert_eq!(ControlPacket::parse(&zero), Err(PacketError::NoSession));
}

#[test]
fn key_ids_never_return_to_the_first() {
    let mut id = KeyId::FIRST;
    let mut ids = Vec::new();
    for _ in 0..9 {
        ids.push(id.get());
        id = id.next();
    }
    assert_eq!(ids, [0, 1, 2, 3, 4, 5, 6, 7, 1]);
}

#[test]
fn a_session_id_is_never_zero() {
    struct Zeros(u32, rand::rngs::StdRng);
    impl RngCore for Zeros {
        fn next_u32(&mut self) -> u32 {
            self.1.next_u32()
        }
        fn next_u64(&mut self) -> u64 {
            self.1.next_u64()
        }
        fn fill_bytes(&mut self, bytes: &mut [u8]) {
            self.0 += 1;
            if self.0 < 3 {
                bytes.fill(0)
            } else {
                self.1.fill_bytes(bytes)
            }
        }
    }
    let mut rng = Zeros(0, rand::rngs::StdRng::seed_from_u64(1));
    assert_ne!(SessionId::random(&mut rng).0, [0; 8]);
    assert_eq!(rng.0, 3);
}

#[test]
fn parses_data_headers() {
    assert_eq!(
        DataHeader::parse(&[0x35]),
        Some(DataHeader {
            key_id: KeyId(5),
            peer_id: None
        })
    );
    let v2 = DataHeader {
        key_id: KeyId(1),
        peer_id: Some(0x01_0203),
    };
    assert_eq!(DataHeader::parse(&[0x49, 1, 2, 3, 4]), Some(v2));
    let none = DataHeader {
        key_id: KeyId(1),
        peer_id: Some(NO_PEER_ID),
    };
    assert_eq!(DataHeader::parse(&[0x49, 255, 255, 255]), Some(none));
    assert_eq!(DataHeader::parse(&[0x49, 1, 2]), None);
    assert_eq!(DataHeader::parse(&[]), None);
    assert_eq!(DataHeader::parse(&[0x20, 1, 2, 3]), None);
}

proptest! {
    #[test]
    fn packets_round_trip(
        opcode in prop::sample::select(&OPCODES[..]),
        key_id in 0..8_u8,
        session: [u8; 8],
        peer: [u8; 8],
        acks in prop::collection::vec(any::<u32>(), 0..=MAX_ACKS),
        id: u32,
        payload: Vec<u8>,
    ) {
        prop_assume!(session != [0; 8]);
        let packet = ControlPacket {
            opcode,
            key_id: KeyId(key_id),
            session: SessionId(session),
            peer_session: (!acks.is_empty()).then_some(SessionId(peer)),
            acks,
            id: (opcode != Opcode::AckV1).then_some(id),
            payload: &payload,
        };
        let mut out = BytesMut::new();
        packet.write(&mut out);
        prop_assert_eq!(ControlPacket::parse(&out), Ok(packet));
    }

    #[test]
    fn parsed_packets_are_written_unchanged(first in 0x18..0x48_u8, mut bytes in prop::collection::vec(any::<u8>(), 0..80), acks in 0..12_u8) {
        if let Some(byte) = bytes.get_mut(8) {
            *byte = acks;
        }
        bytes.insert(0, first);
        if let Ok(packet) = ControlPacket::parse(&bytes) {
            let mut out = BytesMut::new();
            packet.write(&mut out);
            prop_assert_eq!(&out[..], &bytes[..]);
        }
        if let Some(header) = DataHeader::parse(&bytes) {
            let mut out = BytesMut::new();
            header.write(&mut out);
            prop_assert_eq!(&out[..], &bytes[..header.wire_len()]);
        }
    }
}
