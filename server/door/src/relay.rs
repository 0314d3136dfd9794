//! Moves bytes between two TCP sockets, each direction by itself.
//!
//! Small reads are copied through one buffer of the thread. A direction that fills it goes on by
//! `splice(2)`: bytes then pass from socket to socket through a pipe in the kernel. Pipes are taken
//! from a pool while there is something to move, so a connection that idles owns neither buffer
//! nor pipe.

use std::cell::RefCell;
use std::io;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use culvert_host::net::listen::Keepalive;
use culvert_host::net::pacing::spare_pacing;
use culvert_host::net::silence::is_over;
use culvert_stream::{CLOSE_STALL, CloseReason, HALF_OPEN_IDLE};
use futures_util::FutureExt as _;
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};
use socket2::SockRef;
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::task::{coop::consume_budget, yield_now};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::socket::read_once;
use super::watch::{Side, watch};

/// The buffer of a thread. What fills it is bulk.
const COPY_BYTES: usize = 16 * 1024;

/// What a pipe is asked to hold. The kernel counts pages, so it may hold more; it grants no more
/// than `fs.pipe-max-size`, 1 MiB, and 64 MiB for all pipes of a user without privileges.
const PIPE_BYTES: usize = 256 * 1024;

/// What some are asked to hold instead, which takes fewer calls (docs/tuning.md).
const LARGE_PIPE_BYTES: usize = 1024 * 1024;

/// How many of these there are at once: half of what a user without privileges has.
const LARGE_PIPES: usize = 32;

/// What one direction may move before others of its thread get a turn.
const TURN_BYTES: usize = 1024 * 1024;

/// What a connection has moved when it is worth a hand-over to another thread, which costs two wake-ups
/// and four registrations.
const MUCH_BYTES: u64 = 1024 * 1024;

/// Pipes that a thread keeps for the next one who needs one.
const SPARE_PIPES: usize = 32;

/// How long unread input is waited out at the end of a connection, see [`Relay::settle`].
const SETTLE: Duration = Duration::from_secs(2);

thread_local! {
    static BUFFER: RefCell<Box<[u8]>> = RefCell::new(vec![0; COPY_BYTES].into());
    static PIPES: RefCell<Vec<Pipe>> = const { RefCell::new(Vec::new()) };
}

/// The two sockets of one connection.
pub struct Relay<'a> {
    /// From whom the connection came.
    pub client: &'a TcpStream,
    /// To whom it goes.
    pub endpoint: &'a TcpStream,
    /// It carries nothing but TLS.
    pub is_tls: bool,
    /// Stops once it has moved much, so that another thread may go on.
    pub stops_at_much: bool,
    /// Ends the connection once nothing has moved for so long; `None` never does.
    pub idle: Option<Duration>,
    /// How the client, and the endpoint, are probed.
    pub keepalive: [&'a Keepalive; 2],
    /// Counts bytes from client to endpoint, here and elsewhere.
    pub sent: &'a AtomicU64,
    /// Counts bytes from endpoint to client.
    pub received: &'a AtomicU64,
}

/// One direction.
struct Way<'a> {
    from: &'a TcpStream,
    to: &'a TcpStream,
    is_tls: bool,
    stops_at_much: bool,
    /// Waits for something to read, and holds nothing that was read.
    rests: AtomicBool,
    total: &'a AtomicU64,
    /// Of this connection.
    moved: AtomicU64,
    done: Notify,
    /// `to` has reset the connection: the error is told once, and an end that is read from the
    /// socket afterwards is none.
    reset: AtomicBool,
    /// Why it ends when `from` fails, and when `to` does.
    lost: [CloseReason; 2],
}

/// An empty pipe.
struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
    /// What it was asked to hold.
    bytes: usize,
}

/// How many large pipes there are.
static LARGE: AtomicUsize = AtomicUsize::new(0);

/// Which of the two sockets failed. What the system said is of no use to anybody.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    From,
    To,
}

/// Why a direction stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    Lost(CloseReason),
    Much,
}

/// How a relay ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Why the connection has ended; `None` if it goes on, see [`Relay::stops_at_much`].
    pub reason: Option<CloseReason>,
    /// Bytes from client to endpoint.
    pub sent: u64,
    /// Bytes from endpoint to client.
    pub received: u64,
}

// === impl Relay ===

impl Relay<'_> {
    /// Moves bytes until both directions have ended, one has failed, or nothing moves any more. The caller
    /// then closes both sockets, which is how the last end is told.
    pub async fn run(&self) -> Ended {
        let up = Way {
            from: self.client,
            to: self.endpoint,
            is_tls: self.is_tls,
            stops_at_much: self.stops_at_much,
            rests: AtomicBool::new(false),
            total: self.sent,
            moved: AtomicU64::new(0),
            done: Notify::new(),
            reset: AtomicBool::new(false),
            lost: [CloseReason::ClientLost, CloseReason::EndpointLost],
        };
        let down = Way {
            from: self.endpoint,
            to: self.client,
            is_tls: self.is_tls,
            stops_at_much: self.stops_at_much,
            rests: AtomicBool::new(false),
            total: self.received,
            moved: AtomicU64::new(0),
            done: Notify::new(),
            reset: AtomicBool::new(false),
            lost: [CloseReason::EndpointLost, CloseReason::ClientLost],
        };
        let both = async {
            match tokio::try_join!(up.run(&down), down.run(&up)) {
                Ok(_) => Some(CloseReason::Finished),
                Err(Stop::Lost(reason)) => Some(reason),
                Err(Stop::Much) => None,
            }
        };
        let [client, endpoint] = self.keepalive;
        let sides = [
            Some(Side {
                socket: self.client,
                keepalive: client,
                lost: CloseReason::ClientLost,
            }),
            Some(Side {
                socket: self.endpoint,
                keepalive: endpoint,
                lost: CloseReason::EndpointLost,
            }),
        ];
        let reason = tokio::select! {
            reason = both => reason,
            reason = watch([&up.moved, &down.moved], self.idle, sides) => Some(reason),
        };
        match reason {
            Some(CloseReason::EndpointLost) => self.settle().await,
            // The endpoint must not take what came so far for all there is.
            Some(CloseReason::ClientLost) => {
                let _ = SockRef::from(self.endpoint).set_linger(Some(Duration::ZERO));
            }
            _ => {}
        }
        Ended {
            reason,
            sent: up.moved.load(Ordering::Relaxed),
            received: down.moved.load(Ordering::Relaxed),
        }
    }

    /// Lets the client read the endpoint's last words. An endpoint may answer and close without
    /// reading all it was sent; to close the client's socket with unread input would make TCP send
    /// a reset, which discards what the client has not read yet.
    async fn settle(&self) {
        // Fails if the client has gone already.
        let _ = SockRef::from(self.client).shutdown(Shutdown::Write);
        let deadline = Instant::now() + SETTLE;
        loop {
            tokio::select! {
                ready = self.client.readable() => if ready.is_err() { return },
                () = sleep_until(deadline) => return,
            }
            consume_budget().await;
            match BUFFER.with_borrow_mut(|buffer| self.client.try_read(buffer)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Ok(read) if read > 0 => {}
                _ => return,
            }
        }
    }
}

/// Resolves once `counter` has not changed for `bound`, at the latest after twice that.
async fn idle(counter: &AtomicU64, bound: Duration) {
    loop {
        let before = counter.load(Ordering::Relaxed);
        sleep(bound).await;
        if counter.load(Ordering::Relaxed) == before {
            return;
        }
    }
}

// === impl Way ===

impl Way<'_> {
    async fn run(&self, other: &Way<'_>) -> Result<(), Stop> {
        let [from_lost, to_lost] = self.lost.map(Stop::Lost);
        let (mut bulk, mut turn) = (false, 0);
        loop {
            let moved = if bulk {
                self.splice().await
            } else {
                self.copy().await
            };
            match moved {
                Ok(0) if other.reset.load(Ordering::Relaxed) => return Err(from_lost),
                Ok(0) => break,
                Ok(bytes) => {
                    if !bulk && bytes >= COPY_BYTES {
                        bulk = true;
                        spare_pacing(self.to);
                    }
                    if self.stops_at_much && self.is_much(other) {
                        return Err(Stop::Much);
                    }
                    // Sockets that are always ready never give way by themselves.
                    turn += bytes;
                    if turn >= TURN_BYTES {
                        turn = 0;
                        yield_now().await;
                    }
                }
                Err(Broken::From) => return Err(from_lost),
                Err(Broken::To) => {
                    // What comes the other way is still good.
                    tokio::select! {
                        () = other.done.notified() => {}
                        () = idle(&other.moved, CLOSE_STALL) => {}
                    }
                    return Err(to_lost);
                }
            }
        }
        self.done.notify_one();
        // Then both sockets are closed, which says the same in one system call less.
        if other.done.notified().now_or_never().is_some() {
            return Ok(());
        }
        // Fails if the peer has gone; the other direction tells.
        let _ = SockRef::from(self.to).shutdown(Shutdown::Write);
        // However long that idles: what the operator allows is the relay's to know. Nobody reads any
        // more that `from` is reset meanwhile.
        while timeout(HALF_OPEN_IDLE, other.done.notified())
            .await
            .is_err()
        {
            if is_over(self.from) {
                return Err(from_lost);
            }
        }
        Ok(())
    }

    fn count(&self, bytes: usize) {
        self.total.fetch_add(bytes as u64, Ordering::Relaxed);
        self.moved.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn broken_to(&self, error: &io::Error) -> Broken {
        // A peer that closed in order and reads no more breaks the pipe.
        if error.kind() == io::ErrorKind::ConnectionReset {
            self.reset.store(true, Ordering::Relaxed);
        }
        Broken::To
    }

    /// It is time to stop, and nothing is held in either direction.
    fn is_much(&self, other: &Way<'_>) -> bool {
        let moved = [self, other].map(|way| way.moved.load(Ordering::Relaxed));
        other.rests.load(Ordering::Relaxed) && moved.iter().sum::<u64>() >= MUCH_BYTES
    }

    async fn readable(&self) -> Result<(), Broken> {
        self.rests.store(true, Ordering::Relaxed);
        let ready = self.from.readable().await;
        self.rests.store(false, Ordering::Relaxed);
        ready.map_err(|_| Broken::From)
    }

    fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        match self.is_tls {
            true => read_once(self.from, &mut &mut *buffer),
            false => self.from.try_read(buffer),
        }
    }

    /// Moves what one read brings through the thread's buffer; 0 at the end.
    async fn copy(&self) -> Result<usize, Broken> {
        loop {
            self.readable().await?;
            let moved = BUFFER.with_borrow_mut(|buffer| {
                let read = match self.read(buffer) {
                    Ok(0) => return Ok(Some((0, Vec::new()))),
                    Ok(read) => read,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                    Err(_) => return Err(Broken::From),
                };
                let bytes = buffer.get(..read).unwrap_or_default();
                let written = match self.to.try_write(bytes) {
                    Ok(written) => written,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
                    Err(error) => return Err(self.broken_to(&error)),
                };
                self.count(written);
                Ok(Some((
                    read,
                    bytes.get(written..).unwrap_or_default().to_vec(),
                )))
            })?;
            if let Some((read, rest)) = moved {
                let written = write_all(self.to, &rest).await;
                written.map_err(|error| self.broken_to(&error))?;
                self.count(rest.len());
                return Ok(read);
            }
        }
    }

    /// Moves what a pipe takes at once; 0 at the end.
    async fn splice(&self) -> Result<usize, Broken> {
        loop {
            self.readable().await?;
            // For want of descriptors.
            let Ok(pipe) = Pipe::take() else {
                return self.copy().await;
            };
            let fill = || pipe.fill(self.from);
            let filled = match self.from.try_io(Interest::READABLE, fill) {
                Ok(filled) => filled,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    pipe.give_back();
                    continue;
                }
                // Some sandboxes refuse the call; nothing was read then.
                Err(error) if is_refused(&error) => {
                    pipe.give_back();
                    return self.copy().await;
                }
                Err(_) => return Err(Broken::From),
            };
            let mut left = filled;
            while left > 0 {
                let drain = || pipe.drain(self.to, left);
                match self.to.try_io(Interest::WRITABLE, drain) {
                    Ok(drained) => {
                        left -= drained.min(left);
                        self.count(drained);
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        self.to.writable().await.map_err(|_| Broken::To)?;
                    }
                    Err(error) => return Err(self.broken_to(&error)),
                }
            }
            pipe.give_back();
            return Ok(filled);
        }
    }
}

fn is_refused(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidInput, PermissionDenied, Unsupported};
    matches!(error.kind(), InvalidInput | PermissionDenied | Unsupported)
}

/// Writes all of `bytes`.
///
/// # Errors
/// When the peer has gone.
pub async fn write_all(to: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match to.try_write(bytes) {
            Ok(written) => bytes = bytes.get(written..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => to.writable().await?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

// === impl Pipe ===

impl Pipe {
    fn take() -> io::Result<Self> {
        if let Some(pipe) = PIPES.with_borrow_mut(Vec::pop) {
            return Ok(pipe);
        }
        let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        let one_more = |large| (large < LARGE_PIPES).then_some(large + 1);
        let large = LARGE.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more);
        let bytes = large.map_or(PIPE_BYTES, |_| LARGE_PIPE_BYTES);
        let pipe = Self { read, write, bytes };
        // A smaller pipe takes more calls, no more.
        if fcntl_setpipe_size(&pipe.write, bytes).is_err() {
            let _ = fcntl_setpipe_size(&pipe.write, PIPE_BYTES);
        }
        Ok(pipe)
    }

    /// For the next one who needs one. The pipe has to be empty; one that is not is dropped.
    fn give_back(self) {
        PIPES.with_borrow_mut(|spare| {
            if spare.len() < SPARE_PIPES {
                spare.push(self);
            }
        });
    }

    fn fill(&self, from: &TcpStream) -> io::Result<usize> {
        Ok(splice(from, None, &self.write, None, self.bytes, FLAGS)?)
    }

    fn drain(&self, to: &TcpStream, len: usize) -> io::Result<usize> {
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

const FLAGS: SpliceFlags = SpliceFlags::MOVE.union(SpliceFlags::NONBLOCK);

#[cfg(test)]
mod tests;
