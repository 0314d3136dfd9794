//! The two halves of one connection on a QUIC stream, as a [`Source`] and a [`Sink`].
//!
//! The ordinary end of a stream is a half close. An end with a reason has two parts. The peer's direction is stopped
//! with the reason as the error code. A word on the control stream announces the end of the own direction and its
//! number of bytes: a reset would discard bytes that are still on their way (RFC 9000, 3.1), and without a mark the
//! peer would take a part of the bytes for the whole.

use std::future::{pending, poll_fn};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use culvert_stream::head::HeadError;
use culvert_stream::progress::Progress;
use culvert_stream::{CloseReason, Sink, Source};
use quinn::{ReadError, RecvStream, SendStream, StoppedError, VarInt, WriteError};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::io::poll_read_buf;
use tokio_util::task::TaskTracker;

use super::streams::{AHEAD_BYTES, StreamCut, StreamState, Streams};
use super::words::{End, Word};
use super::{NO_REASON, code, reason_of};
use crate::dial;

/// Smallest and largest size of one read, in bytes.
const SMALL_READ_BYTES: usize = 4 * 1024;
const LARGE_READ_BYTES: usize = 64 * 1024;

/// Time without a chunk accepted by the receiver after which the stream counts as stalled. Slower receivers than
/// one chunk for each such time count with their whole window.
const STALLED_AFTER: Duration = Duration::from_secs(1);

/// Longest wait for the peer to read the bytes before an end. The peer ends a receiver that accepts nothing for
/// [`CLOSE_STALL`](culvert_stream::CLOSE_STALL), and QUIC does not report how many bytes the peer has read, so this
/// limit only bounds the wait for a faulty peer.
const REST_LIMIT: Duration = Duration::from_secs(600);

/// Priority of heads, which a few bytes of a new connection follow.
const HEAD_PRIORITY: i32 = 2;

/// Priority of streams that carry little.
const SMALL_PRIORITY: i32 = 1;

/// Priority of streams that carry much.
const BULK_PRIORITY: i32 = 0;

/// A stream that sends more bytes than this within [`PACE`] carries much.
const SMALL_BYTES: usize = 64 * 1024;

/// Interval for the priority of a stream.
const PACE: Duration = Duration::from_secs(1);

type Stopped = Pin<Box<dyn Future<Output = Result<Option<VarInt>, StoppedError>> + Send + Sync>>;

/// Source of bytes from the peer.
pub struct QuicSource {
    /// `None` only while the source is being dropped.
    stream: Option<RecvStream>,
    state: Arc<StreamState>,
    /// Bytes that are read and not returned yet.
    ahead: BytesMut,
    /// Size of the next read, in bytes.
    size: usize,
    /// Bytes read from the stream so far, without its head.
    read: u64,
    /// End of the stream as read from the stream; returned once `ahead` is empty.
    end: Option<Result<(), CloseReason>>,
    /// Resolves when the peer has stopped this side's direction; `None` after this side's bytes have all arrived.
    stopped: Option<Stopped>,
    /// Reason with which the peer has stopped this side's direction.
    stop: Option<CloseReason>,
    lost: CloseReason,
}

/// Sink for bytes to the peer.
pub struct QuicSink {
    /// `None` once the stream has ended.
    stream: Option<SendStream>,
    state: Arc<StreamState>,
    /// Bytes written to the stream so far, without its head.
    written: u64,
    finished: bool,
    pace: Pace,
    lost: CloseReason,
}

/// Recent amount of bytes on a stream.
struct Pace {
    since: Instant,
    bytes: usize,
    priority: i32,
}

/// Returns the halves of a stream of a link. `lost` is the close reason if the link ends.
pub(crate) fn halves(
    send: SendStream,
    receive: RecvStream,
    streams: &Arc<Streams>,
    lost: CloseReason,
) -> (QuicSource, QuicSink) {
    let state = StreamState::begin(streams, receive.id().into());
    // Fails only for a stream that has ended.
    let _ = send.set_priority(HEAD_PRIORITY);
    let source = QuicSource {
        stream: Some(receive),
        state: state.clone(),
        ahead: BytesMut::new(),
        size: SMALL_READ_BYTES,
        read: 0,
        end: None,
        stopped: Some(Box::pin(send.stopped())),
        stop: None,
        lost,
    };
    let sink = QuicSink {
        stream: Some(send),
        state,
        written: 0,
        finished: false,
        pace: Pace {
            since: Instant::now(),
            bytes: 0,
            priority: HEAD_PRIORITY,
        },
        lost,
    };
    (source, sink)
}

// === impl QuicSource ===

impl QuicSource {
    /// Reads the head at the start of the stream.
    pub(crate) async fn head(&mut self) -> Result<BytesMut, HeadError> {
        let stream = self.stream.as_mut();
        let stream = stream.ok_or_else(|| HeadError::Io(io::ErrorKind::NotConnected.into()))?;
        let head = dial::read_head(stream, &mut self.ahead).await?;
        self.read = self.ahead.len() as u64;
        Ok(head)
    }

    /// Returns the signal that the connection must end because receivers that do not read hold too many bytes.
    pub fn cut(&self) -> StreamCut {
        self.state.cut()
    }

    /// Reads more bytes into `ahead`. Returns false at the end of the stream.
    async fn read_more(&mut self) -> bool {
        let Self {
            stream: Some(stream),
            state,
            ahead,
            size,
            read,
            end,
            lost,
            ..
        } = self
        else {
            return false;
        };
        loop {
            if end.is_some() {
                return false;
            }
            let announced = state.end();
            // The bytes before an announced end have all been read.
            if let Some(announced) = announced.filter(|announced| announced.offset <= *read) {
                *end = Some(Err(announced.reason.unwrap_or(*lost)));
                return false;
            }
            let reading = poll_fn(|cx| {
                // A buffer exists only while there is something to read.
                let is_empty = ahead.is_empty();
                ahead.reserve(*size);
                let mut room = (&mut *ahead).limit(*size);
                let result = poll_read_buf(Pin::new(&mut *stream), cx, &mut room);
                if result.is_pending() && is_empty {
                    *ahead = BytesMut::new();
                }
                result
            });
            let result = match announced {
                Some(_) => reading.await,
                None => tokio::select! {
                    biased;
                    result = reading => result,
                    _ = state.announced() => continue,
                },
            };
            match result {
                Ok(0) => *end = Some(Ok(())),
                Ok(count) => {
                    *read += count as u64;
                    *size = match count {
                        count if count >= *size => (*size * 4).min(LARGE_READ_BYTES),
                        count if count < *size / 8 => (*size / 4).max(SMALL_READ_BYTES),
                        _ => *size,
                    };
                    return true;
                }
                Err(error) => *end = Some(Err(read_reason(&error, *lost))),
            }
        }
    }

    /// Resolves with the reason once the peer has stopped this side's direction, or has announced an end.
    async fn given_up(&mut self) -> CloseReason {
        let Self {
            state,
            stopped,
            stop,
            lost,
            ..
        } = self;
        let is_stopped = async {
            if let Some(future) = stopped {
                let outcome = future.as_mut().await;
                *stopped = None;
                *stop = match outcome {
                    Ok(Some(code)) => Some(reason_of(code, *lost)),
                    // All bytes have arrived, and the peer may still send.
                    Ok(None) => None,
                    Err(_) => Some(*lost),
                };
            }
            match *stop {
                Some(reason) => reason,
                None => pending().await,
            }
        };
        tokio::select! {
            reason = is_stopped => reason,
            end = state.announced() => end.reason.unwrap_or(*lost),
            () = state.streams().ended.cancelled() => *lost,
        }
    }
}

impl Source for QuicSource {
    async fn recv(&mut self) -> Result<Option<Bytes>, CloseReason> {
        if self.state.is_evicted() {
            return Err(CloseReason::BufferExceeded);
        }
        if self.ahead.is_empty() && !self.read_more().await {
            return match self.end {
                Some(Err(reason)) => Err(reason),
                _ => Ok(None),
            };
        }
        let count = self.ahead.len().min(LARGE_READ_BYTES);
        Ok(Some(self.ahead.split_to(count).freeze()))
    }

    async fn aborted(&mut self) -> CloseReason {
        self.given_up().await
    }

    async fn fill(&mut self) {
        while self.ahead.len() < AHEAD_BYTES && self.end.is_none() {
            // A stop by the peer shows in the sink, too.
            self.read_more().await;
        }
        match self.end {
            Some(Err(_)) => {}
            Some(Ok(())) => {
                self.given_up().await;
            }
            None => {
                let state = self.state.clone();
                tokio::select! {
                    _ = self.given_up() => return,
                    () = sleep(STALLED_AFTER) => {}
                }
                let _stalled = state.streams().stall(&state);
                tokio::select! {
                    _ = self.given_up() => {}
                    () = state.evicted() => {}
                }
            }
        }
    }
}

impl Drop for QuicSource {
    fn drop(&mut self) {
        if let Some(stream) = self.stream.take() {
            self.state.park(stream);
        }
    }
}

// === impl QuicSink ===

impl QuicSink {
    /// Returns the number of the stream.
    pub fn stream_id(&self) -> u64 {
        self.state.id()
    }

    /// Writes the head at the start of the stream.
    pub(crate) async fn head(&mut self, head: Bytes) -> Result<(), CloseReason> {
        self.write(head, &Progress::default()).await.map(drop)
    }

    /// Resolves once the peer has stopped the stream, or the link has ended.
    pub async fn stopped(&self) {
        match &self.stream {
            Some(stream) => drop(stream.stopped().await),
            None => pending().await,
        }
    }

    /// Ends the connection and reports `reason` to the peer. Bytes sent earlier still reach the peer, if the peer reads
    /// them within ten minutes; otherwise the peer sees [`CloseReason::Stalled`].
    pub fn end(self, reason: CloseReason, tasks: &TaskTracker) {
        self.end_holding((), reason, tasks);
    }

    /// Ends the connection like [`end`](Self::end), and drops `held` once the peer has the bytes.
    pub fn end_holding<H: Send + 'static>(
        mut self,
        held: H,
        reason: CloseReason,
        tasks: &TaskTracker,
    ) {
        self.state.end_with(code(reason));
        let Some(mut stream) = self.stream.take() else {
            return;
        };
        // A link may close once it has no open stream, so the stream stays open until the peer has its bytes.
        let held = (self.state.clone(), held);
        if self.finished {
            tasks.spawn(async move {
                let _ = timeout(REST_LIMIT, stream.stopped()).await;
                drop(held);
            });
            return;
        }
        // Also for a stream without bytes: quinn keeps a record of `stopped` for the life of a link, unless the peer stops
        // the stream.
        let end = End {
            stream: self.state.id(),
            reason: Some(reason),
            offset: self.written,
        };
        self.state.streams().send(Word::End(end));
        tasks.spawn(async move {
            // The peer stops the stream when it has read the bytes before the end. A reset discards unread bytes, so
            // the end must not look like an ordinary one.
            let read = timeout(REST_LIMIT, stream.stopped()).await;
            let reason = read.map_or(CloseReason::Stalled, |_| reason);
            let _ = stream.reset(code(reason));
            drop(held);
        });
    }

    /// Writes all bytes, and returns their number.
    async fn write(&mut self, mut chunk: Bytes, progress: &Progress) -> Result<u64, CloseReason> {
        let stream = self.stream.as_mut().ok_or(self.lost)?;
        let total = chunk.len() as u64;
        while !chunk.is_empty() {
            let written = stream.write_chunks(std::slice::from_mut(&mut chunk)).await;
            let written = written.map_err(|error| match error {
                WriteError::Stopped(code) => reason_of(code, self.lost),
                _ => self.lost,
            })?;
            progress.add(written.bytes);
        }
        Ok(total)
    }
}

impl Sink for QuicSink {
    async fn send_counted(&mut self, chunk: Bytes, progress: &Progress) -> Result<(), CloseReason> {
        if let (Some(priority), Some(stream)) = (self.pace.next(chunk.len()), &self.stream) {
            // Fails only for a stream that has ended.
            let _ = stream.set_priority(priority);
        }
        // A dropped send has written an unknown part of the chunk, but the caller ends the connection then, and the
        // bytes before the chunk are complete.
        self.written += self.write(chunk, progress).await?;
        Ok(())
    }

    async fn finish(&mut self) -> Result<(), CloseReason> {
        if let Some(stream) = self.stream.as_mut().filter(|_| !self.finished) {
            self.finished = true;
            // Fails only if the peer is gone; the source then reports the reason.
            let _ = stream.finish();
        }
        Ok(())
    }
}

impl Drop for QuicSink {
    /// Resets an unfinished stream: quinn ends a dropped stream like a complete one.
    fn drop(&mut self) {
        if let Some(stream) = self.stream.as_mut().filter(|_| !self.finished) {
            let _ = stream.reset(NO_REASON);
        }
    }
}

// === impl Pace ===

impl Pace {
    /// Counts bytes. Returns the priority of the stream if it has changed.
    fn next(&mut self, bytes: usize) -> Option<i32> {
        let now = Instant::now();
        if now.duration_since(self.since) >= PACE {
            (self.since, self.bytes) = (now, 0);
        }
        self.bytes = self.bytes.saturating_add(bytes);
        let priority = match self.bytes > SMALL_BYTES {
            true => BULK_PRIORITY,
            false => SMALL_PRIORITY,
        };
        (std::mem::replace(&mut self.priority, priority) != priority).then_some(priority)
    }
}

/// Returns the close reason of a failed read.
fn read_reason(error: &io::Error, lost: CloseReason) -> CloseReason {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    match inner {
        Some(ReadError::Reset(code)) => reason_of(*code, lost),
        _ => lost,
    }
}
