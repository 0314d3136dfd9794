//! Our own certificate and private key.
//!
//! rustls checks that a key belongs to its certificate with a parser that refuses X.509 v1. [`Identity`]
//! therefore makes this check without rustls: the `openssl x509 -req` recipe in the Kubernetes documentation
//! issues v1 certificates, and Go accepts them.

use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;

use culvert_certificates::{PemError, is_key_of};
use rustls::crypto::aws_lc_rs::sign::any_supported_type;
use rustls::sign::{CertifiedKey, SigningKey};
use rustls_pki_types::CertificateDer;
use x509_parser::prelude::{FromDer, X509Certificate};
use x509_parser::x509::X509Version;

use super::expiry::earliest_expiry;
use super::{Pem, TlsError, read_pem};
use crate::reload::date;

/// A certificate chain, leaf first, and the leaf's private key.
#[derive(Clone, Debug)]
pub struct Identity {
    key: Arc<CertifiedKey>,
    expiry: Option<i64>,
    doubts: Vec<String>,
}

// === impl Identity ===

impl Identity {
    /// Loads a PEM certificate chain and a PEM key (PKCS#8, PKCS#1 or SEC1). A certificate that has expired,
    /// or is not valid yet, is loaded with a warning, because the clock may be wrong.
    ///
    /// # Errors
    ///
    /// Fails for an unreadable file, a missing or malformed certificate or key, or a key that does not belong
    /// to the certificate.
    pub fn load(cert_path: impl AsRef<Path>, key_path: impl AsRef<Path>) -> Result<Self, TlsError> {
        let (cert_path, key_path) = (cert_path.as_ref(), key_path.as_ref());
        let (cert, key) = (read_pem(cert_path)?, read_pem(key_path)?);
        let identity = Self::from_pem(Pem::new(cert_path, &cert), Pem::new(key_path, &key))?;
        for doubt in identity.doubts() {
            tracing::warn!("{doubt}");
        }
        Ok(identity)
    }

    /// Parses the contents of both files; see [`Identity::load`]. Logs no warning.
    pub(super) fn from_pem(cert: Pem<'_>, key: Pem<'_>) -> Result<Self, TlsError> {
        let chain = certificates(cert)?;
        let signer = private_key(key)?;
        let der = chain
            .first()
            .ok_or_else(|| TlsError::NoCertificate(cert.path.to_owned()))?;
        let (_, leaf) =
            X509Certificate::from_der(der).map_err(|error| malformed(cert.path, error))?;
        if !is_key_of(&leaf, signer.as_ref()) {
            let (cert, key) = (cert.path.to_owned(), key.path.to_owned());
            return Err(TlsError::KeyMismatch(cert, key));
        }
        let doubts = doubts(&leaf, cert.path);
        Ok(Self {
            doubts,
            expiry: earliest_expiry(chain.iter().map(AsRef::as_ref)),
            key: Arc::new(CertifiedKey::new(chain, signer)),
        })
    }

    /// Returns the time at which the first certificate of the chain expires, in Unix seconds.
    pub(super) fn expiry(&self) -> Option<i64> {
        self.expiry
    }

    /// Returns the time at which the certificate itself expires, in Unix seconds.
    pub(super) fn leaf_expiry(&self) -> Option<i64> {
        earliest_expiry(self.key.cert.first().map(AsRef::as_ref))
    }

    /// Returns the reasons why peers may refuse the certificate.
    pub(super) fn doubts(&self) -> &[String] {
        &self.doubts
    }

    /// Returns the identity as rustls's type.
    pub(super) fn certified_key(&self) -> Arc<CertifiedKey> {
        Arc::clone(&self.key)
    }
}

/// Returns all certificates of a PEM file.
pub(super) fn certificates(pem: Pem<'_>) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    culvert_certificates::certificates(pem.text).map_err(|error| match error {
        PemError::Missing => TlsError::NoCertificate(pem.path.to_owned()),
        error => malformed(pem.path, error),
    })
}

pub(super) fn malformed(path: &Path, reason: impl Display) -> TlsError {
    TlsError::MalformedCertificate(path.to_owned(), reason.to_string())
}

fn private_key(pem: Pem<'_>) -> Result<Arc<dyn SigningKey>, TlsError> {
    let bad = |reason| TlsError::BadKey(pem.path.to_owned(), reason);
    let key = culvert_certificates::private_key(pem.text).map_err(|error| match error {
        PemError::Missing => TlsError::NoKey(pem.path.to_owned()),
        error => bad(error.to_string()),
    })?;
    any_supported_type(&key).map_err(|error| bad(error.to_string()))
}

fn doubts(leaf: &X509Certificate<'_>, path: &Path) -> Vec<String> {
    let (path, validity) = (path.display(), leaf.validity());
    let mut doubts = Vec::new();
    if !validity.is_valid() {
        let [from, until] =
            [validity.not_before, validity.not_after].map(|time| date(time.timestamp()));
        doubts.push(format!(
            "{path}: the certificate is valid from {from} to {until}, and not now; peers will refuse it"
        ));
    }
    if leaf.version() != X509Version::V3 {
        doubts.push(format!(
            "{path}: the certificate is X.509 v1: Go peers accept it, others refuse it; reissue it as v3 \
             (with `openssl x509 -req`, add `-extfile` with at least one extension)"
        ));
    }
    doubts
}
