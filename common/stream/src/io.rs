//! [`Source`] and [`Sink`] over byte streams: sockets and TLS streams.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, BufMut as _, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;
use tokio_util::io::poll_read_buf;

use super::allowance::Allowance;
use super::{CloseReason, Sink, Source};

/// The read size of a connection that moves little.
const SMALL_READ_BYTES: usize = 4 * 1024;
/// The read size that a busy connection grows to: four DATA packets, or one native frame.
const LARGE_READ_BYTES: usize = 4 * (64 * 1024 - 64);
/// Reads up to this size are copied out, so that a few bytes in a slow queue do not pin a large
/// buffer.
const COPY_BYTES: usize = 512;

/// Reads chunks; the buffer grows while reads fill it and shrinks when they no longer do.
pub struct ReadSource<R> {
    reader: R,
    buffer: BytesMut,
    size: usize,
    /// What is read counts toward it once a sink has it.
    allowance: Option<Arc<Allowance>>,
    lost: CloseReason,
}

impl<R> ReadSource<R> {
    /// Reads `early` first, then from `reader`. A read error ends the connection with `lost`.
    pub fn new(reader: R, early: Bytes, lost: CloseReason) -> Self {
        Self {
            reader,
            buffer: BytesMut::from(early),
            size: SMALL_READ_BYTES,
            allowance: None,
            lost,
        }
    }

    /// Reads no more at a time than `allowance` permits. Its sink holds what is read.
    #[must_use]
    pub fn within(mut self, allowance: Option<Arc<Allowance>>) -> Self {
        self.allowance = allowance;
        self
    }

    /// The reader.
    pub fn get_ref(&self) -> &R {
        &self.reader
    }

    /// Gives the reader back.
    pub fn into_inner(self) -> R {
        self.reader
    }

    fn take(&mut self) -> Bytes {
        let len = self.buffer.len();
        // What is counted by its length must not pin much more.
        let pins = self.allowance.is_some() && len <= self.buffer.capacity() / 2;
        if len <= COPY_BYTES || pins {
            let chunk = Bytes::copy_from_slice(&self.buffer);
            self.buffer.clear();
            chunk
        } else {
            self.buffer.split().freeze()
        }
    }
}

impl<R: AsyncRead + Unpin> ReadSource<R> {
    /// Reads into a buffer that is there only while there is something to read: most connections
    /// idle most of the time.
    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        if let Some(limit) = self.allowance.as_ref().and_then(|all| all.limit()) {
            self.size = self.size.min(limit);
        }
        self.buffer.reserve(self.size);
        // The buffer may have more room than asked for; a chunk is to fit into one packet.
        let mut room = (&mut self.buffer).limit(self.size);
        let read = poll_read_buf(Pin::new(&mut self.reader), cx, &mut room);
        if read.is_pending() {
            self.buffer = BytesMut::new();
        }
        read
    }
}

impl<R: AsyncRead + Unpin + Send> Source for ReadSource<R> {
    async fn recv(&mut self) -> Result<Option<Bytes>, CloseReason> {
        if !self.buffer.is_empty() {
            return Ok(Some(self.take()));
        }
        let read = match poll_fn(|cx| self.poll_fill(cx)).await {
            Ok(0) => return Ok(None),
            Ok(read) => read,
            // A TLS peer that closes without close_notify ends its direction as TCP does.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            Err(_) => return Err(self.lost),
        };
        if read >= self.size {
            self.size = (self.size * 4).min(LARGE_READ_BYTES);
        } else if read < self.size / 8 {
            self.size = (self.size / 4).max(SMALL_READ_BYTES);
        }
        Ok(Some(self.take()))
    }
}

/// Writes chunks; the end is a shutdown of the write side.
pub struct WriteSink<W> {
    writer: W,
    /// What a cancelled send has not written yet.
    rest: Bytes,
    lost: CloseReason,
}

impl<W> WriteSink<W> {
    /// Writes to `writer`. A write error ends the connection with `lost`.
    pub fn new(writer: W, lost: CloseReason) -> Self {
        Self {
            writer,
            rest: Bytes::new(),
            lost,
        }
    }

    /// Gives the writer back.
    pub fn into_inner(self) -> W {
        self.writer
    }
}

impl<W: AsyncWrite + Unpin> WriteSink<W> {
    async fn write_rest(&mut self) -> io::Result<()> {
        while !self.rest.is_empty() {
            match self.writer.write(&self.rest).await? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                written => self.rest.advance(written),
            }
        }
        self.writer.flush().await
    }
}

impl<W: AsyncWrite + Unpin + Send> Sink for WriteSink<W> {
    /// Cancel safe: the next send begins with what a dropped one has left, so that the stream has
    /// no hole. An empty chunk writes just that.
    async fn send(&mut self, chunk: Bytes) -> Result<(), CloseReason> {
        let lost = self.lost;
        self.write_rest().await.map_err(|_| lost)?;
        self.rest = chunk;
        self.write_rest().await.map_err(|_| lost)
    }

    async fn finish(&mut self) -> Result<(), CloseReason> {
        // A peer that is gone already has what it wanted; the read side tells the rest.
        let _ = self.writer.shutdown().await;
        Ok(())
    }
}

/// How long a peer may take to accept what is left for it and to leave.
pub const LINGER: Duration = Duration::from_secs(5);

/// Closes so that the last bytes arrive, see [`drain`]; a peer that takes longer than [`LINGER`] has
/// had its chance.
pub async fn leave<R, W>(read: R, mut write: W)
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let orderly = async {
        if write.shutdown().await.is_ok() {
            drain(read).await;
        }
    };
    let _ = timeout(LINGER, orderly).await;
}

/// Ends a socket so that nothing on its way to the peer is lost: closing one with unread input
/// makes TCP send a reset, which discards what the peer has not read yet. Reads and drops input
/// until the peer closes too; the caller bounds the time.
pub async fn drain<R: AsyncRead + Unpin>(mut reader: R) {
    let mut scratch = BytesMut::with_capacity(SMALL_READ_BYTES);
    while matches!(reader.read_buf(&mut scratch).await, Ok(read) if read > 0) {
        scratch.clear();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[tokio::test]
    async fn a_cancelled_send_leaves_no_hole() {
        let (near, mut far) = tokio::io::duplex(4);
        let mut sink = WriteSink::new(near, CloseReason::EndpointLost);
        let first = sink.send(Bytes::from_static(b"first "));
        let cut = tokio::time::timeout(std::time::Duration::from_millis(10), first);
        assert!(cut.await.is_err());
        let read = async {
            let mut all = vec![0; 12];
            far.read_exact(&mut all).await.unwrap();
            all
        };
        let (sent, all) = tokio::join!(sink.send(Bytes::from_static(b"second")), read);
        assert_eq!((sent, all.as_slice()), (Ok(()), b"first second".as_slice()));
    }

    #[tokio::test]
    async fn reads_are_small_while_much_is_held_and_pin_no_more_than_they_count() {
        let (mut near, far) = tokio::io::duplex(1 << 20);
        let allowance = Allowance::new(1 << 24);
        let source = ReadSource::new(far, Bytes::new(), CloseReason::ClientLost);
        let mut source = source.within(Some(allowance.clone()));
        near.write_all(&vec![7; 1 << 19]).await.unwrap();
        while source.size < LARGE_READ_BYTES {
            source.recv().await.unwrap();
        }
        let held = allowance.hold(1 << 24);
        assert_eq!(source.recv().await.unwrap().unwrap().len(), 4096);
        drop(held);
        let mut rest = 1;
        while rest > 0 {
            rest = tokio::select! {
                biased;
                more = source.recv() => more.unwrap().unwrap().len(),
                () = std::future::ready(()) => 0,
            };
        }
        source.size = LARGE_READ_BYTES;
        near.write_all(&[7; 20_000]).await.unwrap();
        let chunk = source.recv().await.unwrap().unwrap();
        // The buffer stays with the source.
        assert_eq!((chunk.len(), source.buffer.len()), (20_000, 0));
        assert!(source.buffer.capacity() >= LARGE_READ_BYTES);
    }

    #[tokio::test]
    async fn early_bytes_come_first_and_buffers_follow_the_load() {
        let (mut near, far) = tokio::io::duplex(1 << 20);
        let mut source =
            ReadSource::new(far, Bytes::from_static(b"early"), CloseReason::ClientLost);
        assert_eq!(source.recv().await.unwrap().unwrap(), "early");
        near.write_all(&vec![7; 1 << 20]).await.unwrap();
        let mut total = 0;
        while total < 1 << 20 {
            total += source.recv().await.unwrap().unwrap().len();
        }
        assert_eq!(source.size, LARGE_READ_BYTES);
        for _ in 0..4 {
            near.write_all(b"x").await.unwrap();
            assert_eq!(source.recv().await.unwrap().unwrap(), "x");
        }
        assert_eq!(source.size, SMALL_READ_BYTES);
        drop(near);
        assert_eq!(source.recv().await, Ok(None));
    }
}
