//! The limit for certificate chains of peers.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, SignatureScheme,
};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};

/// Maximum number of intermediate certificates. Usual chains have at most three. webpki tries the certificates with the
/// same name in every order: 326 orders of 5 certificates, and 28,961 of 8.
const MAX_INTERMEDIATES: usize = 5;

/// Maximum size of all intermediate certificates, in bytes. webpki parses each of them at every step of its search. A
/// certificate with an RSA key of 4096 bits has about 2 KiB.
const MAX_INTERMEDIATE_BYTES: usize = 16 * 1024;

/// Verifier that refuses long chains, and leaves other chains to the verifier inside.
#[derive(Debug)]
pub(super) struct BoundedChain<V>(pub(super) V);

/// Reason why a chain is refused before its verification.
#[derive(Debug, thiserror::Error)]
#[error(
    "the peer sent {certificates} intermediate certificates of {bytes} bytes, more than {MAX_INTERMEDIATES} certificates \
     or {MAX_INTERMEDIATE_BYTES} bytes; its certificate file must contain only its own certificate and the CAs between \
     this certificate and our CA bundle"
)]
pub(super) struct ChainTooLong {
    certificates: usize,
    bytes: usize,
}

fn check(intermediates: &[CertificateDer<'_>]) -> Result<(), Error> {
    let certificates = intermediates.len();
    let bytes: usize = intermediates.iter().map(|der| der.len()).sum();
    if certificates <= MAX_INTERMEDIATES && bytes <= MAX_INTERMEDIATE_BYTES {
        return Ok(());
    }
    let problem = ChainTooLong {
        certificates,
        bytes,
    };
    Err(CertificateError::Other(OtherError(Arc::new(problem))).into())
}

impl<V: ClientCertVerifier + ?Sized> ClientCertVerifier for BoundedChain<Arc<V>> {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.0.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        check(intermediates)?;
        self.0.verify_client_cert(end_entity, intermediates, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

impl<V: ServerCertVerifier> ServerCertVerifier for BoundedChain<Arc<V>> {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        check(intermediates)?;
        self.0
            .verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}
