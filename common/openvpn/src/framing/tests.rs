#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use proptest::prelude::*;

use super::*;

fn framed(packets: &[Vec<u8>]) -> BytesMut {
    let mut out = BytesMut::new();
    for packet in packets {
        write::<LengthError>(&mut out, |out| {
            out.put_slice(packet);
            Ok(())
        })
        .unwrap();
    }
    out
}

#[test]
fn a_length_of_zero_or_above_the_limit_ends_the_stream() {
    for (bytes, length) in [([0, 0, 1], 0), ([0, 11, 1], 11), ([255, 255, 1], 65535)] {
        let error = LengthError { length, max: 10 };
        assert_eq!(take_first(&mut BytesMut::from(&bytes[..]), 10), Err(error));
        assert_eq!(split_first(&mut bytes.clone(), 10), Err(error));
    }
    assert_eq!(take_first(&mut BytesMut::from(&[0][..]), 10), Ok(None));
    assert_eq!(take_first(&mut BytesMut::from(&[0, 10][..]), 10), Ok(None));
}

#[test]
fn failed_write_leaves_the_buffer_unchanged() {
    let mut out = BytesMut::from(&b"before"[..]);
    for length in [0, 65536] {
        let result = write(&mut out, |out| {
            out.put_bytes(1, length);
            Ok(())
        });
        assert_eq!(result, Err(LengthError { length, max: 65535 }));
        assert_eq!(out, &b"before"[..]);
    }
    let failed = LengthError { length: 1, max: 2 };
    let result = write(&mut out, |out| {
        out.put_u8(1);
        Err(failed)
    });
    assert_eq!(result, Err(failed));
    assert_eq!(out, &b"before"[..]);
}

proptest! {
    /// The packets in a stream do not depend on the sizes of the reads, and the buffer contains at most one
    /// packet.
    #[test]
    fn written_packets_are_read_back(
        packets in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..300), 0..10),
        cuts in prop::collection::vec(1..400_usize, 1..20),
    ) {
        let stream = framed(&packets);
        let mut received = BytesMut::new();
        let mut found = Vec::new();
        let mut rest = &stream[..];
        for cut in cuts.iter().cycle() {
            let (piece, after) = rest.split_at(*cut.min(&rest.len()));
            received.put_slice(piece);
            while let Some(packet) = take_first(&mut received, 300).unwrap() {
                found.push(packet.to_vec());
            }
            prop_assert!(received.len() < PREFIX_LEN + 300);
            rest = after;
            if rest.is_empty() {
                break;
            }
        }
        prop_assert_eq!(&found, &packets);
        prop_assert!(received.is_empty());

        let mut stream = stream;
        let mut rest = &mut stream[..];
        let mut in_place = Vec::new();
        while let Some((packet, after)) = split_first(rest, 300).unwrap() {
            in_place.push(packet.to_vec());
            rest = after;
        }
        prop_assert_eq!(&in_place, &packets);
    }
}
