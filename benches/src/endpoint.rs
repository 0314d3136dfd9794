//! The endpoint of all loads.
//!
//! One port does all work, because a relay leads to only one port. The endpoint does little besides the
//! transfer, so that the tunnel dominates the figures: it moves 256 KiB at a time, hashes nothing, and only
//! counts uploads. A leading TLS ClientHello is skipped. Then the first line selects the work:
//!
//! | line | behaviour |
//! |---|---|
//! | `download N` | sends N bytes of the pattern and closes |
//! | `fetch N` | sends N bytes of the pattern, and closes after the client has closed |
//! | `upload N` | receives N bytes, sends their count in eight bytes, and closes |
//! | `bursts N` | sends N bytes of the pattern for each byte received |
//! | `batches N` | sends one byte for every N bytes received |
//! | `echo` | sends everything back |
//! | `port` | sends the port of this endpoint in two bytes and closes |
//! | `peer` | sends the port of its peer in two bytes, and closes after the client has closed |
//! | `hold` | reads nothing until [`Endpoints::release`] |
//! | `abort download` | sends the pattern until [`Endpoints::release`], and resets the connection |
//! | `abort upload` | receives until [`Endpoints::release`], and resets the connection |
//!
//! The endpoint of idle connections is a separate process ([`serve`]). Otherwise each connection would need
//! two file descriptors of this process.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf as _, BytesMut};
use culvert_kit::pattern::{self, MAX_PIECE};
use culvert_kit::services::Services;
use socket2::SockRef;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::sleep;

/// Name under which this program starts as the endpoint of idle connections.
pub(crate) const ENDPOINT: &str = "culvert-bench-endpoint";

/// Text that [`serve`] prints before its address.
pub(crate) const LISTENING: &str = "listening on ";

/// Longest first line, in bytes: enough for `download` and 20 digits.
const MAX_LINE: usize = 64;

/// Content type of the TLS record that contains a ClientHello, and the length of a record header. No command
/// starts with this byte.
const HANDSHAKE: u8 = 22;
const RECORD_HEADER: usize = 5;

/// A free port on loopback.
const LOOPBACK: SocketAddr = SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0));

/// Length of the accept queue.
const BACKLOG: u32 = 4096;

/// Pause after a failed accept, for example when the process has no free file descriptors.
const ACCEPT_RETRY: Duration = Duration::from_millis(50);

/// Read size of an echo, in bytes. Each of ten thousand idle connections has a buffer of this size.
const ECHO_READ: usize = 512;

/// The running endpoints. Dropping the value closes the listeners.
#[derive(Debug)]
pub(crate) struct Endpoints {
    /// Endpoints of the Go driver, which hash their data.
    services: Services,
    lean: SocketAddr,
    held: Arc<Notify>,
    _tasks: JoinSet<()>,
}

impl Endpoints {
    /// Starts the endpoints on ports of 127.0.0.1.
    pub(crate) async fn start() -> io::Result<Self> {
        Self::on(TcpSocket::new_v4()?, LOOPBACK).await
    }

    /// Starts the endpoints. The lean one listens on `socket`, which may belong to another network, at
    /// address `at`.
    pub(crate) async fn on(socket: TcpSocket, at: SocketAddr) -> io::Result<Self> {
        let listener = listen(socket, at)?;
        let lean = listener.local_addr()?;
        let held = Arc::new(Notify::new());
        let mut tasks = JoinSet::new();
        tasks.spawn(accept(listener, Arc::clone(&held)));
        Ok(Self {
            services: Services::start().await?,
            lean,
            held,
            _tasks: tasks,
        })
    }

    /// Address of the raw service for the Go driver.
    pub(crate) fn raw(&self) -> SocketAddr {
        self.services.raw
    }

    /// Address of the endpoint that this module describes.
    pub(crate) fn lean(&self) -> SocketAddr {
        self.lean
    }

    /// Closes every connection in `hold`, and resets every connection in `abort`.
    pub(crate) fn release(&self) {
        self.held.notify_waiters();
    }
}

/// Runs the endpoint of idle connections until the process is killed.
pub(crate) fn serve() -> ExitCode {
    let serving = async {
        let listener = listen(TcpSocket::new_v4()?, LOOPBACK)?;
        println!("{LISTENING}{}", listener.local_addr()?);
        accept(listener, Arc::default()).await;
        Ok::<(), io::Error>(())
    };
    // One thread, because a second thread would take a core from the measured programs.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    match runtime.and_then(|runtime| runtime.block_on(serving)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Opens a listener with a long queue. A client that is refused retries after a second, and front doors give
/// up by then.
pub(crate) fn listen(socket: TcpSocket, at: SocketAddr) -> io::Result<TcpListener> {
    socket.bind(at)?;
    socket.listen(BACKLOG)
}

/// Serves connections forever. Errors of a connection are visible to its client only.
async fn accept(listener: TcpListener, held: Arc<Notify>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                tokio::spawn(serve_one(stream, Arc::clone(&held)));
            }
            Err(error) => {
                eprintln!("  an endpoint cannot accept connections: {error}");
                sleep(ACCEPT_RETRY).await;
            }
        }
    }
}

async fn serve_one(mut stream: TcpStream, held: Arc<Notify>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let (line, rest) = first_line(&mut stream).await?;
    match line.split_once(' ') {
        Some(("download", count)) => download(stream, number(count)?).await,
        Some(("fetch", count)) => fetch(stream, number(count)?).await,
        Some(("upload", count)) => upload(stream, number(count)?, rest.len()).await,
        Some(("bursts", count)) => bursts(stream, number(count)?, rest.len()).await,
        Some(("batches", count)) => batches(stream, number(count)?, rest.len()).await,
        Some(("abort", "download")) => abort(stream, true, held).await,
        Some(("abort", "upload")) => abort(stream, false, held).await,
        None if line == "echo" => echo(stream, &rest).await,
        None if line == "port" => {
            let port = stream.local_addr()?.port();
            stream.write_u16(port).await?;
            stream.shutdown().await
        }
        None if line == "peer" => {
            let port = stream.peer_addr()?.port();
            stream.write_u16(port).await?;
            stream.read(&mut [0]).await.map(|_| ())
        }
        None if line == "hold" => {
            held.notified().await;
            Ok(())
        }
        _ => Err(invalid("unknown command")),
    }
}

/// Returns the first line, and the bytes received after it.
pub(crate) async fn first_line(stream: &mut TcpStream) -> io::Result<(String, BytesMut)> {
    let mut bytes = BytesMut::with_capacity(MAX_LINE);
    fill(stream, &mut bytes, 1).await?;
    if bytes.first() == Some(&HANDSHAKE) {
        skip_record(stream, &mut bytes).await?;
    }
    loop {
        if let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            let line = String::from_utf8_lossy(&bytes.split_to(end)).into_owned();
            bytes.advance(1);
            return Ok((line, bytes));
        }
        if bytes.len() >= MAX_LINE || stream.read_buf(&mut bytes).await? == 0 {
            return Err(invalid("first line too long or incomplete"));
        }
    }
}

/// Removes one TLS record. A ClientHello fits into one record.
async fn skip_record(stream: &mut TcpStream, bytes: &mut BytesMut) -> io::Result<()> {
    fill(stream, bytes, RECORD_HEADER).await?;
    let length = bytes.get(3..RECORD_HEADER).map_or(0, |mut b| b.get_u16());
    let end = RECORD_HEADER + usize::from(length);
    fill(stream, bytes, end).await?;
    bytes.advance(end);
    Ok(())
}

/// Reads until `bytes` contains at least `wanted` bytes.
async fn fill(stream: &mut TcpStream, bytes: &mut BytesMut, wanted: usize) -> io::Result<()> {
    while bytes.len() < wanted {
        bytes.reserve(wanted - bytes.len());
        if stream.read_buf(bytes).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(())
}

fn number(text: &str) -> io::Result<u64> {
    text.parse().map_err(|_| invalid("not a number"))
}

fn invalid(text: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

async fn download(mut stream: TcpStream, count: u64) -> io::Result<()> {
    for piece in pattern::pieces(count) {
        stream.write_all(&piece).await?;
    }
    stream.shutdown().await
}

async fn fetch(mut stream: TcpStream, count: u64) -> io::Result<()> {
    for piece in pattern::pieces(count) {
        stream.write_all(&piece).await?;
    }
    stream.read(&mut [0]).await.map(|_| ())
}

/// Transfers bytes until the release, and resets the connection.
async fn abort(mut stream: TcpStream, is_download: bool, held: Arc<Notify>) -> io::Result<()> {
    let transfer = async {
        if is_download {
            for piece in pattern::pieces(u64::MAX) {
                stream.write_all(&piece).await?;
            }
        }
        let mut buffer = vec![0; MAX_PIECE];
        while stream.read(&mut buffer).await? > 0 {}
        Ok(())
    };
    tokio::select! {
        ended = transfer => ended,
        () = held.notified() => SockRef::from(&stream).set_linger(Some(Duration::ZERO)),
    }
}

/// Receives `count` bytes; `received` bytes have already arrived.
async fn upload(mut stream: TcpStream, count: u64, received: usize) -> io::Result<()> {
    let mut buffer = vec![0; MAX_PIECE];
    let mut body = (&mut stream).take(count.saturating_sub(received as u64));
    while body.limit() > 0 {
        if body.read(&mut buffer).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    stream.write_u64(count).await?;
    stream.shutdown().await
}

/// Sends bursts; `asked` requests have already arrived.
async fn bursts(mut stream: TcpStream, count: u64, mut asked: usize) -> io::Result<()> {
    loop {
        for _ in 0..asked {
            for piece in pattern::pieces(count) {
                stream.write_all(&piece).await?;
            }
        }
        asked = stream.read(&mut [0; ECHO_READ]).await?;
        if asked == 0 {
            return Ok(());
        }
    }
}

/// Acknowledges batches; `received` bytes have already arrived.
async fn batches(mut stream: TcpStream, count: u64, received: usize) -> io::Result<()> {
    let mut buffer = vec![0; MAX_PIECE];
    let mut received = received as u64;
    loop {
        while received >= count.max(1) {
            received -= count.max(1);
            stream.write_u8(b'+').await?;
        }
        match stream.read(&mut buffer).await? {
            0 => return Ok(()),
            read => received += read as u64,
        }
    }
}

async fn echo(mut stream: TcpStream, first: &[u8]) -> io::Result<()> {
    stream.write_all(first).await?;
    let mut buffer = [0; ECHO_READ];
    loop {
        let read = stream.read(&mut buffer).await?;
        if read == 0 {
            return Ok(());
        }
        stream
            .write_all(buffer.get(..read).unwrap_or_default())
            .await?;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
    use culvert_tests::hello::client_hello;

    use super::*;

    async fn ask(endpoints: &Endpoints, line: &str) -> TcpStream {
        let mut stream = TcpStream::connect(endpoints.lean()).await.unwrap();
        stream.write_all(line.as_bytes()).await.unwrap();
        stream
    }

    #[tokio::test]
    async fn every_command_works() {
        let endpoints = Endpoints::start().await.unwrap();
        let mut received = Vec::new();
        let mut stream = ask(&endpoints, "download 700001\n").await;
        stream.read_to_end(&mut received).await.unwrap();
        assert!(received == pattern::prefix(700_001));

        let mut received = vec![0; 700_001];
        let mut stream = ask(&endpoints, "fetch 700001\n").await;
        stream.read_exact(&mut received).await.unwrap();
        assert!(received == pattern::prefix(700_001));
        stream.shutdown().await.unwrap();
        assert_eq!(stream.read(&mut [0]).await.unwrap(), 0);

        // Part of the upload arrives together with the line.
        let mut stream = ask(&endpoints, "upload 10\nabcdefg").await;
        stream.write_all(b"hij").await.unwrap();
        assert_eq!(stream.read_u64().await.unwrap(), 10);

        let mut stream = ask(&endpoints, "echo\nx").await;
        assert_eq!(stream.read_u8().await.unwrap(), b'x');
        stream.write_all(b"yz").await.unwrap();
        assert_eq!(stream.read_u16().await.unwrap(), u16::from_be_bytes(*b"yz"));

        let mut stream = ask(&endpoints, "bursts 70001\n..").await;
        stream.write_all(b".").await.unwrap();
        let mut received = vec![0; 3 * 70_001];
        stream.read_exact(&mut received).await.unwrap();
        assert!(received[140_002..] == pattern::prefix(70_001));
        let mut stream = ask(&endpoints, "batches 4\nabcde").await;
        assert_eq!(stream.read_u8().await.unwrap(), b'+');
        stream.write_all(b"fgh").await.unwrap();
        assert_eq!(stream.read_u8().await.unwrap(), b'+');

        let mut stream = ask(&endpoints, "port\n").await;
        assert_eq!(stream.read_u16().await.unwrap(), endpoints.lean().port());

        let mut stream = ask(&endpoints, "peer\n").await;
        let own = stream.local_addr().unwrap().port();
        assert_eq!(stream.read_u16().await.unwrap(), own);

        let mut stream = ask(&endpoints, "nonsense\n").await;
        assert_eq!(stream.read(&mut [0]).await.unwrap_or(0), 0);
    }

    #[tokio::test]
    async fn client_hello_is_skipped_wherever_it_is_split() {
        let endpoints = Endpoints::start().await.unwrap();
        let mut sent = client_hello("a.example.com");
        let hello = sent.len();
        sent.extend(b"echo\nxyz");
        for cut in [1, 4, 5, 64, hello - 1, hello, hello + 3, sent.len()] {
            let mut stream = TcpStream::connect(endpoints.lean()).await.unwrap();
            stream.set_nodelay(true).unwrap();
            for part in [&sent[..cut], &sent[cut..]] {
                stream.write_all(part).await.unwrap();
                tokio::task::yield_now().await;
            }
            let mut echoed = [0; 3];
            stream.read_exact(&mut echoed).await.unwrap();
            assert_eq!(&echoed, b"xyz", "cut after {cut}");
        }
    }

    #[tokio::test]
    async fn held_connection_closes_on_release() {
        let endpoints = Endpoints::start().await.unwrap();
        let mut stream = ask(&endpoints, "hold\n").await;
        let mut byte = [0];
        // A release affects only connections that already wait.
        let read = stream.read(&mut byte);
        tokio::pin!(read);
        let ended = loop {
            endpoints.release();
            tokio::select! {
                ended = &mut read => break ended,
                () = tokio::task::yield_now() => {}
            }
        };
        assert_eq!(ended.unwrap(), 0);
    }
}
