//! Stream listeners (TCP and Unix) and the accept loop.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd as _};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use socket2::{Domain, SockAddr, Socket, Type};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio_util::sync::CancellationToken;
use tracing::{error, warn};

/// File mode of a Unix socket: owner and group may connect, as with upstream's umask of 0007.
const SOCKET_MODE: u32 = 0o770;

/// Length of the kernel's queue of connections that wait to be accepted on a Unix socket; the kernel limits the length to
/// `net.core.somaxconn`, which is Go's length. Unlike with TCP, a client whose connection does not fit gets an error at once.
const UNIX_BACKLOG: i32 = 4096;

/// Part of the process's descriptors that listeners for traffic leave free, as a fraction: for the connections to
/// endpoints, and for health checks, files and logs.
const RESERVED_DESCRIPTORS: u64 = 8;

/// Part of the process's descriptors that connections to endpoints leave free, as a fraction: for health checks, files
/// and logs.
const LAST_DESCRIPTORS: u64 = 16;

/// Reason to refuse a connection for want of descriptors, and the remedy.
pub const TOO_MANY_FILES: &str = "too many open files; raise the limit (ulimit -n, LimitNOFILE), or the memory limit, \
                                  which allows one file for each 8 KiB";

/// Pause of the accept loop after an error such as too many open files: long enough to avoid a busy loop,
/// short enough that clients notice only a delay.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// TCP keepalive times: when TCP starts to probe a silent connection, and when the connection counts as dead.
/// The default suits agents and front-end clients: a broken path is detected within a minute instead of
/// hours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keepalive {
    /// Silence before the first probe. The kernel counts whole seconds.
    pub idle: Duration,
    /// Time between probes.
    pub interval: Duration,
    /// Number of unanswered probes that ends the connection.
    pub probes: u32,
    /// Maximum time for bytes to stay unacknowledged. The timeout also closes the connection of a live peer
    /// that reads nothing, so it suits only peers that always read, such as HTTP/2 peers. `None` leaves the
    /// limit to the kernel, which retries for a quarter of an hour.
    pub user_timeout: Option<Duration>,
}

impl Keepalive {
    /// Returns the maximum silence of a live peer: the idle time, then the time for all probes.
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

/// Send buffer of an accepted Unix connection, in bytes. With the kernel's default of 208 KiB, a frame of the
/// native transport needs two writes with a wait in between. The kernel grants at most `net.core.wmem_max`,
/// doubled, and charges only for bytes that wait in the buffer.
const UNIX_SEND_BYTES: usize = 256 * 1024;

/// Error returned when a Unix socket cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on the Unix socket {path}: {cause}; {advice}")]
pub struct UnixBindError {
    path: String,
    advice: &'static str,
    /// Part of the text, and therefore not the source of the error.
    cause: io::Error,
}

/// A bound listener.
pub enum Listener {
    /// TCP.
    Tcp(TcpListener),
    /// A Unix socket. Dropping the listener removes the socket file.
    Unix(UnixListener, SocketFile),
}

/// Guard of a socket file. Dropping the guard removes the file, unless another program has replaced the file.
pub struct SocketFile {
    path: PathBuf,
    /// Device and inode of the file.
    identity: (u64, u64),
}

/// An accepted connection.
pub enum Accepted {
    /// Connection from a TCP listener, with the peer's address.
    Tcp(TcpStream, SocketAddr),
    /// Connection from a Unix listener.
    Unix(UnixStream),
}

impl Listener {
    /// Wraps a TCP listener and sets its options. Linux copies the options to each accepted connection, which
    /// saves six system calls per connection.
    pub fn tcp(listener: TcpListener, keepalive: &Keepalive) -> Self {
        if let Err(error) = tune_with(&listener, keepalive) {
            warn!(%error, "cannot set TCP keepalive; dead peers will be detected late");
        }
        Self::Tcp(listener)
    }

    /// Binds a Unix socket with mode 0770. With `replace`, an existing file at the path is removed first.
    ///
    /// # Errors
    /// Fails if the path is in use, if its folder is missing or not writable, or if the path is longer than
    /// the kernel allows (107 bytes).
    pub fn unix(path: &Path, replace: bool) -> Result<Self, UnixBindError> {
        if replace && let Err(error) = std::fs::remove_file(path) {
            // As in upstream, a failed removal is only logged; if the file is still there, the bind fails.
            if error.kind() != io::ErrorKind::NotFound {
                warn!(path = %path.display(), %error, "cannot remove the file at the socket's path");
            }
        }
        let bound = listen_unix(path, SOCKET_MODE).and_then(|listener| {
            let file = SocketFile::at(path)?;
            Ok(Self::Unix(listener, file))
        });
        bound.map_err(|cause| UnixBindError {
            path: path.display().to_string(),
            advice: match cause.kind() {
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
            cause,
        })
    }

    /// Returns the address or socket path that clients connect to.
    pub fn address(&self) -> String {
        match self {
            Self::Tcp(listener) => listener
                .local_addr()
                .map_or_else(|error| error.to_string(), |address| address.to_string()),
            Self::Unix(_, file) => file.path.display().to_string(),
        }
    }

    /// Returns the TCP address; `None` for a Unix socket.
    pub fn tcp_address(&self) -> Option<SocketAddr> {
        match self {
            Self::Tcp(listener) => listener.local_addr().ok(),
            Self::Unix(..) => None,
        }
    }

    /// Passes every accepted connection to `handle` until `shutdown` is cancelled. An accept error is logged
    /// and followed by a pause, because running out of file descriptors must not end the program. While seven
    /// eighths of the descriptors are in use, new connections are closed at once, and `refused` is called for each.
    pub async fn serve(
        self,
        shutdown: CancellationToken,
        handle: impl FnMut(Accepted),
        refused: impl FnMut(),
    ) {
        let limit = usable_descriptors();
        self.serve_within(limit, shutdown, handle, refused).await;
    }

    /// Serves connections whose descriptors are below `limit`.
    async fn serve_within(
        self,
        limit: u64,
        shutdown: CancellationToken,
        mut handle: impl FnMut(Accepted),
        mut refused: impl FnMut(),
    ) {
        loop {
            let accepted = tokio::select! {
                biased;
                () = shutdown.cancelled() => return,
                accepted = self.accept() => accepted,
            };
            match accepted {
                Ok(accepted) if accepted.descriptor() >= limit => {
                    warn!(
                        listener = self.address(),
                        limit, "connection refused: {TOO_MANY_FILES}"
                    );
                    refused();
                }
                Ok(accepted) => handle(accepted),
                Err(error) => {
                    let listener = self.address();
                    match is_out_of_files(&error) {
                        true => error!(listener, "cannot accept a connection: {TOO_MANY_FILES}"),
                        false => error!(listener, %error, "cannot accept a connection"),
                    }
                    let pause = tokio::time::sleep(ACCEPT_PAUSE);
                    if shutdown.run_until_cancelled(pause).await.is_none() {
                        return;
                    }
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
                // Without the larger buffer, the connection is only slower.
                let _ = socket2::SockRef::from(&stream).set_send_buffer_size(UNIX_SEND_BYTES);
                Ok(Accepted::Unix(stream))
            }
        }
    }
}

impl Accepted {
    fn descriptor(&self) -> u64 {
        match self {
            Self::Tcp(stream, _) => number_of(stream),
            Self::Unix(stream) => number_of(stream),
        }
    }

    /// Moves the connection to the caller's runtime.
    ///
    /// # Errors
    /// Fails if the runtime cannot register the socket.
    pub fn rebind(self) -> io::Result<Self> {
        Ok(match self {
            Self::Tcp(stream, peer) => Self::Tcp(rebind(stream)?, peer),
            Self::Unix(stream) => Self::Unix(UnixStream::from_std(stream.into_std()?)?),
        })
    }
}

/// Returns true if an operation failed because the process has too many open files.
pub fn is_out_of_files(error: &io::Error) -> bool {
    Errno::from_io_error(error) == Some(Errno::MFILE)
}

/// Returns the descriptors that connections may use: the process's limit without the reserve. The kernel assigns
/// the lowest free descriptor, so a descriptor with a high number means that many are in use.
pub(super) fn usable_descriptors() -> u64 {
    let limit = descriptor_limit();
    limit - limit / RESERVED_DESCRIPTORS
}

/// Returns true if a new descriptor is one of the last descriptors, which are for health checks, files and logs. A
/// connection to an endpoint must not use such a descriptor.
pub fn is_last(new: &impl AsFd) -> bool {
    static FIRST: OnceLock<u64> = OnceLock::new();
    let first = FIRST.get_or_init(|| {
        let limit = descriptor_limit();
        limit - limit / LAST_DESCRIPTORS
    });
    number_of(new) >= *first
}

fn descriptor_limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

fn number_of(descriptor: &impl AsFd) -> u64 {
    let number = descriptor.as_fd().as_raw_fd();
    u64::try_from(number).unwrap_or_default()
}

/// Moves a TCP connection to the caller's runtime.
///
/// # Errors
/// Fails if the runtime cannot register the socket.
pub fn rebind(stream: TcpStream) -> io::Result<TcpStream> {
    TcpStream::from_std(stream.into_std()?)
}

/// Registers a TCP connection with the caller's runtime. The given stream stays usable; tasks that wait for it are not
/// woken by the new one.
///
/// # Errors
/// Fails if the process has too many open files.
pub(super) fn register(stream: &TcpStream) -> io::Result<TcpStream> {
    let socket = stream.as_fd().try_clone_to_owned()?;
    TcpStream::from_std(socket.into())
}

impl SocketFile {
    /// Creates the guard for the file of a socket that was just bound.
    ///
    /// # Errors
    /// Fails if the file does not exist.
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

/// Opens a Unix socket with a file mode. The mode is set before any client can connect.
pub(crate) fn listen_unix(path: &Path, mode: u32) -> io::Result<UnixListener> {
    let socket = bind_unix(path, mode)?;
    socket.listen(UNIX_BACKLOG)?;
    UnixListener::from_std(socket.into())
}

/// Binds a Unix socket with a file mode. Clients cannot connect before the socket listens.
fn bind_unix(path: &Path, mode: u32) -> io::Result<Socket> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.bind(&SockAddr::unix(path)?)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
    Ok(socket)
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = std::fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

/// Sets the default options of a tunnel socket: no Nagle delay, and keepalive probes that detect a dead peer.
///
/// # Errors
/// Fails if the socket is already closed.
pub fn tune(stream: &TcpStream) -> io::Result<()> {
    tune_with(stream, &Keepalive::default())
}

/// Sets the options of [`tune`] with other times. `socket` is a new connection or a listener.
///
/// # Errors
/// Fails if the socket is already closed.
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

/// Makes the close of a TCP connection a reset: the peer sees an error instead of an ordinary end.
pub fn reset_on_close(socket: &impl AsFd) {
    // Fails only if the socket is already closed.
    let _ = socket2::SockRef::from(socket).set_linger(Some(Duration::ZERO));
}

/// Closes a TCP connection with a reset, as [`reset_on_close`] describes. A dropped write half would first end its
/// direction in the ordinary way, and the peer would see only this end.
pub fn reset(read: OwnedReadHalf, write: OwnedWriteHalf) {
    reset_on_close(read.as_ref());
    write.forget();
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use tokio::io::AsyncReadExt as _;

    use super::*;

    #[tokio::test]
    async fn peer_of_a_reset_connection_sees_an_error() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (near, far) = tokio::join!(TcpStream::connect(address), listener.accept());
        let (read, write) = near.unwrap().into_split();
        reset(read, write);
        let ended = far.unwrap().0.read(&mut [0; 1]).await.unwrap_err();
        assert_eq!(ended.kind(), io::ErrorKind::ConnectionReset);
    }

    #[tokio::test(start_paused = true)]
    async fn listener_closes_at_once_during_the_pause_after_an_error() {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.set_nonblocking(true).unwrap();
        // Accepting fails, because the socket does not listen.
        let socket = TcpListener::from_std(socket.into()).unwrap();
        let listener = Listener::tcp(socket, &Keepalive::default());
        let shutdown = CancellationToken::new();
        let serve = tokio::spawn(listener.serve(shutdown.clone(), drop, || ()));
        tokio::time::sleep(ACCEPT_PAUSE / 2).await;
        shutdown.cancel();
        let ended = tokio::time::timeout(ACCEPT_PAUSE / 4, serve);
        ended.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn connection_beyond_the_descriptors_is_closed_and_reported() {
        let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = tcp.local_addr().unwrap();
        let listener = Listener::tcp(tcp, &Keepalive::default());
        let (shutdown, closed) = (CancellationToken::new(), CancellationToken::new());
        let report = closed.clone();
        let refused = move || report.cancel();
        let serve = listener.serve_within(0, shutdown.clone(), |_| panic!("accepted"), refused);
        let serve = tokio::spawn(serve);
        let _client = TcpStream::connect(address).await.unwrap();
        closed.cancelled().await;
        shutdown.cancel();
        serve.await.unwrap();
    }

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
    async fn old_listener_does_not_remove_its_successors_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("front.socket");
        let old = Listener::unix(&path, true).unwrap();
        let new = Listener::unix(&path, true).unwrap();
        drop(old);
        assert!(path.exists());
        drop(new);
        assert!(!path.exists());
    }

    #[test]
    fn clients_cannot_connect_before_the_mode_is_set() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.socket");
        // No usual umask results in this mode.
        let _socket = bind_unix(&path, 0o612).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o612);
        let refused = std::os::unix::net::UnixStream::connect(&path).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    }

    #[tokio::test]
    async fn accepted_connections_have_the_listeners_options() {
        let keepalive = Keepalive::default();
        let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = tcp.local_addr().unwrap();
        let listener = Listener::tcp(tcp, &keepalive);
        let _client = TcpStream::connect(address).await.unwrap();
        let Accepted::Tcp(stream, _) = listener.accept().await.unwrap() else {
            panic!("not a TCP connection");
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
    async fn missing_folder_error_says_to_create_the_folder() {
        let error = Listener::unix(Path::new("/nonexistent/dir/x.socket"), true);
        let error = error.err().unwrap();
        // A program prints the text and all sources.
        assert!(std::error::Error::source(&error).is_none());
        let error = error.to_string();
        assert!(error.contains("No such file"), "{error}");
        assert!(error.ends_with("; create its folder"), "{error}");
    }
}
