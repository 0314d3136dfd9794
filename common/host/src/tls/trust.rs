//! The trusted CAs.

use std::path::Path;
use std::sync::Arc;

use rustls::RootCertStore;

use super::expiry::earliest_expiry;
use super::identity::{certificates, malformed};
use super::{Pem, TlsError, read_pem};

/// A set of CA certificates.
#[derive(Clone, Debug)]
pub struct TrustBundle {
    roots: Arc<RootCertStore>,
    expiry: Option<i64>,
}

// === impl TrustBundle ===

impl TrustBundle {
    /// Loads a PEM bundle. One malformed certificate makes the whole bundle invalid. A CA that is silently
    /// missing would show only much later, as refused peers.
    ///
    /// # Errors
    ///
    /// Returns [`TlsError::Ca`] for an unreadable file, a malformed certificate, or a file without
    /// certificates.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, TlsError> {
        let path = path.as_ref();
        let text = read_pem(path).map_err(|error| TlsError::Ca(Box::new(error)))?;
        Self::from_pem(Pem::new(path, &text))
    }

    /// Parses the content of a bundle; see [`TrustBundle::load`].
    pub(super) fn from_pem(pem: Pem<'_>) -> Result<Self, TlsError> {
        let mut roots = RootCertStore::empty();
        let unusable = |error| TlsError::Ca(Box::new(error));
        let bundle = certificates(pem).map_err(unusable)?;
        let expiry = earliest_expiry(bundle.iter().map(AsRef::as_ref));
        for certificate in bundle {
            let added = roots.add(certificate);
            added.map_err(|error| unusable(malformed(pem.path, error)))?;
        }
        let roots = Arc::new(roots);
        Ok(Self { roots, expiry })
    }

    /// Returns the time at which the first CA of the bundle expires, in Unix seconds.
    pub(super) fn expiry(&self) -> Option<i64> {
        self.expiry
    }

    /// Returns the bundle as rustls's type.
    pub(super) fn roots(&self) -> Arc<RootCertStore> {
        Arc::clone(&self.roots)
    }
}
