//! The Internet checksum (RFC 1071) and its incremental update (RFC 1624).

use std::ops::Add;

/// A sum of 16-bit words, not yet folded.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sum(u64);

impl Sum {
    /// Sums bytes. An odd last byte counts as if a zero byte followed.
    pub fn of(bytes: &[u8]) -> Self {
        // The loop adds four bytes at a time in native byte order, so the compiler can vectorize it. One's
        // complement sums do not depend on the byte order, except for a final swap.
        let (words, rest) = bytes.as_chunks::<4>();
        let mut sum: u64 = words
            .iter()
            .map(|word| u64::from(u32::from_ne_bytes(*word)))
            .sum();
        let mut last = [0; 4];
        for (to, from) in last.iter_mut().zip(rest) {
            *to = *from;
        }
        sum += u64::from(u32::from_ne_bytes(last));
        Self(u64::from(u16::from_be(fold(sum))))
    }

    /// Returns the 16-bit one's complement sum: 0xffff for bytes that include a correct checksum.
    pub fn fold(self) -> u16 {
        fold(self.0)
    }

    /// Returns the value of the checksum field.
    pub fn checksum(self) -> u16 {
        !self.fold()
    }
}

impl Add for Sum {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
}

fn fold(mut sum: u64) -> u16 {
    sum = (sum & 0xffff_ffff) + (sum >> 32);
    sum = (sum & 0xffff_ffff) + (sum >> 32);
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    // The sum is below 2^16 after three 16-bit folds.
    sum as u16
}

/// Returns the checksum after one word has changed from `old` to `new` (RFC 1624, equation 3).
pub(crate) fn adjust(checksum: u16, old: u16, new: u16) -> u16 {
    let sum = u64::from(!checksum) + u64::from(!old) + u64::from(new);
    !fold(sum)
}
