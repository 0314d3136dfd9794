//! An open connection to an endpoint, independent of the transport.

use bytes::Bytes;
use culvert_native::halves::{NativeSink, NativeSource};
use culvert_native::quic::halves::{QuicSink, QuicSource};
use culvert_native::quic::streams::StreamCut;
use culvert_openvpn_io::stream::FlowSource;
use culvert_stream::progress::Progress;
use culvert_stream::{CloseReason, Sink, Source};
use tokio_util::task::TaskTracker;

use super::dial::DialError;
use super::flow::ToClient;
use super::load::LoadGuard;
use super::usage::DialGuard;
use super::{agent, native};

/// An open connection to an endpoint. Dropping it closes the connection at the peer.
pub struct Connection {
    /// Bytes from the endpoint.
    pub source: FromEndpoint,
    /// Bytes to the endpoint.
    pub sink: ToEndpoint,
    /// Signals that the connection must end although bytes are still queued for its client.
    pub cut: Cut,
}

/// Source of the endpoint's bytes.
pub enum FromEndpoint {
    /// Source on a shared packet stream.
    Packet(agent::FromAgent),
    /// Source on a separate native stream.
    Native(native::FromAgent<NativeSource>),
    /// Source on a stream of a QUIC link.
    Quic(native::FromAgent<QuicSource>),
    /// Source of a flow that ends in this process.
    Flow(FlowSource),
}

/// Sink for bytes to the endpoint.
pub enum ToEndpoint {
    /// Sink on a shared packet stream.
    Packet(agent::ToAgent),
    /// Sink on a separate native stream.
    Native(native::ToAgent<NativeSink>),
    /// Sink on a stream of a QUIC link.
    Quic(native::ToAgent<QuicSink>),
    /// Sink of a flow that ends in this process.
    Flow(ToClient),
}

/// Signals when a connection must end, independently of its source and sink. The connection counts as open in
/// its tunnel until the `Cut` is dropped.
pub struct Cut {
    /// Ends a connection whose client accepts no bytes. `None` for transports that bound the bytes of each
    /// connection by its window.
    stall: Option<Stall>,
    /// The connection's entry in the counts of its tunnel.
    guard: Option<DialGuard>,
    /// The connection's share in the load of its agent connection.
    load: Option<LoadGuard>,
}

/// Signals that a connection must end because its client accepts no bytes.
enum Stall {
    Packet(agent::Cut),
    Quic(StreamCut),
}

impl Stall {
    async fn due(&self) -> CloseReason {
        match self {
            // Boxed, so that only connections on packet streams need memory for this check.
            Self::Packet(cut) => Box::pin(cut.due()).await,
            Self::Quic(cut) => {
                cut.due().await;
                CloseReason::BufferExceeded
            }
        }
    }
}

impl Cut {
    /// Resolves when the connection must end.
    pub async fn due(&self) -> CloseReason {
        let stalled = async {
            match &self.stall {
                Some(cut) => cut.due().await,
                None => std::future::pending().await,
            }
        };
        match self.guard.as_ref().and_then(DialGuard::end) {
            None => stalled.await,
            Some(end) => tokio::select! {
                reason = stalled => reason,
                () = end.cancelled() => CloseReason::Switched,
            },
        }
    }
}

impl DialGuard {
    /// Records the outcome of the dial. An open connection keeps the guard.
    ///
    /// # Errors
    /// Returns the error of a failed dial.
    pub fn settle(self, outcome: Result<Connection, DialError>) -> Result<Connection, DialError> {
        match outcome {
            Ok(mut connection) => {
                connection.cut.guard = Some(self.opened());
                Ok(connection)
            }
            Err(error) => {
                self.failed(&error);
                Err(error)
            }
        }
    }
}

impl Connection {
    /// Counts the connection as load of its agent connection, until the connection ends.
    pub(super) fn with_load(mut self, load: LoadGuard) -> Self {
        self.cut.load = Some(load);
        self
    }

    fn new(source: FromEndpoint, sink: ToEndpoint, stall: Option<Stall>) -> Self {
        let cut = Cut {
            stall,
            guard: None,
            load: None,
        };
        Self { source, sink, cut }
    }
}

impl From<(agent::FromAgent, agent::ToAgent)> for Connection {
    fn from((source, sink): (agent::FromAgent, agent::ToAgent)) -> Self {
        let stall = Some(Stall::Packet(sink.cut()));
        Self::new(
            FromEndpoint::Packet(source),
            ToEndpoint::Packet(sink),
            stall,
        )
    }
}

impl From<(native::FromAgent<NativeSource>, native::ToAgent<NativeSink>)> for Connection {
    fn from(
        (source, sink): (native::FromAgent<NativeSource>, native::ToAgent<NativeSink>),
    ) -> Self {
        Self::new(FromEndpoint::Native(source), ToEndpoint::Native(sink), None)
    }
}

impl From<(native::FromAgent<QuicSource>, native::ToAgent<QuicSink>)> for Connection {
    fn from((source, sink): (native::FromAgent<QuicSource>, native::ToAgent<QuicSink>)) -> Self {
        let stall = Some(Stall::Quic(source.cut()));
        Self::new(FromEndpoint::Quic(source), ToEndpoint::Quic(sink), stall)
    }
}

impl From<(FlowSource, ToClient)> for Connection {
    fn from((source, sink): (FlowSource, ToClient)) -> Self {
        Self::new(FromEndpoint::Flow(source), ToEndpoint::Flow(sink), None)
    }
}

impl ToEndpoint {
    /// Returns the id of the connection in its transport, for logs.
    pub fn connection(&self) -> i64 {
        match self {
            Self::Packet(sink) => sink.connection().0,
            Self::Native(sink) => sink.stream_id(),
            Self::Quic(sink) => sink.stream_id(),
            Self::Flow(sink) => sink.id(),
        }
    }

    /// Returns the name of the agent or other peer that carries the connection, for logs.
    pub fn agent_id(&self) -> &str {
        match self {
            Self::Packet(sink) => sink.agent_id(),
            Self::Native(sink) => sink.agent_id(),
            Self::Quic(sink) => sink.agent_id(),
            Self::Flow(sink) => sink.peer(),
        }
    }

    /// Returns true if the client has ended, and the peer answers with the close of the whole connection.
    pub fn client_ended(&self) -> bool {
        match self {
            Self::Packet(sink) => sink.client_ended(),
            Self::Native(_) | Self::Quic(_) | Self::Flow(_) => false,
        }
    }

    /// Returns the remedy if the connection is closed because its client reads too slowly.
    pub fn advice_for_slow_client(&self) -> &'static str {
        match self {
            Self::Packet(_) => {
                "A stock agent cannot be slowed down for one connection; a culvert-agent with flow control for each \
                 connection can. For longer bursts raise --excess-buffer-bytes or --stall-timeout"
            }
            Self::Native(_) | Self::Quic(_) | Self::Flow(_) => {
                "Too many clients of the agent's connections read nothing, and this client stopped first; find the clients \
                 that stopped reading"
            }
        }
    }

    /// Ends the connection after all sent bytes, and reports the reason to the peer if the transport can
    /// carry a reason.
    pub fn end(self, reason: CloseReason, tasks: &TaskTracker) {
        match self {
            Self::Packet(sink) => sink.end(tasks),
            Self::Native(sink) => {
                let (sink, in_use) = sink.close();
                sink.end_holding(in_use, reason, tasks);
            }
            Self::Quic(sink) => {
                let (sink, in_use) = sink.close();
                sink.end_holding(in_use, reason, tasks);
            }
            Self::Flow(sink) => sink.end(reason, tasks),
        }
    }
}

/// Evaluates an expression with the half of any transport.
macro_rules! with_half {
    ($self:ident, $half:ident => $value:expr) => {
        match $self {
            Self::Packet($half) => $value,
            Self::Native($half) => $value,
            Self::Quic($half) => $value,
            Self::Flow($half) => $value,
        }
    };
}

impl Source for FromEndpoint {
    async fn recv(&mut self) -> Result<Option<Bytes>, CloseReason> {
        with_half!(self, source => source.recv().await)
    }

    async fn aborted(&mut self) -> CloseReason {
        with_half!(self, source => source.aborted().await)
    }

    async fn fill(&mut self) {
        with_half!(self, source => source.fill().await);
    }
}

impl Sink for ToEndpoint {
    async fn send_counted(&mut self, chunk: Bytes, progress: &Progress) -> Result<(), CloseReason> {
        with_half!(self, sink => sink.send_counted(chunk, progress).await)
    }

    async fn finish(&mut self) -> Result<(), CloseReason> {
        with_half!(self, sink => sink.finish().await)
    }
}
