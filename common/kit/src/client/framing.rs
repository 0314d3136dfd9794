//! The message framing of gRPC: one flag byte, four bytes of length, one packet.

use std::io;

use bytes::{Buf as _, BufMut as _, BytesMut};
use culvert_proto::Packet;
use prost::Message as _;

/// Length of the flag and length fields, in bytes.
const HEAD_BYTES: usize = 5;

/// Largest message that a stock client accepts, in bytes (grpc-go's default).
const MAX_MESSAGE_BYTES: usize = 4 << 20;

/// Reason why bytes cannot be decoded.
#[derive(Debug, thiserror::Error)]
pub(super) enum FramingError {
    #[error("compressed message without agreed compression")]
    Compressed,
    #[error("message too large: {0} bytes")]
    TooLarge(usize),
    #[error("invalid packet: {0}")]
    Packet(#[from] prost::DecodeError),
}

/// Appends a packet, with framing, to `output`.
pub(super) fn encode(packet: &Packet, output: &mut BytesMut) -> io::Result<()> {
    let len = packet.encoded_len();
    let announced = u32::try_from(len).map_err(io::Error::other)?;
    output.reserve(HEAD_BYTES + len);
    output.put_u8(0);
    output.put_u32(announced);
    packet.encode(output).map_err(io::Error::other)
}

/// Removes the first message from `input` and returns the packet; `None` if the message is incomplete.
pub(super) fn decode(input: &mut BytesMut) -> Result<Option<Packet>, FramingError> {
    let mut head = input.as_ref();
    let (Ok(flag), Ok(len)) = (head.try_get_u8(), head.try_get_u32()) else {
        return Ok(None);
    };
    if flag != 0 {
        return Err(FramingError::Compressed);
    }
    let len = usize::try_from(len).unwrap_or(usize::MAX);
    if len > MAX_MESSAGE_BYTES {
        return Err(FramingError::TooLarge(len));
    }
    if head.remaining() < len {
        return Ok(None);
    }
    input.advance(HEAD_BYTES);
    Ok(Some(Packet::decode(input.split_to(len).freeze())?))
}
