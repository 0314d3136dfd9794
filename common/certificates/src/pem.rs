//! The sections of PEM files.

use rustls_pki_types::pem::{self, PemObject};
use rustls_pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};

/// Reason why the content of a PEM file cannot be used. The texts contain nothing of the file, which may have a private key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PemError {
    /// The file has no section of the wanted kind.
    #[error("no such PEM section found (decrypt an encrypted key first)")]
    Missing,
    /// Two sections share a line.
    #[error("-----END and -----BEGIN are on one line (add the missing line break)")]
    Joined,
    /// A section has no end, or its first line is malformed.
    #[error("a PEM section has no valid BEGIN or END line (check the line breaks)")]
    Lines,
    /// Any other fault, in the words of the parser.
    #[error("{0}")]
    Malformed(String),
}

impl From<pem::Error> for PemError {
    fn from(error: pem::Error) -> Self {
        match error {
            pem::Error::NoItemsFound => Self::Missing,
            // The parser's text contains the line.
            pem::Error::MissingSectionEnd { .. } | pem::Error::IllegalSectionStart { .. } => {
                Self::Lines
            }
            error => Self::Malformed(error.to_string()),
        }
    }
}

/// Returns all certificates of a PEM file. Other sections are skipped, as in Go.
///
/// # Errors
/// Fails if the file is malformed, or contains no certificate.
pub fn certificates(text: &[u8]) -> Result<Vec<CertificateDer<'static>>, PemError> {
    sections(text)
}

/// Returns all certificate revocation lists of a PEM file.
///
/// # Errors
/// Fails if the file is malformed, or contains no list: revoked certificates would be accepted.
pub fn revocation_lists(
    text: &[u8],
) -> Result<Vec<CertificateRevocationListDer<'static>>, PemError> {
    sections(text)
}

/// Returns the first private key of a PEM file: PKCS#8, PKCS#1 or SEC1.
///
/// # Errors
/// Fails if the file is malformed, or contains no private key.
pub fn private_key(text: &[u8]) -> Result<PrivateKeyDer<'static>, PemError> {
    Ok(PrivateKeyDer::from_pem_slice(text)?)
}

fn sections<T: PemObject>(text: &[u8]) -> Result<Vec<T>, PemError> {
    // As after `cat` of a file without a final newline. The parser would skip the second section.
    const JOINED: &[u8] = b"----------BEGIN ";
    if text.windows(JOINED.len()).any(|bytes| bytes == JOINED) {
        return Err(PemError::Joined);
    }
    let all = T::pem_slice_iter(text).collect::<Result<Vec<_>, _>>()?;
    match all.is_empty() {
        true => Err(PemError::Missing),
        false => Ok(all),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    #[test]
    fn sections_of_other_kinds_are_skipped() {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::default().self_signed(&key).unwrap();
        let text = format!("{}{}", key.serialize_pem(), certificate.pem());
        assert_eq!(
            certificates(text.as_bytes()).unwrap(),
            [certificate.der().clone()]
        );
        assert!(private_key(text.as_bytes()).is_ok());
        assert_eq!(revocation_lists(text.as_bytes()), Err(PemError::Missing));
    }

    #[test]
    fn malformed_files_are_refused_without_their_content() {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::default().self_signed(&key).unwrap();
        let pem = certificate.pem();
        let joined = [pem.trim_end(), pem.trim_end()].concat();
        assert_eq!(certificates(joined.as_bytes()), Err(PemError::Joined));
        assert_eq!(certificates(b""), Err(PemError::Missing));
        let endless = key.serialize_pem().replace("-----END", "SECRET");
        assert_eq!(
            private_key(endless.as_bytes()).unwrap_err(),
            PemError::Lines
        );
        let garbage = b"-----BEGIN CERTIFICATE-----\n!SECRET!\n-----END CERTIFICATE-----\n";
        let error = certificates(garbage).unwrap_err();
        assert!(matches!(error, PemError::Malformed(_)), "{error:?}");
        assert!(!error.to_string().contains("SECRET"), "{error}");
    }
}
