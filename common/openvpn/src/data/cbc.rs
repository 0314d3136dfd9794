//! AES-CBC with a separate HMAC: encrypt, then MAC.

use aws_lc_rs::cipher::{
    self, AES_CBC_IV_LEN as IV_LEN, DecryptingKey, DecryptionContext, EncryptingKey,
    EncryptionContext, UnboundCipherKey,
};
use aws_lc_rs::iv::FixedLength;
use aws_lc_rs::{constant_time, hmac, rand};
use bytes::{BufMut, BytesMut};

use super::{KeyError, OpenError, SealError};
use crate::cipher::{Cipher, Digest};
use crate::keys::HalfBlock;

const BLOCK_LEN: usize = 16;

/// Sender's keys of one direction.
pub(super) struct CbcSealer {
    key: EncryptingKey,
    mac: hmac::Key,
    mac_len: usize,
}

impl CbcSealer {
    pub(super) fn new(
        cipher: Cipher,
        digest: Digest,
        keys: HalfBlock<'_>,
    ) -> Result<Self, KeyError> {
        let key = EncryptingKey::cbc(unbound(cipher, keys)?).map_err(|_| KeyError(cipher))?;
        Ok(Self {
            key,
            mac: digest.hmac_key(keys.mac),
            mac_len: digest.output_len(),
        })
    }

    /// Appends room for the MAC and the IV in front of the ciphertext.
    pub(super) fn reserve_head(&self, out: &mut BytesMut) {
        out.put_bytes(0, self.mac_len + IV_LEN);
    }

    /// Encrypts the text behind the reserved room at `start`, and fills in MAC and IV.
    pub(super) fn seal(&self, out: &mut BytesMut, start: usize) -> Result<(), SealError> {
        let mut iv = [0; IV_LEN];
        rand::fill(&mut iv).map_err(|_| SealError::Crypto)?;
        self.seal_with_iv(out, start, iv)
    }

    pub(super) fn seal_with_iv(
        &self,
        out: &mut BytesMut,
        start: usize,
        iv: [u8; IV_LEN],
    ) -> Result<(), SealError> {
        let plain_len = out
            .len()
            .checked_sub(start + self.mac_len + IV_LEN)
            .ok_or(SealError::Crypto)?;
        // PKCS #7: 1 to 16 padding bytes, each with the number of padding bytes as value.
        let padding = BLOCK_LEN - plain_len % BLOCK_LEN;
        out.put_bytes(padding as u8, padding);

        let body = out.get_mut(start..).unwrap_or_default();
        let (mac, rest) = body
            .split_at_mut_checked(self.mac_len)
            .ok_or(SealError::Crypto)?;
        let (iv_field, text) = rest
            .split_first_chunk_mut::<IV_LEN>()
            .ok_or(SealError::Crypto)?;
        *iv_field = iv;
        let context = EncryptionContext::Iv128(FixedLength::from(iv));
        self.key
            .less_safe_encrypt(text, context)
            .map_err(|_| SealError::Crypto)?;
        mac.copy_from_slice(hmac::sign(&self.mac, rest).as_ref());
        Ok(())
    }
}

/// Receiver's keys of one direction.
pub(super) struct CbcOpener {
    key: DecryptingKey,
    mac: hmac::Key,
    mac_len: usize,
}

impl CbcOpener {
    pub(super) fn new(
        cipher: Cipher,
        digest: Digest,
        keys: HalfBlock<'_>,
    ) -> Result<Self, KeyError> {
        let key = DecryptingKey::cbc(unbound(cipher, keys)?).map_err(|_| KeyError(cipher))?;
        Ok(Self {
            key,
            mac: digest.hmac_key(keys.mac),
            mac_len: digest.output_len(),
        })
    }

    /// Verifies and decrypts `body`, which begins with the MAC, and returns the plaintext in place.
    pub(super) fn open<'a>(&self, body: &'a mut [u8]) -> Result<&'a mut [u8], OpenError> {
        let (mac, rest) = body
            .split_at_mut_checked(self.mac_len)
            .ok_or(OpenError::Truncated)?;
        let expected = hmac::sign(&self.mac, rest);
        constant_time::verify_slices_are_equal(expected.as_ref(), mac)
            .map_err(|_| OpenError::Authentication)?;

        // The MAC is valid, so only the peer can cause the errors below, and they need not be hidden.
        let (iv, text) = rest
            .split_first_chunk_mut::<IV_LEN>()
            .ok_or(OpenError::Truncated)?;
        if text.is_empty() || text.len() % BLOCK_LEN != 0 {
            return Err(OpenError::Truncated);
        }
        let context = DecryptionContext::Iv128(FixedLength::from(*iv));
        let plain = self
            .key
            .decrypt(text, context)
            .map_err(|_| OpenError::Authentication)?;
        let padding = usize::from(plain.last().copied().unwrap_or_default());
        let len = plain
            .len()
            .checked_sub(padding)
            .ok_or(OpenError::Authentication)?;
        let (plain, pad) = plain.split_at_mut(len);
        if padding == 0
            || padding > BLOCK_LEN
            || pad.iter().any(|byte| usize::from(*byte) != padding)
        {
            return Err(OpenError::Authentication);
        }
        Ok(plain)
    }
}

fn unbound(cipher: Cipher, keys: HalfBlock<'_>) -> Result<UnboundCipherKey, KeyError> {
    let algorithm = match cipher {
        Cipher::Aes256Cbc => &cipher::AES_256,
        Cipher::Aes192Cbc => &cipher::AES_192,
        Cipher::Aes128Cbc => &cipher::AES_128,
        Cipher::Aes256Gcm | Cipher::Aes192Gcm | Cipher::Aes128Gcm | Cipher::ChaCha20Poly1305 => {
            return Err(KeyError(cipher));
        }
    };
    let key = keys
        .cipher
        .get(..cipher.key_len())
        .ok_or(KeyError(cipher))?;
    UnboundCipherKey::new(algorithm, key).map_err(|_| KeyError(cipher))
}
