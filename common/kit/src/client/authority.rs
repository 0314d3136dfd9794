//! The Go-style `:authority`, and a shim that sends it.
//!
//! kube-apiserver dials a Unix socket by its bare path, and grpc-go percent-encodes the path into
//! `:authority` (`%2Fetc%2F...`). The `http` crate rejects such a value, so the HTTP/2 client sends a
//! placeholder. [`Rewriting`] replaces the placeholder between HTTP/2 and the socket.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, BufMut as _, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Largest number of bytes accepted from the writer at once. Also the approximate size of both buffers.
const CHUNK_BYTES: usize = 64 * 1024;

/// Percent-encodes `endpoint` like grpc-go does for `:authority`.
///
/// Not encoded: unreserved characters, sub-delimiters, and `:`, `[`, `]`, `@` (grpc-go `clientconn.go`,
/// `encodeAuthority`).
pub fn encode(endpoint: &str) -> String {
    let mut encoded = String::with_capacity(endpoint.len() * 3);
    for byte in endpoint.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~!$&'()*+,;=:[]@".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

/// Returns a rewriting that sets `authority` in the first request of a connection, and only there.
pub(super) fn replace_with(
    authority: String,
) -> impl FnMut(&mut BytesMut, &mut BytesMut) -> io::Result<()> + Send + Unpin + 'static {
    let mut phase = Phase::Preface;
    move |input, output| phase.advance(&authority, input, output)
}

/// Position of the next byte in the client's output.
#[derive(Debug)]
enum Phase {
    /// In the connection preface.
    Preface,
    /// At the start of a frame, or `skip` bytes before the next frame.
    Frame { skip: usize },
    /// After the request head.
    Behind,
}

impl Phase {
    fn advance(
        &mut self,
        authority: &str,
        input: &mut BytesMut,
        output: &mut BytesMut,
    ) -> io::Result<()> {
        while !input.is_empty() {
            match self {
                Self::Preface if input.len() < PREFACE_BYTES => break,
                Self::Preface => {
                    output.unsplit(input.split_to(PREFACE_BYTES));
                    *self = Self::Frame { skip: 0 };
                }
                Self::Frame { skip: 0 } => {
                    let Some((kind, len)) = frame_head(input) else {
                        break;
                    };
                    if kind != KIND_HEADERS {
                        *self = Self::Frame {
                            skip: FRAME_HEAD_BYTES + len,
                        };
                    } else if input.len() < FRAME_HEAD_BYTES + len {
                        break;
                    } else {
                        let frame = input.split_to(FRAME_HEAD_BYTES + len);
                        rewrite_headers(&frame, authority, output).ok_or_else(unexpected)?;
                        *self = Self::Behind;
                    }
                }
                Self::Frame { skip } => {
                    let passed = input.split_to(input.len().min(*skip));
                    *skip -= passed.len();
                    output.unsplit(passed);
                }
                Self::Behind => output.unsplit(input.split()),
            }
        }
        Ok(())
    }
}

/// Length of the connection preface (RFC 9113, section 3.4).
const PREFACE_BYTES: usize = 24;
/// Length of a frame header (RFC 9113, section 4.1).
const FRAME_HEAD_BYTES: usize = 9;
const KIND_HEADERS: u8 = 1;
const FLAG_END_HEADERS: u8 = 0x4;
const FLAG_PADDED: u8 = 0x8;
const FLAG_PRIORITY: u8 = 0x20;
/// Literal field with indexing; the name is entry 1 of the static table, `:authority`.
const AUTHORITY_LITERAL: u8 = 0x41;

/// Returns a frame's kind and payload length, or `None` if the frame header is incomplete.
fn frame_head(mut input: &[u8]) -> Option<(u8, usize)> {
    let len = usize::try_from(input.try_get_uint(3).ok()?).ok()?;
    let kind = input.try_get_u8().ok()?;
    // The flags and the stream id must be present too.
    (input.len() >= FRAME_HEAD_BYTES - 4).then_some((kind, len))
}

/// Copies a HEADERS frame with another `:authority`. Returns `None` if the frame does not have the expected
/// form: a complete header block with only indexed fields before the authority.
///
/// The new value changes the size of an entry in the peer's dynamic table, so the encoder's view of the table
/// is wrong. The difference is harmless because the connection carries only one request, as long as the
/// entries of that request fit into the table.
fn rewrite_headers(frame: &[u8], authority: &str, output: &mut BytesMut) -> Option<()> {
    let (head, mut block) = frame.split_at_checked(FRAME_HEAD_BYTES)?;
    let (kind_flags_stream, flags) = (head.get(3..)?, *head.get(4)?);
    if flags & (FLAG_END_HEADERS | FLAG_PADDED | FLAG_PRIORITY) != FLAG_END_HEADERS {
        return None;
    }
    let mut rewritten = BytesMut::with_capacity(block.len() + authority.len());
    loop {
        match block.try_get_u8().ok()? {
            AUTHORITY_LITERAL => break,
            // An indexed field (1xxxxxxx) or a table size update (001xxxxx), one byte long.
            byte if (0x80..0xff).contains(&byte) || (0x20..0x3f).contains(&byte) => {
                rewritten.put_u8(byte);
            }
            _ => return None,
        }
    }
    let old_len = take_length(&mut block)?;
    rewritten.put_u8(AUTHORITY_LITERAL);
    put_length(authority.len(), &mut rewritten);
    rewritten.put_slice(authority.as_bytes());
    rewritten.put_slice(block.get(old_len..)?);
    output.put_uint(rewritten.len() as u64, 3);
    output.put_slice(kind_flags_stream);
    output.put_slice(&rewritten);
    Some(())
}

/// Reads the length of a string, Huffman-coded or not (RFC 7541, sections 5.1 and 5.2). Rejects lengths
/// encoded in more than four bytes: such a string does not fit into a frame.
fn take_length(block: &mut &[u8]) -> Option<usize> {
    let first = block.try_get_u8().ok()?;
    let mut len = usize::from(first & 0x7f);
    if len < 0x7f {
        return Some(len);
    }
    for shift in [0, 7, 14] {
        let byte = block.try_get_u8().ok()?;
        len += usize::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(len);
        }
    }
    None
}

/// Writes the length of a string without Huffman coding.
fn put_length(len: usize, output: &mut BytesMut) {
    let Some(mut rest) = len.checked_sub(0x7f) else {
        // `len` is below 0x7f here.
        output.put_u8(len as u8);
        return;
    };
    output.put_u8(0x7f);
    while rest >= 0x80 {
        output.put_u8(0x80 | (rest & 0x7f) as u8);
        rest >>= 7;
    }
    output.put_u8(rest as u8);
}

fn unexpected() -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        "unexpected form of the request head",
    )
}

/// A socket that passes written bytes through `rewrite`. Read bytes are unchanged.
///
/// `rewrite` removes bytes from its first argument and appends the rewritten bytes to its second argument.
pub(super) struct Rewriting<S, F> {
    socket: S,
    rewrite: F,
    /// Bytes from HTTP/2, not yet rewritten.
    input: BytesMut,
    /// Rewritten bytes, not yet written to the socket.
    output: BytesMut,
}

impl<S, F> Rewriting<S, F>
where
    S: AsyncWrite + Unpin,
    F: FnMut(&mut BytesMut, &mut BytesMut) -> io::Result<()> + Unpin,
{
    pub(super) fn new(socket: S, rewrite: F) -> Self {
        Self {
            socket,
            rewrite,
            input: BytesMut::new(),
            output: BytesMut::new(),
        }
    }

    /// Writes `output` to the socket.
    fn poll_drain(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.output.is_empty() {
            let n = ready!(Pin::new(&mut self.socket).poll_write(cx, &self.output))?;
            if n == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.output.advance(n);
        }
        Poll::Ready(Ok(()))
    }
}

impl<S, F> AsyncWrite for Rewriting<S, F>
where
    S: AsyncWrite + Unpin,
    F: FnMut(&mut BytesMut, &mut BytesMut) -> io::Result<()> + Unpin,
{
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(buf)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        // Accepts nothing before the last piece is written, which bounds both buffers.
        ready!(this.poll_drain(cx))?;
        let mut taken = 0;
        for buf in bufs {
            let n = buf.len().min(CHUNK_BYTES - taken);
            this.input
                .extend_from_slice(buf.get(..n).unwrap_or_default());
            taken += n;
        }
        (this.rewrite)(&mut this.input, &mut this.output)?;
        // The next write or flush sends the bytes that the socket does not accept now.
        if let Poll::Ready(Err(error)) = this.poll_drain(cx) {
            return Poll::Ready(Err(error));
        }
        Poll::Ready(Ok(taken))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_drain(cx))?;
        Pin::new(&mut this.socket).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_drain(cx))?;
        Pin::new(&mut this.socket).poll_shutdown(cx)
    }
}

impl<S: AsyncRead + Unpin, F: Unpin> AsyncRead for Rewriting<S, F> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().socket).poll_read(cx, buf)
    }
}

#[cfg(test)]
mod tests;
