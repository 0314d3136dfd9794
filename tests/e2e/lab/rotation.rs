//! Keys and certificates that change while programs run.

use std::path::PathBuf;
use std::sync::Arc;

use culvert_kit::pki::load_certs;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::control_plane::cluster_certificate;
use super::pki::{Authority, signing_key};
use super::tunnel::AGENT_PORT;
use super::{Lab, SEED, SERVERS};

impl Lab {
    /// Returns the certificate that the first server presents to agents.
    pub(crate) async fn presented_certificate(&self) -> CertificateDer<'static> {
        let mut roots = RootCertStore::empty();
        let authority = load_certs(&self.credentials.authority.cert).unwrap();
        roots.add_parsable_certificates(authority);
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let stream = TcpStream::connect((SEED, AGENT_PORT)).await.unwrap();
        let name = ServerName::try_from(SERVERS).unwrap();
        let connector = TlsConnector::from(Arc::new(config));
        let stream = connector.connect(name, stream).await.unwrap();
        let certificates = stream.get_ref().1.peer_certificates();
        certificates.unwrap()[0].clone()
    }

    /// Replaces the files of the servers' certificate and key, and returns the new certificate.
    pub(crate) fn replace_certificate(&self) -> CertificateDer<'static> {
        let pair = cluster_certificate(&self.credentials.authority);
        load_certs(&pair.cert).unwrap()[0].clone()
    }

    /// Creates another authority. Returns a file with the certificates of both authorities.
    pub(crate) fn another_authority(&self) -> (Authority, PathBuf) {
        let dir = self.dir.path();
        let next = Authority::create(dir, "next-ca");
        let both = dir.join("both.crt");
        let text = [self.credentials.authority.pem(), next.pem()].concat();
        std::fs::write(&both, text).unwrap();
        (next, both)
    }

    /// Replaces the files of the servers' certificate and key by those of an authority.
    pub(crate) fn replace_certificate_by(&self, authority: &Authority) {
        cluster_certificate(authority);
    }

    /// Creates the Secrets of the servers' chart. `address` is where agents connect to.
    pub(crate) async fn chart_secrets(&self, address: &str) {
        let authority = &self.credentials.authority;
        let agents = authority.server("chart-servers", &[address]);
        let front_end = authority.server("chart-front-end", &["servers-front-end.kube-system.svc"]);
        let secrets = [
            (
                "konnectivityproxy-tls",
                vec![
                    ("konnectivityproxy-tls.crt", &agents.cert),
                    ("konnectivityproxy-tls.key", &agents.key),
                ],
            ),
            (
                "culvert-front-end",
                vec![
                    ("tls.crt", &front_end.cert),
                    ("tls.key", &front_end.key),
                    ("ca.crt", &authority.cert),
                ],
            ),
        ];
        for (name, files) in secrets {
            super::kubectl::apply_secret(&self.kubectl, "kube-system", name, &files).await;
        }
    }

    /// Restarts kube-apiserver with another key for the tokens of service accounts. All earlier tokens are invalid.
    pub(crate) async fn replace_token_key(&mut self) {
        self.credentials.tokens = signing_key(self.dir.path(), "other-tokens");
        self.start_apiserver(self.egress).await;
    }
}
