//! The two certificate verifiers: webpki's checks with OpenVPN's additions. Both verifiers record the reason
//! of a refusal, because rustls forwards only the kind of an error.

use std::sync::{Arc, OnceLock};

use culvert_certificates::check_chain;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature};
use rustls::server::ParsedCertificate;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, RootCertStore,
    SignatureScheme,
};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};

use super::certificate::{self, PeerIdentity, Usage};
use super::error::explain_certificate;
use super::revocation::Authority;

/// Subject and problem of a certificate that the verifier of a connection refused.
pub(super) type Refused = Arc<OnceLock<(String, String)>>;

/// `verify-x509-name`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NameCheck {
    /// `name`: the whole common name.
    CommonName(String),
    /// `name-prefix`: a prefix of the common name.
    CommonNamePrefix(String),
    /// `subject` (the default in OpenVPN): the whole subject, as in [`PeerIdentity::subject`].
    Subject(String),
}

/// Client's requirements for the server's certificate, in addition to the CA's signature.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerCheck {
    /// `remote-cert-tls server`: key usage and the extended key usage serverAuth must be present. Otherwise
    /// any client of the same CA with a certificate without extended key usage could pose as the server.
    pub require_usage: bool,
    /// `verify-x509-name`.
    pub name: Option<NameCheck>,
}

/// Records a refusal for the log, and returns the error for the alert to the peer.
fn note(
    refused: &Refused,
    leaf: &CertificateDer<'_>,
    intermediates: &[CertificateDer<'_>],
    error: Error,
) -> Error {
    let problem =
        certificate::outdated(leaf, intermediates).unwrap_or_else(|| explain_certificate(&error));
    let _ = refused.set((certificate::describe(leaf), problem));
    match error {
        // The issuer has the right name but another key, for example after the CA was created again.
        Error::InvalidCertificate(CertificateError::BadSignature) => {
            Error::InvalidCertificate(CertificateError::UnknownIssuer)
        }
        error => error,
    }
}

/// Records a refusal with the text `problem`, and returns the error for the alert to the peer.
fn refuse(
    refused: &Refused,
    leaf: &CertificateDer<'_>,
    problem: impl Into<String>,
    error: CertificateError,
) -> Error {
    let _ = refused.set((certificate::describe(leaf), problem.into()));
    Error::InvalidCertificate(error)
}

/// Refuses a long chain, whose verification would occupy the thread for seconds.
fn check_length(
    refused: &Refused,
    leaf: &CertificateDer<'_>,
    intermediates: &[CertificateDer<'_>],
) -> Result<(), Error> {
    check_chain(intermediates).map_err(|error| {
        let problem = format!(
            "sent with {error}: the peer's `cert` file must contain only its own certificate and the CAs between this certificate and our `ca`"
        );
        let error = CertificateError::ApplicationVerificationFailure;
        refuse(refused, leaf, problem, error)
    })
}

/// Returns true for an error about a certificate that none of the CAs signed. webpki reports an unsupported signature
/// algorithm if a CA has the name of the issuer and a key of another type.
fn is_of_other(error: &Error) -> bool {
    let Error::InvalidCertificate(error) = error else {
        return false;
    };
    matches!(
        error,
        CertificateError::UnknownIssuer
            | CertificateError::BadSignature
            | CertificateError::UnsupportedSignatureAlgorithmContext { .. }
            | CertificateError::UnsupportedSignatureAlgorithmForPublicKeyContext { .. }
    )
}

/// Verifier of client certificates. Each connection needs its own `refused`.
#[derive(Clone, Debug)]
pub(super) struct ClientVerifier {
    /// Verifiers of the chain, one for each group of [`revocation`](super::revocation).
    pub(super) webpki: Arc<[Arc<dyn ClientCertVerifier>]>,
    /// CAs of all groups.
    pub(super) authorities: Arc<[Authority]>,
    pub(super) algorithms: WebPkiSupportedAlgorithms,
    pub(super) require_usage: bool,
    pub(super) refused: Refused,
}

impl ClientVerifier {
    /// Verifies the chain with any of the verifiers.
    fn verify_chain(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        if let [webpki] = &*self.webpki {
            return webpki.verify_client_cert(leaf, intermediates, now);
        }
        // A CA may have a second certificate, signed by a CA of another group, whose verifier does not have its CRL.
        let is_ours = |der| Authority::new(der).is_some_and(|ca| self.authorities.contains(&ca));
        let intermediates = intermediates.iter().filter(|der| !is_ours(der));
        let intermediates: Vec<_> = intermediates.cloned().collect();
        let mut refusal = Error::InvalidCertificate(CertificateError::UnknownIssuer);
        for webpki in &*self.webpki {
            match webpki.verify_client_cert(leaf, &intermediates, now) {
                Ok(verified) => return Ok(verified),
                Err(error) if is_of_other(&refusal) => refusal = error,
                Err(_) => {}
            }
        }
        Err(refusal)
    }

    /// Checks the requirements of OpenVPN's options, in addition to the chain.
    fn check(&self, leaf: &CertificateDer<'_>) -> Result<(), (&'static str, CertificateError)> {
        if PeerIdentity::new(leaf).is_none() {
            let problem = "it has no common name (CN), which identifies a client";
            return Err((problem, CertificateError::BadEncoding));
        }
        let usage = Usage::new(leaf);
        if self.require_usage && !(usage.key_usage && usage.client_auth) {
            let problem = "remote-cert-tls client: key usage and the extended key usage clientAuth have to be present";
            return Err((problem, CertificateError::InvalidPurpose));
        }
        Ok(())
    }
}

impl ClientCertVerifier for ClientVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        // The first group has a CA of each name.
        let first = self.webpki.first();
        first.map_or(&[], |webpki| webpki.root_hint_subjects())
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        check_length(&self.refused, end_entity, intermediates)?;
        let verified = self
            .verify_chain(end_entity, intermediates, now)
            .map_err(|error| note(&self.refused, end_entity, intermediates, error))?;
        self.check(end_entity)
            .map_err(|(problem, error)| refuse(&self.refused, end_entity, problem, error))?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, cert, dss, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

/// Verifier of server certificates. Host names are never matched. Each connection needs its own `refused`.
#[derive(Clone, Debug)]
pub(super) struct ServerVerifier {
    pub(super) roots: Arc<RootCertStore>,
    pub(super) check: ServerCheck,
    pub(super) algorithms: WebPkiSupportedAlgorithms,
    pub(super) refused: Refused,
}

impl ServerVerifier {
    /// Checks the requirements of OpenVPN's options, in addition to the chain.
    fn check(&self, leaf: &CertificateDer<'_>) -> Result<(), (String, CertificateError)> {
        let usage = Usage::new(leaf);
        if self.check.require_usage && !(usage.key_usage && usage.server_auth) {
            let problem = "remote-cert-tls server: key usage and the extended key usage serverAuth have to be present";
            return Err((problem.into(), CertificateError::InvalidPurpose));
        }
        let Some(check) = &self.check.name else {
            return Ok(());
        };
        let Some(identity) = PeerIdentity::new(leaf) else {
            let problem = "it has no common name (CN)".into();
            return Err((problem, CertificateError::BadEncoding));
        };
        let (wanted, matches) = match check {
            NameCheck::CommonName(name) => (name, identity.common_name == *name),
            NameCheck::CommonNamePrefix(prefix) => {
                (prefix, identity.common_name.starts_with(prefix.as_str()))
            }
            NameCheck::Subject(subject) => (subject, identity.subject == *subject),
        };
        if matches {
            return Ok(());
        }
        let problem = format!("verify-x509-name: the name does not match \"{wanted}\"");
        Err((problem, CertificateError::ApplicationVerificationFailure))
    }
}

impl ServerCertVerifier for ServerVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        check_length(&self.refused, end_entity, intermediates)?;
        ParsedCertificate::try_from(end_entity)
            .and_then(|parsed| {
                verify_server_cert_signed_by_trust_anchor(
                    &parsed,
                    &self.roots,
                    intermediates,
                    now,
                    self.algorithms.all,
                )
            })
            .map_err(|error| note(&self.refused, end_entity, intermediates, error))?;
        self.check(end_entity)
            .map_err(|(problem, error)| refuse(&self.refused, end_entity, problem, error))?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, cert, dss, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}
