//! The admin listeners and their access rules.
//!
//! Plain TCP accepts every client, mutual TLS accepts clients with a certificate, and a Unix socket accepts
//! the process's own user and root.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::geteuid;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::time::timeout;
use tokio_rustls::{Accept, TlsAcceptor};

use super::BoxFuture;
use crate::net::listen::{SocketFile, listen_unix};
use crate::tls::reload::ServerTls;

/// File mode of the Unix socket: only the owner may connect.
const SOCKET_MODE: u32 = 0o600;

/// Time limit for a TLS handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// A listener for admin requests.
pub enum AdminSocket {
    /// Plain HTTP for every client.
    Plain(TcpListener),
    /// HTTP over mutual TLS. The configuration must require client certificates.
    Tls(TcpListener, ServerTls, OnRefused),
    /// HTTP over a Unix socket.
    Unix(UnixSocket),
}

/// Function that logs and counts a client whose TLS handshake failed. A handshake without an end has the kind `TimedOut`.
pub type OnRefused = Arc<dyn Fn(SocketAddr, &io::Error) + Send + Sync>;

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

/// Byte stream of an authenticated connection.
pub(super) trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

type Entered = Option<Box<dyn Stream>>;

// === impl AdminSocket ===

impl AdminSocket {
    /// Accepts a connection. Returns the client's address, which is a loopback address on a Unix socket. The
    /// returned future authenticates the client, and resolves to `None` if the client is rejected.
    pub(super) async fn accept(&self) -> io::Result<(IpAddr, BoxFuture<Entered>)> {
        Ok(match self {
            Self::Plain(listener) => {
                let (stream, peer) = listener.accept().await?;
                (peer.ip(), Box::pin(async { Some(Box::new(stream) as _) }))
            }
            Self::Tls(listener, tls, on_refused) => {
                let (stream, peer) = listener.accept().await?;
                let handshake = TlsAcceptor::from(tls.get()).accept(stream);
                let on_refused = on_refused.clone();
                // A dual-stack listener reports IPv4 addresses as mapped ones.
                let source = SocketAddr::new(peer.ip().to_canonical(), peer.port());
                let entering = async move {
                    let entered = enter_tls(handshake).await;
                    entered.inspect_err(|why| on_refused(source, why)).ok()
                };
                (peer.ip(), Box::pin(entering))
            }
            Self::Unix(socket) => {
                let (stream, _) = socket.listener.accept().await?;
                let local = Ipv4Addr::LOCALHOST.into();
                (local, Box::pin(async { enter_unix(stream) }))
            }
        })
    }
}

async fn enter_tls(handshake: Accept<TcpStream>) -> io::Result<Box<dyn Stream>> {
    let late = |_| io::Error::new(io::ErrorKind::TimedOut, "the TLS handshake took too long");
    let stream = timeout(HANDSHAKE_TIMEOUT, handshake).await.map_err(late)?;
    Ok(Box::new(stream?))
}

fn enter_unix(stream: UnixStream) -> Entered {
    // The file mode already keeps other users out, but the file's owner can be changed.
    let uid = stream.peer_cred().ok()?.uid();
    if uid == 0 || uid == geteuid().as_raw() {
        return Some(Box::new(stream));
    }
    tracing::warn!(
        uid,
        "admin client rejected: only root and the user of this process may use the socket"
    );
    None
}

impl From<TcpListener> for AdminSocket {
    fn from(listener: TcpListener) -> Self {
        Self::Plain(listener)
    }
}

// === impl UnixSocket ===

impl UnixSocket {
    /// Opens a socket with mode 0600. The mode is set before any client can connect. A stale socket file, on
    /// which no program listens, is replaced. Error texts name `flag`, so that the operator knows the flag to
    /// change.
    ///
    /// # Errors
    /// Fails if another program listens on the socket, the path is not a socket, or its folder cannot be
    /// used.
    pub fn bind(path: &Path, flag: &'static str) -> Result<Self, UnixSocketError> {
        let listener = remove_stale(path).and_then(|()| listen_unix(path, SOCKET_MODE));
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

#[cfg(test)]
mod tests;
