//! Wrapping of control packets. The first byte selects the kind of wrapping. Except for the kind without a
//! key, a packet made without the key is refused, and a packet made with the key is opened exactly once.
#![no_main]

use bytes::BytesMut;
use culvert_openvpn::Role;
use culvert_openvpn::cipher::Digest;
use culvert_openvpn::keys::KeyBlock;
use culvert_openvpn::packet::ControlPacket;
use culvert_openvpn::wrap::{KeyDirection, MAX_OVERHEAD, Wrap, WrapKey};
use libfuzzer_sys::fuzz_target;
use std::sync::LazyLock;
use std::time::Instant;

/// Pairs of a client key and a server key, one pair for each kind of wrapping.
static KEYS: LazyLock<Vec<(WrapKey, WrapKey)>> = LazyLock::new(|| {
    let key = KeyBlock::from_bytes(std::array::from_fn(|i| i as u8));
    let auth = |client, server, digest| {
        (
            WrapKey::tls_auth(&key, client, digest),
            WrapKey::tls_auth(&key, server, digest),
        )
    };
    let crypt = |role| WrapKey::tls_crypt(&key, role).expect("a key of the right length");
    vec![
        (WrapKey::none(), WrapKey::none()),
        auth(KeyDirection::Both, KeyDirection::Both, Digest::Sha1),
        auth(KeyDirection::Inverse, KeyDirection::Normal, Digest::Sha256),
        auth(KeyDirection::Inverse, KeyDirection::Normal, Digest::Sha512),
        (crypt(Role::Client), crypt(Role::Server)),
    ]
});

fuzz_target!(|input: &[u8]| {
    let Some((choice, input)) = input.split_first() else {
        return;
    };
    let choice = usize::from(*choice) % KEYS.len();
    let (client, server) = &KEYS[choice];
    let now = Instant::now();

    let strange = server.open(&mut input.to_vec()).is_ok();
    assert!(choice == 0 || !strange, "made without the key");

    let Ok(packet) = ControlPacket::parse(input) else {
        return;
    };
    let (mut client, mut server) = (Wrap::new(client.clone(), 7), Wrap::new(server.clone(), 7));
    let mut wrapped = BytesMut::new();
    client
        .seal(&packet, &mut wrapped)
        .expect("the first packet");
    assert!(wrapped.len() <= input.len() + MAX_OVERHEAD);
    assert_eq!(server.open(&mut wrapped.clone(), now), Ok(packet));
    assert!(
        choice == 0 || server.open(&mut wrapped, now).is_err(),
        "a replayed packet was accepted"
    );
});
