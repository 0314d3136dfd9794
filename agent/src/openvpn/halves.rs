//! [`Source`] and [`Sink`] implementations for a flow of the tunnel.

use std::future::poll_fn;

use bytes::Bytes;
use culvert_openvpn::flows::Closed;
use culvert_openvpn_io::stream::{Broken, Reader, Stream, Writer};
use culvert_stream::{CloseReason, Sink, Source};

/// Bytes from the tunnel.
pub(super) struct FlowSource(Reader);

/// Bytes into the tunnel. Dropping the sink before [`finish`](Sink::finish) resets the flow.
pub(super) struct FlowSink {
    writer: Writer,
    /// Bytes of a cancelled send that the flow has not accepted.
    rest: Bytes,
}

/// Splits a flow into its two halves.
pub(super) fn halves(stream: Stream) -> (FlowSource, FlowSink) {
    let sink = FlowSink {
        writer: stream.writer,
        rest: Bytes::new(),
    };
    (FlowSource(stream.reader), sink)
}

fn reason(broken: Broken) -> CloseReason {
    match broken {
        Broken::TunnelLost => CloseReason::ServerLost,
        Broken::Flow(Closed::Finished) => CloseReason::Finished,
        _ => CloseReason::ClientLost,
    }
}

impl Source for FlowSource {
    async fn recv(&mut self) -> Result<Option<Bytes>, CloseReason> {
        poll_fn(|cx| self.0.poll_recv(cx)).await.map_err(reason)
    }

    async fn aborted(&mut self) -> CloseReason {
        reason(poll_fn(|cx| self.0.poll_broken(cx)).await)
    }

    async fn fill(&mut self) {
        self.aborted().await;
    }
}

impl Sink for FlowSink {
    async fn send(&mut self, chunk: Bytes) -> Result<(), CloseReason> {
        for next in [std::mem::take(&mut self.rest), chunk] {
            self.rest = next;
            poll_fn(|cx| self.writer.poll_send(&mut self.rest, cx))
                .await
                .map_err(reason)?;
        }
        Ok(())
    }

    async fn finish(&mut self) -> Result<(), CloseReason> {
        self.writer.finish().map_err(reason)
    }
}
