//! A certificate authority and one leaf certificate per role, written as files for the programs' flags.
//!
//! Every call creates new keys and certificates, valid for [`VALID_DAYS`] days: long enough for a laptop that
//! sleeps, too short to be mistaken for real certificates. Keys are ECDSA P-256.

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

/// Validity of the certificates, in days.
pub const VALID_DAYS: i64 = 30;

/// Name of the lab's API server at the seed's front door, the external name of the lab's user cluster. RFC
/// 6761 reserves every name below `localhost` for this machine.
pub const CLUSTER_NAME: &str = "dev.localhost";

/// Name of the lab's Konnectivity server at the front door.
pub const KONNECTIVITY_NAME: &str = "konnectivity-server.dev.localhost";

/// Names in every leaf certificate; every name means this machine.
const NAMES: [&str; 5] = [
    "localhost",
    "127.0.0.1",
    "::1",
    CLUSTER_NAME,
    KONNECTIVITY_NAME,
];

/// Reason why certificates could not be created, written or loaded.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    /// A key or a certificate could not be created.
    #[error("cannot create a certificate: {0}")]
    Make(#[from] rcgen::Error),
    /// A file could not be written.
    #[error("cannot write {}: {error}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Error from the system.
        error: io::Error,
    },
    /// A file could not be read back as PEM.
    #[error("cannot load {}: {error}", path.display())]
    Load {
        /// The file.
        path: PathBuf,
        /// Error from the PEM parser.
        error: pem::Error,
    },
    /// The TLS library rejected a certificate or a key.
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

/// One authority and a leaf certificate for each of the four roles around a tunnel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pki {
    /// `ca.crt`, the issuer of all four leaves. The authority's key is not stored.
    pub ca: PathBuf,
    /// `server.crt`/`.key`: the server's certificate for front ends in TCP mode.
    pub server: Pair,
    /// `cluster.crt`/`.key`: the server's certificate for agents.
    pub cluster: Pair,
    /// `agent.crt`/`.key`: the agent's certificate for the server.
    pub agent: Pair,
    /// `client.crt`/`.key`: the certificate of a front-end client (kube-apiserver) for the server.
    pub client: Pair,
}

/// An untrusted authority and a client certificate from this authority, for tests of refusal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stranger {
    /// `other-ca.crt`.
    pub ca: PathBuf,
    /// `other-client.crt`/`.key`: well-formed, but signed by the wrong authority.
    pub client: Pair,
}

/// Certificates of an OpenVPN server and its clients. A client's name is the common name.
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
    /// Creates an authority and four leaves, and writes the files into `dir`, which must exist.
    ///
    /// # Errors
    /// Fails if a file cannot be written or already exists.
    pub fn create(dir: &Path) -> Result<Self, PkiError> {
        Self::create_valid_for(dir, VALID_DAYS)
    }

    /// Does the work of [`Pki::create`], for certificates that are valid for `days` days from now.
    ///
    /// # Errors
    /// Fails like [`Pki::create`].
    pub fn create_valid_for(dir: &Path, days: i64) -> Result<Self, PkiError> {
        let authority = Authority::valid_for("culvert lab CA", days)?;
        Ok(Self {
            ca: authority.write(dir, "ca")?,
            server: authority.issue(dir, "server", ExtendedKeyUsagePurpose::ServerAuth)?,
            cluster: authority.issue(dir, "cluster", ExtendedKeyUsagePurpose::ServerAuth)?,
            agent: authority.issue(dir, "agent", ExtendedKeyUsagePurpose::ClientAuth)?,
            client: authority.issue(dir, "client", ExtendedKeyUsagePurpose::ClientAuth)?,
        })
    }

    /// Creates a second, unrelated authority with one client certificate in `dir`.
    ///
    /// # Errors
    /// Fails like [`Pki::create`].
    pub fn create_other(dir: &Path) -> Result<Stranger, PkiError> {
        let authority = Authority::new("culvert lab stranger CA")?;
        Ok(Stranger {
            ca: authority.write(dir, "other-ca")?,
            client: authority.issue(dir, "other-client", ExtendedKeyUsagePurpose::ClientAuth)?,
        })
    }

    /// Creates an authority for OpenVPN, with a server and two clients, in `dir`.
    ///
    /// # Errors
    /// Fails like [`Pki::create`].
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

    /// Returns a client configuration that trusts this authority, sends the certificate `pair`, and offers
    /// `alpn` in order. An empty `alpn` sends no ALPN extension.
    ///
    /// # Errors
    /// Fails if a file cannot be loaded, or if the certificate and the key do not match.
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

/// Returns the certificates of a PEM file, in order.
///
/// # Errors
/// Fails if the file cannot be read or contains a malformed block.
pub fn load_certs(path: &Path) -> Result<Vec<CertificateDer<'static>>, PkiError> {
    CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect)
        .map_err(|error| PkiError::Load {
            path: path.to_owned(),
            error,
        })
}

/// Returns the first private key of a PEM file.
///
/// # Errors
/// Fails if the file cannot be read or contains no key.
pub fn load_key(path: &Path) -> Result<PrivateKeyDer<'static>, PkiError> {
    PrivateKeyDer::from_pem_file(path).map_err(|error| PkiError::Load {
        path: path.to_owned(),
        error,
    })
}

/// A signing certificate. The key lives only as long as this value.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    /// Validity of the certificates, in days.
    days: i64,
}

impl Authority {
    fn new(common_name: &str) -> Result<Self, PkiError> {
        Self::valid_for(common_name, VALID_DAYS)
    }

    fn valid_for(common_name: &str, days: i64) -> Result<Self, PkiError> {
        let mut params = parameters(common_name, Vec::new(), days)?;
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let issuer = CertifiedIssuer::self_signed(params, key)?;
        Ok(Self { issuer, days })
    }

    /// Writes the authority's own certificate to `stem.crt`.
    fn write(&self, dir: &Path, stem: &str) -> Result<PathBuf, PkiError> {
        write_new(dir.join(format!("{stem}.crt")), 0o644, &self.issuer.pem())
    }

    /// Signs a leaf certificate for one `purpose`, and writes `stem.crt` and `stem.key`.
    fn issue(
        &self,
        dir: &Path,
        stem: &str,
        purpose: ExtendedKeyUsagePurpose,
    ) -> Result<Pair, PkiError> {
        self.issue_as(dir, stem, &format!("culvert lab {stem}"), purpose)
    }

    /// Does the work of [`Self::issue`], with the given common name.
    fn issue_as(
        &self,
        dir: &Path,
        stem: &str,
        common_name: &str,
        purpose: ExtendedKeyUsagePurpose,
    ) -> Result<Pair, PkiError> {
        let names = NAMES.map(String::from).to_vec();
        let mut params = parameters(common_name, names, self.days)?;
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![purpose];
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let cert = params.signed_by(&key, &self.issuer)?;
        Ok(Pair {
            cert: write_new(dir.join(format!("{stem}.crt")), 0o644, &cert.pem())?,
            key: write_new(dir.join(format!("{stem}.key")), 0o600, &key.serialize_pem())?,
        })
    }
}

/// Returns the parameters that the authority and the leaves share.
fn parameters(
    common_name: &str,
    names: Vec<String>,
    days: i64,
) -> Result<CertificateParams, PkiError> {
    let mut params = CertificateParams::new(names)?;
    params
        .distinguished_name
        .push(DnType::CommonName, common_name);
    // Valid from yesterday, for peers with a slow clock.
    let now = OffsetDateTime::now_utc();
    params.not_before = now - Duration::days(1);
    params.not_after = now + Duration::days(days);
    Ok(params)
}

/// Writes a new file. Fails if the path already exists, even as a symbolic link.
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
