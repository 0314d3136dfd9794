#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use rand::SeedableRng;
use rand::rngs::StdRng;

use super::{Half, KeyBlock, KeySource};
use crate::Role;
use crate::packet::SessionId;

/// Key block calculated from RFC 2246 with Python's `hmac`: first the master secret from the bytes 00..2f,
/// 01.. and 03.., then the block from 02.., 04.. and the session ids.
const DERIVED: &str = "\
    21b6718793fccefb270d4f54922afd41e979ebcc38d624933629454a438a1e01\
    f4f13d432dc3d76da46d7b0ad57dbc37a9d1b1e2481d11d564c146dc94f6a9fd\
    2468b2f7efcf511862a0be914593bc1bda3bca674b83ac34b6ea5dec1dc630d7\
    95e65151b28c116a35e71995561d1a105fa2615954e5aef263e1095ac9bf6826\
    1fbf80f0eb1a299b666bd5997657c572eca83ab513df266d7b26cdf2b91ec6d6\
    cf5b24f4f7b2df2bdd51b527fac4579da44d7d5696d5243e49f5c60b826f3c30\
    f2d27f53ad35145b478a18c72ddd9a3d8e666f853dbcb77080e4b744c37ee16b\
    7fd2073ca3974d1b80ff1dc6dc4ab1937f44790a60aeb8e12c9ca0a0dd996e23";

#[test]
fn prf_keys_match_a_known_answer() {
    let client = KeySource {
        pre_master: std::array::from_fn(|i| i as u8),
        random1: [1; 32],
        random2: [2; 32],
    };
    let server = KeySource {
        pre_master: [0; 48],
        random1: [3; 32],
        random2: [4; 32],
    };
    let block = KeyBlock::from_prf(
        &client,
        &server,
        SessionId(*b"clientid"),
        SessionId(*b"serverid"),
    );
    let hex: String = block.0.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(hex, DERIVED);
}

#[test]
fn each_sender_has_its_half() {
    let block = KeyBlock::from_bytes(std::array::from_fn(|i| (i / 64) as u8));
    let quarters = |half: super::HalfBlock<'_>| (half.cipher.to_vec(), half.mac.to_vec());
    assert_eq!(quarters(block.half(Half::Zero)), (vec![0; 64], vec![1; 64]));
    assert_eq!(quarters(block.half(Half::One)), (vec![2; 64], vec![3; 64]));
    assert_eq!(
        quarters(block.data(Role::Client)),
        quarters(block.half(Half::Zero))
    );
    assert_eq!(
        quarters(block.data(Role::Server)),
        quarters(block.half(Half::One))
    );
}

#[test]
fn only_a_client_has_a_pre_master_secret() {
    let mut rng = StdRng::seed_from_u64(1);
    let client = KeySource::random(Role::Client, &mut rng);
    let server = KeySource::random(Role::Server, &mut rng);
    assert_ne!(client.pre_master, [0; 48]);
    assert_eq!(server.pre_master, [0; 48]);
    assert_ne!(client.random1, server.random1);
    assert_ne!(client.random1, client.random2);
}
