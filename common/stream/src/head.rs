//! Reading the head of an HTTP/1 message: everything up to and including the empty line.

use std::io;

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncReadExt as _};

/// Size of a read that may return bytes after the head, in bytes.
const READ_BYTES: usize = 4096;

/// Reason why no head was read.
#[derive(Debug)]
pub enum HeadError {
    /// The connection broke. An end before the empty line is [`io::ErrorKind::UnexpectedEof`].
    Io(io::Error),
    /// The head is longer than the limit.
    TooLarge,
}

/// Incremental search for the end of a head. Scans every byte only once, for any number of pieces.
#[derive(Debug, Default)]
struct HeadEnd {
    /// Offset of the first byte that is not scanned yet.
    searched: usize,
    /// Start of the line that contains the offset `searched`.
    line: usize,
}

impl HeadEnd {
    /// Returns the length of the head, including the empty line, or `None` while the head is incomplete. Lines
    /// may end in a bare LF, as in Go. Between calls, `received` may only grow at its end.
    fn find(&mut self, received: &[u8]) -> Option<usize> {
        loop {
            let unseen = received.get(self.searched..)?;
            let Some(offset) = unseen.iter().position(|&byte| byte == b'\n') else {
                self.searched = received.len();
                return None;
            };
            let end = self.searched + offset;
            let line = received.get(self.line..end)?;
            if line.is_empty() || line == b"\r" {
                // The offsets stay as they are, so that another call finds the same end.
                return Some(end + 1);
            }
            self.searched = end + 1;
            self.line = end + 1;
        }
    }
}

/// Reads a head of at most `limit` bytes and leaves all later bytes in `reader`. Reads single bytes, so
/// `reader` should decrypt or buffer, or have few heads.
pub async fn read_head<R>(reader: &mut R, limit: usize) -> Result<BytesMut, HeadError>
where
    R: AsyncRead + Unpin,
{
    read(reader, &mut BytesMut::with_capacity(256), limit, 1).await
}

/// Reads a head of at most `limit` bytes that begins with the bytes in `buffer`. Later bytes that were read
/// along with the head are left in `buffer`. After an error, `buffer` contains all bytes received.
pub async fn read_head_ahead<R>(
    reader: &mut R,
    buffer: &mut BytesMut,
    limit: usize,
) -> Result<BytesMut, HeadError>
where
    R: AsyncRead + Unpin,
{
    read(reader, buffer, limit, READ_BYTES).await
}

async fn read<R>(
    reader: &mut R,
    buffer: &mut BytesMut,
    limit: usize,
    step: usize,
) -> Result<BytesMut, HeadError>
where
    R: AsyncRead + Unpin,
{
    let mut end = HeadEnd::default();
    loop {
        let within_limit = buffer.get(..limit).unwrap_or(buffer);
        if let Some(len) = end.find(within_limit) {
            return Ok(buffer.split_to(len));
        }
        if within_limit.len() == limit {
            return Err(HeadError::TooLarge);
        }
        buffer.reserve(step);
        let mut part = (&mut *reader).take(step as u64);
        if part.read_buf(buffer).await.map_err(HeadError::Io)? == 0 {
            return Err(HeadError::Io(io::ErrorKind::UnexpectedEof.into()));
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]

    use super::*;

    const HEAD: &[u8] = b"GET / HTTP/1.1\r\na: b\r\n\r\n";

    fn with_rest() -> Vec<u8> {
        [HEAD, b"rest"].concat()
    }

    #[tokio::test]
    async fn head_split_at_any_byte_is_complete_and_keeps_the_rest() {
        let message = with_rest();
        for split in 0..=message.len() {
            let (first, second) = message.split_at(split);
            let mut exact = first.chain(second);
            assert_eq!(read_head(&mut exact, HEAD.len()).await.unwrap(), HEAD);
            let mut rest = Vec::new();
            exact.read_to_end(&mut rest).await.unwrap();
            assert_eq!(rest, b"rest");

            let mut buffer = BytesMut::from(first);
            let mut reader = second;
            let head = read_head_ahead(&mut reader, &mut buffer, HEAD.len()).await;
            assert_eq!(head.unwrap(), HEAD);
            assert_eq!([&buffer[..], reader].concat(), b"rest");
        }
    }

    #[test]
    fn head_in_many_pieces_is_scanned_once() {
        let mut reader = HeadEnd::default();
        for end in 0..HEAD.len() {
            assert_eq!(reader.find(&HEAD[..end]), None);
            assert_eq!(reader.searched, end);
        }
        assert_eq!(reader.find(HEAD), Some(HEAD.len()));
    }

    #[tokio::test]
    async fn head_over_the_limit_is_refused() {
        for limit in 0..HEAD.len() {
            let message = with_rest();
            let exact = read_head(&mut message.as_slice(), limit).await;
            assert!(matches!(exact, Err(HeadError::TooLarge)), "{limit}");
            let mut buffer = BytesMut::new();
            let ahead = read_head_ahead(&mut message.as_slice(), &mut buffer, limit).await;
            assert!(matches!(ahead, Err(HeadError::TooLarge)), "{limit}");
        }
    }

    #[tokio::test]
    async fn end_before_the_empty_line_is_an_unexpected_end() {
        for len in 0..HEAD.len() {
            let mut buffer = BytesMut::new();
            for outcome in [
                read_head(&mut &HEAD[..len], 1024).await,
                read_head_ahead(&mut &HEAD[..len], &mut buffer, 1024).await,
            ] {
                let Err(HeadError::Io(error)) = outcome else {
                    panic!("{outcome:?}");
                };
                assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
            }
            assert_eq!(buffer, HEAD[..len]);
        }
    }

    #[tokio::test]
    async fn lines_may_end_in_a_bare_lf() {
        let mut message = &b"GET / HTTP/1.1\na: b\n\nrest"[..];
        let head = read_head(&mut message, 1024).await.unwrap();
        assert_eq!(head, &b"GET / HTTP/1.1\na: b\n\n"[..]);
        assert_eq!(message, b"rest");
    }
}
