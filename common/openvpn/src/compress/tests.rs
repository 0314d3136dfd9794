#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use proptest::prelude::*;

use super::*;

const ALL: [Framing; 4] = [Framing::None, Framing::Lzo, Framing::Stub, Framing::StubV2];

fn strip(framing: Framing, payload: &[u8]) -> Option<Vec<u8>> {
    framing
        .strip(&mut payload.to_vec())
        .map(|payload| payload.to_vec())
}

#[test]
fn frames_payloads_like_stock() {
    assert_eq!(Framing::None.frame(b"abc").concat(), b"abc");
    assert_eq!(Framing::Lzo.frame(b"abc").concat(), b"\xfaabc");
    assert_eq!(Framing::Stub.frame(b"abc").concat(), b"\xfbbca");
    assert_eq!(Framing::StubV2.frame(b"abc").concat(), b"abc");
    assert_eq!(Framing::StubV2.frame(b"\x50bc").concat(), b"\x50\0\x50bc");
}

#[test]
fn compressed_input_is_an_error() {
    for framing in [Framing::Lzo, Framing::Stub] {
        assert_eq!(strip(framing, b"\x66abc"), None);
        assert_eq!(strip(framing, b"\x69abc"), None);
        assert_eq!(strip(framing, b"\x45abc"), None);
        assert_eq!(strip(framing, b""), None);
        assert_eq!(strip(framing, b"\xfb"), None);
        assert_eq!(strip(framing, b"\xfa"), Some(vec![]));
    }
    assert_eq!(strip(Framing::StubV2, b"\x50\x01abc"), None);
    assert_eq!(strip(Framing::StubV2, b"\x50\x02abc"), None);
    assert_eq!(strip(Framing::StubV2, b"\x50"), None);
    assert_eq!(strip(Framing::None, b"\x66abc"), Some(b"\x66abc".to_vec()));
}

#[test]
fn compress_option_selects_the_framing() {
    assert_eq!(Framing::of_compress(None), Some(Framing::Stub));
    assert_eq!(Framing::of_compress(Some("lz4")), Some(Framing::Stub));
    assert_eq!(Framing::of_compress(Some("lzo")), Some(Framing::Lzo));
    assert_eq!(Framing::of_compress(Some("stub-v2")), Some(Framing::StubV2));
    assert_eq!(Framing::of_compress(Some("snappy")), None);
}

proptest! {
    #[test]
    fn payloads_round_trip(payload in prop::collection::vec(any::<u8>(), 1..50)) {
        for framing in ALL {
            let framed = framing.frame(&payload).concat();
            prop_assert!(framed.len() <= payload.len() + Framing::MAX_OVERHEAD);
            prop_assert_eq!(strip(framing, &framed), Some(payload.clone()));
        }
    }

    #[test]
    fn arbitrary_bytes_never_grow(payload: Vec<u8>) {
        for framing in ALL {
            if let Some(stripped) = strip(framing, &payload) {
                prop_assert!(stripped.len() <= payload.len());
            }
        }
    }
}
