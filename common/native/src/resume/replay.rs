//! The bytes of a stream that the peer has not acknowledged.

use std::collections::VecDeque;
use std::io::IoSlice;

use bytes::Bytes;

/// Capacity of a block for bulk, in bytes. The allocator soon reuses a block that was just freed, so the copied bytes
/// stay in the processor's cache while the peer acknowledges quickly.
const BLOCK_BYTES: usize = 64 * 1024;

/// Capacity of a block for small writes, in bytes.
const SMALL_BLOCK_BYTES: usize = 4 * 1024;

/// Bytes from `start` to `end` of an endless stream, in blocks. An empty buffer has no blocks.
#[derive(Debug)]
pub(super) struct Replay {
    blocks: VecDeque<Block>,
    /// Bytes at the start of the first block that were released.
    released: usize,
    start: u64,
    end: u64,
    limit: usize,
}

/// A part of the stream.
#[derive(Debug)]
enum Block {
    /// Copied bytes. The capacity never grows.
    Copied(Vec<u8>),
    /// Part of the buffer that the bytes came in.
    Shared(Bytes),
}

impl Block {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Copied(bytes) => bytes,
            Self::Shared(bytes) => bytes,
        }
    }

    /// Returns the vector if there is room in it.
    fn with_room(&mut self) -> Option<&mut Vec<u8>> {
        match self {
            Self::Copied(bytes) if bytes.len() < bytes.capacity() => Some(bytes),
            _ => None,
        }
    }
}

impl Replay {
    /// Creates an empty buffer that keeps at most `limit` bytes.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            blocks: VecDeque::new(),
            released: 0,
            start: 0,
            end: 0,
            limit,
        }
    }

    /// Returns the offset of the first byte.
    pub(super) fn start(&self) -> u64 {
        self.start
    }

    /// Returns the offset after the last byte.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    /// Returns the number of bytes that may be added.
    pub(super) fn room(&self) -> usize {
        let kept = usize::try_from(self.end - self.start).unwrap_or(usize::MAX);
        self.limit.saturating_sub(kept)
    }

    /// Adds at most `most` bytes, and returns their number. `buffer` returns the buffer of a slice, if the buffer can be
    /// kept instead of a copy.
    pub(super) fn push(
        &mut self,
        slices: &[IoSlice<'_>],
        most: usize,
        buffer: impl Fn(&[u8]) -> Option<Bytes>,
    ) -> usize {
        let total: usize = slices.iter().map(|slice| slice.len()).sum();
        let count = total.min(most).min(self.room());
        let mut left = count;
        for slice in slices {
            let part = slice.get(..left.min(slice.len())).unwrap_or_default();
            match buffer(part) {
                Some(shared) => self.blocks.push_back(Block::Shared(shared)),
                None => self.append(part),
            }
            left -= part.len();
        }
        self.end += count as u64;
        count
    }

    /// Appends a copy of bytes.
    fn append(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.blocks.back_mut().and_then(Block::with_room).is_none() {
                let capacity = match bytes.len() > SMALL_BLOCK_BYTES {
                    true => BLOCK_BYTES,
                    false => SMALL_BLOCK_BYTES,
                };
                let block = Vec::with_capacity(capacity);
                self.blocks.push_back(Block::Copied(block));
            }
            let Some(block) = self.blocks.back_mut().and_then(Block::with_room) else {
                return;
            };
            let room = block.capacity() - block.len();
            let (now, later) = bytes.split_at(bytes.len().min(room));
            block.extend_from_slice(now);
            bytes = later;
        }
    }

    /// Releases the bytes before the offset `to`.
    pub(super) fn release(&mut self, to: u64) {
        let to = to.clamp(self.start, self.end);
        self.released += usize::try_from(to - self.start).unwrap_or(usize::MAX);
        self.start = to;
        while let Some(block) = self.blocks.front()
            && block.bytes().len() <= self.released
        {
            self.released -= block.bytes().len();
            self.blocks.pop_front();
        }
    }

    /// Stores the bytes from the offset `from` in `slices`, at most `most` bytes. Returns the number of slices.
    pub(super) fn slices<'a>(
        &'a self,
        from: u64,
        most: usize,
        slices: &mut [IoSlice<'a>],
    ) -> usize {
        // The bytes to send are at the end, so the search starts there.
        let (mut at, mut first) = (self.end, self.blocks.len());
        for block in self.blocks.iter().rev() {
            if at <= from {
                break;
            }
            at -= block.bytes().len() as u64;
            first -= 1;
        }
        let mut skip = usize::try_from(from.saturating_sub(at)).unwrap_or(usize::MAX);
        let (mut left, mut count) = (most, 0);
        for (block, slice) in self.blocks.range(first..).zip(slices) {
            let part = block.bytes().get(skip..).unwrap_or_default();
            let part = part.get(..left.min(part.len())).unwrap_or_default();
            if part.is_empty() {
                break;
            }
            *slice = IoSlice::new(part);
            left -= part.len();
            skip = 0;
            count += 1;
        }
        count
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::indexing_slicing)]

    use super::*;

    fn bytes(from: u64, count: usize) -> Vec<u8> {
        (from..).take(count).map(|at| (at % 251) as u8).collect()
    }

    fn read(replay: &Replay, from: u64, most: usize) -> Vec<u8> {
        let mut slices = [IoSlice::new(&[]); 512];
        let count = replay.slices(from, most, &mut slices);
        let slices = slices[..count].iter();
        slices.flat_map(|slice| slice.to_vec()).collect()
    }

    #[test]
    fn every_range_of_the_kept_bytes_is_readable() {
        let mut replay = Replay::new(1 << 20);
        for count in [1, 5, 4090, 200_000, 1, 70_000] {
            let data = bytes(replay.end(), count);
            let (near, far) = data.split_at(count / 3);
            let slices = [IoSlice::new(near), IoSlice::new(far)];
            assert_eq!(replay.push(&slices, usize::MAX, |_| None), count);
        }
        for start in [0, 3, 4096, 100_000, 270_000] {
            replay.release(start);
            for from in (start..=replay.end()).step_by(9973) {
                let left = (replay.end() - from) as usize;
                assert_eq!(read(&replay, from, usize::MAX), bytes(from, left));
                assert_eq!(read(&replay, from, 10), bytes(from, left.min(10)));
            }
        }
        replay.release(u64::MAX);
        assert_eq!((replay.start(), replay.blocks.len()), (replay.end(), 0));
    }

    #[test]
    fn large_slices_keep_their_buffers_and_other_slices_are_copied() {
        let mut replay = Replay::new(1 << 20);
        let buffer = Bytes::from(bytes(10, 300_000));
        let (head, tail) = (bytes(0, 10), bytes(200_010, 7));
        let find = |slice: &[u8]| (slice.len() > 1000).then(|| buffer.slice_ref(slice));
        let slices = [&head[..], &buffer[..200_000], &tail[..]].map(IoSlice::new);
        assert_eq!(replay.push(&slices, usize::MAX, find), 200_017);
        assert_eq!(replay.blocks.len(), 3);
        for from in [0, 5, 10, 100_000, 200_009, 200_012] {
            let left = (replay.end() - from) as usize;
            assert_eq!(read(&replay, from, usize::MAX), bytes(from, left));
        }
        replay.release(100_000);
        assert_eq!(replay.blocks.len(), 2);
        replay.release(200_017);
        assert!(replay.blocks.is_empty() && buffer.is_unique());
        // The last bytes that fit are a part of the slice.
        let mut replay = Replay::new(1500);
        let slices = [IoSlice::new(&buffer)];
        assert_eq!(replay.push(&slices, usize::MAX, find), 1500);
        assert_eq!(read(&replay, 0, usize::MAX), bytes(10, 1500));
    }

    #[test]
    fn buffer_accepts_no_more_than_its_limit() {
        let mut replay = Replay::new(100);
        assert_eq!(replay.push(&[IoSlice::new(&[7; 80])], 70, |_| None), 70);
        assert_eq!(replay.push(&[IoSlice::new(&[7; 80])], 70, |_| None), 30);
        assert_eq!(replay.push(&[IoSlice::new(&[7; 80])], 70, |_| None), 0);
        replay.release(1);
        assert_eq!(replay.room(), 1);
    }
}
