//! The certificates of a cluster.

use std::path::{Path, PathBuf};

use culvert_kit::pki::Pair;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose,
};
use time::{Duration, OffsetDateTime};

/// A certificate authority. Its files and those of its certificates are in one directory.
pub(crate) struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    dir: PathBuf,
    /// PEM file of the authority's certificate.
    pub(crate) cert: PathBuf,
    /// PEM file of the authority's key.
    pub(crate) key: PathBuf,
}

/// Files of a key that signs tokens.
pub(crate) struct SigningKey {
    /// PEM file of the private key.
    pub(crate) private: PathBuf,
    /// PEM file of the public key.
    pub(crate) public: PathBuf,
}

impl Authority {
    /// Creates an authority and writes its certificate and key.
    pub(crate) fn create(dir: &Path, name: &str) -> Self {
        let mut params = parameters(Vec::new(), name, None);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let cert = dir.join(format!("{name}.crt"));
        std::fs::write(&cert, issuer.pem()).unwrap();
        let key = dir.join(format!("{name}.key"));
        std::fs::write(&key, issuer.key().serialize_pem()).unwrap();
        let dir = dir.to_owned();
        Self {
            issuer,
            dir,
            cert,
            key,
        }
    }

    /// Returns the authority's certificate as PEM text.
    pub(crate) fn pem(&self) -> String {
        self.issuer.pem()
    }

    /// Issues the certificate of a server with these names and addresses.
    pub(crate) fn server(&self, file: &str, names: &[&str]) -> Pair {
        let names = names.iter().copied().map(str::to_owned).collect();
        let params = parameters(names, file, None);
        self.issue(file, params, ExtendedKeyUsagePurpose::ServerAuth)
    }

    /// Issues the certificate of a user of the Kubernetes API.
    pub(crate) fn user(&self, file: &str, name: &str, group: Option<&str>) -> Pair {
        let params = parameters(Vec::new(), name, group);
        self.issue(file, params, ExtendedKeyUsagePurpose::ClientAuth)
    }

    fn issue(
        &self,
        file: &str,
        mut params: CertificateParams,
        purpose: ExtendedKeyUsagePurpose,
    ) -> Pair {
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![purpose];
        let key = KeyPair::generate().unwrap();
        let cert = params.signed_by(&key, &self.issuer).unwrap();
        let pair = Pair {
            cert: self.dir.join(format!("{file}.crt")),
            key: self.dir.join(format!("{file}.key")),
        };
        std::fs::write(&pair.cert, cert.pem()).unwrap();
        std::fs::write(&pair.key, key.serialize_pem()).unwrap();
        pair
    }
}

/// Writes a new key and its public key.
pub(crate) fn signing_key(dir: &Path, file: &str) -> SigningKey {
    let pair = KeyPair::generate().unwrap();
    let key = SigningKey {
        private: dir.join(format!("{file}.key")),
        public: dir.join(format!("{file}.pub")),
    };
    std::fs::write(&key.private, pair.serialize_pem()).unwrap();
    std::fs::write(&key.public, pair.public_key_pem()).unwrap();
    key
}

fn parameters(names: Vec<String>, name: &str, group: Option<&str>) -> CertificateParams {
    let mut params = CertificateParams::new(names).unwrap();
    params.distinguished_name.push(DnType::CommonName, name);
    if let Some(group) = group {
        let kind = DnType::OrganizationName;
        params.distinguished_name.push(kind, group);
    }
    let now = OffsetDateTime::now_utc();
    params.not_before = now - Duration::days(1);
    params.not_after = now + Duration::days(1);
    params
}
