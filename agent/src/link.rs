//! A native link that may resume.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use culvert_host::net::readahead::ReadAhead;
use culvert_native::resume::{Session, Ticket};
use culvert_native::window::{PING_TIMEOUT, Pings};
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

/// TLS connection that carries HTTP/2.
pub(crate) type Tls = TlsStream<ReadAhead<TcpStream>>;

/// Link to a server that may resume.
pub(crate) struct ResumableLink {
    /// Handle of the link.
    pub session: Arc<Session<Tls>>,
    /// Right to resume the link.
    pub ticket: Ticket,
    /// Socket of the link's TCP connection, which the second link reads; `None` without a second link.
    pub socket: Option<SharedSocket>,
}

/// Socket of the TCP connection to a server, for its counters. Empty after the end of the link; a resumed link has another
/// socket.
pub(crate) type SharedSocket = Arc<Mutex<Option<OwnedFd>>>;

/// Returns the times of pings of a link. A link that may still resume is not given up because of an unanswered ping.
pub(crate) fn pings(keepalive: Duration, grace: Duration) -> Pings {
    Pings {
        timeout: PING_TIMEOUT.max(grace + PING_TIMEOUT / 4),
        ..Pings::with_keepalive(keepalive)
    }
}
