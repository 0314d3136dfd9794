//! The raw service: one command line, then bytes.

use std::io;

use tokio::io::{
    AsyncBufRead, AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, AsyncWrite,
    AsyncWriteExt as _, BufStream,
};
use tokio::net::TcpStream;

use super::READ_BYTES;
use crate::pattern::{self, Digest};

/// Longest command line, in bytes. `download` with 20 digits fits.
const MAX_LINE: u64 = 64;

/// A client's command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Command {
    Download(u64),
    Upload(u64),
    Echo,
}

impl Command {
    fn parse(line: &str) -> Option<Self> {
        match line.split_once(' ') {
            Some(("download", count)) => count.parse().ok().map(Self::Download),
            Some(("upload", count)) => count.parse().ok().map(Self::Upload),
            None if line == "echo" => Some(Self::Echo),
            _ => None,
        }
    }
}

/// Serves one connection. An invalid command line ends the connection without an answer.
pub(super) async fn serve(stream: TcpStream) -> io::Result<()> {
    // Only the command line and bytes that arrive with the command line pass through this buffer; longer
    // reads and writes bypass the buffer.
    let mut stream = BufStream::new(stream);
    match read_command(&mut stream).await? {
        Command::Download(count) => {
            for piece in pattern::pieces(count) {
                stream.write_all(&piece).await?;
            }
            stream.shutdown().await
        }
        Command::Upload(count) => {
            let digest = digest_of(&mut stream, count).await?;
            stream.write_all(format!("{digest}\n").as_bytes()).await?;
            stream.shutdown().await
        }
        Command::Echo => echo(&mut stream).await,
    }
}

async fn read_command(stream: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Command> {
    let mut line = String::new();
    stream.take(MAX_LINE).read_line(&mut line).await?;
    line.strip_suffix('\n')
        .and_then(Command::parse)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "not a command"))
}

/// Reads exactly `count` bytes and returns the SHA-256 as hex.
async fn digest_of(stream: &mut (impl AsyncRead + Unpin), count: u64) -> io::Result<String> {
    let mut digest = Digest::default();
    let mut buffer = vec![0; READ_BYTES];
    let mut body = stream.take(count);
    while body.limit() > 0 {
        match body.read(&mut buffer).await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => digest.update(buffer.get(..n).unwrap_or_default()),
        }
    }
    Ok(digest.finish())
}

/// Sends received bytes back until the client ends its side.
pub(super) async fn echo(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> io::Result<()> {
    let mut buffer = vec![0; READ_BYTES];
    loop {
        match stream.read(&mut buffer).await? {
            0 => return stream.shutdown().await,
            n => {
                stream
                    .write_all(buffer.get(..n).unwrap_or_default())
                    .await?
            }
        }
        stream.flush().await?;
    }
}
