//! Packets in a TCP stream: each has its length, as a `u16` that does not count itself, in front.

#[cfg(test)]
mod tests;

use bytes::{Buf, BufMut, BytesMut};

/// The length field.
pub const PREFIX_LEN: usize = 2;

/// Why a stream can not be read any further: where the next packet begins is unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("packet length {length} is not between 1 and {max}")]
pub struct LengthError {
    /// What the peer sent.
    pub length: usize,
    /// What was allowed.
    pub max: usize,
}

/// A packet, and what follows it in its stream.
pub type Split<'a> = (&'a mut [u8], &'a mut [u8]);

/// Cuts the first packet off `stream`; `None` if it is not all there.
///
/// For reading many packets that stay where they were received: go on with the rest, and in the end
/// advance the buffer by [`PREFIX_LEN`] and the length of each.
pub fn split_first(stream: &mut [u8], max: usize) -> Result<Option<Split<'_>>, LengthError> {
    let Some(length) = first_length(stream, max)? else {
        return Ok(None);
    };
    let rest = stream.get_mut(PREFIX_LEN..).unwrap_or_default();
    Ok(rest.split_at_mut_checked(length))
}

/// Takes the first packet out of `stream`; `None` if it is not all there.
///
/// A stream that is read until this returns `None` holds less than [`PREFIX_LEN`] + `max` bytes.
pub fn take_first(stream: &mut BytesMut, max: usize) -> Result<Option<BytesMut>, LengthError> {
    match first_length(stream, max)? {
        Some(length) if stream.len() >= PREFIX_LEN + length => {
            stream.advance(PREFIX_LEN);
            Ok(Some(stream.split_to(length)))
        }
        _ => Ok(None),
    }
}

/// Appends a packet that `build` appends, with its length in front. If that fails, or makes a packet
/// whose length does not fit, `out` is as before.
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
