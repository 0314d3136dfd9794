//! Sockets and tasks around the sans-IO OpenVPN endpoint of [`culvert_openvpn`], for both roles.
//!
//! ```text
//!             one task for each peer                        any task, any thread
//!  socket <-> wire <-> Session <-> Streams (Flows) <-> pipes <-> Stream (reader, writer)
//!                         ^            ^-- mailbox <-- Peer: dial, forward, close
//!                         +-- Role: what a server or a client decides
//! ```
//!
//! Packets never leave the owner's task: they are decrypted where they were read, and written by
//! the flows straight into the buffer that goes to the socket. Other tasks see bytes only.

mod batching;
pub mod config_file;
pub mod datagrams;
pub mod files;
pub mod link;
mod mailbox;
mod pipe;
pub mod stream;
pub mod streams;
mod wire;

/// A point in time as the endpoint is told it.
#[allow(
    clippy::disallowed_types,
    reason = "a value that is passed on; the clock is tokio's"
)]
pub type Moment = std::time::Instant;

/// The time of tokio's clock, which tests can pause.
pub fn now() -> Moment {
    tokio::time::Instant::now().into_std()
}
