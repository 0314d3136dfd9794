//! The first byte of every packet, and the format of control packets inside a [`wrap`](crate::wrap).
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

/// Most acknowledgements in one packet; stock rejects packets with more.
pub const MAX_ACKS: usize = 8;

/// Length in bytes of the part that a wrap does not encrypt: the first byte and the session id.
pub(crate) const CONTROL_HEADER_LEN: usize = 9;

/// Reserved peer id that means "no peer id".
pub(crate) const NO_PEER_ID: u32 = 0x00ff_ffff;

/// Type of a packet: the upper five bits of its first byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Opcode {
    /// Client's reset of key method 1, which peers no longer use.
    HardResetClientV1 = 1,
    /// Server's reset of key method 1, which peers no longer use.
    HardResetServerV1 = 2,
    /// Start of a renegotiation, by either side.
    SoftResetV1 = 3,
    /// Piece of the TLS stream.
    ControlV1 = 4,
    /// Acknowledgements only.
    AckV1 = 5,
    /// Data without a peer id.
    DataV1 = 6,
    /// First packet of a client.
    HardResetClientV2 = 7,
    /// First packet of a server.
    HardResetServerV2 = 8,
    /// Data with a peer id.
    DataV2 = 9,
    /// First packet of a client with tls-crypt-v2, followed by the client's wrapped key.
    HardResetClientV3 = 10,
    /// [`ControlV1`](Self::ControlV1) followed by a wrapped tls-crypt-v2 key.
    ControlWkcV1 = 11,
}

impl Opcode {
    /// Returns the opcode of a packet that begins with `byte`.
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

    /// Returns the first byte of a packet with this opcode.
    pub(crate) fn first_byte(self, key_id: KeyId) -> u8 {
        (self as u8) << 3 | key_id.0
    }
}

/// Number of a key in its session: 0 for the first key, then 1 to 7 in turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, PartialOrd, Ord)]
pub struct KeyId(u8);

impl KeyId {
    /// Key of the first negotiation of a session.
    pub const FIRST: Self = Self(0);

    /// Returns the key id of a packet that begins with `byte`.
    pub fn of(byte: u8) -> Self {
        Self(byte & 7)
    }

    /// Returns the id of the next key. 7 is followed by 1, because 0 is only used for the first key.
    pub fn next(self) -> Self {
        Self(if self.0 >= 7 { 1 } else { self.0 + 1 })
    }

    /// Returns the number, 0 to 7.
    pub fn get(self) -> u8 {
        self.0
    }
}

/// Id that one side chooses for its half of a session. Renegotiations keep the id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SessionId(pub [u8; 8]);

impl SessionId {
    /// Generates an id. Zero is reserved for "no session" and never generated.
    pub fn random(rng: &mut dyn RngCore) -> Self {
        let mut id = [0; 8];
        while id == [0; 8] {
            rng.fill_bytes(&mut id);
        }
        Self(id)
    }
}

/// Reason why a packet is not a supported control packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PacketError {
    /// The packet is shorter than its fields.
    #[error("packet is cut short")]
    Truncated,
    /// The opcode is unknown.
    #[error("unknown opcode {0}")]
    Opcode(u8),
    /// The packet is a data packet.
    #[error("not a control packet")]
    Data,
    /// The packet is a reset of key method 1. Peers since 2.0 do not need key method 1.
    #[error("peer asks for key method 1, which is not supported")]
    KeyMethod1,
    /// The packet contains a wrapped client key.
    #[error("peer uses tls-crypt-v2, which is not supported: use tls-crypt or tls-auth")]
    TlsCryptV2,
    /// The packet has more than [`MAX_ACKS`] acknowledgements.
    #[error("{0} acknowledgements in one packet")]
    TooManyAcks(u8),
    /// The session id is zero, which means "no session".
    #[error("session id is zero")]
    NoSession,
}

/// Control packet. The payload is borrowed from the parsed bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControlPacket<'a> {
    /// Type of the packet; never data.
    pub opcode: Opcode,
    /// Key of the packet's negotiation.
    pub key_id: KeyId,
    /// Session id of the sender.
    pub session: SessionId,
    /// Ids of messages that the sender has received, at most [`MAX_ACKS`]. Peers from 2.6 on repeat recent ids.
    pub acks: Vec<u32>,
    /// Session id of the receiver, as known to the sender. Present on the wire if and only if `acks` is not
    /// empty.
    pub peer_session: Option<SessionId>,
    /// Message id; `None` for [`Opcode::AckV1`].
    pub id: Option<u32>,
    /// TLS bytes; empty in resets.
    pub payload: &'a [u8],
}

impl<'a> ControlPacket<'a> {
    /// Parses a packet without a wrap.
    pub fn parse(packet: &'a [u8]) -> Result<Self, PacketError> {
        let (header, rest) = ControlHeader::split(packet)?;
        Self::parse_rest(header, rest)
    }

    /// Parses the part after the header, which a wrap covers.
    pub(crate) fn parse_rest(header: ControlHeader, rest: &'a [u8]) -> Result<Self, PacketError> {
        let ControlHeader {
            opcode,
            key_id,
            session,
        } = header;
        let (&count, mut rest) = rest.split_first().ok_or(PacketError::Truncated)?;
        if usize::from(count) > MAX_ACKS {
            return Err(PacketError::TooManyAcks(count));
        }
        let acks = (0..count).map(|_| take_u32(&mut rest));
        let acks = acks.collect::<Result<_, _>>()?;
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

    /// Returns the header: the first byte and the session id.
    pub(crate) fn header(&self) -> ControlHeader {
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

    /// Appends the part after the header, which a wrap covers. Acknowledgements are left out if the peer's
    /// session id is missing, because the acknowledged messages belong to the peer's session.
    pub(crate) fn write_rest(&self, out: &mut BytesMut) {
        match self.peer_session {
            Some(peer) if !self.acks.is_empty() => {
                out.put_u8(self.acks.len() as u8);
                for &id in &self.acks {
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

/// Part of a control packet that no wrap encrypts. The header is not trustworthy until the wrap is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ControlHeader {
    /// Type of the packet; never data.
    pub(crate) opcode: Opcode,
    /// Key of the packet's negotiation.
    pub(crate) key_id: KeyId,
    /// Session id of the sender.
    pub(crate) session: SessionId,
}

impl ControlHeader {
    /// Splits a packet into its header and the rest. Fails for data packets and for unsupported opcodes.
    pub(crate) fn split(packet: &[u8]) -> Result<(Self, &[u8]), PacketError> {
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

    pub(crate) fn to_bytes(self) -> [u8; CONTROL_HEADER_LEN] {
        let mut bytes = [0; CONTROL_HEADER_LEN];
        let (first, session) = bytes.split_at_mut(1);
        first.copy_from_slice(&[self.opcode.first_byte(self.key_id)]);
        session.copy_from_slice(&self.session.0);
        bytes
    }
}

/// Unencrypted header of a data packet. Only a V2 packet with an AEAD cipher authenticates its header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataHeader {
    /// Id of the key that opens the packet.
    pub key_id: KeyId,
    /// Peer id of a V2 packet, including 0xffffff, which means "no peer id"; `None` for V1.
    pub peer_id: Option<u32>,
}

impl DataHeader {
    /// Length in bytes of a header without a peer id.
    pub(crate) const V1_LEN: usize = 1;
    /// Length in bytes of a header with a peer id.
    pub(crate) const V2_LEN: usize = 4;

    /// Returns the length on the wire, in bytes.
    pub fn wire_len(&self) -> usize {
        if self.peer_id.is_some() {
            Self::V2_LEN
        } else {
            Self::V1_LEN
        }
    }

    /// Appends the header. Only the lower 24 bits of a peer id are written.
    pub fn write(&self, out: &mut BytesMut) {
        match self.peer_id {
            None => out.put_u8(Opcode::DataV1.first_byte(self.key_id)),
            Some(peer_id) => {
                let first = Opcode::DataV2.first_byte(self.key_id);
                out.put_u32(u32::from(first) << 24 | peer_id & NO_PEER_ID);
            }
        }
    }

    /// Parses the header of a data packet. Returns `None` for any other packet.
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
