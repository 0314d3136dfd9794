//! The data packets of one key in one direction.
//!
//! ```text
//! AEAD  V1  [0x30 | key id]              [packet id 4][tag 16][ciphertext]   AAD: the packet id
//!       V2  [0x48 | key id][peer id 3]   [packet id 4][tag 16][ciphertext]   AAD: all before the tag
//! CBC   V1, V2: the same headers, then   [HMAC][IV 16][AES-CBC(packet id 4, payload)]
//!                                        HMAC: over all after the HMAC
//! ```
//!
//! The nonce of an AEAD cipher is the packet id followed by 8 bytes of key material. Packets are sealed and
//! opened in place. With an AEAD cipher neither operation allocates.

mod cbc;
#[cfg(test)]
mod tests;

use std::time::Instant;

use aws_lc_rs::aead::{self, Aad, LessSafeKey, Nonce, UnboundKey};
use bytes::{BufMut, BytesMut};
use cbc::{CbcOpener, CbcSealer};

use crate::Role;
use crate::cipher::{Cipher, Digest};
use crate::keys::{HalfBlock, KeyBlock};
use crate::packet::{DataHeader, KeyId};
use crate::replay::{ReplayError, ReplayWindow};

/// Length of a packet id in bytes.
const ID_LEN: usize = 4;
const TAG_LEN: usize = 16;
const IMPLICIT_IV_LEN: usize = 8;

/// Packet id from which on the key should be replaced; stock renegotiates at the same id.
const WORN_ID: u64 = 0xff00_0000;

/// Use of an AES-GCM key, in blocks plus packets, at which the key should be replaced. A key is safe up to
/// 2^36 - 1; stock 2.7 renegotiates at 7/8 of this limit.
const WORN_GCM: u64 = ((1 << 36) - 1) / 8 * 7;

/// Largest number of bytes that sealing adds to a payload, over all ciphers and digests.
pub const MAX_OVERHEAD: usize = 4 + 64 + 16 + ID_LEN + 16;

/// Reason why a data packet or a wrapped control packet is not sealed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SealError {
    /// All packet ids of the key, or of the session's wrap, are used. The key must not seal any further packet.
    #[error("packet ids of this key are used up")]
    Exhausted,
    /// The cryptographic library reported an error.
    #[error("encryption failed")]
    Crypto,
}

/// Reason why a packet is rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// The packet is not a data packet.
    #[error("not a data packet")]
    NotData,
    /// The packet is shorter than its fields.
    #[error("data packet is cut short")]
    Truncated,
    /// The packet was made with another key, or changed in transit.
    #[error("data packet failed authentication")]
    Authentication,
    /// The packet id is zero, repeated, or too old.
    #[error(transparent)]
    Replay(#[from] ReplayError),
}

/// Error for a key that the cryptographic library rejects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0} is refused by the cryptographic library")]
pub struct KeyError(pub Cipher);

/// Encrypts the outgoing packets of one key.
pub struct Sealer {
    engine: SealEngine,
    header: DataHeader,
    next_id: u64,
    /// Blocks plus packets sealed so far, which wear out an AES-GCM key.
    used: u64,
    gcm: bool,
}

enum SealEngine {
    Aead(AeadKey),
    Cbc(Box<CbcSealer>),
}

impl Sealer {
    /// Creates a sealer with the keys of `sender` in `block`. With a `peer_id` (24 bits) packets are V2.
    /// `digest` is used only with CBC ciphers.
    pub fn new(
        cipher: Cipher,
        digest: Digest,
        block: &KeyBlock,
        sender: Role,
        key_id: KeyId,
        peer_id: Option<u32>,
    ) -> Result<Self, KeyError> {
        let keys = block.data(sender);
        let engine = if cipher.is_aead() {
            SealEngine::Aead(AeadKey::new(cipher, keys)?)
        } else {
            SealEngine::Cbc(Box::new(CbcSealer::new(cipher, digest, keys)?))
        };
        Ok(Self {
            engine,
            header: DataHeader { key_id, peer_id },
            next_id: 1,
            used: 0,
            gcm: matches!(
                cipher,
                Cipher::Aes256Gcm | Cipher::Aes192Gcm | Cipher::Aes128Gcm
            ),
        })
    }

    /// Appends a packet with `payload` to `out`. On error `out` is unchanged.
    pub fn seal(&mut self, payload: &[u8], out: &mut BytesMut) -> Result<(), SealError> {
        self.seal_with(out, |out| out.put_slice(payload))
    }

    /// Appends a packet to `out`. `write` appends the payload, which is then encrypted in place. On error
    /// `out` is unchanged.
    pub fn seal_with(
        &mut self,
        out: &mut BytesMut,
        write: impl FnOnce(&mut BytesMut),
    ) -> Result<(), SealError> {
        let id = u32::try_from(self.next_id).map_err(|_| SealError::Exhausted)?;
        let start = out.len();
        self.header.write(out);
        let body = out.len();
        let sealed = match &self.engine {
            SealEngine::Aead(key) => {
                out.put_u32(id);
                out.put_bytes(0, TAG_LEN);
                write(out);
                key.seal(out.get_mut(start..).unwrap_or_default(), body - start)
            }
            SealEngine::Cbc(key) => {
                key.reserve_head(out);
                out.put_u32(id);
                write(out);
                key.seal(out, body)
            }
        };
        if sealed.is_err() {
            out.truncate(start);
            return sealed;
        }
        self.next_id += 1;
        self.used += 1 + (out.len() - start).div_ceil(16) as u64;
        Ok(())
    }

    #[cfg(test)]
    pub(crate) fn wear_out(&mut self) {
        self.next_id = u64::from(u32::MAX) - 100;
    }

    /// Returns true if the key should be replaced soon. The key works until all packet ids are used.
    pub(crate) fn is_worn(&self) -> bool {
        self.next_id >= WORN_ID || self.gcm && self.used >= WORN_GCM
    }
}

/// Decrypts the incoming packets of one key, and rejects replays.
pub struct Opener {
    engine: OpenEngine,
    replay: ReplayWindow,
}

enum OpenEngine {
    Aead(AeadKey),
    Cbc(Box<CbcOpener>),
}

impl Opener {
    /// Creates an opener for packets that `sender` sealed with its keys in `block`. `digest` is used only
    /// with CBC ciphers.
    pub fn new(
        cipher: Cipher,
        digest: Digest,
        block: &KeyBlock,
        sender: Role,
    ) -> Result<Self, KeyError> {
        let keys = block.data(sender);
        let engine = if cipher.is_aead() {
            OpenEngine::Aead(AeadKey::new(cipher, keys)?)
        } else {
            OpenEngine::Cbc(Box::new(CbcOpener::new(cipher, digest, keys)?))
        };
        Ok(Self {
            engine,
            replay: ReplayWindow::default(),
        })
    }

    /// Opens a V1 or V2 packet in place and returns its payload. The caller checks the key id and the peer
    /// id. On error `packet` may be overwritten.
    pub fn open<'a>(
        &mut self,
        packet: &'a mut [u8],
        now: Instant,
    ) -> Result<&'a mut [u8], OpenError> {
        let header_len = DataHeader::parse(packet)
            .ok_or(OpenError::NotData)?
            .wire_len();
        let (id, payload) = match &self.engine {
            OpenEngine::Aead(key) => {
                let id = packet
                    .get(header_len..)
                    .and_then(<[u8]>::first_chunk)
                    .ok_or(OpenError::Truncated)?;
                let id = u32::from_be_bytes(*id);
                self.replay.check(id)?;
                (id, key.open(packet, header_len)?)
            }
            OpenEngine::Cbc(key) => {
                let body = packet.get_mut(header_len..).ok_or(OpenError::Truncated)?;
                let (id, payload) = key
                    .open(body)?
                    .split_first_chunk_mut::<ID_LEN>()
                    .ok_or(OpenError::Truncated)?;
                let id = u32::from_be_bytes(*id);
                self.replay.check(id)?;
                (id, payload)
            }
        };
        self.replay.record(id, now);
        Ok(payload)
    }
}

/// AEAD key of one direction.
struct AeadKey {
    key: LessSafeKey,
    implicit_iv: [u8; IMPLICIT_IV_LEN],
}

impl AeadKey {
    fn new(cipher: Cipher, keys: HalfBlock<'_>) -> Result<Self, KeyError> {
        let algorithm = match cipher {
            Cipher::Aes256Gcm => &aead::AES_256_GCM,
            Cipher::Aes192Gcm => &aead::AES_192_GCM,
            Cipher::Aes128Gcm => &aead::AES_128_GCM,
            Cipher::ChaCha20Poly1305 => &aead::CHACHA20_POLY1305,
            Cipher::Aes256Cbc | Cipher::Aes192Cbc | Cipher::Aes128Cbc => {
                return Err(KeyError(cipher));
            }
        };
        let key = keys
            .cipher
            .get(..cipher.key_len())
            .ok_or(KeyError(cipher))?;
        let key = LessSafeKey::new(UnboundKey::new(algorithm, key).map_err(|_| KeyError(cipher))?);
        Ok(Self {
            key,
            implicit_iv: *keys.mac.first_chunk().ok_or(KeyError(cipher))?,
        })
    }

    /// Encrypts a packet in place. Header, packet id and room for the tag must precede the payload.
    fn seal(&self, packet: &mut [u8], header_len: usize) -> Result<(), SealError> {
        let parts = Parts::split(packet, header_len).ok_or(SealError::Crypto)?;
        let nonce = self.nonce(parts.id);
        let tag = self
            .key
            .seal_in_place_separate_tag(nonce, Aad::from(parts.authenticated), parts.body)
            .map_err(|_| SealError::Crypto)?;
        parts.tag.copy_from_slice(tag.as_ref());
        Ok(())
    }

    fn open<'a>(&self, packet: &'a mut [u8], header_len: usize) -> Result<&'a mut [u8], OpenError> {
        let parts = Parts::split(packet, header_len).ok_or(OpenError::Truncated)?;
        let nonce = self.nonce(parts.id);
        self.key
            .open_in_place_separate_tag(
                nonce,
                Aad::from(parts.authenticated),
                parts.tag,
                parts.body,
            )
            .map_err(|_| OpenError::Authentication)
    }

    fn nonce(&self, id: [u8; ID_LEN]) -> Nonce {
        let mut nonce = [0; aead::NONCE_LEN];
        let (first, second) = nonce.split_at_mut(ID_LEN);
        first.copy_from_slice(&id);
        second.copy_from_slice(&self.implicit_iv);
        Nonce::assume_unique_for_key(nonce)
    }
}

/// Fields of an AEAD packet.
struct Parts<'a> {
    id: [u8; ID_LEN],
    /// Additional authenticated data; without the header in V1.
    authenticated: &'a [u8],
    tag: &'a mut [u8],
    body: &'a mut [u8],
}

impl<'a> Parts<'a> {
    fn split(packet: &'a mut [u8], header_len: usize) -> Option<Self> {
        let (head, rest) = packet.split_at_mut_checked(header_len + ID_LEN)?;
        let head: &'a [u8] = head;
        let (tag, body) = rest.split_at_mut_checked(TAG_LEN)?;
        let (_, id) = head.split_last_chunk()?;
        let authenticated = if header_len == DataHeader::V1_LEN {
            id.as_slice()
        } else {
            head
        };
        Some(Self {
            id: *id,
            authenticated,
            tag,
            body,
        })
    }
}
