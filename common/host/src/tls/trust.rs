//! The CAs that we believe.

use std::path::Path;
use std::sync::Arc;

use rustls::RootCertStore;

use super::TlsError;
use super::identity::certificates;

/// A set of CA certificates.
#[derive(Clone, Debug)]
pub struct TrustBundle(Arc<RootCertStore>);

// === impl TrustBundle ===

impl TrustBundle {
    /// Loads a PEM bundle. Strict: one malformed certificate spoils the bundle, because a CA that
    /// is silently missing shows much later, as peers that are refused.
    ///
    /// # Errors
    ///
    /// [`TlsError::Ca`] for an unreadable file, a malformed certificate or none at all.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, TlsError> {
        let path = path.as_ref();
        let mut roots = RootCertStore::empty();
        for certificate in certificates(path).map_err(|error| TlsError::Ca(Box::new(error)))? {
            roots.add(certificate).map_err(|error| {
                TlsError::Ca(Box::new(TlsError::MalformedCertificate {
                    path: path.to_owned(),
                    reason: error.to_string(),
                }))
            })?;
        }
        Ok(Self(Arc::new(roots)))
    }

    /// How many CAs there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Never: a bundle without a CA is refused.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The form that rustls wants.
    pub(super) fn roots(&self) -> Arc<RootCertStore> {
        Arc::clone(&self.0)
    }
}
