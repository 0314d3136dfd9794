//! An open connection through whichever transport carries it.

use bytes::Bytes;
use culvert_common::tunnel::{CloseReason, Sink, Source};
use tokio_util::task::TaskTracker;

use super::{agent, native};

/// An open connection to an endpoint. Dropping it closes the connection at the agent.
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
}

/// The way to the endpoint.
pub enum ToEndpoint {
    /// Through a shared packet stream.
    Packet(agent::ToAgent),
    /// Through a stream of its own.
    Native(native::ToAgent),
}

/// Ends a connection whose client takes no bytes. One with flow control of its own needs no such
/// end: what it does not take stays at the endpoint.
pub struct Cut(Option<agent::Cut>);

impl Cut {
    /// Resolves when the connection has to end.
    pub async fn due(&self) -> CloseReason {
        match &self.0 {
            Some(cut) => cut.due().await,
            None => std::future::pending().await,
        }
    }
}

impl From<agent::Connection> for Connection {
    fn from(connection: agent::Connection) -> Self {
        Self {
            source: FromEndpoint::Packet(connection.source),
            sink: ToEndpoint::Packet(connection.sink),
            cut: Cut(Some(connection.cut)),
        }
    }
}

impl From<(native::FromAgent, native::ToAgent)> for Connection {
    fn from((source, sink): (native::FromAgent, native::ToAgent)) -> Self {
        Self {
            source: FromEndpoint::Native(source),
            sink: ToEndpoint::Native(sink),
            cut: Cut(None),
        }
    }
}

impl ToEndpoint {
    /// The id by which the agent knows the connection; for logs.
    pub fn connection(&self) -> i64 {
        match self {
            Self::Packet(sink) => sink.connection().0,
            Self::Native(sink) => sink.stream_id().into(),
        }
    }

    /// The agent that carries the connection; for logs.
    pub fn agent_id(&self) -> &str {
        match self {
            Self::Packet(sink) => sink.agent_id(),
            Self::Native(sink) => sink.agent_id(),
        }
    }

    /// Ends the connection behind everything that was sent, and tells the agent why.
    pub fn end(self, reason: CloseReason, tasks: &TaskTracker) {
        match self {
            // Its drop asks the agent to close.
            Self::Packet(sink) => drop(sink),
            Self::Native(sink) => sink.end(reason, tasks),
        }
    }
}

impl Source for FromEndpoint {
    async fn recv(&mut self) -> Result<Option<Bytes>, CloseReason> {
        match self {
            Self::Packet(source) => source.recv().await,
            Self::Native(source) => source.recv().await,
        }
    }

    async fn aborted(&mut self) -> CloseReason {
        match self {
            Self::Packet(source) => source.aborted().await,
            Self::Native(source) => source.aborted().await,
        }
    }

    async fn fill(&mut self) {
        match self {
            Self::Packet(source) => source.fill().await,
            Self::Native(source) => source.fill().await,
        }
    }
}

impl Sink for ToEndpoint {
    async fn send(&mut self, chunk: Bytes) -> Result<(), CloseReason> {
        match self {
            Self::Packet(sink) => sink.send(chunk).await,
            Self::Native(sink) => sink.send(chunk).await,
        }
    }

    async fn finish(&mut self) -> Result<(), CloseReason> {
        match self {
            Self::Packet(sink) => sink.finish().await,
            Self::Native(sink) => sink.finish().await,
        }
    }
}
