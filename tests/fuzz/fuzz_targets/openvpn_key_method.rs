//! Key method 2 messages, from a client if the first byte is odd: an accepted message, written and parsed
//! again, stays the same.
#![no_main]

use bytes::BytesMut;
use culvert_openvpn::Role;
use culvert_openvpn::key_method::{KeyMethod2, MAX_MESSAGE_LEN};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((choice, input)) = input.split_first() else {
        return;
    };
    let sender = if choice % 2 == 1 {
        Role::Client
    } else {
        Role::Server
    };
    match KeyMethod2::parse(sender, input) {
        Ok(Some((message, used))) => {
            assert!(used <= input.len() && used <= MAX_MESSAGE_LEN);
            let mut written = BytesMut::new();
            // The parser replaces an invalid byte by a longer character, so the text may now be too long to
            // write.
            if message.write(sender, &mut written).is_ok() {
                let len = written.len();
                assert_eq!(
                    KeyMethod2::parse(sender, &written),
                    Ok(Some((message, len)))
                );
            }
        }
        Ok(None) => assert!(
            input.len() <= MAX_MESSAGE_LEN,
            "the parser waits for more than the longest message"
        ),
        Err(_) => {}
    }
});
