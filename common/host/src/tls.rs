//! Identities, trust and cipher suites: everything that turns files and flags into rustls
//! configurations.
//!
//! The crypto provider is passed explicitly, so no process-wide default has to be installed.
//! Configurations come as `Arc`s: whoever holds one may replace it while connections made from the
//! old one live on.
//!
//! Differences from Go that an operator can meet are handled or at least explained: X.509 v1
//! certificates work as our own identity ([`Identity`]), and [`explain()`] says in plain words why a
//! handshake failed and what to do.

mod explain;
mod identity;
mod suites;
mod trust;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::server::WebPkiClientVerifier;
use rustls::sign::SingleCertAndKey;
use rustls::version::{TLS12, TLS13};
use rustls::{ClientConfig, ServerConfig, SupportedProtocolVersion};

pub use explain::{explain, explain_tls};
pub use identity::Identity;
pub use suites::{SuiteSupport, go_suite};
pub use trust::TrustBundle;

/// Largest PEM file that is read, in bytes. The system's whole CA bundle has about 220 KiB.
const MAX_PEM_BYTES: u64 = 4 << 20;

/// The oldest TLS version that is spoken. rustls has none below 1.2.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MinVersion {
    /// TLS 1.2 and 1.3; upstream's default.
    #[default]
    Tls12,
    /// TLS 1.3 only.
    Tls13,
}

impl MinVersion {
    /// Go's name, as flags spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tls12 => "VersionTLS12",
            Self::Tls13 => "VersionTLS13",
        }
    }
}

/// What flags say about TLS.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsOptions {
    /// The oldest version spoken.
    pub min_version: MinVersion,
    /// Cipher suites for TLS 1.2 by their Go names; empty means all that we have. The suites of
    /// TLS 1.3 are always on, as in Go.
    pub cipher_suites: Vec<String>,
}

/// What a connection's TLS may encrypt ahead of its socket. rustls's own bound of 64 KiB is less
/// than one frame of the tunnel with its header: the rest would travel as a segment of its own.
pub const BUFFER_BYTES: usize = 256 * 1024;

/// Why TLS material can not be used. The texts name the file and say what to do.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file could not be read.
    #[error(
        "cannot read {path}: {reason}; check that the file exists, is mounted, and may be read by this process"
    )]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        reason: std::io::Error,
    },
    /// A file is larger than any PEM file should be.
    #[error("{path} is larger than {MAX_PEM_BYTES} bytes; is it a PEM file?")]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// A file holds no certificate.
    #[error(
        "{path} holds no certificate; it must be a PEM file with a `-----BEGIN CERTIFICATE-----` block (for DER, convert it with `openssl x509 -inform der`)"
    )]
    NoCertificate {
        /// The file.
        path: PathBuf,
    },
    /// A certificate in a file does not parse.
    #[error("{path} holds a malformed certificate: {reason}; write the file anew")]
    MalformedCertificate {
        /// The file.
        path: PathBuf,
        /// The parser's complaint.
        reason: String,
    },
    /// A file holds no private key.
    #[error(
        "{path} holds no private key; it must be a PEM file with a `PRIVATE KEY` (PKCS#8), `RSA PRIVATE KEY` (PKCS#1) or `EC PRIVATE KEY` (SEC1) block (decrypt an encrypted key with `openssl pkey`)"
    )]
    NoKey {
        /// The file.
        path: PathBuf,
    },
    /// A private key does not parse, or its kind is not supported.
    #[error(
        "{path} holds an unusable private key: {reason}; RSA from 2048 bits, ECDSA P-256, P-384, P-521 and Ed25519 are supported"
    )]
    BadKey {
        /// The file.
        path: PathBuf,
        /// The parser's complaint.
        reason: String,
    },
    /// The private key is not that of the certificate.
    #[error(
        "the private key in {key} does not belong to the certificate in {cert}; check that both files come from the same issue"
    )]
    KeyMismatch {
        /// The certificate's file.
        cert: PathBuf,
        /// The key's file.
        key: PathBuf,
    },
    /// A CA bundle can not be used; the text begins as upstream's.
    #[error("failed to load CA cert: {0}")]
    Ca(Box<TlsError>),
    /// A cipher suite's name is none that Go knows.
    #[error("cipher suite {0} not supported, doesn't exist or considered as insecure")]
    UnknownSuite(String),
    /// rustls refused the combination.
    #[error("TLS settings cannot be used: {0}")]
    Settings(String),
}

/// The configuration of a TLS listener. With `client_ca` every client must present a certificate
/// that chains to it. `alpn` in order of preference; empty negotiates none.
///
/// # Errors
///
/// Unknown cipher suites.
pub fn server_config(
    identity: &Identity,
    client_ca: Option<&TrustBundle>,
    alpn: &[&[u8]],
    options: &TlsOptions,
) -> Result<Arc<ServerConfig>, TlsError> {
    let provider = Arc::new(suites::provider(options)?);
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(versions(options, &provider))
        .map_err(settings)?;
    let builder = match client_ca {
        Some(trust) => {
            let verifier = WebPkiClientVerifier::builder_with_provider(trust.roots(), provider)
                .build()
                .map_err(settings)?;
            builder.with_client_cert_verifier(verifier)
        }
        None => builder.with_no_client_auth(),
    };
    let resolver = SingleCertAndKey::from(identity.certified_key());
    let mut config = builder.with_cert_resolver(Arc::new(resolver));
    config.alpn_protocols = alpn.iter().map(|protocol| protocol.to_vec()).collect();
    Ok(Arc::new(config))
}

/// The configuration of a TLS client that verifies servers by `trust` and presents `identity` when
/// asked. `alpn` in order of preference; empty offers none.
///
/// # Errors
///
/// Unknown cipher suites.
pub fn client_config(
    trust: &TrustBundle,
    identity: Option<&Identity>,
    alpn: &[&[u8]],
    options: &TlsOptions,
) -> Result<Arc<ClientConfig>, TlsError> {
    let provider = Arc::new(suites::provider(options)?);
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(versions(options, &provider))
        .map_err(settings)?
        .with_root_certificates(trust.roots());
    let mut config = match identity {
        Some(identity) => {
            let resolver = SingleCertAndKey::from(identity.certified_key());
            builder.with_client_cert_resolver(Arc::new(resolver))
        }
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = alpn.iter().map(|protocol| protocol.to_vec()).collect();
    Ok(Arc::new(config))
}

/// The versions to speak: 1.2 only if it is wanted and a suite is left for it.
fn versions(
    options: &TlsOptions,
    provider: &rustls::crypto::CryptoProvider,
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

/// Reads a PEM file whole.
fn read_pem(path: &Path) -> Result<Vec<u8>, TlsError> {
    use std::io::Read;

    let failed = |reason| TlsError::Read {
        path: path.to_owned(),
        reason,
    };
    let mut pem = Vec::new();
    std::fs::File::open(path)
        .map_err(failed)?
        .take(MAX_PEM_BYTES + 1)
        .read_to_end(&mut pem)
        .map_err(failed)?;
    if pem.len() as u64 > MAX_PEM_BYTES {
        return Err(TlsError::TooLarge {
            path: path.to_owned(),
        });
    }
    Ok(pem)
}

#[cfg(test)]
mod tests;
