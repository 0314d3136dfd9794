//! The pipes that move bytes between sockets in the kernel.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use culvert_host::net::listen::is_last;
use rustix::pipe::{
    PipeFlags, SpliceFlags, fcntl_getpipe_size, fcntl_setpipe_size, pipe_with, splice,
};
use tokio::net::TcpStream;
use tokio::time::Instant;

/// Requested capacity of a pipe, in bytes. The kernel counts pages, so a pipe may hold more. The kernel
/// allows at most `fs.pipe-max-size` (1 MiB) per pipe, and 64 MiB for all pipes of a user without privileges.
const PIPE_BYTES: usize = 256 * 1024;

/// Requested capacity of a large pipe, in bytes; large pipes need fewer system calls (docs/decisions/0005).
const LARGE_PIPE_BYTES: usize = 1024 * 1024;

/// Largest number of large pipes: half of the limit of a user without privileges.
const LARGE_PIPES: usize = 32;

/// Smallest useful capacity, in bytes: the default of the kernel. Beyond the limit of a user without privileges, a new
/// pipe has two pages, and moving bytes through such a pipe costs more than copying them.
const MIN_PIPE_BYTES: usize = 64 * 1024;

/// Time without attempts to open a pipe after a failure.
const PAUSE: Duration = Duration::from_secs(1);

/// Largest number of empty pipes in a thread's pool.
const SPARE_PIPES: usize = 32;

const FLAGS: SpliceFlags = SpliceFlags::MOVE.union(SpliceFlags::NONBLOCK);

/// Number of large pipes.
static LARGE: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static PIPES: RefCell<Vec<Pipe>> = const { RefCell::new(Vec::new()) };
    /// Time of the last failure to open a pipe.
    static FAILED: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// An empty pipe.
pub(super) struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
    /// Capacity that the kernel has granted.
    bytes: usize,
    /// `None` if the pipe is not large.
    _large: Option<Large>,
}

/// A place among the large pipes, until dropped.
struct Large;

// === impl Pipe ===

impl Pipe {
    /// Takes a pipe from the thread's pool, or opens a pipe. Returns `None` without free file descriptors, and if the
    /// kernel grants no useful capacity.
    pub(super) fn take() -> Option<Self> {
        if let Some(pipe) = PIPES.with_borrow_mut(Vec::pop) {
            return Some(pipe);
        }
        if FAILED.get().is_some_and(|at| at.elapsed() < PAUSE) {
            return None;
        }
        let ends = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).ok();
        let ends = ends.filter(|(read, write)| !is_last(read) && !is_last(write));
        let pipe = ends.and_then(|(read, write)| {
            Self::of(read, write, |pipe, bytes| fcntl_setpipe_size(pipe, bytes))
        });
        FAILED.set(pipe.is_none().then(Instant::now));
        pipe
    }

    /// Creates a pipe from its ends. `resize` sets the capacity and returns the granted capacity.
    fn of(
        read: OwnedFd,
        write: OwnedFd,
        resize: impl Fn(&OwnedFd, usize) -> rustix::io::Result<usize>,
    ) -> Option<Self> {
        let large = Large::take();
        let large = large.and_then(|place| Some((place, resize(&write, LARGE_PIPE_BYTES).ok()?)));
        let (bytes, large) = match large {
            Some((place, bytes)) => (bytes, Some(place)),
            None => {
                let bytes = resize(&write, PIPE_BYTES);
                (bytes.or_else(|_| fcntl_getpipe_size(&write)).ok()?, None)
            }
        };
        (bytes >= MIN_PIPE_BYTES).then_some(Self {
            read,
            write,
            bytes,
            _large: large,
        })
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

impl Large {
    fn take() -> Option<Self> {
        let one_more = |large| (large < LARGE_PIPES).then_some(large + 1);
        let taken = LARGE.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more);
        taken.ok().map(|_| Self)
    }
}

impl Drop for Large {
    fn drop(&mut self) {
        LARGE.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use rustix::io::Errno;

    use super::*;

    fn ends() -> (OwnedFd, OwnedFd) {
        pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap()
    }

    #[test]
    fn pipe_has_the_granted_capacity_or_is_not_used() {
        // As beyond the limit of a user without privileges.
        let (read, write) = ends();
        fcntl_setpipe_size(&write, 8192).unwrap();
        assert!(Pipe::of(read, write, |_, _| Err(Errno::PERM)).is_none());
        // As with a smaller fs.pipe-max-size.
        let (read, write) = ends();
        let resize = |pipe: &OwnedFd, bytes| match bytes {
            LARGE_PIPE_BYTES => Err(Errno::PERM),
            bytes => fcntl_setpipe_size(pipe, bytes),
        };
        let pipe = Pipe::of(read, write, resize).unwrap();
        assert_eq!(pipe.bytes, PIPE_BYTES);
        assert!(pipe._large.is_none());
        let (read, write) = ends();
        let pipe = Pipe::of(read, write, |_, _| Err(Errno::PERM)).unwrap();
        assert_eq!(pipe.bytes, MIN_PIPE_BYTES);
    }

    #[test]
    fn failure_to_open_a_pipe_is_followed_by_a_pause() {
        FAILED.set(Some(Instant::now()));
        assert!(Pipe::take().is_none());
        FAILED.set(Instant::now().checked_sub(PAUSE));
        assert!(Pipe::take().is_some());
        assert!(FAILED.get().is_none());
    }

    #[test]
    fn only_a_limited_number_of_pipes_is_large() {
        let held = |pipe: &Pipe| fcntl_getpipe_size(&pipe.write).unwrap();
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
