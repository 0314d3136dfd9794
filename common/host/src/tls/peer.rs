//! Names in the certificates of peers.

use x509_parser::prelude::{FromDer, X509Certificate};

/// Returns the common name in the subject of a certificate that the caller has verified. Returns `None` unless
/// the subject has exactly one common name, of printable ASCII characters.
pub fn common_name(der: &[u8]) -> Option<String> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    let mut names = certificate.subject().iter_common_name();
    let (Some(name), None) = (names.next(), names.next()) else {
        return None;
    };
    let name = name.as_str().ok()?;
    let is_printable = name.bytes().all(|byte| matches!(byte, b' '..=b'~'));
    (is_printable && !name.is_empty()).then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};

    use super::*;

    fn certificate(name: Option<&str>) -> Vec<u8> {
        let mut params = CertificateParams::new(vec!["localhost".into()]).unwrap();
        params.distinguished_name = DistinguishedName::new();
        let subject = &mut params.distinguished_name;
        subject.push(DnType::OrganizationName, "agents");
        if let Some(name) = name {
            subject.push(DnType::CommonName, name);
        }
        let key = KeyPair::generate().unwrap();
        params.self_signed(&key).unwrap().der().to_vec()
    }

    #[test]
    fn single_printable_common_name_is_returned() {
        let name = |name| common_name(&certificate(name));
        assert_eq!(name(Some("node a")).as_deref(), Some("node a"));
        for unusable in [None, Some(""), Some("a\nb"), Some("k\u{e4}se")] {
            assert_eq!(name(unusable), None, "{unusable:?}");
        }
        assert_eq!(common_name(b"no certificate"), None);
    }
}
