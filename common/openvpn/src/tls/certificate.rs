//! The certificate properties that webpki does not report: names for log and policy, usages, and the reasons
//! for which webpki refuses old certificates.

use aws_lc_rs::digest;
use rustls::sign::SigningKey;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject as _;
use x509_parser::prelude::{ASN1Time, FromDer, X509Certificate, X509Version};

use crate::Role;

/// Names in a verified certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerIdentity {
    /// Last CN of the subject, as in OpenVPN.
    pub common_name: String,
    /// Whole subject in OpenVPN's format: `C=DE, O=Example, CN=client`.
    pub subject: String,
    /// SHA-256 of the certificate.
    pub fingerprint: [u8; 32],
}

impl PeerIdentity {
    /// Reads the names in a certificate that the caller has verified. Returns `None` if the certificate
    /// cannot be parsed or has no common name.
    pub fn new(der: &CertificateDer<'_>) -> Option<Self> {
        let (_, certificate) = X509Certificate::from_der(der).ok()?;
        let common_name = certificate
            .subject()
            .iter_common_name()
            .last()?
            .as_str()
            .ok()?
            .to_owned();
        let fingerprint = digest::digest(&digest::SHA256, der);
        let fingerprint = *fingerprint.as_ref().first_chunk()?;
        Some(Self {
            common_name,
            subject: certificate.subject().to_string(),
            fingerprint,
        })
    }
}

/// Presence of the key usage extension and of the two extended key usages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Usage {
    pub(super) key_usage: bool,
    pub(super) server_auth: bool,
    pub(super) client_auth: bool,
}

impl Usage {
    pub(super) fn new(der: &CertificateDer<'_>) -> Self {
        let Ok((_, certificate)) = X509Certificate::from_der(der) else {
            return Self::default();
        };
        let extended = certificate
            .extended_key_usage()
            .ok()
            .flatten()
            .map(|extension| extension.value);
        Self {
            key_usage: certificate.key_usage().ok().flatten().is_some(),
            server_auth: extended.is_some_and(|usage| usage.server_auth),
            client_auth: extended.is_some_and(|usage| usage.client_auth),
        }
    }
}

/// Returns the reason why peers will refuse this side's certificate, the PEM file `cert`: out of date, or
/// made for the other role. Many peers refuse a certificate silently.
pub fn certificate_problem(certificate: &[u8], role: Role) -> Option<String> {
    let own = CertificateDer::from_pem_slice(certificate).ok()?;
    let (_, certificate) = X509Certificate::from_der(&own).ok()?;
    let (validity, now) = (certificate.validity(), ASN1Time::now());
    if validity.not_after < now {
        return Some(format!(
            "expired at {}: renew it, or look at the clock",
            validity.not_after
        ));
    }
    if validity.not_before > now {
        return Some(format!(
            "not valid before {}: look at the clock",
            validity.not_before
        ));
    }
    let extended = certificate.extended_key_usage().ok().flatten()?.value;
    let (fits, needed, owner) = match role {
        Role::Server => (extended.server_auth, "serverAuth", "server"),
        Role::Client => (extended.client_auth, "clientAuth", "client"),
    };
    let fits = fits || extended.any;
    (!fits).then(|| {
        format!("wrong extended key usage: {needed} is needed, is it a {owner}'s certificate?")
    })
}

/// Returns true if the key belongs to the first certificate of the chain, or if that certificate cannot be read: then the peer
/// decides.
pub(super) fn is_key_of(chain: &[CertificateDer<'_>], key: &dyn SigningKey) -> bool {
    chain.first().is_some_and(|leaf| {
        X509Certificate::from_der(leaf).map_or(true, |(_, leaf)| {
            culvert_certificates::is_key_of(&leaf, key)
        })
    })
}

/// Returns subject and issuer for a log line.
pub(super) fn describe(der: &CertificateDer<'_>) -> String {
    match X509Certificate::from_der(der) {
        Ok((_, certificate)) => format!(
            "\"{}\" (issued by \"{}\")",
            shorten(certificate.subject().to_string()),
            shorten(certificate.issuer().to_string())
        ),
        Err(_) => "an unreadable certificate".into(),
    }
}

/// Shortens a name from an untrusted peer for the log, and removes control characters.
fn shorten(name: String) -> String {
    name.chars().filter(|c| !c.is_control()).take(200).collect()
}

/// Describes outdated properties in a chain that webpki does not accept. Takes precedence over the error of
/// webpki, which often names only a consequence.
pub(super) fn outdated(
    leaf: &CertificateDer<'_>,
    intermediates: &[CertificateDer<'_>],
) -> Option<String> {
    for (place, der) in std::iter::once(leaf).chain(intermediates).enumerate() {
        let Ok((_, certificate)) = X509Certificate::from_der(der) else {
            continue;
        };
        let what = if place == 0 {
            "it".to_owned()
        } else {
            format!("the chain's {}", describe(der))
        };
        let algorithm = certificate.signature_algorithm.algorithm.to_id_string();
        // sha1WithRSAEncryption, its old OIW form, ecdsa-with-SHA1, dsa-with-sha1, md5WithRSAEncryption
        if [
            "1.2.840.113549.1.1.5",
            "1.3.14.3.2.29",
            "1.2.840.10045.4.1",
            "1.2.840.10040.4.3",
            "1.2.840.113549.1.1.4",
        ]
        .contains(&algorithm.as_str())
        {
            return Some(format!(
                "{what} is signed with SHA-1 or MD5, which is no longer accepted: issue it again with SHA-256 (EasyRSA 3 does)"
            ));
        }
        if certificate.version() != X509Version::V3 {
            return Some(format!(
                "{what} is an X.509 v1 certificate, which is not accepted: issue it again as v3, with extensions (EasyRSA 3 does)"
            ));
        }
        if place == 0 && certificate.is_ca() {
            return Some(
                "it is a CA's own certificate (basic constraints CA:TRUE), which cannot be used by a client or server: issue one with CA:FALSE"
                    .into(),
            );
        }
    }
    None
}
