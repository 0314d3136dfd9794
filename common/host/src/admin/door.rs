//! Who may ask: anybody over plain TCP, holders of a certificate over mutual TLS, and this process's
//! own user and root over a Unix socket.

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

/// Who may open the Unix socket: its owner.
const SOCKET_MODE: u32 = 0o600;

/// Length of the queue of connections that wait to be accepted.
const BACKLOG: i32 = 128;

/// How long a TLS handshake may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Where requests come in.
pub enum Door {
    /// Plain HTTP for everybody.
    Plain(TcpListener),
    /// HTTP over mutual TLS.
    Tls(Secret),
    /// HTTP over a Unix socket.
    Unix(UnixDoor),
}

/// A listener for holders of a certificate.
pub struct Secret {
    listener: TcpListener,
    acceptor: TlsAcceptor,
}

/// A listener for this process's own user, and root. Its file is removed when it is dropped.
pub struct UnixDoor {
    listener: UnixListener,
    _file: SocketFile,
}

/// Why the Unix socket could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on the Unix socket {path}: {why}; check {flag}")]
pub struct UnixDoorError {
    path: String,
    flag: &'static str,
    why: io::Error,
}

/// Somebody at the door.
pub(super) enum Guest {
    Plain(TcpStream),
    Tls(TcpStream, TlsAcceptor),
    Unix(UnixStream),
}

/// A connection of any kind.
pub(super) enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
    Unix(UnixStream),
}

// === impl Door ===

impl Door {
    pub(super) async fn accept(&self) -> io::Result<Guest> {
        Ok(match self {
            Self::Plain(listener) => Guest::Plain(listener.accept().await?.0),
            Self::Tls(Secret { listener, acceptor }) => {
                Guest::Tls(listener.accept().await?.0, acceptor.clone())
            }
            Self::Unix(door) => Guest::Unix(door.listener.accept().await?.0),
        })
    }
}

impl From<TcpListener> for Door {
    fn from(listener: TcpListener) -> Self {
        Self::Plain(listener)
    }
}

// === impl Secret, UnixDoor ===

impl Secret {
    /// A listener whose clients have to show a certificate, as the configuration says.
    pub fn new(listener: TcpListener, config: Arc<rustls::ServerConfig>) -> Self {
        Self {
            listener,
            acceptor: TlsAcceptor::from(config),
        }
    }
}

impl UnixDoor {
    /// Opens a socket of mode 0600. One that a program has left behind is replaced; nobody can
    /// connect before the mode is set. `flag` names in errors what the operator can change.
    ///
    /// # Errors
    /// When a program listens there, something else is at the path, or its folder can not be used.
    pub fn bind(path: &Path, flag: &'static str) -> Result<Self, UnixDoorError> {
        let listener = remove_stale(path).and_then(|()| listen(path));
        let bound = listener.and_then(|listener| {
            Ok(Self {
                listener,
                _file: SocketFile::at(path)?,
            })
        });
        bound.map_err(|why| UnixDoorError {
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

/// Removes a socket where nobody listens any more.
fn remove_stale(path: &Path) -> io::Result<()> {
    let kind = match std::fs::symlink_metadata(path) {
        Ok(found) => found.file_type(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if !kind.is_socket() {
        return Err(io::Error::other("what is there is no socket"));
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
    /// Lets the guest in, or not.
    pub(super) async fn enter(self) -> Option<Stream> {
        match self {
            Self::Plain(stream) => Some(Stream::Plain(stream)),
            Self::Tls(stream, acceptor) => {
                match timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await {
                    Ok(Ok(stream)) => Some(Stream::Tls(Box::new(stream))),
                    Ok(Err(error)) => {
                        let why = tls::explain(&error);
                        tracing::warn!("turned away from the admin listener: {why}");
                        None
                    }
                    Err(_) => None,
                }
            }
            Self::Unix(stream) => {
                // The file's mode says the same; but a file can be given away.
                let uid = stream.peer_cred().ok()?.uid();
                if uid == 0 || uid == geteuid().as_raw() {
                    return Some(Stream::Unix(stream));
                }
                tracing::warn!(uid, "turned away from the admin socket: not our user");
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
