//! The connections of CONNECT clients, and how the server notices that a client has closed one.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use culvert_host::net::admission::Gated;
use culvert_host::net::options::unacknowledged;
use futures_util::FutureExt as _;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf, Ready};
use tokio::net::TcpStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::sleep;
use tokio_rustls::server::TlsStream;

/// Interval between checks of a half-closed client.
const HANG_UP_CHECK: Duration = Duration::from_secs(1);

/// The reading half of a client's connection.
pub(crate) trait ClientRead: AsyncRead + Unpin + Send {
    /// True if closing the whole connection is distinguishable at once from ending only the writing half.
    const TELLS_HANG_UP: bool;

    /// True if the client distinguishes an ordinary end from a close without an end. A Unix socket cannot
    /// express the difference.
    const TELLS_INCOMPLETE_END: bool;

    /// Resolves once the client has closed the whole connection. Reads nothing.
    fn hung_up(&self) -> impl Future<Output = ()> + Send;
}

/// TLS stream of a client.
type Stream = Arc<Mutex<TlsStream<Gated<TcpStream>>>>;

/// Reading half of a TLS stream. Unlike the half of `tokio::io::split`, gives access to the socket.
pub(crate) struct TlsRead(Stream);

/// Writing half of a TLS stream.
pub(crate) struct TlsWrite(Stream);

/// Returns the halves of a TLS stream.
pub(crate) fn halves(stream: TlsStream<Gated<TcpStream>>) -> (TlsRead, TlsWrite) {
    let stream = Arc::new(Mutex::new(stream));
    (TlsRead(stream.clone()), TlsWrite(stream))
}

/// The writing half of a client's connection.
pub(crate) trait ClientWrite: AsyncWrite + Unpin + Send {
    /// Returns how many bytes in the socket the client has not acknowledged, see [`unacknowledged`].
    fn unacknowledged(&self) -> Option<u32>;
}

impl ClientRead for OwnedReadHalf {
    const TELLS_HANG_UP: bool = true;
    const TELLS_INCOMPLETE_END: bool = false;

    /// A Unix socket reports a hang-up as soon as the peer closes its socket. A wait for writability returns
    /// at once on a writable socket, so this function polls for the hang-up.
    async fn hung_up(&self) {
        loop {
            match self.ready(Interest::WRITABLE).await {
                Ok(ready) if !ready.is_write_closed() => sleep(HANG_UP_CHECK).await,
                _ => return,
            }
        }
    }
}

impl ClientRead for TlsRead {
    const TELLS_HANG_UP: bool = false;
    /// A TLS client misses the close_notify alert (RFC 8446, section 6.1).
    const TELLS_INCOMPLETE_END: bool = true;

    /// The end of a TLS client's bytes may be a half close, also with a FIN of TCP; only a reset proves a close. The client's
    /// kernel answers a keepalive probe with a reset once it has forgotten the connection, which takes about a minute.
    async fn hung_up(&self) {
        loop {
            sleep(HANG_UP_CHECK).await;
            let stream = self.0.lock();
            let socket = stream.get_ref().0.get_ref();
            let ready = socket.ready(Interest::ERROR).now_or_never();
            if ready.is_some_and(|ready| ready.is_ok_and(Ready::is_error)) {
                return;
            }
        }
    }
}

impl AsyncRead for TlsRead {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        target: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.lock()).poll_read(cx, target)
    }
}

impl ClientWrite for OwnedWriteHalf {
    fn unacknowledged(&self) -> Option<u32> {
        unacknowledged(self.as_ref())
    }
}

impl ClientWrite for TlsWrite {
    fn unacknowledged(&self) -> Option<u32> {
        unacknowledged(self.0.lock().get_ref().0.get_ref())
    }
}

impl AsyncWrite for TlsWrite {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.0.lock()).poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.lock()).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.lock()).poll_shutdown(cx)
    }
}
