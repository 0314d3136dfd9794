//! [`Source`] and [`Sink`] over byte streams: sockets and TLS streams.

use std::future::{pending, poll_fn};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, BufMut as _, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::{sleep, timeout};
use tokio_util::io::poll_read_buf;

use super::allowance::{Allowance, Held};
use super::progress::Progress;
use super::{CloseReason, Sink, Source};

/// Smallest read size, in bytes, for a connection that moves little.
const SMALL_READ_BYTES: usize = 4 * 1024;
/// Largest read size, in bytes, for a busy connection: four DATA packets, or one native frame.
pub const LARGE_READ_BYTES: usize = 4 * (64 * 1024 - 64);
/// Largest read, in bytes, to copy out of the buffer, so that a few bytes in a slow queue do not keep a large
/// buffer alive.
const COPY_BYTES: usize = 512;

/// Pause between two looks for a reset of a connection whose peer has ended its direction.
pub const RESET_LOOK: Duration = Duration::from_secs(10);

/// Source that reads from a byte stream. The read buffer grows while reads fill it, and shrinks when reads
/// are small.
pub struct ReadSource<R> {
    reader: R,
    buffer: BytesMut,
    size: usize,
    /// Limit for reads; the sink charges the bytes.
    allowance: Option<Arc<Allowance>>,
    is_over: Option<fn(&R) -> bool>,
    lost: CloseReason,
}

impl<R> ReadSource<R> {
    /// Creates a source that returns `early` before the bytes of `reader`. A read error ends the connection
    /// with `lost`.
    pub fn new(reader: R, early: Bytes, lost: CloseReason) -> Self {
        Self {
            reader,
            buffer: BytesMut::from(early),
            size: SMALL_READ_BYTES,
            allowance: None,
            is_over: None,
            lost,
        }
    }

    /// Lets the source notice a reset after its end. `is_over` tells whether the peer has reset the connection: nothing
    /// reads from a stream that has ended, so only a look at the socket finds the reset.
    #[must_use]
    pub fn watched(mut self, is_over: fn(&R) -> bool) -> Self {
        self.is_over = Some(is_over);
        self
    }

    /// Limits each read to the amount that `allowance` permits. The sink must charge the bytes to the same
    /// allowance.
    #[must_use]
    pub fn within(mut self, allowance: Option<Arc<Allowance>>) -> Self {
        self.allowance = allowance;
        self
    }

    /// Returns a reference to the reader.
    pub fn get_ref(&self) -> &R {
        &self.reader
    }

    /// Returns the reader.
    pub fn into_inner(self) -> R {
        self.reader
    }

    fn take(&mut self) -> Bytes {
        let len = self.buffer.len();
        // The allowance charges `len`: copy if the chunk would keep at least twice as much alive.
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
    /// Reads into a buffer, which exists only while there is something to read: most connections are idle
    /// most of the time.
    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        if let Some(limit) = self.allowance.as_ref().and_then(|all| all.limit()) {
            self.size = self.size.min(limit);
        }
        self.buffer.reserve(self.size);
        // The buffer may have more room than requested; a read must not exceed `size`.
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
            // A TLS peer that closes without close_notify ends the direction, as in TCP.
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

    async fn aborted(&mut self) -> CloseReason {
        let Some(is_over) = self.is_over else {
            return pending().await;
        };
        while !is_over(&self.reader) {
            sleep(RESET_LOOK).await;
        }
        self.lost
    }
}

/// Sink that writes to a byte stream. The end of the direction is a shutdown of the write side.
pub struct WriteSink<W> {
    writer: W,
    /// Unwritten bytes of a cancelled send.
    rest: Bytes,
    allowance: Option<Arc<Allowance>>,
    /// Charge for `rest`.
    held: Option<Held>,
    unacknowledged: Option<Unacknowledged<W>>,
    lost: CloseReason,
}

/// Function that returns the number of written bytes that the peer has not acknowledged, or `None` if the number is unknown.
pub type Unacknowledged<W> = fn(&W) -> Option<u32>;

impl<W> WriteSink<W> {
    /// Creates a sink for `writer`. A write error ends the connection with `lost`.
    pub fn new(writer: W, lost: CloseReason) -> Self {
        Self {
            writer,
            rest: Bytes::new(),
            allowance: None,
            held: None,
            unacknowledged: None,
            lost,
        }
    }

    /// Lets the sink report the progress of a peer that reads from the buffer of its socket.
    #[must_use]
    pub fn measured(mut self, unacknowledged: Unacknowledged<W>) -> Self {
        self.unacknowledged = Some(unacknowledged);
        self
    }

    /// Charges unwritten bytes to `allowance`.
    #[must_use]
    pub fn within(mut self, allowance: Option<Arc<Allowance>>) -> Self {
        self.allowance = allowance;
        self
    }

    /// Returns the writer.
    pub fn into_inner(self) -> W {
        self.writer
    }
}

impl<W: AsyncWrite + Unpin> WriteSink<W> {
    async fn write_rest(&mut self, progress: &Progress) -> io::Result<()> {
        while !self.rest.is_empty() {
            let written = poll_fn(|cx| {
                let written = Pin::new(&mut self.writer).poll_write(cx, &self.rest);
                self.look(written.is_pending(), progress);
                written
            });
            match written.await? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                written => {
                    self.rest.advance(written);
                    progress.add(written);
                }
            }
        }
        drop(self.held.take());
        // A TLS stream has a buffer of its own: the write above may end at once, and the flush wait for the peer.
        let flushed = poll_fn(|cx| {
            let flushed = Pin::new(&mut self.writer).poll_flush(cx);
            self.look(flushed.is_pending(), progress);
            flushed
        });
        flushed.await
    }

    /// Reports how far the peer of a full socket has read, if somebody waits for its progress.
    fn look(&self, is_full: bool, progress: &Progress) {
        if let Some(unacknowledged) = self.unacknowledged
            && is_full
            && progress.is_watched()
        {
            progress.set_unacknowledged(unacknowledged(&self.writer).unwrap_or_default());
        }
    }
}

impl<W: AsyncWrite + Unpin + Send> Sink for WriteSink<W> {
    /// Cancel safe: the next send starts with the unwritten bytes of a dropped send, so the stream has no
    /// gap. An empty chunk writes only those bytes.
    async fn send_counted(&mut self, chunk: Bytes, progress: &Progress) -> Result<(), CloseReason> {
        let lost = self.lost;
        self.write_rest(progress).await.map_err(|_| lost)?;
        self.held = self.allowance.as_ref().map(|all| all.hold(chunk.len()));
        self.rest = chunk;
        self.write_rest(progress).await.map_err(|_| lost)
    }

    async fn finish(&mut self) -> Result<(), CloseReason> {
        // Fails only if the peer is gone; the source then reports the reason.
        let _ = self.writer.shutdown().await;
        Ok(())
    }
}

/// Time for a peer to accept the remaining bytes and to close.
pub const LINGER: Duration = Duration::from_secs(5);

/// Largest number of bytes to discard during a lingering close. A peer that sends more is not about to end:
/// reading a download to its end would cost a whole core for [`LINGER`].
const LINGER_BYTES: usize = 256 * 1024;

/// Time for a peer to read the remaining bytes, once it has sent [`LINGER_BYTES`]. Afterwards the peer gets a
/// reset, which discards bytes that it has not read.
const RESET_DELAY: Duration = Duration::from_millis(500);

/// Closes a connection so that the last bytes arrive, see [`drain`]. Stops waiting for the peer after
/// [`LINGER`].
pub async fn linger_close<R, W>(read: R, mut write: W)
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

/// Reads and drops input until the peer closes, so that no byte on its way to the peer is lost: if a socket
/// is closed with unread input, TCP sends a reset, and the reset discards bytes not yet read by the peer. After
/// 256 KiB, waits without reading, so that the peer's sends block, and leaves the rest to the reset.
/// The caller bounds the time.
pub async fn drain<R: AsyncRead + Unpin>(mut reader: R) {
    let mut scratch = BytesMut::with_capacity(SMALL_READ_BYTES);
    let mut dropped = 0;
    while dropped < LINGER_BYTES {
        match reader.read_buf(&mut scratch).await {
            Ok(read) if read > 0 => dropped += read,
            _ => return,
        }
        scratch.clear();
    }
    sleep(RESET_DELAY).await;
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn lingering_close_discards_a_bounded_number_of_bytes() {
        let (near, far) = tokio::io::duplex(SMALL_READ_BYTES);
        let (mut from_peer, mut to_peer) = tokio::io::split(near);
        let endless = async {
            let mut sent = 0;
            while let Ok(written) = to_peer.write(&[7; SMALL_READ_BYTES]).await {
                sent += written;
            }
            sent
        };
        let started = tokio::time::Instant::now();
        let close = async {
            let (read, write) = tokio::io::split(far);
            linger_close(read, write).await;
        };
        let (sent, (), end) = tokio::join!(endless, close, from_peer.read_u8());
        assert!(end.is_err(), "the end of the stream comes first");
        assert!((LINGER_BYTES..=LINGER_BYTES + SMALL_READ_BYTES).contains(&sent));
        assert_eq!(started.elapsed(), RESET_DELAY);
    }

    #[tokio::test]
    async fn a_cancelled_send_leaves_no_gap() {
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
    async fn unwritten_bytes_are_charged_until_they_are_written() {
        let (near, mut far) = tokio::io::duplex(4);
        let allowance = Allowance::new(100);
        let sink = WriteSink::new(near, CloseReason::ClientLost);
        let mut sink = sink.within(Some(allowance.clone()));
        let sent = sink.send(Bytes::from_static(&[7; 60]));
        let cut = tokio::time::timeout(Duration::from_millis(10), sent);
        assert!(cut.await.is_err());
        assert_eq!(allowance.held(), 60);
        let mut all = [0; 60];
        let read = far.read_exact(&mut all);
        let (sent, read) = tokio::join!(sink.send(Bytes::new()), read);
        assert_eq!((sent, read.unwrap()), (Ok(()), 60));
        assert_eq!(allowance.held(), 0);
    }

    #[tokio::test]
    async fn reads_are_small_while_the_allowance_is_used_up_and_keep_no_large_buffer_alive() {
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
        // The buffer stays in the source.
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
