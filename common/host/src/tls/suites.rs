//! Cipher suites by the names that Go gives them.
//!
//! Flags carry Go's names. rustls implements the AEAD suites only; Go's CBC suites are known and
//! skipped with a warning, so that a command line that lists them still starts.

use rustls::SupportedCipherSuite;
use rustls::crypto::CryptoProvider;
use rustls::crypto::aws_lc_rs::cipher_suite::{
    TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256, TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,
    TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256, TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
    TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384, TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
    TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256,
};
use rustls::crypto::ring::cipher_suite as ring;
use rustls::version::TLS13;

use super::{TlsError, TlsOptions};

/// What we make of a suite's name.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SuiteSupport {
    /// We have it.
    Supported(SupportedCipherSuite),
    /// Go has it among its secure suites, we do not.
    KnownButUnsupported,
    /// Neither: a mistake, or one of Go's insecure suites, which upstream refuses as well.
    Unknown,
}

/// Looks up a name from Go's `tls.CipherSuites()` (Go 1.26).
pub fn go_suite(name: &str) -> SuiteSupport {
    use SuiteSupport::{KnownButUnsupported, Supported, Unknown};
    match name {
        "TLS_AES_128_GCM_SHA256" => Supported(TLS13_AES_128_GCM_SHA256),
        "TLS_AES_256_GCM_SHA384" => Supported(TLS13_AES_256_GCM_SHA384),
        "TLS_CHACHA20_POLY1305_SHA256" => Supported(TLS13_CHACHA20_POLY1305_SHA256),
        "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256" => {
            Supported(TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256)
        }
        "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384" => {
            Supported(TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384)
        }
        "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256" => {
            Supported(TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256)
        }
        "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256" => Supported(TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256),
        "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384" => Supported(TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384),
        "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256" => {
            Supported(TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256)
        }
        "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA"
        | "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA"
        | "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA"
        | "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA" => KnownButUnsupported,
        _ => Unknown,
    }
}

/// The same suites with ring's ciphers.
const RING_SUITES: [SupportedCipherSuite; 2] = [
    ring::TLS13_AES_128_GCM_SHA256,
    ring::TLS13_AES_256_GCM_SHA384,
];

/// Whether the processor has wide AES instructions without AVX-512, as AMD's Zen 3 and Intel's
/// client processors since Alder Lake: ring uses these, aws-lc only together with AVX-512
/// (docs/tuning.md has the difference).
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

/// The provider with the suites of `options`: all of TLS 1.3, and of TLS 1.2 those listed.
pub(super) fn provider(options: &TlsOptions) -> Result<CryptoProvider, TlsError> {
    let mut provider = rustls::crypto::aws_lc_rs::default_provider();
    if ring_is_faster() {
        for suite in &mut provider.cipher_suites {
            if let Some(same) = RING_SUITES.iter().find(|known| *known == suite) {
                *suite = *same;
            }
        }
    }
    // Go's order: as safe, and a quarter less work for each byte. A client's order decides.
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
                tracing::warn!(suite = %name, "cipher suite is not implemented here, leaving it out");
            }
            SuiteSupport::Unknown => return Err(TlsError::UnknownSuite(name.clone())),
        }
    }
    provider
        .cipher_suites
        .retain(|suite| suite.version() == &TLS13 || listed.contains(suite));
    Ok(provider)
}
