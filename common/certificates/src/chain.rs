//! The limits for certificate chains of peers.

use rustls_pki_types::CertificateDer;

/// Maximum number of intermediate certificates. Usual chains have at most three. webpki tries the certificates with the
/// same name in every order: 326 orders of 5 certificates, and 28,961 of 8.
const MAX_INTERMEDIATES: usize = 5;

/// Maximum size of all intermediate certificates, in bytes. webpki parses each of them at every step of its search. A
/// certificate with an RSA key of 4096 bits has about 2 KiB.
const MAX_INTERMEDIATE_BYTES: usize = 16 * 1024;

/// Reason why a chain is refused before its verification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{certificates} intermediate certificates of {bytes} bytes, more than {MAX_INTERMEDIATES} certificates or \
     {MAX_INTERMEDIATE_BYTES} bytes"
)]
pub struct ChainTooLong {
    certificates: usize,
    bytes: usize,
}

/// Refuses a long chain, whose verification would occupy the thread for seconds.
///
/// # Errors
/// Fails if the intermediate certificates are too many or too large.
pub fn check_chain(intermediates: &[CertificateDer<'_>]) -> Result<(), ChainTooLong> {
    let certificates = intermediates.len();
    let bytes = intermediates.iter().map(|der| der.len()).sum();
    match certificates <= MAX_INTERMEDIATES && bytes <= MAX_INTERMEDIATE_BYTES {
        true => Ok(()),
        false => Err(ChainTooLong {
            certificates,
            bytes,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_are_limited_in_number_and_size() {
        let chain = |number: usize, bytes| vec![CertificateDer::from(vec![0; bytes]); number];
        assert_eq!(check_chain(&chain(0, 0)), Ok(()));
        assert_eq!(check_chain(&chain(5, 3_276)), Ok(()));
        let many = ChainTooLong {
            certificates: 6,
            bytes: 6,
        };
        assert_eq!(check_chain(&chain(6, 1)), Err(many));
        let large = ChainTooLong {
            certificates: 2,
            bytes: 16_386,
        };
        assert_eq!(check_chain(&chain(2, 8_193)), Err(large));
    }
}
