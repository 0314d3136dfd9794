//! Keys and certificates that change while programs run.

use std::sync::Arc;

use culvert_kit::pki::load_certs;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::control_plane::cluster_certificate;
use super::pki::signing_key;
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

    /// Restarts kube-apiserver with another key for the tokens of service accounts. All earlier tokens are invalid.
    pub(crate) async fn replace_token_key(&mut self) {
        self.credentials.tokens = signing_key(self.dir.path(), "other-tokens");
        self.start_apiserver(self.egress).await;
    }
}
