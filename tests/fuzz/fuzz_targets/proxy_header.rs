//! The PROXY protocol header: the result does not depend on how the input is cut into pieces, a header is bounded, and
//! the addresses survive another transport, where an IPv4 address that is mapped to IPv6 is the same address.
#![no_main]

use std::net::SocketAddr;

use culvert_fuzz::Cut;
use culvert_host::net::proxy_protocol::{MAX_HEADER_BYTES, Origin, Version, is_header, parse};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some(cut) = Cut::new(input) else { return };
    let whole = parse(cut.bytes);
    for end in cut.ends(cut.bytes.len()) {
        match parse(&cut.bytes[..end]) {
            Ok(None) => {}
            Ok(early) => assert_eq!(Some(early), whole.as_ref().ok().copied()),
            Err(_) => assert!(whole.is_err()),
        }
    }
    let Ok(Some(header)) = whole else { return };
    assert!(is_header(cut.bytes));
    assert!(header.len <= cut.bytes.len() && header.len <= MAX_HEADER_BYTES);
    let Some(origin) = header.origin else { return };
    for version in [Version::V1, Version::V2] {
        let bytes = origin.header(version);
        let again = parse(&bytes).ok().flatten().expect("a header");
        assert_eq!(again.len, bytes.len());
        assert_eq!(again.origin.map(canonical), Some(canonical(origin)));
    }
});

/// Returns the origin with mapped addresses as IPv4 addresses.
fn canonical(origin: Origin) -> Origin {
    let canonical = |end: SocketAddr| SocketAddr::new(end.ip().to_canonical(), end.port());
    Origin {
        source: canonical(origin.source),
        destination: origin.destination.map(canonical),
    }
}
