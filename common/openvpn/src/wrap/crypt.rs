//! The tls-crypt wrap: authenticates, then encrypts. The first half of the tag is also the IV.

use aws_lc_rs::cipher::{
    AES_256, DecryptingKey, DecryptionContext, EncryptingKey, EncryptionContext, UnboundCipherKey,
};
use aws_lc_rs::iv::FixedLength;
use aws_lc_rs::{constant_time, hmac};
use bytes::{BufMut, BytesMut};

use super::{KeyError, OpenError};
use crate::Role;
use crate::cipher::Digest;
use crate::data::SealError;
use crate::keys::{Half, HalfBlock, KeyBlock};
use crate::packet::{ControlPacket, PacketError};
use crate::replay::LongId;

const KEY_LEN: usize = 32;
const TAG_LEN: usize = 32;
const IV_LEN: usize = 16;

/// Keys of both directions.
pub(super) struct CryptKeys {
    send: EncryptingKey,
    send_mac: hmac::Key,
    receive: DecryptingKey,
    receive_mac: hmac::Key,
}

impl CryptKeys {
    pub(super) fn new(key: &KeyBlock, role: Role) -> Result<Self, KeyError> {
        // The halves are swapped in comparison with the data channel.
        let (send, receive) = match role {
            Role::Server => (key.half(Half::Zero), key.half(Half::One)),
            Role::Client => (key.half(Half::One), key.half(Half::Zero)),
        };
        Ok(Self {
            send: EncryptingKey::ctr(unbound(send)?).map_err(|_| KeyError)?,
            send_mac: Digest::Sha256.hmac_key(send.mac),
            receive: DecryptingKey::ctr(unbound(receive)?).map_err(|_| KeyError)?,
            receive_mac: Digest::Sha256.hmac_key(receive.mac),
        })
    }

    pub(super) fn seal(
        &self,
        packet: &ControlPacket<'_>,
        id: LongId,
        out: &mut BytesMut,
    ) -> Result<(), SealError> {
        let (header, id) = (packet.header().to_bytes(), id.to_bytes());
        out.put_slice(&header);
        out.put_slice(&id);
        let start = out.len();
        out.put_bytes(0, TAG_LEN);
        packet.write_rest(out);
        let body = out.get_mut(start..).unwrap_or_default();
        let (field, rest) = body
            .split_first_chunk_mut::<TAG_LEN>()
            .ok_or(SealError::Crypto)?;
        field.copy_from_slice(tag(&self.send_mac, &header, &id, rest).as_ref());
        let context = EncryptionContext::Iv128(FixedLength::from(iv(field)));
        self.send
            .less_safe_encrypt(rest, context)
            .map_err(|_| SealError::Crypto)?;
        Ok(())
    }

    /// Opens the part after the header in place.
    pub(super) fn open<'a>(
        &self,
        header: &[u8],
        body: &'a mut [u8],
    ) -> Result<(LongId, &'a [u8]), OpenError> {
        let (id, body) = body
            .split_first_chunk_mut::<{ LongId::LEN }>()
            .ok_or(PacketError::Truncated)?;
        let (found, rest) = body
            .split_first_chunk_mut::<TAG_LEN>()
            .ok_or(PacketError::Truncated)?;
        let context = DecryptionContext::Iv128(FixedLength::from(iv(found)));
        let rest = self
            .receive
            .decrypt(rest, context)
            .map_err(|_| OpenError::Authentication)?;
        let expected = tag(&self.receive_mac, header, id, rest);
        constant_time::verify_slices_are_equal(expected.as_ref(), found)
            .map_err(|_| OpenError::Authentication)?;
        Ok((LongId::from_bytes(*id), rest))
    }
}

fn unbound(keys: HalfBlock<'_>) -> Result<UnboundCipherKey, KeyError> {
    let key = keys.cipher.get(..KEY_LEN).ok_or(KeyError)?;
    UnboundCipherKey::new(&AES_256, key).map_err(|_| KeyError)
}

fn tag(key: &hmac::Key, header: &[u8], id: &[u8], rest: &[u8]) -> hmac::Tag {
    let mut mac = hmac::Context::with_key(key);
    mac.update(header);
    mac.update(id);
    mac.update(rest);
    mac.sign()
}

/// Returns the first half of a tag, which is the IV.
fn iv(tag: &[u8; TAG_LEN]) -> [u8; IV_LEN] {
    tag.first_chunk().copied().unwrap_or_default()
}
