//! A flow as the two halves of a connection.

use std::future::poll_fn;

use bytes::Bytes;
use culvert_stream::{CloseReason, Sink, Source};

use super::stream::{Broken, Reader, Stream, Writer};

/// Converts the end of a flow to the close reason of its connection. The reasons differ between the two ends
/// of a tunnel.
pub type ToReason = fn(Broken) -> CloseReason;

/// Source of the bytes from the other side of a flow.
pub struct FlowSource {
    reader: Reader,
    reason: ToReason,
}

/// Sink for bytes to the other side of a flow. Dropping the sink before [`finish`](Sink::finish) resets the
/// flow.
pub struct FlowSink {
    writer: Writer,
    reason: ToReason,
    /// Bytes of a cancelled send that the flow has not accepted.
    rest: Bytes,
}

/// Splits a flow into its two halves.
pub fn halves(stream: Stream, reason: ToReason) -> (FlowSource, FlowSink) {
    let Stream { reader, writer } = stream;
    let sink = FlowSink {
        writer,
        reason,
        rest: Bytes::new(),
    };
    (FlowSource { reader, reason }, sink)
}

impl FlowSink {
    /// Ends this direction after all queued bytes. Sending continues in the background.
    pub fn end(mut self) {
        // An error means that the flow has already ended.
        let _ = self.writer.finish();
    }

    /// Resets the flow and discards queued bytes.
    pub fn abort(self) {
        self.writer.abort();
    }

    async fn flush(&mut self) -> Result<(), CloseReason> {
        let sent = poll_fn(|cx| self.writer.poll_send(&mut self.rest, cx)).await;
        sent.map_err(self.reason)
    }
}

impl Source for FlowSource {
    async fn recv(&mut self) -> Result<Option<Bytes>, CloseReason> {
        let received = poll_fn(|cx| self.reader.poll_recv(cx)).await;
        received.map_err(self.reason)
    }

    async fn aborted(&mut self) -> CloseReason {
        (self.reason)(poll_fn(|cx| self.reader.poll_broken(cx)).await)
    }

    async fn fill(&mut self) {
        self.aborted().await;
    }
}

impl Sink for FlowSink {
    async fn send(&mut self, chunk: Bytes) -> Result<(), CloseReason> {
        if !self.rest.is_empty() {
            self.flush().await?;
        }
        self.rest = chunk;
        self.flush().await
    }

    async fn finish(&mut self) -> Result<(), CloseReason> {
        self.writer.finish().map_err(self.reason)
    }
}
