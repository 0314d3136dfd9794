//! Dials over the QUIC link of a native agent, and the halves of their connections; see [`culvert_native::quic`].

mod serve;

use std::sync::Arc;

use bytes::Bytes;
use culvert_host::telemetry::metrics::GaugeGuard;
use culvert_konnectivity::message::PacketType;
use culvert_konnectivity::metrics::Segment;
use culvert_native::quic::halves::{QuicSink, QuicSource};
use culvert_native::quic::link::{Link, LinkDialError};
use culvert_native::quic::streams::StreamCut;
use culvert_stream::{CloseReason, Dial, Sink, Source};
use tokio::time::{Instant, timeout_at};
use tokio_util::task::TaskTracker;
use tracing::debug;

use super::dial::StreamDialError;
use super::native::{Life, NativeAgent};
use crate::metrics::{DialFailureReason, QuicDial, ServerMetrics};

/// Source of the endpoint's bytes.
pub struct FromAgent {
    source: QuicSource,
    metrics: Arc<ServerMetrics>,
}

/// Sink for bytes to the endpoint.
pub struct ToAgent {
    sink: QuicSink,
    life: Life,
}

/// Opens a connection over the QUIC link of an agent. Returns `None` if the dial belongs on the TCP connection: the agent
/// prefers TCP, or the link does not answer. No byte of the client was sent then. Dropping the future cancels the dial.
pub(super) async fn dial(
    agent: &Arc<NativeAgent>,
    dial: &Dial,
    deadline: Instant,
) -> Option<Result<(FromAgent, ToAgent), StreamDialError>> {
    let link = agent.second_link()?;
    let dialed = timeout_at(deadline, over_quic(agent, &link, dial)).await;
    dialed.unwrap_or(Some(Err(StreamDialError::TimedOut)))
}

/// Opens a connection over a link. Returns `None` if the link is of no use.
async fn over_quic(
    agent: &Arc<NativeAgent>,
    link: &Link,
    dial: &Dial,
) -> Option<Result<(FromAgent, ToAgent), StreamDialError>> {
    let metrics = &agent.metrics;
    let count = |outcome| metrics.quic_dials.get(outcome).increment(1);
    let _pending = GaugeGuard::new(&metrics.pending_backend_dials);
    agent.count(Segment::ToAgent, PacketType::DialReq);
    let dialed = link.dial(dial).await;
    if !matches!(
        dialed,
        Err(LinkDialError::Unusable | LinkDialError::Abandoned)
    ) {
        agent.count(Segment::FromAgent, PacketType::DialRsp);
    }
    let error = match dialed {
        Ok((source, sink)) => {
            count(QuicDial::Opened);
            let source = FromAgent {
                source,
                metrics: metrics.clone(),
            };
            let life = Life::begin(agent);
            return Some(Ok((source, ToAgent { sink, life })));
        }
        Err(error) => error,
    };
    match error {
        LinkDialError::Unusable => {
            count(QuicDial::Moved);
            debug!(address = dial.address, "a dial moves from QUIC to TCP");
            None
        }
        LinkDialError::Abandoned => {
            count(QuicDial::Failed);
            agent.dial_failure(DialFailureReason::BackendClose);
            Some(Err(StreamDialError::Abandoned))
        }
        LinkDialError::Refused(text) => {
            count(QuicDial::Failed);
            agent.dial_failure(DialFailureReason::ErrorResponse);
            Some(Err(StreamDialError::Refused(text)))
        }
    }
}

// === impl FromAgent ===

impl FromAgent {
    /// Returns the signal that the connection must end because clients that do not read hold too many bytes.
    pub(super) fn cut(&self) -> StreamCut {
        self.source.cut()
    }
}

impl Source for FromAgent {
    async fn recv(&mut self) -> Result<Option<Bytes>, CloseReason> {
        let received = self.source.recv().await;
        let packet = match received {
            Ok(Some(_)) => PacketType::Data,
            Ok(None) => return received,
            Err(_) => PacketType::CloseRsp,
        };
        self.metrics.streams.count_as(Segment::FromAgent, packet);
        received
    }

    async fn aborted(&mut self) -> CloseReason {
        self.source.aborted().await
    }

    async fn fill(&mut self) {
        self.source.fill().await;
    }
}

// === impl ToAgent ===

impl ToAgent {
    /// Returns the number of the QUIC stream.
    pub fn stream_id(&self) -> i64 {
        // Stream numbers have 62 bits.
        i64::try_from(self.sink.stream_id()).unwrap_or(i64::MAX)
    }

    /// Returns the id of the agent that carries the connection, for logs.
    pub fn agent_id(&self) -> &str {
        &self.life.agent.hello.agent_id
    }

    /// Ends the connection after all sent bytes, and reports the reason to the agent.
    pub fn end(self, reason: CloseReason, tasks: &TaskTracker) {
        let agent = &self.life.agent;
        agent.count(Segment::ToAgent, PacketType::CloseReq);
        self.sink.end(reason, tasks);
    }
}

impl Sink for ToAgent {
    async fn send(&mut self, chunk: Bytes) -> Result<(), CloseReason> {
        self.life.agent.count(Segment::ToAgent, PacketType::Data);
        self.sink.send(chunk).await
    }

    async fn finish(&mut self) -> Result<(), CloseReason> {
        self.sink.finish().await
    }
}
