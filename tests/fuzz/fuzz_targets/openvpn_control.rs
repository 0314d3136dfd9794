//! Control texts in a stream: the result does not depend on how the stream is cut into pieces, the buffer
//! keeps less than one longest text, and every text parses to a message. The assembler receives all push
//! replies in order.
#![no_main]

use bytes::BytesMut;
use culvert_fuzz::Cut;
use culvert_openvpn::control::{MAX_TEXT_LEN, Message, push::Assembler, take_text};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some(cut) = Cut::new(input) else { return };
    let mut stream = BytesMut::new();
    let mut fed = 0;
    let mut texts = Vec::new();
    'pieces: for end in cut.ends(cut.bytes.len()) {
        stream.extend_from_slice(&cut.bytes[fed..end]);
        fed = end;
        loop {
            match take_text(&mut stream) {
                Ok(Some(text)) => texts.push(text),
                Ok(None) => break,
                Err(_) => break 'pieces,
            }
        }
        assert!(stream.len() < MAX_TEXT_LEN);
    }

    let mut whole = BytesMut::from(cut.bytes);
    let mut assembler = Assembler::new();
    for text in texts {
        assert_eq!(
            take_text(&mut whole).as_ref().map(Option::as_deref),
            Ok(Some(&text[..]))
        );
        if let Message::PushReply(reply) = Message::parse(&text) {
            let _ = assembler.push(reply);
        }
    }
});
