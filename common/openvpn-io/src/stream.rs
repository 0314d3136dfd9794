//! Handles to a flow, and to the peer that carries the flow, for tasks on any thread.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddrV4;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use culvert_openvpn::flows::{FlowId, Refusal};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::mailbox::{Mailbox, Order};
use super::pipe::Pipe;

pub use super::pipe::Broken;

/// Largest chunk passed to a reader, in bytes.
const CHUNK_BYTES: usize = 64 << 10;

/// Handle to a peer's task.
#[derive(Clone)]
pub struct Peer(pub(super) Arc<Mailbox<Pipe>>);

impl Peer {
    /// Opens a flow to an address behind the peer. Dropping the future cancels the dial. The time limit is
    /// part of the flows' configuration.
    ///
    /// # Errors
    /// See [`Broken`].
    pub async fn dial(&self, destination: SocketAddrV4) -> Result<Stream, Broken> {
        let pipe = Pipe::new(self.0.clone());
        let stream = Stream::new(pipe.clone());
        if !self.0.order(Order::Dial(destination, pipe.clone())) {
            return Err(match self.0.is_closed() {
                true => Broken::TunnelLost,
                false => Broken::Busy,
            });
        }
        poll_fn(|cx| pipe.poll_open(cx)).await?;
        Ok(stream)
    }

    /// Sends a packet to the peer unchanged. Returns false if the packet was dropped because the link is full
    /// or gone.
    pub fn forward(&self, packet: &[u8]) -> bool {
        self.0.forward(packet)
    }

    /// Ends the session with the peer.
    pub fn close(&self) {
        self.0.order(Order::Close);
    }

    /// Returns the number of flows that are open or opening.
    pub fn flows(&self) -> usize {
        self.0.flows.load(Ordering::Relaxed)
    }

    /// Returns the time since the last authentic packet from the peer. Idle peers send pings.
    pub fn silence(&self) -> Duration {
        self.0.silence()
    }

    /// Returns true if the tunnel has ended.
    pub fn is_gone(&self) -> bool {
        self.0.is_closed()
    }
}

/// Request of a host behind the peer to open a flow. Dropping the request refuses the flow.
pub struct Incoming {
    /// Address of the dialing side.
    pub source: SocketAddrV4,
    /// Dialed address.
    pub destination: SocketAddrV4,
    pub(super) id: FlowId,
    pub(super) mailbox: Option<Arc<Mailbox<Pipe>>>,
}

impl Incoming {
    /// Accepts the flow. Bytes can be sent at once. If the other side has left meanwhile, the stream ends
    /// with an error. Returns `None` if the tunnel has ended.
    pub fn accept(mut self) -> Option<Stream> {
        let mailbox = self.mailbox.take()?;
        let pipe = Pipe::new(mailbox);
        pipe.belongs_to(self.id);
        let stream = Stream::new(pipe.clone());
        pipe.clone()
            .order(Order::Accept(self.id, pipe))
            .then_some(stream)
    }

    /// Refuses the flow.
    pub fn refuse(mut self, how: Refusal) {
        if let Some(mailbox) = self.mailbox.take() {
            mailbox.order(Order::Refuse(self.id, how));
        }
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        if let Some(mailbox) = self.mailbox.take() {
            mailbox.order(Order::Refuse(self.id, Refusal::Reset));
        }
    }
}

/// Both halves of an open flow.
pub struct Stream {
    /// Bytes from the other side.
    pub reader: Reader,
    /// Bytes to the other side.
    pub writer: Writer,
}

impl Stream {
    fn new(pipe: Arc<Pipe>) -> Self {
        Self {
            reader: Reader(pipe.clone()),
            writer: Writer(pipe),
        }
    }
}

/// Bytes from the other side. After the reader is dropped, further bytes are discarded.
pub struct Reader(Arc<Pipe>);

impl Reader {
    /// Returns the next chunk, which is never empty, or `None` once the other side has closed its direction.
    pub fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Broken>> {
        self.0.poll_recv(CHUNK_BYTES, cx)
    }

    /// Ready once the whole flow is broken, even if unread bytes are left.
    pub fn poll_broken(&mut self, cx: &mut Context<'_>) -> Poll<Broken> {
        self.0.poll_broken(cx)
    }
}

impl AsyncRead for Reader {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if buffer.remaining() > 0
            && let Some(chunk) = ready!(self.0.poll_recv(buffer.remaining(), cx))?
        {
            buffer.put_slice(&chunk);
        }
        Poll::Ready(Ok(()))
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.0.reader_left();
    }
}

/// Bytes to the other side. Dropping the writer without [`finish`](Self::finish) or shutdown resets the flow.
pub struct Writer(Arc<Pipe>);

impl Writer {
    /// Queues bytes from the front of the chunk. Ready once the chunk is empty.
    pub fn poll_send(
        &mut self,
        chunk: &mut Bytes,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), Broken>> {
        self.0.poll_send(chunk, cx)
    }

    /// Ends this direction after all queued bytes. Sending continues in the background.
    ///
    /// # Errors
    /// Fails if the flow has already ended.
    pub fn finish(&mut self) -> Result<(), Broken> {
        self.0.finish()
    }

    /// Resets the flow and discards queued bytes.
    pub fn abort(self) {
        self.0.abort();
    }

    /// Returns the flow's identifier for logs.
    pub fn id(&self) -> Option<FlowId> {
        self.0.flow()
    }
}

impl AsyncWrite for Writer {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let mut chunk = Bytes::copy_from_slice(bytes.get(..CHUNK_BYTES).unwrap_or(bytes));
        let whole = chunk.len();
        match self.0.poll_send(&mut chunk, cx) {
            Poll::Ready(Err(why)) => Poll::Ready(Err(why.into())),
            Poll::Pending if chunk.len() == whole => Poll::Pending,
            _ => Poll::Ready(Ok(whole - chunk.len())),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.0.finish().map_err(io::Error::from))
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.0.writer_left();
    }
}
