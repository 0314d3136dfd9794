//! The head of a CONNECT request: the result does not depend on how the input is cut into pieces, and a
//! target contains printable ASCII only.
#![no_main]

use culvert_host::net::connect::HeadReader;
use culvert_fuzz::Cut;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some(cut) = Cut::new(input) else { return };
    let whole = HeadReader::default().read(cut.bytes);
    let mut reader = HeadReader::default();
    let in_pieces = cut
        .ends(cut.bytes.len())
        .map(|end| reader.read(&cut.bytes[..end]))
        .find(|result| *result != Ok(None))
        .unwrap_or(Ok(None));
    assert_eq!(in_pieces, whole);

    match whole {
        Ok(Some(head)) => {
            assert!(!head.target.is_empty());
            assert!(head.target.bytes().all(|byte| byte.is_ascii_graphic()));
            assert!(cut.bytes[..head.head_len].ends_with(b"\n"));
        }
        Ok(None) => {}
        Err(error) => assert!(error.response().starts_with(b"HTTP/1.1 ")),
    }
});
