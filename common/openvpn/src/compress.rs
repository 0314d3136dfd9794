//! The framing that compression leaves on every payload, also where nothing is compressed. This crate
//! never compresses, and does not decompress.

#[cfg(test)]
mod tests;

/// LZO's mark for a payload that is not compressed.
const LZO_NONE: u8 = 0xfa;
/// The mark of a payload that is not compressed, and whose first byte is at the end.
const SWAPPED: u8 = 0xfb;
const LZO: u8 = 0x66;
const LZ4: u8 = 0x69;
/// The first byte of the newer framing, where the algorithm is in the second: 0 for none.
const V2: u8 = 0x50;

/// How payloads are framed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Framing {
    /// Not at all.
    #[default]
    None,
    /// `comp-lzo`, in any of its forms, and `compress lzo`.
    Lzo,
    /// `compress`, `compress stub` and `compress lz4`.
    Stub,
    /// `compress stub-v2` and `compress lz4-v2`.
    StubV2,
}

/// Why a payload is dropped. Stock, from 2.5 on, sends none of these unless told to compress.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CompressError {
    /// The peer compresses with LZO.
    #[error("payload is compressed with LZO")]
    Lzo,
    /// The peer compresses with LZ4.
    #[error("payload is compressed with LZ4")]
    Lz4,
    /// The peer frames in another way than was agreed.
    #[error("payload is framed with {0:#04x}")]
    Unknown(u8),
    /// There is no framing, nor anything else.
    #[error("payload is empty")]
    Empty,
}

impl Framing {
    /// The framing that the option `compress ARGUMENT` asks for; `None` if there is no such algorithm.
    pub fn of_compress(argument: Option<&str>) -> Option<Self> {
        Some(match argument {
            None | Some("stub" | "lz4") => Self::Stub,
            Some("lzo") => Self::Lzo,
            Some("stub-v2" | "lz4-v2") => Self::StubV2,
            Some(_) => return None,
        })
    }

    /// The most bytes that it adds.
    pub const MAX_OVERHEAD: usize = 2;

    /// The pieces which, one after the other, are `payload` with its framing.
    pub fn frame(self, payload: &[u8]) -> [&[u8]; 3] {
        match (self, payload.split_first()) {
            (Self::Lzo, _) => [&[LZO_NONE], payload, &[]],
            (Self::Stub, Some((first, rest))) => [&[SWAPPED], rest, std::slice::from_ref(first)],
            (Self::StubV2, Some((&V2, _))) => [&[V2, 0], payload, &[]],
            (Self::None | Self::Stub | Self::StubV2, _) => [&[], payload, &[]],
        }
    }

    /// Takes the framing off, where the payload is.
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
