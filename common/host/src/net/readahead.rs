//! The read-ahead buffer below TLS and HTTP/2. rustls reads at most 4 KiB at a time, which costs four or five
//! system calls per record of 16 KiB. `h2` reads at most the rest of the current frame, or 8 KiB between
//! frames. With the buffer, one system call serves several such reads.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, ReadBuf};
use tokio_util::io::poll_read_buf;

/// Maximum size of one read, in bytes. A larger read gains nothing, and its data falls out of the processor's
/// cache before decryption.
const READ_BYTES: usize = 128 * 1024;

/// A stream with a read-ahead buffer. The buffer is freed while there is nothing to read.
#[derive(Debug)]
pub struct ReadAhead<S> {
    inner: S,
    buffer: BytesMut,
}

impl<S> ReadAhead<S> {
    /// Adds a read-ahead buffer to `inner`.
    pub fn new(inner: S) -> Self {
        Self::behind(BytesMut::new(), inner)
    }

    /// Adds a read-ahead buffer that already contains bytes from `inner`.
    pub fn behind(read: BytesMut, inner: S) -> Self {
        Self {
            inner,
            buffer: read,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ReadAhead<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        target: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.buffer.is_empty() {
            this.buffer.reserve(READ_BYTES);
            let read = poll_read_buf(Pin::new(&mut this.inner), cx, &mut this.buffer);
            if read.is_pending() {
                this.buffer = BytesMut::new();
            }
            ready!(read)?;
        }
        let taken = this.buffer.len().min(target.remaining());
        if let Some(bytes) = this.buffer.get(..taken) {
            target.put_slice(bytes);
            this.buffer.advance(taken);
        }
        Poll::Ready(Ok(()))
    }
}

culvert_stream::delegate_write!(ReadAhead);

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use tokio::io::{AsyncReadExt, AsyncWrite as _, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn small_reads_get_every_byte_and_an_idle_stream_has_no_buffer() {
        let (near, mut far) = tokio::io::duplex(1 << 20);
        let mut ahead = ReadAhead::new(near);
        let sent: Vec<u8> = (0..200_000u32).map(|i| i as u8).collect();
        far.write_all(&sent).await.unwrap();
        let mut read: Vec<u8> = Vec::new();
        while read.len() < sent.len() {
            let mut part = [0; 4096];
            let count = ahead.read(&mut part).await.unwrap();
            read.extend(part.iter().take(count));
        }
        assert_eq!(read, sent);
        let idle = std::future::poll_fn(|cx| {
            let mut part = [0; 16];
            let read = Pin::new(&mut ahead).poll_read(cx, &mut ReadBuf::new(&mut part));
            Poll::Ready(read.is_pending())
        });
        assert!(idle.await);
        assert_eq!(ahead.buffer.capacity(), 0);
        drop(far);
        assert_eq!(ahead.read(&mut [0; 16]).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn vectored_writes_pass_through() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = tokio::net::TcpStream::connect(listener.local_addr().unwrap());
        assert!(ReadAhead::new(stream.await.unwrap()).is_write_vectored());
    }
}
