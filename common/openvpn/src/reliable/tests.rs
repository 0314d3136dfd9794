#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use super::*;

const RETRY: Duration = Duration::from_secs(2);

fn sent(reliable: &mut Reliable<()>, now: Instant) -> Vec<u32> {
    let mut ids = Vec::new();
    while let Some(message) = reliable.transmit(now) {
        ids.push(message.id);
    }
    ids
}

#[test]
fn window_counts_from_the_oldest_unacknowledged() {
    let now = Instant::now();
    let mut reliable = Reliable::new(RETRY);
    for _ in 0..SEND_WINDOW {
        assert!(reliable.push((), vec![], now));
    }
    assert!(!reliable.push((), vec![], now));
    reliable.acknowledged(1);
    reliable.acknowledged(2);
    assert_eq!(reliable.window(), 0, "id 0 is still unacknowledged");
    reliable.acknowledged(0);
    assert_eq!(reliable.window(), 3);
    reliable.acknowledged(3);
    reliable.acknowledged(3);
    reliable.acknowledged(77);
    assert!(reliable.is_acknowledged());
    assert_eq!(reliable.timeout(), None);
}

#[test]
fn retransmits_with_doubling_pauses() {
    let start = Instant::now();
    let mut reliable = Reliable::new(RETRY);
    reliable.push((), b"x".to_vec(), start);
    let mut sends = Vec::new();
    for tenth in 0..320 {
        let now = start + Duration::from_millis(100) * tenth;
        if !sent(&mut reliable, now).is_empty() {
            sends.push(tenth / 10);
        }
    }
    assert_eq!(sends, [0, 2, 6, 14, 30]);
    assert_eq!(reliable.timeout(), Some(start + Duration::from_secs(62)));
}

#[test]
fn resends_early_once_three_later_ones_are_acknowledged() {
    let now = Instant::now();
    let mut reliable = Reliable::new(RETRY);
    for _ in 0..4 {
        reliable.push((), vec![], now);
    }
    assert_eq!(sent(&mut reliable, now), [0, 1, 2, 3]);
    reliable.acknowledged(1);
    reliable.acknowledged(2);
    assert_eq!(sent(&mut reliable, now), [0; 0]);
    reliable.acknowledged(3);
    assert!(reliable.timeout().is_some_and(|at| at <= now));
    assert_eq!(sent(&mut reliable, now), [0]);
    assert!(reliable.timeout().is_some_and(|at| at > now));
}

#[test]
fn delivers_in_order_and_acknowledges_duplicates() {
    let mut reliable = Reliable::new(RETRY);
    assert_eq!(reliable.receive(1, (), b"b"), Received::New);
    assert_eq!(reliable.deliver(), None);
    assert_eq!(reliable.receive(1, (), b"b"), Received::Duplicate);
    assert_eq!(
        reliable.receive(RECEIVE_WINDOW as u32, (), b"far"),
        Received::Refused
    );
    assert_eq!(reliable.receive(0, (), b"a"), Received::New);
    assert_eq!(reliable.deliver(), Some(((), b"a".to_vec())));
    assert_eq!(reliable.deliver(), Some(((), b"b".to_vec())));
    assert_eq!(reliable.deliver(), None);
    assert_eq!(reliable.take_acks(MAX_ACKS).as_slice(), [1, 0]);
    assert_eq!(reliable.receive(0, (), b"a"), Received::Duplicate);
    assert_eq!(
        reliable.receive(u32::MAX, (), b"before the first"),
        Received::Duplicate
    );
    assert_eq!(reliable.take_acks(MAX_ACKS).as_slice(), [0, u32::MAX, 1]);
}

#[test]
fn messages_are_refused_while_the_ack_queue_is_full() {
    let mut reliable = Reliable::new(RETRY);
    for id in 0..RECEIVE_WINDOW as u32 {
        assert_eq!(reliable.receive(id, (), b""), Received::New);
        assert!(reliable.deliver().is_some());
    }
    for old in 0..u32::try_from(2 * MAX_PENDING_ACKS).unwrap() {
        reliable.receive(u32::MAX - old, (), b"");
    }
    assert_eq!(
        reliable.receive(RECEIVE_WINDOW as u32, (), b""),
        Received::Refused
    );
    let mut taken = 0;
    while reliable.has_pending_acks() {
        taken += reliable.take_acks(MAX_ACKS).as_slice().len();
    }
    assert_eq!(taken, MAX_PENDING_ACKS);
    assert_eq!(
        reliable.receive(RECEIVE_WINDOW as u32, (), b""),
        Received::New
    );
}

#[test]
fn acknowledgements_are_repeated_where_there_is_room() {
    let mut reliable = Reliable::new(RETRY);
    for id in 0..6 {
        reliable.receive(id, (), b"");
    }
    assert_eq!(reliable.take_acks(MAX_PIGGYBACK).as_slice(), [0, 1, 2, 3]);
    assert_eq!(reliable.take_acks(MAX_PIGGYBACK).as_slice(), [4, 5, 3, 2]);
    assert!(!reliable.has_pending_acks());
    assert_eq!(reliable.take_acks(MAX_PIGGYBACK).as_slice(), [5, 4, 3, 2]);
    reliable.receive(3, (), b"");
    assert_eq!(reliable.take_acks(MAX_ACKS).as_slice(), [3, 5, 4, 2]);
}

#[test]
fn large_message_is_accepted_in_order_only() {
    let mut reliable = Reliable::new(RETRY);
    let large = vec![7; MAX_STORED_BYTES + 1];
    assert_eq!(reliable.receive(1, (), &large), Received::Refused);
    assert_eq!(reliable.receive(1, (), &large[1..]), Received::New);
    assert_eq!(reliable.receive(0, (), &large), Received::New);
    assert_eq!(reliable.deliver().unwrap().1, large);
    assert_eq!(reliable.deliver().unwrap().1, large[1..]);
}
