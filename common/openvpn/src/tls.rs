//! The TLS of the control channel: rustls without sockets, in both roles.
//!
//! OpenVPN uses certificates differently from the web: names are never matched against a host, sessions are
//! never resumed, SNI is not sent, and every key negotiation is a separate TLS connection. [`ServerTls`] and
//! [`ClientTls`] contain the settings from an operator's files; to renew certificates, replace their `Arc`.
//!
//! rustls supports only TLS 1.2 and 1.3, and webpki refuses certificates of old EasyRSA versions.
//! [`TlsError`] explains such failures to the operator.

mod certificate;
mod channel;
mod error;
mod revocation;
mod verify;

use std::net::Ipv4Addr;
use std::sync::Arc;

use culvert_certificates::{PemError, fit_request, private_key};
use rustls::crypto::CryptoProvider;
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::server::{NoServerSessionStorage, VerifierBuilderError, WebPkiClientVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::version::{TLS12, TLS13};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection,
    SupportedProtocolVersion,
};
use rustls_pki_types::{CertificateDer, CertificateRevocationListDer, ServerName};

pub use certificate::{PeerIdentity, certificate_problem};
pub(crate) use channel::Channel;
pub use error::{ConfigError, TlsError};
use verify::{ClientVerifier, Refused, ServerVerifier};
pub use verify::{NameCheck, ServerCheck};

/// `tls-version-min`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MinVersion {
    /// TLS 1.2 and 1.3.
    #[default]
    Tls12,
    /// TLS 1.3 only.
    Tls13,
}

static ALL_VERSIONS: [&SupportedProtocolVersion; 2] = [&TLS13, &TLS12];
static TLS13_ONLY: [&SupportedProtocolVersion; 1] = [&TLS13];

impl MinVersion {
    fn versions(self) -> &'static [&'static SupportedProtocolVersion] {
        match self {
            Self::Tls12 => &ALL_VERSIONS,
            Self::Tls13 => &TLS13_ONLY,
        }
    }
}

/// Certificate chain and private key of this side.
#[derive(Clone, Debug)]
pub struct Identity(Arc<SingleCertAndKey>);

impl Identity {
    /// Creates an identity from the contents of the PEM files `cert` and `key`.
    pub fn from_pem(certificate: &[u8], key: &[u8]) -> Result<Self, ConfigError> {
        let chain = certificates("certificate", certificate)?;
        let key = private_key(key).map_err(|problem| ConfigError::Pem {
            what: "private key",
            problem,
        })?;
        let key = default_provider()
            .key_provider
            .load_private_key(key)
            .map_err(|error| ConfigError::Key(error.to_string()))?;
        if !certificate::is_key_of(&chain, key.as_ref()) {
            return Err(ConfigError::KeyMismatch);
        }
        let certified = CertifiedKey::new(chain, key);
        Ok(Self(Arc::new(SingleCertAndKey::from(certified))))
    }
}

/// Parses the certificates of a PEM file. Fails if the file contains no certificate.
fn certificates(
    what: &'static str,
    pem: &[u8],
) -> Result<Vec<CertificateDer<'static>>, ConfigError> {
    culvert_certificates::certificates(pem).map_err(|error| match error {
        PemError::Missing => ConfigError::Empty(what),
        problem => ConfigError::Pem { what, problem },
    })
}

/// Parses the CRLs of a PEM file. Fails if the file contains no CRL.
fn revocation_lists(pem: &[u8]) -> Result<Vec<CertificateRevocationListDer<'static>>, ConfigError> {
    culvert_certificates::revocation_lists(pem).map_err(|error| match error {
        PemError::Missing => ConfigError::NoCrl,
        problem => ConfigError::Pem {
            what: "CRL",
            problem,
        },
    })
}

/// Creates the store of CAs.
fn store(certificates: Vec<CertificateDer<'static>>) -> Result<Arc<RootCertStore>, ConfigError> {
    let mut store = RootCertStore::empty();
    for certificate in certificates {
        store
            .add(certificate)
            .map_err(|error| ConfigError::Authority(error.to_string()))?;
    }
    Ok(Arc::new(store))
}

/// TLS settings of a server, for all its sessions.
pub struct ServerTls {
    provider: Arc<CryptoProvider>,
    min_version: MinVersion,
    identity: Identity,
    verifier: ClientVerifier,
}

impl std::fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServerTls").finish_non_exhaustive()
    }
}

impl ServerTls {
    /// Creates settings that require client certificates signed by `ca` (PEM) and not revoked by `crl` (PEM).
    /// `require_usage` is `remote-cert-tls client`: key usage and extended key usage must be present. If
    /// `require_usage` is false, the usages may be missing.
    pub fn new(
        ca: &[u8],
        crl: Option<&[u8]>,
        identity: Identity,
        min_version: MinVersion,
        require_usage: bool,
    ) -> Result<Self, ConfigError> {
        let provider = Arc::new(default_provider());
        let crls = crl.map(revocation_lists).transpose()?.unwrap_or_default();
        let algorithms = provider.signature_verification_algorithms;
        let groups = revocation::groups(certificates("CA", ca)?, &crls, algorithms);
        let authorities = groups.iter().flat_map(|group| group.authorities.clone());
        let authorities = authorities.collect();
        let webpki = groups.into_iter().map(|group| {
            let roots = store(group.roots)?;
            let fits = fit_request(&roots);
            let mut webpki = WebPkiClientVerifier::builder_with_provider(roots, provider.clone());
            if !fits {
                webpki = webpki.clear_root_hint_subjects();
            }
            // Like OpenVPN's crl-verify: certificates of a CA without a CRL are accepted.
            let webpki = webpki
                .with_crls(group.crls)
                .allow_unknown_revocation_status()
                // As in OpenSSL: an expired CRL does not list clients revoked after its issue.
                .enforce_revocation_expiration()
                .build();
            webpki.map_err(|error| match error {
                VerifierBuilderError::InvalidCrl(_) => ConfigError::Crl(error.to_string()),
                error => ConfigError::Authority(error.to_string()),
            })
        });
        let webpki = webpki.collect::<Result<_, _>>()?;
        Ok(Self {
            provider,
            min_version,
            identity,
            verifier: ClientVerifier {
                webpki,
                authorities,
                algorithms,
                require_usage,
                refused: Refused::default(),
            },
        })
    }

    /// Creates a connection that waits for the client's hello.
    pub(crate) fn accept(&self) -> Result<Channel, TlsError> {
        let refused = Refused::default();
        let verifier = ClientVerifier {
            refused: refused.clone(),
            ..self.verifier.clone()
        };
        let mut config = ServerConfig::builder_with_provider(self.provider.clone())
            .with_protocol_versions(self.min_version.versions())
            .map_err(TlsError::setup)?
            .with_client_cert_verifier(Arc::new(verifier))
            .with_cert_resolver(self.identity.0.clone());
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        let tls = ServerConnection::new(Arc::new(config)).map_err(TlsError::setup)?;
        Ok(Channel::new(tls, refused))
    }
}

/// TLS settings of a client.
pub struct ClientTls {
    config: ClientConfig,
    verifier: ServerVerifier,
}

impl std::fmt::Debug for ClientTls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClientTls")
            .field("check", &self.verifier.check)
            .finish_non_exhaustive()
    }
}

impl ClientTls {
    /// Creates settings that require a server certificate signed by `ca` (PEM) and accepted by `check`.
    pub fn new(
        ca: &[u8],
        identity: Option<Identity>,
        check: ServerCheck,
        min_version: MinVersion,
    ) -> Result<Self, ConfigError> {
        let provider = Arc::new(default_provider());
        let verifier = ServerVerifier {
            roots: store(certificates("CA", ca)?)?,
            check,
            algorithms: provider.signature_verification_algorithms,
            refused: Refused::default(),
        };
        let builder = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(min_version.versions())
            .map_err(|error| ConfigError::Key(error.to_string()))?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier.clone()));
        let mut config = match identity {
            Some(identity) => builder.with_client_cert_resolver(identity.0),
            None => builder.with_no_client_auth(),
        };
        config.enable_sni = false;
        config.resumption = rustls::client::Resumption::disabled();
        Ok(Self { config, verifier })
    }

    /// Returns settings with the own certificate of these settings, and the checks of the server's certificate of
    /// `newer`.
    pub(crate) fn with_checks_of(&self, newer: &Self) -> Self {
        Self {
            config: self.config.clone(),
            verifier: newer.verifier.clone(),
        }
    }

    /// Creates a connection with a hello that waits to be sent.
    pub(crate) fn connect(&self) -> Result<Channel, TlsError> {
        let mut config = self.config.clone();
        let refused = Refused::default();
        let verifier = ServerVerifier {
            refused: refused.clone(),
            ..self.verifier.clone()
        };
        config
            .dangerous()
            .set_certificate_verifier(Arc::new(verifier));
        // The name is only a placeholder: no name is sent or checked.
        let name = ServerName::IpAddress(Ipv4Addr::UNSPECIFIED.into());
        let tls = ClientConnection::new(Arc::new(config), name).map_err(TlsError::setup)?;
        Ok(Channel::new(tls, refused))
    }
}

#[cfg(test)]
pub(crate) mod tests;
