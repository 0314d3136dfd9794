//! An open connection through whichever transport carries it.

use bytes::Bytes;
use culvert_stream::{CloseReason, Sink, Source};
use tokio_util::task::TaskTracker;

use super::flow::{FlowSink, FlowSource, FromFlow, ToFlow};
use super::{agent, native};
use crate::router::Held;

/// An open connection to an endpoint. Dropping it closes the connection at its peer.
pub struct Connection {
    /// From the endpoint.
    pub source: FromEndpoint,
    /// To the endpoint.
    pub sink: ToEndpoint,
    /// Says when it has to end although bytes are still queued for its client.
    pub cut: Cut,
}

/// The endpoint's bytes.
pub enum FromEndpoint {
    /// Through a shared packet stream.
    Packet(agent::FromAgent),
    /// Through a stream of its own.
    Native(native::FromAgent),
    /// As a flow of this process.
    Flow(FromFlow),
}

/// The way to the endpoint.
pub enum ToEndpoint {
    /// Through a shared packet stream.
    Packet(agent::ToAgent),
    /// Through a stream of its own.
    Native(native::ToAgent),
    /// As a flow of this process.
    Flow(ToFlow),
}

/// Ends a connection from outside of its two halves, and counts it until it is dropped.
pub struct Cut {
    /// Its client takes no bytes. One with flow control of its own needs no such end: what it does
    /// not take stays at the endpoint.
    stall: Option<agent::Cut>,
    /// Its place among the connections of its tunnel.
    held: Option<Held>,
}

impl Cut {
    /// Resolves when the connection has to end.
    pub async fn due(&self) -> CloseReason {
        let stalled = async {
            match &self.stall {
                Some(cut) => cut.due().await,
                None => std::future::pending().await,
            }
        };
        match self.held.as_ref().and_then(Held::end) {
            None => stalled.await,
            Some(end) => tokio::select! {
                reason = stalled => reason,
                () = end.cancelled() => CloseReason::Switched,
            },
        }
    }
}

impl Connection {
    /// The same connection, counted as its tunnel's.
    pub(crate) fn held_by(mut self, held: Held) -> Self {
        self.cut.held = Some(held);
        self
    }

    fn new(source: FromEndpoint, sink: ToEndpoint, stall: Option<agent::Cut>) -> Self {
        let cut = Cut { stall, held: None };
        Self { source, sink, cut }
    }
}

impl From<agent::Connection> for Connection {
    fn from(connection: agent::Connection) -> Self {
        Self::new(
            FromEndpoint::Packet(connection.source),
            ToEndpoint::Packet(connection.sink),
            Some(connection.cut),
        )
    }
}

impl From<(native::FromAgent, native::ToAgent)> for Connection {
    fn from((source, sink): (native::FromAgent, native::ToAgent)) -> Self {
        Self::new(FromEndpoint::Native(source), ToEndpoint::Native(sink), None)
    }
}

impl From<(Box<dyn FlowSource>, Box<dyn FlowSink>)> for Connection {
    fn from((source, sink): (Box<dyn FlowSource>, Box<dyn FlowSink>)) -> Self {
        Self::new(
            FromEndpoint::Flow(FromFlow(source)),
            ToEndpoint::Flow(ToFlow(sink)),
            None,
        )
    }
}

impl ToEndpoint {
    /// The id by which the peer knows the connection; for logs.
    pub fn connection(&self) -> i64 {
        match self {
            Self::Packet(sink) => sink.connection().0,
            Self::Native(sink) => sink.stream_id().into(),
            Self::Flow(sink) => sink.0.id(),
        }
    }

    /// The agent, or other peer, that carries the connection; for logs.
    pub fn agent_id(&self) -> &str {
        match self {
            Self::Packet(sink) => sink.agent_id(),
            Self::Native(sink) => sink.agent_id(),
            Self::Flow(sink) => sink.0.peer(),
        }
    }

    /// Ends the connection behind everything that was sent, and tells the peer why.
    pub fn end(self, reason: CloseReason, tasks: &TaskTracker) {
        match self {
            // Its drop asks the agent to close.
            Self::Packet(sink) => drop(sink),
            Self::Native(sink) => sink.end(reason, tasks),
            Self::Flow(sink) => sink.0.end(reason, tasks),
        }
    }
}

impl Source for FromEndpoint {
    async fn recv(&mut self) -> Result<Option<Bytes>, CloseReason> {
        match self {
            Self::Packet(source) => source.recv().await,
            Self::Native(source) => source.recv().await,
            Self::Flow(source) => source.recv().await,
        }
    }

    async fn aborted(&mut self) -> CloseReason {
        match self {
            Self::Packet(source) => source.aborted().await,
            Self::Native(source) => source.aborted().await,
            Self::Flow(source) => source.aborted().await,
        }
    }

    async fn fill(&mut self) {
        match self {
            Self::Packet(source) => source.fill().await,
            Self::Native(source) => source.fill().await,
            Self::Flow(source) => source.fill().await,
        }
    }
}

impl Sink for ToEndpoint {
    async fn send(&mut self, chunk: Bytes) -> Result<(), CloseReason> {
        match self {
            Self::Packet(sink) => sink.send(chunk).await,
            Self::Native(sink) => sink.send(chunk).await,
            Self::Flow(sink) => sink.send(chunk).await,
        }
    }

    async fn finish(&mut self) -> Result<(), CloseReason> {
        match self {
            Self::Packet(sink) => sink.finish().await,
            Self::Native(sink) => sink.finish().await,
            Self::Flow(sink) => sink.finish().await,
        }
    }
}
