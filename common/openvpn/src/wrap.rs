//! What protects control packets before there is TLS: nothing, tls-auth or tls-crypt. Both use a key that
//! all peers share.
//!
//! ```text
//! none       [header 9]                                       [rest]
//! tls-auth   [header 9][HMAC]       [packet id 4][time 4]     [rest]
//! tls-crypt  [header 9][packet id 4][time 4]       [tag 32]   [AES-256-CTR(rest)]
//! ```
//!
//! The HMAC of tls-auth covers packet id, time, header, rest, in that order. The tag of tls-crypt is an
//! HMAC-SHA256 of header, packet id, time, rest before encryption; its first half is the IV.
//!
//! [`WrapKey`] is what is configured, [`Wrap`] the state of one session.

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
use crate::keys::KeyBlock;
use crate::packet::{CONTROL_HEADER_LEN, ControlHeader, ControlPacket, PacketError};
use crate::replay::{LongId, LongReplayWindow, ReplayError};

/// The most bytes that a wrap adds to a control packet.
pub const MAX_OVERHEAD: usize = 64 + LongId::LEN;

/// Why a control packet is not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// It is none, or none that is supported.
    #[error(transparent)]
    Packet(#[from] PacketError),
    /// Not made with our key, or changed on its way, or without the wrap that we expect.
    #[error("control packet failed authentication")]
    Authentication,
    /// Its packet id must not be taken.
    #[error(transparent)]
    Replay(#[from] ReplayError),
}

/// Why a control packet is not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SealError {
    /// The session has used up all packet ids.
    #[error("packet ids of this session's control channel are used up")]
    Exhausted,
    /// The cryptographic library refused.
    #[error("encryption failed")]
    Crypto,
}

/// Why a key can not be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("wrap key is refused by the cryptographic library")]
pub struct KeyError;

/// Which halves of a static key tls-auth uses: the second argument of `tls-auth`, or `key-direction`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KeyDirection {
    /// The first half, both ways.
    #[default]
    Both,
    /// 0: sends with the first half. By convention the server's.
    Normal,
    /// 1: sends with the second half. By convention the client's.
    Inverse,
}

/// How control packets are wrapped, as configured. Cheap to clone.
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
    /// No wrap.
    pub fn none() -> Self {
        Self(Kind::None)
    }

    /// tls-auth. `digest` is that of the `auth` option.
    pub fn tls_auth(key: &KeyBlock, direction: KeyDirection, digest: Digest) -> Self {
        Self(Kind::Auth(Arc::new(AuthKeys::new(key, direction, digest))))
    }

    /// tls-crypt, as `role`.
    pub fn tls_crypt(key: &KeyBlock, role: Role) -> Result<Self, KeyError> {
        Ok(Self(Kind::Crypt(Arc::new(CryptKeys::new(key, role)?))))
    }

    /// Opens a packet where it is, and returns it with its packet id if it has one. Nothing remembers
    /// the id: this is to see whether a stranger knows the key before there is a session for it. What
    /// fails may have been overwritten.
    pub fn open<'a>(
        &self,
        packet: &'a mut [u8],
    ) -> Result<(ControlPacket<'a>, Option<LongId>), OpenError> {
        let (header, _) = ControlHeader::split(packet)?;
        let (clear, body) = packet
            .split_first_chunk_mut::<CONTROL_HEADER_LEN>()
            .ok_or(PacketError::Truncated)?;
        let (id, rest): (_, &[u8]) = match &self.0 {
            Kind::None => (None, body),
            Kind::Auth(keys) => {
                let (id, rest) = keys.open(clear, body)?;
                (Some(id), rest)
            }
            Kind::Crypt(keys) => {
                let (id, rest) = keys.open(clear, body)?;
                (Some(id), rest)
            }
        };
        Ok((ControlPacket::parse_rest(header, rest)?, id))
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

/// The wrap of one session: counts what it sends, and takes each packet once.
#[derive(Debug)]
pub struct Wrap {
    key: WrapKey,
    /// `u64`, so that it can be past the last id.
    next_id: u64,
    time: u32,
    replay: LongReplayWindow,
}

impl Wrap {
    /// A session that begins at `unix_time`, in seconds. Peers that remember an earlier session with the
    /// same ids expect that it does not go backwards.
    pub fn new(key: WrapKey, unix_time: u32) -> Self {
        Self {
            key,
            next_id: 1,
            time: unix_time,
            replay: LongReplayWindow::default(),
        }
    }

    /// The first packet was sent already, by a [`Wrap`] that nobody kept.
    pub fn skip_first(&mut self) {
        self.next_id = self.next_id.max(2);
    }

    /// Appends `packet`, wrapped. If that fails, `out` is as before. A packet that is sent again has to be
    /// sealed again.
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

    /// Opens a packet where it is. What fails may have been overwritten.
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
