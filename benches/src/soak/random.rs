//! Pseudo-random numbers and bytes that a seed determines.
//!
//! SplitMix64 (Steele, Lea, Flood 2014) computes each number from a counter, so any part of a byte stream is available
//! without the bytes before it.

use std::time::Duration;

/// Step of the counter: 2^64 divided by the golden ratio.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

const WORD: u64 = size_of::<u64>() as u64;

/// A sequence of numbers.
#[derive(Debug, Clone)]
pub(super) struct Random {
    seed: u64,
    count: u64,
}

impl Random {
    /// Creates the sequence of `seed`.
    pub(super) fn new(seed: u64) -> Self {
        Self { seed, count: 0 }
    }

    /// Returns the next number.
    pub(super) fn next(&mut self) -> u64 {
        self.count += 1;
        mix(self.seed, self.count)
    }

    /// Returns a number below `bound`, or 0 if `bound` is 0.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.next().checked_rem(bound).unwrap_or(0)
    }

    /// Returns a duration between two bounds, in milliseconds.
    pub(super) fn millis(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(from + self.below(to.saturating_sub(from) + 1))
    }
}

/// Returns number `count` of the sequence of `seed`.
pub(super) fn mix(seed: u64, count: u64) -> u64 {
    let mut word = seed.wrapping_add(count.wrapping_mul(STEP));
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// Writes the bytes of the stream of `seed` from `offset` on.
pub(super) fn fill(seed: u64, offset: u64, bytes: &mut [u8]) {
    let (mut number, mut skipped) = (offset / WORD, (offset % WORD) as usize);
    let mut rest = bytes;
    while !rest.is_empty() {
        let word = mix(seed, number).to_le_bytes();
        let word = word.get(skipped..).unwrap_or_default();
        let length = word.len().min(rest.len());
        let (now, later) = rest.split_at_mut(length);
        now.copy_from_slice(word.get(..length).unwrap_or_default());
        (rest, number, skipped) = (later, number + 1, 0);
    }
}

/// Returns the offset of the first byte that differs from the stream of `seed`.
pub(super) fn difference(seed: u64, offset: u64, received: &[u8]) -> Option<u64> {
    let mut expected = vec![0; received.len()];
    fill(seed, offset, &mut expected);
    if expected == received {
        return None;
    }
    let same = expected.iter().zip(received).take_while(|(a, b)| a == b);
    Some(offset + same.count() as u64)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::indexing_slicing)]
    use super::*;

    #[test]
    fn every_part_of_a_stream_is_the_same_as_in_the_whole() {
        let mut whole = vec![0; 1000];
        fill(7, 0, &mut whole);
        for (from, length) in [(0, 1), (3, 5), (3, 500), (8, 16), (999, 1), (5, 0)] {
            let mut part = vec![0; length];
            fill(7, from as u64, &mut part);
            assert_eq!(part, whole[from..from + length]);
        }
        let mut other = vec![0; 1000];
        fill(8, 0, &mut other);
        assert_ne!(whole, other);
    }

    #[test]
    fn first_wrong_byte_is_found() {
        let mut bytes = vec![0; 100];
        fill(1, 50, &mut bytes);
        assert_eq!(difference(1, 50, &bytes), None);
        bytes[33] ^= 1;
        bytes[60] ^= 1;
        assert_eq!(difference(1, 50, &bytes), Some(83));
    }

    #[test]
    fn seed_determines_the_sequence() {
        let sequence = |seed| {
            let mut random = Random::new(seed);
            [random.next(), random.below(10), random.below(0)]
        };
        assert_eq!(sequence(5), sequence(5));
        assert_ne!(sequence(5)[0], sequence(6)[0]);
        assert!(sequence(5)[1] < 10);
        let pause = Random::new(3).millis(5, 9);
        assert!((5..=9).contains(&(pause.as_millis() as u64)));
    }
}
