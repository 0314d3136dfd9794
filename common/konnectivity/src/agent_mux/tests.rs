#![allow(clippy::panic)]

use proptest::prelude::*;

use super::*;

fn dial(random: i64) -> Message {
    Message::DialRequest {
        protocol: "tcp".into(),
        address: "10.0.0.1:443".into(),
        dial: DialId(random),
    }
}

fn data(connection: i64) -> Message {
    Message::Data {
        connection: ConnectId(connection),
        bytes: Bytes::from_static(b"x"),
    }
}

fn close(connection: i64) -> Message {
    Message::CloseRequest {
        connection: ConnectId(connection),
    }
}

fn open(mux: &mut Mux<&'static str>, random: i64, name: &'static str) -> ConnectId {
    let Effect::Dial(id, connection, _) = mux.on_message(dial(random)) else {
        panic!("a dial request must cause a dial");
    };
    mux.insert(id, connection, name);
    mux.dialed(id, connection);
    connection
}

#[test]
fn ids_count_up_from_the_first_and_bytes_reach_their_connection() {
    let mut mux = Mux::after(ConnectId(40));
    assert_eq!(open(&mut mux, 70, "a"), ConnectId(41));
    assert_eq!(open(&mut mux, 71, "b"), ConnectId(42));
    assert!(matches!(mux.on_message(data(41)), Effect::Data("a", ..)));
    assert!(matches!(mux.on_message(data(42)), Effect::Data("b", ..)));
    assert_eq!(mux.on_message(data(0)), Effect::Ignored);
}

#[test]
fn unknown_ids_are_answered_with_upstreams_texts() {
    let mut mux: Mux<&str> = Mux::default();
    assert_eq!(
        mux.on_message(data(9)),
        Effect::Stray(closed(ConnectId(9), "unrecognized connectID"))
    );
    assert_eq!(
        mux.on_message(close(9)),
        Effect::Answer(closed(ConnectId(9), "Unknown connectID"))
    );
}

#[test]
fn close_request_is_delivered_once() {
    let mut mux = Mux::default();
    open(&mut mux, 70, "a");
    assert_eq!(mux.on_message(close(1)), Effect::Closed("a"));
    assert!(matches!(mux.on_message(close(1)), Effect::Answer(_)));
    assert!(mux.is_empty());
}

#[test]
fn only_pending_dials_can_be_cancelled() {
    let mut mux = Mux::default();
    let Effect::Dial(id, connection, _) = mux.on_message(dial(70)) else {
        panic!("a dial request must cause a dial");
    };
    mux.insert(id, connection, "a");
    let give_up = Message::CloseDial { dial: id };
    assert_eq!(mux.on_message(give_up.clone()), Effect::Cancelled("a"));
    assert_eq!(mux.on_message(give_up.clone()), Effect::Ignored);
    open(&mut mux, 70, "b");
    assert_eq!(mux.on_message(give_up), Effect::Ignored);
    assert_eq!(mux.len(), 1);
}

#[test]
fn agent_messages_and_unknown_messages_are_ignored() {
    let mut mux: Mux<&str> = Mux::default();
    for message in [
        Message::Drain,
        closed(ConnectId(1), ""),
        Message::Unknown(99),
    ] {
        assert_eq!(mux.on_message(message), Effect::Ignored);
    }
}

proptest! {
    /// For any sequence of packets, data reaches only the connection with the id in the packet.
    #[test]
    fn data_never_reaches_another_connection(steps in prop::collection::vec((0..4_u8, 0..8_i64), 0..200)) {
        let mut mux = Mux::default();
        for (kind, id) in steps {
            let message = match kind {
                0 => dial(id),
                1 => data(id),
                2 => close(id),
                _ => Message::CloseDial { dial: DialId(id) },
            };
            match mux.on_message(message) {
                Effect::Dial(dial, connection, _) => mux.insert(dial, connection, connection),
                Effect::Data(handle, connection, _) => {
                    prop_assert_eq!(handle, connection);
                    prop_assert_eq!(connection, ConnectId(id));
                }
                Effect::Closed(handle) => prop_assert_eq!(handle, ConnectId(id)),
                _ => {}
            }
        }
    }
}
