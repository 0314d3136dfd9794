//! Front-end clients that behave like kube-apiserver.
//!
//! [`connect()`] opens one tunnelled connection over a new connection to the server, in any of the four ways
//! that an EgressSelectorConfiguration supports, and returns a plain byte stream. The clients are as strict
//! as kube-apiserver: no extra byte may arrive with a CONNECT answer. The clients also fail on nonsensical
//! packets, unlike kube-apiserver.

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

/// Address and protocol of a server's front end.
#[derive(Debug, Clone)]
pub enum FrontEnd {
    /// The packet protocol over a Unix socket, in plain text.
    GrpcUds(PathBuf),
    /// The packet protocol over mutual TLS.
    GrpcTcp {
        /// The server's front-end listener.
        addr: SocketAddr,
        /// TLS configuration. Must offer `h2` by ALPN, because a stock server rejects connections without
        /// ALPN.
        tls: Arc<ClientConfig>,
        /// Required name in the server's certificate.
        server_name: ServerName<'static>,
    },
    /// HTTP CONNECT over a Unix socket, in plain text.
    ConnectUds(PathBuf),
    /// HTTP CONNECT over mutual TLS.
    ConnectTcp {
        /// The server's front-end listener.
        addr: SocketAddr,
        /// TLS configuration. Must not offer `h2`.
        tls: Arc<ClientConfig>,
        /// Required name in the server's certificate.
        server_name: ServerName<'static>,
    },
}

/// A tunnelled connection. A shutdown of the write side depends on the front end's protocol: gRPC sends
/// CLOSE_REQ and so ends both directions; CONNECT half-closes the socket.
pub trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for S {}

/// A tunnelled connection of any front end.
pub type BoxedStream = Box<dyn ByteStream>;

/// Reason for a failed attempt to connect.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The server could not be reached, or its connection broke.
    #[error("cannot {what}: {error}")]
    Io {
        /// The failed action.
        what: &'static str,
        /// Error from the system or from TLS.
        error: io::Error,
    },
    /// The server did not answer within the caller's time limit.
    #[error("no answer in time")]
    Timeout,
    /// The answer to a CONNECT has a status other than 200.
    #[error("refused with status {status}: {body}")]
    Refused {
        /// The status code.
        status: u16,
        /// The body as text, limited to [`MAX_REFUSAL_BYTES`].
        body: String,
    },
    /// The answer to the dial is an error text (gRPC).
    #[error("dial refused: {0}")]
    Dial(String),
    /// The stream ended before the answer to the dial (gRPC), or the server cancelled the dial.
    #[error("the tunnel closed before the dial was answered")]
    Closed,
    /// The RPC ended with a gRPC status other than OK.
    #[error("gRPC status {status}: {message}")]
    Status {
        /// The code in the `grpc-status` header.
        status: String,
        /// The message, percent-encoded.
        message: String,
    },
    /// HTTP/2 failed.
    #[error("HTTP/2: {0}")]
    Http2(#[from] h2::Error),
    /// The server sent something that the protocol does not allow at this point.
    #[error("protocol violation: {0}")]
    Protocol(String),
}

impl ClientError {
    /// Returns the server's text about a refused dial, in either protocol.
    pub fn refusal(&self) -> Option<&str> {
        match self {
            Self::Refused { body, .. } => Some(body),
            Self::Dial(text) => Some(text),
            _ => None,
        }
    }
}

/// Largest stored part of a refusal's body, in bytes.
pub const MAX_REFUSAL_BYTES: u64 = 64 * 1024;

/// Opens a tunnelled connection to `target`, in the form `host:port` and resolved by the agent.
///
/// `timeout` covers everything from the first system call to the server's answer. Over gRPC, a timeout after
/// the dial request cancels the dial with DIAL_CLS, as in kube-apiserver.
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
            // "localhost" is a placeholder; `io` replaces it.
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

/// Opens a connection to `target` by HTTP/1.1 CONNECT over plain TCP, as accepted by the seed's front door.
/// Has no time limit.
///
/// # Errors
/// See [`ClientError`].
pub async fn connect_plain(addr: SocketAddr, target: &str) -> Result<TcpStream, ClientError> {
    connect::open(tcp(addr).await?, target).await
}

/// Opens a TLS connection to the server `server_name`. Has no time limit.
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
        .map_err(io_error("complete the TLS handshake"))
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
