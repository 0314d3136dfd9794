//! The certificate files of the OpenVPN client.

use std::path::PathBuf;
use std::sync::Arc;

use culvert_host::file_follower::ReadError;
use culvert_host::reload::{FileSet, Loaded};
use culvert_openvpn::Role;
use culvert_openvpn::tls::{ClientTls, ServerCheck};
use culvert_openvpn_io::config_file::{Common, Material};
use culvert_openvpn_io::files::{self, FileError};

/// The files of a client's TLS configuration, or their inline blocks. Each session uses the latest
/// content, and an open session the latest CA.
pub(super) struct TlsMaterial {
    ca: Material,
    common: Common,
}

// === impl TlsMaterial ===

impl TlsMaterial {
    /// Takes the files from a configuration.
    ///
    /// # Errors
    /// Fails if the configuration has no CA.
    pub(super) fn new(common: &Common) -> Result<Self, FileError> {
        let ca = common.ca.clone().ok_or_else(|| FileError::Unusable {
            origin: "ca".into(),
            problem: "not given".into(),
        })?;
        let common = common.clone();
        Ok(Self { ca, common })
    }
}

impl FileSet for TlsMaterial {
    type Value = Arc<ClientTls>;
    type Error = FileError;

    fn paths(&self) -> Vec<PathBuf> {
        let own = self.common.cert.iter().chain(&self.common.key);
        files::paths([&self.ca].into_iter().chain(own))
    }

    fn unreadable(&self, error: ReadError) -> FileError {
        error.into()
    }

    /// Loads the files. The next check finds a change of a file since the last check.
    fn load(&mut self, _contents: &[Vec<u8>]) -> Result<Loaded<Self::Value>, FileError> {
        let common = &self.common;
        let cert = common.cert.as_ref();
        let check = ServerCheck {
            require_usage: common.require_usage,
            name: common.name.clone(),
        };
        let pair = cert.zip(common.key.as_ref());
        let tls = files::client_tls(&self.ca, pair, check, common.min_version)?;
        let doubt = cert.and_then(|cert| files::doubt(cert, Role::Client));
        let doubt = doubt
            .map(|doubt| format!("OpenVPN servers will refuse this client's certificate: {doubt}"));
        Ok(Loaded {
            doubts: doubt.into_iter().collect(),
            value: Arc::new(tls),
            expiry: files::expiry(cert, &self.ca, None)?,
        })
    }
}
