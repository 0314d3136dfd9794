//! The admin listeners and their access rules.
//!
//! Plain TCP accepts every client, mutual TLS accepts clients with a certificate, and a Unix socket accepts
//! the process's own user and root.

use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use rustix::process::geteuid;
use socket2::{Domain, SockAddr, Socket, Type};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::net::listen::SocketFile;
use crate::tls;

/// File mode of the Unix socket: only the owner may connect.
const SOCKET_MODE: u32 = 0o600;

/// Length of the kernel's queue of connections that wait to be accepted.
const BACKLOG: i32 = 128;

/// Time limit for a TLS handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// A listener for admin requests.
pub enum AdminSocket {
    /// Plain HTTP for every client.
    Plain(TcpListener),
    /// HTTP over mutual TLS.
    Tls(TlsSocket),
    /// HTTP over a Unix socket.
    Unix(UnixSocket),
}

/// A TLS listener that requires client certificates.
pub struct TlsSocket {
    listener: TcpListener,
    acceptor: TlsAcceptor,
}

/// A Unix listener for the process's own user and root. Dropping the listener removes the socket file.
pub struct UnixSocket {
    listener: UnixListener,
    _file: SocketFile,
}

/// Error returned when a Unix socket cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on the Unix socket {path}: {why}; check {flag}")]
pub struct UnixSocketError {
    path: String,
    flag: &'static str,
    why: io::Error,
}

/// An accepted connection, before authentication.
pub(super) enum Guest {
    Plain(TcpStream),
    Tls(TcpStream, TlsAcceptor),
    Unix(UnixStream),
}

/// An authenticated connection.
pub(super) enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
    Unix(UnixStream),
}

// === impl AdminSocket ===

impl AdminSocket {
    pub(super) async fn accept(&self) -> io::Result<Guest> {
        Ok(match self {
            Self::Plain(listener) => Guest::Plain(listener.accept().await?.0),
            Self::Tls(TlsSocket { listener, acceptor }) => {
                Guest::Tls(listener.accept().await?.0, acceptor.clone())
            }
            Self::Unix(socket) => Guest::Unix(socket.listener.accept().await?.0),
        })
    }
}

impl From<TcpListener> for AdminSocket {
    fn from(listener: TcpListener) -> Self {
        Self::Plain(listener)
    }
}

// === impl TlsSocket, UnixSocket ===

impl TlsSocket {
    /// Creates a listener. `config` must require client certificates.
    pub fn new(listener: TcpListener, config: Arc<rustls::ServerConfig>) -> Self {
        Self {
            listener,
            acceptor: TlsAcceptor::from(config),
        }
    }
}

impl UnixSocket {
    /// Opens a socket with mode 0600. The mode is set before any client can connect. A stale socket file, on
    /// which no program listens, is replaced. Error texts name `flag`, so that the operator knows the flag to
    /// change.
    ///
    /// # Errors
    /// Fails if another program listens on the socket, the path is not a socket, or its folder cannot be
    /// used.
    pub fn bind(path: &Path, flag: &'static str) -> Result<Self, UnixSocketError> {
        let listener = remove_stale(path).and_then(|()| listen(path));
        let bound = listener.and_then(|listener| {
            Ok(Self {
                listener,
                _file: SocketFile::at(path)?,
            })
        });
        bound.map_err(|why| UnixSocketError {
            path: path.display().to_string(),
            flag,
            why,
        })
    }
}

fn listen(path: &Path) -> io::Result<UnixListener> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.bind(&SockAddr::unix(path)?)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(SOCKET_MODE))?;
    socket.listen(BACKLOG)?;
    UnixListener::from_std(socket.into())
}

/// Removes a socket file if no program listens on the socket.
fn remove_stale(path: &Path) -> io::Result<()> {
    let kind = match std::fs::symlink_metadata(path) {
        Ok(found) => found.file_type(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if !kind.is_socket() {
        return Err(io::Error::other("the path exists and is not a socket"));
    }
    match std::os::unix::net::UnixStream::connect(path) {
        Ok(_) => Err(io::Error::other("another program listens there")),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path)
        }
        Err(error) => Err(error),
    }
}

// === impl Guest ===

impl Guest {
    /// Authenticates the client. Returns `None` if the client is rejected.
    pub(super) async fn enter(self) -> Option<Stream> {
        match self {
            Self::Plain(stream) => Some(Stream::Plain(stream)),
            Self::Tls(stream, acceptor) => {
                match timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await {
                    Ok(Ok(stream)) => Some(Stream::Tls(Box::new(stream))),
                    Ok(Err(error)) => {
                        let why = tls::explain(&error);
                        tracing::warn!("admin client rejected: {why}");
                        None
                    }
                    Err(_) => None,
                }
            }
            Self::Unix(stream) => {
                // The file mode already keeps other users out, but the file's owner can be changed.
                let uid = stream.peer_cred().ok()?.uid();
                if uid == 0 || uid == geteuid().as_raw() {
                    return Some(Stream::Unix(stream));
                }
                tracing::warn!(
                    uid,
                    "admin client rejected: only root and the user of this process may use the socket"
                );
                None
            }
        }
    }
}

// === impl Stream ===

macro_rules! on_any {
    ($stream:expr, $inner:ident => $call:expr) => {
        match $stream.get_mut() {
            Stream::Plain($inner) => $call,
            Stream::Tls($inner) => $call,
            Stream::Unix($inner) => $call,
        }
    };
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        on_any!(self, inner => Pin::new(inner).poll_read(cx, buf))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        on_any!(self, inner => Pin::new(inner).poll_write(cx, buf))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        on_any!(self, inner => Pin::new(inner).poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        on_any!(self, inner => Pin::new(inner).poll_shutdown(cx))
    }
}

#[cfg(test)]
mod tests;
