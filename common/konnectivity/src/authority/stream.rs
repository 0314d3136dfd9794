//! A socket with the rewriter: reads pass through the rewriter, writes do not.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::BytesMut;
use tokio::io::{AsyncRead, ReadBuf};

use super::AuthorityRewriter;

/// Accepted connection that rewrites requests as they are read.
///
/// Reads go straight into the caller's buffer, so the size of that buffer is the size of a read. If the bytes
/// of a read contain neither a header block nor an incomplete frame head, they stay in the caller's buffer
/// untouched. Otherwise, the bytes from that block or head to the end of the read go through an internal
/// buffer of at most one read and one block ([`MAX_HEADER_BLOCK`](super::MAX_HEADER_BLOCK)). The internal
/// buffer is freed once the caller has read all its bytes, so an idle connection has no buffer.
///
/// A read fails with [`io::ErrorKind::InvalidData`] if the rewriter fails.
#[derive(Debug)]
pub struct AuthorityStream<S> {
    pub(super) inner: S,
    pub(super) rewriter: AuthorityRewriter,
    /// Bytes that the next reads return before the next read from the socket.
    pub(super) ready: BytesMut,
}

impl<S> AuthorityStream<S> {
    /// Wraps a connection before the first read.
    pub fn new(inner: S) -> Self {
        Self {
            inner,
            rewriter: AuthorityRewriter::default(),
            ready: BytesMut::new(),
        }
    }

    fn hand_out(&mut self, buf: &mut ReadBuf<'_>) {
        let count = self.ready.len().min(buf.remaining());
        buf.put_slice(&self.ready.split_to(count));
        if self.ready.is_empty() {
            self.ready = BytesMut::new();
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for AuthorityStream<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        // Without this check, a read into a full buffer would look like the end of the connection.
        while buf.remaining() > 0 {
            if !this.ready.is_empty() {
                this.hand_out(buf);
                break;
            }
            let before = buf.filled().len();
            ready!(Pin::new(&mut this.inner).poll_read(cx, buf))?;
            let fresh = buf.filled().get(before..).unwrap_or_default();
            if fresh.is_empty() {
                this.rewriter.finish(&mut this.ready);
                if this.ready.is_empty() {
                    break;
                }
                continue;
            }
            let passed = this.rewriter.pass(fresh);
            let (_, others) = fresh.split_at(passed);
            let rewritten = this.rewriter.rewrite(others, &mut this.ready);
            buf.set_filled(before + passed);
            rewritten.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
            if passed > 0 {
                break;
            }
        }
        Poll::Ready(Ok(()))
    }
}

culvert_stream::delegate_write!(AuthorityStream);
