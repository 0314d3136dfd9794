#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use proptest::prelude::*;

use super::*;

const BASE: LocalOptions = LocalOptions {
    role: Role::Client,
    transport: Transport::Udp,
    tun_mtu: 1500,
    cipher: Cipher::Aes256Gcm,
    digest: Digest::Sha1,
    framing: Framing::None,
    tls_auth: None,
};

/// The expected strings are from stock 2.6.14, printed with `--verb 7` and the same options.
#[test]
fn builds_the_same_string_as_stock() {
    let cbc = LocalOptions {
        cipher: Cipher::Aes256Cbc,
        ..BASE
    };
    let auth = |direction| LocalOptions {
        tls_auth: Some(direction),
        ..BASE
    };
    let framing = |framing| LocalOptions { framing, ..BASE };
    for (options, expected) in [
        (
            BASE,
            "V4,dev-type tun,link-mtu 1549,tun-mtu 1500,proto UDPv4,cipher AES-256-GCM,auth [null-digest],keysize 256,key-method 2,tls-client",
        ),
        (
            LocalOptions {
                cipher: Cipher::Aes128Gcm,
                ..BASE
            },
            "V4,dev-type tun,link-mtu 1549,tun-mtu 1500,proto UDPv4,cipher AES-128-GCM,auth [null-digest],keysize 128,key-method 2,tls-client",
        ),
        (
            LocalOptions {
                cipher: Cipher::ChaCha20Poly1305,
                ..BASE
            },
            "V4,dev-type tun,link-mtu 1534,tun-mtu 1500,proto UDPv4,cipher CHACHA20-POLY1305,auth [null-digest],keysize 256,key-method 2,tls-client",
        ),
        (
            cbc,
            "V4,dev-type tun,link-mtu 1557,tun-mtu 1500,proto UDPv4,cipher AES-256-CBC,auth SHA1,keysize 256,key-method 2,tls-client",
        ),
        (
            LocalOptions {
                cipher: Cipher::Aes192Cbc,
                ..BASE
            },
            "V4,dev-type tun,link-mtu 1557,tun-mtu 1500,proto UDPv4,cipher AES-192-CBC,auth SHA1,keysize 192,key-method 2,tls-client",
        ),
        (
            auth(KeyDirection::Inverse),
            "V4,dev-type tun,link-mtu 1549,tun-mtu 1500,proto UDPv4,keydir 1,cipher AES-256-GCM,auth [null-digest],keysize 256,tls-auth,key-method 2,tls-client",
        ),
        (
            auth(KeyDirection::Both),
            "V4,dev-type tun,link-mtu 1549,tun-mtu 1500,proto UDPv4,cipher AES-256-GCM,auth [null-digest],keysize 256,tls-auth,key-method 2,tls-client",
        ),
        (
            framing(Framing::Lzo),
            "V4,dev-type tun,link-mtu 1550,tun-mtu 1500,proto UDPv4,comp-lzo,cipher AES-256-GCM,auth [null-digest],keysize 256,key-method 2,tls-client",
        ),
        (
            framing(Framing::Stub),
            "V4,dev-type tun,link-mtu 1550,tun-mtu 1500,proto UDPv4,comp-lzo,cipher AES-256-GCM,auth [null-digest],keysize 256,key-method 2,tls-client",
        ),
        (
            framing(Framing::StubV2),
            "V4,dev-type tun,link-mtu 1549,tun-mtu 1500,proto UDPv4,comp-lzo,cipher AES-256-GCM,auth [null-digest],keysize 256,key-method 2,tls-client",
        ),
        (
            LocalOptions {
                tun_mtu: 1400,
                ..BASE
            },
            "V4,dev-type tun,link-mtu 1449,tun-mtu 1400,proto UDPv4,cipher AES-256-GCM,auth [null-digest],keysize 256,key-method 2,tls-client",
        ),
        (
            LocalOptions {
                transport: Transport::Tcp,
                ..auth(KeyDirection::Normal)
            },
            "V4,dev-type tun,link-mtu 1551,tun-mtu 1500,proto TCPv4_CLIENT,keydir 0,cipher AES-256-GCM,auth [null-digest],keysize 256,tls-auth,key-method 2,tls-client",
        ),
    ] {
        assert_eq!(options.build(), expected);
    }
    // With other digests stock leaves out a cipher that is not negotiable, but calculates in the same way.
    for (digest, link_mtu) in [
        (Digest::Sha256, 1569),
        (Digest::Sha384, 1585),
        (Digest::Sha512, 1601),
    ] {
        assert_eq!(LocalOptions { digest, ..cbc }.link_mtu(), link_mtu);
    }
}

#[test]
fn mirror_swaps_the_roles() {
    let server = LocalOptions {
        role: Role::Server,
        transport: Transport::Tcp,
        tls_auth: Some(KeyDirection::Normal),
        ..BASE
    };
    let client = LocalOptions {
        role: Role::Client,
        tls_auth: Some(KeyDirection::Inverse),
        ..server
    };
    assert_eq!(mirror(&server.build()), client.build());
    assert_eq!(mirror(&client.build()), server.build());
    assert_eq!(mirror(""), "");
}

#[test]
fn parses_the_options_of_a_peer() {
    let peer = PeerOptions::parse(
        "V4,dev-type tun,link-mtu 1558,tun-mtu 1500,proto TCPv4_CLIENT,comp-lzo,mtu-dynamic,\
         cipher AES-256-CBC,auth SHA1,keysize 256,key-method 2,tls-client",
    );
    assert_eq!(
        peer,
        PeerOptions {
            cipher: Some("AES-256-CBC".to_owned()),
            comp_lzo: true,
            mtu_dynamic: true,
            tun_mtu: Some(1500),
            tap: false,
        }
    );
    assert_eq!(PeerOptions::parse(""), PeerOptions::default());
    assert!(PeerOptions::parse("V4,dev-type tap").tap);
    assert_eq!(PeerOptions::parse("tun-mtu 99999").tun_mtu, None);
}

proptest! {
    #[test]
    fn arbitrary_text_is_unchanged_when_mirrored_twice(text: String) {
        let _ = PeerOptions::parse(&text);
        prop_assert_eq!(mirror(&mirror(&text)), text);
    }
}
