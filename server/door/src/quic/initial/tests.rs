//! Packets encrypted by rustls, as a client sends them.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use proptest::prelude::*;

use super::*;
use crate::client_hello::tests::hello_for;

/// Destination id of all packets.
pub(crate) const ID: [u8; 8] = [0x83, 0x94, 0xc8, 0xf0, 0x3e, 0x51, 0x57, 0x08];

/// Encodes a ClientHello as a handshake message.
pub(crate) fn message_for(name: &str) -> Vec<u8> {
    // Without the header of the record.
    hello_for(name.as_bytes()).split_off(5)
}

/// Encodes a CRYPTO frame.
pub(crate) fn crypto(offset: usize, bytes: &[u8]) -> Vec<u8> {
    let two_bytes = |value: usize| (0x4000 | u16::try_from(value).unwrap()).to_be_bytes();
    let head = [two_bytes(offset), two_bytes(bytes.len())].concat();
    [&[CRYPTO][..], &head, bytes].concat()
}

/// Encrypts frames as an Initial packet, padded so that the datagram has `len` bytes.
pub(crate) fn datagram_of(number: u8, frames: &[u8], len: usize) -> Vec<u8> {
    let suite = TLS13_AES_128_GCM_SHA256.tls13().unwrap();
    let keys = suite.quic_suite().unwrap();
    let keys = keys.keys(&ID, Side::Client, Version::V1).local;
    let head_len = 1 + 4 + 1 + ID.len() + 1 + 1 + 2 + 1;
    let mut payload = frames.to_vec();
    payload.resize(len - head_len - keys.packet.tag_len(), PADDING);
    let rest = u16::try_from(1 + payload.len() + keys.packet.tag_len()).unwrap();
    let mut header = vec![LONG | FIXED | INITIAL];
    header.extend(VERSION_1);
    header.push(8);
    header.extend(ID);
    // No source id, no token, the length, the packet number.
    header.extend([0, 0]);
    header.extend((0x4000 | rest).to_be_bytes());
    header.push(number);
    let tag = keys.packet;
    let tag = tag.encrypt_in_place(number.into(), &header, &mut payload);
    payload.extend_from_slice(tag.unwrap().as_ref());
    let mut packet = [header, payload].concat();
    let number_at = head_len - 1;
    let sample_at = number_at + SAMPLE_OFFSET;
    let sample = packet[sample_at..sample_at + keys.header.sample_len()].to_vec();
    let (head, rest) = packet.split_at_mut(number_at);
    keys.header
        .encrypt_in_place(&sample, &mut head[0], &mut rest[..1])
        .unwrap();
    packet
}

fn datagram(number: u8, frames: &[u8]) -> Vec<u8> {
    datagram_of(number, frames, MIN_DATAGRAM_BYTES)
}

fn read(datagrams: &[Vec<u8>]) -> Result<Option<String>, InitialError> {
    let mut stream = CryptoStream::default();
    for datagram in datagrams {
        stream.add_datagram(&ID, datagram)?;
    }
    Ok(stream.hello()?.map(|hello| hello.server_name.unwrap()))
}

#[test]
fn header_shows_the_connection_ids() {
    let packet = datagram(0, &[PING]);
    let header = Header::Long {
        is_initial: true,
        destination: &ID,
        source: &[],
    };
    assert_eq!(Header::parse(&packet), Some(header));
    for kind in [0x10, 0x20, 0x30] {
        let mut other = packet.clone();
        other[0] |= kind;
        let parsed = Header::parse(&other);
        assert!(matches!(
            parsed,
            Some(Header::Long {
                is_initial: false,
                ..
            })
        ));
    }
    assert_eq!(Header::parse(&[0x40, 1, 2]), Some(Header::Short(&[1, 2])));
    // Another version, version negotiation, an id that is too long, truncated headers.
    for wrong in [
        &[0xc0, 0x6b, 0x33, 0x43, 0xcf, 0, 0][..],
        &[0xc0, 0, 0, 0, 0, 0, 0],
        &[[0xc0, 0, 0, 0, 1, 21].as_slice(), &[0; 40]].concat(),
        &packet[..10],
        &[],
    ] {
        assert_eq!(Header::parse(wrong), None);
    }
}

/// The packet of RFC 9001, A.2, behind the first byte of a fuzzing seed.
#[test]
fn recorded_packet_has_its_name() {
    let seed = include_bytes!("../../../../../tests/fuzz/seeds/quic_initial/rfc9001_datagram");
    let name = read(&[seed[1..].to_vec()]);
    assert_eq!(name, Ok(Some("example.com".to_owned())));
}

#[test]
fn name_is_found_in_one_datagram() {
    let hello = message_for("A.example");
    let packet = datagram(0, &crypto(0, &hello));
    assert_eq!(
        read(std::slice::from_ref(&packet)),
        Ok(Some("a.example".to_owned()))
    );
    // A packet of another kind in the same datagram does not matter.
    let two = [packet, vec![0xe0; 100]].concat();
    assert_eq!(read(&[two]), Ok(Some("a.example".to_owned())));
    let half = datagram_of(0, &crypto(0, &hello[..20]), 600);
    let rest = datagram_of(1, &crypto(20, &hello[20..]), 600);
    let joined = [half, rest].concat();
    assert_eq!(read(&[joined]), Ok(Some("a.example".to_owned())));
}

#[test]
fn name_is_found_in_datagrams_in_any_order() {
    let hello = message_for("a.example");
    let (first, rest) = hello.split_at(30);
    let first = datagram(0, &[&[PING][..], &crypto(0, first)].concat());
    let rest = datagram(1, &crypto(30, rest));
    for datagrams in [
        vec![first.clone(), rest.clone()],
        vec![rest.clone(), first.clone()],
        vec![first.clone(), first.clone(), rest.clone()],
    ] {
        assert_eq!(read(&datagrams), Ok(Some("a.example".to_owned())));
    }
    assert_eq!(read(&[first]), Ok(None));
    assert_eq!(read(&[rest]), Ok(None));
}

#[test]
fn packets_that_are_no_hello_are_refused() {
    let hello = message_for("a.example");
    let good = datagram(0, &crypto(0, &hello));
    let mut changed = good.clone();
    *changed.last_mut().unwrap() ^= 1;
    let short = datagram_of(0, &crypto(0, &hello), MIN_DATAGRAM_BYTES - 1);
    let long = datagram_of(0, &crypto(0, &hello), MAX_DATAGRAM_BYTES + 1);
    for (wrong, error) in [
        (changed, Undecryptable),
        (short, NotInitial),
        (long, NotInitial),
        (vec![0xc0; 1200], NotInitial),
        (vec![0x40; 1200], NotInitial),
        // An acknowledgement, a frame that is longer than its packet, a frame beyond the limit.
        (datagram(0, &[2, 0, 0, 0, 0]), Malformed),
        (datagram(0, &[CRYPTO, 0, 0x7f, 0xff]), Malformed),
        (datagram(0, &crypto(MAX_HELLO_BYTES, &[1])), TooLarge),
        (datagram(0, &crypto(0, &[1, 0, 0x10, 1])), TooLarge),
        (
            datagram(0, &crypto(0, &[2])),
            HelloError::NotHandshake.into(),
        ),
    ] {
        assert_eq!(read(&[wrong]), Err(error));
    }
    for id in [&ID[..7], &[1; 8]] {
        let mut stream = CryptoStream::default();
        assert_eq!(stream.add_datagram(id, &good), Err(NotInitial));
    }
}

proptest! {
    /// Frames in any order and with overlaps give the name, and never a wrong name.
    #[test]
    fn pieces_of_a_hello_give_its_name(cuts in prop::collection::vec((0usize..90, 1usize..40), 0..12)) {
        let hello = message_for("a.example");
        let mut stream = CryptoStream::default();
        let mut known = vec![false; hello.len()];
        for (offset, len) in cuts {
            let offset = offset.min(hello.len());
            let end = (offset + len).min(hello.len());
            stream.add_frames(&crypto(offset, &hello[offset..end])).unwrap();
            known[offset..end].fill(true);
        }
        let found = stream.hello().unwrap();
        prop_assert_eq!(found.is_some(), known.iter().all(|known| *known));
        stream.add_frames(&crypto(0, &hello)).unwrap();
        prop_assert_eq!(stream.hello().unwrap().unwrap().server_name.unwrap(), "a.example");
    }

    #[test]
    fn changed_packets_cause_no_panic(at in 0usize..1200, bits in 1u8.., len in 0usize..1200) {
        let mut packet = datagram(0, &crypto(0, &message_for("a.example")));
        packet[at] ^= bits;
        let _ = CryptoStream::default().add_datagram(&ID, &packet);
        let _ = Header::parse(&packet[..len]);
        let _ = Fields(&packet[..len]).initial(&ID);
    }
}
