//! The ClientHello reader: the result does not depend on how the input is cut into pieces, the caller buffers
//! a bounded number of bytes, and every server name is a host name.
#![no_main]

use culvert_fuzz::Cut;
use culvert_door::client_hello::{HelloReader, MAX_RECEIVED_BYTES};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some(cut) = Cut::new(input) else { return };
    let whole = HelloReader::default().read(cut.bytes);
    let mut reader = HelloReader::default();
    let in_pieces = cut
        .ends(cut.bytes.len())
        .map(|end| reader.read(&cut.bytes[..end]))
        .find(|result| *result != Ok(None))
        .unwrap_or(Ok(None));
    assert_eq!(in_pieces, whole);

    match whole {
        Ok(Some(hello)) => {
            let Some(name) = hello.server_name else {
                return;
            };
            assert!((1..=253).contains(&name.len()));
            assert!(!name.starts_with('.') && !name.ends_with('.'));
            let allowed = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.');
            assert!(name.bytes().all(allowed));
            assert!(name.parse::<std::net::IpAddr>().is_err());
        }
        Ok(None) => assert!(cut.bytes.len() < MAX_RECEIVED_BYTES),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
