//! The tls-auth wrap: an HMAC over unencrypted packets.

use aws_lc_rs::{constant_time, hmac};
use bytes::{BufMut, BytesMut};

use super::{KeyDirection, OpenError};
use crate::cipher::Digest;
use crate::data::SealError;
use crate::keys::{Half, KeyBlock};
use crate::packet::{ControlPacket, PacketError};
use crate::replay::LongId;

/// Keys of both directions.
pub(super) struct AuthKeys {
    send: hmac::Key,
    receive: hmac::Key,
    mac_len: usize,
}

impl AuthKeys {
    pub(super) fn new(key: &KeyBlock, direction: KeyDirection, digest: Digest) -> Self {
        let (send, receive) = match direction {
            KeyDirection::Both => (Half::Zero, Half::Zero),
            KeyDirection::Normal => (Half::Zero, Half::One),
            KeyDirection::Inverse => (Half::One, Half::Zero),
        };
        Self {
            send: digest.hmac_key(key.half(send).mac),
            receive: digest.hmac_key(key.half(receive).mac),
            mac_len: digest.output_len(),
        }
    }

    pub(super) fn seal(
        &self,
        packet: &ControlPacket<'_>,
        id: LongId,
        out: &mut BytesMut,
    ) -> Result<(), SealError> {
        let (header, id) = (packet.header().to_bytes(), id.to_bytes());
        out.put_slice(&header);
        let start = out.len();
        out.put_bytes(0, self.mac_len);
        out.put_slice(&id);
        let rest = out.len();
        packet.write_rest(out);
        let mac = mac(
            &self.send,
            &id,
            &header,
            out.get(rest..).unwrap_or_default(),
        );
        let field = out
            .get_mut(start..start + self.mac_len)
            .ok_or(SealError::Crypto)?;
        field.copy_from_slice(mac.as_ref());
        Ok(())
    }

    /// Opens the part after the header.
    pub(super) fn open<'a>(
        &self,
        header: &[u8],
        body: &'a [u8],
    ) -> Result<(LongId, &'a [u8]), OpenError> {
        let (found, body) = body
            .split_at_checked(self.mac_len)
            .ok_or(PacketError::Truncated)?;
        let (id, rest) = body.split_first_chunk().ok_or(PacketError::Truncated)?;
        let expected = mac(&self.receive, id, header, rest);
        constant_time::verify_slices_are_equal(expected.as_ref(), found)
            .map_err(|_| OpenError::Authentication)?;
        Ok((LongId::from_bytes(*id), rest))
    }
}

fn mac(key: &hmac::Key, id: &[u8], header: &[u8], rest: &[u8]) -> hmac::Tag {
    let mut mac = hmac::Context::with_key(key);
    mac.update(id);
    mac.update(header);
    mac.update(rest);
    mac.sign()
}
