//! The TLS errors, with remedies for the operator.

use culvert_certificates::PemError;
use rustls::{AlertDescription, CertificateError, ExtendedKeyPurpose, PeerIncompatible};
use thiserror::Error;

/// Error for a file that cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file is not valid PEM.
    #[error("the {what} is not valid PEM: {problem}")]
    Pem {
        /// Kind of the file.
        what: &'static str,
        /// Reason.
        problem: PemError,
    },
    /// The PEM file contains no certificate.
    #[error("the {0} file contains no certificate (-----BEGIN CERTIFICATE-----)")]
    Empty(&'static str),
    /// A CA certificate, or the list of CA certificates, cannot be used.
    #[error("the CA cannot be used: {0}")]
    Authority(String),
    /// The PEM file contains no CRL.
    #[error(
        "the CRL file contains no CRL in PEM (-----BEGIN X509 CRL-----); convert a DER file with `openssl crl -inform DER`"
    )]
    NoCrl,
    /// A CRL cannot be used.
    #[error("the CRL cannot be used: {0}")]
    Crl(String),
    /// The private key cannot be used.
    #[error(
        "the private key cannot be used (EC P-256, P-384, P-521, Ed25519, or RSA of 2048 bits and more): {0}"
    )]
    Key(String),
    /// Key and certificate do not belong together.
    #[error(
        "the private key does not belong to the certificate: compare the files of `cert` and `key`"
    )]
    KeyMismatch,
}

/// Reason why TLS failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TlsError {
    /// This side refused the peer's certificate.
    #[error("certificate of {subject}: {problem}")]
    Certificate {
        /// Subject and issuer, if readable.
        subject: String,
        /// Reason and remedy.
        problem: String,
    },
    /// An alert of the peer, or any other error.
    #[error("{0}")]
    Other(String),
}

impl TlsError {
    /// Converts the error of a configuration that rustls rejects.
    pub(super) fn setup(error: rustls::Error) -> Self {
        Self::Other(error.to_string())
    }

    /// Converts an error of rustls. `refused` is the verifier's note about a refused certificate.
    pub(super) fn new(error: &rustls::Error, refused: Option<&(String, String)>) -> Self {
        match (error, refused) {
            (_, Some((subject, problem))) => Self::Certificate {
                subject: subject.clone(),
                problem: problem.clone(),
            },
            (rustls::Error::AlertReceived(alert), _) => Self::Other(explain_alert(*alert)),
            (rustls::Error::NoCertificatesPresented, _) => {
                Self::Other("the peer sent no certificate: a client needs `cert` and `key`".into())
            }
            (rustls::Error::PeerIncompatible(why), _) => Self::Other(explain_incompatible(why)),
            (error, _) => Self::Other(error.to_string()),
        }
    }
}

/// Describes the peer's alert with its usual meaning.
fn explain_alert(alert: AlertDescription) -> String {
    let hint = match alert {
        AlertDescription::UnknownCA => "the peer's `ca` did not sign our certificate",
        AlertDescription::CertificateExpired => {
            "our certificate has expired or is not valid yet, or the peer's clock is wrong"
        }
        AlertDescription::CertificateRevoked => "our certificate is revoked by the peer's CRL",
        AlertDescription::UnsupportedCertificate => {
            "our certificate is not made for this role: a server needs the extended key usage serverAuth, a client clientAuth"
        }
        AlertDescription::BadCertificate
        | AlertDescription::CertificateUnknown
        | AlertDescription::AccessDenied
        | AlertDescription::DecryptError => {
            "the peer does not accept our certificate; its log says why"
        }
        AlertDescription::CertificateRequired => "the peer requires a certificate and we sent none",
        AlertDescription::ProtocolVersion => {
            "no common TLS version: this side supports TLS 1.2 and 1.3"
        }
        AlertDescription::HandshakeFailure => {
            "no common cipher suite, curve or signature algorithm: this side supports ECDHE with AES-GCM or ChaCha20-Poly1305"
        }
        _ => return format!("the peer ended TLS with the alert {alert:?}"),
    };
    format!("the peer ended TLS with the alert {alert:?}: {hint}")
}

fn explain_incompatible(why: &PeerIncompatible) -> String {
    let hint = match why {
        PeerIncompatible::ServerDoesNotSupportTls12Or13
        | PeerIncompatible::ServerTlsVersionIsDisabledByOurConfig
        | PeerIncompatible::Tls12NotOffered
        | PeerIncompatible::Tls12NotOfferedOrEnabled
        | PeerIncompatible::Tls13RequiredForQuic => {
            "TLS 1.2 (ECDHE with AES-GCM or ChaCha20-Poly1305) or TLS 1.3 is needed: OpenVPN 2.4 or newer"
        }
        PeerIncompatible::NoCipherSuitesInCommon => {
            "no common cipher suite: this side supports ECDHE with AES-GCM or ChaCha20-Poly1305; check `tls-cipher`"
        }
        PeerIncompatible::NoKxGroupsInCommon => {
            "no common curve, or the peer permits no ECDHE: check `tls-cipher`, `ecdh-curve` and `tls-groups`"
        }
        PeerIncompatible::NoSignatureSchemesInCommon
        | PeerIncompatible::NoCertificateRequestSignatureSchemesInCommon => {
            "no common signature algorithm: this side supports RSA, ECDSA or Ed25519 with SHA-256 or better"
        }
        _ => return format!("the peer's TLS is incompatible: {why:?}"),
    };
    format!("the peer's TLS is incompatible ({why:?}): {hint}")
}

/// Describes why webpki refused a certificate, if no outdated property explains the refusal.
pub(super) fn explain_certificate(error: &rustls::Error) -> String {
    let rustls::Error::InvalidCertificate(error) = error else {
        return error.to_string();
    };
    match error {
        CertificateError::UnknownIssuer => {
            "not signed by our CA: compare `ca` on both sides; if there is an intermediate CA, its certificate has to be in the peer's `cert` file or in our `ca` file".into()
        }
        CertificateError::BadSignature => {
            "not signed by our CA, but by one of the same name: was the CA created again? compare `ca` on both sides".into()
        }
        CertificateError::UnsupportedSignatureAlgorithmContext { .. } => {
            "signed with an algorithm that is not supported: issue it again with SHA-256 or better".into()
        }
        CertificateError::UnsupportedSignatureAlgorithmForPublicKeyContext { .. } => {
            "not signed by our CA, but by one of the same name with another kind of key: was the CA created again? compare `ca` on both sides".into()
        }
        CertificateError::Expired => "expired: renew it, or look at the clocks".into(),
        CertificateError::ExpiredContext { .. } => {
            format!("{error}: renew it, or look at the clocks")
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            format!("{error}: look at the clocks")
        }
        CertificateError::Revoked => "revoked by the CRL".into(),
        CertificateError::InvalidPurposeContext { required, .. } => format!(
            "wrong extended key usage: {} is needed",
            match required {
                ExtendedKeyPurpose::ClientAuth => "clientAuth (a client's certificate)".to_owned(),
                ExtendedKeyPurpose::ServerAuth => "serverAuth (a server's certificate)".to_owned(),
                other => other.to_string(),
            }
        ),
        CertificateError::ExpiredRevocationList | CertificateError::ExpiredRevocationListContext { .. } => {
            "our CRL has expired: renew it".into()
        }
        error => error.to_string(),
    }
}
