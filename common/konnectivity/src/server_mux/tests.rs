#![allow(clippy::unwrap_used)]

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;

use super::*;

fn answer(dial: i64, connection: i64) -> Message {
    Message::DialResponse {
        dial: DialId(dial),
        connection: ConnectId(connection),
        error: String::new(),
    }
}

fn data(connection: i64) -> Message {
    Message::Data {
        connection: ConnectId(connection),
        bytes: Bytes::from_static(b"x"),
    }
}

fn closed(connection: i64) -> Message {
    Message::CloseResponse {
        connection: ConnectId(connection),
        error: String::new(),
    }
}

#[test]
fn a_dial_opens_carries_and_closes() {
    let mut mux = Mux::default();
    mux.dial(DialId(5), "a").unwrap();
    assert_eq!(mux.counts(), (1, 0));
    assert_eq!(
        mux.on_message(answer(5, 1)),
        Effect::Opened("a", ConnectId(1))
    );
    assert_eq!(mux.counts(), (0, 1));
    assert_eq!(
        mux.on_message(data(1)),
        Effect::Data("a", ConnectId(1), Bytes::from_static(b"x"))
    );
    assert_eq!(
        mux.on_message(closed(1)),
        Effect::Closed("a", String::new())
    );
    assert_eq!(mux.counts(), (0, 0));
    // The agent has already closed the connection, so no close is sent.
    assert_eq!(mux.close(ConnectId(1)), None);
}

#[test]
fn packets_that_cross_our_close_are_dropped_until_it_is_answered() {
    let mut mux = Mux::default();
    mux.dial(DialId(5), "a").unwrap();
    mux.on_message(answer(5, 1));
    assert!(mux.close(ConnectId(1)).is_some());
    assert_eq!(mux.on_message(data(1)), Effect::Ignored);
    assert_eq!(mux.on_message(closed(1)), Effect::Ignored);
    assert_eq!(
        mux.on_message(data(1)),
        Effect::Stray(Message::CloseRequest {
            connection: ConnectId(1)
        })
    );
}

#[test]
fn late_answer_is_closed_but_never_closes_an_open_connection() {
    let mut mux = Mux::default();
    mux.dial(DialId(5), "a").unwrap();
    assert_eq!(
        mux.cancel(DialId(5)),
        Some(Message::CloseDial { dial: DialId(5) })
    );
    assert_eq!(
        mux.on_message(answer(5, 1)),
        Effect::Unrecognized(Some(Message::CloseRequest {
            connection: ConnectId(1)
        }))
    );
    mux.dial(DialId(6), "b").unwrap();
    mux.on_message(answer(6, 2));
    assert_eq!(mux.on_message(answer(5, 2)), Effect::Unrecognized(None));
    assert_eq!(mux.counts(), (0, 1));
}

#[test]
fn an_id_in_use_fails_the_new_dial_only() {
    let mut mux = Mux::default();
    mux.dial(DialId(1), "a").unwrap();
    mux.dial(DialId(2), "b").unwrap();
    mux.on_message(answer(1, 9));
    assert!(matches!(
        mux.on_message(answer(2, 9)),
        Effect::Refused("b", _)
    ));
    assert!(matches!(mux.on_message(data(9)), Effect::Data("a", ..)));
}

#[test]
fn an_ended_stream_returns_every_handle_once() {
    let mut mux = Mux::default();
    mux.dial(DialId(1), 1).unwrap();
    mux.dial(DialId(2), 2).unwrap();
    mux.dial(DialId(3), 3).unwrap();
    mux.on_message(answer(1, 1));
    mux.on_message(answer(3, 3));
    mux.close(ConnectId(3));
    assert_eq!(mux.end(), (vec![2], vec![1]));
    assert_eq!(mux.dial(DialId(4), 4), Err(4));
    assert_eq!(mux.counts(), (0, 0));
}

/// One action of either side.
#[derive(Clone, Debug)]
enum Step {
    Dial(i64),
    Cancel(i64),
    Close(i64),
    Packet(Message),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let id = 0..6_i64;
    let step = prop_oneof![
        id.clone().prop_map(Step::Dial),
        id.clone().prop_map(Step::Cancel),
        id.clone().prop_map(Step::Close),
        (id.clone(), id.clone()).prop_map(|(d, c)| Step::Packet(answer(d, c))),
        id.clone().prop_map(|c| Step::Packet(data(c))),
        id.prop_map(|c| Step::Packet(closed(c))),
    ];
    prop::collection::vec(step, 0..200)
}

proptest! {
    /// Every dial has exactly one outcome, and bytes reach only the dial that received the id.
    #[test]
    fn no_sequence_crosses_connections(steps in steps()) {
        let mut mux = Mux::default();
        let mut serial = 0;
        let mut waiting = HashSet::new();
        let mut owner = HashMap::new();
        for step in steps {
            match step {
                Step::Dial(d) => {
                    serial += 1;
                    if mux.dial(DialId(d), (serial, d)).is_ok() {
                        prop_assert!(waiting.insert((serial, d)));
                    }
                }
                Step::Cancel(d) => {
                    if mux.cancel(DialId(d)).is_some() {
                        waiting.retain(|(_, dial)| *dial != d);
                    }
                }
                Step::Close(c) => {
                    prop_assert_eq!(mux.close(ConnectId(c)).is_some(), owner.remove(&c).is_some());
                }
                Step::Packet(message) => match (mux.on_message(message.clone()), message) {
                    (Effect::Opened(handle, ConnectId(c)), _) => {
                        prop_assert!(waiting.remove(&handle));
                        prop_assert!(owner.insert(c, handle).is_none());
                    }
                    (Effect::Refused(handle, _), _) => prop_assert!(waiting.remove(&handle)),
                    (Effect::Data(handle, connection, _), _) => {
                        prop_assert_eq!(owner.get(&connection.0), Some(&handle));
                    }
                    (Effect::Closed(handle, _), Message::CloseResponse { connection, .. }) => {
                        prop_assert_eq!(owner.remove(&connection.0), Some(handle));
                    }
                    (Effect::Unrecognized(Some(Message::CloseRequest { connection })), _)
                    | (Effect::Stray(Message::CloseRequest { connection }), _) => {
                        prop_assert!(!owner.contains_key(&connection.0));
                    }
                    _ => {}
                },
            }
            prop_assert_eq!(mux.counts(), (waiting.len(), owner.len()));
        }
    }
}
