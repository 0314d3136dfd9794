//! The trusted CAs.

use std::path::Path;
use std::sync::Arc;

use rustls::RootCertStore;

use super::TlsError;
use super::identity::{certificates, malformed};

/// A set of CA certificates.
#[derive(Clone, Debug)]
pub struct TrustBundle(Arc<RootCertStore>);

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
        let mut roots = RootCertStore::empty();
        let unusable = |error| TlsError::Ca(Box::new(error));
        for certificate in certificates(path).map_err(unusable)? {
            let added = roots.add(certificate);
            added.map_err(|error| unusable(malformed(path, error)))?;
        }
        Ok(Self(Arc::new(roots)))
    }

    /// Returns the bundle as rustls's type.
    pub(super) fn roots(&self) -> Arc<RootCertStore> {
        Arc::clone(&self.0)
    }
}
