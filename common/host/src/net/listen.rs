//! Stream listeners, TCP and Unix, and the accept loop.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio_util::sync::CancellationToken;
use tracing::{error, warn};

/// Who may connect to a Unix socket: owner and group, as upstream's umask of 0007 leaves it.
const SOCKET_MODE: u32 = 0o770;

/// How long the accept loop rests after an error such as too many open files: long enough not to
/// spin, short enough that clients only see a delay.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How soon TCP probes a silent peer, and when it counts as dead. The default suits agents and
/// front-end clients: a broken path is noticed within a minute instead of hours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keepalive {
    /// Silence before the first probe; the kernel counts in whole seconds.
    pub idle: Duration,
    /// Time between probes.
    pub interval: Duration,
    /// How many probes stay unanswered before the connection is given up.
    pub probes: u32,
    /// How long bytes may stay unacknowledged. It also ends a peer that lives and reads nothing, so
    /// it is for peers that always read: those that speak HTTP/2. `None` leaves it to the kernel,
    /// which tries for a quarter of an hour.
    pub user_timeout: Option<Duration>,
}

impl Keepalive {
    /// How long a peer may be silent: it is asked and does not answer for the last part of that.
    pub fn patience(&self) -> Duration {
        self.idle + self.interval * self.probes
    }
}

impl Default for Keepalive {
    fn default() -> Self {
        Self {
            idle: Duration::from_secs(15),
            interval: Duration::from_secs(15),
            probes: 3,
            user_timeout: Some(Duration::from_secs(60)),
        }
    }
}

/// The send buffer that a Unix socket's client gets, in bytes: with the kernel's default of 208 KiB
/// a frame of the native transport takes two writes and a wait between them. The kernel grants
/// what `net.core.wmem_max` allows, doubled, and charges only for what waits there.
const UNIX_SEND_BYTES: usize = 256 * 1024;

/// Why a Unix socket could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on the Unix socket {path}: {source}; {advice}")]
pub struct UnixBindError {
    path: String,
    advice: &'static str,
    source: io::Error,
}

/// A bound listener.
pub enum Listener {
    /// TCP.
    Tcp(TcpListener),
    /// A Unix socket; its file is removed when the listener is dropped.
    Unix(UnixListener, SocketFile),
}

/// Removes the socket's file when dropped, unless another program has put its own in its place.
pub struct SocketFile {
    path: PathBuf,
    /// Device and inode.
    identity: (u64, u64),
}

/// An accepted connection.
pub enum Accepted {
    /// From a TCP listener.
    Tcp(TcpStream, SocketAddr),
    /// From a Unix listener.
    Unix(UnixStream),
}

impl Listener {
    /// A TCP listener. Connections have its options from the start: Linux copies them, which saves
    /// six system calls for each.
    pub fn tcp(listener: TcpListener, keepalive: &Keepalive) -> Self {
        if let Err(error) = tune_with(&listener, keepalive) {
            warn!(%error, "cannot set TCP keepalive: dead peers are noticed late");
        }
        Self::Tcp(listener)
    }

    /// Binds a Unix socket with mode 0770. With `replace`, what is at the path is removed first.
    ///
    /// # Errors
    /// When the path is taken, its folder is missing or not writable, or it is longer than the
    /// kernel allows (107 bytes).
    pub fn unix(path: &Path, replace: bool) -> Result<Self, UnixBindError> {
        if replace && let Err(error) = std::fs::remove_file(path) {
            // As upstream: a removal that fails is told, and the bind below decides.
            if error.kind() != io::ErrorKind::NotFound {
                warn!(path = %path.display(), %error, "cannot remove what is at the socket's path");
            }
        }
        let bound = UnixListener::bind(path).and_then(|listener| {
            let file = SocketFile::at(path)?;
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(SOCKET_MODE))?;
            Ok(Self::Unix(listener, file))
        });
        bound.map_err(|source| UnixBindError {
            path: path.display().to_string(),
            advice: match source.kind() {
                io::ErrorKind::AddrInUse => {
                    "stop the program that uses it, remove the file, or pass --delete-existing-uds-file=true"
                }
                io::ErrorKind::NotFound => "create its folder",
                io::ErrorKind::PermissionDenied => {
                    "let the user of this process write to its folder"
                }
                io::ErrorKind::InvalidInput => "use a shorter path, 107 bytes at most",
                _ => "check the path given to --uds-name",
            },
            source,
        })
    }

    /// Where clients connect: the address, or the socket's path.
    pub fn address(&self) -> String {
        match self {
            Self::Tcp(listener) => listener
                .local_addr()
                .map_or_else(|error| error.to_string(), |address| address.to_string()),
            Self::Unix(_, file) => file.path.display().to_string(),
        }
    }

    /// The TCP address, if it is one.
    pub fn tcp_address(&self) -> Option<SocketAddr> {
        match self {
            Self::Tcp(listener) => listener.local_addr().ok(),
            Self::Unix(..) => None,
        }
    }

    /// Hands every connection to `handle` until the token fires. Errors of accept are told and
    /// waited out: running out of descriptors must not end the program.
    pub async fn serve(self, shutdown: CancellationToken, mut handle: impl FnMut(Accepted)) {
        loop {
            let accepted = tokio::select! {
                biased;
                () = shutdown.cancelled() => return,
                accepted = self.accept() => accepted,
            };
            match accepted {
                Ok(accepted) => handle(accepted),
                Err(error) => {
                    error!(listener = self.address(), %error, "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    async fn accept(&self) -> io::Result<Accepted> {
        match self {
            Self::Tcp(listener) => {
                let (stream, peer) = listener.accept().await?;
                Ok(Accepted::Tcp(stream, peer))
            }
            Self::Unix(listener, _) => {
                let (stream, _) = listener.accept().await?;
                // Slower without, no more.
                let _ = socket2::SockRef::from(&stream).set_send_buffer_size(UNIX_SEND_BYTES);
                Ok(Accepted::Unix(stream))
            }
        }
    }
}

impl Accepted {
    /// Hands the connection to the runtime that calls.
    ///
    /// # Errors
    /// When the runtime can not watch it.
    pub fn rebind(self) -> io::Result<Self> {
        Ok(match self {
            Self::Tcp(stream, peer) => Self::Tcp(rebind(stream)?, peer),
            Self::Unix(stream) => Self::Unix(UnixStream::from_std(stream.into_std()?)?),
        })
    }
}

/// Hands a connection to the runtime that calls.
///
/// # Errors
/// When the runtime can not watch it.
pub fn rebind(stream: TcpStream) -> io::Result<TcpStream> {
    TcpStream::from_std(stream.into_std()?)
}

impl SocketFile {
    /// The file of a socket that was just bound.
    ///
    /// # Errors
    /// When it is not there.
    pub fn at(path: &Path) -> io::Result<Self> {
        Ok(Self {
            path: path.to_owned(),
            identity: identity(path)?,
        })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if identity(&self.path).is_ok_and(|now| now == self.identity) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = std::fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

/// Sets what every tunnel socket wants: no Nagle delay, and a dead peer noticed by TCP itself.
///
/// # Errors
/// When the socket is gone already.
pub fn tune(stream: &TcpStream) -> io::Result<()> {
    tune_with(stream, &Keepalive::default())
}

/// The same with other times, for a fresh socket or a listener.
///
/// # Errors
/// When the socket is gone already.
pub fn tune_with(socket: &impl AsFd, keepalive: &Keepalive) -> io::Result<()> {
    let Keepalive {
        idle,
        interval,
        probes,
        user_timeout,
    } = *keepalive;
    let socket = socket2::SockRef::from(socket);
    socket.set_tcp_nodelay(true)?;
    let probing = socket2::TcpKeepalive::new()
        .with_time(idle)
        .with_interval(interval)
        .with_retries(probes);
    socket.set_tcp_keepalive(&probing)?;
    match user_timeout {
        Some(_) => socket.set_tcp_user_timeout(user_timeout),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[tokio::test]
    async fn a_stale_socket_file_is_replaced_only_on_request() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("front.socket");
        std::fs::write(&path, "stale").unwrap();
        let error = Listener::unix(&path, false).err().unwrap().to_string();
        assert!(error.contains("--delete-existing-uds-file"), "{error}");
        let listener = Listener::unix(&path, true).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, SOCKET_MODE);
        drop(listener);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn a_successors_socket_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("front.socket");
        let old = Listener::unix(&path, true).unwrap();
        let new = Listener::unix(&path, true).unwrap();
        drop(old);
        assert!(path.exists());
        drop(new);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn accepted_connections_are_tuned() {
        let keepalive = Keepalive::default();
        let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = tcp.local_addr().unwrap();
        let listener = Listener::tcp(tcp, &keepalive);
        let _client = TcpStream::connect(address).await.unwrap();
        let Accepted::Tcp(stream, _) = listener.accept().await.unwrap() else {
            panic!("no TCP");
        };
        let socket = socket2::SockRef::from(&stream);
        assert!(socket.tcp_nodelay().unwrap() && socket.keepalive().unwrap());
        let times = [socket.tcp_keepalive_time(), socket.tcp_keepalive_interval()];
        assert_eq!(
            times.map(Result::unwrap),
            [keepalive.idle, keepalive.interval]
        );
        assert_eq!(socket.tcp_keepalive_retries().unwrap(), keepalive.probes);
        assert_eq!(socket.tcp_user_timeout().unwrap(), keepalive.user_timeout);
    }

    #[tokio::test]
    async fn a_missing_folder_is_named() {
        let error = Listener::unix(Path::new("/nonexistent/dir/x.socket"), true);
        let error = error.err().unwrap().to_string();
        assert!(error.contains("create its folder"), "{error}");
    }
}
