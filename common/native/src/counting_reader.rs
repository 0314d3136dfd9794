//! The stream below HTTP/2: counts all bytes read from the peer, and reads while a write waits.
//!
//! `h2` reads nothing while a PING or its answer waits behind a frame that the stream does not accept. If both ends did so
//! at once, each would wait for the other to read. So the client end reads ahead: the server end can then finish its
//! frame, reads again, and the client end can finish its own.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use bytes::{BufMut as _, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, ReadBuf};
use tokio_util::io::poll_read_buf;

use super::FRAME_BYTES;
use super::window::Inbound;

/// Largest number of bytes read while a write waits: more than the peer writes before it reads, which is a frame with a
/// buffer of 16 KiB in `h2`, a frame in the buffer of a resumable link, and a buffer of 256 KiB in TLS.
const AHEAD_BYTES: usize = 4 * FRAME_BYTES;

/// Bytes of one read while a write waits.
const READ_BYTES: usize = 16 * 1024;

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
    /// Bytes read while a write waited.
    ahead: BytesMut,
    /// Largest number of these bytes; 0 reads nothing ahead.
    limit: usize,
    /// True if the last read waits, and no write has waited since. `h2` then reads what arrives.
    is_reading: bool,
    quota: Option<ReadQuota>,
}

impl<S> CountingReader<S> {
    /// Counts the bytes read from `inner`.
    pub(crate) fn new(inner: S, inbound: Arc<Inbound>) -> Self {
        Self {
            inner,
            inbound,
            ahead: BytesMut::new(),
            limit: 0,
            is_reading: false,
            quota: None,
        }
    }

    /// Returns the stream with a quota for its reads. `None` means no limit.
    pub(crate) fn within(self, quota: Option<ReadQuota>) -> Self {
        Self { quota, ..self }
    }

    /// Returns the stream with reading ahead: it also reads while a write waits.
    pub(crate) fn reading_ahead(self) -> Self {
        Self {
            limit: AHEAD_BYTES,
            ..self
        }
    }

    fn count(&self, bytes: usize) {
        let heard = &self.inbound.heard;
        heard.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

impl<S: AsyncRead + Unpin> CountingReader<S> {
    /// Reads ahead if a write has to wait and `h2` does not read.
    fn while_pending<T>(&mut self, cx: &mut Context<'_>, written: Poll<T>) -> Poll<T> {
        if written.is_ready() || std::mem::take(&mut self.is_reading) {
            return written;
        }
        let before = self.ahead.len();
        while self.ahead.len() < self.limit {
            self.ahead.reserve(READ_BYTES);
            match poll_read_buf(
                Pin::new(&mut self.inner),
                cx,
                &mut (&mut self.ahead).limit(READ_BYTES),
            ) {
                Poll::Ready(Ok(1..)) => {}
                // The next read reports an end again. After an error, the write that waits fails too.
                _ => break,
            }
        }
        let bytes = self.ahead.len() - before;
        if bytes > 0 {
            self.count(bytes);
            // The inner stream wakes nobody for bytes that were already read from it.
            cx.waker().wake_by_ref();
        }
        written
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
            self.is_reading = false;
            return Poll::Pending;
        }
        let before = target.filled().len();
        let read = if self.ahead.is_empty() {
            // Reads into the memory of `target`, without clearing the memory first.
            let mut inner = (&mut self.inner).take(room as u64);
            let read = Pin::new(&mut inner).poll_read(cx, target);
            self.count(target.filled().len() - before);
            self.is_reading = read.is_pending();
            read
        } else {
            self.is_reading = false;
            let bytes = self.ahead.len().min(target.remaining()).min(room);
            target.put_slice(&self.ahead.split_to(bytes));
            if self.ahead.is_empty() {
                self.ahead = BytesMut::new();
            }
            Poll::Ready(Ok(()))
        };
        if let Some(quota) = &self.quota {
            quota.spend(target.filled().len() - before);
        }
        read
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for CountingReader<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write(cx, bytes);
        self.while_pending(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write_vectored(cx, slices);
        self.while_pending(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.inner).poll_flush(cx);
        self.while_pending(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}
