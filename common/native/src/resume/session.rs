//! The state of a resumable link that other tasks see, and the transports that they attach.

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Waker;
use std::time::Duration;

use futures_util::task::AtomicWaker;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;
use tokio::time::Instant;

use super::farewell::Farewell;

/// Time after which a peer that is away counts as disconnected, at both ends. Most links resume within a second; a peer that
/// takes longer may have crashed. A shorter time would make readiness flap with each break.
pub const AWAY_PATIENCE: Duration = Duration::from_secs(5);

/// State of a resumable link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The link has a transport.
    Attached,
    /// The link has a transport, but the peer has not acknowledged bytes for too long.
    Silent,
    /// The transport broke, and no other transport is attached yet.
    Away,
    /// The link has ended, and accepts no transport.
    Ended,
}

/// Positions of both ends when a transport is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Positions {
    /// Number of bytes that the server has received.
    pub received: u64,
    /// Offset of the first byte that the server sends.
    pub from: u64,
}

/// Positions of the server on a new transport.
pub enum Base {
    /// The positions in the server's answer.
    Told(Positions),
    /// This end is the server. The result of the function is sent first on the transport.
    Answer {
        /// Number of bytes that the agent has received.
        received: u64,
        /// Returns the answer with the positions.
        answer: fn(Positions) -> Vec<u8>,
    },
}

/// Transport for a link.
pub struct Attached<T> {
    /// The transport, directly before the first frame, or before the answer.
    pub transport: T,
    /// Positions of the server.
    pub base: Base,
}

/// Handle of a [`ResumableIo`](super::ResumableIo).
pub struct Session<T> {
    slot: Mutex<Slot<T>>,
    /// True if the slot has a transport.
    is_offered: AtomicBool,
    /// Task that polls the link.
    task: AtomicWaker,
    received: AtomicU64,
    is_away: AtomicBool,
    /// Time of the break, while the link has no transport.
    broken: Mutex<Option<Instant>>,
    /// Reason why the link ends as soon as it has no transport.
    condemned: OnceLock<&'static str>,
    /// True if the link ends although it has a transport.
    is_revoked: AtomicBool,
    state: watch::Sender<State>,
}

struct Slot<T> {
    offered: Option<Attached<T>>,
    farewell: Option<Farewell<T>>,
    is_closed: bool,
}

impl<T> Session<T> {
    /// Creates the handle of a link with a transport.
    pub(super) fn new() -> Self {
        Self {
            slot: Mutex::new(Slot {
                offered: None,
                farewell: None,
                is_closed: false,
            }),
            is_offered: AtomicBool::new(false),
            task: AtomicWaker::new(),
            received: AtomicU64::new(0),
            is_away: AtomicBool::new(false),
            broken: Mutex::default(),
            condemned: OnceLock::new(),
            is_revoked: AtomicBool::new(false),
            state: watch::Sender::new(State::Attached),
        }
    }

    /// Attaches a transport. The link leaves its current transport, if any; a transport that still waits is closed.
    ///
    /// # Errors
    /// Returns the transport if the link has ended.
    pub fn attach(&self, attached: Attached<T>) -> Result<(), Attached<T>> {
        let mut slot = self.slot.lock();
        if slot.is_closed || self.condemned().is_some() {
            return Err(attached);
        }
        let earlier = slot.offered.replace(attached);
        self.is_offered.store(true, Ordering::Release);
        drop(slot);
        drop(earlier);
        self.task.wake();
        Ok(())
    }

    /// Returns the number of bytes that the link has received.
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Returns true if the link has no transport.
    pub fn is_away(&self) -> bool {
        self.is_away.load(Ordering::Relaxed)
    }

    /// Returns the time since the link has no transport; `None` if the link has one.
    pub fn away_for(&self) -> Option<Duration> {
        // Nearly always false, and cheap.
        if !self.is_away() {
            return None;
        }
        self.broken.lock().map(|at| at.elapsed())
    }

    /// Returns true if the link broke [`AWAY_PATIENCE`] ago, or earlier, and has not resumed yet.
    pub fn is_gone(&self) -> bool {
        self.away_for().is_some_and(|away| away >= AWAY_PATIENCE)
    }

    /// Makes the link end as soon as it has no transport, for the given reason: the peer will not return. Returns false
    /// if the link was to end like this already.
    pub fn condemn(&self, why: &'static str) -> bool {
        let is_new = self.condemned.set(why).is_ok();
        self.task.wake();
        is_new
    }

    /// Makes the link end now, for the given reason, and close its transport. The peer may not learn the reason.
    pub fn revoke(&self, why: &'static str) {
        // A condemned link keeps its earlier reason.
        let _ = self.condemned.set(why);
        self.is_revoked.store(true, Ordering::Release);
        self.task.wake();
    }

    /// Resolves once the link has ended.
    pub async fn ended(&self) {
        // The sender belongs to `self`.
        let _ = self.state().wait_for(|state| *state == State::Ended).await;
    }

    /// Resolves once the link has no transport and waits for another. Never resolves after the end of the link.
    pub async fn broke(&self) {
        // The sender belongs to `self`.
        let _ = self.state().wait_for(|state| *state == State::Away).await;
    }

    /// Returns a watch on the state. The watch starts with the current state as seen.
    pub fn state(&self) -> watch::Receiver<State> {
        self.state.subscribe()
    }

    pub(super) fn register(&self, waker: &Waker) {
        self.task.register(waker);
    }

    /// Returns the transport to attach, if any.
    pub(super) fn offered(&self) -> Option<Attached<T>> {
        if !self.is_offered.load(Ordering::Acquire) {
            return None;
        }
        let mut slot = self.slot.lock();
        self.is_offered.store(false, Ordering::Relaxed);
        slot.offered.take()
    }

    pub(super) fn set_received(&self, received: u64) {
        self.received.store(received, Ordering::Relaxed);
    }

    pub(super) fn set(&self, state: State) {
        let mut broken = self.broken.lock();
        *broken = match (state, *broken) {
            (State::Away, None) => Some(Instant::now()),
            (State::Away, since) => since,
            _ => None,
        };
        drop(broken);
        self.is_away.store(state == State::Away, Ordering::Relaxed);
        self.state.send_if_modified(|now| {
            let is_new = *now != state && *now != State::Ended;
            if is_new {
                *now = state;
            }
            is_new
        });
    }

    /// Returns the reason why the link ends now; `None` if the link may continue.
    pub(super) fn revoked(&self) -> Option<&'static str> {
        let is_revoked = self.is_revoked.load(Ordering::Acquire);
        self.condemned().filter(|_| is_revoked)
    }

    /// Returns the reason why the link ends as soon as it has no transport; `None` if the link waits for another one.
    pub fn condemned(&self) -> Option<&'static str> {
        self.condemned.get().copied()
    }

    /// Ends the session: no transport is accepted anymore.
    pub(super) fn close(&self) {
        let mut slot = self.slot.lock();
        slot.is_closed = true;
        let offered = slot.offered.take();
        drop(slot);
        drop(offered);
        self.set(State::Ended);
    }

    /// Keeps the last bytes of the session for [`farewell`](Self::farewell).
    pub(super) fn set_farewell(&self, farewell: Farewell<T>) {
        self.slot.lock().farewell = Some(farewell);
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> Session<T> {
    /// Tells the peer that the session has ended, and closes the transport. Call after the stream of the link was
    /// dropped. Takes at most a few seconds.
    pub async fn farewell(&self) {
        let farewell = self.slot.lock().farewell.take();
        if let Some(farewell) = farewell {
            farewell.deliver().await;
        }
    }
}

impl<T> fmt::Debug for Session<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("state", &*self.state.borrow())
            .finish_non_exhaustive()
    }
}
