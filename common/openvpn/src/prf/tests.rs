#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use super::tls1_prf;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The expected bytes are calculated from RFC 2246 with Python's `hmac`. Stock's self test contains the first
/// eight.
#[test]
fn output_matches_a_known_answer() {
    let mut out = [0; 32];
    tls1_prf(b"tls1-prf-test-secret", b"", &[b"tls1-prf-test"], &mut out);
    assert_eq!(
        hex(&out),
        "7144fe2540737595022f7f8ea48c43bf662693887df5c28fef0cff5afdda06c7"
    );
}

/// The secret has 13 bytes, so the halves share a byte. The expected bytes are from Python's `hmac`, too.
#[test]
fn halves_of_an_odd_secret_share_a_byte() {
    let mut out = [0; 48];
    tls1_prf(
        b"an odd secret",
        b"label",
        &[b"seed in ", b"two parts"],
        &mut out,
    );
    assert_eq!(
        hex(&out),
        "b3a0aeea342cadc704da5aff00a47e25f48ce7b6b62c92b93caa037013d97d93\
         174098adea441e913beba3b0daa88147"
    );
}
