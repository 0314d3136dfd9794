//! A stream that fails if its peer sends a request too slowly, reads nothing, or reads an answer too slowly.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// Time without progress after which a write fails.
pub(super) const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// Time from the first write that has to wait until all bytes are written. An unsent page of metrics may be the page of other
/// clients, too.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// A stream whose writes fail after [`WRITE_TIMEOUT`] without progress, or [`ANSWER_TIMEOUT`]. Reads fail if a request has no
/// answer in time.
pub(super) struct Progress<S> {
    inner: S,
    /// Time from the first byte of a request until its answer begins.
    request_limit: Duration,
    /// Timer of the current request. The first request begins with the connection.
    request: Option<Pin<Box<Sleep>>>,
    /// Timer of a write without progress.
    stalled: Option<Pin<Box<Sleep>>>,
    /// Timer of the bytes before the next flush.
    unsent: Option<Pin<Box<Sleep>>>,
}

impl<S> Progress<S> {
    pub(super) fn new(inner: S, request_limit: Duration) -> Self {
        Self {
            inner,
            request_limit,
            request: Some(Box::pin(sleep(request_limit))),
            stalled: None,
            unsent: None,
        }
    }

    fn limit<T>(
        &mut self,
        written: Poll<io::Result<T>>,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        for (timer, limit) in [
            (&mut self.stalled, WRITE_TIMEOUT),
            (&mut self.unsent, ANSWER_TIMEOUT),
        ] {
            let timer = timer.get_or_insert_with(|| Box::pin(sleep(limit)));
            if timer.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
        }
        Poll::Pending
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Progress<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        target: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.inner).poll_read(cx, target);
        let limit = self.request_limit;
        if read.is_ready() {
            self.request.get_or_insert_with(|| Box::pin(sleep(limit)));
            return read;
        }
        match &mut self.request {
            Some(timer) => {
                let late = |()| Err(io::ErrorKind::TimedOut.into());
                timer.as_mut().poll(cx).map(late)
            }
            None => Poll::Pending,
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Progress<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.request = None;
        let written = Pin::new(&mut self.inner).poll_write(cx, bytes);
        self.limit(written, cx)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.inner).poll_flush(cx);
        if flushed.is_ready() {
            self.unsent = None;
        }
        self.limit(flushed, cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let ended = Pin::new(&mut self.inner).poll_shutdown(cx);
        self.limit(ended, cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.request = None;
        let written = Pin::new(&mut self.inner).poll_write_vectored(cx, slices);
        self.limit(written, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn answer_that_is_read_slowly_fails_after_its_time_limit() {
        let (near, mut far) = duplex(16);
        let mut near = Progress::new(near, ANSWER_TIMEOUT);
        tokio::spawn(async move {
            while far.read_u8().await.is_ok() {
                sleep(WRITE_TIMEOUT / 2).await;
            }
        });
        // An answer that is sent takes no time from the next one.
        near.write_all(&[0; 20]).await.unwrap();
        near.flush().await.unwrap();
        sleep(ANSWER_TIMEOUT * 4).await;
        let begin = Instant::now();
        let error = near.write_all(&[0; 1024]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(begin.elapsed(), ANSWER_TIMEOUT);
    }
}
