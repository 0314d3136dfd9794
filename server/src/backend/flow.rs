//! The halves of a dialed flow, which ends in this process.

use std::sync::Arc;

use bytes::Bytes;
use culvert_openvpn::flows::Closed;
use culvert_openvpn_io::stream::{Broken, FlowSink, FlowSource, Stream};
use culvert_stream::progress::Progress;
use culvert_stream::{CloseReason, Sink};
use tokio_util::task::TaskTracker;

use super::dial::next_serial;
use crate::metrics::{OpenConnection, ServerMetrics};

/// Bytes to the endpoint.
pub struct ToClient {
    sink: FlowSink,
    peer: Arc<str>,
    id: i64,
    _counted: OpenConnection,
}

/// Splits an open flow into the halves of a connection. `peer` is the client's name.
pub(crate) fn open(
    stream: Stream,
    peer: Arc<str>,
    metrics: &Arc<ServerMetrics>,
) -> (FlowSource, ToClient) {
    let (source, sink) = stream.halves(reason);
    let sink = ToClient {
        sink,
        peer,
        id: i64::try_from(next_serial()).unwrap_or(i64::MAX),
        _counted: OpenConnection::new(metrics),
    };
    (source, sink)
}

fn reason(broken: Broken) -> CloseReason {
    match broken {
        Broken::TunnelLost | Broken::Busy => CloseReason::AgentLost,
        Broken::Flow(Closed::Finished) => CloseReason::EndpointClosed,
        Broken::Flow(_) | Broken::Dial(_) | Broken::Aborted => CloseReason::EndpointLost,
    }
}

impl ToClient {
    /// Returns the serial number of the connection, for logs.
    pub fn id(&self) -> i64 {
        self.id
    }

    /// Returns the name of the client, for logs.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Ends the flow after all queued bytes, which the flow's task still delivers. `tasks` counts the flow until then.
    pub fn end(self, why: CloseReason, tasks: &TaskTracker) {
        match why {
            CloseReason::Finished | CloseReason::ClientClosed | CloseReason::EndpointClosed => {
                self.sink.end(tasks);
            }
            // Either direction may be the open one. An orderly end would make a part of the client's bytes look complete.
            CloseReason::HalfOpenIdle => self.sink.leave(tasks),
            _ => self.sink.reset(tasks),
        }
    }
}

impl Sink for ToClient {
    async fn send_counted(&mut self, chunk: Bytes, progress: &Progress) -> Result<(), CloseReason> {
        self.sink.send_counted(chunk, progress).await
    }

    async fn finish(&mut self) -> Result<(), CloseReason> {
        self.sink.finish().await
    }
}
