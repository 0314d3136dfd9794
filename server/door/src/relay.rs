//! The relay of bytes between two TCP sockets, with independent directions.
//!
//! Small reads are copied through one buffer per thread. After a full buffer, a direction continues with
//! `splice(2)`: the bytes then move from socket to socket through a pipe in the kernel. A direction takes a
//! pipe from a pool only while there are bytes to move, so an idle connection owns neither a buffer nor a
//! pipe. Rare waits are boxed, so an idle connection needs memory only for its wait for bytes.

mod pipe;

use std::cell::RefCell;
use std::future::{pending, poll_fn};
use std::io;
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use culvert_host::net::congestion::disable_bbr_on_loopback;
use culvert_host::net::long_path::is_long;
use culvert_host::net::options::unacknowledged;
use culvert_host::net::silence::is_over;
use culvert_host::net::socket::{ResetOnDrop, read_once};
use culvert_stream::io::RESET_LOOK;
use culvert_stream::progress::idle;
use culvert_stream::{CLOSE_STALL, CloseReason};
use futures_util::FutureExt as _;
use rustix::net::{RecvFlags, recv};
use socket2::SockRef;
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::task::{coop::consume_budget, yield_now};
use tokio::time::{sleep, timeout};

use self::pipe::Pipe;
use super::watch::{Side, watch};

/// Size of a thread's buffer. A direction with a read of this size counts as bulk.
const COPY_BYTES: usize = 16 * 1024;

/// Bytes that one pipe moves at a time to a peer on a long path, where small messages wait behind them.
const LONG_PATH_BYTES: usize = 64 * 1024;

/// Bytes a direction may move before other tasks of the thread get a turn.
const TURN_BYTES: usize = 1024 * 1024;

/// Bytes after which a hand-over to another thread pays off. A hand-over costs two wake-ups and four
/// registrations.
const BULK_BYTES: u64 = 1024 * 1024;

/// Pause between two looks at the bytes that an endpoint has not received yet.
const DELIVERY_LOOK: Duration = Duration::from_millis(100);

/// Bytes of an endpoint that are discarded while the endpoint reads the last bytes of its client.
const DISCARD_BYTES: usize = 256 * 1024;

/// Time limit for discarding unread input at the end of a connection, see [`Relay::settle`].
const SETTLE: Duration = Duration::from_secs(2);

thread_local! {
    static BUFFER: RefCell<Box<[u8]>> = RefCell::new(vec![0; COPY_BYTES].into());
}

/// The two sockets of one connection.
pub(crate) struct Relay<'a> {
    pub client: Side<'a>,
    pub endpoint: Side<'a>,
    /// Set if the connection carries only TLS, which has no urgent data.
    pub is_tls: bool,
    /// Stops the relay after many bytes, for a hand-over to another thread.
    pub stops_at_bulk: bool,
    /// Time without any bytes after which the connection ends.
    pub idle: Duration,
    /// Counter of bytes from client to endpoint, shared with other connections.
    pub sent: &'a AtomicU64,
    /// Counter of bytes from endpoint to client, shared with other connections.
    pub received: &'a AtomicU64,
}

/// A direction of the connection.
struct Direction<'a> {
    from: &'a TcpStream,
    to: &'a TcpStream,
    is_tls: bool,
    stops_at_bulk: bool,
    /// Set while this direction waits for input and has no unsent bytes.
    rests: AtomicBool,
    total: &'a AtomicU64,
    /// Bytes of this connection.
    moved: AtomicU64,
    /// Largest number of bytes that a pipe moves at a time; 0 until known.
    at_a_time: AtomicUsize,
    done: Notify,
    /// Set once `to` has got the end of the stream.
    ended: AtomicBool,
    /// Set when `to` has reset the connection. The kernel reports ECONNRESET once; a later read of 0 from the
    /// socket is not an end of stream.
    reset: AtomicBool,
    /// Close reasons for a failure of `from` and for a failure of `to`.
    lost: [CloseReason; 2],
}

/// The socket that failed. The system's error text would not help the operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    From,
    To,
}

/// Result of one attempt to move bytes.
enum Moved {
    /// There was nothing to read.
    Nothing,
    /// All bytes that were read, or 0 at the end of the stream.
    All(usize),
    /// The number of bytes that were read, and the bytes among them that wait for the peer.
    Part(usize, Rest),
}

/// Bytes that wait for the peer.
enum Rest {
    Bytes(Vec<u8>),
    Pipe(Pipe, usize),
}

/// Reason why a direction stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    Lost(CloseReason),
    Much,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ended {
    /// Reason of the close; `None` if the connection continues, see [`Relay::stops_at_bulk`].
    pub reason: Option<CloseReason>,
    /// Bytes from client to endpoint.
    pub sent: u64,
    /// Bytes from endpoint to client.
    pub received: u64,
}

// === impl Relay ===

impl<'a> Relay<'a> {
    /// Moves bytes until both directions have ended, one direction has failed, or the connection was idle for
    /// too long. The caller then closes both sockets, which passes on the last end of stream, or a reset if the client's
    /// bytes are incomplete. If the future is dropped, the endpoint gets a reset.
    pub(crate) async fn run(&self) -> Ended {
        let direction = |from: &Side<'a>, to: &Side<'a>, total: &'a AtomicU64| Direction {
            from: from.socket,
            to: to.socket,
            is_tls: self.is_tls,
            stops_at_bulk: self.stops_at_bulk,
            rests: AtomicBool::new(false),
            total,
            moved: AtomicU64::new(0),
            at_a_time: AtomicUsize::new(0),
            done: Notify::new(),
            ended: AtomicBool::new(false),
            reset: AtomicBool::new(false),
            lost: [from.lost, to.lost],
        };
        let up = direction(&self.client, &self.endpoint, self.sent);
        let down = direction(&self.endpoint, &self.client, self.received);
        let both = async {
            match tokio::try_join!(up.run(&down), down.run(&up)) {
                Ok(_) => Some(CloseReason::Finished),
                Err(Stop::Lost(reason)) => Some(reason),
                Err(Stop::Much) => None,
            }
        };
        let sides = [Some(&self.client), Some(&self.endpoint)];
        let mut reset = ResetOnDrop::new(self.endpoint.socket);
        let reason = tokio::select! {
            reason = both => reason,
            reason = watch([&up.moved, &down.moved], self.idle, sides) => Some(reason),
        };
        let is_ordinary = !matches!(
            reason,
            Some(CloseReason::ClientLost | CloseReason::IdleTimeout)
        );
        let is_whole = up.ended.load(Ordering::Relaxed);
        if is_ordinary || is_whole {
            reset.disarm();
        }
        if reason == Some(CloseReason::EndpointLost) {
            self.settle().await;
        } else if is_whole && !is_ordinary {
            Box::pin(deliver_rest(self.endpoint.socket)).await;
        }
        Ended {
            reason,
            sent: up.moved.load(Ordering::Relaxed),
            received: down.moved.load(Ordering::Relaxed),
        }
    }

    /// Lets the client read the endpoint's last bytes. An endpoint may answer and close without reading all
    /// its input. If the proxy closed the client's socket with unread input, TCP would send a reset, which
    /// discards the bytes still unread by the client.
    async fn settle(&self) {
        let client = self.client.socket;
        // Fails if the client is already gone.
        let _ = SockRef::from(client).shutdown(Shutdown::Write);
        let _ = timeout(SETTLE, discard(client, usize::MAX)).await;
    }
}

/// Waits until an endpoint has received the end of the bytes of a client that is gone, or reads nothing for [`CLOSE_STALL`].
/// A close with unread input, and input after a close, would reset the connection and discard these bytes.
pub(crate) async fn deliver_rest(endpoint: &TcpStream) {
    let waiting = || unacknowledged(endpoint).unwrap_or_default();
    let delivered = async {
        while waiting() > 0 {
            sleep(DELIVERY_LOOK).await;
        }
    };
    let broken = async {
        // An endpoint that has ended its direction, or that sends much, may still read.
        if discard(endpoint, DISCARD_BYTES).await.is_ok() {
            pending().await
        }
    };
    tokio::select! {
        () = delivered => {}
        () = idle(|| waiting().into(), CLOSE_STALL) => {}
        () = broken => {}
    }
}

/// Reads and drops the input of a socket, until its end or until `most` bytes.
async fn discard(socket: &TcpStream, most: usize) -> io::Result<()> {
    let mut left = most;
    loop {
        socket.readable().await?;
        consume_budget().await;
        match BUFFER.with_borrow_mut(|buffer| socket.try_read(buffer)) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
            Ok(read) if 0 < read && read < left => left -= read,
            Ok(_) => return Ok(()),
        }
    }
}

// === impl Direction ===

impl Direction<'_> {
    async fn run(&self, other: &Direction<'_>) -> Result<(), Stop> {
        let [from_lost, to_lost] = self.lost.map(Stop::Lost);
        let (mut bulk, mut turn) = (false, 0);
        loop {
            match self.move_some(bulk).await {
                Ok(0) if other.reset.load(Ordering::Relaxed) => return Err(from_lost),
                Ok(0) => break,
                Ok(bytes) => {
                    if !bulk && bytes >= COPY_BYTES {
                        bulk = true;
                        disable_bbr_on_loopback(self.to);
                    }
                    if self.stops_at_bulk && self.is_bulk(other) {
                        return Err(Stop::Much);
                    }
                    // tokio limits the reads of a turn, but a read may move up to 1 MiB.
                    turn += bytes;
                    if turn >= TURN_BYTES {
                        turn = 0;
                        yield_now().await;
                    }
                }
                Err(Broken::From) => return Err(from_lost),
                Err(Broken::To) => {
                    // The other direction may still deliver its bytes: wait until it ends or stalls.
                    let delivered = || {
                        let moved = other.moved.load(Ordering::Relaxed);
                        moved.wrapping_sub(unacknowledged(other.to).unwrap_or_default().into())
                    };
                    Box::pin(async {
                        tokio::select! {
                            () = other.done.notified() => {}
                            () = idle(delivered, CLOSE_STALL) => {}
                        }
                    })
                    .await;
                    return Err(to_lost);
                }
            }
        }
        self.ended.store(true, Ordering::Relaxed);
        self.done.notify_one();
        // If the other direction has ended too, the caller closes both sockets; this saves the shutdown call.
        if other.done.notified().now_or_never().is_some() {
            return Ok(());
        }
        // Fails if the peer is gone; the other direction reports the loss.
        let _ = SockRef::from(self.to).shutdown(Shutdown::Write);
        Box::pin(self.wait_for(other)).await
    }

    /// Waits for the end of the other direction after this one has ended. The wait has no limit of its own: `watch` enforces
    /// the operator's idle limit. No task reads `from` any longer, so only a check of the socket state finds a reset.
    async fn wait_for(&self, other: &Direction<'_>) -> Result<(), Stop> {
        while timeout(RESET_LOOK, other.done.notified()).await.is_err() {
            if is_over(self.from) {
                let [from_lost, _] = self.lost;
                return Err(Stop::Lost(from_lost));
            }
        }
        Ok(())
    }

    /// Waits for bytes and moves them: `bulk` through a pipe, others through the thread's buffer. Returns 0 at the end of the
    /// stream.
    async fn move_some(&self, bulk: bool) -> Result<usize, Broken> {
        loop {
            self.rests.store(true, Ordering::Relaxed);
            // tokio keeps only the last waker of `poll_read_ready`: while the relay runs, nothing else waits for input from
            // this socket. `readable` would need 136 bytes more.
            let ready = poll_fn(|cx| self.from.poll_read_ready(cx)).await;
            self.rests.store(false, Ordering::Relaxed);
            ready.map_err(|_| Broken::From)?;
            let moved = match bulk {
                true => self.splice(),
                false => self.copy(),
            };
            match moved? {
                Moved::Nothing => {}
                Moved::All(bytes) => return Ok(bytes),
                Moved::Part(read, rest) => {
                    Box::pin(self.deliver(rest)).await?;
                    return Ok(read);
                }
            }
        }
    }

    fn count(&self, bytes: usize) {
        self.total.fetch_add(bytes as u64, Ordering::Relaxed);
        self.moved.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn broken_to(&self, error: &io::Error) -> Broken {
        // A peer that closed normally and no longer reads causes a broken pipe, not a reset.
        if error.kind() == io::ErrorKind::ConnectionReset {
            self.reset.store(true, Ordering::Relaxed);
        }
        Broken::To
    }

    /// Returns true if the connection has moved many bytes, and neither direction has unsent bytes.
    fn is_bulk(&self, other: &Direction<'_>) -> bool {
        let moved = [self, other].map(|direction| direction.moved.load(Ordering::Relaxed));
        other.rests.load(Ordering::Relaxed) && moved.iter().sum::<u64>() >= BULK_BYTES
    }

    fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        match self.is_tls {
            true => read_once(self.from, &mut &mut *buffer),
            false => self.from.try_read(buffer),
        }
    }

    /// Moves the bytes of one read through the thread's buffer.
    fn copy(&self) -> Result<Moved, Broken> {
        BUFFER.with_borrow_mut(|buffer| {
            let read = match self.read(buffer) {
                Ok(0) => return Ok(Moved::All(0)),
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(Moved::Nothing);
                }
                Err(_) => return Err(Broken::From),
            };
            let bytes = buffer.get(..read).unwrap_or_default();
            let written = match self.to.try_write(bytes) {
                Ok(written) => written,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
                Err(error) => return Err(self.broken_to(&error)),
            };
            self.count(written);
            let rest = bytes.get(written..).unwrap_or_default();
            Ok(match rest.is_empty() {
                true => Moved::All(read),
                false => Moved::Part(read, Rest::Bytes(rest.to_vec())),
            })
        })
    }

    fn at_a_time(&self) -> usize {
        let known = self.at_a_time.load(Ordering::Relaxed);
        if known > 0 {
            return known;
        }
        let bytes = match is_long(self.to) {
            true => LONG_PATH_BYTES,
            false => usize::MAX,
        };
        self.at_a_time.store(bytes, Ordering::Relaxed);
        bytes
    }

    /// Moves as many bytes as a pipe accepts at once.
    fn splice(&self) -> Result<Moved, Broken> {
        let Some(pipe) = Pipe::take() else {
            return self.copy();
        };
        let fill = || {
            let filled = pipe.fill(self.from, self.at_a_time());
            let is_empty = match &filled {
                Ok(filled) => *filled == 0,
                Err(error) => error.kind() == io::ErrorKind::WouldBlock,
            };
            // `splice` stops at urgent data, and a copy continues behind it.
            match is_empty && !self.is_tls && has_bytes(self.from) {
                true => Ok(None),
                false => filled.map(Some),
            }
        };
        let filled = match self.from.try_io(Interest::READABLE, fill) {
            Ok(Some(filled)) => filled,
            Ok(None) => {
                pipe.give_back();
                return self.copy();
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                pipe.give_back();
                return Ok(Moved::Nothing);
            }
            // Some sandboxes refuse `splice`; no bytes were read then.
            Err(error) if is_refused(&error) => {
                pipe.give_back();
                return self.copy();
            }
            Err(_) => return Err(Broken::From),
        };
        let mut left = filled;
        if !self.drain(&pipe, &mut left)? {
            return Ok(Moved::Part(filled, Rest::Pipe(pipe, left)));
        }
        pipe.give_back();
        Ok(Moved::All(filled))
    }

    /// Moves `left` bytes out of a pipe, and counts `left` down. Returns false if `to` does not accept all of them now.
    fn drain(&self, pipe: &Pipe, left: &mut usize) -> Result<bool, Broken> {
        while *left > 0 {
            let drain = || pipe.drain(self.to, *left);
            match self.to.try_io(Interest::WRITABLE, drain) {
                Ok(drained) => {
                    *left -= drained.min(*left);
                    self.count(drained);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(self.broken_to(&error)),
            }
        }
        Ok(true)
    }

    /// Moves the bytes that `to` has not accepted at once.
    async fn deliver(&self, rest: Rest) -> Result<(), Broken> {
        match rest {
            Rest::Bytes(bytes) => {
                let written = write_all(self.to, &bytes).await;
                written.map_err(|error| self.broken_to(&error))?;
                self.count(bytes.len());
            }
            Rest::Pipe(pipe, mut left) => {
                while !self.drain(&pipe, &mut left)? {
                    self.to.writable().await.map_err(|_| Broken::To)?;
                }
                pipe.give_back();
            }
        }
        Ok(())
    }
}

/// Returns true if a read would return bytes.
fn has_bytes(socket: &TcpStream) -> bool {
    let peeked = recv(socket, &mut [0; 1][..], RecvFlags::PEEK);
    peeked.is_ok_and(|(peeked, _)| peeked > 0)
}

fn is_refused(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidInput, PermissionDenied, Unsupported};
    matches!(error.kind(), InvalidInput | PermissionDenied | Unsupported)
}

/// Writes all of `bytes`.
///
/// # Errors
/// Fails if the peer is gone.
pub(crate) async fn write_all(to: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match to.try_write(bytes) {
            Ok(written) => bytes = bytes.get(written..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => to.writable().await?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
