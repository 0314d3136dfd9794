//! Tests of the encoding of one packet against prost.

use culvert_proto::packet::Payload;
use culvert_proto::{CloseRequest, Data};
use proptest::prelude::*;

use super::*;
use crate::message::tests::message;

/// Returns the message that prost decodes, or `None` if prost fails.
fn by_prost(packet: &[u8]) -> Option<Message> {
    Packet::decode(packet).ok().map(Message::from)
}

fn by_us(packet: &[u8]) -> Option<Message> {
    decode(Bytes::copy_from_slice(packet)).ok()
}

/// Generates packets that our programs never send: with a payload that does not match the type, or with both
/// an error and data.
fn odd_packet() -> impl Strategy<Value = Packet> {
    let payload = prop_oneof![
        Just(None),
        any::<i64>()
            .prop_map(|connect_id| Some(Payload::CloseRequest(CloseRequest { connect_id }))),
        (any::<i64>(), any::<String>(), any::<Vec<u8>>()).prop_map(|(connect_id, error, data)| {
            Some(Payload::Data(Data {
                connect_id,
                error,
                data: data.into(),
            }))
        }),
    ];
    let kind = prop_oneof![Just(4), -1..9_i32, any::<i32>()];
    (kind, payload).prop_map(|(r#type, payload)| Packet { r#type, payload })
}

/// Generates numbers of every length on the wire.
fn connection() -> impl Strategy<Value = i64> {
    (0..64_u32, any::<i64>()).prop_map(|(shift, value)| value >> shift)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn packets_are_written_as_prost_writes_them(message in message()) {
        let mut ours = Vec::new();
        encode(message.clone(), &mut ours);
        prop_assert_eq!(ours, framed(message));
    }

    #[test]
    fn a_data_head_equals_the_bytes_that_prost_writes_before_the_data(
        connection in connection(),
        len in prop_oneof![0..300_usize, Just(16_383), Just(16_384), Just(65_536)],
    ) {
        let expected = framed(data(connection, len));
        let mut ours = Vec::new();
        encode_data_head(ConnectId(connection), len, 0, &mut ours);
        prop_assert_eq!(ours.capacity(), ours.len());
        prop_assert_eq!(&ours, &expected[..expected.len() - len]);
    }

    #[test]
    fn a_packet_reads_as_prost_reads_it(packet in odd_packet()) {
        let bytes = packet.encode_to_vec();
        prop_assert_eq!(by_us(&bytes), by_prost(&bytes));
    }

    #[test]
    fn a_damaged_packet_reads_as_prost_reads_it(
        message in prop_oneof![message(), (connection(), 0..200_usize).prop_map(|(c, l)| data(c, l))],
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..3_u8), 1..4),
    ) {
        let mut bytes = Packet::from(message).encode_to_vec();
        for (at, byte, kind) in damage {
            // Nearly all decisions depend on the first bytes.
            let at = at.index(bytes.len().clamp(1, 20));
            match kind {
                0 if at < bytes.len() => bytes[at] = byte,
                1 if at < bytes.len() => { bytes.remove(at); }
                _ => bytes.insert(at.min(bytes.len()), byte),
            }
        }
        prop_assert_eq!(by_us(&bytes), by_prost(&bytes));
    }
}

#[test]
fn unusual_forms_of_data_are_read_as_prost_reads_them() {
    let cases: [&[u8]; 9] = [
        // Fields of the payload in the other order.
        &[0x08, 4, 0x22, 5, 0x1a, 1, b'x', 0x08, 9],
        // The payload before the type.
        &[0x22, 5, 0x08, 9, 0x1a, 1, b'x', 0x08, 4],
        // The connection twice, the data twice.
        &[0x08, 4, 0x22, 4, 0x08, 9, 0x08, 7],
        &[0x08, 4, 0x22, 6, 0x1a, 1, b'x', 0x1a, 1, b'y'],
        // Numbers with superfluous bytes.
        &[0x08, 4, 0x22, 0x85, 0, 0x08, 9, 0x1a, 1, b'x'],
        &[0x08, 4, 0x22, 6, 0x08, 0x89, 0, 0x1a, 1, b'x'],
        // A number of more than 64 bits.
        &[
            0x08, 4, 0x22, 11, 0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2,
        ],
        // A length beyond the end, and bytes after the payload.
        &[0x08, 4, 0x22, 5, 0x08, 9, 0x1a, 2, b'x'],
        &[0x08, 4, 0x22, 2, 0x08, 9, 0x48, 1],
    ];
    for case in cases {
        assert_eq!(by_us(case), by_prost(case), "{case:?}");
    }
}

#[test]
fn the_bytes_of_a_packet_are_not_copied() {
    let packet = Bytes::from(Packet::from(data(4711, 100)).encode_to_vec());
    let end = packet.as_ptr_range().end;
    let Message::Data { bytes, .. } = decode(packet).unwrap() else {
        panic!("expected a DATA message");
    };
    assert_eq!(bytes.as_ptr_range().end, end);
}
