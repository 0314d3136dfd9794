//! Data packets. The first byte selects the cipher, the second the compression framing. A packet made without
//! the key is refused; a packet sealed with the key is opened exactly once.
#![no_main]

use bytes::BytesMut;
use culvert_openvpn::Role;
use culvert_openvpn::cipher::{Cipher, Digest};
use culvert_openvpn::compress::Framing;
use culvert_openvpn::data::{MAX_OVERHEAD, Opener, Sealer};
use culvert_openvpn::keys::KeyBlock;
use culvert_openvpn::packet::KeyId;
use culvert_openvpn::payload::Payload;
use libfuzzer_sys::fuzz_target;
use std::time::Instant;

const FRAMINGS: [Framing; 4] = [Framing::None, Framing::Lzo, Framing::Stub, Framing::StubV2];

fuzz_target!(|input: &[u8]| {
    let [cipher, framing, input @ ..] = input else {
        return;
    };
    let peer_id = (framing & 4 != 0).then_some(5);
    let cipher = Cipher::ALL[usize::from(*cipher) % Cipher::ALL.len()];
    let framing = FRAMINGS[usize::from(*framing) % FRAMINGS.len()];
    let block = KeyBlock::from_bytes(std::array::from_fn(|i| i as u8));
    let now = Instant::now();
    let key = "a key of the right length";
    let mut opener = Opener::new(cipher, Digest::Sha256, &block, Role::Client).expect(key);

    assert!(
        opener.open(&mut input.to_vec(), now).is_err(),
        "made without the key"
    );

    // A peer with the key may seal any bytes, including malformed payloads.
    if let Some(payload) = framing.strip(&mut input.to_vec()) {
        let _ = Payload::classify(payload);
    }
    let mut sealer = Sealer::new(
        cipher,
        Digest::Sha256,
        &block,
        Role::Client,
        KeyId::FIRST,
        peer_id,
    )
    .expect(key);
    let mut sealed = BytesMut::new();
    sealer
        .seal_with(&mut sealed, |out| {
            framing
                .frame(input)
                .iter()
                .for_each(|part| out.extend_from_slice(part));
        })
        .expect("the first packet");
    assert!(sealed.len() <= input.len() + Framing::MAX_OVERHEAD + MAX_OVERHEAD);
    let mut again = sealed.clone();
    let opened = opener.open(&mut sealed, now).expect("sealed by us");
    if !input.is_empty() {
        assert_eq!(framing.strip(opened).expect("framed by us"), input);
    }
    assert!(
        opener.open(&mut again, now).is_err(),
        "a replayed packet was accepted"
    );
});
