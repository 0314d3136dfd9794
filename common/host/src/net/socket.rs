//! A socket that one task reads and writes while another task inspects it.

use std::io;
use std::net::Shutdown;
use std::ops::Deref;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use bytes::BufMut;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;

use super::listen::reset_on_close;
use super::options::unacknowledged;
use super::silence::is_over;

/// Resets a connection when dropped, unless [`disarmed`](Self::disarm): after an ordinary close, the peer would take the
/// bytes so far for all bytes. The value must be dropped before the socket.
#[derive(Debug)]
pub struct ResetOnDrop<'a>(Option<&'a TcpStream>);

impl<'a> ResetOnDrop<'a> {
    /// Resets the connection of `socket` on drop.
    pub fn new(socket: &'a TcpStream) -> Self {
        Self(Some(socket))
    }

    /// Lets the connection close in the ordinary way.
    pub fn disarm(&mut self) {
        self.0 = None;
    }
}

impl Drop for ResetOnDrop<'_> {
    fn drop(&mut self) {
        if let Some(socket) = self.0 {
            reset_on_close(socket);
        }
    }
}

/// Reads and writes a shared socket. Only one task may read, and only one may write.
#[derive(Clone, Debug)]
pub struct Socket<T> {
    socket: T,
    /// Set if the peer sends no urgent data.
    is_framed: bool,
    /// Set when a write has failed because of a reset. The kernel reports ECONNRESET once; a later read of 0 is not an end
    /// of stream. Shared by the clones.
    is_reset: Arc<AtomicBool>,
}

impl<T> Socket<T> {
    /// Wraps a socket. With `is_framed`, the peer speaks TLS or HTTP/2, and reads need fewer system calls, see
    /// [`read_once`].
    pub fn new(socket: T, is_framed: bool) -> Self {
        Self {
            socket,
            is_framed,
            is_reset: Arc::default(),
        }
    }
}

impl<T: Deref<Target = TcpStream>> Socket<T> {
    /// Returns how many written bytes the peer has not acknowledged, see [`unacknowledged`].
    pub fn unacknowledged(&self) -> Option<u32> {
        unacknowledged(&*self.socket)
    }

    /// Returns true if the peer has reset the connection, see [`is_over`].
    pub fn is_over(&self) -> bool {
        is_over(&*self.socket)
    }
}

impl<T: Deref<Target = TcpStream> + Unpin> AsyncRead for Socket<T> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        target: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let has_room = target.remaining() > 0;
        loop {
            ready!(self.socket.poll_read_ready(cx))?;
            let read = match self.is_framed {
                true => read_once(&self.socket, target),
                false => self.socket.try_read_buf(target),
            };
            match read {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Ok(0) if has_room && self.is_reset.load(Ordering::Relaxed) => {
                    return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
                }
                read => return Poll::Ready(read.map(|_| ())),
            }
        }
    }
}

impl<T: Deref<Target = TcpStream> + Unpin> Socket<T> {
    fn poll_with(
        &self,
        cx: &mut Context<'_>,
        write: impl Fn(&TcpStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.socket.poll_write_ready(cx))?;
            match write(&self.socket) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    // A peer that closed normally and no longer reads causes a broken pipe, not a reset.
                    if error.kind() == io::ErrorKind::ConnectionReset {
                        self.is_reset.store(true, Ordering::Relaxed);
                    }
                    return Poll::Ready(Err(error));
                }
                written => return Poll::Ready(written),
            }
        }
    }
}

impl<T: Deref<Target = TcpStream> + Unpin> AsyncWrite for Socket<T> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_with(cx, |socket| socket.try_write(bytes))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(SockRef::from(&*self.socket).shutdown(Shutdown::Write))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_with(cx, |socket| socket.try_write_vectored(slices))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }
}

/// Reads from a socket into the first chunk of `target`, like [`TcpStream::try_read_buf`]. A read of fewer
/// bytes than the chunk's size has emptied the socket. The socket then counts as not ready, and the next read
/// waits at once, without a useless system call. tokio's own `poll_read` does the same. Do not use this
/// function if the peer may send urgent data: a read stops at urgent data (tcp(7)), so the bytes after the
/// urgent data would be read late. TLS and HTTP/2 have no urgent data.
///
/// # Errors
/// Returns the error of the system call.
pub fn read_once(socket: &TcpStream, target: &mut impl BufMut) -> io::Result<usize> {
    let room = target.chunk_mut().len();
    let mut read = Err(io::ErrorKind::WouldBlock.into());
    // The closure's result is only for tokio's readiness flag: `WouldBlock` clears the flag, any other result
    // leaves the flag set. The caller gets the result of the read.
    let _ = socket.try_io(Interest::READABLE, || {
        read = socket.try_read_buf(target);
        match read {
            Ok(bytes) if 0 < bytes && bytes < room => Err(io::ErrorKind::WouldBlock.into()),
            _ => Ok(()),
        }
    });
    read
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]

    use std::time::Duration;

    use futures_util::FutureExt as _;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;
    use tokio::time::timeout;

    use super::*;

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let far = TcpStream::connect(listener.local_addr().unwrap());
        let (far, accepted) = tokio::join!(far, listener.accept());
        (accepted.unwrap().0, far.unwrap())
    }

    #[tokio::test]
    async fn short_read_clears_readiness_without_missing_bytes_or_the_end() {
        let (near, mut far) = pair().await;
        let mut room = [0; 4];
        for sent in [3, 1, 2] {
            far.write_all(&[1; 3][..sent]).await.unwrap();
            near.readable().await.unwrap();
            assert_eq!(read_once(&near, &mut room.as_mut()).unwrap(), sent);
            // The socket is known to be empty, so no call is needed.
            assert!(near.readable().now_or_never().is_none());
        }
        // A read that fills its buffer may leave bytes in the socket.
        far.write_all(&[1; 6]).await.unwrap();
        near.readable().await.unwrap();
        assert_eq!(read_once(&near, &mut room.as_mut()).unwrap(), 4);
        near.readable().now_or_never().unwrap().unwrap();
        drop(far);
        assert_eq!(read_once(&near, &mut room.as_mut()).unwrap(), 2);
        near.readable().await.unwrap();
        assert_eq!(read_once(&near, &mut room.as_mut()).unwrap(), 0);
        near.readable().now_or_never().unwrap().unwrap();
    }

    #[tokio::test]
    async fn reset_that_a_write_reports_is_no_end_for_the_reader() {
        let (near, far) = pair().await;
        reset_on_close(&far);
        drop(far);
        let socket = Socket::new(&near, false);
        let (mut reader, mut writer) = (socket.clone(), socket);
        let written = writer.write(b"x").await.unwrap_err();
        assert_eq!(written.kind(), io::ErrorKind::ConnectionReset);
        let read = reader.read(&mut [0; 4]).await.unwrap_err();
        assert_eq!(read.kind(), io::ErrorKind::ConnectionReset);
    }

    #[tokio::test]
    async fn broken_pipe_does_not_hide_the_end_of_the_stream() {
        let (near, mut far) = pair().await;
        far.write_all(b"answer").await.unwrap();
        drop(far);
        let socket = Socket::new(&near, false);
        let (mut reader, mut writer) = (socket.clone(), socket);
        // The peer no longer reads, and refuses the bytes after its end.
        while writer.write(b"x").await.is_ok() {
            tokio::task::yield_now().await;
        }
        let mut received = Vec::new();
        reader.read_to_end(&mut received).await.unwrap();
        assert_eq!(received, b"answer");
    }

    #[tokio::test]
    async fn bytes_after_urgent_data_arrive_without_delay() {
        let (near, mut far) = pair().await;
        far.write_all(b"abc").await.unwrap();
        SockRef::from(&far).send_out_of_band(b"!").unwrap();
        far.write_all(b"def").await.unwrap();
        let (mut socket, mut received) = (Socket::new(&near, false), [0; 64]);
        let mut read = async || socket.read(&mut received).await.unwrap();
        // The first read stops at the urgent data.
        assert_eq!(read().await, 3);
        let rest = timeout(Duration::from_secs(10), read());
        assert_eq!(rest.await.unwrap(), 3);
        assert_eq!(received[..3], *b"def");
    }
}
