//! The compression framing: bytes that compression adds to every payload, even to an uncompressed payload.
//! This crate never compresses and never decompresses.

#[cfg(test)]
mod tests;

/// First byte of an uncompressed payload in LZO framing.
const LZO_NONE: u8 = 0xfa;
/// First byte of an uncompressed payload in stub framing. The payload's original first byte is moved to the
/// end.
const SWAPPED: u8 = 0xfb;
const LZO: u8 = 0x66;
const LZ4: u8 = 0x69;
/// First byte of the v2 framing. The second byte is the algorithm; 0 means uncompressed.
const V2: u8 = 0x50;

/// Framing of payloads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Framing {
    /// No framing.
    #[default]
    None,
    /// `comp-lzo`, in any of its forms, and `compress lzo`.
    Lzo,
    /// `compress`, `compress stub` and `compress lz4`.
    Stub,
    /// `compress stub-v2` and `compress lz4-v2`.
    StubV2,
}

/// Reason why a payload is dropped. Stock from 2.5 on sends no such payload unless configured to compress.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CompressError {
    /// The peer compresses with LZO.
    #[error("payload is compressed with LZO")]
    Lzo,
    /// The peer compresses with LZ4.
    #[error("payload is compressed with LZ4")]
    Lz4,
    /// The payload's first byte does not belong to the agreed framing, or the algorithm is unknown.
    #[error("unexpected compression framing byte {0:#04x}")]
    Unknown(u8),
    /// The payload is empty, or ends inside its framing.
    #[error("payload is empty")]
    Empty,
}

impl Framing {
    /// Returns the framing for the option `compress ARGUMENT`, or `None` if the algorithm is unknown.
    pub fn of_compress(argument: Option<&str>) -> Option<Self> {
        Some(match argument {
            None | Some("stub" | "lz4") => Self::Stub,
            Some("lzo") => Self::Lzo,
            Some("stub-v2" | "lz4-v2") => Self::StubV2,
            Some(_) => return None,
        })
    }

    /// Largest number of bytes that framing adds to a payload.
    pub const MAX_OVERHEAD: usize = 2;

    /// Returns `payload` with its framing, as three pieces to be written one after the other.
    pub fn frame(self, payload: &[u8]) -> [&[u8]; 3] {
        match (self, payload.split_first()) {
            (Self::Lzo, _) => [&[LZO_NONE], payload, &[]],
            (Self::Stub, Some((first, rest))) => [&[SWAPPED], rest, std::slice::from_ref(first)],
            (Self::StubV2, Some((&V2, _))) => [&[V2, 0], payload, &[]],
            (Self::None | Self::Stub | Self::StubV2, _) => [&[], payload, &[]],
        }
    }

    /// Removes the framing in place and returns the payload.
    pub fn strip(self, payload: &mut [u8]) -> Result<&mut [u8], CompressError> {
        if self == Self::None {
            return Ok(payload);
        }
        let mark = *payload.first().ok_or(CompressError::Empty)?;
        match (self, mark) {
            (Self::StubV2, V2) => match payload
                .split_at_mut_checked(2)
                .ok_or(CompressError::Empty)?
            {
                ([_, 0], rest) => Ok(rest),
                ([_, 1], _) => Err(CompressError::Lz4),
                _ => Err(CompressError::Unknown(V2)),
            },
            (Self::StubV2, _) => Ok(payload),
            (_, LZO_NONE) => Ok(payload.split_at_mut(1).1),
            (_, SWAPPED) => {
                let (last, payload) = payload.split_last_mut().ok_or(CompressError::Empty)?;
                *payload.first_mut().ok_or(CompressError::Empty)? = *last;
                Ok(payload)
            }
            (_, LZO) => Err(CompressError::Lzo),
            (_, LZ4) => Err(CompressError::Lz4),
            (_, other) => Err(CompressError::Unknown(other)),
        }
    }
}
