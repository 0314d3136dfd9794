//! The handles of a flow for tests, as tokio's byte streams.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use culvert_openvpn::flows::Closed;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::*;

impl Reader {
    pub(crate) fn poll_recv(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<Bytes>, Broken>> {
        self.0.poll_recv(CHUNK_BYTES, cx)
    }

    pub(crate) fn poll_broken(&mut self, cx: &mut Context<'_>) -> Poll<Broken> {
        self.0.poll_broken(cx)
    }
}

impl Writer {
    pub(crate) fn finish(&mut self) -> Result<(), Broken> {
        self.0.finish()
    }

    pub(crate) fn reset(self) {
        self.0.reset();
    }
}

impl AsyncRead for Reader {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if buffer.remaining() > 0
            && let Some(chunk) = ready!(self.0.poll_recv(buffer.remaining(), cx))?
        {
            buffer.put_slice(&chunk);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Writer {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let mut chunk = Bytes::copy_from_slice(bytes.get(..CHUNK_BYTES).unwrap_or(bytes));
        let whole = chunk.len();
        match self.0.poll_send(&mut chunk, cx) {
            Poll::Ready(Err(why)) => Poll::Ready(Err(why.into())),
            Poll::Pending if chunk.len() == whole => Poll::Pending,
            _ => Poll::Ready(Ok(whole - chunk.len())),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.0.finish().map_err(io::Error::from))
    }
}

impl From<Broken> for io::Error {
    fn from(broken: Broken) -> Self {
        let kind = match broken {
            Broken::Flow(Closed::Refused) => io::ErrorKind::ConnectionRefused,
            Broken::Flow(Closed::Unreachable(_)) => io::ErrorKind::HostUnreachable,
            Broken::Flow(Closed::ConnectTimedOut(_) | Closed::TimedOut(_)) => {
                io::ErrorKind::TimedOut
            }
            Broken::Flow(Closed::Reset) => io::ErrorKind::ConnectionReset,
            _ => io::ErrorKind::ConnectionAborted,
        };
        Self::new(kind, broken)
    }
}
