//! Certificate files and peers' chains: the checks that TLS listeners, TLS clients and OpenVPN share.

mod chain;
mod pem;

use rustls::RootCertStore;
use rustls::sign::SigningKey;
use x509_parser::prelude::{FromDer, SubjectPublicKeyInfo, X509Certificate};

pub use self::chain::{ChainTooLong, check_chain};
pub use self::pem::{PemError, certificates, private_key, revocation_lists};

/// Largest total length of the CA names in a request for a client's certificate, in bytes. The request has a 16-bit length,
/// and rustls would send a malformed one.
const MAX_NAMES_BYTES: usize = 32 << 10;

/// Returns true if a request for a client's certificate has room for the names of the CAs. Without names, the request means
/// any CA.
pub fn fit_request(roots: &RootCertStore) -> bool {
    let names = roots.subjects();
    names.iter().map(|name| name.as_ref().len()).sum::<usize>() <= MAX_NAMES_BYTES
}

/// Returns true if the key belongs to the certificate. rustls's own check cannot parse an X.509 v1 certificate, which peers
/// may accept. Compares the bits of the public keys, because their algorithms can be written in more than one way.
pub fn is_key_of(certificate: &X509Certificate<'_>, key: &dyn SigningKey) -> bool {
    let Some(own) = key.public_key() else {
        return false;
    };
    SubjectPublicKeyInfo::from_der(&own).is_ok_and(|(_, own)| {
        own.subject_public_key.data == certificate.public_key().subject_public_key.data
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use rcgen::{CertificateParams, DnType, KeyPair};
    use rustls::crypto::aws_lc_rs::sign::any_supported_type;
    use rustls_pki_types::CertificateDer;

    use super::*;

    fn ca(name: String, key: &KeyPair) -> CertificateDer<'static> {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.self_signed(key).unwrap().der().clone()
    }

    #[test]
    fn request_has_room_for_32_kib_of_names() {
        let key = KeyPair::generate().unwrap();
        let mut roots = RootCertStore::empty();
        // Each name has about a kibibyte.
        for number in 0..31 {
            roots.add(ca(format!("{number:01000}"), &key)).unwrap();
        }
        assert!(fit_request(&roots));
        for number in 31..34 {
            roots.add(ca(format!("{number:01000}"), &key)).unwrap();
        }
        assert!(!fit_request(&roots));
    }

    #[test]
    fn only_the_own_key_belongs_to_a_certificate() {
        let [key, other] = [(); 2].map(|()| KeyPair::generate().unwrap());
        let der = ca("ca".to_owned(), &key);
        let (_, certificate) = X509Certificate::from_der(&der).unwrap();
        let [own, other] = [&key, &other].map(|key| {
            let key = private_key(key.serialize_pem().as_bytes()).unwrap();
            any_supported_type(&key).unwrap()
        });
        assert!(is_key_of(&certificate, own.as_ref()));
        assert!(!is_key_of(&certificate, other.as_ref()));
    }
}
