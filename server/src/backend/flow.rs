//! The halves of a connection that is neither on a packet stream nor native: a TCP flow that ends
//! in this process. Polled and boxed once for each connection, so that a chunk costs one call
//! through a table and no allocation.

use std::future::poll_fn;
use std::task::{Context, Poll};

use bytes::Bytes;
use culvert_stream::{CloseReason, Sink, Source};
use tokio_util::task::TaskTracker;

/// The endpoint's bytes.
pub trait FlowSource: Send {
    /// The next chunk, never empty; `None` once this direction ended in order.
    fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, CloseReason>>;

    /// Ready once the whole connection was aborted, whether or not bytes are left to receive.
    fn poll_aborted(&mut self, cx: &mut Context<'_>) -> Poll<CloseReason>;
}

/// The way to the endpoint.
pub trait FlowSink: Send {
    /// Takes bytes from the front of the chunk as there is room for them; ready once all are taken.
    fn poll_send(
        &mut self,
        chunk: &mut Bytes,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), CloseReason>>;

    /// Ends this direction behind everything that was sent.
    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), CloseReason>>;

    /// The peer's or the tunnel's number of the connection; for logs.
    fn id(&self) -> i64;

    /// The peer that carries the connection; for logs.
    fn peer(&self) -> &str;

    /// Ends the connection behind everything that was sent, or aborts it if the reason says so.
    /// What takes time is left to a task. A flow that is dropped without is aborted.
    fn end(self: Box<Self>, reason: CloseReason, tasks: &TaskTracker);
}

/// Adapts the source.
pub struct FromFlow(pub Box<dyn FlowSource>);

/// Adapts the sink.
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
