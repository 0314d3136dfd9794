//! The compression framing: bytes that compression adds to every payload, even to an uncompressed payload.
//! This crate never compresses and never decompresses.

#[cfg(test)]
mod tests;

/// First byte of an uncompressed payload in LZO framing.
const LZO_NONE: u8 = 0xfa;
/// First byte of an uncompressed payload in stub framing. The payload's original first byte is moved to the
/// end.
const SWAPPED: u8 = 0xfb;
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

    /// Returns the option without compression that has the framing of the option `compress ARGUMENT`; `None` if the option
    /// names no algorithm.
    pub fn without_compression(argument: Option<&str>) -> Option<&'static str> {
        match argument? {
            "lz4" => Some("compress stub"),
            "lz4-v2" => Some("compress stub-v2"),
            "lzo" => Some("comp-lzo no"),
            _ => None,
        }
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

    /// Removes the framing in place and returns the payload. Returns `None` for a payload that is compressed,
    /// or that has another framing. Stock from 2.5 on sends no such payload unless configured to compress.
    pub fn strip(self, payload: &mut [u8]) -> Option<&mut [u8]> {
        if self == Self::None {
            return Some(payload);
        }
        match (self, *payload.first()?) {
            (Self::StubV2, V2) => match payload.split_at_mut_checked(2)? {
                ([_, 0], rest) => Some(rest),
                _ => None,
            },
            (Self::StubV2, _) => Some(payload),
            (_, LZO_NONE) => Some(payload.split_at_mut(1).1),
            (_, SWAPPED) => {
                let (last, payload) = payload.split_last_mut()?;
                *payload.first_mut()? = *last;
                Some(payload)
            }
            _ => None,
        }
    }
}
