//! The renewal of certificates in a running server. Changed files are loaded and used from the next
//! negotiation on, including renegotiations of connected clients.

use std::path::PathBuf;
use std::sync::Arc;

use culvert_host::file_follower::ReadError;
use culvert_host::reload::{FileSet, Latest, Loaded};
use culvert_openvpn::Role;
use culvert_openvpn::session::ServerConfig;
use culvert_openvpn::tls::ServerTls;
use culvert_openvpn_io::config_file::{Material, Server};
use culvert_openvpn_io::files::{self, FileError};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// The files of a server's TLS configuration, or their inline blocks.
pub(super) struct TlsMaterial {
    ca: Material,
    cert: Material,
    key: Material,
    server: Server,
}

// === impl TlsMaterial ===

impl TlsMaterial {
    /// Takes the files from a configuration.
    ///
    /// # Errors
    /// Fails if the configuration has no CA, certificate or key.
    pub(super) fn new(server: &Server) -> anyhow::Result<Self> {
        let common = &server.common;
        let (Some(ca), Some(cert), Some(key)) = (&common.ca, &common.cert, &common.key) else {
            anyhow::bail!(
                "clients connect over TLS; set --openvpn-ca, --openvpn-cert and --openvpn-key"
            );
        };
        Ok(Self {
            ca: ca.clone(),
            cert: cert.clone(),
            key: key.clone(),
            server: server.clone(),
        })
    }
}

impl FileSet for TlsMaterial {
    type Value = Arc<ServerTls>;
    type Error = FileError;

    fn paths(&self) -> Vec<PathBuf> {
        let all = [&self.ca, &self.cert, &self.key].into_iter();
        files::paths(all.chain(&self.server.crl))
    }

    fn unreadable(&self, error: ReadError) -> FileError {
        error.into()
    }

    /// Loads the files. The next check finds a change of a file since the last check.
    fn load(&mut self, _contents: &[Vec<u8>]) -> Result<Loaded<Self::Value>, FileError> {
        let doubt = files::doubt(&self.cert, Role::Server);
        let doubt = doubt
            .map(|doubt| format!("OpenVPN clients will refuse this server's certificate: {doubt}"));
        let common = &self.server.common;
        let tls = files::server_tls(
            &self.ca,
            self.server.crl.as_ref(),
            (&self.cert, &self.key),
            common.min_version,
            common.require_usage,
        )?;
        Ok(Loaded {
            doubts: doubt.into_iter().collect(),
            value: Arc::new(tls),
            expiry: files::expiry(Some(&self.cert), &self.ca, self.server.crl.as_ref())?,
        })
    }
}

/// Passes renewed certificates to all listeners until the token fires.
pub(super) async fn follow(
    mut latest: Latest<Arc<ServerTls>>,
    configs: Vec<watch::Sender<Arc<ServerConfig>>>,
    shutdown: CancellationToken,
) {
    while let Some(Some(tls)) = shutdown.run_until_cancelled(latest.changed()).await {
        for config in &configs {
            config.send_modify(|config| {
                let mut renewed = ServerConfig::clone(config);
                renewed.tls = tls.clone();
                *config = Arc::new(renewed);
            });
        }
    }
    // The reloader may end earlier than this task.
    shutdown.cancelled().await;
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use culvert_host::telemetry::metrics::Registry;
    use culvert_openvpn::options::Transport;
    use rcgen::{
        CertificateParams, CertificateRevocationListParams, CertifiedIssuer, KeyIdMethod, KeyPair,
        SerialNumber,
    };

    use super::*;
    use crate::files::{Files, Reloader};

    #[tokio::test]
    async fn changed_files_are_used_if_they_are_valid() {
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
        assert!(TlsMaterial::new(&server).is_err());
        server.common.ca = Some(Material::File(path("ca")));
        server.common.cert = Some(Material::File(path("cert")));
        server.common.key = Some(Material::File(path("key")));
        let mut reloader = Reloader::new(&Registry::new(&[]).unwrap());
        let material = TlsMaterial::new(&server).unwrap();
        let latest = reloader.follow(Files::Openvpn, material).await.unwrap();
        let first = latest.get();
        let config = Arc::new(ServerConfig::new(Transport::Tcp, first.clone()));
        let sender = watch::Sender::new(config);
        let (mut receiver, stop) = (sender.subscribe(), CancellationToken::new());
        let task = tokio::spawn(follow(latest.clone(), vec![sender], stop.clone()));
        let mut check_twice = || {
            reloader.check();
            reloader.check();
        };
        // With only one changed file, the certificates stay in use.
        std::fs::write(path("key"), "nonsense").unwrap();
        check_twice();
        std::fs::remove_file(path("key")).unwrap();
        check_twice();
        assert!(Arc::ptr_eq(&first, &latest.get()));
        write();
        check_twice();
        assert!(!Arc::ptr_eq(&first, &latest.get()));
        receiver.changed().await.unwrap();
        assert!(Arc::ptr_eq(&receiver.borrow().tls, &latest.get()));
        stop.cancel();
        task.await.unwrap();
    }

    #[tokio::test]
    async fn last_crl_stays_in_use_if_its_file_contains_none() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let ca = CertificateParams::default();
        let ca = CertifiedIssuer::self_signed(ca, KeyPair::generate().unwrap()).unwrap();
        let crl = |number: u64| {
            let params = CertificateRevocationListParams {
                this_update: rcgen::date_time_ymd(2020, 1, 1),
                next_update: rcgen::date_time_ymd(2999, 1, 1),
                crl_number: SerialNumber::from(number),
                issuing_distribution_point: None,
                revoked_certs: Vec::new(),
                key_identifier_method: KeyIdMethod::Sha256,
            };
            params.signed_by(&ca).unwrap().pem().unwrap()
        };
        let file = |name: &str, text: &str| {
            std::fs::write(path(name), text).unwrap();
            Some(Material::File(path(name)))
        };
        let mut server = Server::default();
        server.common.ca = file("ca", &ca.pem());
        server.common.cert = file("cert", &ca.pem());
        server.common.key = file("key", &ca.key().serialize_pem());
        server.crl = file("crl", "");
        let registry = Registry::new(&[]).unwrap();
        let mut reloader = Reloader::new(&registry);
        let mut follow = async |server: &Server| {
            let material = TlsMaterial::new(server).unwrap();
            reloader.follow(Files::Openvpn, material).await
        };
        assert!(follow(&server).await.is_err());
        file("crl", &crl(1));
        let latest = follow(&server).await.unwrap();
        let first = latest.get();
        let expiry = rcgen::date_time_ymd(2999, 1, 1).unix_timestamp();
        let shown = format!("files=\"openvpn\",certificate=\"crl\"}} {expiry}");
        assert!(registry.render().contains(&shown), "{}", registry.render());
        for (text, is_used) in [("", false), (&*ca.pem(), false), (&*crl(2), true)] {
            file("crl", text);
            reloader.check();
            reloader.check();
            assert_eq!(!Arc::ptr_eq(&first, &latest.get()), is_used, "{text}");
        }
    }
}
