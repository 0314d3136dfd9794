//! A certificate authority and one leaf per role, written as the files that operators' flags name.
//!
//! Everything is made afresh on every call and is good for [`VALID_DAYS`] days: enough for a
//! laptop that sleeps, too little to be mistaken for a real one. Keys are ECDSA P-256.

use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256,
};
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::pem::{self, PemObject as _};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use time::{Duration, OffsetDateTime};

/// How long the certificates are good for, in days.
pub const VALID_DAYS: i64 = 30;

/// The external name of the lab's user cluster: that of its API server at the seed's front door.
/// RFC 6761 leaves every name below `localhost` to this machine.
pub const CLUSTER_NAME: &str = "dev.localhost";

/// The name of that cluster's Konnectivity server at the front door.
pub const KONNECTIVITY_NAME: &str = "konnectivity-server.dev.localhost";

/// The names that every leaf carries; all of them lead to this machine.
const NAMES: [&str; 5] = [
    "localhost",
    "127.0.0.1",
    "::1",
    CLUSTER_NAME,
    KONNECTIVITY_NAME,
];

/// Why certificates could not be made, written or loaded.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    /// Making a key or a certificate failed.
    #[error("cannot make a certificate: {0}")]
    Make(#[from] rcgen::Error),
    /// A file could not be written.
    #[error("cannot write {}: {error}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// A file could not be read back as PEM.
    #[error("cannot load {}: {error}", path.display())]
    Load {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        error: pem::Error,
    },
    /// The TLS library refused what was loaded.
    #[error("unusable certificate: {0}")]
    Tls(#[from] rustls::Error),
}

/// A certificate and its key, as PEM files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pair {
    /// The certificate, without its issuer.
    pub cert: PathBuf,
    /// The PKCS#8 key; mode 0600.
    pub key: PathBuf,
}

/// One authority and a leaf for each of the four roles around a tunnel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pki {
    /// `ca.crt`, which signed all four leaves; its key is not kept.
    pub ca: PathBuf,
    /// `server.crt`/`.key`: what the server shows to front ends in TCP mode.
    pub server: Pair,
    /// `cluster.crt`/`.key`: what the server shows to agents.
    pub cluster: Pair,
    /// `agent.crt`/`.key`: what the agent shows to the server.
    pub agent: Pair,
    /// `client.crt`/`.key`: what a front end (kube-apiserver) shows to the server.
    pub client: Pair,
}

/// An authority that nobody trusts and a client certificate from it, for tests of refusal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stranger {
    /// `other-ca.crt`.
    pub ca: PathBuf,
    /// `other-client.crt`/`.key`: well formed, signed by the wrong authority.
    pub client: Pair,
}

/// The certificates of an OpenVPN server and its clients. A client's name is its common name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenVpnPki {
    /// `openvpn-ca.crt`.
    pub ca: PathBuf,
    /// `openvpn-server.crt`/`.key`.
    pub server: Pair,
    /// `user-cluster-client.crt`/`.key`.
    pub user_cluster: Pair,
    /// `stock-client.crt`/`.key`.
    pub stock: Pair,
}

impl Pki {
    /// Makes an authority and four leaves and writes them into `dir`, which must exist.
    ///
    /// # Errors
    /// When a file cannot be written, or exists already.
    pub fn create(dir: &Path) -> Result<Self, PkiError> {
        let authority = Authority::new("culvert lab CA")?;
        Ok(Self {
            ca: authority.write(dir, "ca")?,
            server: authority.issue(dir, "server", ExtendedKeyUsagePurpose::ServerAuth)?,
            cluster: authority.issue(dir, "cluster", ExtendedKeyUsagePurpose::ServerAuth)?,
            agent: authority.issue(dir, "agent", ExtendedKeyUsagePurpose::ClientAuth)?,
            client: authority.issue(dir, "client", ExtendedKeyUsagePurpose::ClientAuth)?,
        })
    }

    /// Makes a second, unrelated authority with one client certificate in `dir`.
    ///
    /// # Errors
    /// As for [`Pki::create`].
    pub fn create_other(dir: &Path) -> Result<Stranger, PkiError> {
        let authority = Authority::new("culvert lab stranger CA")?;
        Ok(Stranger {
            ca: authority.write(dir, "other-ca")?,
            client: authority.issue(dir, "other-client", ExtendedKeyUsagePurpose::ClientAuth)?,
        })
    }

    /// Makes an authority for OpenVPN alone, with a server and two clients, in `dir`.
    ///
    /// # Errors
    /// As for [`Pki::create`].
    pub fn create_openvpn(dir: &Path) -> Result<OpenVpnPki, PkiError> {
        let authority = Authority::new("culvert lab OpenVPN CA")?;
        let issue = |name, purpose| authority.issue_as(dir, name, name, purpose);
        Ok(OpenVpnPki {
            ca: authority.write(dir, "openvpn-ca")?,
            server: issue("openvpn-server", ExtendedKeyUsagePurpose::ServerAuth)?,
            user_cluster: issue("user-cluster-client", ExtendedKeyUsagePurpose::ClientAuth)?,
            stock: issue("stock-client", ExtendedKeyUsagePurpose::ClientAuth)?,
        })
    }

    /// A client configuration that trusts this authority, shows `pair` and offers `alpn` in order
    /// (an empty list sends no ALPN at all).
    ///
    /// # Errors
    /// When a file cannot be loaded or the pair does not fit together.
    pub fn client_tls(&self, pair: &Pair, alpn: &[&str]) -> Result<Arc<ClientConfig>, PkiError> {
        let mut roots = RootCertStore::empty();
        for cert in load_certs(&self.ca)? {
            roots.add(cert)?;
        }
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_client_auth_cert(load_certs(&pair.cert)?, load_key(&pair.key)?)?;
        config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
        Ok(Arc::new(config))
    }
}

/// The certificates of a PEM file, in order.
///
/// # Errors
/// When the file cannot be read or holds a malformed block.
pub fn load_certs(path: &Path) -> Result<Vec<CertificateDer<'static>>, PkiError> {
    CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect)
        .map_err(|error| PkiError::Load {
            path: path.to_owned(),
            error,
        })
}

/// The first private key of a PEM file.
///
/// # Errors
/// When the file cannot be read or holds no key.
pub fn load_key(path: &Path) -> Result<PrivateKeyDer<'static>, PkiError> {
    PrivateKeyDer::from_pem_file(path).map_err(|error| PkiError::Load {
        path: path.to_owned(),
        error,
    })
}

/// A signing certificate whose key lives only as long as this value.
struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new(common_name: &str) -> Result<Self, PkiError> {
        let mut params = parameters(common_name, Vec::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        Ok(Self(CertifiedIssuer::self_signed(params, key)?))
    }

    /// Writes the authority's own certificate as `stem.crt`.
    fn write(&self, dir: &Path, stem: &str) -> Result<PathBuf, PkiError> {
        write_new(dir.join(format!("{stem}.crt")), 0o644, &self.0.pem())
    }

    /// Signs a leaf for one `purpose` and writes it as `stem.crt` and `stem.key`.
    fn issue(
        &self,
        dir: &Path,
        stem: &str,
        purpose: ExtendedKeyUsagePurpose,
    ) -> Result<Pair, PkiError> {
        self.issue_as(dir, stem, &format!("culvert lab {stem}"), purpose)
    }

    /// The same with a common name of its own.
    fn issue_as(
        &self,
        dir: &Path,
        stem: &str,
        common_name: &str,
        purpose: ExtendedKeyUsagePurpose,
    ) -> Result<Pair, PkiError> {
        let names = NAMES.map(String::from).to_vec();
        let mut params = parameters(common_name, names)?;
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![purpose];
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let cert = params.signed_by(&key, &self.0)?;
        Ok(Pair {
            cert: write_new(dir.join(format!("{stem}.crt")), 0o644, &cert.pem())?,
            key: write_new(dir.join(format!("{stem}.key")), 0o600, &key.serialize_pem())?,
        })
    }
}

/// What authority and leaves have in common.
fn parameters(common_name: &str, names: Vec<String>) -> Result<CertificateParams, PkiError> {
    let mut params = CertificateParams::new(names)?;
    params
        .distinguished_name
        .push(DnType::CommonName, common_name);
    // A day in the past, for peers whose clock runs behind.
    let now = OffsetDateTime::now_utc();
    params.not_before = now - Duration::days(1);
    params.not_after = now + Duration::days(VALID_DAYS);
    Ok(params)
}

/// Writes a new file; never follows or replaces one that is already there.
fn write_new(path: PathBuf, mode: u32, text: &str) -> Result<PathBuf, PkiError> {
    let written = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(&path)
        .and_then(|mut file| file.write_all(text.as_bytes()));
    match written {
        Ok(()) => Ok(path),
        Err(error) => Err(PkiError::Write { path, error }),
    }
}

#[cfg(test)]
mod tests;
