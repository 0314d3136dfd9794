//! The halves of a connection on a stream of a native agent, with their counters. The stream belongs to HTTP/2 or QUIC.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use culvert_konnectivity::message::PacketType;
use culvert_konnectivity::metrics::Segment;
use culvert_native::quic::halves::QuicSource;
use culvert_native::quic::streams::StreamCut;
use culvert_stream::progress::Progress;
use culvert_stream::{CloseReason, Sink, Source};

use super::{NativeAgent, RENEW_AFTER};
use crate::metrics::{OpenConnection, ServerMetrics};

/// Source of the endpoint's bytes.
pub struct FromAgent<S> {
    source: S,
    metrics: Arc<ServerMetrics>,
}

/// Sink for bytes to the endpoint.
pub struct ToAgent<K> {
    sink: K,
    stream_id: i64,
    life: Life,
}

/// Counts an open connection until dropped.
struct Life {
    agent: Arc<NativeAgent>,
    _use: Use,
    _counted: OpenConnection,
}

/// Counts a dial or a connection until dropped. The drop of the last `Use` closes an agent connection beyond [`RENEW_AFTER`].
pub(crate) struct Use(Arc<NativeAgent>);

/// Counts a new connection of an agent, and returns its halves.
pub(crate) fn opened<S, K>(
    agent: &Arc<NativeAgent>,
    stream_id: i64,
    (source, sink): (S, K),
) -> (FromAgent<S>, ToAgent<K>) {
    let source = FromAgent {
        source,
        metrics: agent.metrics.clone(),
    };
    let sink = ToAgent {
        sink,
        stream_id,
        life: Life::begin(agent),
    };
    (source, sink)
}

// === impl FromAgent ===

impl FromAgent<QuicSource> {
    /// Returns the signal that the connection must end because clients that do not read hold too many bytes.
    pub(in crate::backend) fn cut(&self) -> StreamCut {
        self.source.cut()
    }
}

impl<S: Source> Source for FromAgent<S> {
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

impl<K> ToAgent<K> {
    /// Returns the number of the stream in its link.
    pub fn stream_id(&self) -> i64 {
        self.stream_id
    }

    /// Returns the id of the agent that carries the connection, for logs.
    pub fn agent_id(&self) -> &str {
        &self.life.agent.hello.agent_id
    }

    /// Counts the end of the connection. Returns the sink, which reports the reason to the agent, and the use of the agent
    /// connection, which must last until the agent has the sink's bytes.
    pub(crate) fn close(self) -> (K, Use) {
        let agent = &self.life.agent;
        agent.count(Segment::ToAgent, PacketType::CloseReq);
        (self.sink, Use::begin(agent))
    }
}

impl<K: Sink> Sink for ToAgent<K> {
    async fn send_counted(&mut self, chunk: Bytes, progress: &Progress) -> Result<(), CloseReason> {
        self.life.agent.count(Segment::ToAgent, PacketType::Data);
        self.sink.send_counted(chunk, progress).await
    }

    async fn finish(&mut self) -> Result<(), CloseReason> {
        self.sink.finish().await
    }
}

// === impl Life ===

impl Life {
    fn begin(agent: &Arc<NativeAgent>) -> Self {
        agent.open.fetch_add(1, Ordering::Relaxed);
        Self {
            agent: agent.clone(),
            _use: Use::begin(agent),
            _counted: OpenConnection::new(&agent.metrics),
        }
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        self.agent.open.fetch_sub(1, Ordering::Relaxed);
    }
}

// === impl Use ===

impl Use {
    pub(crate) fn begin(agent: &Arc<NativeAgent>) -> Self {
        agent.uses.fetch_add(1, Ordering::Relaxed);
        Self(agent.clone())
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        let agent = &self.0;
        let is_last = agent.uses.fetch_sub(1, Ordering::Relaxed) == 1;
        if is_last && agent.last_stream.load(Ordering::Relaxed) >= RENEW_AFTER {
            agent.abandon();
        }
    }
}
