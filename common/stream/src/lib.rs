//! The one shape of a tunnelled connection: a [`Source`] and a [`Sink`] on either side and a
//! [`pump`](pump::pump) between them, ending with one [`CloseReason`].
//!
//! Front ends and backends adapt their protocols to these traits; none of them knows another.
//! Chunks are [`Bytes`], so that an adapter can hand over a buffer without copying it.

pub mod allowance;
pub mod first_word;
pub mod io;
pub mod pump;

use std::fmt;
use std::time::Duration;

use bytes::Bytes;

/// How long a side may take nothing of what is left for it once the other side has closed. What
/// is slow but moves is waited for, so that no byte sent before a close is lost.
pub const CLOSE_STALL: Duration = Duration::from_secs(30);

/// How long the other end of a shared stream may take no packet at all before those who wait for
/// it give the stream up. Long: a stock peer stops reading while one of its connections is full.
pub const PEER_STALL: Duration = Duration::from_secs(60);

/// How long a connection may live with one direction ended and nothing moving in the other. TCP
/// does not tell a peer that waits for an answer from one that is gone for good; without a bound
/// the latter would be kept for ever. Longer than any answer is waited for.
pub const HALF_OPEN_IDLE: Duration = Duration::from_secs(600);

/// What a front end asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dial {
    /// Always `tcp` from stock front ends; passed on unchecked, the agent decides.
    pub protocol: String,
    /// `host:port` as the agent is to see it.
    pub address: String,
}

/// Why a connection ended. The same value feeds the metric, the log line and what the peer is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CloseReason {
    /// Both directions ended in order.
    Finished,
    /// The client closed the whole connection.
    ClientClosed,
    /// The client's connection broke.
    ClientLost,
    /// The endpoint closed, and the peer in between can not express half of a close.
    EndpointClosed,
    /// The endpoint's connection broke.
    EndpointLost,
    /// The stream to the agent ended under the connection.
    AgentLost,
    /// The stream to the server ended under the connection.
    ServerLost,
    /// One side took no bytes for longer than the stall deadline while its buffer was full.
    Stalled,
    /// One side took bytes, but more slowly than they came through a packet stream, which can not
    /// be slowed down for one connection: its budget was exceeded for too long, or by more than
    /// there is room for.
    BufferExceeded,
    /// One direction had ended and nothing moved in the other for [`HALF_OPEN_IDLE`].
    HalfOpenIdle,
    /// A peer broke the rules of its protocol.
    ProtocolError,
    /// This program is stopping.
    Shutdown,
    /// Nothing moved in either direction for as long as the operator allows.
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

    /// The metric label and log value.
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

/// Where bytes come from.
pub trait Source: Send {
    /// The next chunk, never empty; `None` once this direction ended in order.
    ///
    /// Cancel safe: a dropped call loses no bytes.
    fn recv(&mut self) -> impl Future<Output = Result<Option<Bytes>, CloseReason>> + Send;

    /// After [`recv`](Self::recv) gave `None`: resolves if the whole connection ends although
    /// the other direction is still open. By default it never does.
    fn aborted(&mut self) -> impl Future<Output = CloseReason> + Send {
        std::future::pending()
    }

    /// Runs while the sink is busy with the last chunk: an adapter may take what has arrived
    /// meanwhile, within its bound. Resolves if the connection was aborted, so that nothing more
    /// comes than what [`recv`](Self::recv) still gives. Cancel safe.
    fn fill(&mut self) -> impl Future<Output = ()> + Send {
        std::future::pending()
    }
}

/// Where bytes go.
pub trait Sink: Send {
    /// Takes one chunk, and waits until there is room for it.
    fn send(&mut self, chunk: Bytes) -> impl Future<Output = Result<(), CloseReason>> + Send;

    /// Says that no more bytes follow. An adapter that can not express half of a close ends the
    /// connection instead and returns the reason as an error.
    fn finish(&mut self) -> impl Future<Output = Result<(), CloseReason>> + Send;
}
