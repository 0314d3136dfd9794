#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use proptest::prelude::*;

use super::*;
use crate::packet::{KeyId, Opcode, SessionId};

const TIME: u32 = 0x6b02_6ecc;

/// First packets of stock 2.6.14 with the key in `static_key/stock.key`: the sender's options, the packet,
/// and the receiver's wrap.
fn captured() -> Vec<(&'static str, &'static str, WrapKey)> {
    let key = key();
    let auth = |direction, digest| WrapKey::tls_auth(&key, direction, digest);
    vec![
        (
            "--tls-auth",
            "38ee370bfa52089bc45380b82b31e0c26494eecc85d55a55e3a70f3863000000016b026ecc0000000000",
            auth(KeyDirection::Both, Digest::Sha1),
        ),
        (
            "--tls-auth 1",
            "3876a6911a13fbc59da1134c78858d5c9b6fe312e56f922de484e39999000000016b026ecc0000000000",
            auth(KeyDirection::Normal, Digest::Sha1),
        ),
        (
            "--tls-auth 0 --auth SHA256",
            "3863723db93d1565fbc3e373e0c9c440de94279548d58cc6cedeede0594ff40da2786ac505e2ae5a4700\
             0000016b026ecc0000000000",
            auth(KeyDirection::Inverse, Digest::Sha256),
        ),
        (
            "--tls-auth 1 --auth SHA384",
            "38951b7bb6a1197d953cc35f9f1d7bda108e97b9b9b40dfbb19ae640fe2aac2673fa92e900802fa981f9\
             ec2096a1c2fc95552b3d53a9475bc0000000016b026ecc0000000000",
            auth(KeyDirection::Normal, Digest::Sha384),
        ),
        (
            "--tls-auth 1 --auth SHA512",
            "38dc430ec7542a6e8e1183497821926f02ca11ff3616e5a9ca98e6d94f933987fa7b7c0bc9405813f15a\
             c2c9928a8b43eb5e1378b2f6431595f2ba3f59749f18ed4fcd01870c8cc70f000000016b026ecc000000\
             0000",
            auth(KeyDirection::Normal, Digest::Sha512),
        ),
        (
            "--tls-crypt",
            "38bdf52dbd123659d4000000016b026ecc71a23bb31b2edde3b8451dd0923c3cbccd2ce1f1b597e35a1d\
             21ae1405fdd492d863bf983b",
            WrapKey::tls_crypt(&key, Role::Server).unwrap(),
        ),
    ]
}

fn key() -> KeyBlock {
    static_key::parse(include_str!("static_key/stock.key")).unwrap()
}

/// Returns the wrap of a sender with these options.
fn same_as_sender(options: &str) -> WrapKey {
    let key = key();
    match options {
        "--tls-auth" => WrapKey::tls_auth(&key, KeyDirection::Both, Digest::Sha1),
        "--tls-auth 1" => WrapKey::tls_auth(&key, KeyDirection::Inverse, Digest::Sha1),
        "--tls-auth 0 --auth SHA256" => {
            WrapKey::tls_auth(&key, KeyDirection::Normal, Digest::Sha256)
        }
        "--tls-auth 1 --auth SHA384" => {
            WrapKey::tls_auth(&key, KeyDirection::Inverse, Digest::Sha384)
        }
        "--tls-auth 1 --auth SHA512" => {
            WrapKey::tls_auth(&key, KeyDirection::Inverse, Digest::Sha512)
        }
        _ => WrapKey::tls_crypt(&key, Role::Client).unwrap(),
    }
}

fn hex(text: &str) -> Vec<u8> {
    let byte = |two: &[u8]| u8::from_str_radix(std::str::from_utf8(two).unwrap(), 16).unwrap();
    text.as_bytes().chunks(2).map(byte).collect()
}

#[test]
fn opens_and_reproduces_packets_of_a_stock_client() {
    let now = Instant::now();
    for (options, packet, key) in captured() {
        let bytes = hex(packet);
        let mut wrap = Wrap::new(key, 0);
        let mut copy = bytes.clone();
        let packet = wrap
            .open(&mut copy, now)
            .unwrap_or_else(|error| panic!("{options}: {error}"));
        assert_eq!(packet.opcode, Opcode::HardResetClientV2);
        assert_eq!(packet.session.0, bytes[1..9]);
        assert_eq!((packet.id, packet.payload), (Some(0), &[][..]));
        assert!(packet.acks.is_empty());

        // This crate's client with the same options sends the same bytes.
        let mut out = BytesMut::new();
        Wrap::new(same_as_sender(options), TIME)
            .seal(&packet, &mut out)
            .unwrap();
        assert_eq!(out, bytes, "{options}");

        // A second copy of the packet is a replay.
        assert_eq!(
            wrap.open(&mut bytes.clone(), now),
            Err(OpenError::Replay(ReplayError::Repeated(1))),
            "{options}"
        );
    }
}

#[test]
fn changed_bits_and_truncation_are_detected() {
    for (options, packet, key) in captured() {
        let bytes = hex(packet);
        // A changed first byte is another opcode, which may cause another error.
        for bit in 0..bytes.len() * 8 {
            let mut changed = bytes.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(key.open(&mut changed).is_err(), "{options}: bit {bit}");
        }
        for len in 0..bytes.len() {
            assert!(
                key.open(&mut bytes[..len].to_vec()).is_err(),
                "{options}: {len} bytes"
            );
        }
    }
}

#[test]
fn packets_with_another_wrap_are_rejected() {
    for (options, packet, _) in captured() {
        let mut unwrapped = hex(packet);
        // Without a wrap nothing is authenticated, but the bytes do not parse as first packets.
        let first = WrapKey::none()
            .open(&mut unwrapped)
            .ok()
            .filter(|(packet, _)| packet.id == Some(0));
        assert_eq!(first, None, "{options}");
        for (other, _, key) in captured() {
            assert_eq!(
                key.open(&mut hex(packet)).is_ok(),
                options == other,
                "{options} with {other}"
            );
        }
    }
    let mut plain = hex("38461cf6379aaa06ec0000000000");
    for (_, _, key) in captured() {
        assert_eq!(
            key.open(&mut plain),
            Err(OpenError::Packet(PacketError::Truncated))
        );
    }
    assert!(WrapKey::none().open(&mut plain).is_ok());
}

#[test]
fn tls_crypt_v2_is_refused_by_name() {
    for opcode in [Opcode::HardResetClientV3, Opcode::ControlWkcV1] {
        let mut packet = vec![7; 400];
        packet[0] = opcode.first_byte(KeyId::FIRST);
        for (_, _, key) in captured() {
            assert_eq!(
                key.open(&mut packet),
                Err(OpenError::Packet(PacketError::TlsCryptV2))
            );
        }
    }
}

#[test]
fn sealing_fails_after_the_last_packet_id() {
    let packet = ControlPacket {
        opcode: Opcode::ControlV1,
        key_id: KeyId::FIRST,
        session: SessionId([1; 8]),
        acks: Vec::new(),
        peer_session: None,
        id: Some(1),
        payload: b"payload",
    };
    let mut out = BytesMut::new();
    for (_, _, key) in captured() {
        let mut wrap = Wrap {
            next_id: u64::from(u32::MAX),
            ..Wrap::new(key, TIME)
        };
        out.clear();
        assert_eq!(wrap.seal(&packet, &mut out), Ok(()));
        let len = out.len();
        assert_eq!(wrap.seal(&packet, &mut out), Err(SealError::Exhausted));
        assert_eq!(out.len(), len);
    }
    let mut none = Wrap {
        next_id: 1 << 32,
        ..Wrap::new(WrapKey::none(), TIME)
    };
    assert_eq!(
        none.seal(&packet, &mut out),
        Ok(()),
        "there are no ids without a wrap"
    );
}

#[test]
fn debug_output_has_no_key() {
    let shown: Vec<_> = captured()
        .iter()
        .map(|(_, _, key)| format!("{key:?}"))
        .collect();
    assert_eq!(shown[0], "tls-auth");
    assert_eq!(shown[5], "tls-crypt");
}

proptest! {
    #[test]
    fn packets_round_trip(
        payload: Vec<u8>,
        acks in prop::collection::vec(any::<u32>(), 0..=8),
        which in 0..7_usize,
        count in 1..4_u32,
    ) {
        let (sender, receiver) = match captured().into_iter().nth(which) {
            Some((options, _, receiver)) => (same_as_sender(options), receiver),
            None => (WrapKey::none(), WrapKey::none()),
        };
        let now = Instant::now();
        let (mut sender, mut receiver) = (Wrap::new(sender, TIME), Wrap::new(receiver, TIME));
        let packet = ControlPacket {
            opcode: Opcode::ControlV1,
            key_id: KeyId::FIRST.next(),
            session: SessionId([1; 8]),
            peer_session: (!acks.is_empty()).then_some(SessionId([2; 8])),
            acks,
            id: Some(9),
            payload: &payload,
        };
        for _ in 0..count {
            let mut out = BytesMut::from(&b"before"[..]);
            sender.seal(&packet, &mut out).unwrap();
            let mut bytes = out.split_off(6);
            prop_assert_eq!(&out[..], b"before");
            let mut plain = BytesMut::new();
            packet.write(&mut plain);
            prop_assert!(bytes.len() <= plain.len() + MAX_OVERHEAD);
            prop_assert_eq!(receiver.open(&mut bytes, now), Ok(packet.clone()));
        }
    }

    #[test]
    fn arbitrary_bytes_are_rejected(first in 0x18..0x48_u8, mut bytes: Vec<u8>) {
        bytes.insert(0, first);
        for (_, _, key) in captured() {
            prop_assert!(key.open(&mut bytes.clone()).is_err());
        }
        let _ = WrapKey::none().open(&mut bytes);
    }
}
