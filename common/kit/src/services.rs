//! Small TCP services for the far end of a tunnel, each with one behaviour worth testing.
//!
//! The services listen on ports of 127.0.0.1 chosen by the system. Dropping [`Services`] ends the services
//! and closes every connection. The `raw` service is also for benchmarks: it sends 256 KiB at a time straight
//! from a table.

mod http;
mod raw;

use std::future::Future;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use rustls::ServerConfig;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

pub use self::http::{Answer, HELLO, answer};

/// First bytes from the `first` service, sent before the client sends anything.
pub const BANNER: &[u8] = b"culvert-first\n";

/// Size of one read, in bytes.
const READ_BYTES: usize = 256 * 1024;

/// Pause after a failed accept, for example when the process has no free file descriptors.
const ACCEPT_RETRY: Duration = Duration::from_millis(50);

/// The running services, with their addresses.
#[derive(Debug)]
pub struct Services {
    /// HTTP/1.1. `GET /` returns [`HELLO`], `GET /bytes/N` returns N bytes of the [pattern](super::pattern),
    /// `POST /echo` returns the request's body.
    pub http: SocketAddr,
    /// One command line, then bytes. `download N` sends N bytes of the pattern and ends. `upload N`, followed
    /// by N bytes, sends the bytes' SHA-256 as a line of hex and ends. `echo` sends back all further bytes
    /// until the client ends.
    pub raw: SocketAddr,
    /// Sends [`BANNER`] at once, then echoes.
    pub first: SocketAddr,
    /// Accepts connections, then neither reads nor writes.
    pub silent: SocketAddr,
    /// Reads until the client ends its side, then sends the number of received bytes as a decimal line. The
    /// answer arrives only through a tunnel with support for half-closed connections.
    pub half: SocketAddr,
    host: Host,
    stop: DropGuard,
}

impl Services {
    /// Starts all services. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// Fails if a listener cannot be bound.
    pub async fn start() -> io::Result<Self> {
        let host = Host::default();
        Ok(Self {
            http: host.listen(http::serve).await?,
            raw: host.listen(raw::serve).await?,
            first: host.listen(first).await?,
            silent: host.listen(silent).await?,
            half: host.listen(half).await?,
            stop: host.stop.clone().drop_guard(),
            host,
        })
    }

    /// Starts the `http` service once more, over TLS. Returns the address.
    ///
    /// # Errors
    /// Fails if the listener cannot be bound.
    pub async fn start_https(&self, tls: Arc<ServerConfig>) -> io::Result<SocketAddr> {
        let acceptor = TlsAcceptor::from(tls);
        let serve = move |stream| {
            let accept = acceptor.accept(stream);
            async move { http::serve(accept.await?).await }
        };
        self.host.listen(serve).await
    }

    /// Returns the number of open connections of all services.
    pub fn open_connections(&self) -> usize {
        self.host.connections.len()
    }

    /// Ends all services and waits until the sockets are closed.
    pub async fn shutdown(self) {
        self.stop.disarm().cancel();
        self.host.tasks.close();
        self.host.tasks.wait().await;
        self.host.connections.close();
        self.host.connections.wait().await;
    }
}

/// Runs the services and their connections.
#[derive(Debug, Default)]
struct Host {
    tasks: TaskTracker,
    connections: TaskTracker,
    stop: CancellationToken,
}

impl Host {
    /// Starts a listener and runs `serve` on every connection. An error ends only its own connection and is
    /// ignored.
    async fn listen<F>(
        &self,
        serve: impl Fn(TcpStream) -> F + Clone + Send + Sync + 'static,
    ) -> io::Result<SocketAddr>
    where
        F: Future<Output = io::Result<()>> + Send + 'static,
    {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let (connections, stop) = (self.connections.clone(), self.stop.clone());
        self.tasks.spawn(async move {
            let accepting = async {
                loop {
                    let Ok((stream, _)) = listener.accept().await else {
                        tokio::time::sleep(ACCEPT_RETRY).await;
                        continue;
                    };
                    let (serve, stop) = (serve.clone(), stop.clone());
                    connections.spawn(async move {
                        let served = async {
                            stream.set_nodelay(true)?;
                            serve(stream).await
                        };
                        stop.run_until_cancelled_owned(served).await
                    });
                }
            };
            stop.run_until_cancelled(accepting).await
        });
        Ok(address)
    }
}

async fn first(mut stream: TcpStream) -> io::Result<()> {
    stream.write_all(BANNER).await?;
    raw::echo(&mut stream).await
}

async fn silent(stream: TcpStream) -> io::Result<()> {
    // Keeps the socket open without reading.
    let _held = stream;
    std::future::pending().await
}

async fn half(mut stream: TcpStream) -> io::Result<()> {
    let mut buffer = vec![0; READ_BYTES];
    let mut total = 0;
    loop {
        match stream.read(&mut buffer).await? {
            0 => break,
            n => total += n,
        }
    }
    stream.write_all(format!("{total}\n").as_bytes()).await?;
    stream.shutdown().await
}

#[cfg(test)]
mod tests;
