#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use super::*;

/// Returns everything that the end wants to send.
fn output(core: &mut Core) -> Vec<u8> {
    let mut bytes = Vec::new();
    loop {
        let mut slices = [IoSlice::new(&[]); SLICES];
        let count = core.output(&mut slices);
        let part: Vec<u8> = slices[..count]
            .iter()
            .flat_map(|slice| slice.to_vec())
            .collect();
        if part.is_empty() {
            return bytes;
        }
        core.sent(part.len());
        bytes.extend(part);
    }
}

fn write(core: &mut Core, bytes: &[u8]) -> usize {
    core.write(&[IoSlice::new(bytes)])
}

fn input(core: &mut Core, mut bytes: Vec<u8>) -> Vec<u8> {
    let kept = core.input(&mut bytes).unwrap();
    bytes.truncate(kept);
    bytes
}

fn frame(length: u32, received: u64) -> Vec<u8> {
    [&length.to_be_bytes()[..], &received.to_be_bytes()].concat()
}

#[test]
fn bytes_are_kept_until_the_peer_has_acknowledged_them() {
    let (mut near, mut far) = (Core::new(100), Core::new(100));
    assert_eq!(write(&mut near, &[7; 150]), 100);
    assert_eq!((near.room(), write(&mut near, &[7])), (0, 0));
    assert_eq!(input(&mut far, output(&mut near)), [7; 100]);
    assert_eq!(near.kept(), 100);
    assert!(near.is_unacknowledged() && far.owes_acknowledgement());
    // Few bytes are acknowledged only on request, or together with bytes.
    assert!(output(&mut far).is_empty());
    far.acknowledge();
    assert!(input(&mut near, output(&mut far)).is_empty());
    assert_eq!((near.kept(), near.room()), (0, 100));
    far.acknowledge();
    assert!(output(&mut far).is_empty());
}

#[test]
fn bulk_is_acknowledged_without_a_request() {
    let (mut near, mut far) = (Core::default(), Core::default());
    let bulk = vec![9; FRAME_BYTES];
    assert_eq!(write(&mut near, &bulk), FRAME_BYTES);
    assert_eq!(input(&mut far, output(&mut near)), bulk);
    input(&mut near, output(&mut far));
    assert_eq!(near.kept(), 0);
}

#[test]
fn frames_are_recorded() {
    let mut core = Core::new(100);
    write(&mut core, b"ab");
    assert_eq!(
        output(&mut core),
        b"\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00\x00ab"
    );
    input(&mut core, [frame(1, 1), b"x".to_vec()].concat());
    core.acknowledge();
    assert_eq!(
        output(&mut core),
        b"\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01"
    );
    core.end();
    assert_eq!(
        output(&mut core),
        b"\xff\xff\xff\xff\x00\x00\x00\x00\x00\x00\x00\x01"
    );
}

#[test]
fn lost_bytes_are_sent_again_after_a_cut_at_every_byte() {
    let whole = 3 * HEAD_BYTES + 30;
    for cut in 0..=whole {
        let (mut near, mut far) = (Core::new(100), Core::new(100));
        let mut wire = Vec::new();
        for part in 0..3 {
            write(&mut near, &[part; 10]);
            wire.extend(output(&mut near));
        }
        assert_eq!(wire.len(), whole);
        wire.truncate(cut);
        let mut got = input(&mut far, wire);
        let received = far.received();
        assert_eq!(received, got.len() as u64);
        far.attach(received, near.received()).unwrap();
        near.attach(near.received(), received).unwrap();
        got.extend(input(&mut far, output(&mut near)));
        assert_eq!(got, [[0; 10], [1; 10], [2; 10]].concat(), "cut at {cut}");
    }
}

#[test]
fn bytes_of_the_earlier_transport_after_the_request_are_not_delivered_twice() {
    let (mut near, mut far) = (Core::new(100), Core::new(100));
    write(&mut near, b"abcdef");
    let old = output(&mut near);
    let mut got = input(&mut far, old[..HEAD_BYTES + 2].to_vec());
    let told = far.received();
    got.extend(input(
        &mut far,
        old[HEAD_BYTES + 2..HEAD_BYTES + 5].to_vec(),
    ));
    // The peer has attached the new transport with the number that it was told.
    near.attach(near.received(), told).unwrap();
    far.attach(told, near.received()).unwrap();
    got.extend(input(&mut far, output(&mut near)));
    assert_eq!(got, b"abcdef");
    far.acknowledge();
    input(&mut near, output(&mut far));
    assert_eq!(near.kept(), 0);
}

#[test]
fn acknowledgement_that_the_earlier_transport_lost_is_sent_again() {
    let (mut near, mut far) = (Core::new(100), Core::new(100));
    let told = far.received();
    write(&mut near, b"abc");
    input(&mut far, output(&mut near));
    far.acknowledge();
    assert!(!output(&mut far).is_empty());
    near.attach(near.received(), told).unwrap();
    far.attach(told, near.received()).unwrap();
    input(&mut far, output(&mut near));
    assert!(far.owes_acknowledgement());
    far.acknowledge();
    input(&mut near, output(&mut far));
    assert!(!near.is_unacknowledged());
}

#[test]
fn end_follows_all_bytes_and_nothing_follows_the_end() {
    let (mut near, mut far) = (Core::new(100), Core::new(100));
    write(&mut near, b"last");
    near.end();
    let mut wire = output(&mut near);
    wire.extend(b"garbage");
    assert_eq!(input(&mut far, wire), b"last");
    assert!(far.is_ended());
    // An end that was lost with its transport is sent again.
    near.attach(0, 4).unwrap();
    assert_eq!(output(&mut near), frame(END, 0));
}

#[test]
fn urgent_end_follows_the_current_frame_and_overtakes_other_bytes() {
    let (mut near, mut far) = (Core::new(100), Core::new(100));
    write(&mut near, b"abcdef");
    let mut slices = [IoSlice::new(&[]); SLICES];
    assert_eq!(near.output(&mut slices), 2);
    // The transport has accepted a part of the frame, and more bytes wait.
    near.sent(HEAD_BYTES + 2);
    let mut wire = [frame(6, 0), b"ab".to_vec()].concat();
    write(&mut near, b"waiting");
    near.abort();
    assert_eq!(near.kept(), 13);
    wire.extend(near.rest());
    assert_eq!(input(&mut far, wire), b"abcdef");
    assert!(far.is_ended());
    assert!(near.rest().is_empty() && output(&mut near).is_empty());
}

#[test]
fn violations_are_errors() {
    let over = u32::try_from(FRAME_BYTES).unwrap() + 1;
    let mut core = Core::new(100);
    let error = core.input(&mut frame(over, 0)).unwrap_err();
    assert_eq!(error, FrameError::TooLong(over));
    for reported in [3, u64::MAX] {
        let mut core = Core::new(100);
        write(&mut core, b"ab");
        output(&mut core);
        let error = core.input(&mut frame(0, reported)).unwrap_err();
        assert!(matches!(error, FrameError::Acknowledgement { .. }));
        assert!(core.attach(0, reported).is_err());
    }
    let mut core = Core::new(100);
    core.input(&mut [frame(1, 0), b"x".to_vec()].concat())
        .unwrap();
    let gap = FrameError::Gap {
        from: 2,
        received: 1,
    };
    assert_eq!(core.attach(2, 0), Err(gap));
    assert_eq!(core.attach(1, 0), Ok(0));
    let mut core = Core::new(100);
    write(&mut core, b"ab");
    output(&mut core);
    core.input(&mut frame(0, 2)).unwrap();
    let error = core.input(&mut frame(0, 1)).unwrap_err();
    assert!(error.to_string().contains("expected 2 to 2"), "{error}");
}
