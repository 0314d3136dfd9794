//! The pipes that move bytes between sockets in the kernel.

use std::cell::RefCell;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};
use tokio::net::TcpStream;

/// Requested capacity of a pipe, in bytes. The kernel counts pages, so a pipe may hold more. The kernel
/// allows at most `fs.pipe-max-size` (1 MiB) per pipe, and 64 MiB for all pipes of a user without privileges.
const PIPE_BYTES: usize = 256 * 1024;

/// Requested capacity of a large pipe, in bytes; large pipes need fewer system calls (docs/decisions/0005).
const LARGE_PIPE_BYTES: usize = 1024 * 1024;

/// Largest number of large pipes: half of the limit of a user without privileges.
const LARGE_PIPES: usize = 32;

/// Largest number of empty pipes in a thread's pool.
const SPARE_PIPES: usize = 32;

const FLAGS: SpliceFlags = SpliceFlags::MOVE.union(SpliceFlags::NONBLOCK);

/// Number of large pipes.
static LARGE: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static PIPES: RefCell<Vec<Pipe>> = const { RefCell::new(Vec::new()) };
}

/// An empty pipe.
pub(super) struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
    /// Requested capacity.
    bytes: usize,
}

// === impl Pipe ===

impl Pipe {
    /// Takes a pipe from the thread's pool, or opens a pipe.
    ///
    /// # Errors
    /// Fails without free file descriptors.
    pub(super) fn take() -> io::Result<Self> {
        if let Some(pipe) = PIPES.with_borrow_mut(Vec::pop) {
            return Ok(pipe);
        }
        let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        let one_more = |large| (large < LARGE_PIPES).then_some(large + 1);
        let large = LARGE.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more);
        let bytes = large.map_or(PIPE_BYTES, |_| LARGE_PIPE_BYTES);
        let pipe = Self { read, write, bytes };
        // A smaller pipe only needs more system calls.
        if fcntl_setpipe_size(&pipe.write, bytes).is_err() {
            let _ = fcntl_setpipe_size(&pipe.write, PIPE_BYTES);
        }
        Ok(pipe)
    }

    /// Returns the pipe to the thread's pool. The pipe must be empty; a pipe with bytes in it must be dropped
    /// instead.
    pub(super) fn give_back(self) {
        PIPES.with_borrow_mut(|spare| {
            if spare.len() < SPARE_PIPES {
                spare.push(self);
            }
        });
    }

    /// Moves up to `most` bytes from a socket to the pipe.
    pub(super) fn fill(&self, from: &TcpStream, most: usize) -> io::Result<usize> {
        let bytes = self.bytes.min(most);
        Ok(splice(from, None, &self.write, None, bytes, FLAGS)?)
    }

    /// Moves up to `len` bytes from the pipe to a socket.
    pub(super) fn drain(&self, to: &TcpStream, len: usize) -> io::Result<usize> {
        Ok(splice(&self.read, None, to, None, len, FLAGS)?)
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        if self.bytes == LARGE_PIPE_BYTES {
            LARGE.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn only_a_limited_number_of_pipes_is_large() {
        let held = |pipe: &Pipe| rustix::pipe::fcntl_getpipe_size(&pipe.write).unwrap();
        let pipes: Vec<_> = (0..LARGE_PIPES + 8)
            .map(|_| Pipe::take().unwrap())
            .collect();
        let large = pipes.iter().filter(|pipe| held(pipe) > PIPE_BYTES).count();
        // Other tests in this process may use some of the large pipes.
        assert!((1..=LARGE_PIPES).contains(&large), "{large} are large");
        assert!(held(pipes.last().unwrap()) <= PIPE_BYTES);
        drop(pipes);
        assert_eq!(held(&Pipe::take().unwrap()), LARGE_PIPE_BYTES);
    }
}
