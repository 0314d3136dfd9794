//! The two halves of one connection on an HTTP/2 stream, as a [`Source`] and a [`Sink`].

use std::collections::VecDeque;
use std::future::{pending, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use culvert_stream::allowance::{Allowance, Held};
use culvert_stream::progress::Progress;
use culvert_stream::{CloseReason, Sink, Source};
use h2::{RecvStream, SendStream};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::timeout;
use tokio_util::task::TaskTracker;

use super::buffers::Listed;
use super::window::Inbound;
use super::{close_reason, reset_code};

/// Largest frame, in bytes, to merge with adjacent frames while waiting. Otherwise an unread stream of
/// one-byte frames would need a hundred bytes of bookkeeping for each byte.
const GATHER_BYTES: usize = 4096;

/// A sender with at least this many bytes to send waits until this many bytes fit the window and the queue.
/// Each frame costs the peer a write, so the sender does not fill the last bytes of a window or queue. Waiting
/// is safe: no window is smaller than this ([`super::window`]), and a peer sends window updates for consumed
/// bytes before the window is used up.
const ENOUGH_BYTES: usize = 32 * 1024;

/// Longest wait without progress for the bytes before an end. Longer than
/// [`CLOSE_STALL`](culvert_stream::CLOSE_STALL), because a slow peer returns its window in steps of up to a third.
const REST_STALL: Duration = Duration::from_secs(120);

/// Chunk in HTTP/2's send queue.
#[derive(Debug)]
pub struct Chunk {
    bytes: Bytes,
    queued: Arc<Queued>,
    /// Charge for a whole read: any part keeps the whole buffer alive.
    _held: Option<Arc<Held>>,
    _listed: Option<Listed>,
}

/// Counter of the chunks of one stream that HTTP/2 has not written yet. HTTP/2 discards these chunks when the
/// stream is reset.
#[derive(Debug, Default)]
struct Queued {
    chunks: AtomicUsize,
    written: Notify,
    /// True once the peer has ended its direction in the ordinary way.
    is_received: AtomicBool,
}

/// Sending half of a stream. [`NativeSink`] writes to this half; [`NativeSource`] watches it for a reset by
/// the peer. One task must poll both halves of a stream: `h2` has one waker for room to send and for a reset.
type Shared = Arc<Mutex<SendStream<Chunk>>>;

/// Sink for bytes to the peer.
pub struct NativeSink {
    stream: Shared,
    queued: Arc<Queued>,
    /// A chunk of at least this many bytes waits until this many bytes fit the window and the queue.
    enough: usize,
    allowance: Option<Arc<Allowance>>,
    inbound: Arc<Inbound>,
    finished: bool,
    lost: CloseReason,
}

/// Source of bytes from the peer.
pub struct NativeSource {
    stream: RecvStream,
    /// `None` before [`NativeSource::answered`].
    sending: Option<Shared>,
    queued: Arc<Queued>,
    /// Frames read from HTTP/2 while the sink was busy.
    ahead: VecDeque<Bytes>,
    gathered: BytesMut,
    /// End of the stream as the peer reported it; returned once `ahead` is empty.
    end: Option<Result<(), CloseReason>>,
    /// Size of the last returned chunk, in bytes. The sink may still be busy with the chunk.
    in_hand: usize,
    /// Bytes received and not yet accepted by the sink: the last returned chunk, `ahead` and `gathered`.
    held: usize,
    /// Bytes accepted by the sink and not yet returned to the peer's window.
    done: usize,
    /// Decaying sum of frame sizes, in bytes.
    recent: usize,
    /// True if `recent` was at most [`GATHER_BYTES`] after the last frame.
    small: bool,
    inbound: Arc<Inbound>,
    /// Charge for `held`; `None` without an allowance for unread bytes.
    charge: Option<Held>,
    lost: CloseReason,
}

/// Returns the halves of one stream. `inbound` counts the bytes of all streams of the HTTP/2 connection.
/// `lost` is the close reason if the transport ends.
pub fn halves(
    send: SendStream<Chunk>,
    receive: RecvStream,
    inbound: Arc<Inbound>,
    lost: CloseReason,
) -> (NativeSource, NativeSink) {
    let mut source = NativeSource::unanswered(receive, inbound, lost);
    let sink = source.answered(send);
    (source, sink)
}

// === impl Chunk ===

impl Chunk {
    fn new(
        bytes: Bytes,
        queued: &Arc<Queued>,
        held: Option<Arc<Held>>,
        listed: Option<Listed>,
    ) -> Self {
        queued.chunks.fetch_add(1, Ordering::Relaxed);
        Self {
            bytes,
            queued: queued.clone(),
            _held: held,
            _listed: listed,
        }
    }

    /// Creates a chunk that no sender waits for.
    pub fn detached(bytes: Bytes) -> Self {
        Self::new(bytes, &Arc::default(), None, None)
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

    /// Waits until all chunks are written. Returns false if no chunk is written for [`REST_STALL`].
    async fn all_written_or_stalled(&self) -> bool {
        loop {
            let left = self.chunks.load(Ordering::Relaxed);
            if timeout(REST_STALL, self.all_written()).await.is_ok() {
                return true;
            }
            if self.chunks.load(Ordering::Relaxed) == left {
                return false;
            }
        }
    }
}

// === impl NativeSink ===

impl NativeSink {
    /// Sends whatever fits, because the peer is not one of our programs and its windows may be smaller than
    /// the room that a sink otherwise waits for.
    #[must_use]
    pub fn toward_any_peer(mut self) -> Self {
        self.enough = 1;
        self
    }

    /// Charges sent bytes to `allowance`, and obeys its limit.
    #[must_use]
    pub fn within(mut self, allowance: Arc<Allowance>) -> Self {
        self.allowance = Some(allowance);
        self
    }

    /// Ends the connection and reports `reason` to the peer. Bytes sent earlier still reach the peer, unless no
    /// chunk can be written for two minutes; the peer then sees [`CloseReason::Stalled`]. HTTP/2 discards
    /// the unwritten chunks of a reset stream, so a task on `tasks` first waits for the writes, and then for the
    /// pace of resets.
    pub fn end(self, reason: CloseReason, tasks: &TaskTracker) {
        self.end_holding((), reason, tasks);
    }

    /// Ends the connection like [`end`](Self::end), and drops `held` once the stream is closed.
    pub fn end_holding<H: Send + 'static>(self, held: H, reason: CloseReason, tasks: &TaskTracker) {
        if self.queued.is_empty() && self.reset_in_turn(reason) {
            return;
        }
        tasks.spawn(async move {
            let reason = match self.queued.all_written_or_stalled().await {
                true => reason,
                // The unwritten rest is lost, so the end must not look like an ordinary one.
                false => CloseReason::Stalled,
            };
            while !self.reset_in_turn(reason) {
                tokio::select! {
                    () = self.inbound.resets.turn() => {}
                    _ = aborted(&self.stream, self.lost) => {}
                }
            }
            drop(held);
        });
    }

    /// Waits until all bytes and the end are written, or the stream or the connection has ended.
    pub async fn written(&self) {
        self.queued.all_written().await;
    }

    /// Resets the stream unless it is closed already. Returns false if other resets have to become older first.
    fn reset_in_turn(&self, reason: CloseReason) -> bool {
        let is_received = self.queued.is_received.load(Ordering::Relaxed);
        let is_complete = self.finished && is_received && self.queued.is_empty();
        let mut stream = self.stream.lock();
        // HTTP/2 would remember a reset of a closed stream, too.
        let is_closed = is_complete
            || stream
                .poll_reset(&mut Context::from_waker(Waker::noop()))
                .is_ready();
        let is_turn = is_closed || self.inbound.resets.take();
        if is_turn && !is_closed {
            stream.send_reset(reset_code(reason));
        }
        is_turn
    }

    /// Returns how many of `wanted` bytes may enter HTTP/2's send queue now. While the allowance is limited,
    /// waits until no chunk of the stream is in the queue.
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

    /// Sends `bytes` in as few chunks as the path permits. The chunks have nearly the same size, so that no small chunk
    /// remains.
    fn send_chunks(&self, mut bytes: Bytes, held: Option<&Arc<Held>>) -> Result<(), CloseReason> {
        let count = bytes.len().div_ceil(self.inbound.chunk_bytes()).max(1);
        let size = bytes.len().div_ceil(count);
        let mut stream = self.stream.lock();
        while !bytes.is_empty() {
            let part = bytes.split_to(size.min(bytes.len()));
            let listed = self.inbound.buffers.list(&part);
            let part = Chunk::new(part, &self.queued, held.cloned(), listed);
            stream.send_data(part, false).map_err(|_| self.lost)?;
        }
        Ok(())
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
                // The peer reset the stream, or the HTTP/2 connection ended.
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
    async fn send_counted(
        &mut self,
        mut chunk: Bytes,
        progress: &Progress,
    ) -> Result<(), CloseReason> {
        let hold = |all: &Arc<Allowance>| Arc::new(all.hold(chunk.len()));
        let held = self.allowance.as_ref().map(hold);
        while !chunk.is_empty() {
            let wanted = self.turn(chunk.len().min(super::SEND_BYTES)).await?;
            let room = poll_fn(|cx| self.poll_room(cx, wanted)).await?;
            let count = room.min(wanted);
            self.send_chunks(chunk.split_to(count), held.as_ref())?;
            progress.add(count);
        }
        Ok(())
    }

    async fn finish(&mut self) -> Result<(), CloseReason> {
        if !self.finished {
            self.finished = true;
            let end = Chunk::new(Bytes::new(), &self.queued, None, None);
            // Fails only if the peer is gone; the source then reports the reason.
            let _ = self.stream.lock().send_data(end, true);
        }
        Ok(())
    }
}

// === impl NativeSource ===

impl NativeSource {
    /// Creates the source of a request without a response. [`Source::fill`] moves the bytes that arrive before the
    /// response out of HTTP/2, so that they count.
    pub fn unanswered(stream: RecvStream, inbound: Arc<Inbound>, lost: CloseReason) -> Self {
        inbound.streams.fetch_add(1, Ordering::Relaxed);
        Self {
            stream,
            sending: None,
            queued: Arc::default(),
            ahead: VecDeque::new(),
            gathered: BytesMut::new(),
            end: None,
            in_hand: 0,
            held: 0,
            done: 0,
            recent: 0,
            small: false,
            charge: inbound.unread.as_ref().map(|unread| unread.hold(0)),
            inbound,
            lost,
        }
    }

    /// Returns the sink for the sending half, once the request has a response.
    pub fn answered(&mut self, send: SendStream<Chunk>) -> NativeSink {
        let stream = Arc::new(Mutex::new(send));
        self.sending = Some(stream.clone());
        NativeSink {
            stream,
            queued: self.queued.clone(),
            enough: ENOUGH_BYTES,
            allowance: None,
            inbound: self.inbound.clone(),
            finished: false,
            lost: self.lost,
        }
    }

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
                    if let Some(charge) = &mut self.charge {
                        charge.grow(count);
                    }
                    self.recent = self.recent / 2 + count;
                    let small = self.recent <= GATHER_BYTES;
                    // One small frame alone does not count: a bulk transfer starts with a small frame, and
                    // has another wherever a window ends.
                    if small && self.small {
                        self.inbound.small.fetch_add(1, Ordering::Relaxed);
                    }
                    self.small = small;
                    let received = &self.inbound.received;
                    received.fetch_add(count as u64, Ordering::Relaxed);
                    return Poll::Ready(Some(bytes));
                }
                Some(Err(error)) => Err(reason_of(&error, self.lost)),
                None => {
                    // HTTP/2 keeps unread trailers as long as the stream.
                    let _ = self.stream.poll_trailers(cx);
                    self.queued.is_received.store(true, Ordering::Relaxed);
                    Ok(())
                }
            };
            self.end = Some(end);
            return Poll::Ready(None);
        }
    }

    /// Records that the sink has accepted the last returned chunk.
    fn took(&mut self) {
        let bytes = std::mem::take(&mut self.in_hand);
        self.held -= bytes;
        self.inbound.held.fetch_sub(bytes, Ordering::Relaxed);
        if let Some(charge) = &mut self.charge {
            charge.shrink(bytes);
        }
        self.done += bytes;
    }

    fn give_back(&mut self) {
        if self.inbound.is_due(self.done, self.held) {
            // Fails only for an ended stream, which needs no window.
            let _ = self.stream.flow_control().release_capacity(self.done);
            self.done = 0;
        }
    }

    /// Returns the next frame if already received, without waiting.
    async fn frame_at_hand(&mut self) -> Poll<Option<Bytes>> {
        poll_fn(|cx| Poll::Ready(self.poll_frame(cx))).await
    }

    /// Returns the next frame. If the window changes during the wait, the accepted bytes that become due are
    /// released to the peer's window.
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

    /// Appends frames already received to `first`, unless `first` is large. A client of the packet protocol
    /// sends 16 KiB at a time, and a copy costs less than a write to a socket.
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
        match &self.sending {
            Some(sending) => aborted(sending, self.lost).await,
            None => pending().await,
        }
    }

    /// Moves every frame out of HTTP/2's queue at once, because small frames in the queue count against a
    /// budget of the whole HTTP/2 connection. The window of the stream bounds the moved bytes.
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
            self.aborted().await;
        }
    }
}

impl Drop for NativeSource {
    fn drop(&mut self) {
        self.inbound.streams.fetch_sub(1, Ordering::Relaxed);
        self.inbound.held.fetch_sub(self.held, Ordering::Relaxed);
    }
}

/// Resolves once the peer has reset the stream or the HTTP/2 connection has ended.
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
