//! Identities, trust and cipher suites: the conversion of files and flags into rustls configurations.
//!
//! The crypto provider is passed explicitly, so no process-wide default has to be installed. A configuration
//! is an `Arc`: [`reload`] replaces the configuration while connections made from the old one continue.
//!
//! Differences from Go that an operator may notice are handled or at least explained. X.509 v1 certificates
//! work as our own identity ([`Identity`]), and [`explain()`] describes the cause of a failed handshake and
//! the remedy.

mod chain;
mod client;
mod expiry;
mod explain;
mod identity;
mod peer;
pub mod reload;
mod suites;
mod trust;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use culvert_certificates::fit_request;
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::CryptoProvider;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::sign::SingleCertAndKey;
use rustls::version::{TLS12, TLS13};
use rustls::{
    ClientConfig, ConnectionCommon, ProtocolVersion, ServerConfig, SupportedProtocolVersion,
};

use chain::BoundedChain;
pub use client::ClientStream;
pub use expiry::{
    earliest_crl_expiry_in_pem, earliest_expiry, earliest_expiry_in_pem, leaf_expiry_in_pem,
};
pub use explain::{explain, explain_refusal, explain_tls};
pub use identity::Identity;
pub use peer::common_name;
pub use suites::{SuiteSupport, go_suite};
pub use trust::TrustBundle;

/// Maximum size of a PEM file, in bytes. The system's whole CA bundle is about 220 KiB long.
const MAX_PEM_BYTES: u64 = 4 << 20;

/// Oldest allowed TLS version. rustls supports no version below 1.2.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MinVersion {
    /// TLS 1.2 and 1.3; upstream's default.
    #[default]
    Tls12,
    /// TLS 1.3 only.
    Tls13,
}

impl MinVersion {
    /// Returns Go's name, as in flags.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tls12 => "VersionTLS12",
            Self::Tls13 => "VersionTLS13",
        }
    }
}

/// TLS settings from flags.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsOptions {
    /// Oldest allowed TLS version.
    pub min_version: MinVersion,
    /// Cipher suites for TLS 1.2 by their Go names; empty means all supported suites. The suites of TLS 1.3
    /// are always enabled, as in Go.
    pub cipher_suites: Vec<String>,
}

/// Maximum number of bytes that TLS may encrypt ahead of a connection's socket. rustls's default of 64 KiB is
/// less than one frame of the tunnel with its header, and the rest of the frame would travel in its own
/// segment.
pub const BUFFER_BYTES: usize = 256 * 1024;

/// Returns bytes that both ends of a connection derive from the handshake (RFC 5705), and no other connection has.
/// Returns `None` before the end of the handshake and below TLS 1.3, whose handshakes a third party can make equal on
/// two connections (RFC 7627, 1).
pub fn export<D>(connection: &ConnectionCommon<D>, label: &[u8]) -> Option<[u8; 32]> {
    let version = connection.protocol_version();
    if version != Some(ProtocolVersion::TLSv1_3) {
        return None;
    }
    connection.export_keying_material([0; 32], label, None).ok()
}

/// Error for unusable TLS files or settings. The texts name the file and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file could not be read.
    #[error(
        "cannot read {0}: {1}; check that the file exists, is mounted, and may be read by this process"
    )]
    Read(PathBuf, std::io::Error),
    /// A file is too large for a PEM file.
    #[error("{0} is larger than {MAX_PEM_BYTES} bytes; is it a PEM file?")]
    TooLarge(PathBuf),
    /// A file contains no certificate.
    #[error(
        "{0} holds no certificate; it must be a PEM file with a `-----BEGIN CERTIFICATE-----` block (for DER, convert it with `openssl x509 -inform der`)"
    )]
    NoCertificate(PathBuf),
    /// A certificate in a file cannot be parsed, for the given reason.
    #[error("{0} holds a malformed certificate: {1}; replace the file")]
    MalformedCertificate(PathBuf, String),
    /// A file contains no private key.
    #[error(
        "{0} holds no private key; it must be a PEM file with a `PRIVATE KEY` (PKCS#8), `RSA PRIVATE KEY` (PKCS#1) or `EC PRIVATE KEY` (SEC1) block (decrypt an encrypted key with `openssl pkey`)"
    )]
    NoKey(PathBuf),
    /// A private key cannot be parsed, or its type is not supported, for the given reason.
    #[error(
        "{0} holds an unusable private key: {1}; RSA from 2048 bits, ECDSA P-256, P-384, P-521 and Ed25519 are supported"
    )]
    BadKey(PathBuf, String),
    /// The private key in the second file does not belong to the certificate in the first file.
    #[error(
        "the private key in {1} does not belong to the certificate in {0}; check that both files were issued together"
    )]
    KeyMismatch(PathBuf, PathBuf),
    /// A CA bundle cannot be used. The text begins like upstream's.
    #[error("failed to load CA cert: {0}")]
    Ca(Box<TlsError>),
    /// A cipher suite name that Go does not know.
    #[error("cipher suite {0} not supported, doesn't exist or considered as insecure")]
    UnknownSuite(String),
    /// rustls refused the combination of settings.
    #[error("TLS settings cannot be used: {0}")]
    Settings(String),
}

/// Settings that all configurations of one listener or client share, whatever the files contain.
#[derive(Clone)]
struct Settings {
    provider: Arc<CryptoProvider>,
    versions: &'static [&'static SupportedProtocolVersion],
    /// Application protocols, in order of preference.
    alpn: Vec<Vec<u8>>,
}

/// Creates the configuration of a TLS listener. With `client_ca`, every client must present a certificate
/// that chains to this CA. `alpn` is in order of preference; an empty list disables ALPN.
///
/// Clients cannot resume sessions, because rustls does not check a certificate again in a resumed session. Agents
/// connect rarely, and Go's clients of a front end do not resume sessions.
///
/// # Errors
///
/// Fails for an unknown cipher suite, or if rustls refuses the settings.
pub fn server_config(
    identity: &Identity,
    client_ca: Option<&TrustBundle>,
    alpn: &[&[u8]],
    options: &TlsOptions,
) -> Result<Arc<ServerConfig>, TlsError> {
    Settings::new(alpn, options)?.server(identity, client_ca)
}

/// Creates the configuration of a TLS client. The client verifies servers with `trust`, and presents
/// `identity` if the server requests a certificate. `alpn` is in order of preference; an empty list disables
/// ALPN.
///
/// # Errors
///
/// Fails for an unknown cipher suite, or if rustls refuses the settings.
pub fn client_config(
    trust: &TrustBundle,
    identity: Option<&Identity>,
    alpn: &[&[u8]],
    options: &TlsOptions,
) -> Result<Arc<ClientConfig>, TlsError> {
    Settings::new(alpn, options)?.client(trust, identity)
}

// === impl Settings ===

impl Settings {
    fn new(alpn: &[&[u8]], options: &TlsOptions) -> Result<Self, TlsError> {
        let provider = Arc::new(suites::provider(options)?);
        Ok(Self {
            versions: versions(options, &provider),
            provider,
            alpn: alpn.iter().map(|protocol| protocol.to_vec()).collect(),
        })
    }

    /// Creates the configuration of a listener.
    fn server(
        &self,
        identity: &Identity,
        client_ca: Option<&TrustBundle>,
    ) -> Result<Arc<ServerConfig>, TlsError> {
        let builder = ServerConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_protocol_versions(self.versions)
            .map_err(settings)?;
        let builder = match client_ca {
            Some(trust) => {
                let provider = Arc::clone(&self.provider);
                let mut verifier =
                    WebPkiClientVerifier::builder_with_provider(trust.roots(), provider);
                if !fit_request(&trust.roots()) {
                    verifier = verifier.clear_root_hint_subjects();
                }
                let verifier = verifier.build().map_err(settings)?;
                builder.with_client_cert_verifier(Arc::new(BoundedChain(verifier)))
            }
            None => builder.with_no_client_auth(),
        };
        let resolver = SingleCertAndKey::from(identity.certified_key());
        let mut config = builder.with_cert_resolver(Arc::new(resolver));
        config.alpn_protocols.clone_from(&self.alpn);
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        Ok(Arc::new(config))
    }

    /// Creates the configuration of a client. The client resumes no session: a resumption does not verify the server's
    /// certificate again, which may have expired.
    fn client(
        &self,
        trust: &TrustBundle,
        identity: Option<&Identity>,
    ) -> Result<Arc<ClientConfig>, TlsError> {
        let provider = Arc::clone(&self.provider);
        let verifier = WebPkiServerVerifier::builder_with_provider(trust.roots(), provider)
            .build()
            .map_err(settings)?;
        let builder = ClientConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_protocol_versions(self.versions)
            .map_err(settings)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(BoundedChain(verifier)));
        let mut config = match identity {
            Some(identity) => {
                let resolver = SingleCertAndKey::from(identity.certified_key());
                builder.with_client_cert_resolver(Arc::new(resolver))
            }
            None => builder.with_no_client_auth(),
        };
        config.alpn_protocols.clone_from(&self.alpn);
        config.resumption = Resumption::disabled();
        Ok(Arc::new(config))
    }
}

/// Returns the TLS versions to use. TLS 1.2 is included only if the options allow it and a suite for it is
/// enabled.
fn versions(
    options: &TlsOptions,
    provider: &CryptoProvider,
) -> &'static [&'static SupportedProtocolVersion] {
    static BOTH: [&SupportedProtocolVersion; 2] = [&TLS13, &TLS12];
    static NEWEST: [&SupportedProtocolVersion; 1] = [&TLS13];
    let has_tls12 = || provider.cipher_suites.iter().any(|s| s.version() == &TLS12);
    if options.min_version == MinVersion::Tls12 && has_tls12() {
        &BOTH
    } else {
        &NEWEST
    }
}

fn settings(error: impl std::fmt::Display) -> TlsError {
    TlsError::Settings(error.to_string())
}

/// Content of a PEM file, and the path of the file for errors.
#[derive(Clone, Copy)]
struct Pem<'a> {
    path: &'a Path,
    text: &'a [u8],
}

impl<'a> Pem<'a> {
    fn new(path: &'a Path, text: &'a [u8]) -> Self {
        Self { path, text }
    }
}

/// Reads a whole PEM file.
fn read_pem(path: &Path) -> Result<Vec<u8>, TlsError> {
    use std::io::Read;

    let failed = |reason| TlsError::Read(path.to_owned(), reason);
    let mut pem = Vec::new();
    std::fs::File::open(path)
        .map_err(failed)?
        .take(MAX_PEM_BYTES + 1)
        .read_to_end(&mut pem)
        .map_err(failed)?;
    if pem.len() as u64 > MAX_PEM_BYTES {
        return Err(TlsError::TooLarge(path.to_owned()));
    }
    Ok(pem)
}

#[cfg(test)]
mod tests;
