//! The deterministic byte stream that services send and checks expect.
//!
//! Byte `i` is `(i * 31 + (i >> 8)) & 0xff`. Neighbouring bytes differ, so a shifted, doubled or lost byte is
//! detected at once. The stream repeats only every [`PERIOD`] bytes, so a lost or swapped buffer of any usual
//! size is detected too. Because the stream is periodic, one table serves all sends and comparisons.

use std::sync::LazyLock;

use aws_lc_rs::digest::{Context, SHA256};
use bytes::Bytes;

/// Period of the stream, in bytes: `i & 0xff` and `(i >> 8) & 0xff` determine a byte.
pub const PERIOD: usize = 1 << 16;

/// Largest result of [`piece`], in bytes. Services and checks write at most this many bytes at once.
pub const MAX_PIECE: usize = 256 * 1024;

// One period longer than the largest piece, so that a piece can start at any offset.
static TABLE: LazyLock<Bytes> = LazyLock::new(|| {
    (0..PERIOD + MAX_PIECE)
        .map(|i| (i.wrapping_mul(31).wrapping_add(i >> 8) & 0xff) as u8)
        .collect()
});

/// Returns the bytes of the stream from `offset`: `wanted` bytes, but at most [`MAX_PIECE`]. Does not copy.
pub fn piece(offset: u64, wanted: u64) -> Bytes {
    let start = usize::try_from(offset % PERIOD as u64).unwrap_or(0);
    let len = usize::try_from(wanted).map_or(MAX_PIECE, |wanted| wanted.min(MAX_PIECE));
    TABLE.slice(start..start + len)
}

/// Returns the first `len` bytes of the stream.
pub fn prefix(len: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    for piece in pieces(len) {
        bytes.extend_from_slice(&piece);
    }
    bytes
}

/// Returns the first `len` bytes of the stream, in pieces to write.
pub fn pieces(len: u64) -> impl Iterator<Item = Bytes> {
    let mut offset = 0;
    std::iter::from_fn(move || {
        let next = piece(offset, len - offset);
        offset += next.len() as u64;
        (!next.is_empty()).then_some(next)
    })
}

/// Compares received bytes with the stream as the bytes arrive.
#[derive(Debug, Default)]
pub struct Verifier {
    offset: u64,
}

impl Verifier {
    /// Returns the number of correct bytes so far.
    pub fn verified(&self) -> u64 {
        self.offset
    }

    /// Compares the next received bytes.
    ///
    /// # Errors
    /// Returns the offset of the first wrong byte.
    pub fn feed(&mut self, received: &[u8]) -> Result<(), u64> {
        for part in received.chunks(MAX_PIECE) {
            let expected = piece(self.offset, part.len() as u64);
            if expected != part {
                let same = expected.iter().zip(part).take_while(|(a, b)| a == b);
                return Err(self.offset + same.count() as u64);
            }
            self.offset += part.len() as u64;
        }
        Ok(())
    }
}

/// A running SHA-256 with a lower-case hex result.
pub struct Digest(Context);

impl Default for Digest {
    fn default() -> Self {
        Self(Context::new(&SHA256))
    }
}

impl Digest {
    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Returns the digest as 64 hex digits.
    pub fn finish(self) -> String {
        let digest = self.0.finish();
        digest.as_ref().iter().map(|b| format!("{b:02x}")).collect()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
    use super::*;

    #[test]
    fn pieces_follow_the_formula() {
        let len = (MAX_PIECE + PERIOD + 77) as u64;
        let bytes = prefix(len);
        assert_eq!(bytes.len() as u64, len);
        for (i, byte) in bytes.iter().enumerate() {
            assert_eq!(*byte, ((i * 31 + (i >> 8)) & 0xff) as u8, "byte {i}");
        }
    }

    #[test]
    fn verifier_returns_the_offset_of_the_first_wrong_byte() {
        let mut bytes = prefix(100_000);
        let mut good = Verifier::default();
        for part in bytes.chunks(777) {
            good.feed(part).unwrap();
        }
        assert_eq!(good.verified(), 100_000);
        bytes[70_001] ^= 1;
        let mut bad = Verifier::default();
        let wrong = bytes.chunks(777).find_map(|part| bad.feed(part).err());
        assert_eq!(wrong, Some(70_001));
    }

    #[test]
    fn digest_is_sha256() {
        let mut digest = Digest::default();
        digest.update(b"abc");
        assert_eq!(
            digest.finish(),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }
}
