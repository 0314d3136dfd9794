//! The stream below HTTP/2: counts all bytes read from the peer, and reads while a write waits.
//!
//! `h2` reads nothing while a PING or its answer waits behind a frame that the stream does not accept. If both ends did so
//! at once, each would wait for the other to read. So the client end reads ahead: the server end can then always finish
//! its frame, reads again, and the client end can finish its own.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

use bytes::{Buf as _, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::FRAME_BYTES;
use super::window::Inbound;

/// Largest number of bytes read while a write waits: more than the peer's `h2` writes before it reads, which is a frame
/// and a buffer of 16 KiB.
const AHEAD_BYTES: usize = 2 * FRAME_BYTES;

/// Bytes of one read while a write waits.
const READ_BYTES: usize = 16 * 1024;

/// Stream with a counter of all bytes read, in [`Inbound::heard`].
#[derive(Debug)]
pub(crate) struct CountingReader<S> {
    inner: S,
    inbound: Arc<Inbound>,
    /// Bytes read while a write waited.
    ahead: BytesMut,
    /// Largest number of these bytes.
    limit: usize,
}

impl<S> CountingReader<S> {
    /// Counts the bytes read from `inner`.
    pub(crate) fn new(inner: S, inbound: Arc<Inbound>) -> Self {
        Self {
            inner,
            inbound,
            ahead: BytesMut::new(),
            limit: 0,
        }
    }

    /// Also reads while a write waits.
    pub(crate) fn reading_ahead(self) -> Self {
        Self {
            limit: AHEAD_BYTES,
            ..self
        }
    }
}

impl<S: AsyncRead + Unpin> CountingReader<S> {
    fn poll_inner(
        &mut self,
        cx: &mut Context<'_>,
        target: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = target.filled().len();
        let read = Pin::new(&mut self.inner).poll_read(cx, target);
        let bytes = target.filled().len() - before;
        self.inbound
            .heard
            .fetch_add(bytes as u64, Ordering::Relaxed);
        read
    }

    /// Reads ahead if a write has to wait.
    fn while_pending<T>(&mut self, cx: &mut Context<'_>, written: Poll<T>) -> Poll<T> {
        if written.is_ready() || self.ahead.len() >= self.limit {
            return written;
        }
        let before = self.ahead.len();
        let mut buffer = [std::mem::MaybeUninit::uninit(); READ_BYTES];
        while self.ahead.len() < self.limit {
            let mut target = ReadBuf::uninit(&mut buffer);
            match self.poll_inner(cx, &mut target) {
                Poll::Ready(Ok(())) if !target.filled().is_empty() => {
                    self.ahead.extend_from_slice(target.filled());
                }
                // The next read reports the end or the error again.
                _ => break,
            }
        }
        if self.ahead.len() > before {
            // The reader waits for the inner stream, which has no more news of these bytes.
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
        if self.ahead.is_empty() {
            return self.poll_inner(cx, target);
        }
        let bytes = self.ahead.len().min(target.remaining());
        target.put_slice(self.ahead.get(..bytes).unwrap_or_default());
        self.ahead.advance(bytes);
        if self.ahead.is_empty() {
            self.ahead = BytesMut::new();
        }
        Poll::Ready(Ok(()))
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
