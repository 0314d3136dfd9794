//! The common shape of every tunnelled connection: a [`Source`] and a [`Sink`] on either side, a
//! [`pump`](pump::pump) between them, and one [`CloseReason`] at the end.
//!
//! Front ends and backends adapt protocols to the traits here and do not depend on each other. Chunks are
//! [`Bytes`], so an adapter can pass a buffer on without a copy.

pub mod allowance;
pub mod connection;
mod delegate;
pub mod first_byte_gate;
pub mod head;
pub mod io;
pub mod progress;
pub mod pump;
pub mod suspicion;

use std::fmt;
use std::time::Duration;

use bytes::Bytes;

use self::progress::Progress;

/// Longest wait for a side that accepts nothing of its remaining bytes after the other side has closed. A
/// slow side that still accepts bytes, or reads bytes from the buffer of a socket that its sink measures
/// ([`measured`](io::WriteSink::measured)), may continue, so that no byte sent before a close is lost.
pub const CLOSE_STALL: Duration = Duration::from_secs(30);

/// Longest wait for the far end of a shared stream to accept any packet; then the waiting senders give up the
/// stream. Long, because a stock peer stops reading while one of its connections is full.
pub const PEER_STALL: Duration = Duration::from_secs(60);

/// Longest duration of a dial at an agent, as in the stock agent.
pub const AGENT_DIAL_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest time without movement in a half-open connection, after one direction has ended. TCP cannot
/// distinguish a peer waiting for an answer from a dead peer; without a bound, connections to dead peers
/// would stay forever. Longer than clients wait for an answer.
pub const HALF_OPEN_IDLE: Duration = Duration::from_secs(600);

/// Shortest round trip of a long path. Paths within a data center are shorter: bulk is fast there, and small windows keep
/// its queue short (docs/decisions/0020).
pub const LONG_PATH: Duration = Duration::from_millis(2);

/// Dial request of a front end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dial {
    /// Always `tcp` from stock front ends; passed on unchecked, the agent decides.
    pub protocol: String,
    /// `host:port` as seen by the agent.
    pub address: String,
}

/// Defines [`CloseReason`]: each variant with its code on the wire and its label in metrics and logs.
macro_rules! close_reasons {
    ($($(#[$doc:meta])+ $reason:ident = $code:literal, $label:literal;)+) => {
        /// Reason why a connection ended: the same value in the metrics, in the log and in the message to
        /// the peer.
        ///
        /// The codes are a contract between releases: a code never changes its meaning, and the code of a
        /// deleted reason is never used again.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum CloseReason {
            $($(#[$doc])+ $reason = $code,)+
        }

        impl CloseReason {
            /// Every reason.
            pub const ALL: [Self; [$($code),+].len()] = [$(Self::$reason),+];

            /// Returns the metric label, which is also the log value.
            pub fn label(self) -> &'static str {
                match self {
                    $(Self::$reason => $label,)+
                }
            }

            /// Returns the code of the reason in messages between peers.
            pub const fn code(self) -> u8 {
                self as u8
            }

            /// Returns the reason with this code; `None` for a code that this version does not know.
            pub const fn from_code(code: u8) -> Option<Self> {
                match code {
                    $($code => Some(Self::$reason),)+
                    _ => None,
                }
            }
        }
    };
}

close_reasons! {
        /// Both directions ended cleanly.
        Finished = 0, "finished";
        /// The client closed the whole connection.
        ClientClosed = 1, "client_closed";
        /// The client's connection broke.
        ClientLost = 2, "client_lost";
        /// The endpoint closed, and the peer in between cannot express a half close.
        EndpointClosed = 3, "endpoint_closed";
        /// The endpoint's connection broke.
        EndpointLost = 4, "endpoint_lost";
        /// The stream to the agent ended while the connection was still open.
        AgentLost = 5, "agent_lost";
        /// The stream to the server ended while the connection was still open.
        ServerLost = 6, "server_lost";
        /// One side accepted no bytes for longer than the stall deadline while its buffer was full.
        Stalled = 7, "stalled";
        /// One side accepted bytes, but more slowly than a packet stream delivered them. A packet stream cannot
        /// be slowed down for one connection, so the connection exceeded its budget for too long, or by more than
        /// the pool had room for.
        BufferExceeded = 8, "buffer_exceeded";
        /// One direction had ended, and nothing moved in the other direction for [`HALF_OPEN_IDLE`], or for the longer time
        /// that front door and node tunnel allow.
        HalfOpenIdle = 9, "half_open_idle";
        /// A peer broke the rules of its protocol.
        ProtocolError = 10, "protocol_error";
        /// This program is stopping.
        Shutdown = 11, "shutdown";
        /// No byte moved in either direction for the time that the operator allows.
        IdleTimeout = 12, "idle_timeout";
        /// Traffic was switched to another tunnel, and the time for old connections to end is over.
        Switched = 13, "switched";
}

impl fmt::Display for CloseReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

/// Source of bytes: the receiving half of one side.
pub trait Source: Send {
    /// Returns the next chunk, never empty, or `None` once this direction has ended cleanly.
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
    fn send(&mut self, chunk: Bytes) -> impl Future<Output = Result<(), CloseReason>> + Send {
        async { self.send_counted(chunk, &Progress::default()).await }
    }

    /// Sends one chunk like [`send`](Self::send). Adds accepted bytes to `progress` at once, so that the caller can tell
    /// a slow side from a side that accepts nothing.
    fn send_counted(
        &mut self,
        chunk: Bytes,
        progress: &Progress,
    ) -> impl Future<Output = Result<(), CloseReason>> + Send;

    /// Ends this direction. An adapter that cannot express a half close ends the connection instead and
    /// returns the reason as an error.
    fn finish(&mut self) -> impl Future<Output = Result<(), CloseReason>> + Send;
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Codes and labels of release 0.1.0. Lines may be added, never changed.
    const RECORDED: [(u8, &str); 14] = [
        (0, "finished"),
        (1, "client_closed"),
        (2, "client_lost"),
        (3, "endpoint_closed"),
        (4, "endpoint_lost"),
        (5, "agent_lost"),
        (6, "server_lost"),
        (7, "stalled"),
        (8, "buffer_exceeded"),
        (9, "half_open_idle"),
        (10, "protocol_error"),
        (11, "shutdown"),
        (12, "idle_timeout"),
        (13, "switched"),
    ];

    #[test]
    fn codes_and_labels_of_close_reasons_never_change() {
        for (code, label) in RECORDED {
            let reason = CloseReason::from_code(code);
            assert_eq!(reason.map(CloseReason::label), Some(label), "code {code}");
            assert_eq!(reason.map(CloseReason::code), Some(code));
        }
        assert_eq!(CloseReason::ALL.len(), RECORDED.len());
        assert_eq!(CloseReason::from_code(14), None);
    }
}
