//! TLS configurations that follow their files. Each change of the files creates a whole configuration, so a
//! handshake uses a certificate, key and CA bundle that belong together.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::{ClientConfig, ServerConfig};

use super::{Identity, Pem, Settings, TlsError, TlsOptions, TrustBundle};
use crate::file_follower::ReadError;
use crate::reload::{Expiry, FileSet, Latest, Loaded};

/// TLS configuration of a listener.
pub type ServerTls = Latest<Arc<ServerConfig>>;

/// TLS configuration of a client.
pub type ClientTls = Latest<Arc<ClientConfig>>;

/// The files of a TLS listener.
pub struct ServerFiles {
    cert: PathBuf,
    key: PathBuf,
    /// CA bundle of the clients; `None` requests no certificate from clients.
    ca: Option<PathBuf>,
    settings: Settings,
}

/// The files of a TLS client.
pub struct ClientFiles {
    /// CA bundle of the servers.
    ca: PathBuf,
    /// Certificate and key; `None` if the client has no certificate.
    pair: Option<(PathBuf, PathBuf)>,
    settings: Settings,
}

// === impl ServerFiles ===

impl ServerFiles {
    /// Describes a listener; see [`server_config`](super::server_config).
    ///
    /// # Errors
    /// Fails for an unknown cipher suite.
    pub fn new(
        cert: &Path,
        key: &Path,
        ca: Option<&Path>,
        alpn: &[&[u8]],
        options: &TlsOptions,
    ) -> Result<Self, TlsError> {
        Ok(Self {
            cert: cert.to_owned(),
            key: key.to_owned(),
            ca: ca.map(Path::to_owned),
            settings: Settings::new(alpn, options)?,
        })
    }
}

impl FileSet for ServerFiles {
    type Value = Arc<ServerConfig>;
    type Error = TlsError;

    fn paths(&self) -> Vec<PathBuf> {
        let mut paths = vec![self.cert.clone(), self.key.clone()];
        paths.extend(self.ca.clone());
        paths
    }

    fn unreadable(&self, error: ReadError) -> TlsError {
        unreadable(error, self.ca.as_ref())
    }

    fn load(&mut self, contents: &[Vec<u8>]) -> Result<Loaded<Self::Value>, TlsError> {
        let content = |index| content(contents, index);
        let trust = match &self.ca {
            Some(path) => Some(TrustBundle::from_pem(Pem::new(path, content(2)))?),
            None => None,
        };
        let cert = Pem::new(&self.cert, content(0));
        let identity = Identity::from_pem(cert, Pem::new(&self.key, content(1)))?;
        Ok(Loaded {
            doubts: identity.doubts().to_vec(),
            value: self.settings.server(&identity, trust.as_ref())?,
            expiry: Expiry {
                own: identity.expiry(),
                leaf: identity.leaf_expiry(),
                ca: trust.as_ref().and_then(TrustBundle::expiry),
                crl: None,
            },
        })
    }
}

// === impl ClientFiles ===

impl ClientFiles {
    /// Describes a client; see [`client_config`](super::client_config).
    ///
    /// # Errors
    /// Fails for an unknown cipher suite.
    pub fn new(
        ca: &Path,
        pair: Option<(&Path, &Path)>,
        alpn: &[&[u8]],
        options: &TlsOptions,
    ) -> Result<Self, TlsError> {
        Ok(Self {
            ca: ca.to_owned(),
            pair: pair.map(|(cert, key)| (cert.to_owned(), key.to_owned())),
            settings: Settings::new(alpn, options)?,
        })
    }
}

impl FileSet for ClientFiles {
    type Value = Arc<ClientConfig>;
    type Error = TlsError;

    fn paths(&self) -> Vec<PathBuf> {
        let mut paths = vec![self.ca.clone()];
        paths.extend(
            self.pair
                .iter()
                .flat_map(|(cert, key)| [cert.clone(), key.clone()]),
        );
        paths
    }

    fn unreadable(&self, error: ReadError) -> TlsError {
        unreadable(error, Some(&self.ca))
    }

    fn load(&mut self, contents: &[Vec<u8>]) -> Result<Loaded<Self::Value>, TlsError> {
        let content = |index| content(contents, index);
        let trust = TrustBundle::from_pem(Pem::new(&self.ca, content(0)))?;
        let identity = match &self.pair {
            Some((cert, key)) => {
                let (cert, key) = (Pem::new(cert, content(1)), Pem::new(key, content(2)));
                Some(Identity::from_pem(cert, key)?)
            }
            None => None,
        };
        let doubts = identity.as_ref().map(|identity| identity.doubts().to_vec());
        Ok(Loaded {
            doubts: doubts.unwrap_or_default(),
            value: self.settings.client(&trust, identity.as_ref())?,
            expiry: Expiry {
                own: identity.as_ref().and_then(Identity::expiry),
                leaf: identity.as_ref().and_then(Identity::leaf_expiry),
                ca: trust.expiry(),
                crl: None,
            },
        })
    }
}

/// Returns the content of one file.
fn content(contents: &[Vec<u8>], index: usize) -> &[u8] {
    contents.get(index).map_or(&[], Vec::as_slice)
}

/// Converts the reason why a file cannot be read; errors about the CA bundle begin like upstream's.
fn unreadable(error: ReadError, ca: Option<&PathBuf>) -> TlsError {
    let (path, error) = match error {
        ReadError::Io { path, reason } => (path.clone(), TlsError::Read(path, reason)),
        ReadError::TooLarge { path, .. } => (path.clone(), TlsError::TooLarge(path)),
        ReadError::Empty { path, .. } => (path.clone(), TlsError::NoCertificate(path)),
    };
    match ca == Some(&path) {
        true => TlsError::Ca(Box::new(error)),
        false => error,
    }
}

#[cfg(test)]
mod tests;
