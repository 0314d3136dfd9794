#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::Path;

use culvert_openvpn::wrap::KeyDirection;
use rcgen::{CertificateParams, KeyPair};

use super::*;

fn file(directory: &Path, name: &str, text: &str) -> Material {
    let path = directory.join(name);
    std::fs::write(&path, text).unwrap();
    Material::File(path)
}

fn self_signed() -> (String, String) {
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec!["x".into()]).unwrap();
    (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
}

#[test]
fn errors_name_the_file_that_is_wrong() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    let (pem, key_pem) = self_signed();
    let (_, other_key) = self_signed();
    let ca = file(at, "ca.crt", &pem);
    let cert = file(at, "client.crt", &pem);
    let key = file(at, "client.key", &key_pem);
    let load = |ca: &Material, cert: &Material, key: &Material| {
        let check = ServerCheck::default();
        client_tls(ca, Some((cert, key)), check, MinVersion::Tls12)
            .map(drop)
            .map_err(|error| error.to_string())
    };
    load(&ca, &cert, &key).unwrap();

    let other = file(at, "other.key", &other_key);
    let empty = file(at, "empty.pem", "");
    let missing = Material::File(at.join("missing.pem"));
    for (outcome, name, help) in [
        (
            load(&empty, &cert, &key),
            "empty.pem: ",
            "-----BEGIN CERTIFICATE-----",
        ),
        (
            load(&ca, &empty, &key),
            "empty.pem: ",
            "-----BEGIN CERTIFICATE-----",
        ),
        (load(&ca, &cert, &empty), "empty.pem: ", "decrypt"),
        (load(&ca, &cert, &other), "other.key", "compare"),
        (load(&missing, &cert, &key), "missing.pem: ", "is mounted"),
    ] {
        let text = outcome.unwrap_err();
        assert!(text.contains(name) && text.contains(help), "{text}");
    }
    let origin = "<ca> in client.conf".to_owned();
    let text = "nothing".to_owned();
    let text = load(&Material::Inline { origin, text }, &cert, &key).unwrap_err();
    assert!(text.starts_with("<ca> in client.conf: "), "{text}");

    let server = |crl: Option<&Material>| {
        server_tls(&ca, crl, (&cert, &key), MinVersion::Tls12, false)
            .map(drop)
            .map_err(|error| error.to_string())
    };
    server(None).unwrap();
    for broken in ["!", "AAAA"] {
        let broken = format!("-----BEGIN X509 CRL-----\n{broken}\n-----END X509 CRL-----\n");
        let text = server(Some(&file(at, "crl.pem", &broken))).unwrap_err();
        assert!(text.contains("crl.pem: "), "{text}");
    }
    // A file without a CRL would end the revocation of all certificates. DER begins with 0x30.
    for other in [&empty, &ca, &file(at, "crl.der", "0\u{82}\u{1}\n")] {
        let text = server(Some(other)).unwrap_err();
        let expected = format!("{other}: the CRL file contains no CRL in PEM (-----BEGIN X509 CRL");
        assert!(text.starts_with(&expected), "{text}");
    }
}

#[test]
fn static_keys_are_loaded() {
    let directory = tempfile::tempdir().unwrap();
    let lines = "0123456789abcdef0123456789abcdef\n".repeat(16);
    let text = format!(
        "#\n-----BEGIN OpenVPN Static key V1-----\n{lines}-----END OpenVPN Static key V1-----\n"
    );
    let good = file(directory.path(), "ta.key", &text);
    let auth = TlsAuth {
        key: good.clone(),
        direction: KeyDirection::Inverse,
    };
    let wrapped = |auth: Option<&TlsAuth>, crypt: Option<&Material>| {
        wrap(auth, crypt, Digest::Sha1, Role::Client).map(|key| format!("{key:?}"))
    };
    assert_eq!(wrapped(Some(&auth), None).unwrap(), "tls-auth");
    assert_eq!(wrapped(None, Some(&good)).unwrap(), "tls-crypt");
    assert_eq!(wrapped(None, None).unwrap(), "none");
    let bad = file(directory.path(), "bad.key", "hello");
    let text = wrapped(None, Some(&bad)).unwrap_err().to_string();
    assert!(
        text.contains("bad.key: ") && text.contains("--genkey"),
        "{text}"
    );
}

#[test]
fn user_and_password_are_two_lines() {
    let read = |text: &str| {
        let (origin, text) = ("<auth-user-pass> in c".into(), text.into());
        credentials(&Material::Inline { origin, text })
    };
    assert_eq!(
        read("me\r\nword s\n").unwrap(),
        ("me".into(), "word s".into())
    );
    assert!(
        read("me\n")
            .unwrap_err()
            .to_string()
            .contains("one per line")
    );
}
