#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use super::*;

#[test]
fn pings_and_occ_messages_are_recognized() {
    assert_eq!(Payload::classify(&PING), Payload::Ping);
    assert_eq!(Payload::classify(&EXIT), Payload::Exit);
    assert_eq!(EXIT[..16], OCC_MAGIC);
    let mut request = EXIT;
    request[16] = 0;
    assert_eq!(Payload::classify(&request), Payload::Occ);
    assert_eq!(Payload::classify(&OCC_MAGIC), Payload::Occ);
}

#[test]
fn other_payloads_are_inner_packets() {
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
