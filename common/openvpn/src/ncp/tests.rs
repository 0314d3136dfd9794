#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use Cipher::{Aes128Gcm, Aes256Cbc, Aes256Gcm, ChaCha20Poly1305};

use super::*;

fn client(lines: &str) -> PeerInfo {
    PeerInfo::parse(lines)
}

fn options(cipher: &str) -> PeerOptions {
    PeerOptions::parse(&format!("V4,cipher {cipher}"))
}

#[test]
fn the_servers_order_decides() {
    let peer = client("IV_CIPHERS=CHACHA20-POLY1305:AES-128-GCM:AES-256-GCM");
    let choose = |allowed: &[Cipher]| choose_as_server(allowed, None, &peer, &options("BF-CBC"));
    let pushed = |cipher| Some(Choice { cipher, push: true });
    assert_eq!(choose(&[Aes256Gcm, Aes128Gcm]), pushed(Aes256Gcm));
    assert_eq!(choose(&[Aes128Gcm, Aes256Gcm]), pushed(Aes128Gcm));
    assert_eq!(
        choose(&[Aes256Cbc, ChaCha20Poly1305]),
        pushed(ChaCha20Poly1305)
    );
    assert_eq!(choose(&[Aes256Cbc]), None);
    assert_eq!(choose(&[]), None);
}

#[test]
fn client_offers_only_the_ciphers_in_its_list() {
    let peer = client("IV_CIPHERS=AES-128-GCM\nIV_NCP=2");
    assert_eq!(
        choose_as_server(&[Aes256Gcm], None, &peer, &options("AES-256-GCM")),
        None
    );
    let fallback = choose_as_server(
        &[Aes256Gcm],
        Some(Aes256Cbc),
        &peer,
        &options("AES-256-CBC"),
    );
    assert_eq!(fallback, None);
}

/// Clients of version 2.4 before 2.4.10.
#[test]
fn client_without_a_list_offers_gcm_and_its_own_cipher() {
    let peer = client("IV_NCP=2");
    let choose =
        |allowed: &[Cipher], cipher| choose_as_server(allowed, None, &peer, &options(cipher));
    assert_eq!(
        choose(&Cipher::DEFAULT, "BF-CBC"),
        Some(Choice {
            cipher: Aes256Gcm,
            push: true
        })
    );
    assert_eq!(
        choose(&[ChaCha20Poly1305, Aes128Gcm], "BF-CBC"),
        Some(Choice {
            cipher: Aes128Gcm,
            push: true
        })
    );
    assert_eq!(
        choose(&[Aes256Cbc, Aes128Gcm], "AES-256-CBC"),
        Some(Choice {
            cipher: Aes256Cbc,
            push: true
        })
    );
    assert_eq!(choose(&[ChaCha20Poly1305], "BF-CBC"), None);
}

/// Clients of version 2.3, or with `ncp-disable`.
#[test]
fn client_that_cannot_negotiate_keeps_its_cipher() {
    let peer = client("IV_VER=2.3.18");
    let own = |cipher| {
        Some(Choice {
            cipher,
            push: false,
        })
    };
    let choose = |allowed: &[Cipher], fallback, options: &PeerOptions| {
        choose_as_server(allowed, fallback, &peer, options)
    };
    assert_eq!(
        choose(&[Aes256Gcm, Aes256Cbc], None, &options("AES-256-CBC")),
        own(Aes256Cbc)
    );
    assert_eq!(choose(&[Aes256Gcm], None, &options("AES-256-CBC")), None);
    assert_eq!(
        choose(&[Aes256Gcm], Some(Aes256Cbc), &options("AES-256-CBC")),
        own(Aes256Cbc)
    );
    assert_eq!(
        choose(&[Aes256Gcm], Some(Aes256Cbc), &options("BF-CBC")),
        None
    );
    // With `disable-occ` the client sends no options string.
    assert_eq!(
        choose(&[Aes256Gcm], Some(Aes256Cbc), &PeerOptions::default()),
        own(Aes256Cbc)
    );
    assert_eq!(choose(&[Aes256Gcm], None, &PeerOptions::default()), None);
}

#[test]
fn client_accepts_only_allowed_ciphers() {
    let allowed = [Aes256Gcm, Aes256Cbc];
    let server = options("AES-256-CBC");
    assert_eq!(
        choose_as_client(&allowed, Some("AES-256-GCM"), &server),
        Ok(Aes256Gcm)
    );
    assert_eq!(choose_as_client(&allowed, None, &server), Ok(Aes256Cbc));
    for refused in ["AES-128-GCM", "BF-CBC", ""] {
        assert_eq!(
            choose_as_client(&allowed, Some(refused), &server),
            Err(NcpError::NotAllowed(refused.to_owned()))
        );
    }
    assert_eq!(
        choose_as_client(&allowed, None, &PeerOptions::default()),
        Err(NcpError::Unnamed)
    );
}

#[test]
fn offered_ciphers_are_shown_in_the_clients_spelling() {
    let shown = |lines: &str, options| offered(lines, &client(lines), &options);
    let long = format!("IV_CIPHERS={}", "x".repeat(1000));
    assert_eq!(shown(&long, options("BF-CBC")).len(), MAX_OFFERED);
    for (lines, expected) in [
        ("IV_CIPHERS=BF-CBC:AES-256-CBC\n", "BF-CBC:AES-256-CBC"),
        ("IV_CIPHERS=\u{1b}[31m\n", "_[31m"),
        ("IV_CIPHERS=\n", "none"),
        ("IV_NCP=2\n", "AES-256-GCM:AES-128-GCM:BF-CBC"),
        ("", "BF-CBC"),
    ] {
        assert_eq!(shown(lines, options("BF-CBC")), expected);
    }
    assert_eq!(shown("", PeerOptions::default()), "none");
}
