//! The protection of control packets outside TLS: none, tls-auth or tls-crypt. Both tls-auth and tls-crypt
//! use a key that all peers share.
//!
//! ```text
//! none       [header 9]                                       [rest]
//! tls-auth   [header 9][HMAC]       [packet id 4][time 4]     [rest]
//! tls-crypt  [header 9][packet id 4][time 4]       [tag 32]   [AES-256-CTR(rest)]
//! ```
//!
//! The HMAC of tls-auth covers packet id, time, header, rest, in this order. The tag of tls-crypt is an
//! HMAC-SHA256 of header, packet id, time, rest before encryption. The first half of the tag is the IV.
//!
//! [`WrapKey`] is the configured wrap, [`Wrap`] the state of one session.

mod auth;
mod crypt;
pub mod static_key;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Instant;

use auth::AuthKeys;
use bytes::BytesMut;
use crypt::CryptKeys;

use crate::Role;
use crate::cipher::Digest;
use crate::data::SealError;
use crate::keys::KeyBlock;
use crate::packet::{CONTROL_HEADER_LEN, ControlHeader, ControlPacket, PacketError};
use crate::replay::{LongId, LongReplayWindow, ReplayError};

/// Largest number of bytes that a wrap adds to a control packet.
pub const MAX_OVERHEAD: usize = 64 + LongId::LEN;

/// Advice for a peer whose first packet is not readable. Without a wrap, the bytes of a wrap look like other fields.
pub const WRAP_HINT: &str = "check that both sides use the same tls-auth or tls-crypt key and direction; tls-crypt-v2 is not supported";

/// Reason why a control packet is rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// The packet is not a supported control packet.
    #[error(transparent)]
    Packet(#[from] PacketError),
    /// The packet was made with another key, changed in transit, or lacks the expected wrap.
    #[error("control packet failed authentication")]
    Authentication,
    /// The packet id is zero, repeated, or too old.
    #[error(transparent)]
    Replay(#[from] ReplayError),
}

/// Error for a key that the cryptographic library rejects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("wrap key is refused by the cryptographic library")]
pub struct KeyError;

/// Use of the halves of a static key in tls-auth: the second argument of `tls-auth`, or `key-direction`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KeyDirection {
    /// First half in both directions.
    #[default]
    Both,
    /// 0: sends with the first half. By convention the server's direction.
    Normal,
    /// 1: sends with the second half. By convention the client's direction.
    Inverse,
}

/// Configured wrap of control packets. Cheap to clone.
#[derive(Clone, Default)]
pub struct WrapKey(Kind);

#[derive(Clone, Default)]
enum Kind {
    #[default]
    None,
    Auth(Arc<AuthKeys>),
    Crypt(Arc<CryptKeys>),
}

impl WrapKey {
    /// Returns the configuration without a wrap.
    pub fn none() -> Self {
        Self(Kind::None)
    }

    /// Creates a tls-auth wrap. `digest` is the value of the `auth` option.
    pub fn tls_auth(key: &KeyBlock, direction: KeyDirection, digest: Digest) -> Self {
        Self(Kind::Auth(Arc::new(AuthKeys::new(key, direction, digest))))
    }

    /// Creates a tls-crypt wrap for the role `role`.
    pub fn tls_crypt(key: &KeyBlock, role: Role) -> Result<Self, KeyError> {
        Ok(Self(Kind::Crypt(Arc::new(CryptKeys::new(key, role)?))))
    }

    /// Opens a packet in place, and returns the packet and its packet id, if present. The id is not recorded,
    /// because this function only checks the key of an unknown peer before a session exists. On error
    /// `packet` may be overwritten.
    pub fn open<'a>(
        &self,
        packet: &'a mut [u8],
    ) -> Result<(ControlPacket<'a>, Option<LongId>), OpenError> {
        let (header, _) = ControlHeader::split(packet)?;
        let (clear, body) = packet
            .split_first_chunk_mut::<CONTROL_HEADER_LEN>()
            .ok_or(PacketError::Truncated)?;
        let (id, rest) = match &self.0 {
            Kind::None => return Ok((ControlPacket::parse_rest(header, body)?, None)),
            Kind::Auth(keys) => keys.open(clear, body)?,
            Kind::Crypt(keys) => keys.open(clear, body)?,
        };
        Ok((ControlPacket::parse_rest(header, rest)?, Some(id)))
    }
}

impl std::fmt::Debug for WrapKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self.0 {
            Kind::None => "none",
            Kind::Auth(_) => "tls-auth",
            Kind::Crypt(_) => "tls-crypt",
        })
    }
}

/// Wrap of one session: counts sent packets, and rejects replays.
#[derive(Debug)]
pub struct Wrap {
    key: WrapKey,
    /// Next packet id; `u64`, so that the value can exceed the last id.
    next_id: u64,
    time: u32,
    replay: LongReplayWindow,
}

impl Wrap {
    /// Creates the wrap of a session that starts at `unix_time`, in seconds. The time must not go backwards
    /// for peers that remember an earlier session with the same ids.
    pub fn new(key: WrapKey, unix_time: u32) -> Self {
        Self {
            key,
            next_id: 1,
            time: unix_time,
            replay: LongReplayWindow::default(),
        }
    }

    /// Skips the first packet id, because another [`Wrap`] has already sent the first packet and was dropped.
    pub(crate) fn skip_first(&mut self) {
        self.next_id = self.next_id.max(2);
    }

    /// Wraps `packet` and appends the result to `out`. On error `out` is unchanged. A packet that is sent
    /// again must be sealed again.
    pub fn seal(
        &mut self,
        packet: &ControlPacket<'_>,
        out: &mut BytesMut,
    ) -> Result<(), SealError> {
        let start = out.len();
        let id = u32::try_from(self.next_id).map(|id| LongId {
            id,
            time: self.time,
        });
        let id = id.map_err(|_| SealError::Exhausted);
        let sealed = match &self.key.0 {
            Kind::None => {
                packet.write(out);
                return Ok(());
            }
            Kind::Auth(keys) => id.and_then(|id| keys.seal(packet, id, out)),
            Kind::Crypt(keys) => id.and_then(|id| keys.seal(packet, id, out)),
        };
        match sealed {
            Ok(()) => self.next_id += 1,
            Err(_) => out.truncate(start),
        }
        sealed
    }

    /// Opens a packet in place. On error `packet` may be overwritten.
    pub fn open<'a>(
        &mut self,
        packet: &'a mut [u8],
        now: Instant,
    ) -> Result<ControlPacket<'a>, OpenError> {
        let (packet, id) = self.key.open(packet)?;
        if let Some(id) = id {
            self.replay.check(id)?;
            self.replay.record(id, now);
        }
        Ok(packet)
    }
}
