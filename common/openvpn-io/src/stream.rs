//! Handles to a flow, and to the peer that carries the flow, for tasks on any thread.

use std::future::poll_fn;
use std::net::SocketAddrV4;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use culvert_openvpn::flows::{FlowId, Refusal};
use culvert_stream::progress::Progress;
use culvert_stream::{CloseReason, Sink, Source};
use tokio_util::task::TaskTracker;

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

    /// Returns a number that grows with authentic packets from the peer, at most once per millisecond.
    pub fn heard(&self) -> u64 {
        self.0.heard()
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

/// Converts the end of a flow to the close reason of its connection. The reasons differ between the two ends
/// of a tunnel.
pub type ToReason = fn(Broken) -> CloseReason;

/// An open flow.
pub struct Stream {
    pub(super) reader: Reader,
    pub(super) writer: Writer,
}

/// Source of the bytes from the other side of a flow. After the source is dropped, further bytes are
/// discarded.
pub struct FlowSource {
    reader: Reader,
    reason: ToReason,
}

/// Sink for bytes to the other side of a flow. Dropping the sink before [`finish`](Sink::finish) resets the
/// flow after all queued bytes.
pub struct FlowSink {
    writer: Writer,
    reason: ToReason,
    /// Bytes of a cancelled send that the flow has not accepted.
    rest: Bytes,
}

pub(super) struct Reader(Arc<Pipe>);

pub(super) struct Writer(Arc<Pipe>);

impl Stream {
    fn new(pipe: Arc<Pipe>) -> Self {
        Self {
            reader: Reader(pipe.clone()),
            writer: Writer(pipe),
        }
    }

    /// Splits the flow into its two halves.
    pub fn halves(self, reason: ToReason) -> (FlowSource, FlowSink) {
        let Self { reader, writer } = self;
        let sink = FlowSink {
            writer,
            reason,
            rest: Bytes::new(),
        };
        (FlowSource { reader, reason }, sink)
    }
}

impl FlowSink {
    /// Ends this direction after all queued bytes, and leaves the flow.
    pub fn end(self, tasks: &TaskTracker) {
        // An error means that the flow has already ended.
        let _ = self.writer.0.finish();
        self.leave(tasks);
    }

    /// Resets the flow after all queued bytes, and after the end of this direction if it has ended.
    pub fn reset(self, tasks: &TaskTracker) {
        self.writer.0.reset();
        self.leave(tasks);
    }

    /// Drops the sink. Sending continues in the background: `tasks` counts the flow until the other side has acknowledged
    /// everything, or the flow has ended.
    pub fn leave(self, tasks: &TaskTracker) {
        self.writer.0.count_in(tasks);
    }

    async fn flush(&mut self, progress: &Progress) -> Result<(), CloseReason> {
        let sent = poll_fn(|cx| {
            let waiting = self.rest.len();
            let sent = self.writer.0.poll_send(&mut self.rest, cx);
            progress.add(waiting - self.rest.len());
            sent
        });
        sent.await.map_err(self.reason)
    }
}

impl Source for FlowSource {
    async fn recv(&mut self) -> Result<Option<Bytes>, CloseReason> {
        let received = poll_fn(|cx| self.reader.0.poll_recv(CHUNK_BYTES, cx)).await;
        received.map_err(self.reason)
    }

    async fn aborted(&mut self) -> CloseReason {
        (self.reason)(poll_fn(|cx| self.reader.0.poll_broken(cx)).await)
    }

    async fn fill(&mut self) {
        self.aborted().await;
    }
}

impl Sink for FlowSink {
    async fn send_counted(&mut self, chunk: Bytes, progress: &Progress) -> Result<(), CloseReason> {
        if !self.rest.is_empty() {
            self.flush(progress).await?;
        }
        self.rest = chunk;
        self.flush(progress).await
    }

    async fn finish(&mut self) -> Result<(), CloseReason> {
        self.writer.0.finish().map_err(self.reason)
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.0.reader_left();
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.0.writer_left();
    }
}

#[cfg(test)]
mod tests;
