//! Control texts in a stream: the result does not depend on how the stream is cut into pieces, and the buffer
//! keeps less than one longest text. No text and no sequence of push replies causes a panic.
#![no_main]

use bytes::BytesMut;
use culvert_fuzz::Cut;
use culvert_openvpn::control::{MAX_TEXT_LEN, Message, push::Assembler, take_text};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some(cut) = Cut::new(input) else { return };

    let mut whole = BytesMut::from(cut.bytes);
    let mut expected = Vec::new();
    let failed = loop {
        match take_text(&mut whole) {
            Ok(Some(text)) => expected.push(text),
            Ok(None) => break None,
            Err(error) => break Some(error),
        }
    };

    let mut stream = BytesMut::new();
    let mut texts = Vec::new();
    let mut fed = 0;
    let mut in_pieces = None;
    'pieces: for end in cut.ends(cut.bytes.len()) {
        stream.extend_from_slice(&cut.bytes[fed..end]);
        fed = end;
        loop {
            match take_text(&mut stream) {
                Ok(Some(text)) => texts.push(text),
                Ok(None) => break,
                Err(error) => {
                    in_pieces = Some(error);
                    break 'pieces;
                }
            }
        }
        assert!(stream.len() < MAX_TEXT_LEN);
    }
    assert_eq!((&texts, in_pieces), (&expected, failed));

    let mut assembler = Assembler::new();
    for text in &texts {
        if let Message::PushReply(reply) = Message::parse(text) {
            let _ = assembler.push(reply);
        }
    }
});
