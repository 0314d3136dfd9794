//! The encoding of one packet. Nearly all packets carry data in one usual form, which is written and read
//! here by hand; prost handles every other packet and every unusual form.

use bytes::{BufMut, Bytes};
use culvert_proto::{Packet, PacketType};
use prost::{DecodeError, Message as _};

use super::PREFIX_BYTES;
use crate::message::{ConnectId, Message};

/// Tag of `Packet.type`.
const TYPE: u8 = 0x08;
/// Value of `Packet.type` in a DATA packet.
const TYPE_DATA: u8 = PacketType::Data as u8;
/// Tag of `Packet.data`.
const DATA: u8 = 0x22;
/// Tag of `Data.connectID`.
const DATA_CONNECT_ID: u8 = 0x08;
/// Tag of `Data.data`.
const DATA_DATA: u8 = 0x1a;

/// Decodes a packet. A payload is a slice of `packet`.
///
/// # Errors
/// Fails if prost cannot decode the packet.
pub fn decode(mut packet: Bytes) -> Result<Message, DecodeError> {
    if let Some((connection, len)) = usual_data(&packet) {
        let bytes = packet.split_off(packet.len() - len);
        return Ok(Message::Data { connection, bytes });
    }
    Packet::decode(packet).map(Message::from)
}

/// Appends the packet of a message, after the gRPC prefix.
pub fn encode(message: Message, out: &mut Vec<u8>) {
    if let Message::Data { connection, bytes } = &message {
        encode_data_head(*connection, bytes.len(), bytes.len(), out);
        out.extend_from_slice(bytes);
        return;
    }
    let packet = Packet::from(message);
    let len = packet.encoded_len();
    out.reserve(PREFIX_BYTES + len);
    put_prefix(len, out);
    packet.encode_raw(out);
}

/// Appends the gRPC prefix and the head of a DATA packet, for `len` data bytes that follow. Also reserves
/// room for `more` bytes after the head, so that the caller can append the data without another allocation.
pub fn encode_data_head(connection: ConnectId, len: usize, more: usize, out: &mut Vec<u8>) {
    // proto3 omits a zero and an empty value.
    let id = connection.0.cast_unsigned();
    let id_len = if id == 0 { 0 } else { 1 + varint_len(id) };
    let bytes_len = match len {
        0 => 0,
        _ => 1 + varint_len(len as u64) + len,
    };
    let data_len = id_len + bytes_len;
    let packet_len = 2 + 1 + varint_len(data_len as u64) + data_len;
    out.reserve(PREFIX_BYTES + packet_len - len + more);
    put_prefix(packet_len, out);
    out.extend_from_slice(&[TYPE, TYPE_DATA, DATA]);
    put_varint(data_len as u64, out);
    if id != 0 {
        out.push(DATA_CONNECT_ID);
        put_varint(id, out);
    }
    if len != 0 {
        out.push(DATA_DATA);
        put_varint(len as u64, out);
    }
}

/// Returns the connection of a DATA packet in the usual form, and the number of data bytes at the end of the
/// packet.
fn usual_data(packet: &[u8]) -> Option<(ConnectId, usize)> {
    let rest = packet.strip_prefix(&[TYPE, TYPE_DATA, DATA])?;
    let (len, rest) = varint(rest)?;
    if len != rest.len() as u64 {
        return None;
    }
    let (id, rest) = match rest.strip_prefix(&[DATA_CONNECT_ID]) {
        Some(rest) => varint(rest)?,
        None => (0, rest),
    };
    let connection = ConnectId(id.cast_signed());
    let Some(rest) = rest.strip_prefix(&[DATA_DATA]) else {
        return rest.is_empty().then_some((connection, 0));
    };
    let (len, rest) = varint(rest)?;
    (len == rest.len() as u64).then_some((connection, rest.len()))
}

fn put_prefix(len: usize, out: &mut Vec<u8>) {
    out.put_u8(0);
    // Cannot overflow: a packet is far below 4 GiB, because its contents arrived in messages or reads of
    // limited size.
    out.put_u32(u32::try_from(len).unwrap_or(u32::MAX));
}

fn put_varint(mut value: u64, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

const fn varint_len(value: u64) -> usize {
    // Seven bits per byte, and one byte for zero.
    (64 - (value | 1).leading_zeros() as usize).div_ceil(7)
}

/// Returns a number and the bytes after the number, or `None` if the number is incomplete or exceeds 64 bits.
fn varint(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let mut value = 0;
    let mut rest = bytes;
    for shift in (0..64).step_by(7) {
        let (&byte, behind) = rest.split_first()?;
        rest = behind;
        if shift == 63 && byte > 1 {
            return None;
        }
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some((value, rest));
        }
    }
    None
}
