//! The packet dialect below the state machines: typed messages over the generated [`Packet`], and the
//! half-close extension.

use bytes::Bytes;
pub use culvert_proto::PacketType;
use culvert_proto::packet::Payload;
use culvert_proto::{
    CloseDial, CloseRequest, CloseResponse, Data, DialRequest, DialResponse, Drain, Packet,
};

/// Largest payload of a DATA packet to a client or a server, in bytes. Stock peers accept messages of 4 MiB but
/// queue whole packets, so larger packets would only cost the peer memory; smaller packets cost both ends CPU
/// time. With its head, a full packet fits into one HTTP/2 frame of our programs, or into four frames of a
/// stock peer. No bytes are left over for another, nearly empty frame, so our receivers need not assemble the
/// packet from two frames.
pub const MAX_DATA_BYTES: usize = 64 * 1024 - 64;

/// Largest payload of a DATA packet from a stock front end, in bytes. Converts flags that count packets to
/// bytes.
pub const STOCK_DATA_BYTES: usize = 32 * 1024;

/// Largest payload of a DATA packet to an agent, in bytes. A stock agent keeps up to 150 packets of any size for each
/// endpoint that does not read (its flag `--xfr-channel-size`), so larger packets than the stock server sends would
/// take more of the agent's memory. With its head, a full packet fits into two frames of a stock agent.
pub const AGENT_DATA_BYTES: usize = STOCK_DATA_BYTES - 64;

/// Largest accepted message, in bytes: the limit of a stock peer (grpc-go's default of 4 MiB) for the
/// payload, and room for the fields around the payload.
pub const MAX_MESSAGE_BYTES: usize = 4 * 1024 * 1024 + 1024;

/// Metadata key of an agent's id (upstream `proto/header/header.go`).
pub const AGENT_ID_HEADER: &str = "agentid";

/// Metadata key of an agent's identifiers, the value of `--agent-identifiers`.
pub const AGENT_IDENTIFIERS_HEADER: &str = "agentidentifiers";

/// Metadata key of a server's id.
pub const SERVER_ID_HEADER: &str = "serverid";

/// Metadata key of the number of servers.
pub const SERVER_COUNT_HEADER: &str = "servercount";

/// Metadata key that our server and our agent send to announce support for [`Message::HalfClose`]. Stock
/// peers ignore unknown keys.
pub const HALF_CLOSE_HEADER: &str = "culvert-half-close";

/// Error text that marks a DATA packet as [`Message::HalfClose`]. No stock program sets the error field.
const HALF_CLOSE_MARK: &str = "culvert: half close";

/// Identifier of a connection, issued by the agent. Valid only on the stream that carried it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectId(pub i64);

/// Identifier of a dial (`random` on the wire). Valid only on the stream that carried it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DialId(pub i64);

/// Packet with matching type and payload.
#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    /// Requests a connection from the agent.
    DialRequest {
        /// Always `tcp` from stock front ends.
        protocol: String,
        /// `host:port`, as seen by the agent.
        address: String,
        /// Identifies the dial in the response.
        dial: DialId,
    },
    /// Result of a dial: a connection, or a non-empty error text.
    DialResponse {
        /// The dial from the request.
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
    /// End of the bytes in this direction; the opposite direction stays open. Sent only if both ends sent
    /// [`HALF_CLOSE_HEADER`].
    HalfClose {
        /// The connection.
        connection: ConnectId,
    },
    /// Requests that the agent close a connection.
    CloseRequest {
        /// The connection.
        connection: ConnectId,
    },
    /// Reports that a connection is closed.
    CloseResponse {
        /// The connection.
        connection: ConnectId,
        /// Empty for an ordinary close.
        error: String,
    },
    /// Cancels a dial.
    CloseDial {
        /// The dial.
        dial: DialId,
    },
    /// The agent prefers to get no new dials.
    Drain,
    /// Packet type unknown to this version; ignored by receivers.
    Unknown(i32),
}

impl Message {
    /// Returns the packet type on the wire, for metrics. A half close is a DATA packet on the wire.
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

    /// Returns the memory that this message may use while waiting, in bytes: the payload and a flat amount
    /// for the rest.
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

/// A payload that does not match the type reads as zero values, as in stock receivers.
impl From<Packet> for Message {
    fn from(packet: Packet) -> Self {
        let Ok(kind) = PacketType::try_from(packet.r#type) else {
            return Self::Unknown(packet.r#type);
        };
        macro_rules! payload {
            ($kind:ident) => {
                match packet.payload {
                    Some(Payload::$kind(payload)) => payload,
                    _ => Default::default(),
                }
            };
        }
        match kind {
            PacketType::DialReq => {
                let p = payload!(DialRequest);
                Self::DialRequest {
                    protocol: p.protocol,
                    address: p.address,
                    dial: DialId(p.random),
                }
            }
            PacketType::DialRsp => {
                let p = payload!(DialResponse);
                Self::DialResponse {
                    dial: DialId(p.random),
                    connection: ConnectId(p.connect_id),
                    error: p.error,
                }
            }
            PacketType::Data => {
                let p = payload!(Data);
                let connection = ConnectId(p.connect_id);
                match p.data.is_empty() && p.error == HALF_CLOSE_MARK {
                    true => Self::HalfClose { connection },
                    false => Self::Data {
                        connection,
                        bytes: p.data,
                    },
                }
            }
            PacketType::CloseReq => Self::CloseRequest {
                connection: ConnectId(payload!(CloseRequest).connect_id),
            },
            PacketType::CloseRsp => {
                let p = payload!(CloseResponse);
                Self::CloseResponse {
                    connection: ConnectId(p.connect_id),
                    error: p.error,
                }
            }
            PacketType::DialCls => Self::CloseDial {
                dial: DialId(payload!(CloseDial).random),
            },
            PacketType::Drain => Self::Drain,
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
