//! A single session, or a hub with a session for each client of a UDP socket. The newest established session
//! of a hub is its current session.

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::BytesMut;
use culvert_openvpn::hub::{Hub, Limits, PeerId};
use culvert_openvpn::session::{
    ClientConfig, Event, Push, SealError, ServerConfig, Session, Stats, Transport,
};
use tokio::time::Instant;

/// The session or the hub of an endpoint; see the module.
pub(super) enum Core {
    One(Box<Session>),
    Hub {
        hub: Box<Hub>,
        /// The client that waits for admission.
        asking: Option<PeerId>,
        /// The client that was accepted last.
        current: Option<PeerId>,
        /// The clients at the time of the close; the endpoint waits until their sessions are gone. New
        /// sessions of returning clients do not count.
        leaving: Option<Vec<PeerId>>,
        /// The last known counters of the current session.
        stats: Stats,
    },
}

impl Core {
    pub(super) fn client(config: ClientConfig) -> Self {
        Self::One(Box::new(Session::client(Arc::new(config), now())))
    }

    pub(super) fn server(config: ServerConfig) -> Self {
        let config = Arc::new(config);
        match config.common.transport {
            Transport::Tcp => Self::One(Box::new(Session::server(config, 7, now()))),
            Transport::Udp => Self::Hub {
                hub: Box::new(Hub::new(config, Limits::default(), now())),
                asking: None,
                current: None,
                leaving: None,
                stats: Stats::default(),
            },
        }
    }

    /// Handles a received packet. The counters include dropped packets.
    pub(super) fn input(
        &mut self,
        from: SocketAddr,
        packet: &mut [u8],
        inner: &mut dyn FnMut(&[u8]),
    ) {
        match self {
            Self::One(session) => drop(session.input(packet, now(), inner)),
            Self::Hub { hub, .. } => {
                hub.input(from, packet, now(), &mut |_, packet| inner(packet));
            }
        }
    }

    /// Returns the next packet to send. A hub also returns the address of the peer.
    pub(super) fn poll_output(&mut self) -> Option<(BytesMut, Option<SocketAddr>)> {
        let mut packet = BytesMut::new();
        match self {
            Self::One(session) => session
                .poll_output(now(), &mut packet)
                .then_some((packet, None)),
            Self::Hub { hub, .. } => {
                let to = hub.poll_output(now(), &mut packet)?;
                Some((packet, Some(to.remote)))
            }
        }
    }

    /// Encrypts an inner packet. A hub also returns the address of the peer.
    pub(super) fn seal(
        &mut self,
        inner: &[u8],
    ) -> Result<(BytesMut, Option<SocketAddr>), SealError> {
        let mut packet = BytesMut::new();
        let to = match self {
            Self::One(session) => session.seal(inner, now(), &mut packet).map(|()| None)?,
            Self::Hub { hub, current, .. } => {
                let peer = current.ok_or(SealError::NotEstablished)?;
                Some(hub.seal(peer, inner, now(), &mut packet)?.remote)
            }
        };
        Ok((packet, to))
    }

    pub(super) fn poll_event(&mut self) -> Option<Event> {
        match self {
            Self::One(session) => session.poll_event(),
            Self::Hub {
                hub,
                asking,
                current,
                ..
            } => loop {
                let (peer, event) = hub.poll_event()?;
                match event {
                    Event::Authenticated(_) => *asking = Some(peer),
                    Event::Established(_) => *current = Some(peer),
                    // Skip events of all sessions except the current session.
                    _ if current.is_some_and(|current| current != peer) => continue,
                    _ => {}
                }
                return Some(event);
            },
        }
    }

    pub(super) fn accept(&mut self, options: Vec<String>) {
        let push = Push { options };
        let accepted = match self {
            Self::One(session) => session.accept(push, now()),
            Self::Hub { hub, asking, .. } => {
                let peer = asking.take().expect("a client that waits for admission");
                hub.with(peer, now(), |session| session.accept(push, now()))
                    .unwrap_or(Ok(()))
            }
        };
        accepted.expect("options that can be pushed");
    }

    pub(super) fn close(&mut self) {
        match self {
            Self::One(session) => session.close(now()),
            Self::Hub { hub, leaving, .. } => {
                let peers: Vec<PeerId> = hub.peers().collect();
                for peer in &peers {
                    hub.with(*peer, now(), |session| session.close(now()));
                }
                *leaving = Some(peers);
            }
        }
    }

    /// Reports the end of a stream transport.
    pub(super) fn disconnected(&mut self) {
        if let Self::One(session) = self {
            session.disconnected(now());
        }
    }

    pub(super) fn timeout(&self) -> Option<Instant> {
        let at = match self {
            Self::One(session) => session.poll_timeout(),
            Self::Hub { hub, .. } => hub.poll_timeout(),
        };
        at.map(Instant::from_std)
    }

    pub(super) fn handle_timeout(&mut self) {
        match self {
            Self::One(session) => session.handle_timeout(now()),
            Self::Hub { hub, .. } => hub.handle_timeout(now()),
        }
    }

    fn session(&self) -> Option<&Session> {
        match self {
            Self::One(session) => Some(session),
            Self::Hub { hub, current, .. } => hub.session((*current)?),
        }
    }

    pub(super) fn is_established(&self) -> bool {
        self.session().is_some_and(Session::is_established)
    }

    /// Returns true if the session has ended and has sent its goodbye. A hub continues until it is closed.
    pub(super) fn is_finished(&self) -> bool {
        match self {
            Self::One(session) => session.is_finished(),
            Self::Hub { hub, leaving, .. } => leaving
                .as_ref()
                .is_some_and(|leaving| leaving.iter().all(|peer| hub.session(*peer).is_none())),
        }
    }

    /// Returns the counters of the current session. For a hub, counters with equal names are added.
    pub(super) fn stats(&mut self) -> Stats {
        let seen = self.session().map(|session| *session.stats());
        match self {
            Self::One(_) => seen.unwrap_or_default(),
            Self::Hub { hub, stats, .. } => {
                *stats = seen.unwrap_or(*stats);
                let of_none = hub.stats();
                Stats {
                    malformed: stats.malformed + of_none.malformed,
                    bad_wrap: stats.bad_wrap + of_none.bad_wrap,
                    ..*stats
                }
            }
        }
    }
}

/// Returns the time of the runtime's clock, which a test may pause.
#[allow(clippy::disallowed_types)]
pub(super) fn now() -> std::time::Instant {
    Instant::now().into_std()
}
