#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use proptest::prelude::*;

use super::*;

/// Abilities that this crate never offers: renegotiations wrapped with keys of the session, and data packets
/// with epochs.
const DYNAMIC_TLS_CRYPT: Protocol = Protocol(1 << 9);
const DATA_EPOCH: Protocol = Protocol(1 << 10);

#[test]
fn parses_the_lines_of_stock_clients() {
    let old =
        PeerInfo::parse("IV_VER=2.4.12\nIV_PLAT=linux\nIV_PROTO=2\nIV_NCP=2\nIV_LZO_STUB=1\n");
    assert_eq!(old.version.as_deref(), Some("2.4.12"));
    assert_eq!(old.platform.as_deref(), Some("linux"));
    assert!(old.protocol.has(Protocol::DATA_V2));
    assert!(!old.protocol.has(Protocol::REQUEST_PUSH));
    assert_eq!((old.ciphers.clone(), old.ncp), (None, 2));
    assert!(old.can_negotiate() && !old.stub_v2);

    let kkp = PeerInfo::parse(
        "IV_VER=2.5.2\nIV_PLAT=linux\nIV_PROTO=6\nIV_NCP=2\nIV_CIPHERS=AES-256-GCM:AES-128-GCM\n\
         IV_LZ4=1\nIV_LZ4v2=1\nIV_LZO=1\nIV_COMP_STUB=1\nIV_COMP_STUBv2=1\nIV_TCPNL=1\n",
    );
    assert!(kkp.protocol.has(Protocol::DATA_V2) && kkp.protocol.has(Protocol::REQUEST_PUSH));
    assert!(!kkp.protocol.has(Protocol::TLS_KEY_EXPORT));
    assert_eq!(
        kkp.ciphers,
        Some(vec![Cipher::Aes256Gcm, Cipher::Aes128Gcm])
    );
    assert!(kkp.stub_v2);

    let new = PeerInfo::parse("IV_VER=2.6.14\r\nIV_MTU=1600\r\nIV_PROTO=990\r\n");
    assert_eq!(new.version.as_deref(), Some("2.6.14"));
    assert_eq!(new.mtu, Some(1600));
    for ability in [
        Protocol::TLS_KEY_EXPORT,
        Protocol::CC_EXIT_NOTIFY,
        DYNAMIC_TLS_CRYPT,
    ] {
        assert!(new.protocol.has(ability));
    }
    assert!(!new.protocol.has(DATA_EPOCH));
    assert!(!new.can_negotiate());
}

#[test]
fn control_characters_of_a_client_are_replaced() {
    let info = PeerInfo::parse("IV_VER=2.6\u{1b}[2J\nIV_GUI_VER=a\u{9b}b\nIV_PLAT=\u{202e}x");
    assert_eq!(info.version.as_deref(), Some("2.6_[2J"));
    assert_eq!(info.program.as_deref(), Some("a_b"));
    assert_eq!(info.platform.as_deref(), Some("_x"));
}

#[test]
fn first_line_of_each_name_counts() {
    let info = PeerInfo::parse(
        "IV_PROTO=2\nIV_PROTO=4\nIV_VER=a\nIV_VER=b\nIV_CIPHERS=x\nIV_CIPHERS=AES-128-GCM",
    );
    assert_eq!((info.protocol.0, info.version.as_deref()), (2, Some("a")));
    assert_eq!(info.ciphers, Some(vec![]));
    assert_eq!(PeerInfo::parse(""), PeerInfo::default());
}

#[test]
fn parses_the_lines_of_this_crates_client() {
    let info = PeerInfo::parse(&client_lines(Protocol::OURS, &Cipher::DEFAULT, 1500));
    assert_eq!(info.protocol, Protocol::OURS);
    assert_eq!(info.ciphers.as_deref(), Some(&Cipher::DEFAULT[..]));
    assert_eq!((info.ncp, info.mtu), (2, Some(1500)));
    assert!(info.stub_v2);
    for declined in [DYNAMIC_TLS_CRYPT, DATA_EPOCH] {
        assert!(!Protocol::OURS.has(declined));
    }
    // Servers that support only IV_NCP would choose a cipher that this client does not allow.
    assert_eq!(
        PeerInfo::parse(&client_lines(Protocol::OURS, &[Cipher::Aes256Cbc], 1500)).ncp,
        0
    );
}

proptest! {
    #[test]
    fn arbitrary_text_never_panics(text: String) {
        let _ = PeerInfo::parse(&text);
        let _ = PeerInfo::parse(&format!("IV_PROTO={text}\nIV_CIPHERS={text}\nIV_MTU={text}"));
    }
}
