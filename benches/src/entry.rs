//! Entry points of loads: a tunnel's front end, a relay, a front door, a network, or the endpoint itself.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use bytes::Bytes;
use culvert_kit::client::{self, BoxedStream, FrontEnd};
use culvert_tests::openvpn::Namespace;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UnixStream};

/// Time limit for one dial.
const DIAL_LIMIT: Duration = Duration::from_secs(30);

/// Longest accepted answer to a CONNECT, in bytes.
const MAX_HEAD: usize = 4096;

/// An entry point of a load.
#[derive(Debug, Clone)]
pub(crate) enum Entry {
    /// A front end for HTTP CONNECT.
    Connect(PathBuf),
    /// A front end for the packet protocol.
    Grpc(PathBuf),
    /// A Unix socket that leads to the endpoint only.
    Relay(PathBuf),
    /// A TCP address that leads to the endpoint only, or the endpoint itself.
    Plain(SocketAddr),
    /// A network whose routes lead to endpoints.
    Within(Namespace),
    /// A listener that routes by the server name in a TLS ClientHello.
    Sni {
        /// Address of the listener.
        door: SocketAddr,
        /// The complete TLS record of the ClientHello. No TLS follows: the bytes after the record are plain.
        hello: Bytes,
    },
}

impl Entry {
    /// Opens a connection to `target`. Some entries ignore the target, because they lead to one endpoint
    /// only.
    pub(crate) async fn open(&self, target: SocketAddr) -> anyhow::Result<BoxedStream> {
        Ok(match self {
            Self::Connect(socket) => Box::new(connect(socket, target).await?),
            Self::Grpc(socket) => {
                let front = FrontEnd::GrpcUds(socket.clone());
                let target = target.to_string();
                // Boxed, because the future is large.
                Box::pin(client::connect(&front, &target, DIAL_LIMIT)).await?
            }
            Self::Relay(socket) => Box::new(UnixStream::connect(socket).await.context("dial")?),
            Self::Plain(address) => Box::new(tcp(*address).await?),
            Self::Within(namespace) => {
                let SocketAddr::V4(to) = target else {
                    bail!("{target} is not an IPv4 address");
                };
                let stream = namespace.connect(to).await.context("dial")?;
                stream.set_nodelay(true)?;
                Box::new(stream)
            }
            Self::Sni { door, hello } => {
                let mut stream = tcp(*door).await?;
                stream.write_all(hello).await.context("dial")?;
                Box::new(stream)
            }
        })
    }
}

async fn tcp(address: SocketAddr) -> anyhow::Result<TcpStream> {
    let stream = TcpStream::connect(address).await.context("dial")?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Opens a connection by CONNECT. The client always sends first, so the answer ends with its head.
async fn connect(socket: &Path, target: SocketAddr) -> anyhow::Result<UnixStream> {
    let mut stream = UnixStream::connect(socket).await.context("dial")?;
    let request = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n");
    stream.write_all(request.as_bytes()).await.context("dial")?;
    let mut head = Vec::with_capacity(MAX_HEAD);
    while !head.ends_with(b"\r\n\r\n") {
        let read = stream.read_buf(&mut head).await.context("dial")?;
        if read == 0 || head.len() > MAX_HEAD || !b"HTTP/1.1 200 ".starts_with(first(&head)) {
            bail!("dial rejected: {:?}", String::from_utf8_lossy(&head));
        }
    }
    Ok(stream)
}

/// Returns the part of an answer that shows success.
fn first(head: &[u8]) -> &[u8] {
    head.get(..b"HTTP/1.1 200 ".len()).unwrap_or(head)
}
