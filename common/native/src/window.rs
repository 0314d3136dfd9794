//! The flow-control window of one connection: how far a peer may send ahead. On a native connection every stream
//! has the window. A packet stream is the only stream of its connection, so the connection has the window.
//!
//! If the window is too large, bulk data queues up in the sockets between the two ends, and small streams
//! wait behind the queue. If the window is too small, a long path is never full. So the window follows the
//! path: twice the bytes received during a round trip, scaled to the shortest round trip seen. A queue
//! lengthens the round trips under load but not the shortest round trip, so a queue does not enlarge the
//! window. The measurement sends nothing while nothing is received.
//!
//! A shrinking stream window can stall a stream. `h2` sends a window update once the released bytes amount to half
//! of the sender's remaining window, and checks the amount only when more bytes are released. If the bytes
//! waiting in `h2` exceed the new, smaller window, the sender has no window left, nothing more arrives, and
//! the stream stalls forever. So no released bytes wait in `h2`: a source keeps them until `h2` would send
//! the update at once ([`Inbound::is_due`]), and checks again when the window in force changes. A connection window
//! cannot stall: the sender keeps its window, and `h2` withholds updates until the smaller window is in force.

mod estimate;
mod profile;

use std::future::Future as _;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use culvert_stream::LONG_PATH;
use culvert_stream::allowance::Allowance;
use futures_util::task::AtomicWaker;
use h2::{Ping, PingPong};
use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tokio::time::{Instant, Sleep, sleep};

use super::buffers::Buffers;
use super::requests::{Undecided, UndecidedRequest};
use super::resets::Resets;
use super::{LONG_PATH_FRAME_BYTES, SEND_BYTES};

use self::estimate::{Estimate, FORGET_AFTER};
pub use self::profile::{
    AHEAD_ROUND_TRIP, AHEAD_ROUND_TRIPS, BESIDE_BYTES, CROWDED_BYTES, LONG_PATH_BYTES,
    PACKETS_AHEAD_BYTES, PACKETS_BESIDE_BYTES, PACKETS_LONG_PATH_BYTES, SHORT_PATH_BYTES,
    WindowProfile,
};

/// Bytes to receive before the path is measured again.
const SAMPLE_BYTES: u64 = 128 * 1024;

/// Shortest pause between two measurements.
const SAMPLE_PAUSE: Duration = Duration::from_millis(50);

/// Number of measurements that confirm a round trip. A busy machine may answer the first one late.
const CONFIRM_AFTER: u32 = 3;

/// Pause between the measurements that confirm a round trip.
const CONFIRM_PAUSE: Duration = Duration::from_secs(1);

/// Time for which a small stream counts as active after a frame.
const SMALL_LINGER: Duration = Duration::from_secs(1);

/// Unread bytes of all streams of one connection together at an [`Opener`](super::link::Opener): the server
/// and the node tunnel. Above this total, each stream may keep at most [`CROWDED_BYTES`].
pub const OPENER_HELD_BYTES: usize = 64 * 1024 * 1024;

/// Unread bytes of all streams of one connection together at a [`Taker`](super::link::Taker): the agent,
/// which runs in small pods, and the front door, which many nodes connect to. Above this total, each stream
/// may keep at most [`CROWDED_BYTES`].
pub const TAKER_HELD_BYTES: usize = 16 * 1024 * 1024;

/// Time within which a peer must send something after a ping, as in upstream. The packet dialect uses the same
/// time. The node tunnel has its own.
pub const PING_TIMEOUT: Duration = Duration::from_secs(20);

/// Longest time after a measurement until an idle peer is pinged. Upstream's default of 1 h would let a dead peer
/// stay for as long.
pub const MAX_PING_IDLE: Duration = Duration::from_secs(30);

/// Times of the pings of one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pings {
    /// Time after a measurement until an idle peer is pinged.
    pub idle: Duration,
    /// Time after a ping without a received byte until the peer counts as gone.
    pub timeout: Duration,
}

/// Counters of the bytes received on a connection, and the window of the streams.
#[derive(Debug)]
pub struct Inbound {
    /// Bytes received on all streams since the start.
    pub received: AtomicU64,
    /// Bytes received on the connection, of any kind. Every byte proves that the peer is alive.
    pub(crate) heard: AtomicU64,
    /// Bytes received and not yet accepted by a sink.
    pub held: Arc<AtomicUsize>,
    /// Allowance for `held`; `None` without one.
    pub(crate) unread: Option<Arc<Allowance>>,
    /// Number of streams whose bytes count.
    pub(crate) streams: AtomicUsize,
    /// Number of frames on small streams, or of small messages in a packet stream.
    pub small: AtomicUsize,
    profile: WindowProfile,
    /// False while the peer of a packet stream is not authenticated.
    is_admitted: AtomicBool,
    /// True if the shortest round trip is at least [`LONG_PATH`].
    is_long: AtomicBool,
    window: AtomicU32,
    /// True if the tuner sets the limit of [`ahead`](Self::ahead).
    is_ahead_limited: AtomicBool,
    /// Limit of the bytes that the peer has not read, see [`ahead`](Self::ahead). 0 without a limit.
    ahead: AtomicU32,
    resized: Notify,
    /// True if the tuner has to ping the peer at once.
    probe: AtomicBool,
    /// Number of breaks and resumptions of the link so far; odd while the link has no transport.
    link_changes: AtomicU32,
    /// Waker of the task that polls the tuner.
    tuner: AtomicWaker,
    /// Buffers of the bytes in the other direction.
    pub(crate) buffers: Arc<Buffers>,
    /// Pace of the resets of the connection's streams.
    pub(crate) resets: Resets,
    /// Requests of the peer that our end has not decided; `None` without a limit.
    pub(crate) undecided: Option<Arc<Undecided>>,
}

/// Part of the error for a peer that does not confirm a smaller window.
pub const UNCONFIRMED: &str = "the peer does not confirm SETTINGS";

/// Reason of a [`Tuner`] for ending a connection.
#[derive(Debug, thiserror::Error)]
pub enum Unfit {
    /// The peer sent nothing for too long after a ping.
    #[error("the peer is silent: no byte received for {0:?} after a ping")]
    Silent(Duration),
    /// The window has to shrink, but the peer did not confirm the previous SETTINGS in time.
    #[error("{UNCONFIRMED}: its streams have many unread bytes, and their window cannot shrink")]
    Unconfirmed,
}

/// Window to announce to the peer, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Window {
    /// Window of the connection.
    Connection(u32),
    /// Window of every stream.
    Streams(u32),
}

/// Tuner of the window of a connection. Measures the path with pings.
pub struct Tuner {
    ping: PingPong,
    pings: Pings,
    inbound: Arc<Inbound>,
    estimate: Estimate,
    /// Window announced last, in bytes.
    announced: u32,
    asked: Option<Asked>,
    /// Value of [`Inbound::link_changes`] at the last look.
    link_changes: u32,
    /// Time of the last measurement, and the received bytes at that time. If nothing is measured, the last time at which
    /// bytes had arrived.
    last: (Instant, u64),
    /// Value of [`Inbound::heard`] at the last measurement.
    last_heard: u64,
    /// Time of the last frame on a small stream, and the number of such frames so far.
    small: (Option<Instant>, usize),
    alarm: Pin<Box<Sleep>>,
    /// Time for the peer to confirm SETTINGS while its window has to shrink; `None` for no limit.
    confirm_time: Option<Duration>,
    /// End of this time; `None` while nothing is late.
    confirm_by: Option<Pin<Box<Sleep>>>,
}

struct Asked {
    at: Instant,
    received: u64,
    /// Value of [`Inbound::heard`] at the last check. Any byte counts, because the pong may be queued behind
    /// bulk data of either end.
    heard: u64,
    /// True if the link broke since the ping. The time until the answer says nothing about the path.
    is_void: bool,
}

// === impl Pings ===

impl Default for Pings {
    fn default() -> Self {
        Self {
            idle: MAX_PING_IDLE,
            timeout: PING_TIMEOUT,
        }
    }
}

impl Pings {
    /// Returns the times for a keepalive flag: `time` replaces the idle time only if `time` is shorter.
    pub fn with_keepalive(time: Duration) -> Self {
        Self {
            idle: time.min(MAX_PING_IDLE),
            ..Self::default()
        }
    }
}

// === impl Inbound ===

impl Default for Inbound {
    fn default() -> Self {
        Self::new(WindowProfile::default())
    }
}

impl Inbound {
    /// Creates the counters of a connection with the windows of `profile`.
    pub fn new(profile: WindowProfile) -> Self {
        Self {
            received: AtomicU64::new(0),
            heard: AtomicU64::new(0),
            held: Arc::default(),
            unread: None,
            streams: AtomicUsize::new(0),
            small: AtomicUsize::new(0),
            profile,
            is_admitted: AtomicBool::new(!profile.is_of_connection()),
            is_long: AtomicBool::new(false),
            window: AtomicU32::new(profile.initial()),
            is_ahead_limited: AtomicBool::new(false),
            ahead: AtomicU32::new(0),
            resized: Notify::new(),
            probe: AtomicBool::new(false),
            link_changes: AtomicU32::new(0),
            tuner: AtomicWaker::new(),
            buffers: Arc::default(),
            resets: Resets::default(),
            undecided: None,
        }
    }

    /// Charges the unread bytes of all streams to `unread`. While the allowance is limited, each stream gets a smaller
    /// window.
    #[must_use]
    pub fn within(self, unread: Arc<Allowance>) -> Self {
        Self {
            unread: Some(unread),
            ..self
        }
    }

    /// Stops reading before a request while `count` requests are undecided. The owner of the
    /// [`Taker`](super::link::Taker) has to call [`undecided_request`](Self::undecided_request) for each stream.
    #[must_use]
    pub fn limiting_undecided(self, count: usize) -> Self {
        Self {
            undecided: Some(Arc::new(Undecided::new(count))),
            ..self
        }
    }

    /// Returns the guard of a request that the peer has sent.
    pub fn undecided_request(&self) -> UndecidedRequest {
        UndecidedRequest::received(self.undecided.clone())
    }

    /// Makes a decided request undecided again: its answer waits for the peer.
    pub fn undecided_again(&self) -> UndecidedRequest {
        UndecidedRequest::again(self.undecided.clone())
    }

    /// Lifts the limit of undecided requests: `h2` ignores the requests after its GOAWAY.
    pub fn lift_undecided(&self) {
        if let Some(undecided) = &self.undecided {
            undecided.lift();
        }
    }

    /// Lets our end reset at most `count` streams within `time`, if the peer may still send on them; more resets wait.
    /// [`TakerLimits::reset_streams`](super::link::TakerLimits::reset_streams) has to be at least twice `count`, because
    /// `h2` forgets expired resets only at its next poll.
    #[must_use]
    pub fn pacing_resets(self, count: usize, time: Duration) -> Self {
        Self {
            resets: Resets::paced(count, time),
            ..self
        }
    }

    /// Returns the number of bytes received on the connection, of any kind. A larger number than before
    /// proves that the peer is alive.
    pub fn heard(&self) -> u64 {
        self.heard.load(Ordering::Relaxed)
    }

    /// Returns the number of bytes received on all streams.
    pub(crate) fn stream_bytes(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Counts a message of a packet stream, with its bytes of data.
    pub fn count_message(&self, bytes: usize, is_small: bool) {
        self.received.fetch_add(bytes as u64, Ordering::Relaxed);
        self.small
            .fetch_add(usize::from(is_small), Ordering::Relaxed);
    }

    /// Stops the clock of the pings: the link has no transport.
    pub(crate) fn link_broke(&self) {
        self.link_changes.fetch_add(1, Ordering::Relaxed);
    }

    /// Restarts the clock of the pings: the link has another transport.
    pub(crate) fn link_resumed(&self) {
        self.link_changes.fetch_add(1, Ordering::Relaxed);
    }

    /// Limits the bytes that the peer of a packet stream has not read: a stock server, whose window follows the rate.
    pub fn limit_ahead(&self) {
        self.is_ahead_limited.store(true, Ordering::Relaxed);
        self.tuner.wake();
    }

    /// Returns the limit of the bytes that the peer has not read; `None` without a limit. The limit is
    /// [`PACKETS_AHEAD_BYTES`] on a path with a round trip of at most [`AHEAD_ROUND_TRIP`], half of it while small
    /// messages arrive, and grows with the round trip.
    pub fn ahead(&self) -> Option<usize> {
        let bytes = self.ahead.load(Ordering::Relaxed) as usize;
        (bytes > 0).then_some(bytes)
    }

    /// Opens the window of a packet stream, once its peer is authenticated.
    pub fn admit(&self) {
        self.is_admitted.store(true, Ordering::Release);
        self.tuner.wake();
    }

    /// Returns true if the connection has the window, and not each stream.
    fn is_of_connection(&self) -> bool {
        self.profile.is_of_connection()
    }

    /// Pings the peer at once, unless an earlier ping is still unanswered.
    pub fn probe(&self) {
        self.probe.store(true, Ordering::Relaxed);
        self.tuner.wake();
    }

    /// Returns the largest chunk to put into HTTP/2's send queue, in bytes. HTTP/2 sends a frame of each stream in turn:
    /// a chunk, but at most [`FRAME_BYTES`](super::FRAME_BYTES).
    pub(crate) fn chunk_bytes(&self) -> usize {
        match self.is_long() {
            true => LONG_PATH_FRAME_BYTES,
            false => SEND_BYTES,
        }
    }

    /// Returns true if the path is a [`LONG_PATH`].
    pub fn is_long(&self) -> bool {
        self.is_long.load(Ordering::Relaxed)
    }

    /// Returns true if a stream must return `done` bytes now, while `queued` more bytes wait in the stream.
    /// The amount is then large enough for `h2` to send a window update at once.
    pub fn is_due(&self, done: usize, queued: usize) -> bool {
        let left = (self.window() as usize).saturating_sub(done + queued);
        done > 0 && done >= left / 2
    }

    /// Resolves when the window has changed since this call, and [`is_due`](Self::is_due) may return another
    /// result.
    pub fn resized(&self) -> Notified<'_> {
        self.resized.notified()
    }

    /// Returns the window in bytes, see [`WindowProfile`]. While the peer has not confirmed a new window of streams,
    /// returns the larger of the old and the new window.
    pub fn window(&self) -> u32 {
        self.window.load(Ordering::Relaxed)
    }

    /// Returns the number of bytes that arrived along the path: only bytes of streams, because a stock server ends a
    /// connection with `too_many_pings` if it has sent no DATA between pings. All bytes count if nothing is measured.
    fn arrived(&self) -> u64 {
        match self.profile {
            WindowProfile::Unmeasured(_) => self.heard(),
            WindowProfile::Packets | WindowProfile::Shared | WindowProfile::Fixed(_) => {
                self.stream_bytes()
            }
        }
    }

    fn resize(&self, window: u32) {
        self.window.store(window, Ordering::Relaxed);
        self.resized.notify_waiters();
    }
}

// === impl Tuner ===

impl Tuner {
    /// Creates the tuner of a connection with the window profile of `inbound`. All streams together should
    /// keep at most `budget` unread bytes, but every stream may keep [`CROWDED_BYTES`].
    pub fn new(ping: PingPong, inbound: Arc<Inbound>, budget: usize, pings: Pings) -> Self {
        let first_ping = match inbound.profile.is_measured() {
            // The first measurement, on an idle path, is the best.
            true => Duration::ZERO,
            // Pings only find out that the peer is gone.
            false => pings.idle,
        };
        Self {
            ping,
            pings,
            estimate: Estimate::new(inbound.profile, budget),
            announced: inbound.window(),
            inbound,
            asked: None,
            link_changes: 0,
            last: (Instant::now(), 0),
            last_heard: 0,
            small: (None, 0),
            alarm: Box::pin(sleep(first_ping)),
            confirm_time: None,
            confirm_by: None,
        }
    }

    /// Ends the connection if too many bytes are unread and the peer does not confirm SETTINGS within `time`. `None`
    /// stands for no limit.
    #[must_use]
    pub(crate) fn confirmed_within(self, time: Option<Duration>) -> Self {
        Self {
            confirm_time: time,
            ..self
        }
    }

    /// Returns the number of bytes received on the connection, of any kind.
    pub(crate) fn heard(&self) -> u64 {
        self.inbound.heard()
    }

    /// Returns true if the connection reads no further because `h2` has refused too many requests.
    pub(crate) fn is_stuck(&self) -> bool {
        let undecided = self.inbound.undecided.as_ref();
        undecided.is_some_and(|undecided| undecided.is_stuck())
    }

    /// Returns true if the peer is authenticated, or needs no authentication in HTTP/2.
    pub(crate) fn is_admitted(&self) -> bool {
        self.inbound.is_admitted.load(Ordering::Acquire)
    }

    /// Announces the window that the path needs. `announce` fails until the peer has confirmed the previous
    /// announcement. Call after polling the connection, because the connection's poll changes the counters.
    /// Returns true if the connection has something to send.
    ///
    /// # Errors
    /// Fails once the peer is gone, or does not confirm SETTINGS in time.
    pub(crate) fn poll(
        &mut self,
        cx: &mut Context<'_>,
        announce: impl FnOnce(Window) -> Result<(), h2::Error>,
    ) -> Result<bool, Unfit> {
        self.inbound.tuner.register(cx.waker());
        if !self.is_admitted() {
            return Ok(false);
        }
        self.look(cx)?;
        let (before, wanted) = (self.announced, self.estimate.window);
        let in_force = self.inbound.window();
        // The last window is announced twice: the second announcement succeeds only if the first is in force.
        if in_force == wanted && before == wanted {
            self.confirm_by = None;
            return Ok(false);
        }
        let window = match self.inbound.is_of_connection() {
            true => Window::Connection(wanted),
            false => Window::Streams(wanted),
        };
        if announce(window).is_err() {
            return self.look_at_confirmation(cx).map(|()| false);
        }
        self.confirm_by = None;
        self.announced = wanted;
        self.inbound.resize(before.max(wanted));
        Ok(true)
    }

    /// Fails if the peer has not confirmed SETTINGS in time although unread bytes call for a smaller window.
    fn look_at_confirmation(&mut self, cx: &mut Context<'_>) -> Result<(), Unfit> {
        let is_crowded = self.estimate.limit(self.held()) < self.inbound.window();
        let Some(time) = self.confirm_time.filter(|_| is_crowded) else {
            self.confirm_by = None;
            return Ok(());
        };
        let late = self.confirm_by.get_or_insert_with(|| Box::pin(sleep(time)));
        match late.as_mut().poll(cx) {
            Poll::Ready(()) => Err(Unfit::Unconfirmed),
            Poll::Pending => Ok(()),
        }
    }

    /// Returns the unread bytes that count against the budget. While the allowance of all connections is limited, a
    /// connection with many unread bytes has only a sixteenth of its budget, so that its streams get small windows.
    fn held(&self) -> usize {
        let held = self.inbound.held.load(Ordering::Relaxed);
        let budget = self.estimate.budget;
        let unread = self.inbound.unread.as_ref();
        let is_limited = unread.is_some_and(|unread| unread.limit().is_some());
        match is_limited && held >= budget / 32 {
            true => held + budget / 16 * 15,
            false => held,
        }
    }

    fn look(&mut self, cx: &mut Context<'_>) -> Result<(), Unfit> {
        let held = self.held();
        let streams = self.inbound.streams.load(Ordering::Relaxed);
        self.estimate.crowded(held, streams);
        let small = self.inbound.small.load(Ordering::Relaxed);
        if small != self.small.1 {
            let now = Instant::now();
            self.small = (Some(now), small);
            // Shrink only if bulk traffic was measured recently: small streams alone need no smaller window.
            if now - self.last.0 < SMALL_LINGER {
                self.estimate.beside();
            }
        }
        if self.inbound.is_ahead_limited.load(Ordering::Relaxed) {
            let is_beside = self.small.0.is_some_and(|at| at.elapsed() < SMALL_LINGER);
            let ahead = self.estimate.ahead(is_beside);
            self.inbound.ahead.store(ahead, Ordering::Relaxed);
        }
        self.look_at_link();
        let received = self.inbound.arrived();
        let is_measured = self.inbound.profile.is_measured();
        if !is_measured && received != self.last.1 {
            self.last = (Instant::now(), received);
        }
        if let Some(asked) = &self.asked {
            if let Poll::Ready(answer) = self.ping.poll_pong(cx) {
                let (bytes, took) = (received - asked.received, asked.at.elapsed());
                let is_void = asked.is_void;
                self.asked = None;
                self.last = (Instant::now(), received);
                self.last_heard = self.inbound.heard();
                let small = self.small.0.filter(|at| at.elapsed() < SMALL_LINGER);
                self.estimate.beside = small.is_some();
                // The connection reports the same error and ends.
                if answer.is_ok() && !is_void {
                    self.estimate.measured(bytes, took, held);
                    // A packet stream does not choose its frames by the path, and a stock server counts pings.
                    let is_long =
                        !self.inbound.is_of_connection() && self.estimate.shortest >= LONG_PATH;
                    self.inbound.is_long.store(is_long, Ordering::Relaxed);
                }
                let is_confirmed =
                    !self.inbound.is_long() || self.estimate.samples >= CONFIRM_AFTER;
                self.set_alarm(match is_confirmed {
                    true => self.pings.idle,
                    false => self.pings.idle.min(CONFIRM_PAUSE),
                });
            }
        } else if self.inbound.probe.swap(false, Ordering::Relaxed)
            // Bytes that were read late count only while others arrive: the peer has sent nothing since.
            || (is_measured
                && received - self.last.1 >= SAMPLE_BYTES
                && self.inbound.heard() - self.last_heard >= SAMPLE_BYTES
                && self.last.0.elapsed() >= SAMPLE_PAUSE)
            || self.is_confirmation_due(received)
        {
            self.ask(received);
        }
        if self.alarm.as_mut().poll(cx).is_ready() {
            let heard = self.inbound.heard();
            match &mut self.asked {
                Some(_) if self.link_changes % 2 == 1 => self.set_alarm(self.pings.timeout),
                Some(asked) if asked.heard == heard => {
                    return Err(Unfit::Silent(self.pings.timeout));
                }
                Some(asked) => {
                    asked.heard = heard;
                    self.set_alarm(self.pings.timeout);
                }
                None if !is_measured && self.last.0.elapsed() < self.pings.idle => {
                    self.set_alarm(self.pings.idle.saturating_sub(self.last.0.elapsed()));
                }
                None => self.ask(received),
            }
        }
        // Polls the alarm that `ask` may have set, and the pong, so that both wake the task.
        let _ = self.alarm.as_mut().poll(cx);
        if self.asked.is_some() && self.ping.poll_pong(cx).is_ready() {
            cx.waker().wake_by_ref();
        }
        Ok(())
    }

    /// Returns true if a packet stream needs another measurement of a quiet path: the limit of the bytes ahead follows the
    /// shortest round trip, and bulk to the peer causes no measurements. The peer has sent DATA since the last ping.
    fn is_confirmation_due(&self, received: u64) -> bool {
        self.inbound.is_of_connection()
            && received > self.last.1
            && self.estimate.samples < CONFIRM_AFTER
            && self.last.0.elapsed() >= CONFIRM_PAUSE
    }

    /// Restarts the time limit of the peer after a break of the link.
    fn look_at_link(&mut self) {
        let changes = self.inbound.link_changes.load(Ordering::Relaxed);
        if self.link_changes == changes {
            return;
        }
        self.link_changes = changes;
        // The new transport may take another path.
        self.estimate.samples = self.estimate.samples.max(FORGET_AFTER);
        if let Some(asked) = &mut self.asked {
            asked.is_void = true;
            self.set_alarm(self.pings.timeout);
        }
    }

    fn ask(&mut self, received: u64) {
        if self.ping.send_ping(Ping::opaque()).is_ok() {
            self.asked = Some(Asked {
                at: Instant::now(),
                received,
                heard: self.inbound.heard(),
                is_void: self.link_changes % 2 == 1,
            });
            self.set_alarm(self.pings.timeout);
        }
    }

    fn set_alarm(&mut self, after: Duration) {
        self.alarm.as_mut().reset(Instant::now() + after);
    }
}

#[cfg(test)]
mod tests;
