//! The renewal of certificates in a running server. Changed files are loaded and used from the next
//! negotiation on, including renegotiations of connected clients.

use std::sync::Arc;
use std::time::Duration;

use culvert_host::file_follower::{FileFollower, Outcome};
use culvert_openvpn::Role;
use culvert_openvpn::session::ServerConfig;
use culvert_openvpn::tls::ServerTls;
use culvert_openvpn_io::config_file::{Material, Server};
use culvert_openvpn_io::files;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

/// Interval at which the files are checked. Kubernetes takes about as long to deliver a changed Secret.
const LOOK_EVERY: Duration = Duration::from_secs(30);

/// The files of a server's TLS configuration.
pub(super) struct Files {
    ca: Material,
    cert: Material,
    key: Material,
    server: Server,
    follower: FileFollower,
    /// Error of the last attempt to load the files; `None` after a success.
    failure: Option<files::FileError>,
}

impl Files {
    /// Creates the list of files from a configuration.
    pub(super) fn new(server: &Server) -> anyhow::Result<Self> {
        let common = &server.common;
        let (Some(ca), Some(cert), Some(key)) = (&common.ca, &common.cert, &common.key) else {
            anyhow::bail!(
                "clients connect over TLS; set --openvpn-ca, --openvpn-cert and --openvpn-key"
            );
        };
        let all = [ca, cert, key].into_iter().chain(&server.crl);
        let paths = all.filter_map(|material| match material {
            Material::File(path) => Some(path.clone()),
            Material::Inline { .. } => None,
        });
        Ok(Self {
            follower: FileFollower::unit(paths.collect(), files::MAX_BYTES),
            ca: ca.clone(),
            cert: cert.clone(),
            key: key.clone(),
            server: server.clone(),
            failure: None,
        })
    }

    /// Loads the files.
    ///
    /// # Errors
    /// Fails if a file cannot be used. The error text names the file and the remedy.
    pub(super) fn load(&mut self) -> Result<ServerTls, files::FileError> {
        // Remembers the contents; a file that cannot be read is reported below.
        let _ = self.follower.check();
        if let Some(doubt) = files::doubt(&self.cert, Role::Server) {
            warn!("OpenVPN clients will refuse this server's certificate: {doubt}");
        }
        let common = &self.server.common;
        let crl = self.server.crl.as_ref();
        files::server_tls(
            &self.ca,
            crl,
            (&self.cert, &self.key),
            common.min_version,
            common.require_usage,
        )
    }

    /// Returns true if a file changed since the last check. Returns false while a file is missing, because it
    /// is probably being replaced.
    fn changed(&mut self) -> bool {
        match self.follower.check() {
            Outcome::Same => false,
            Outcome::Changed => true,
            Outcome::Unreadable { why, is_new } => {
                if is_new {
                    warn!("{why}; the previous OpenVPN certificates stay in use");
                }
                false
            }
        }
    }

    /// Passes renewed certificates to all listeners until the token fires.
    pub(super) async fn follow(
        mut self,
        configs: Vec<watch::Sender<Arc<ServerConfig>>>,
        shutdown: CancellationToken,
    ) {
        let mut look = tokio::time::interval(LOOK_EVERY);
        while shutdown.run_until_cancelled(look.tick()).await.is_some() {
            if self.changed() {
                self.renew(&configs);
            }
        }
    }

    fn renew(&mut self, configs: &[watch::Sender<Arc<ServerConfig>>]) {
        match self.load() {
            Ok(tls) => {
                self.failure = None;
                let tls = Arc::new(tls);
                for config in configs {
                    config.send_modify(|config| {
                        let mut renewed = ServerConfig::clone(config);
                        renewed.tls = tls.clone();
                        *config = Arc::new(renewed);
                    });
                }
                info!("OpenVPN certificates reloaded");
            }
            Err(error) => {
                // A file may have been replaced halfway, so the next check tries again.
                self.follower.retry();
                if self.failure.as_ref() != Some(&error) {
                    warn!(%error, "cannot reload OpenVPN certificates; the previous certificates stay in use");
                    self.failure = Some(error);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use culvert_openvpn::options::Transport;
    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    #[test]
    fn changed_files_are_used_if_they_are_valid() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let write = || {
            let key = KeyPair::generate().unwrap();
            let certificate = CertificateParams::default().self_signed(&key).unwrap();
            for name in ["ca", "cert"] {
                std::fs::write(path(name), certificate.pem()).unwrap();
            }
            std::fs::write(path("key"), key.serialize_pem()).unwrap();
        };
        write();
        let mut server = Server::default();
        assert!(Files::new(&server).is_err());
        server.common.ca = Some(Material::File(path("ca")));
        server.common.cert = Some(Material::File(path("cert")));
        server.common.key = Some(Material::File(path("key")));
        let mut files = Files::new(&server).unwrap();
        let tls = Arc::new(files.load().unwrap());
        let config = Arc::new(ServerConfig::new(Transport::Tcp, tls));
        let sender = watch::Sender::new(config.clone());
        assert!(!files.changed());
        // With only one changed file, the error is logged and the certificates stay in use.
        std::fs::write(path("key"), "nonsense").unwrap();
        assert!(files.changed());
        files.renew(std::slice::from_ref(&sender));
        assert!(Arc::ptr_eq(&config, &sender.borrow()));
        std::fs::remove_file(path("key")).unwrap();
        assert!(!files.changed());
        write();
        assert!(files.changed() && !files.changed());
        files.renew(std::slice::from_ref(&sender));
        assert!(!Arc::ptr_eq(&config.tls, &sender.borrow().tls));
    }
}
