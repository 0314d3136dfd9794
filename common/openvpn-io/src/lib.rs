//! Sockets and tasks around [`culvert_openvpn`], the OpenVPN implementation without I/O, for both roles.
//!
//! ```text
//!             one task for each peer                        any task, any thread
//!  socket <-> wire <-> Session <-> Streams (Flows) <-> pipes <-> Stream (reader, writer)
//!                         ^            ^-- mailbox <-- Peer: dial, forward, close
//!                         +-- Role: decisions of a server or a client
//! ```
//!
//! Packets never leave the task that owns the peer. That task reads and decrypts packets, and its flows write
//! packets straight into the buffer of the socket. Other tasks handle only bytes.

mod batching;
pub mod clock;
pub mod config_file;
pub mod datagrams;
pub mod files;
pub mod link;
mod mailbox;
pub mod metrics;
mod pipe;
pub mod stream;
pub mod streams;
mod wire;

/// A point in time, as passed to [`culvert_openvpn`].
#[allow(
    clippy::disallowed_types,
    reason = "a value that is passed on; the clock is tokio's"
)]
pub type Moment = std::time::Instant;

/// Returns the time of tokio's clock, which tests can pause.
pub fn now() -> Moment {
    tokio::time::Instant::now().into_std()
}
