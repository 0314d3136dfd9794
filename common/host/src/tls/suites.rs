//! Cipher suites by their names in Go.
//!
//! Flags use Go's names. rustls implements only the AEAD suites. Go's CBC suites are known and skipped with a
//! warning, so that a command line with these suites still works.

use rustls::SupportedCipherSuite;
use rustls::crypto::CryptoProvider;
use rustls::crypto::aws_lc_rs::ALL_CIPHER_SUITES;
use rustls::crypto::ring::cipher_suite as ring;
use rustls::version::TLS13;

use super::{TlsError, TlsOptions};

/// Support for a cipher suite name.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SuiteSupport {
    /// A supported suite.
    Supported(SupportedCipherSuite),
    /// One of Go's secure suites, but not supported here.
    KnownButUnsupported,
    /// An unknown name, or one of Go's insecure suites, which upstream refuses as well.
    Unknown,
}

/// Looks up a name from Go's `tls.CipherSuites()` (Go 1.26).
pub fn go_suite(name: &str) -> SuiteSupport {
    let named = |suite: &&SupportedCipherSuite| {
        // rustls has its own prefix for the suites of TLS 1.3.
        let own = format!("{:?}", suite.suite());
        own.replace("TLS13_", "TLS_") == name
    };
    match name {
        "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA"
        | "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA"
        | "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA"
        | "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA" => SuiteSupport::KnownButUnsupported,
        _ => ALL_CIPHER_SUITES
            .iter()
            .find(named)
            .map_or(SuiteSupport::Unknown, |suite| {
                SuiteSupport::Supported(*suite)
            }),
    }
}

/// TLS 1.3 suites with ring's ciphers.
const RING_SUITES: [SupportedCipherSuite; 2] = [
    ring::TLS13_AES_128_GCM_SHA256,
    ring::TLS13_AES_256_GCM_SHA384,
];

/// Returns true if the processor has wide AES instructions without AVX-512, such as AMD's Zen 3 and Intel's
/// client processors since Alder Lake. ring uses these instructions; aws-lc uses them only together with
/// AVX-512 (docs/decisions/0012).
fn ring_is_faster() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        std::arch::is_x86_feature_detected!("vaes")
            && std::arch::is_x86_feature_detected!("vpclmulqdq")
            && std::arch::is_x86_feature_detected!("avx2")
            && !std::arch::is_x86_feature_detected!("avx512f")
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Creates the provider with all suites of TLS 1.3 and the TLS 1.2 suites in `options`. An empty list means
/// all suites.
pub(super) fn provider(options: &TlsOptions) -> Result<CryptoProvider, TlsError> {
    let mut provider = rustls::crypto::aws_lc_rs::default_provider();
    if ring_is_faster() {
        for suite in &mut provider.cipher_suites {
            if let Some(same) = RING_SUITES.iter().find(|known| *known == suite) {
                *suite = *same;
            }
        }
    }
    // Go's order of preference, with AES-128 first: AES-128 is equally safe, and takes a quarter less work
    // per byte. The order matters only in a client, because rustls servers follow the client's order.
    provider
        .cipher_suites
        .sort_by_key(|suite| !format!("{:?}", suite.suite()).contains("AES_128"));
    if options.cipher_suites.is_empty() {
        return Ok(provider);
    }
    let mut listed = Vec::new();
    for name in &options.cipher_suites {
        match go_suite(name) {
            SuiteSupport::Supported(suite) => listed.push(suite),
            SuiteSupport::KnownButUnsupported => {
                tracing::warn!(suite = %name, "cipher suite is not implemented; ignoring it");
            }
            SuiteSupport::Unknown => return Err(TlsError::UnknownSuite(name.clone())),
        }
    }
    provider
        .cipher_suites
        .retain(|suite| suite.version() == &TLS13 || listed.contains(suite));
    Ok(provider)
}
