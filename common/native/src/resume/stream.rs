//! The stream of HTTP/2, with or without resumption.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::io::ResumableIo;
use super::session::Session;

/// Stream of HTTP/2, on a resumable link or directly on a transport.
#[derive(Debug)]
pub enum MaybeResumable<T: AsyncRead + AsyncWrite + Unpin> {
    /// The link ends with its transport.
    Plain(T),
    /// The link survives its transport.
    Resumable(Box<ResumableIo<T>>),
}

/// Evaluates an expression with the stream of either kind.
macro_rules! with_stream {
    ($self:ident, $stream:ident => $value:expr) => {
        match $self {
            Self::Plain($stream) => $value,
            Self::Resumable($stream) => $value,
        }
    };
}

impl<T: AsyncRead + AsyncWrite + Unpin> MaybeResumable<T> {
    /// Returns the handle of a resumable link.
    pub fn session(&self) -> Option<Arc<Session<T>>> {
        match self {
            Self::Plain(_) => None,
            Self::Resumable(stream) => Some(stream.session()),
        }
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncRead for MaybeResumable<T> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        target: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        with_stream!(this, stream => Pin::new(stream).poll_read(cx, target))
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncWrite for MaybeResumable<T> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        with_stream!(this, stream => Pin::new(stream).poll_write(cx, bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        with_stream!(this, stream => Pin::new(stream).poll_write_vectored(cx, slices))
    }

    fn is_write_vectored(&self) -> bool {
        with_stream!(self, stream => stream.is_write_vectored())
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        with_stream!(this, stream => Pin::new(stream).poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        with_stream!(this, stream => Pin::new(stream).poll_shutdown(cx))
    }
}
