#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use proptest::prelude::*;

use super::*;
use crate::compress::Framing;
use crate::payload::PING;
use crate::wrap::static_key;

fn hex(text: &str) -> Vec<u8> {
    let byte = |two: &[u8]| u8::from_str_radix(std::str::from_utf8(two).unwrap(), 16).unwrap();
    text.as_bytes().chunks(2).map(byte).collect()
}

/// Key block with the bytes 0 to 255.
fn counting() -> KeyBlock {
    KeyBlock::from_bytes(std::array::from_fn(|i| i as u8))
}

fn key_id(id: u8) -> KeyId {
    KeyId::of(id)
}

fn sealer(cipher: Cipher, peer_id: Option<u32>) -> Sealer {
    Sealer::new(
        cipher,
        Digest::Sha1,
        &counting(),
        Role::Client,
        key_id(1),
        peer_id,
    )
    .unwrap()
}

fn opener(cipher: Cipher) -> Opener {
    Opener::new(cipher, Digest::Sha1, &counting(), Role::Client).unwrap()
}

/// Packets sealed by the Python library `cryptography` (OpenSSL) with the key bytes 00, 01, .. ff. The first
/// packet of each cipher is from the client (V2, key id 2, peer id 01 02 03), the second from the server (V1,
/// key id 7).
const AEAD: [(Cipher, &str, &str); 4] = [
    (
        Cipher::Aes256Gcm,
        "4a01020300000001cbb13d563d82fe437592a91d5d12857aaaa55bd405d8c3bb35ce35141f537c",
        "3700000001935d5b9d28c6c6646d552bb14fa38c4bd82a0878e0ade99d00c7ef1c664b5e",
    ),
    (
        Cipher::Aes192Gcm,
        "4a010203000000018d68e43cfb7c51a04bc9daf87bfefb458d189a08b27ed50f689a201bfa042e",
        "37000000012755a9cd217e15041c23379f79f0b0f87026906b67c7aeb99f98a06b4b7d09",
    ),
    (
        Cipher::Aes128Gcm,
        "4a010203000000017211c13fdd86febd4b94b649e41fd431b36ddc8eb2bd5fe2a2ad48ce73d20e",
        "37000000017c44f0a803d7aec14ab49c81e837172da7656d698f1a754e2ca847e52bf0fa",
    ),
    (
        Cipher::ChaCha20Poly1305,
        "4a010203000000017cd38026ff9bd9bbb9da22a000494aa26fea12ad9dc2064cb3c686902dad89",
        "370000000148560be46f5267772967b2a9af4018b89d191123a96782a8e731616445a856",
    ),
];

#[test]
fn aead_known_answers() {
    let (block, now) = (counting(), Instant::now());
    for (cipher, v2, v1) in AEAD {
        for (sealed, role, key, peer_id) in [
            (v2, Role::Client, 2, Some(0x01_0203)),
            (v1, Role::Server, 7, None),
        ] {
            let mut out = BytesMut::new();
            let mut sealer =
                Sealer::new(cipher, Digest::Sha1, &block, role, key_id(key), peer_id).unwrap();
            sealer.seal(b"an inner packet", &mut out).unwrap();
            assert_eq!(out, hex(sealed), "{cipher}");
            let mut opener = Opener::new(cipher, Digest::Sha1, &block, role).unwrap();
            assert_eq!(opener.open(&mut out, now).unwrap(), b"an inner packet");
        }
    }
}

/// Pings of stock 2.6.14 in static key mode (`--secret stock.key` and the direction). This mode has no
/// opcode, and puts a time between packet id and payload.
#[test]
fn opens_cbc_packets_of_a_stock_peer() {
    use Cipher::{Aes128Cbc, Aes192Cbc, Aes256Cbc};
    let captured = [
        (
            (Aes256Cbc, Digest::Sha1, Role::Server, Framing::None),
            "290a8f50534e7ed35cdae7bc29bbcb847c4a45737ffc8530d7c6207f32be72cb406ab11d35f25134ec20\
             f0bbcdb025eaaf19c3d06a26bbd88690258071ed4825fc2142c7",
        ),
        (
            (Aes128Cbc, Digest::Sha256, Role::Client, Framing::None),
            "9cada85502f0f293281bd20b5060c5dc49143a700e0666a0f32a2763c5a725f726e0b51a00416b7ced6d\
             eb856ed7ad9f3b934880ca47203b1d66a2452ed68049e2c5ca64e25a413593117c81d4eea2f9",
        ),
        (
            (Aes192Cbc, Digest::Sha512, Role::Client, Framing::None),
            "a52d9f7cc761869adbca67e07597c51652e668abad0cf3e9efcdf469560ee7a1e0c587ee286ff7d0de8f\
             1b179c5f9a3cba0e946bddf9a25d807ef5b06059cee404ca3bca0fc6d6fd245b085a37beb5fa3f1da13a\
             02bb78b37e6891ebc19e02b5163b30cf89a113699180324959c66ca1",
        ),
        (
            (Aes256Cbc, Digest::Sha1, Role::Server, Framing::Lzo),
            "e6bd6abcf84297fbc187f23af8dd81c4311947f971c47a0ebbb63304c28e06dacab3a6750130c05a0e8d\
             036aa3ce346888d04b7637336e4ddd6294db6798176678f2ab67",
        ),
        (
            (Aes256Cbc, Digest::Sha1, Role::Server, Framing::Stub),
            "67d1801baf75eff57c6b68d4807bbc3b021fffe8d9c121e9ded4c68bd6d5113413c70fd3d60c1ab4c1b1\
             9944e15906ea37261c187fa5a6d86e9f231ea24604e0fcad4243",
        ),
    ];
    let block = static_key::parse(include_str!("../wrap/static_key/stock.key")).unwrap();
    for ((cipher, digest, sender, framing), packet) in captured {
        let mut packet = [&[0x30][..], &hex(packet)].concat();
        let mut opener = Opener::new(cipher, digest, &block, sender).unwrap();
        let payload = opener.open(&mut packet, Instant::now()).unwrap();
        let (_time, payload) = payload.split_at_mut(4);
        assert_eq!(
            framing.strip(payload).unwrap(),
            PING,
            "{cipher} {digest} {framing:?}"
        );
    }
}

#[test]
fn worn_keys_are_reported_and_packet_ids_run_out() {
    for cipher in Cipher::ALL {
        let mut sealer = sealer(cipher, Some(1));
        sealer.next_id = u64::from(u32::MAX) - 1;
        assert!(sealer.is_worn());
        let mut out = BytesMut::from(&b"before"[..]);
        sealer.seal(b"one", &mut out).unwrap();
        sealer.seal(b"two", &mut out).unwrap();
        let len = out.len();
        assert_eq!(sealer.seal(b"three", &mut out), Err(SealError::Exhausted));
        assert_eq!(out.len(), len);
    }
    let mut gcm = sealer(Cipher::Aes256Gcm, Some(1));
    let mut out = BytesMut::new();
    gcm.seal(&[0; 1500], &mut out).unwrap();
    assert!(!gcm.is_worn());
    gcm.used = WORN_GCM - 1;
    gcm.seal(&[0; 1500], &mut out).unwrap();
    assert!(gcm.is_worn());
    let mut chacha = sealer(Cipher::ChaCha20Poly1305, Some(1));
    chacha.used = WORN_GCM;
    assert!(!chacha.is_worn());
}

#[test]
fn replayed_and_reflected_packets_are_rejected() {
    let now = Instant::now();
    for cipher in Cipher::ALL {
        let mut out = BytesMut::new();
        sealer(cipher, None).seal(b"payload", &mut out).unwrap();
        let mut once = opener(cipher);
        assert_eq!(once.open(&mut out.clone(), now).unwrap(), b"payload");
        assert_eq!(
            once.open(&mut out.clone(), now),
            Err(OpenError::Replay(ReplayError::Repeated(1)))
        );
        let mut reflected = Opener::new(cipher, Digest::Sha1, &counting(), Role::Server).unwrap();
        assert_eq!(
            reflected.open(&mut out, now),
            Err(OpenError::Authentication)
        );
    }
}

/// An unauthenticated packet must not move the replay window.
#[test]
fn forged_packet_id_does_not_move_the_window() {
    let now = Instant::now();
    for (cipher, v2, _) in AEAD {
        let mut opener = opener(cipher);
        let mut forged = hex(v2);
        forged[4..8].fill(0xff);
        assert_eq!(
            opener.open(&mut forged, now),
            Err(OpenError::Authentication)
        );
        assert_eq!(opener.open(&mut hex(v2), now).unwrap(), b"an inner packet");
    }
}

#[test]
fn changed_bits_and_truncation_are_detected() {
    let now = Instant::now();
    for cipher in Cipher::ALL {
        for peer_id in [None, Some(5)] {
            let mut out = BytesMut::new();
            sealer(cipher, peer_id).seal(b"payload", &mut out).unwrap();
            let covered = if cipher.is_aead() && peer_id.is_some() {
                0
            } else {
                if peer_id.is_some() { 4 } else { 1 }
            };
            for bit in covered * 8..out.len() * 8 {
                let mut changed = out.to_vec();
                changed[bit / 8] ^= 1 << (bit % 8);
                assert!(
                    opener(cipher).open(&mut changed, now).is_err(),
                    "{cipher}: bit {bit}"
                );
            }
            for len in 0..out.len() {
                let mut cut = out[..len].to_vec();
                assert!(
                    opener(cipher).open(&mut cut, now).is_err(),
                    "{cipher}: {len} bytes"
                );
            }
        }
    }
}

/// The packets have a valid MAC but an invalid body.
#[test]
fn authenticated_garbage_is_an_error() {
    let mac = Digest::Sha1.hmac_key(counting().data(Role::Client).mac);
    let authentic = |body: &[u8]| {
        let tag = aws_lc_rs::hmac::sign(&mac, body);
        [&[0x30], tag.as_ref(), body].concat()
    };
    let now = Instant::now();
    for len in [0, 15, 16, 17, 31, 33, 47] {
        let mut packet = authentic(&vec![7; len]);
        let result = opener(Cipher::Aes256Cbc).open(&mut packet, now);
        assert_eq!(result, Err(OpenError::Truncated), "{len}");
    }
    // These blocks decrypt to wrong padding.
    let mut wrong = 0;
    for seed in 0..100_u8 {
        let mut packet = authentic(&[seed; 48]);
        let result = opener(Cipher::Aes256Cbc).open(&mut packet, now).map(|_| ());
        wrong += usize::from(result == Err(OpenError::Authentication));
    }
    assert!(wrong > 90, "{wrong}");
}

#[test]
fn seal_with_and_seal_agree() {
    for cipher in Cipher::ALL {
        let (mut one, mut two) = (BytesMut::new(), BytesMut::new());
        sealer(cipher, Some(1))
            .seal(b"a payload", &mut one)
            .unwrap();
        sealer(cipher, Some(1))
            .seal_with(&mut two, |out| {
                out.put_slice(b"a pay");
                out.put_slice(b"load");
            })
            .unwrap();
        let now = Instant::now();
        assert_eq!(
            opener(cipher).open(&mut two, now),
            opener(cipher).open(&mut one, now)
        );
    }
}

proptest! {
    #[test]
    fn payloads_round_trip(
        cipher in prop::sample::select(&Cipher::ALL[..]),
        digest in prop::sample::select(vec![Digest::Sha1, Digest::Sha256, Digest::Sha384, Digest::Sha512]),
        key: u8,
        peer_id in prop::option::of(0..1_u32 << 24),
        payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..100), 1..5),
    ) {
        let block = counting();
        let mut sealer = Sealer::new(cipher, digest, &block, Role::Server, key_id(key), peer_id).unwrap();
        let mut opener = Opener::new(cipher, digest, &block, Role::Server).unwrap();
        for payload in payloads {
            let mut out = BytesMut::from(&b"before"[..]);
            sealer.seal(&payload, &mut out).unwrap();
            let mut packet = out.split_off(6);
            prop_assert_eq!(&out[..], b"before");
            prop_assert!(packet.len() <= payload.len() + MAX_OVERHEAD);
            prop_assert_eq!(DataHeader::parse(&packet), Some(DataHeader { key_id: key_id(key), peer_id }));
            prop_assert_eq!(&*opener.open(&mut packet, Instant::now()).unwrap(), &payload[..]);
        }
    }

    #[test]
    fn arbitrary_bytes_are_rejected(cipher in prop::sample::select(&Cipher::ALL[..]), v2: bool, mut bytes: Vec<u8>) {
        let now = Instant::now();
        prop_assert!(opener(cipher).open(&mut bytes.clone(), now).is_err());
        bytes.insert(0, if v2 { 0x48 } else { 0x30 });
        prop_assert!(opener(cipher).open(&mut bytes, now).is_err());
    }
}
