//! Packets in a TCP stream. A `u16` length precedes each packet and does not include itself.

#[cfg(test)]
mod tests;

use bytes::{Buf, BufMut, BytesMut};

/// Size of the length field, in bytes.
pub const PREFIX_LEN: usize = 2;

/// A packet with an invalid length. The stream cannot continue, because the start of the next packet is
/// unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("packet length {length} is not between 1 and {max}")]
pub struct LengthError {
    /// Length that the peer sent.
    pub length: usize,
    /// Largest allowed length.
    pub max: usize,
}

/// A packet, and the bytes after it in the stream.
pub(crate) type Split<'a> = (&'a mut [u8], &'a mut [u8]);

/// Splits the first packet off `stream`. Returns `None` if the packet is incomplete.
///
/// For reading many packets in place: continue with the rest, and finally advance the buffer by
/// [`PREFIX_LEN`] plus the length of each packet.
pub fn split_first(stream: &mut [u8], max: usize) -> Result<Option<Split<'_>>, LengthError> {
    let Some(length) = first_length(stream, max)? else {
        return Ok(None);
    };
    let rest = stream.get_mut(PREFIX_LEN..).unwrap_or_default();
    Ok(rest.split_at_mut_checked(length))
}

/// Removes the first packet from `stream`. Returns `None` if the packet is incomplete.
///
/// After `None` the stream contains less than [`PREFIX_LEN`] + `max` bytes.
pub fn take_first(stream: &mut BytesMut, max: usize) -> Result<Option<BytesMut>, LengthError> {
    match first_length(stream, max)? {
        Some(length) if stream.len() >= PREFIX_LEN + length => {
            stream.advance(PREFIX_LEN);
            Ok(Some(stream.split_to(length)))
        }
        _ => Ok(None),
    }
}

/// Appends a length and the packet that `build` appends. If `build` fails or the length is invalid, `out` is
/// unchanged.
pub fn write<E: From<LengthError>>(
    out: &mut BytesMut,
    build: impl FnOnce(&mut BytesMut) -> Result<(), E>,
) -> Result<(), E> {
    let start = out.len();
    out.put_u16(0);
    let built = build(out).and_then(|()| {
        let length = out.len().saturating_sub(start + PREFIX_LEN);
        match u16::try_from(length) {
            Ok(prefix @ 1..) => Ok(prefix),
            _ => Err(LengthError {
                length,
                max: usize::from(u16::MAX),
            }
            .into()),
        }
    });
    match built {
        Ok(length) => {
            if let Some(prefix) = out.get_mut(start..start + PREFIX_LEN) {
                prefix.copy_from_slice(&length.to_be_bytes());
            }
            Ok(())
        }
        Err(error) => {
            out.truncate(start);
            Err(error)
        }
    }
}

fn first_length(stream: &[u8], max: usize) -> Result<Option<usize>, LengthError> {
    let Some(&prefix) = stream.first_chunk() else {
        return Ok(None);
    };
    let length = usize::from(u16::from_be_bytes(prefix));
    if length == 0 || length > max {
        return Err(LengthError { length, max });
    }
    Ok(Some(length))
}
