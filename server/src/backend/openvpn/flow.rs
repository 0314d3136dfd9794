//! A dialed flow as the two halves of a connection.

use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use culvert_host::telemetry::metrics::GaugeGuard;
use culvert_openvpn::flows::Closed;
use culvert_openvpn_io::stream::{Broken, Reader, Stream, Writer};
use culvert_stream::CloseReason;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use crate::backend::Connection;
use crate::backend::dial::next_serial;
use crate::backend::flow::{FlowSink, FlowSource};
use crate::metrics::ServerMetrics;

/// Bytes from the endpoint.
struct FromClient(Reader);

/// Bytes to the endpoint.
struct ToClient {
    writer: Writer,
    peer: Arc<str>,
    id: i64,
    _life: Life,
}

/// Counters of an open connection.
struct Life {
    _open: GaugeGuard,
    opened: Instant,
    metrics: Arc<ServerMetrics>,
}

/// Creates a connection from an open flow. `peer` is the client's name.
pub fn connection(stream: Stream, peer: Arc<str>, metrics: Arc<ServerMetrics>) -> Connection {
    let life = Life {
        _open: GaugeGuard::new(&metrics.established_connections),
        opened: Instant::now(),
        metrics,
    };
    let source: Box<dyn FlowSource> = Box::new(FromClient(stream.reader));
    let sink: Box<dyn FlowSink> = Box::new(ToClient {
        writer: stream.writer,
        peer,
        id: i64::try_from(next_serial()).unwrap_or(i64::MAX),
        _life: life,
    });
    Connection::from((source, sink))
}

fn reason(broken: Broken) -> CloseReason {
    match broken {
        Broken::TunnelLost | Broken::Busy => CloseReason::AgentLost,
        Broken::Flow(Closed::Finished) => CloseReason::EndpointClosed,
        Broken::Flow(_) | Broken::Dial(_) | Broken::Aborted => CloseReason::EndpointLost,
    }
}

impl FlowSource for FromClient {
    fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, CloseReason>> {
        Poll::Ready(ready!(self.0.poll_recv(cx)).map_err(reason))
    }

    fn poll_aborted(&mut self, cx: &mut Context<'_>) -> Poll<CloseReason> {
        self.0.poll_broken(cx).map(reason)
    }
}

impl FlowSink for ToClient {
    fn poll_send(
        &mut self,
        chunk: &mut Bytes,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), CloseReason>> {
        self.writer.poll_send(chunk, cx).map_err(reason)
    }

    fn poll_finish(&mut self, _: &mut Context<'_>) -> Poll<Result<(), CloseReason>> {
        Poll::Ready(self.writer.finish().map_err(reason))
    }

    fn id(&self) -> i64 {
        self.id
    }

    fn peer(&self) -> &str {
        &self.peer
    }

    /// Ends the flow. After an orderly end, the flow's task still delivers all queued bytes.
    fn end(mut self: Box<Self>, why: CloseReason, _: &TaskTracker) {
        match why {
            CloseReason::Finished
            | CloseReason::ClientClosed
            | CloseReason::EndpointClosed
            | CloseReason::HalfOpenIdle => {
                // An error means that the flow has already ended.
                let _ = self.writer.finish();
            }
            _ => self.writer.abort(),
        }
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        let lasted = self.opened.elapsed().as_secs_f64();
        self.metrics.connection_duration.record(lasted);
    }
}
