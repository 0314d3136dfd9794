//! Keys of a server's QUIC endpoint, derived from the private key of its certificate.
//!
//! A stateless reset (RFC 9000, 10.3) ends a connection that its server does not know anymore, if the key is the same
//! as when the connection began. A token of a Retry packet is valid at every server with the same key. The replicas of
//! a server have the same certificate, so they also have the same keys, and a restart changes nothing.

use std::sync::Arc;

use aws_lc_rs::hkdf::{HKDF_SHA256, KeyType, Prk, Salt};
use aws_lc_rs::hmac;

/// Length of a derived key, in bytes.
const KEY_BYTES: usize = 32;

/// Separates these keys from other uses of the private key.
const SALT: &[u8] = b"culvert-quic/1";

/// Keys of an endpoint.
#[derive(Clone)]
pub struct EndpointKeys {
    /// Key of stateless resets.
    pub(super) reset: Arc<hmac::Key>,
    /// Key of tokens in Retry packets.
    pub(super) token: Arc<Prk>,
}

/// Length of a key, for HKDF.
struct Length;

impl KeyType for Length {
    fn len(&self) -> usize {
        KEY_BYTES
    }
}

impl EndpointKeys {
    /// Derives the keys from the content of the file of a private key.
    pub fn derive(private_key: &[u8]) -> Self {
        let secret = Salt::new(HKDF_SHA256, SALT).extract(private_key);
        let key = |label: &'static [u8]| {
            let mut key = [0; KEY_BYTES];
            // Cannot fail: HKDF-SHA256 yields up to 255 times as many bytes.
            if let Ok(okm) = secret.expand(&[label], Length) {
                let _ = okm.fill(&mut key);
            }
            key
        };
        Self {
            reset: Arc::new(hmac::Key::new(hmac::HMAC_SHA256, &key(b"stateless reset"))),
            token: Arc::new(Prk::new_less_safe(HKDF_SHA256, &key(b"retry token"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reset_key_depends_on_the_private_key() {
        let sign = |private_key: &[u8]| {
            let keys = EndpointKeys::derive(private_key);
            hmac::sign(&keys.reset, b"x").as_ref().to_vec()
        };
        assert_eq!(sign(b"a"), sign(b"a"));
        assert_ne!(sign(b"a"), sign(b"b"));
    }
}
