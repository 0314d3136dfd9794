//! The common shape of every tunnelled connection: a [`Source`] and a [`Sink`] on either side, a
//! [`pump`](pump::pump) between them, and one [`CloseReason`] at the end.
//!
//! Front ends and backends adapt protocols to the traits here and do not depend on each other. Chunks are
//! [`Bytes`], so an adapter can pass a buffer on without a copy.

pub mod allowance;
pub mod connection;
pub mod first_word;
pub mod io;
pub mod pump;

use std::fmt;
use std::time::Duration;

use bytes::Bytes;

/// Longest wait for a side that accepts nothing of its remaining bytes after the other side has closed. A
/// slow side that still accepts bytes may continue, so that no byte sent before a close is lost.
pub const CLOSE_STALL: Duration = Duration::from_secs(30);

/// Longest wait for the far end of a shared stream to accept any packet; then the waiting senders give up the
/// stream. Long, because a stock peer stops reading while one of its connections is full.
pub const PEER_STALL: Duration = Duration::from_secs(60);

/// Longest time without movement in a half-open connection, after one direction has ended. TCP cannot
/// distinguish a peer waiting for an answer from a dead peer; without a bound, connections to dead peers
/// would stay forever. Longer than clients wait for an answer.
pub const HALF_OPEN_IDLE: Duration = Duration::from_secs(600);

/// Dial request of a front end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dial {
    /// Always `tcp` from stock front ends; passed on unchecked, the agent decides.
    pub protocol: String,
    /// `host:port` as seen by the agent.
    pub address: String,
}

/// Reason why a connection ended: the same value in the metrics, in the log and in the message to the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CloseReason {
    /// Both directions ended in order.
    Finished,
    /// The client closed the whole connection.
    ClientClosed,
    /// The client's connection broke.
    ClientLost,
    /// The endpoint closed, and the peer in between cannot express a half close.
    EndpointClosed,
    /// The endpoint's connection broke.
    EndpointLost,
    /// The stream to the agent ended before the connection.
    AgentLost,
    /// The stream to the server ended before the connection.
    ServerLost,
    /// One side accepted no bytes for longer than the stall deadline while its buffer was full.
    Stalled,
    /// One side accepted bytes, but more slowly than a packet stream delivered them. A packet stream cannot
    /// be slowed down for one connection, so the connection exceeded its budget for too long, or by more than
    /// the pool had room for.
    BufferExceeded,
    /// One direction had ended, and nothing moved in the other direction for [`HALF_OPEN_IDLE`].
    HalfOpenIdle,
    /// A peer broke the rules of its protocol.
    ProtocolError,
    /// This program is stopping.
    Shutdown,
    /// No byte moved in either direction for the time that the operator allows.
    IdleTimeout,
    /// Traffic was switched to another tunnel, and the time for old connections to end is over.
    Switched,
}

impl CloseReason {
    /// Every reason, for registering metrics.
    pub const ALL: [Self; 14] = [
        Self::Finished,
        Self::ClientClosed,
        Self::ClientLost,
        Self::EndpointClosed,
        Self::EndpointLost,
        Self::AgentLost,
        Self::ServerLost,
        Self::Stalled,
        Self::BufferExceeded,
        Self::HalfOpenIdle,
        Self::ProtocolError,
        Self::Shutdown,
        Self::IdleTimeout,
        Self::Switched,
    ];

    /// Returns the metric label, which is also the log value.
    pub fn label(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::ClientClosed => "client_closed",
            Self::ClientLost => "client_lost",
            Self::EndpointClosed => "endpoint_closed",
            Self::EndpointLost => "endpoint_lost",
            Self::AgentLost => "agent_lost",
            Self::ServerLost => "server_lost",
            Self::Stalled => "stalled",
            Self::BufferExceeded => "buffer_exceeded",
            Self::HalfOpenIdle => "half_open_idle",
            Self::ProtocolError => "protocol_error",
            Self::Shutdown => "shutdown",
            Self::IdleTimeout => "idle_timeout",
            Self::Switched => "switched",
        }
    }
}

impl fmt::Display for CloseReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

/// Source of bytes: the receiving half of one side.
pub trait Source: Send {
    /// Returns the next chunk, never empty, or `None` once this direction has ended in order.
    ///
    /// Cancel safe: a dropped call loses no bytes.
    fn recv(&mut self) -> impl Future<Output = Result<Option<Bytes>, CloseReason>> + Send;

    /// Resolves if the whole connection ends while the other direction is still open. Called after
    /// [`recv`](Self::recv) has returned `None`. The default never resolves.
    fn aborted(&mut self) -> impl Future<Output = CloseReason> + Send {
        std::future::pending()
    }

    /// Runs while the sink is busy with the last chunk. An adapter may buffer arriving bytes meanwhile,
    /// within its bound. Resolves if the connection was aborted: then [`recv`](Self::recv) returns only bytes
    /// already received. Cancel safe.
    fn fill(&mut self) -> impl Future<Output = ()> + Send {
        std::future::pending()
    }
}

/// Sink for bytes: the sending half of one side.
pub trait Sink: Send {
    /// Sends one chunk, once there is room.
    fn send(&mut self, chunk: Bytes) -> impl Future<Output = Result<(), CloseReason>> + Send;

    /// Ends this direction. An adapter that cannot express a half close ends the connection instead and
    /// returns the reason as an error.
    fn finish(&mut self) -> impl Future<Output = Result<(), CloseReason>> + Send;
}
