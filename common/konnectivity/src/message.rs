//! The packet dialect below the state machines: typed messages over the generated [`Packet`], the
//! half-close extension, and the `:authority` rewriter that lets an `h2` server take
//! kube-apiserver's streams.

use bytes::Bytes;
pub use culvert_proto::PacketType;
use culvert_proto::packet::Payload;
use culvert_proto::{
    CloseDial, CloseRequest, CloseResponse, Data, DialRequest, DialResponse, Drain, Packet,
};

/// The most tunnelled bytes we put into one DATA packet. Stock peers accept messages of 4 MiB but
/// queue whole packets, so larger ones would only cost them memory; smaller ones cost both CPU.
/// With its head, a packet fills one HTTP/2 frame of ours, or four of a stock peer, and leaves no
/// small rest for another one: the receiver need not gather it.
pub const MAX_DATA_BYTES: usize = 64 * 1024 - 64;

/// The most that stock front ends put into one DATA packet; what a flag that counts packets means
/// in bytes.
pub const STOCK_DATA_BYTES: usize = 32 * 1024;

/// The largest message we accept: what a stock peer accepts (grpc-go's 4 MiB default) of payload,
/// and room for the fields around it.
pub const MAX_MESSAGE_BYTES: usize = 4 * 1024 * 1024 + 1024;

/// Metadata key by which both ends of our own tunnel say that they understand
/// [`Message::HalfClose`]. Stock peers read only the keys that they know.
pub const HALF_CLOSE_HEADER: &str = "culvert-half-close";

/// What marks a DATA packet as [`Message::HalfClose`], in a field that no stock component sets.
const HALF_CLOSE_MARK: &str = "culvert: half close";

/// A connection's id, issued by the agent, valid on the stream that carried it and nowhere else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectId(pub i64);

/// A dial's id (`random` on the wire), valid on the stream that carried it and nowhere else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DialId(pub i64);

/// A packet whose type and payload agree.
#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    /// Asks the agent for a connection.
    DialRequest {
        /// Always `tcp` from stock front ends.
        protocol: String,
        /// `host:port`, as the agent is to see it.
        address: String,
        /// Correlates the answer.
        dial: DialId,
    },
    /// The outcome of a dial: an id, or an error text that is not empty.
    DialResponse {
        /// The dial that this answers.
        dial: DialId,
        /// The new connection; 0 on failure.
        connection: ConnectId,
        /// Empty on success.
        error: String,
    },
    /// Bytes of a connection.
    Data {
        /// The connection.
        connection: ConnectId,
        /// The bytes.
        bytes: Bytes,
    },
    /// No more bytes follow in this direction; the other one stays open. Sent only where both
    /// ends said [`HALF_CLOSE_HEADER`].
    HalfClose {
        /// The connection.
        connection: ConnectId,
    },
    /// Asks the agent to close a connection.
    CloseRequest {
        /// The connection.
        connection: ConnectId,
    },
    /// Says that a connection is closed.
    CloseResponse {
        /// The connection.
        connection: ConnectId,
        /// Empty for an ordinary close.
        error: String,
    },
    /// Gives up a dial.
    CloseDial {
        /// The dial.
        dial: DialId,
    },
    /// The agent prefers to get no new dials.
    Drain,
    /// A type from the future; receivers ignore it.
    Unknown(i32),
}

impl Message {
    /// The wire's packet type, for metrics. The half-close mark travels as DATA.
    pub fn packet_type(&self) -> Option<PacketType> {
        Some(match self {
            Self::DialRequest { .. } => PacketType::DialReq,
            Self::DialResponse { .. } => PacketType::DialRsp,
            Self::Data { .. } | Self::HalfClose { .. } => PacketType::Data,
            Self::CloseRequest { .. } => PacketType::CloseReq,
            Self::CloseResponse { .. } => PacketType::CloseRsp,
            Self::CloseDial { .. } => PacketType::DialCls,
            Self::Drain => PacketType::Drain,
            Self::Unknown(_) => return None,
        })
    }

    /// What this message may cost in memory while it waits, in bytes: its payload and a flat
    /// amount for the rest.
    pub fn weight(&self) -> usize {
        const FLAT: usize = 64;
        FLAT + match self {
            Self::Data { bytes, .. } => bytes.len(),
            Self::DialRequest {
                protocol, address, ..
            } => protocol.len() + address.len(),
            Self::DialResponse { error, .. } | Self::CloseResponse { error, .. } => error.len(),
            _ => 0,
        }
    }
}

/// As stock receivers do, a payload that disagrees with the type reads as zero values.
impl From<Packet> for Message {
    fn from(packet: Packet) -> Self {
        let Ok(kind) = PacketType::try_from(packet.r#type) else {
            return Self::Unknown(packet.r#type);
        };
        match (kind, packet.payload) {
            (PacketType::DialReq, Some(Payload::DialRequest(p))) => Self::DialRequest {
                protocol: p.protocol,
                address: p.address,
                dial: DialId(p.random),
            },
            (PacketType::DialReq, _) => Self::DialRequest {
                protocol: String::new(),
                address: String::new(),
                dial: DialId(0),
            },
            (PacketType::DialRsp, Some(Payload::DialResponse(p))) => Self::DialResponse {
                dial: DialId(p.random),
                connection: ConnectId(p.connect_id),
                error: p.error,
            },
            (PacketType::DialRsp, _) => Self::DialResponse {
                dial: DialId(0),
                connection: ConnectId(0),
                error: String::new(),
            },
            (PacketType::Data, Some(Payload::Data(p))) => {
                let connection = ConnectId(p.connect_id);
                if p.data.is_empty() && p.error == HALF_CLOSE_MARK {
                    Self::HalfClose { connection }
                } else {
                    Self::Data {
                        connection,
                        bytes: p.data,
                    }
                }
            }
            (PacketType::Data, _) => Self::Data {
                connection: ConnectId(0),
                bytes: Bytes::new(),
            },
            (PacketType::CloseReq, payload) => Self::CloseRequest {
                connection: ConnectId(match payload {
                    Some(Payload::CloseRequest(p)) => p.connect_id,
                    _ => 0,
                }),
            },
            (PacketType::CloseRsp, Some(Payload::CloseResponse(p))) => Self::CloseResponse {
                connection: ConnectId(p.connect_id),
                error: p.error,
            },
            (PacketType::CloseRsp, _) => Self::CloseResponse {
                connection: ConnectId(0),
                error: String::new(),
            },
            (PacketType::DialCls, payload) => Self::CloseDial {
                dial: DialId(match payload {
                    Some(Payload::CloseDial(p)) => p.random,
                    _ => 0,
                }),
            },
            (PacketType::Drain, _) => Self::Drain,
        }
    }
}

impl From<Message> for Packet {
    fn from(message: Message) -> Self {
        let kind = match &message {
            Message::Unknown(kind) => *kind,
            other => other.packet_type().map_or(0, |kind| kind as i32),
        };
        let payload = match message {
            Message::DialRequest {
                protocol,
                address,
                dial,
            } => Some(Payload::DialRequest(DialRequest {
                protocol,
                address,
                random: dial.0,
            })),
            Message::DialResponse {
                dial,
                connection,
                error,
            } => Some(Payload::DialResponse(DialResponse {
                error,
                connect_id: connection.0,
                random: dial.0,
            })),
            Message::Data { connection, bytes } => Some(Payload::Data(Data {
                connect_id: connection.0,
                error: String::new(),
                data: bytes,
            })),
            Message::HalfClose { connection } => Some(Payload::Data(Data {
                connect_id: connection.0,
                error: HALF_CLOSE_MARK.into(),
                data: Bytes::new(),
            })),
            Message::CloseRequest { connection } => Some(Payload::CloseRequest(CloseRequest {
                connect_id: connection.0,
            })),
            Message::CloseResponse { connection, error } => {
                Some(Payload::CloseResponse(CloseResponse {
                    error,
                    connect_id: connection.0,
                }))
            }
            Message::CloseDial { dial } => Some(Payload::CloseDial(CloseDial { random: dial.0 })),
            Message::Drain => Some(Payload::Drain(Drain {})),
            Message::Unknown(_) => None,
        };
        Self {
            r#type: kind,
            payload,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
