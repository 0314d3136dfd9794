//! Front-end clients that speak as kube-apiserver does.
//!
//! [`connect()`] opens one tunnelled connection over one connection of its own, in any of the four
//! ways that an EgressSelectorConfiguration can name, and gives a plain byte stream. The clients
//! are strict where kube-apiserver is strict (not one byte may come along with a CONNECT answer)
//! and stricter where it shrugs: a packet that makes no sense is an error here.

mod authority;
mod connect;
mod framing;
mod grpc;

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::{Instant, timeout_at};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

pub use self::authority::encode as encode_authority;

/// Where and how a front end reaches the server.
#[derive(Debug, Clone)]
pub enum FrontEnd {
    /// The packet protocol over a Unix socket, in plain text.
    GrpcUds(PathBuf),
    /// The packet protocol over mutual TLS.
    GrpcTcp {
        /// The server's front-end listener.
        addr: SocketAddr,
        /// Must offer `h2` by ALPN: a stock server refuses a connection without.
        tls: Arc<ClientConfig>,
        /// The name that the server's certificate must carry.
        server_name: ServerName<'static>,
    },
    /// HTTP CONNECT over a Unix socket, in plain text.
    ConnectUds(PathBuf),
    /// HTTP CONNECT over mutual TLS.
    ConnectTcp {
        /// The server's front-end listener.
        addr: SocketAddr,
        /// Must not offer `h2`.
        tls: Arc<ClientConfig>,
        /// The name that the server's certificate must carry.
        server_name: ServerName<'static>,
    },
}

/// A tunnelled connection. Shutting down its write side closes it the way the front end's protocol
/// does: CLOSE_REQ over gRPC, which ends both directions; a half-closed socket under CONNECT.
pub trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for S {}

/// Any tunnelled connection.
pub type BoxedStream = Box<dyn ByteStream>;

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The server could not be reached, or its connection broke.
    #[error("cannot {what}: {error}")]
    Io {
        /// What was being done.
        what: &'static str,
        /// What the system or TLS said.
        error: io::Error,
    },
    /// No answer in the time that the caller gave.
    #[error("no answer in time")]
    Timeout,
    /// A CONNECT was answered with another status than 200.
    #[error("refused with status {status}: {body}")]
    Refused {
        /// The status code.
        status: u16,
        /// The body, as text; cut at [`MAX_REFUSAL_BYTES`].
        body: String,
    },
    /// The dial was answered with an error text (gRPC).
    #[error("dial refused: {0}")]
    Dial(String),
    /// The stream ended before the dial was answered (gRPC), or the dial was given up for us.
    #[error("the tunnel closed before the dial was answered")]
    Closed,
    /// The RPC ended with a gRPC status other than OK.
    #[error("gRPC status {status}: {message}")]
    Status {
        /// The code, as in the `grpc-status` header.
        status: String,
        /// The message, still percent-encoded.
        message: String,
    },
    /// HTTP/2 failed below the RPC.
    #[error("HTTP/2: {0}")]
    Http2(#[from] h2::Error),
    /// The server said something that its protocol does not allow at this place.
    #[error("protocol violation: {0}")]
    Protocol(String),
}

impl ClientError {
    /// The server's own words about why `target` was not reached, in either protocol.
    pub fn refusal(&self) -> Option<&str> {
        match self {
            Self::Refused { body, .. } => Some(body),
            Self::Dial(text) => Some(text),
            _ => None,
        }
    }
}

/// The largest part of a refusal's body that is kept, in bytes.
pub const MAX_REFUSAL_BYTES: u64 = 64 * 1024;

/// Opens a tunnelled connection to `target` (`host:port` as the agent sees it).
///
/// `timeout` covers everything from the first system call to the server's answer. Over gRPC, running out
/// of it after the dial was sent gives the dial up with DIAL_CLS, as kube-apiserver does.
///
/// # Errors
/// See [`ClientError`].
pub async fn connect(
    front: &FrontEnd,
    target: &str,
    timeout: Duration,
) -> Result<BoxedStream, ClientError> {
    let deadline = Instant::now() + timeout;
    match front {
        FrontEnd::GrpcUds(path) => {
            let socket = within(deadline, unix(path)).await?;
            let encoded = encode_authority(&path.to_string_lossy());
            let io = authority::Rewriting::new(socket, authority::replace_with(encoded));
            // The name is a stand-in that `io` replaces.
            let stream = grpc::open(io, "localhost", target, deadline).await?;
            Ok(Box::new(stream))
        }
        FrontEnd::GrpcTcp {
            addr,
            tls,
            server_name,
        } => {
            let io = within(deadline, connect_tls(*addr, tls, server_name)).await?;
            let stream = grpc::open(io, &addr.to_string(), target, deadline).await?;
            Ok(Box::new(stream))
        }
        FrontEnd::ConnectUds(path) => {
            let opened = async { connect::open(unix(path).await?, target).await };
            Ok(Box::new(within(deadline, opened).await?))
        }
        FrontEnd::ConnectTcp {
            addr,
            tls,
            server_name,
        } => {
            let opened = async {
                let stream = connect_tls(*addr, tls, server_name).await?;
                connect::open(stream, target).await
            };
            Ok(Box::new(within(deadline, opened).await?))
        }
    }
}

async fn within<T>(
    deadline: Instant,
    work: impl Future<Output = Result<T, ClientError>>,
) -> Result<T, ClientError> {
    timeout_at(deadline, work)
        .await
        .unwrap_or(Err(ClientError::Timeout))
}

async fn unix(path: &PathBuf) -> Result<UnixStream, ClientError> {
    let what = "reach the server's socket";
    UnixStream::connect(path).await.map_err(io_error(what))
}

/// Opens a connection to `target` by HTTP/1.1 CONNECT over plain TCP, as the seed's front door takes
/// it. Has no time limit of its own.
///
/// # Errors
/// See [`ClientError`].
pub async fn connect_plain(addr: SocketAddr, target: &str) -> Result<TcpStream, ClientError> {
    connect::open(tcp(addr).await?, target).await
}

/// Opens a TLS connection; the server has to be `server_name`. Has no time limit of its own.
///
/// # Errors
/// See [`ClientError`].
pub async fn connect_tls(
    addr: SocketAddr,
    tls: &Arc<ClientConfig>,
    server_name: &ServerName<'static>,
) -> Result<TlsStream<TcpStream>, ClientError> {
    TlsConnector::from(Arc::clone(tls))
        .connect(server_name.clone(), tcp(addr).await?)
        .await
        .map_err(io_error("agree on TLS"))
}

async fn tcp(addr: SocketAddr) -> Result<TcpStream, ClientError> {
    let stream = TcpStream::connect(addr)
        .await
        .map_err(io_error("reach the server"))?;
    stream
        .set_nodelay(true)
        .map_err(io_error("set up the socket"))?;
    Ok(stream)
}

fn io_error(what: &'static str) -> impl Fn(io::Error) -> ClientError {
    move |error| ClientError::Io { what, error }
}

#[cfg(test)]
mod tests;
