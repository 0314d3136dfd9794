//! Explanations of handshake failures for operators.
//!
//! rustls reports the symptom. An operator needs to know the side at fault and the remedy.

use std::io;
use std::net::IpAddr;

use rustls::{
    AlertDescription, CertificateError, Error, InvalidMessage, OtherError, PeerIncompatible,
    PeerMisbehaved,
};
use rustls_pki_types::UnixTime;

use super::chain::RefusedChain;
use crate::reload::date;

/// Explains an error of a TLS stream or handshake. Other errors are returned as their own text.
pub fn explain(error: &io::Error) -> String {
    let inner = error.get_ref();
    if let Some(tls) = inner.and_then(|inner| inner.downcast_ref::<Error>()) {
        return explain_tls(tls);
    }
    match error.kind() {
        io::ErrorKind::UnexpectedEof
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::BrokenPipe => {
            "the peer closed the connection during the handshake; either the peer does not \
             use TLS on this port, or the peer refused us and its log has the reason, or a load balancer in between has \
             no ready peer"
                .to_owned()
        }
        _ => error.to_string(),
    }
}

/// Explains the alert of a server that refused our certificate, from the text of an error; `None` for other errors. In
/// TLS 1.3 a client receives such an alert after its own handshake, and h2 passes on only the text of an error.
pub fn explain_refusal(text: &str) -> Option<String> {
    let is_refusal = |alert: &AlertDescription| text == Error::AlertReceived(*alert).to_string();
    REFUSALS.into_iter().find(is_refusal).map(alert_received)
}

/// Explains a rustls error: the cause, and in common cases the remedy.
pub fn explain_tls(error: &Error) -> String {
    match error {
        Error::InvalidCertificate(problem) => certificate(problem),
        Error::AlertReceived(alert) => alert_received(*alert),
        Error::NoCertificatesPresented => {
            "the peer presented no client certificate; give it a certificate and key issued by our \
             client CA"
                .to_owned()
        }
        Error::InvalidMessage(InvalidMessage::InvalidContentType)
        | Error::InvalidMessage(InvalidMessage::UnknownProtocolVersion)
        | Error::InvalidMessage(InvalidMessage::MessageTooLarge) => {
            "the peer does not speak TLS; check that it connects to the right port, and with TLS"
                .to_owned()
        }
        Error::NoApplicationProtocol
        | Error::PeerMisbehaved(PeerMisbehaved::SelectedUnofferedApplicationProtocol) => {
            ALPN_MISMATCH.to_owned()
        }
        Error::PeerIncompatible(problem) => incompatible(problem),
        other => other.to_string(),
    }
}

const ALPN_MISMATCH: &str = "no common application protocol (ALPN); gRPC peers must offer `h2`, \
                             and HTTP CONNECT clients `http/1.1`: is this the right port?";

/// Alerts about the certificate of the receiver.
const REFUSALS: [AlertDescription; 9] = [
    AlertDescription::CertificateRequired,
    AlertDescription::BadCertificate,
    AlertDescription::UnsupportedCertificate,
    AlertDescription::CertificateRevoked,
    AlertDescription::CertificateExpired,
    AlertDescription::CertificateUnknown,
    AlertDescription::UnknownCA,
    AlertDescription::AccessDenied,
    AlertDescription::DecryptError,
];

#[allow(deprecated)] // rustls no longer returns the variant, but other verifiers may.
fn certificate(problem: &CertificateError) -> String {
    match problem {
        CertificateError::UnknownIssuer => {
            "the peer's certificate is signed by a CA that is not in our CA bundle; compare its \
             issuer (`openssl x509 -noout -issuer`) with the bundle"
                .to_owned()
        }
        CertificateError::BadSignature => {
            "the peer's certificate names one of our CAs but was not signed with its key; was the \
             CA reissued?"
                .to_owned()
        }
        CertificateError::UnsupportedSignatureAlgorithm
        | CertificateError::UnsupportedSignatureAlgorithmContext { .. } => {
            "the peer's certificate, or a certificate of its chain, is signed with an algorithm that is not supported, such as \
             SHA-1; reissue it with SHA-256 or better"
                .to_owned()
        }
        // A CA with the name of the issuer has a key of another kind.
        CertificateError::UnsupportedSignatureAlgorithmForPublicKeyContext { .. } => {
            "the peer's certificate names one of our CAs but was signed with another kind of key; was the \
             CA reissued?"
                .to_owned()
        }
        CertificateError::Expired => "the peer's certificate has expired; renew it".to_owned(),
        CertificateError::ExpiredContext { not_after, .. } => format!(
            "the peer's certificate expired at {}; renew it, or correct our clock",
            instant(*not_after)
        ),
        CertificateError::NotValidYet => {
            "the peer's certificate is not valid yet; check both clocks".to_owned()
        }
        CertificateError::NotValidYetContext { not_before, .. } => format!(
            "the peer's certificate is not valid before {}; check both clocks",
            instant(*not_before)
        ),
        CertificateError::NotValidForName => {
            "the peer's certificate is for another name; connect by a name in its SANs".to_owned()
        }
        CertificateError::NotValidForNameContext {
            expected,
            presented,
        } => name_mismatch(&expected.to_str(), presented),
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            "the peer's certificate has the wrong purpose: a server certificate needs the extended \
             key usage serverAuth, a client certificate clientAuth"
                .to_owned()
        }
        CertificateError::Other(OtherError(cause)) if cause.is::<RefusedChain>() => {
            cause.to_string()
        }
        CertificateError::Other(_) => other_certificate_problem(&format!("{problem:?}")),
        other => format!("the peer's certificate was refused: {other}"),
    }
}

/// Explains an error from webpki. rustls passes such errors on as opaque values, and only their names are
/// visible.
fn other_certificate_problem(debug: &str) -> String {
    if debug.contains("UnsupportedCertVersion") {
        "the peer's certificate is X.509 v1, which is not accepted from peers; reissue it as v3: \
         with `openssl x509 -req`, add `-extfile` with at least one extension (for a server its \
         subjectAltName)"
            .to_owned()
    } else if debug.contains("CaUsedAsEndEntity") {
        "the peer presented a CA certificate as its own; issue it a certificate without \
         `CA:TRUE`, signed by that CA"
            .to_owned()
    } else if debug.contains("EmptyEkuExtension") {
        "the peer's certificate has an empty extended key usage; reissue it".to_owned()
    } else {
        format!("the peer's certificate was refused: {debug}")
    }
}

fn name_mismatch(expected: &str, presented: &[String]) -> String {
    let names = match presented {
        [] => "has no subject alternative name (a common name alone does not count)".to_owned(),
        names => {
            let names: Vec<String> = names.iter().map(|name| plain(name)).collect();
            format!("is valid for {}", names.join(", "))
        }
    };
    format!(
        "the peer's certificate {names}, not for {expected}; connect by one of its names, or \
         reissue it with {expected} among its subject alternative names"
    )
}

/// Converts a name of a certificate to plain text. webpki reports names in the form of Rust's debug output, such as
/// `DnsName("localhost")`.
fn plain(name: &str) -> String {
    let (kind, value) = name.split_once('(').unwrap_or((name, ""));
    let value = value.strip_suffix(')').unwrap_or(value);
    match kind {
        "DnsName" | "UniformResourceIdentifier" => value.trim_matches('"').to_owned(),
        // webpki writes `0::1` for `::1`.
        "IpAddress" => match value.parse::<IpAddr>() {
            Ok(address) => address.to_string(),
            Err(_) => value.to_owned(),
        },
        "DirectoryName" | "Unsupported" => "a name of another kind".to_owned(),
        _ => name.to_owned(),
    }
}

fn incompatible(problem: &PeerIncompatible) -> String {
    match problem {
        PeerIncompatible::NoCipherSuitesInCommon => {
            "no cipher suite in common with the peer; check the list of cipher suites on both sides"
                .to_owned()
        }
        PeerIncompatible::ServerTlsVersionIsDisabledByOurConfig
        | PeerIncompatible::Tls12NotOffered
        | PeerIncompatible::Tls12NotOfferedOrEnabled
        | PeerIncompatible::ServerDoesNotSupportTls12Or13
        | PeerIncompatible::SupportedVersionsExtensionRequired => {
            "no TLS version in common with the peer; check the minimum version on both sides (1.0 \
             and 1.1 are not supported)"
                .to_owned()
        }
        other => format!("the peer's TLS is incompatible: {other:?}"),
    }
}

fn alert_received(alert: AlertDescription) -> String {
    match alert {
        AlertDescription::CertificateRequired => {
            "the peer requires a client certificate and none is configured; configure a certificate and a \
             key"
            .to_owned()
        }
        AlertDescription::UnknownCA => {
            "the peer does not know the CA of our certificate; add the CA to its bundle, or use a \
             certificate from a CA in that bundle"
                .to_owned()
        }
        AlertDescription::BadCertificate => {
            "the peer refused our certificate, or we presented none; the peer's log has the reason".to_owned()
        }
        AlertDescription::UnsupportedCertificate => {
            "the peer refused the purpose or the type of our certificate; a client certificate needs the \
             extended key usage clientAuth, a server certificate serverAuth"
                .to_owned()
        }
        AlertDescription::CertificateExpired => {
            "the peer reports that our certificate has expired; renew it, or check both clocks"
                .to_owned()
        }
        AlertDescription::NoApplicationProtocol => ALPN_MISMATCH.to_owned(),
        AlertDescription::ProtocolVersion => {
            "the peer supports none of our TLS versions; check the minimum version on both sides"
                .to_owned()
        }
        AlertDescription::HandshakeFailure => {
            "the peer found no common settings (cipher suites, signature algorithms) or requires a \
             client certificate; the peer's log has the details"
                .to_owned()
        }
        other => format!("the peer ended the handshake with the alert {other:?}"),
    }
}

fn instant(time: UnixTime) -> String {
    date(i64::try_from(time.as_secs()).unwrap_or(i64::MAX))
}
