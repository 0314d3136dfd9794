//! The certificates of a cluster in the platform's format, and invalid certificates.
//!
//! Keys are ECDSA P-256, stored as `EC PRIVATE KEY`. Certificates have no alternative names.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
use pem::{EncodeConfig, LineEnding, Pem};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256,
};
use tempfile::TempDir;
use time::{Duration, OffsetDateTime};

use super::network::directory;

/// Object identifier of P-256 as the parameters field of an EC private key (tag `[0]`).
const P256: [u8; 12] = [
    0xa0, 0x0a, 0x06, 0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07,
];

/// A certificate and its key, as PEM files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pair {
    /// The certificate, without its issuer.
    pub cert: PathBuf,
    /// Key of the certificate, as `EC PRIVATE KEY`.
    pub key: PathBuf,
}

/// Certificates as files, which are deleted with this value.
#[derive(Debug)]
pub struct Pki {
    /// The authority's certificate.
    pub ca: PathBuf,
    /// Certificate of the server, with the name `openvpn-server`.
    pub server: Pair,
    /// Certificate of the user cluster's client, with the name `user-cluster-client`.
    pub user_cluster: Pair,
    /// Certificate of the seed's sidecars, with the name `internal-client`.
    pub internal: Pair,
    /// A certificate for each role that expired yesterday.
    pub expired: Roles,
    /// A certificate for each role with the key usage of the other role.
    pub swapped: Roles,
    /// A certificate for each role from an unknown authority.
    pub stranger: Roles,
    dir: TempDir,
}

/// A certificate for each role.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Roles {
    /// Certificate with the name `openvpn-server`.
    pub server: Pair,
    /// Certificate with the name `user-cluster-client`.
    pub client: Pair,
}

impl Pki {
    /// Creates a new authority and new certificates.
    ///
    /// # Panics
    /// If a file cannot be written.
    pub fn create() -> Self {
        let dir = directory();
        let authority = Authority::new(dir.path());
        let stranger = Authority::new(dir.path());
        let ca = dir.path().join("ca.crt");
        std::fs::write(&ca, authority.issuer.pem()).expect("writing a certificate");
        Self {
            ca,
            server: authority.issue("openvpn-server", ServerAuth, false),
            user_cluster: authority.issue("user-cluster-client", ClientAuth, false),
            internal: authority.issue("internal-client", ClientAuth, false),
            expired: authority.roles(ServerAuth, ClientAuth, true),
            swapped: authority.roles(ClientAuth, ServerAuth, false),
            stranger: stranger.roles(ServerAuth, ClientAuth, false),
            dir,
        }
    }

    /// Creates a new static key for `tls-auth` or `tls-crypt`. Returns the path of the file and its text.
    ///
    /// # Panics
    /// If the file cannot be written.
    pub fn static_key(&self) -> (PathBuf, String) {
        let mut text = "-----BEGIN OpenVPN Static key V1-----\n".to_owned();
        for _ in 0..16 {
            writeln!(text, "{:032x}", rand::random::<u128>()).unwrap();
        }
        text.push_str("-----END OpenVPN Static key V1-----\n");
        let name = format!("static-{:08x}.key", rand::random::<u32>());
        (self.write(&name, &text), text)
    }

    /// Writes a further file beside the certificates, for example a static key. Returns the path of the file.
    ///
    /// # Panics
    /// If the file cannot be written.
    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.dir.path().join(name);
        std::fs::write(&path, text).expect("writing a file");
        path
    }
}

/// A signing certificate, and the directory for the certificates that it signs.
struct Authority<'a> {
    issuer: CertifiedIssuer<'static, KeyPair>,
    dir: &'a Path,
}

impl<'a> Authority<'a> {
    fn new(dir: &'a Path) -> Self {
        let mut params = parameters("CA");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![
            KeyUsagePurpose::DigitalSignature,
            KeyUsagePurpose::KeyCertSign,
        ];
        params.not_after += Duration::days(3650);
        let issuer = CertifiedIssuer::self_signed(params, new_key()).expect("a certificate");
        Self { issuer, dir }
    }

    fn roles(
        &self,
        server: ExtendedKeyUsagePurpose,
        client: ExtendedKeyUsagePurpose,
        is_expired: bool,
    ) -> Roles {
        Roles {
            server: self.issue("openvpn-server", server, is_expired),
            client: self.issue("user-cluster-client", client, is_expired),
        }
    }

    fn issue(&self, name: &str, purpose: ExtendedKeyUsagePurpose, is_expired: bool) -> Pair {
        let mut params = parameters(name);
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![
            KeyUsagePurpose::DigitalSignature,
            KeyUsagePurpose::KeyEncipherment,
        ];
        params.extended_key_usages = vec![purpose];
        if is_expired {
            params.not_before -= Duration::days(10);
            params.not_after = OffsetDateTime::now_utc() - Duration::days(1);
        }
        let key = new_key();
        let cert = params.signed_by(&key, &self.issuer).expect("a certificate");
        let stem = format!("{name}-{:08x}", rand::random::<u32>());
        let file = |ending, text: &str| {
            let path = self.dir.join(format!("{stem}.{ending}"));
            std::fs::write(&path, text).expect("writing a certificate");
            path
        };
        let pair = Pair {
            cert: file("crt", &cert.pem()),
            key: file("key", &sec1(&key)),
        };
        // The stock program warns about a key file that others can read.
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&pair.key, mode).expect("a private key");
        pair
    }
}

fn new_key() -> KeyPair {
    KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).expect("a key")
}

fn parameters(common_name: &str) -> CertificateParams {
    let mut params = CertificateParams::new(Vec::new()).expect("no names");
    params.distinguished_name = Default::default();
    params
        .distinguished_name
        .push(DnType::CommonName, common_name);
    let now = OffsetDateTime::now_utc();
    params.not_before = now - Duration::days(1);
    params.not_after = now + Duration::days(365);
    params
}

/// Encodes a P-256 key as PEM in the format of RFC 5915: the ECPrivateKey from PKCS #8, with the curve's
/// name.
fn sec1(key: &KeyPair) -> String {
    let pkcs8 = key.serialized_der();
    // ECPrivateKey starts with version 1 and an octet string of 32 bytes.
    let start = [0x02, 0x01, 0x01, 0x04, 0x20];
    let at = pkcs8.windows(start.len()).position(|part| part == start);
    let at = at.expect("an ECPrivateKey");
    let private = &pkcs8[at..at + start.len() + 32];
    let public = key.public_key_raw();
    let bits = u8::try_from(public.len() + 1).unwrap();
    let public = [&[0xa1, bits + 2, 0x03, bits, 0x00], public].concat();
    let body = [private, &P256, &public].concat();
    let length = u8::try_from(body.len()).unwrap();
    let der = [&[0x30, length], body.as_slice()].concat();
    let lines = EncodeConfig::new().set_line_ending(LineEnding::LF);
    pem::encode_config(&Pem::new("EC PRIVATE KEY", der), lines)
}

#[cfg(test)]
mod tests {
    use rustls_pki_types::PrivateKeyDer;
    use rustls_pki_types::pem::PemObject as _;

    use super::*;

    #[test]
    fn keys_are_elliptic_curve_keys_that_fit_their_certificates() {
        let pki = Pki::create();
        let key = PrivateKeyDer::from_pem_file(&pki.server.key).unwrap();
        assert!(matches!(key, PrivateKeyDer::Sec1(_)), "{key:?}");
        let certs = culvert_kit::pki::load_certs(&pki.server.cert).unwrap();
        let provider = rustls::crypto::aws_lc_rs::default_provider();
        rustls::ServerConfig::builder_with_provider(provider.into())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(certs, key)
            .unwrap();
    }
}
