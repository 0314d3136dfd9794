//! The stream below HTTP/2: counts the bytes read from the peer, and accepts a frame that keeps `h2` from reading.
//!
//! `h2` reads nothing while a PING, its answer or another control frame waits behind a frame that the stream does not
//! accept. If both ends did so at once, each would wait for the other to read. So the client end copies the rest of its frame
//! into a buffer: `h2` then queues the control frame and reads, and the server end can finish its own frame. The server end may
//! have written any number of frames before its own frame waits, so reading a limited number of bytes ahead is not enough.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, ReadBuf};

use super::FRAME_BYTES;
use super::requests::RequestScanner;
use super::window::Inbound;

/// Largest number of bytes to write behind `h2`: one frame for each control frame that may wait at once. A peer like `h2` has
/// one unanswered PING and one SETTINGS frame, and so does our end.
const BEHIND_BYTES: usize = 4 * (FRAME_BYTES + 16 * 1024);

/// Number of bytes that `h2` may read before the streams opened by these bytes are accepted. `h2` decodes all input that
/// arrives, and a header list occupies up to eighty times the bytes that it has on the wire.
#[derive(Clone, Debug)]
pub(crate) struct ReadQuota {
    bytes: usize,
    left: Arc<AtomicUsize>,
    /// Number of bytes for all renewals until the peer is admitted. `None` for no limit, before and after.
    rest: Option<Arc<AtomicUsize>>,
}

impl ReadQuota {
    pub(crate) fn new(bytes: usize) -> Self {
        let left = Arc::new(AtomicUsize::new(bytes));
        Self {
            bytes,
            left,
            rest: None,
        }
    }

    /// Creates the quota of a peer that is not admitted: at most `total` bytes in parts of `bytes`. Without an effect once
    /// the peer is admitted.
    pub(crate) fn until_admission(bytes: usize, total: usize) -> Self {
        let rest = total.saturating_sub(bytes);
        Self {
            rest: Some(Arc::new(AtomicUsize::new(rest))),
            ..Self::new(bytes)
        }
    }

    /// Returns true if reads wait for the next [`renew`](Self::renew). Nobody is woken: the caller polls `h2` again.
    pub(crate) fn is_used_up(&self) -> bool {
        self.left() == 0
    }

    /// Permits more reads. Returns false if all bytes before the peer's admission are used up.
    pub(crate) fn renew(&self, is_admitted: bool) -> bool {
        let bytes = match &self.rest {
            None => self.bytes,
            Some(_) if is_admitted => usize::MAX,
            Some(rest) => {
                let all = rest.load(Ordering::Relaxed);
                let part = all.min(self.bytes);
                rest.store(all - part, Ordering::Relaxed);
                part
            }
        };
        self.left.store(bytes, Ordering::Relaxed);
        bytes > 0
    }

    /// Limits what follows the first stream of a peer to one more part, until the peer is admitted.
    pub(crate) fn accepted(&self) {
        let rest = self.rest.as_ref();
        if rest.is_some_and(|rest| rest.swap(0, Ordering::Relaxed) > 0) && self.left() < self.bytes
        {
            self.left.store(self.bytes, Ordering::Relaxed);
        }
    }

    fn left(&self) -> usize {
        self.left.load(Ordering::Relaxed)
    }

    fn spend(&self, bytes: usize) {
        self.left.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Stream with a counter of all bytes read, in [`Inbound::heard`].
#[derive(Debug)]
pub(crate) struct CountingReader<S> {
    inner: S,
    inbound: Arc<Inbound>,
    /// Bytes accepted from `h2` and not yet written.
    behind: BytesMut,
    /// Largest number of these bytes; 0 accepts nothing that the stream does not accept.
    limit: usize,
    /// True if the last read waits, for bytes or for the quota, and no write has waited since. `h2` then reads on.
    is_reading: bool,
    quota: Option<ReadQuota>,
    /// Finds the peer's requests if their number is limited.
    scanner: RequestScanner,
    /// Bytes that wait because of an undecided request.
    stopped: BytesMut,
}

impl<S> CountingReader<S> {
    /// Counts the bytes read from `inner`.
    pub(crate) fn new(inner: S, inbound: Arc<Inbound>) -> Self {
        Self {
            inner,
            inbound,
            behind: BytesMut::new(),
            limit: 0,
            is_reading: false,
            quota: None,
            scanner: RequestScanner::new(),
            stopped: BytesMut::new(),
        }
    }

    /// Returns the stream with a quota for its reads. `None` means no limit.
    pub(crate) fn within(self, quota: Option<ReadQuota>) -> Self {
        Self { quota, ..self }
    }

    /// Returns the stream with writing behind: no frame that waits keeps `h2` from reading.
    pub(crate) fn writing_behind(self) -> Self {
        Self {
            limit: BEHIND_BYTES,
            ..self
        }
    }

    fn count(&self, bytes: usize) {
        let heard = &self.inbound.heard;
        heard.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Returns the number of bytes to accept although a write waits: none if `h2` reads meanwhile.
    fn room(&mut self) -> usize {
        if std::mem::take(&mut self.is_reading) {
            return 0;
        }
        self.limit - self.behind.len()
    }
}

impl<S: AsyncWrite + Unpin> CountingReader<S> {
    /// Writes the bytes of `behind`.
    fn poll_behind(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.behind.is_empty() {
            let inner = Pin::new(&mut self.inner);
            let written = ready!(inner.poll_write(cx, &self.behind))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.behind.advance(written);
            if self.behind.is_empty() {
                self.behind = BytesMut::new();
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + Unpin> CountingReader<S> {
    /// Reads at most `room` bytes, up to a request that has to wait.
    fn poll_unstopped(
        &mut self,
        cx: &mut Context<'_>,
        target: &mut ReadBuf<'_>,
        room: usize,
    ) -> Poll<io::Result<()>> {
        let Self {
            inner,
            inbound,
            scanner,
            stopped,
            ..
        } = self;
        let before = target.filled().len();
        if stopped.is_empty() {
            // Reads into the memory of `target`, without clearing the memory first.
            let mut inner = inner.take(room as u64);
            ready!(Pin::new(&mut inner).poll_read(cx, target))?;
        } else {
            if let Some(undecided) = &inbound.undecided {
                ready!(undecided.poll_room(cx));
            }
            let count = stopped.len().min(room).min(target.remaining());
            target.put_slice(&stopped.split_to(count));
        }
        let Some(undecided) = &inbound.undecided else {
            return Poll::Ready(Ok(()));
        };
        let read = target.filled().get(before..).unwrap_or_default();
        let passing = scanner.passing(read, undecided);
        if passing == read.len() {
            return Poll::Ready(Ok(()));
        }
        let waiting = BytesMut::from(read.get(passing..).unwrap_or_default());
        let behind = std::mem::replace(stopped, waiting);
        stopped.extend_from_slice(&behind);
        target.set_filled(before + passing);
        if passing > 0 {
            return Poll::Ready(Ok(()));
        }
        if undecided.poll_room(cx).is_ready() {
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for CountingReader<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        target: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let room = self.quota.as_ref().map_or(usize::MAX, ReadQuota::left);
        if room == 0 {
            // The owner of the quota polls `h2` again.
            self.is_reading = true;
            return Poll::Pending;
        }
        let before = target.filled().len();
        let read = self.poll_unstopped(cx, target, room);
        let bytes = target.filled().len() - before;
        self.count(bytes);
        self.is_reading = read.is_pending();
        if let Some(quota) = &self.quota {
            quota.spend(bytes);
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for CountingReader<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.poll_behind(cx)?.is_ready() {
            let written = Pin::new(&mut self.inner).poll_write_vectored(cx, slices);
            if written.is_ready() {
                return written;
            }
        }
        let room = self.room();
        let before = self.behind.len();
        for slice in slices {
            let left = room - (self.behind.len() - before);
            let part = slice.get(..left).unwrap_or(slice);
            self.behind.extend_from_slice(part);
        }
        match self.behind.len() - before {
            0 => Poll::Pending,
            accepted => Poll::Ready(Ok(accepted)),
        }
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.poll_behind(cx)?.is_ready() {
            let flushed = Pin::new(&mut self.inner).poll_flush(cx);
            if flushed.is_ready() {
                return flushed;
            }
        }
        // `h2` flushes again once it has read.
        match self.room() {
            0 => Poll::Pending,
            _ => Poll::Ready(Ok(())),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_behind(cx))?;
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}
