//! Certificates that all use the same fixed key. Seed inputs made with this key can be signed again after the
//! fuzzer has changed them.

use std::sync::{Arc, LazyLock};

use culvert_openvpn::tls::{ClientTls, Identity, MinVersion, ServerCheck, ServerTls};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose, PKCS_ED25519, SigningKey as _,
};
use rustls_pki_types::PrivatePkcs8KeyDer;

/// The bytes before the 32 bytes of an Ed25519 private key in PKCS #8.
const PKCS8: [u8; 16] = [
    0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20,
];

/// The algorithm identifier of an Ed25519 signature, in DER.
const ED25519: [u8; 7] = [0x30, 5, 6, 3, 0x2b, 0x65, 0x70];

static CA: LazyLock<CertifiedIssuer<'static, KeyPair>> = LazyLock::new(|| {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, "CA");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    CertifiedIssuer::self_signed(params, key()).expect("a CA")
});

fn key() -> KeyPair {
    let pkcs8 = [&PKCS8[..], &[7; 32]].concat();
    let pkcs8 = PrivatePkcs8KeyDer::from(&pkcs8[..]);
    KeyPair::from_pkcs8_der_and_sign_algo(&pkcs8, &PKCS_ED25519).expect("a key")
}

/// Returns a valid certificate, in DER.
pub fn leaf(common_name: &str, usage: ExtendedKeyUsagePurpose) -> Vec<u8> {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params
        .distinguished_name
        .push(DnType::CommonName, common_name);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![usage];
    let certificate = params.signed_by(&key(), &CA).expect("a certificate");
    certificate.der().to_vec()
}

/// Returns a certificate with these contents, valid or not, and the CA's signature.
pub fn sign(contents: &[u8]) -> Vec<u8> {
    let signature = key().sign(contents).expect("a signature");
    let mut certificate = [contents, &ED25519, &[3, 65, 0], &signature].concat();
    let length = u32::try_from(certificate.len()).expect("a length");
    let mut head = vec![0x30, 0x84];
    // DER requires the shortest form of the length.
    match length {
        0..=127 => head = vec![0x30, length as u8],
        128..=255 => head = vec![0x30, 0x81, length as u8],
        256..=65535 => {
            head[1] = 0x82;
            head.extend((length as u16).to_be_bytes());
        }
        _ => head.extend(length.to_be_bytes()),
    }
    certificate.splice(..0, head);
    certificate
}

/// Returns the bytes as a PEM certificate, even if the bytes are not a valid certificate.
pub fn pem(der: &[u8]) -> String {
    pem::encode(&pem::Pem::new("CERTIFICATE", der))
}

/// Returns an identity with this certificate and the fixed key; `None` if the certificate has another key.
pub fn identity(der: &[u8]) -> Option<Identity> {
    Identity::from_pem(pem(der).as_bytes(), key().serialize_pem().as_bytes()).ok()
}

/// Returns the TLS settings of a server with this identity that trusts the CA.
pub fn server_tls(identity: Identity) -> Arc<ServerTls> {
    let ca = CA.pem();
    let tls = ServerTls::new(ca.as_bytes(), None, identity, MinVersion::Tls12, true);
    Arc::new(tls.expect("a server"))
}

/// Returns the TLS settings of a client with this identity that trusts the CA.
pub fn client_tls(identity: Identity) -> Arc<ClientTls> {
    let ca = CA.pem();
    let check = ServerCheck {
        require_usage: true,
        name: None,
    };
    let tls = ClientTls::new(ca.as_bytes(), Some(identity), check, MinVersion::Tls12);
    Arc::new(tls.expect("a client"))
}
