//! The buffers of the chunks in HTTP/2's send queue. `h2` passes slices of them to the stream below. A stream that keeps
//! the bytes finds the buffer of a slice here, and keeps the buffer instead of a copy.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;

/// Smallest slice to keep by its buffer, in bytes. Half of a large read: a kept slice keeps a whole read alive, so buffers
/// take at most twice the size of the slices.
const LEAST_BYTES: usize = 128 * 1024;

/// The buffers of one connection.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    /// True if the stream below HTTP/2 keeps bytes.
    is_used: AtomicBool,
    /// Chunks that HTTP/2 has not written, by the addresses of their first bytes.
    chunks: Mutex<BTreeMap<usize, Bytes>>,
}

/// Entry of a chunk; dropping the value removes the entry.
#[derive(Debug)]
pub(crate) struct Listed {
    buffers: Arc<Buffers>,
    address: usize,
}

impl Buffers {
    /// Begins to list chunks: the stream below HTTP/2 keeps bytes.
    pub(crate) fn begin(&self) {
        self.is_used.store(true, Ordering::Relaxed);
    }

    /// Lists a chunk, if it is worth the effort.
    pub(crate) fn list(self: &Arc<Self>, chunk: &Bytes) -> Option<Listed> {
        if chunk.len() < LEAST_BYTES || !self.is_used.load(Ordering::Relaxed) {
            return None;
        }
        let address = chunk.as_ptr().addr();
        self.chunks.lock().insert(address, chunk.clone());
        Some(Listed {
            buffers: self.clone(),
            address,
        })
    }

    /// Returns the part of a listed chunk that `slice` refers to. A listed chunk is alive, so no other memory has its
    /// addresses.
    pub(crate) fn find(&self, slice: &[u8]) -> Option<Bytes> {
        if slice.len() < LEAST_BYTES {
            return None;
        }
        let address = slice.as_ptr().addr();
        let chunks = self.chunks.lock();
        let (start, chunk) = chunks.range(..=address).next_back()?;
        let from = address - start;
        let to = from.checked_add(slice.len())?;
        (to <= chunk.len()).then(|| chunk.slice(from..to))
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.buffers.chunks.lock().remove(&self.address);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]

    use super::*;

    #[test]
    fn slices_of_listed_chunks_are_found_and_others_are_not() {
        let buffers = Arc::<Buffers>::default();
        let chunk = Bytes::from(vec![1; 2 * LEAST_BYTES]);
        assert!(buffers.list(&chunk).is_none(), "nobody keeps bytes");
        buffers.begin();
        let listed = buffers.list(&chunk).unwrap();
        for from in [0, 1, LEAST_BYTES] {
            let found = buffers.find(&chunk[from..]).unwrap();
            assert_eq!(found.as_ptr(), chunk[from..].as_ptr());
            assert_eq!(found.len(), chunk.len() - from);
        }
        assert_eq!(
            buffers.find(&chunk[..LEAST_BYTES]).unwrap().len(),
            LEAST_BYTES
        );
        assert!(buffers.find(&chunk[..LEAST_BYTES - 1]).is_none());
        let other = vec![1; LEAST_BYTES];
        assert!(buffers.find(&other).is_none());
        assert!(buffers.list(&Bytes::from_static(b"small")).is_none());
        drop(listed);
        assert!(buffers.find(&chunk).is_none());
    }
}
