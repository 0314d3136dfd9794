//! The bare relay: a tunnel without a router, limits, metrics or health checks.
//!
//! The relay carries each connection as one HTTP/2 stream inside mutual TLS, as our programs do: the far side dials the
//! near side and then accepts streams. Windows never change, and copies are the plainest that `h2` permits. The
//! difference between our programs and the relay is the cost of everything else.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use bytes::{Bytes, BytesMut};
use culvert_host::tls::{Identity, TlsOptions, TrustBundle, client_config, server_config};
use culvert_kit::pki::{CLUSTER_NAME, Pair};
use futures_util::future::{poll_fn, try_join};
use h2::client::SendRequest;
use h2::server::SendResponse;
use h2::{Reason, RecvStream, SendStream};
use http::{Method, Request, Response};
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::time::sleep;
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// Names under which this program starts as one side of the relay.
pub(crate) const NEAR: &str = "culvert-bench-bare-near";
pub(crate) const FAR: &str = "culvert-bench-bare-far";

/// Window of a stream and of the connection, in bytes: our programs' window on a short path, and no limit.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = (1 << 31) - 1;

/// Largest frame, and size of a read, in bytes.
const FRAME: u32 = 256 << 10;

/// Unsent bytes of one stream.
const SEND_BUFFER: usize = 512 << 10;

/// Streams that may be open at once.
const STREAMS: u32 = 100_000;

/// Pause of the far side until it dials the near side again.
const RETRY: Duration = Duration::from_millis(20);

/// Longest head of a request, in bytes.
const MAX_HEAD: usize = 4096;

/// Arguments of the near side, whose socket is the front end.
pub(super) fn near(listen: SocketAddr, pair: &Pair, ca: &Path, socket: &Path) -> Vec<PathBuf> {
    let mut args = arguments(listen, pair, ca);
    args.push(socket.to_owned());
    args
}

/// Arguments of the far side, which dials `address`; the near side has one more.
pub(super) fn arguments(address: SocketAddr, pair: &Pair, ca: &Path) -> Vec<PathBuf> {
    let address = PathBuf::from(address.to_string());
    vec![address, pair.cert.clone(), pair.key.clone(), ca.to_owned()]
}

/// Runs one side of the relay until the process is killed.
pub(crate) fn serve(side: &str) -> ExitCode {
    let args: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let ended = runtime.map_err(Into::into).and_then(|runtime| {
        let local = tokio::task::LocalSet::new();
        local.block_on(&runtime, run(side, &args))
    });
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(side: &str, args: &[PathBuf]) -> anyhow::Result<()> {
    match (side == NEAR, args) {
        (true, [address, cert, key, ca, socket]) => run_near(address, cert, key, ca, socket).await,
        (false, [address, cert, key, ca]) => run_far(address, cert, key, ca).await,
        _ => anyhow::bail!("wrong number of arguments"),
    }
}

/// Parses an address. The program reads paths and addresses in the same way.
fn address(text: &Path) -> anyhow::Result<SocketAddr> {
    let text = text.to_str().context("the address is not text")?;
    Ok(text.parse()?)
}

async fn run_near(
    listen: &Path,
    cert: &Path,
    key: &Path,
    ca: &Path,
    socket: &Path,
) -> anyhow::Result<()> {
    let (identity, trust) = (Identity::load(cert, key)?, TrustBundle::load(ca)?);
    let config = server_config(&identity, Some(&trust), &[], &TlsOptions::default())?;
    let listener = TcpListener::bind(address(listen)?).await?;
    let clients = UnixListener::bind(socket)?;
    let (stream, _) = listener.accept().await?;
    stream.set_nodelay(true)?;
    let stream = TlsAcceptor::from(config).accept(stream).await?;
    let (requests, connection) = h2::client::Builder::new()
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(FRAME)
        .max_send_buffer_size(SEND_BUFFER)
        .initial_max_send_streams(STREAMS as usize)
        .handshake::<_, Bytes>(stream)
        .await?;
    tokio::task::spawn_local(async move {
        while let Ok((client, _)) = clients.accept().await {
            tokio::task::spawn_local(carry(client, requests.clone()));
        }
    });
    Ok(connection.await?)
}

/// Carries one client. An error ends the connection only.
async fn carry(mut client: UnixStream, mut requests: SendRequest<Bytes>) -> anyhow::Result<()> {
    let mut head = Vec::with_capacity(MAX_HEAD);
    while !head.ends_with(b"\r\n\r\n") && head.len() < MAX_HEAD {
        anyhow::ensure!(client.read_buf(&mut head).await? > 0, "no request");
    }
    let head = String::from_utf8(head)?;
    let target = head.split(' ').nth(1).context("no target")?;
    let request = Request::builder().method(Method::CONNECT).uri(target);
    let (response, send) = requests.send_request(request.body(())?, false)?;
    let receive = response.await?.into_body();
    client.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await?;
    let (read, write) = client.split();
    copy(read, write, receive, send).await
}

async fn run_far(server: &Path, cert: &Path, key: &Path, ca: &Path) -> anyhow::Result<()> {
    let (identity, trust) = (Identity::load(cert, key)?, TrustBundle::load(ca)?);
    let config = client_config(&trust, Some(&identity), &[], &TlsOptions::default())?;
    let server = address(server)?;
    let stream = loop {
        match TcpStream::connect(server).await {
            // Both sides start at the same time.
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => sleep(RETRY).await,
            connected => break connected?,
        }
    };
    stream.set_nodelay(true)?;
    let name = ServerName::try_from(CLUSTER_NAME)?;
    let stream = TlsConnector::from(config).connect(name, stream).await?;
    let mut connection = h2::server::Builder::new()
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(FRAME)
        .max_send_buffer_size(SEND_BUFFER)
        .max_concurrent_streams(STREAMS)
        .handshake::<_, Bytes>(stream)
        .await?;
    while let Some(accepted) = connection.accept().await {
        let (request, respond) = accepted?;
        tokio::task::spawn_local(dial(request, respond));
    }
    Ok(())
}

/// Serves one stream. An error ends the stream only.
async fn dial(
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
) -> anyhow::Result<()> {
    let target = request.uri().authority().context("no target")?;
    let mut endpoint = TcpStream::connect(target.as_str()).await?;
    endpoint.set_nodelay(true)?;
    let send = respond.send_response(Response::new(()), false)?;
    let (read, write) = endpoint.split();
    copy(read, write, request.into_body(), send).await
}

/// Copies both directions, and each end to the other side.
async fn copy(
    read: impl AsyncRead + Unpin,
    write: impl AsyncWrite + Unpin,
    receive: RecvStream,
    send: SendStream<Bytes>,
) -> anyhow::Result<()> {
    try_join(outward(read, send), inward(receive, write)).await?;
    Ok(())
}

async fn outward(
    mut read: impl AsyncRead + Unpin,
    mut send: SendStream<Bytes>,
) -> anyhow::Result<()> {
    let mut buffer = BytesMut::new();
    loop {
        buffer.reserve(FRAME as usize);
        let received = read.read_buf(&mut buffer).await;
        let Ok(received) = received.inspect_err(|_| send.send_reset(Reason::CANCEL)) else {
            anyhow::bail!("the reader failed");
        };
        if received == 0 {
            return Ok(send.send_data(Bytes::new(), true)?);
        }
        let mut chunk = buffer.split().freeze();
        while !chunk.is_empty() {
            send.reserve_capacity(chunk.len());
            let capacity = poll_fn(|cx| send.poll_capacity(cx)).await;
            let capacity = capacity.context("the stream has ended")??;
            send.send_data(chunk.split_to(capacity.min(chunk.len())), false)?;
        }
    }
}

async fn inward(mut receive: RecvStream, mut write: impl AsyncWrite + Unpin) -> anyhow::Result<()> {
    while let Some(chunk) = receive.data().await {
        let chunk = chunk?;
        write.write_all(&chunk).await?;
        receive.flow_control().release_capacity(chunk.len())?;
    }
    Ok(write.shutdown().await?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use culvert_kit::pki::Pki;
    use culvert_tests::ports::Ports;
    use tokio::task::{LocalSet, spawn_local};

    use super::*;
    use crate::endpoint::Endpoints;
    use crate::entry::Entry;

    #[tokio::test]
    async fn bytes_and_ends_arrive_in_both_directions() {
        let endpoints = Endpoints::start().await.unwrap();
        let dir = tempfile::tempdir().unwrap();
        let pki = Pki::create(dir.path()).unwrap();
        let mut ports = Ports::default();
        let middle = SocketAddr::from(([127, 0, 0, 1], ports.next_port()));
        let socket = dir.path().join("bare.socket");
        let both = async {
            let args = near(middle, &pki.cluster, &pki.ca, &socket);
            spawn_local(async move { run(NEAR, &args).await });
            // The near side listens for the far side before the socket exists.
            while !socket.exists() {
                tokio::task::yield_now().await;
            }
            let args = arguments(middle, &pki.agent, &pki.ca);
            spawn_local(async move { run(FAR, &args).await });
            let entry = Entry::Connect(socket.clone());
            let mut received = Vec::new();
            let mut download = entry.open(endpoints.lean()).await.unwrap();
            download.write_all(b"download 100000\n").await.unwrap();
            download.read_to_end(&mut received).await.unwrap();
            assert!(received == culvert_kit::pattern::prefix(100_000));

            // The endpoint of `fetch` ends its side after the client's end.
            let mut fetch = entry.open(endpoints.lean()).await.unwrap();
            fetch.write_all(b"fetch 10\n").await.unwrap();
            let mut ten = [0; 10];
            fetch.read_exact(&mut ten).await.unwrap();
            fetch.shutdown().await.unwrap();
            assert_eq!(fetch.read(&mut ten).await.unwrap(), 0);
        };
        LocalSet::new().run_until(both).await;
    }
}
