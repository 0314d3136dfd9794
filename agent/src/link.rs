//! A native link that may resume.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use culvert_host::net::loss::Packets;
use culvert_host::net::readahead::ReadAhead;
use culvert_host::telemetry::metrics::GaugeGuard;
use culvert_host::tls::ClientStream;
use culvert_native::resume::{AWAY_PATIENCE, Session, State, Ticket};
use metrics::Gauge;
use parking_lot::Mutex;
use socket2::SockRef;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::sleep;

use crate::metrics::AgentMetrics;

/// TLS connection that carries HTTP/2.
pub(crate) type Tls = ClientStream<ReadAhead<TcpStream>>;

/// Link to a server that may resume.
pub(crate) struct ResumableLink {
    /// Handle of the link.
    pub session: Arc<Session<Tls>>,
    /// Right to resume the link.
    pub ticket: Ticket,
    /// Socket of the link's TCP connection, which the second link reads; `None` without a second link.
    pub socket: Option<SharedSocket>,
    /// Signals each answer of the server to the search.
    pub answered: Arc<Notify>,
}

/// Socket of the TCP connection to a server, for its counters.
pub(crate) type SharedSocket = Arc<Mutex<LinkSocket>>;

/// The socket of a link, and the number of sockets before it.
pub(crate) struct LinkSocket {
    /// `None` after the end of the link.
    socket: Option<OwnedFd>,
    generation: u64,
    replaced: Arc<Notify>,
    /// True while the server is also connected over QUIC.
    has_quic: bool,
}

/// Counts a server as away until its link resumes, or until the value is dropped.
pub(crate) struct Absence {
    gauge: Gauge,
    away: Option<GaugeGuard>,
}

// === impl LinkSocket ===

impl LinkSocket {
    /// Creates the first socket of a link.
    pub(crate) fn new(socket: OwnedFd) -> Self {
        Self {
            socket: Some(socket),
            generation: 0,
            replaced: Arc::default(),
            has_quic: false,
        }
    }

    /// Returns the address of the server, if the socket is connected.
    pub(crate) fn server(&self) -> Option<SocketAddr> {
        let socket = SockRef::from(self.socket.as_ref()?);
        socket.peer_addr().ok()?.as_socket()
    }

    /// Returns a signal of the next replacement. One replacement before the wait counts.
    pub(crate) fn replaced(&self) -> Arc<Notify> {
        self.replaced.clone()
    }

    /// Replaces the socket: the link has resumed.
    pub(crate) fn replace(&mut self, socket: Option<OwnedFd>) {
        self.socket = socket;
        self.generation += 1;
        self.replaced.notify_one();
    }

    /// Closes the socket: the link has ended.
    pub(crate) fn close(&mut self) {
        self.socket = None;
    }

    /// Records the start or the end of a QUIC link to the server.
    pub(crate) fn set_quic(&mut self, has_quic: bool) {
        self.has_quic = has_quic;
    }

    /// Returns true if the server is also connected over QUIC.
    pub(crate) fn has_quic(&self) -> bool {
        self.has_quic
    }

    /// Returns the counters of the socket, and its generation: the counters of two sockets cannot be compared.
    pub(crate) fn packets(&self) -> Option<(u64, Packets)> {
        let packets = Packets::of_tcp(self.socket.as_ref()?)?;
        Some((self.generation, packets))
    }
}

// === impl Absence ===

impl Absence {
    /// Creates the count for one link.
    pub(crate) fn new(metrics: &AgentMetrics) -> Self {
        Self {
            gauge: metrics.servers_away.clone(),
            away: None,
        }
    }

    /// Returns true if the link is broken.
    pub(crate) fn is_away(&self) -> bool {
        self.away.is_some()
    }

    /// Follows the state of a link, and calls `changed` after each change of [`Absence::is_away`] and [`Session::is_gone`]. Never
    /// ends. Cancel safe.
    pub(crate) async fn follow<T>(&mut self, session: Option<&Session<T>>, changed: impl Fn()) {
        let Some(session) = session else {
            return std::future::pending().await;
        };
        let mut state = session.state();
        loop {
            let now = *state.borrow_and_update();
            match (now, &self.away) {
                (State::Away, None) => {
                    self.away = Some(GaugeGuard::new(&self.gauge));
                    changed();
                }
                (State::Attached | State::Silent, Some(_)) => {
                    self.away = None;
                    changed();
                }
                _ => {}
            }
            let is_away = self.away.is_some();
            let patience = async {
                match is_away {
                    true => sleep(AWAY_PATIENCE).await,
                    false => std::future::pending().await,
                }
            };
            tokio::select! {
                next = state.changed() => if next.is_err() {
                    return std::future::pending().await;
                },
                () = patience => changed(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]

    use std::net::{TcpListener, TcpStream};

    use std::time::Duration;

    use culvert_native::resume::ResumableIo;
    use futures_util::FutureExt as _;
    use tokio::io::AsyncReadExt as _;

    use super::*;

    #[tokio::test]
    async fn replaced_socket_shows_the_new_address() {
        let listeners = [0, 1].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
        let addresses = [0, 1].map(|at: usize| listeners[at].local_addr().unwrap());
        let connect = |at: usize| OwnedFd::from(TcpStream::connect(addresses[at]).unwrap());
        let mut link = LinkSocket::new(connect(0));
        let replaced = link.replaced();
        assert_eq!(link.server(), Some(addresses[0]));
        assert_eq!(replaced.notified().now_or_never(), None);
        link.replace(Some(connect(1)));
        assert_eq!(link.server(), Some(addresses[1]));
        assert_eq!(replaced.notified().now_or_never(), Some(()));
        link.close();
        assert_eq!(link.server(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn server_is_gone_after_it_was_away_for_five_seconds() {
        let (near, far) = tokio::io::duplex(64);
        let mut link = ResumableIo::opening(near, Arc::default(), Duration::from_secs(60));
        let session = link.session();
        let mut absence = Absence::new(&AgentMetrics::new().unwrap());
        assert!(!session.is_gone());
        drop(far);
        let changes = Mutex::new(Vec::new());
        let mut byte = [0; 1];
        tokio::select! {
            _ = link.read(&mut byte) => panic!("the link has ended"),
            () = absence.follow(Some(session.as_ref()), || changes.lock().push(session.is_gone())) => {}
            () = sleep(AWAY_PATIENCE + Duration::from_secs(1)) => {}
        }
        assert_eq!(*changes.lock(), [false, true]);
    }
}
