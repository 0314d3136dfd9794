//! Times at which certificates expire.

use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, CertificateRevocationListDer};
use x509_parser::prelude::{CertificateRevocationList, FromDer, X509Certificate};

/// Returns the time at which the first of the certificates expires, in Unix seconds. Certificates that cannot be
/// parsed are skipped. Returns `None` if no certificate is left.
pub fn earliest_expiry<'a>(certificates: impl IntoIterator<Item = &'a [u8]>) -> Option<i64> {
    let parsed = certificates
        .into_iter()
        .filter_map(|der| X509Certificate::from_der(der).ok());
    parsed
        .map(|(_, certificate)| certificate.validity().not_after.timestamp())
        .min()
}

/// Returns the time at which the first CRL of a PEM file expires, in Unix seconds. CRLs without such a time and CRLs that
/// cannot be parsed are skipped. Returns `None` if no CRL is left.
pub fn earliest_crl_expiry_in_pem(text: &[u8]) -> Option<i64> {
    CertificateRevocationListDer::pem_slice_iter(text)
        .filter_map(Result::ok)
        .filter_map(|der| {
            let (_, list) = CertificateRevocationList::from_der(&der).ok()?;
            Some(list.next_update()?.timestamp())
        })
        .min()
}

/// Returns the time at which the first certificate in a PEM file, the own one of a chain, expires, in Unix seconds; `None`
/// if the certificate cannot be parsed.
pub fn leaf_expiry_in_pem(text: &[u8]) -> Option<i64> {
    let leaf = CertificateDer::pem_slice_iter(text).next()?.ok()?;
    earliest_expiry([leaf.as_ref()])
}

/// Returns the time at which the first certificate of a PEM file expires; see [`earliest_expiry`].
pub fn earliest_expiry_in_pem(text: &[u8]) -> Option<i64> {
    let found: Vec<_> = CertificateDer::pem_slice_iter(text)
        .filter_map(Result::ok)
        .collect();
    earliest_expiry(found.iter().map(AsRef::as_ref))
}
