#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use proptest::prelude::*;

use super::*;
use crate::keys::Half;

/// Key file made by `openvpn --genkey secret` of 2.6.14.
const STOCK: &str = include_str!("stock.key");

fn bytes(key: &KeyBlock) -> Vec<u8> {
    let (zero, one) = (key.half(Half::Zero), key.half(Half::One));
    [zero.cipher, zero.mac, one.cipher, one.mac].concat()
}

fn file(key: &[u8]) -> String {
    let lines: Vec<String> = key
        .chunks(16)
        .map(|line| line.iter().map(|byte| format!("{byte:02X}")).collect())
        .collect();
    format!("{BEGIN}\n{}\n{END}\n", lines.join("\n"))
}

#[test]
fn parses_a_stock_file() {
    let key = bytes(&parse(STOCK).unwrap());
    assert_eq!(key[..4], [0x12, 0x7a, 0xc3, 0x86]);
    assert_eq!(key[252..], [0x63, 0xbe, 0xc3, 0xe8]);
    assert_eq!(key, bytes(&parse(&STOCK.replace('\n', "\r\n")).unwrap()));
}

#[test]
fn comments_and_spaces_between_digits_are_ignored() {
    let commented = STOCK.replace(
        "127ac386135bf2ab7dbe67deff4b26d1",
        "# a comment\n; another\n127ac386 135bf2ab\n\n\t7dbe67deff4b26d1",
    );
    assert_eq!(
        bytes(&parse(&commented).unwrap()),
        bytes(&parse(STOCK).unwrap())
    );
}

#[test]
fn invalid_files_are_rejected() {
    assert_eq!(parse("").unwrap_err(), StaticKeyError::NoMarker(BEGIN));
    assert_eq!(
        parse(&STOCK.replace(END, "")).unwrap_err(),
        StaticKeyError::NoMarker(END)
    );
    assert_eq!(
        parse(&file(&[1; 255])).unwrap_err(),
        StaticKeyError::Length(255)
    );
    assert_eq!(
        parse(&file(&[1; 257])).unwrap_err(),
        StaticKeyError::Length(257)
    );
    assert_eq!(parse(&file(&[])).unwrap_err(), StaticKeyError::Length(0));
    assert_eq!(
        parse(&STOCK.replace("127ac", "127xc")).unwrap_err(),
        StaticKeyError::Digit(5)
    );
    let v2 = "-----BEGIN OpenVPN tls-crypt-v2 client key-----\nAAAA\n";
    assert_eq!(parse(v2).unwrap_err(), StaticKeyError::TlsCryptV2);
    // A single extra digit at the end is an error, too.
    let odd = file(&[1; 256]).replace("\n-----END", "0\n-----END");
    assert_eq!(parse(&odd).unwrap_err(), StaticKeyError::Length(257));
}

proptest! {
    #[test]
    fn keys_round_trip(key in prop::collection::vec(any::<u8>(), 256)) {
        prop_assert_eq!(bytes(&parse(&file(&key)).unwrap()), key);
    }

    #[test]
    fn arbitrary_text_never_panics(text: String, at in 0..700_usize) {
        let _ = parse(&text);
        let mut broken = STOCK.to_owned();
        broken.insert_str(at.min(STOCK.len()), &text);
        let _ = parse(&broken);
    }
}
