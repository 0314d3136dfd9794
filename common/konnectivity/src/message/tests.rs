#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;

pub(crate) fn message() -> impl Strategy<Value = Message> {
    let dial = any::<i64>().prop_map(DialId);
    let connection = any::<i64>().prop_map(ConnectId);
    prop_oneof![
        (any::<String>(), any::<String>(), dial.clone()).prop_map(|(protocol, address, dial)| {
            Message::DialRequest {
                protocol,
                address,
                dial,
            }
        }),
        (dial.clone(), connection.clone(), any::<String>()).prop_map(
            |(dial, connection, error)| Message::DialResponse {
                dial,
                connection,
                error,
            }
        ),
        (connection.clone(), any::<Vec<u8>>()).prop_map(|(connection, bytes)| Message::Data {
            connection,
            bytes: bytes.into(),
        }),
        connection
            .clone()
            .prop_map(|connection| Message::HalfClose { connection }),
        connection
            .clone()
            .prop_map(|connection| Message::CloseRequest { connection }),
        (connection, any::<String>())
            .prop_map(|(connection, error)| Message::CloseResponse { connection, error }),
        dial.prop_map(|dial| Message::CloseDial { dial }),
        Just(Message::Drain),
        (7..i32::MAX).prop_map(Message::Unknown),
    ]
}

proptest! {
    #[test]
    fn a_message_round_trips_through_the_wire_format(message in message()) {
        use prost::Message as _;
        let wire = Packet::from(message.clone()).encode_to_vec();
        let back = Message::from(Packet::decode(wire.as_slice()).unwrap());
        prop_assert_eq!(back, message);
    }
}

#[test]
fn a_payload_that_disagrees_with_the_type_reads_as_zero() {
    let packet = Packet {
        r#type: PacketType::Data as i32,
        payload: Some(Payload::CloseRequest(CloseRequest { connect_id: 7 })),
    };
    assert_eq!(
        Message::from(packet),
        Message::Data {
            connection: ConnectId(0),
            bytes: Bytes::new()
        }
    );
}

#[test]
fn an_empty_data_packet_is_not_a_half_close() {
    let data = Message::Data {
        connection: ConnectId(3),
        bytes: Bytes::new(),
    };
    assert_eq!(Message::from(Packet::from(data.clone())), data);
}
