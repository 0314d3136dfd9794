//! The first byte of every packet, and control packets as they are inside of a [`wrap`](crate::wrap).
//!
//! Integers are big-endian. A control packet without a wrap:
//!
//! ```text
//! [opcode << 3 | key id][session id 8][count u8][acknowledged u32 * count]
//!     [peer's session id 8, only if count > 0][message id u32, not in ACK_V1][payload]
//! ```

#[cfg(test)]
mod tests;

use bytes::{BufMut, BytesMut};
use rand::RngCore;

/// The most acknowledgements in one packet; stock rejects a packet with more.
pub const MAX_ACKS: usize = 8;

/// The first byte and the session id: what a wrap leaves in the clear.
pub const CONTROL_HEADER_LEN: usize = 9;

/// The peer id that stands for none.
pub const NO_PEER_ID: u32 = 0x00ff_ffff;

/// What a packet is: the upper five bits of its first byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Opcode {
    /// Key method 1, which no peer speaks any more.
    HardResetClientV1 = 1,
    /// Key method 1, which no peer speaks any more.
    HardResetServerV1 = 2,
    /// The start of a renegotiation, by either side.
    SoftResetV1 = 3,
    /// A piece of the TLS stream.
    ControlV1 = 4,
    /// Acknowledgements and nothing else.
    AckV1 = 5,
    /// Tunnel data without a peer id.
    DataV1 = 6,
    /// The first packet of a client.
    HardResetClientV2 = 7,
    /// The first packet of a server.
    HardResetServerV2 = 8,
    /// Tunnel data with a peer id.
    DataV2 = 9,
    /// The first packet of a client with tls-crypt-v2, its wrapped key behind it.
    HardResetClientV3 = 10,
    /// [`ControlV1`](Self::ControlV1) with a wrapped tls-crypt-v2 key behind it.
    ControlWkcV1 = 11,
}

impl Opcode {
    /// The opcode of a packet that begins with `byte`.
    pub fn of(byte: u8) -> Option<Self> {
        Some(match byte >> 3 {
            1 => Self::HardResetClientV1,
            2 => Self::HardResetServerV1,
            3 => Self::SoftResetV1,
            4 => Self::ControlV1,
            5 => Self::AckV1,
            6 => Self::DataV1,
            7 => Self::HardResetClientV2,
            8 => Self::HardResetServerV2,
            9 => Self::DataV2,
            10 => Self::HardResetClientV3,
            11 => Self::ControlWkcV1,
            _ => return None,
        })
    }

    /// The first byte of a packet with this opcode.
    pub fn first_byte(self, key_id: KeyId) -> u8 {
        (self as u8) << 3 | key_id.0
    }
}

/// Which of the keys of a session a packet belongs to: 0 for the first, then 1 to 7 in turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, PartialOrd, Ord)]
pub struct KeyId(u8);

impl KeyId {
    /// The key of the first negotiation of a session.
    pub const FIRST: Self = Self(0);

    /// The key id of a packet that begins with `byte`.
    pub fn of(byte: u8) -> Self {
        Self(byte & 7)
    }

    /// The id of the key after this one. 0 is only ever the first: 7 is followed by 1.
    pub fn next(self) -> Self {
        Self(if self.0 >= 7 { 1 } else { self.0 + 1 })
    }

    /// The number, 0 to 7.
    pub fn get(self) -> u8 {
        self.0
    }
}

/// The name that one side gives to its half of a session. It survives renegotiations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SessionId(pub [u8; 8]);

impl SessionId {
    /// A new one; never all zero, which stands for none.
    pub fn random(rng: &mut dyn RngCore) -> Self {
        let mut id = [0; 8];
        while id == [0; 8] {
            rng.fill_bytes(&mut id);
        }
        Self(id)
    }
}

/// Up to [`MAX_ACKS`] message ids that their sender has received.
#[derive(Clone, Copy, Default)]
pub struct Acks {
    ids: [u32; MAX_ACKS],
    len: u8,
}

impl Acks {
    /// None.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends one; `false` if there is no room.
    pub fn push(&mut self, id: u32) -> bool {
        let Some(slot) = self.ids.get_mut(usize::from(self.len)) else {
            return false;
        };
        *slot = id;
        self.len += 1;
        true
    }

    /// The ids in their order on the wire.
    pub fn as_slice(&self) -> &[u32] {
        self.ids.get(..usize::from(self.len)).unwrap_or_default()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl std::fmt::Debug for Acks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.as_slice()).finish()
    }
}

impl PartialEq for Acks {
    fn eq(&self, other: &Self) -> bool {
        self.as_slice() == other.as_slice()
    }
}

impl Eq for Acks {}

impl FromIterator<u32> for Acks {
    /// The first [`MAX_ACKS`] of `ids`.
    fn from_iter<T: IntoIterator<Item = u32>>(ids: T) -> Self {
        let mut acks = Self::new();
        for id in ids.into_iter().take(MAX_ACKS) {
            acks.push(id);
        }
        acks
    }
}

/// Why something is not a control packet that this crate takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PacketError {
    /// It ends before its own fields do.
    #[error("packet is cut short")]
    Truncated,
    /// No peer sends such an opcode.
    #[error("unknown opcode {0}")]
    Opcode(u8),
    /// Tunnel data where a control packet is expected.
    #[error("not a control packet")]
    Data,
    /// A reset of key method 1, which every peer since 2.0 can do without.
    #[error("peer asks for key method 1, which is not supported")]
    KeyMethod1,
    /// A packet with a wrapped client key.
    #[error("peer uses tls-crypt-v2, which is not supported: use tls-crypt or tls-auth")]
    TlsCryptV2,
    /// More than [`MAX_ACKS`].
    #[error("{0} acknowledgements in one packet")]
    TooManyAcks(u8),
    /// A session id of zeros, which stands for none.
    #[error("session id is zero")]
    NoSession,
}

/// One control packet, its payload borrowed from what it was parsed from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ControlPacket<'a> {
    /// What it is; never tunnel data.
    pub opcode: Opcode,
    /// The negotiation that it belongs to.
    pub key_id: KeyId,
    /// The sender's session.
    pub session: SessionId,
    /// What the sender has received. From 2.6 on peers repeat recent ones.
    pub acks: Acks,
    /// The receiver's session as the sender knows it; on the wire if and only if there are `acks`.
    pub peer_session: Option<SessionId>,
    /// The message id, which [`Opcode::AckV1`] has not.
    pub id: Option<u32>,
    /// TLS bytes; empty in resets.
    pub payload: &'a [u8],
}

impl<'a> ControlPacket<'a> {
    /// Reads a packet that has no wrap.
    pub fn parse(packet: &'a [u8]) -> Result<Self, PacketError> {
        let (header, rest) = ControlHeader::split(packet)?;
        Self::parse_rest(header, rest)
    }

    /// Reads what a wrap covers, behind its header.
    pub fn parse_rest(header: ControlHeader, rest: &'a [u8]) -> Result<Self, PacketError> {
        let ControlHeader {
            opcode,
            key_id,
            session,
        } = header;
        let (&count, mut rest) = rest.split_first().ok_or(PacketError::Truncated)?;
        if usize::from(count) > MAX_ACKS {
            return Err(PacketError::TooManyAcks(count));
        }
        let mut acks = Acks::new();
        for _ in 0..count {
            acks.push(take_u32(&mut rest)?);
        }
        let peer_session = match count {
            0 => None,
            _ => Some(SessionId(take(&mut rest)?)),
        };
        let id = match opcode {
            Opcode::AckV1 => None,
            _ => Some(take_u32(&mut rest)?),
        };
        Ok(Self {
            opcode,
            key_id,
            session,
            acks,
            peer_session,
            id,
            payload: rest,
        })
    }

    /// The first byte and the session id.
    pub fn header(&self) -> ControlHeader {
        ControlHeader {
            opcode: self.opcode,
            key_id: self.key_id,
            session: self.session,
        }
    }

    /// Appends the packet without a wrap.
    pub fn write(&self, out: &mut BytesMut) {
        out.put_slice(&self.header().to_bytes());
        self.write_rest(out);
    }

    /// Appends what a wrap covers, behind the header. Acknowledgements without the peer's session, whose
    /// ids they would be, are left out.
    pub fn write_rest(&self, out: &mut BytesMut) {
        match self.peer_session {
            Some(peer) if !self.acks.is_empty() => {
                out.put_u8(self.acks.len);
                for &id in self.acks.as_slice() {
                    out.put_u32(id);
                }
                out.put_slice(&peer.0);
            }
            _ => out.put_u8(0),
        }
        if self.opcode != Opcode::AckV1 {
            out.put_u32(self.id.unwrap_or_default());
        }
        out.put_slice(self.payload);
    }
}

/// The part of a control packet that no wrap hides. It is worth nothing until the wrap is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ControlHeader {
    /// What the packet is; never tunnel data.
    pub opcode: Opcode,
    /// The negotiation that it belongs to.
    pub key_id: KeyId,
    /// The sender's session.
    pub session: SessionId,
}

impl ControlHeader {
    /// Reads the header, and returns what follows it. Fails for tunnel data and for what this crate does
    /// not speak.
    pub fn split(packet: &[u8]) -> Result<(Self, &[u8]), PacketError> {
        let (&first, rest) = packet.split_first().ok_or(PacketError::Truncated)?;
        let opcode = match Opcode::of(first).ok_or(PacketError::Opcode(first >> 3))? {
            Opcode::DataV1 | Opcode::DataV2 => return Err(PacketError::Data),
            Opcode::HardResetClientV1 | Opcode::HardResetServerV1 => {
                return Err(PacketError::KeyMethod1);
            }
            Opcode::HardResetClientV3 | Opcode::ControlWkcV1 => {
                return Err(PacketError::TlsCryptV2);
            }
            opcode => opcode,
        };
        let (session, rest) = rest.split_first_chunk().ok_or(PacketError::Truncated)?;
        if *session == [0; 8] {
            return Err(PacketError::NoSession);
        }
        Ok((
            Self {
                opcode,
                key_id: KeyId::of(first),
                session: SessionId(*session),
            },
            rest,
        ))
    }

    /// The header as it is on the wire.
    pub fn to_bytes(self) -> [u8; CONTROL_HEADER_LEN] {
        let mut bytes = [0; CONTROL_HEADER_LEN];
        let (first, session) = bytes.split_at_mut(1);
        first.copy_from_slice(&[self.opcode.first_byte(self.key_id)]);
        session.copy_from_slice(&self.session.0);
        bytes
    }
}

/// The part of a tunnel data packet in front of what is encrypted. Of it, only a V2 packet with AEAD
/// authenticates anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataHeader {
    /// Which key opens it.
    pub key_id: KeyId,
    /// Whose it is, in V2. [`NO_PEER_ID`] is given as it is.
    pub peer_id: Option<u32>,
}

impl DataHeader {
    /// The length of a header without a peer id.
    pub const V1_LEN: usize = 1;
    /// The length of a header with one.
    pub const V2_LEN: usize = 4;

    /// Its length on the wire.
    pub fn wire_len(&self) -> usize {
        if self.peer_id.is_some() {
            Self::V2_LEN
        } else {
            Self::V1_LEN
        }
    }

    /// Appends the header. Of a peer id, 24 bits are written.
    pub fn write(&self, out: &mut BytesMut) {
        match self.peer_id {
            None => out.put_u8(Opcode::DataV1.first_byte(self.key_id)),
            Some(peer_id) => {
                let first = Opcode::DataV2.first_byte(self.key_id);
                out.put_u32(u32::from(first) << 24 | peer_id & NO_PEER_ID);
            }
        }
    }

    /// Reads the header of a tunnel data packet; `None` if it is none.
    pub fn parse(packet: &[u8]) -> Option<Self> {
        let (&first, rest) = packet.split_first()?;
        let key_id = KeyId::of(first);
        match Opcode::of(first)? {
            Opcode::DataV1 => Some(Self {
                key_id,
                peer_id: None,
            }),
            Opcode::DataV2 => {
                let &[a, b, c] = rest.first_chunk()?;
                Some(Self {
                    key_id,
                    peer_id: Some(u32::from_be_bytes([0, a, b, c])),
                })
            }
            _ => None,
        }
    }
}

fn take<const N: usize>(bytes: &mut &[u8]) -> Result<[u8; N], PacketError> {
    let (taken, rest) = bytes.split_first_chunk().ok_or(PacketError::Truncated)?;
    *bytes = rest;
    Ok(*taken)
}

fn take_u32(bytes: &mut &[u8]) -> Result<u32, PacketError> {
    take(bytes).map(u32::from_be_bytes)
}
