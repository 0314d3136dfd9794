//! The two halves of one connection on an HTTP/2 stream, as [`Source`] and [`Sink`].

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use culvert_stream::allowance::{Allowance, Held};
use culvert_stream::{CLOSE_STALL, CloseReason, Sink, Source};
use h2::{RecvStream, SendStream};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::timeout;
use tokio_util::task::TaskTracker;

use super::window::Inbound;
use super::{close_reason, reset_code};

/// Frames up to this size are put together while they wait: a task that is not read from must not
/// cost a hundred bytes of bookkeeping for each byte.
const GATHER_BYTES: usize = 4096;

/// A sender that has more waits for this much room instead of sending what fits into the rest of a
/// window or queue: each frame costs the peer a write. Windows are never smaller than this
/// ([`super::window`]), and what a peer has taken it gives back whatever is left of one.
const ENOUGH_BYTES: usize = 32 * 1024;

/// A chunk on its way through HTTP/2's send queue.
#[derive(Debug)]
pub struct Chunk {
    bytes: Bytes,
    queued: Arc<Queued>,
    /// All that was read at once: a part of it pins the whole.
    _held: Option<Arc<Held>>,
}

/// Counts what HTTP/2 has not written yet of one stream: it throws that away when the stream is
/// reset.
#[derive(Debug, Default)]
struct Queued {
    chunks: AtomicUsize,
    written: Notify,
}

/// The sending half that both [`NativeSink`] and [`NativeSource`] look at: the first writes to it,
/// the second learns from it that the peer gave the connection up.
type Shared = Arc<Mutex<SendStream<Chunk>>>;

/// Bytes to the peer.
pub struct NativeSink {
    stream: Shared,
    queued: Arc<Queued>,
    /// The room that a chunk waits for, if it has as many bytes.
    enough: usize,
    allowance: Option<Arc<Allowance>>,
    finished: bool,
    lost: CloseReason,
}

/// Bytes from the peer.
pub struct NativeSource {
    stream: RecvStream,
    sending: Shared,
    /// Taken from HTTP/2 while the sink was busy.
    ahead: VecDeque<Bytes>,
    gathered: BytesMut,
    /// What the peer's word ended with, once `ahead` is empty.
    end: Option<Result<(), CloseReason>>,
    /// Bytes handed out last, which the sink may still have.
    in_hand: usize,
    /// Bytes received that the sink has not taken: these and those in `ahead`.
    held: usize,
    /// Bytes whose window is to be given back.
    done: usize,
    /// A decaying sum of frames' sizes.
    recent: usize,
    /// The frames up to the last one were small.
    small: bool,
    inbound: Arc<Inbound>,
    lost: CloseReason,
}

/// Makes the halves of one stream. `lost` is the reason when the transport under it ends;
/// `inbound` counts the bytes of all streams of the connection.
pub fn halves(
    send: SendStream<Chunk>,
    receive: RecvStream,
    inbound: Arc<Inbound>,
    lost: CloseReason,
) -> (NativeSource, NativeSink) {
    let stream = Arc::new(Mutex::new(send));
    let source = NativeSource {
        stream: receive,
        sending: stream.clone(),
        ahead: VecDeque::new(),
        gathered: BytesMut::new(),
        end: None,
        in_hand: 0,
        held: 0,
        done: 0,
        recent: 0,
        small: false,
        inbound,
        lost,
    };
    let sink = NativeSink {
        stream,
        queued: Arc::default(),
        enough: ENOUGH_BYTES,
        allowance: None,
        finished: false,
        lost,
    };
    (source, sink)
}

// === impl Chunk ===

impl Chunk {
    fn new(bytes: Bytes, queued: &Arc<Queued>, held: Option<Arc<Held>>) -> Self {
        queued.chunks.fetch_add(1, Ordering::Relaxed);
        Self {
            bytes,
            queued: queued.clone(),
            _held: held,
        }
    }

    /// A chunk that nobody waits for.
    pub fn detached(bytes: Bytes) -> Self {
        Self::new(bytes, &Arc::default(), None)
    }
}

impl Buf for Chunk {
    fn remaining(&self) -> usize {
        self.bytes.len()
    }

    fn chunk(&self) -> &[u8] {
        &self.bytes
    }

    fn advance(&mut self, count: usize) {
        self.bytes.advance(count);
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        if self.queued.chunks.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.queued.written.notify_one();
        }
    }
}

impl Queued {
    fn is_empty(&self) -> bool {
        self.chunks.load(Ordering::Relaxed) == 0
    }

    async fn all_written(&self) {
        while !self.is_empty() {
            self.written.notified().await;
        }
    }
}

// === impl NativeSink ===

impl NativeSink {
    /// For a peer that is none of ours: its windows may be smaller than what is waited for
    /// otherwise, so whatever fits is sent.
    #[must_use]
    pub fn toward_any_peer(mut self) -> Self {
        self.enough = 1;
        self
    }

    /// Holds bytes toward `allowance`, and holds itself back when it is asked to.
    #[must_use]
    pub fn within(mut self, allowance: Arc<Allowance>) -> Self {
        self.allowance = Some(allowance);
        self
    }

    /// Ends the connection and tells the peer why. What was sent before still reaches it, as long
    /// as the path moves: HTTP/2 forgets what it has not written of a stream that is reset, so a
    /// task of `tasks` waits for that.
    pub fn end(self, reason: CloseReason, tasks: &TaskTracker) {
        if self.queued.is_empty() {
            self.reset(reason);
        } else {
            tasks.spawn(async move {
                // A peer that takes nothing for so long has lost the rest.
                let _ = timeout(CLOSE_STALL, self.queued.all_written()).await;
                self.reset(reason);
            });
        }
    }

    fn reset(&self, reason: CloseReason) {
        // After both directions ended in order there is nothing to reset, and HTTP/2 knows.
        self.stream.lock().send_reset(reset_code(reason));
    }

    /// How much of `wanted` may go into HTTP/2's queue at once. Waits until nothing of this stream is
    /// there while all streams hold much.
    async fn turn(&self, wanted: usize) -> Result<usize, CloseReason> {
        loop {
            let limit = self.allowance.as_ref().and_then(|all| all.limit());
            match limit {
                None => return Ok(wanted),
                Some(limit) if self.queued.is_empty() => return Ok(wanted.min(limit)),
                Some(_) => tokio::select! {
                    () = self.queued.all_written() => {}
                    reason = aborted(&self.stream, self.lost) => return Err(reason),
                },
            }
        }
    }

    fn poll_room(&self, cx: &mut Context<'_>, wanted: usize) -> Poll<Result<usize, CloseReason>> {
        let mut stream = self.stream.lock();
        let enough = wanted.min(self.enough);
        if stream.capacity() < enough {
            stream.reserve_capacity(wanted);
        }
        loop {
            let room = stream.capacity();
            if room >= enough {
                return Poll::Ready(Ok(room));
            }
            match ready!(stream.poll_capacity(cx)) {
                Some(Ok(_)) => {}
                Some(Err(error)) => return Poll::Ready(Err(reason_of(&error, self.lost))),
                // The peer gave the stream up, or the connection ended.
                None => {
                    let reset = stream.poll_reset(cx);
                    return Poll::Ready(Err(match reset {
                        Poll::Ready(Ok(code)) => close_reason(code, self.lost),
                        _ => self.lost,
                    }));
                }
            }
        }
    }
}

impl Sink for NativeSink {
    async fn send(&mut self, mut chunk: Bytes) -> Result<(), CloseReason> {
        let hold = |all: &Arc<Allowance>| Arc::new(all.hold(chunk.len()));
        let held = self.allowance.as_ref().map(hold);
        while !chunk.is_empty() {
            let wanted = self.turn(chunk.len().min(super::SEND_BYTES)).await?;
            let room = poll_fn(|cx| self.poll_room(cx, wanted)).await?;
            let part = chunk.split_to(room.min(wanted));
            let part = Chunk::new(part, &self.queued, held.clone());
            let sent = self.stream.lock().send_data(part, false);
            sent.map_err(|_| self.lost)?;
        }
        Ok(())
    }

    async fn finish(&mut self) -> Result<(), CloseReason> {
        if !self.finished {
            self.finished = true;
            let end = Chunk::new(Bytes::new(), &self.queued, None);
            // A peer that is gone already has what it wanted; the other half tells the rest.
            let _ = self.stream.lock().send_data(end, true);
        }
        Ok(())
    }
}

// === impl NativeSource ===

impl NativeSource {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        if self.end.is_some() {
            return Poll::Ready(None);
        }
        loop {
            let end = match ready!(self.stream.poll_data(cx)) {
                Some(Ok(bytes)) if bytes.is_empty() => continue,
                Some(Ok(bytes)) => {
                    let count = bytes.len();
                    self.held += count;
                    self.inbound.held.fetch_add(count, Ordering::Relaxed);
                    self.recent = self.recent / 2 + count;
                    let small = self.recent <= GATHER_BYTES;
                    // Bulk begins with a small frame, and has one where a window ends.
                    if small && self.small {
                        self.inbound.small.fetch_add(1, Ordering::Relaxed);
                    }
                    self.small = small;
                    let received = &self.inbound.received;
                    received.fetch_add(count as u64, Ordering::Relaxed);
                    return Poll::Ready(Some(bytes));
                }
                Some(Err(error)) => Err(reason_of(&error, self.lost)),
                None => Ok(()),
            };
            self.end = Some(end);
            return Poll::Ready(None);
        }
    }

    /// What was handed out last was taken.
    fn took(&mut self) {
        let bytes = std::mem::take(&mut self.in_hand);
        self.held -= bytes;
        self.inbound.held.fetch_sub(bytes, Ordering::Relaxed);
        self.done += bytes;
    }

    fn give_back(&mut self) {
        if self.inbound.is_due(self.done, self.held) {
            // Fails only for a stream that has ended, which needs no window.
            let _ = self.stream.flow_control().release_capacity(self.done);
            self.done = 0;
        }
    }

    /// The next frame if there is one, without waiting for it.
    async fn frame_at_hand(&mut self) -> Poll<Option<Bytes>> {
        poll_fn(|cx| Poll::Ready(self.poll_frame(cx))).await
    }

    /// The next frame. While none is there the window may change, and what is due with it.
    async fn next_frame(&mut self) -> Option<Bytes> {
        let inbound = self.inbound.clone();
        loop {
            if let Poll::Ready(next) = self.frame_at_hand().await {
                return next;
            }
            let mut resized = pin!(inbound.resized());
            resized.as_mut().enable();
            self.give_back();
            tokio::select! {
                next = poll_fn(|cx| self.poll_frame(cx)) => return next,
                () = resized => {}
            }
        }
    }

    /// Puts frames that are there already behind one that is not large: a client of the packet
    /// protocol sends 16 KiB at a time, and a copy costs less than a write to a socket.
    async fn join(&mut self, first: Bytes) -> Bytes {
        if first.len() >= ENOUGH_BYTES {
            return first;
        }
        let (mut total, mut others) = (first.len(), 0);
        loop {
            let next = match self.ahead.get(others) {
                Some(next) => next.len(),
                None => match self.frame_at_hand().await {
                    Poll::Ready(Some(next)) => {
                        self.ahead.push_back(next);
                        continue;
                    }
                    _ => break,
                },
            };
            if total + next > super::FRAME_BYTES {
                break;
            }
            total += next;
            others += 1;
        }
        if others == 0 {
            return first;
        }
        let mut joined = BytesMut::with_capacity(total);
        joined.extend_from_slice(&first);
        for next in self.ahead.drain(..others) {
            joined.extend_from_slice(&next);
        }
        joined.freeze()
    }

    fn gather(&mut self) {
        if !self.gathered.is_empty() {
            self.ahead.push_back(self.gathered.split().freeze());
        }
    }
}

impl Source for NativeSource {
    async fn recv(&mut self) -> Result<Option<Bytes>, CloseReason> {
        self.took();
        self.give_back();
        self.gather();
        let next = match self.ahead.pop_front() {
            Some(bytes) => Some(bytes),
            None => self.next_frame().await,
        };
        match (next, self.end) {
            (Some(bytes), _) => {
                let bytes = self.join(bytes).await;
                self.in_hand = bytes.len();
                Ok(Some(bytes))
            }
            (None, Some(Err(reason))) => Err(reason),
            (None, _) => Ok(None),
        }
    }

    async fn aborted(&mut self) -> CloseReason {
        aborted(&self.sending, self.lost).await
    }

    /// Takes every frame out of HTTP/2's queue at once, where small ones count against a budget
    /// of the whole connection. The window bounds them.
    async fn fill(&mut self) {
        while let Some(bytes) = poll_fn(|cx| self.poll_frame(cx)).await {
            if bytes.len() <= GATHER_BYTES {
                self.gathered.extend_from_slice(&bytes);
            } else {
                self.gather();
                self.ahead.push_back(bytes);
            }
        }
        if self.end == Some(Ok(())) {
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for NativeSource {
    fn drop(&mut self) {
        self.inbound.held.fetch_sub(self.held, Ordering::Relaxed);
    }
}

/// Resolves once the peer gave the stream up, or the connection ended.
async fn aborted(stream: &Shared, lost: CloseReason) -> CloseReason {
    match poll_fn(|cx| stream.lock().poll_reset(cx)).await {
        Ok(code) => close_reason(code, lost),
        Err(error) => reason_of(&error, lost),
    }
}

fn reason_of(error: &h2::Error, lost: CloseReason) -> CloseReason {
    error.reason().map_or(lost, |code| close_reason(code, lost))
}

#[cfg(test)]
mod tests;
