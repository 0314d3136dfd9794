//! What agents connect to.
//!
//! One port does all work, because a relay leads to one port only. It is lean, so that what is measured
//! is the tunnel: 256 KiB at a time, nothing hashed, uploads only counted. A TLS ClientHello is read off
//! first, if there is one; the first line says what is wanted:
//!
//! | line | what follows |
//! |---|---|
//! | `download N` | N bytes of the pattern, then the end |
//! | `fetch N` | the same, but the end only behind the client's |
//! | `upload N` | N bytes of the client's; then their count, as eight bytes, and the end |
//! | `bursts N` | N bytes of the pattern for each byte of the client's |
//! | `batches N` | a byte for every N bytes of the client's |
//! | `echo` | everything back |
//! | `port` | the port on which this endpoint listens, as two bytes; then the end |
//! | `hold` | nothing is read until [`Endpoints::release`] |
//!
//! Idle connections end in a process of their own ([`serve`]), or they would take two file descriptors
//! each of the one limit.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::process::ExitCode;
use std::sync::Arc;

use bytes::{Buf as _, BytesMut};
use culvert_kit::pattern::{self, MAX_PIECE};
use culvert_kit::services::Services;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinSet;

/// The name by which this program is the endpoint of idle connections.
pub const ENDPOINT: &str = "culvert-bench-endpoint";

/// What [`serve`] says before its address.
pub const LISTENING: &str = "listening on ";

/// The longest first line, in bytes: `download` and 20 digits fit well.
const MAX_LINE: usize = 64;

/// The content type of the TLS record that holds a ClientHello, and the length of a record's header.
/// No line begins so.
const HANDSHAKE: u8 = 22;
const RECORD_HEADER: usize = 5;

/// A port of its own.
const LOOPBACK: SocketAddr = SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0));

/// How many connections may wait to be accepted.
const BACKLOG: u32 = 4096;

/// How much an echo reads at once, in bytes. Ten thousand idle connections have such a buffer each.
const ECHO_READ: usize = 512;

/// The running endpoints; dropping them closes the listener.
#[derive(Debug)]
pub struct Endpoints {
    /// What the Go driver uses: it hashes what it moves.
    services: Services,
    lean: SocketAddr,
    held: Arc<Notify>,
    _tasks: JoinSet<()>,
}

impl Endpoints {
    /// Starts them on ports of 127.0.0.1.
    ///
    /// # Errors
    /// When a listener cannot be bound.
    pub async fn start() -> io::Result<Self> {
        Self::on(TcpSocket::new_v4()?, LOOPBACK).await
    }

    /// Starts them, the lean one by way of a socket that may be in another network, at an address of that.
    ///
    /// # Errors
    /// When a listener cannot be bound.
    pub async fn on(socket: TcpSocket, at: SocketAddr) -> io::Result<Self> {
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

    /// The raw service, which the Go driver knows.
    pub fn raw(&self) -> SocketAddr {
        self.services.raw
    }

    /// The endpoint that this module describes.
    pub fn lean(&self) -> SocketAddr {
        self.lean
    }

    /// Closes every connection that is held.
    pub fn release(&self) {
        self.held.notify_waiters();
    }
}

/// Is the endpoint of idle connections, until the process is killed.
pub fn serve() -> ExitCode {
    let serving = async {
        let listener = listen(TcpSocket::new_v4()?, LOOPBACK)?;
        println!("{LISTENING}{}", listener.local_addr()?);
        accept(listener, Arc::default()).await;
        Ok::<(), io::Error>(())
    };
    // One thread, so that no second one takes a core from what is measured.
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

/// The queue has room for all that may come at once: one that is turned away would come again after a
/// second, which is when doors give up.
fn listen(socket: TcpSocket, at: SocketAddr) -> io::Result<TcpListener> {
    socket.bind(at)?;
    socket.listen(BACKLOG)
}

/// Serves connections until accepting fails. Errors of a connection show at its client.
async fn accept(listener: TcpListener, held: Arc<Notify>) {
    while let Ok((stream, _)) = listener.accept().await {
        tokio::spawn(serve_one(stream, Arc::clone(&held)));
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
        None if line == "echo" => echo(stream, &rest).await,
        None if line == "port" => {
            let port = stream.local_addr()?.port();
            stream.write_u16(port).await?;
            stream.shutdown().await
        }
        None if line == "hold" => {
            held.notified().await;
            Ok(())
        }
        _ => Err(invalid("no such work")),
    }
}

/// The first line, and what came behind it.
async fn first_line(stream: &mut TcpStream) -> io::Result<(String, BytesMut)> {
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
            return Err(invalid("no line"));
        }
    }
}

/// Reads off a TLS record. All of a ClientHello is in one.
async fn skip_record(stream: &mut TcpStream, bytes: &mut BytesMut) -> io::Result<()> {
    fill(stream, bytes, RECORD_HEADER).await?;
    let length = bytes.get(3..RECORD_HEADER).map_or(0, |mut b| b.get_u16());
    let end = RECORD_HEADER + usize::from(length);
    fill(stream, bytes, end).await?;
    bytes.advance(end);
    Ok(())
}

/// Reads until there are at least as many bytes.
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

/// Of `count` bytes `received` are here already.
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

/// So many bytes have asked already.
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

/// So many bytes are here already.
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
    async fn every_line_does_its_work() {
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

        // Some of the upload comes with the line.
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

        let mut stream = ask(&endpoints, "nonsense\n").await;
        assert_eq!(stream.read(&mut [0]).await.unwrap_or(0), 0);
    }

    #[tokio::test]
    async fn a_client_hello_is_read_off_wherever_it_is_cut() {
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
    async fn what_is_held_ends_when_released() {
        let endpoints = Endpoints::start().await.unwrap();
        let mut stream = ask(&endpoints, "hold\n").await;
        let mut byte = [0];
        // The release is for those that are held by then.
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
