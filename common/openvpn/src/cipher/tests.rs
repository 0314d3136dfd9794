#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use super::*;

#[test]
fn names_round_trip_and_unknown_names_fail() {
    for cipher in Cipher::ALL {
        assert_eq!(cipher.name().parse(), Ok(cipher));
        assert_eq!(cipher.name().to_lowercase().parse(), Ok(cipher));
        assert_eq!(cipher.is_aead(), !cipher.name().ends_with("CBC"));
    }
    assert_eq!(Cipher::from_name("id-aes256-GCM"), Some(Cipher::Aes256Gcm));
    assert_eq!(
        "BF-CBC".parse::<Cipher>(),
        Err(UnknownName("BF-CBC".to_owned()))
    );
    for digest in ["SHA1", "sha1", "RSA-SHA1", "SHA-1"] {
        assert_eq!(digest.parse(), Ok(Digest::Sha1));
    }
    for digest in [Digest::Sha1, Digest::Sha256, Digest::Sha384, Digest::Sha512] {
        assert_eq!(digest.name().parse(), Ok(digest));
    }
    assert_eq!("MD5".parse::<Digest>(), Err(UnknownName("MD5".to_owned())));
}

#[test]
fn lists_skip_unknown_names_and_duplicates() {
    let known = Cipher::known_in("AES-256-GCM:BF-CBC::aes-128-cbc:AES-256-GCM");
    assert_eq!(known, [Cipher::Aes256Gcm, Cipher::Aes128Cbc]);
    assert_eq!(Cipher::list(&known), "AES-256-GCM:AES-128-CBC");
    assert_eq!(
        Cipher::list(&Cipher::DEFAULT),
        "AES-256-GCM:AES-128-GCM:CHACHA20-POLY1305"
    );
    assert_eq!(Cipher::known_in(""), []);
}
