//! The halves of a connection whose TCP flow ends in this process, without a packet stream or a native
//! stream. Halves are polled, and boxed once for each connection, so a chunk costs a virtual call and no
//! allocation.

use std::future::poll_fn;
use std::task::{Context, Poll};

use bytes::Bytes;
use culvert_stream::{CloseReason, Sink, Source};
use tokio_util::task::TaskTracker;

/// Source of the endpoint's bytes.
pub trait FlowSource: Send {
    /// Receives the next chunk, never empty; `None` after an orderly end of this direction.
    fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, CloseReason>>;

    /// Returns ready once the whole connection was aborted, even if bytes are left to receive.
    fn poll_aborted(&mut self, cx: &mut Context<'_>) -> Poll<CloseReason>;
}

/// Sink for bytes to the endpoint.
pub trait FlowSink: Send {
    /// Sends bytes from the front of the chunk while there is room; ready once the chunk is empty.
    fn poll_send(
        &mut self,
        chunk: &mut Bytes,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), CloseReason>>;

    /// Ends this direction after all sent bytes.
    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), CloseReason>>;

    /// Returns the number of the connection at the peer or in the tunnel, for logs.
    fn id(&self) -> i64;

    /// Returns the name of the peer, for logs.
    fn peer(&self) -> &str;

    /// Ends the connection after all sent bytes, or aborts the connection if the reason requires an abort.
    /// Slow work runs in a task. Dropping a flow without calling `end` aborts the flow.
    fn end(self: Box<Self>, reason: CloseReason, tasks: &TaskTracker);
}

/// Adapts a [`FlowSource`] to [`Source`].
pub struct FromFlow(pub Box<dyn FlowSource>);

/// Adapts a [`FlowSink`] to [`Sink`].
pub struct ToFlow(pub Box<dyn FlowSink>);

impl Source for FromFlow {
    async fn recv(&mut self) -> Result<Option<Bytes>, CloseReason> {
        poll_fn(|cx| self.0.poll_recv(cx)).await
    }

    async fn aborted(&mut self) -> CloseReason {
        poll_fn(|cx| self.0.poll_aborted(cx)).await
    }

    async fn fill(&mut self) {
        self.aborted().await;
    }
}

impl Sink for ToFlow {
    async fn send(&mut self, mut chunk: Bytes) -> Result<(), CloseReason> {
        poll_fn(|cx| self.0.poll_send(&mut chunk, cx)).await
    }

    async fn finish(&mut self) -> Result<(), CloseReason> {
        poll_fn(|cx| self.0.poll_finish(cx)).await
    }
}
