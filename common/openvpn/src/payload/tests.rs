#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use super::*;

#[test]
fn what_is_for_the_peer_itself() {
    assert_eq!(Payload::classify(&PING), Payload::Ping);
    assert_eq!(Payload::classify(&EXIT), Payload::Exit);
    assert_eq!(EXIT[..16], OCC_MAGIC);
    let mut request = EXIT;
    request[16] = 0;
    assert_eq!(Payload::classify(&request), Payload::Occ);
    assert_eq!(Payload::classify(&OCC_MAGIC), Payload::Occ);
}

#[test]
fn everything_else_is_inner() {
    for payload in [
        &[][..],
        &[0x45, 0, 0, 20],
        &PING[..15],
        &[&PING[..], &[0]].concat(),
        &OCC_MAGIC[..15],
    ] {
        assert_eq!(Payload::classify(payload), Payload::Inner(payload));
    }
}
