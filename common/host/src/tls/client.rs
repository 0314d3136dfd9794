//! Client end of TLS connections.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use rustls::{ClientConfig, ClientConnection};
use rustls_pki_types::ServerName;
use tokio::io::{AsyncBufRead as _, AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::BUFFER_BYTES;

/// Client end of a TLS connection, which reports why the server refused the client's certificate. In TLS 1.3 the server
/// refuses after the client's handshake: it sends an alert and closes the connection. A write then fails with "broken
/// pipe", often before the alert is read. Such a write reads the alert, and fails with it. One task must read and write.
#[derive(Debug)]
pub struct ClientStream<S> {
    inner: TlsStream<S>,
    /// Error of a failed write, while the alert or the end of the connection is not read yet.
    broken: Option<io::Error>,
}

impl<S: AsyncRead + AsyncWrite + Unpin> ClientStream<S> {
    /// Runs the TLS handshake over `stream`.
    ///
    /// # Errors
    /// Fails if the stream or the handshake fails; [`explain`](super::explain()) has the remedy.
    pub async fn connect(
        config: Arc<ClientConfig>,
        name: ServerName<'static>,
        stream: S,
    ) -> io::Result<Self> {
        let mut stream = TlsConnector::from(config).connect(name, stream).await?;
        stream.get_mut().1.set_buffer_limit(Some(BUFFER_BYTES));
        Ok(Self {
            inner: stream,
            broken: None,
        })
    }

    /// Returns the TLS state of the connection.
    pub fn tls(&self) -> &ClientConnection {
        self.inner.get_ref().1
    }

    /// Runs a step that writes. A failure waits for the next bytes of the server, which may be its alert.
    fn or_alert<T>(
        &mut self,
        cx: &mut Context<'_>,
        write: impl FnOnce(Pin<&mut TlsStream<S>>, &mut Context<'_>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if self.broken.is_none() {
            match ready!(write(Pin::new(&mut self.inner), cx)) {
                Err(error) if is_lost(&error) => self.broken = Some(error),
                written => return Poll::Ready(written),
            }
        }
        // Takes no bytes from the reader.
        let read = Pin::new(&mut self.inner).poll_fill_buf(cx);
        let error = match ready!(read) {
            Err(alert) if alert.get_ref().is_some_and(|why| why.is::<rustls::Error>()) => alert,
            _ => self
                .broken
                .take()
                .unwrap_or_else(|| io::ErrorKind::BrokenPipe.into()),
        };
        Poll::Ready(Err(error))
    }
}

/// Returns true if the server has closed the connection.
fn is_lost(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset};
    matches!(error.kind(), BrokenPipe | ConnectionReset)
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for ClientStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        target: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, target)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for ClientStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.or_alert(cx, |inner, cx| inner.poll_write(cx, bytes))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.or_alert(cx, TlsStream::poll_flush)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.or_alert(cx, |inner, cx| inner.poll_write_vectored(cx, slices))
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}
