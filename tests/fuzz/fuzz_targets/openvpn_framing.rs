//! Packets in a TCP stream: the result does not depend on how the stream is cut into pieces, and the buffer
//! keeps less than one longest packet.
#![no_main]

use bytes::BytesMut;
use culvert_fuzz::Cut;
use culvert_openvpn::framing::{PREFIX_LEN, split_first, take_first};
use libfuzzer_sys::fuzz_target;

const MAX: usize = 300;

fuzz_target!(|input: &[u8]| {
    let Some(cut) = Cut::new(input) else { return };

    let mut whole = cut.bytes.to_vec();
    let mut rest = &mut whole[..];
    let mut expected = Vec::new();
    let failed = loop {
        match split_first(rest, MAX) {
            Ok(Some((packet, after))) => {
                expected.push(packet.to_vec());
                rest = after;
            }
            Ok(None) => break None,
            Err(error) => break Some(error),
        }
    };

    let mut stream = BytesMut::new();
    let mut found = Vec::new();
    let mut fed = 0;
    let mut in_pieces = None;
    'pieces: for end in cut.ends(cut.bytes.len()) {
        stream.extend_from_slice(&cut.bytes[fed..end]);
        fed = end;
        loop {
            match take_first(&mut stream, MAX) {
                Ok(Some(packet)) => found.push(packet.to_vec()),
                Ok(None) => break,
                Err(error) => {
                    in_pieces = Some(error);
                    break 'pieces;
                }
            }
        }
        assert!(stream.len() < PREFIX_LEN + MAX);
    }
    assert_eq!((found, in_pieces), (expected, failed));
});
