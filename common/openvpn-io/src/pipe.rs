//! The bytes between one flow and its handles, in one bounded queue per direction.
//!
//! A handle that does not read lets the queue fill up, then the flow's receive buffer, then the flow's
//! window. The handle therefore stalls only its own flow.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};

use bytes::{Buf, Bytes};
use culvert_openvpn::flows::{Closed, DialError, FlowId};
use parking_lot::Mutex;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::mailbox::{Mailbox, Order};

/// Bytes that wait for a reader, in addition to those in the flow's buffer. A smaller limit wakes the reader
/// more often, and a larger limit exceeds the CPU caches.
const DOWN_BYTES: usize = 128 << 10;
/// Bytes that wait for the flow.
const UP_BYTES: usize = 128 << 10;
/// Chunks that wait in one direction. Bounds the overhead of peers that send a few bytes at a time.
const MAX_CHUNKS: usize = 64;

/// Reason why a flow no longer carries bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// The flow was closed, refused or reset, or timed out.
    #[error(transparent)]
    Flow(#[from] Closed),
    /// The dial was rejected before any packet was sent.
    #[error(transparent)]
    Dial(#[from] DialError),
    /// The tunnel to the peer has ended.
    #[error("the tunnel to the peer ended")]
    TunnelLost,
    /// Too many dials wait for the peer's task.
    #[error("too many dials wait for the tunnel")]
    Busy,
    /// This side ended the flow.
    #[error("aborted")]
    Aborted,
}

impl Broken {
    /// Both sides have closed the flow.
    pub(super) const FINISHED: Self = Self::Flow(Closed::Finished);
}

/// The queues of one flow; see the module documentation.
pub(super) struct Pipe {
    mailbox: Arc<Mailbox<Self>>,
    flow: OnceLock<FlowId>,
    /// True while the pipe is in the mailbox.
    rung: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    open: bool,
    ended: Option<Broken>,
    /// Bytes for the reader.
    down: VecDeque<Bytes>,
    down_bytes: usize,
    down_end: bool,
    /// True if the flow has more bytes than fit into the queue.
    down_full: bool,
    reader: Option<Waker>,
    reader_gone: bool,
    /// Bytes from the writer.
    up: VecDeque<Bytes>,
    up_bytes: usize,
    up_end: bool,
    writer: Option<Waker>,
    /// True once [`Next::Close`] was returned.
    closed: bool,
    /// True if the flow is reset once the peer has acknowledged everything.
    resets: bool,
    /// True once the peer has acknowledged everything.
    delivered: bool,
    /// Counts the flow until `delivered` or `ended` is set; `None` if no task tracker counts it.
    leaving: Option<TaskTrackerToken>,
}

/// Action required from the owner after [`Pipe::take`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// No action.
    Nothing,
    /// Close the direction to the peer. Returned once.
    Close,
    /// Reset the flow once the peer has acknowledged everything.
    Reset,
}

// Methods for the owner and the handles.
impl Pipe {
    pub(super) fn new(mailbox: Arc<Mailbox<Self>>) -> Arc<Self> {
        Arc::new(Self {
            mailbox,
            flow: OnceLock::new(),
            rung: AtomicBool::new(false),
            state: Mutex::default(),
        })
    }

    pub(super) fn flow(&self) -> Option<FlowId> {
        self.flow.get().copied()
    }
}

// Methods for the owner of the flow.
impl Pipe {
    pub(super) fn belongs_to(&self, flow: FlowId) {
        let _ = self.flow.set(flow);
    }

    pub(super) fn unring(&self) {
        self.rung.store(false, Ordering::Release);
    }

    pub(super) fn opened(&self) {
        let mut state = self.state.lock();
        state.open = true;
        wake(&mut state.reader);
        wake(&mut state.writer);
    }

    /// Marks the flow as ended. Received bytes can still be read.
    pub(super) fn ended(&self, why: Broken) {
        let mut state = self.state.lock();
        state.ended.get_or_insert(why);
        state.leaving = None;
        state.up.clear();
        wake(&mut state.reader);
        wake(&mut state.writer);
    }

    /// Queues received bytes for the reader. Returns the number of accepted bytes.
    pub(super) fn put(&self, bytes: &[u8]) -> usize {
        let mut state = self.state.lock();
        if state.reader_gone {
            return bytes.len();
        }
        let room = DOWN_BYTES.saturating_sub(state.down_bytes);
        let taken = match state.down.len() < MAX_CHUNKS {
            true => bytes.get(..room).unwrap_or(bytes),
            false => &[],
        };
        state.down_full = taken.len() < bytes.len();
        if !taken.is_empty() {
            state.down.push_back(Bytes::copy_from_slice(taken));
            state.down_bytes += taken.len();
            wake(&mut state.reader);
        }
        taken.len()
    }

    /// Marks the end of the peer's direction.
    pub(super) fn put_end(&self) {
        let mut state = self.state.lock();
        state.down_end = true;
        wake(&mut state.reader);
    }

    /// Passes the writer's bytes to `send`. `send` returns the number of accepted bytes, or `None` if the
    /// flow no longer accepts bytes.
    pub(super) fn take(&self, mut send: impl FnMut(&[u8]) -> Option<usize>) -> Next {
        let mut state = self.state.lock();
        while let Some(chunk) = state.up.front_mut() {
            let Some(sent) = send(chunk) else {
                return Next::Nothing;
            };
            let whole = sent >= chunk.len();
            if whole {
                state.up.pop_front();
            } else {
                chunk.advance(sent);
            }
            state.up_bytes -= sent;
            if !whole {
                break;
            }
        }
        // The writer is not woken for a few bytes.
        if state.up_bytes <= UP_BYTES / 2 && state.up.len() <= MAX_CHUNKS / 2 {
            wake(&mut state.writer);
        }
        if !state.up.is_empty() {
            Next::Nothing
        } else if state.up_end && !std::mem::replace(&mut state.closed, true) {
            Next::Close
        } else if state.resets {
            Next::Reset
        } else {
            Next::Nothing
        }
    }

    /// Records that the peer has acknowledged everything. Returns true if the flow must be reset now.
    pub(super) fn delivered(&self) -> bool {
        let mut state = self.state.lock();
        state.delivered = true;
        state.leaving = None;
        state.resets
    }

    /// Returns true if the flow ends without further action of the handles: the flow is to be reset, or the reader is
    /// dropped and the writer has ended its direction.
    pub(super) fn is_left(&self) -> bool {
        let state = self.state.lock();
        state.resets || (state.reader_gone && state.up_end)
    }

    /// Returns the number of bytes from the writer that the flow has not accepted.
    pub(super) fn up_bytes(&self) -> usize {
        self.state.lock().up_bytes
    }

    pub(super) fn reader_gone(&self) -> bool {
        self.state.lock().reader_gone
    }
}

// Methods for the handles.
impl Pipe {
    fn ring(self: &Arc<Self>) {
        if !self.rung.swap(true, Ordering::AcqRel) {
            self.mailbox.ring(self.clone());
        }
    }

    pub(super) fn order(&self, order: Order<Self>) -> bool {
        self.mailbox.order(order)
    }

    pub(super) fn poll_open(&self, cx: &mut Context<'_>) -> Poll<Result<(), Broken>> {
        let mut state = self.state.lock();
        match (state.open, state.ended) {
            (true, _) => Poll::Ready(Ok(())),
            (false, Some(why)) => Poll::Ready(Err(why)),
            (false, None) => wait(&mut state.reader, cx),
        }
    }

    /// Receives a chunk of 1 to `limit` bytes.
    pub(super) fn poll_recv(
        self: &Arc<Self>,
        limit: usize,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<Bytes>, Broken>> {
        let mut state = self.state.lock();
        let Some(mut chunk) = state.down.pop_front() else {
            return match (state.down_end, state.ended) {
                (true, _) => Poll::Ready(Ok(None)),
                (false, Some(why)) => Poll::Ready(Err(why)),
                (false, None) => wait(&mut state.reader, cx),
            };
        };
        if chunk.len() > limit {
            let rest = chunk.split_off(limit);
            state.down.push_front(rest);
        }
        state.down_bytes -= chunk.len();
        let more = state.down_full && state.down_bytes <= DOWN_BYTES / 2;
        state.down_full &= !more;
        drop(state);
        if more {
            self.ring();
        }
        Poll::Ready(Ok(Some(chunk)))
    }

    /// Ready once the flow is broken, even if unread bytes are left.
    pub(super) fn poll_broken(&self, cx: &mut Context<'_>) -> Poll<Broken> {
        let mut state = self.state.lock();
        match state.ended {
            Some(why) if why != Broken::FINISHED => Poll::Ready(why),
            _ => wait(&mut state.reader, cx),
        }
    }

    /// Moves bytes from the front of the chunk into the queue. Ready once the chunk is empty.
    pub(super) fn poll_send(
        self: &Arc<Self>,
        chunk: &mut Bytes,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), Broken>> {
        let mut state = self.state.lock();
        let before = chunk.len();
        let taken = loop {
            if let Some(why) = state.ended {
                return Poll::Ready(Err(why));
            }
            if state.up_end || state.resets {
                return Poll::Ready(Err(Broken::Aborted));
            }
            let room = UP_BYTES.saturating_sub(state.up_bytes);
            if chunk.is_empty() || room == 0 || state.up.len() >= MAX_CHUNKS {
                break chunk.is_empty();
            }
            let part = chunk.split_to(room.min(chunk.len()));
            state.up_bytes += part.len();
            state.up.push_back(part);
        };
        let polled = match taken {
            true => Poll::Ready(Ok(())),
            false => wait(&mut state.writer, cx),
        };
        drop(state);
        if chunk.len() < before {
            self.ring();
        }
        polled
    }

    /// Ends the writer's direction after all queued bytes.
    pub(super) fn finish(self: &Arc<Self>) -> Result<(), Broken> {
        let mut state = self.state.lock();
        if !state.up_end
            && let Some(why) = state.ended
        {
            return Err(why);
        }
        let news = !std::mem::replace(&mut state.up_end, true);
        drop(state);
        if news {
            self.ring();
        }
        Ok(())
    }

    /// Resets the flow once the peer has acknowledged all queued bytes, and the end of the direction if the writer has
    /// ended it.
    pub(super) fn reset(self: &Arc<Self>) {
        let mut state = self.state.lock();
        let news = state.ended.is_none() && !std::mem::replace(&mut state.resets, true);
        wake(&mut state.writer);
        drop(state);
        if news {
            self.ring();
        }
    }

    /// Counts the flow in `tasks` until the peer has acknowledged everything, or the flow has ended.
    pub(super) fn count_in(&self, tasks: &TaskTracker) {
        let mut state = self.state.lock();
        if state.ended.is_none() && !state.delivered {
            state.leaving = Some(tasks.token());
        }
    }

    /// Handles a dropped writer. Resets the flow unless the direction had ended.
    pub(super) fn writer_left(self: &Arc<Self>) {
        let orderly = self.state.lock().up_end;
        if !orderly {
            self.reset();
        }
    }

    /// Handles a dropped reader: further bytes are discarded.
    pub(super) fn reader_left(self: &Arc<Self>) {
        let mut state = self.state.lock();
        state.reader_gone = true;
        state.down.clear();
        state.down_bytes = 0;
        let over = state.ended.is_some();
        drop(state);
        if !over {
            self.ring();
        }
    }
}

fn wake(waker: &mut Option<Waker>) {
    if let Some(waker) = waker.take() {
        waker.wake();
    }
}

fn wait<T>(slot: &mut Option<Waker>, cx: &Context<'_>) -> Poll<T> {
    match slot {
        Some(waker) => waker.clone_from(cx.waker()),
        None => *slot = Some(cx.waker().clone()),
    }
    Poll::Pending
}
