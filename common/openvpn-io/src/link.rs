//! One peer on one socket, in one task: TCP in both roles, UDP only for a client.
//!
//! In a turn, the task decrypts the received packets and passes them to the flows, whose bytes go to their
//! handles. Then the task encrypts the output of the flows and of the control channel into one buffer, and
//! writes the buffer. Finally the task yields, so that the tasks of the handles can process their bytes.

use std::future::{Future as _, poll_fn};
use std::io;
use std::task::{Context, Poll};

use culvert_openvpn::framing::LengthError;
use culvert_openvpn::session::{Ended, Event, Session, Stats};
use tokio::net::{TcpStream, UdpSocket};
use tokio_util::sync::CancellationToken;

use super::clock::{Clock, LINK_GOODBYE};
use super::stream::Incoming;
use super::streams::Streams;
use super::wire::Wire;
use super::{Moment, now};

pub use super::wire::WireError;

/// Batches written in one turn.
const BATCHES: usize = 4;

/// Decisions of a role about one peer. The methods must not block.
pub trait Role: Send {
    /// Handles an event of the session. A server answers [`Event::Authenticated`] with `accept` or `reject`
    /// of the session, also in a later turn. Both roles create the peer's streams at [`Event::Established`].
    fn event(
        &mut self,
        event: Event,
        session: &mut Session,
        streams: &mut Option<Streams>,
        now: Moment,
    );

    /// Handles a packet from the tunnel, usually with [`Streams::input`].
    fn packet(&mut self, packet: &[u8], streams: &mut Streams, now: Moment);

    /// Handles the request of a host behind the peer to open a flow. Dropping `incoming` refuses the flow.
    fn incoming(&mut self, incoming: Incoming) {
        drop(incoming);
    }

    /// Runs before each turn, to update certificates and to make decisions that wait for a file. `cx` has the waker
    /// for a decision that is ready.
    fn turn(&mut self, session: &mut Session, cx: &mut Context<'_>) {
        let _ = (session, cx);
    }

    /// Reports the counters: about once a second while there is traffic, and at the end.
    fn report(&mut self, session: &Stats, streams: Option<&Streams>, dropped: u64) {
        let _ = (session, streams, dropped);
    }
}

/// Reason for the end of a link.
#[derive(Debug, thiserror::Error)]
pub enum LinkEnd {
    /// The session ended.
    #[error(transparent)]
    Session(Ended),
    /// The socket failed or was closed.
    #[error(transparent)]
    Wire(WireError),
}

/// A peer's socket, session and streams.
pub struct Link<R> {
    role: R,
    session: Session,
    streams: Option<Streams>,
    wire: Wire,
    clock: Clock,
    /// Reason for the end of the session, and the deadline for its final messages.
    ended: Option<(Ended, Moment)>,
    /// Inner packets that could not be encrypted.
    dropped: u64,
}

impl<R: Role> Link<R> {
    /// Creates a link over a TCP connection. `tun_mtu` is the MTU of the session.
    pub fn tcp(stream: TcpStream, session: Session, tun_mtu: u16, role: R) -> Self {
        Self::new(Wire::tcp(stream, tun_mtu), session, role)
    }

    /// Creates a link over a UDP socket that is connected to the peer.
    ///
    /// # Errors
    /// Fails if the socket cannot be used.
    pub fn udp(socket: UdpSocket, session: Session, role: R) -> io::Result<Self> {
        Ok(Self::new(Wire::udp(socket)?, session, role))
    }

    fn new(wire: Wire, session: Session, role: R) -> Self {
        Self {
            role,
            session,
            streams: None,
            wire,
            clock: Clock::default(),
            ended: None,
            dropped: 0,
        }
    }

    /// Serves the peer until the link ends. Once `shutdown` fires, the session is closed, and the peer is
    /// notified if its transport requires a notification.
    pub async fn run(mut self, shutdown: &CancellationToken) -> (R, LinkEnd) {
        let end = self.serve(shutdown).await;
        self.report();
        (self.role, end)
    }

    async fn serve(&mut self, shutdown: &CancellationToken) -> LinkEnd {
        let mut stopping = std::pin::pin!(shutdown.cancelled());
        let mut stopped = false;
        loop {
            let turn = poll_fn(|cx| {
                if !stopped && stopping.as_mut().poll(cx).is_ready() {
                    stopped = true;
                    self.session.close(now());
                }
                self.poll_turn(cx)
            });
            match turn.await {
                Ok(()) => {}
                Err(error) => {
                    if error.is_hangup() {
                        let now = now();
                        // The session reports the stage of an unfinished handshake. The call has no effect if
                        // the session has already ended.
                        self.session.disconnected(now);
                        self.work(now);
                    }
                    return match self.ended.take() {
                        Some((ended, _)) => LinkEnd::Session(ended),
                        None => LinkEnd::Wire(error),
                    };
                }
            }
            if self.is_over(now())
                && let Some((ended, _)) = self.ended.take()
            {
                return LinkEnd::Session(ended);
            }
            tokio::task::yield_now().await;
        }
    }

    /// Runs one turn. Ready after progress, when there may be more work.
    fn poll_turn(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), WireError>> {
        let mut active = false;
        self.role.turn(&mut self.session, cx);
        // Every packet of the peer may need an acknowledgement. A peer that reads nothing is not read either.
        if self.wire.has_control_room() {
            match self.wire.poll_fill(self.streams.is_some(), cx) {
                Poll::Ready(Ok(())) => {
                    active = true;
                    self.take_batch()?;
                }
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => {}
            }
        }
        let now = now();
        self.handle_timers(now);
        self.work(now);
        let written = self.write(now, cx)?;
        // Processes flows that ended while sending, and mail that arrived meanwhile.
        self.work(now);
        if active || written {
            self.clock.report_soon(now);
            return Poll::Ready(Ok(()));
        }
        if self.is_over(now) {
            return Poll::Ready(Ok(()));
        }
        self.poll_wait(cx)
    }

    /// Returns true if the session has ended and its final messages are sent or their deadline has passed.
    fn is_over(&self, now: Moment) -> bool {
        let said = self.session.is_finished() && self.wire.is_empty();
        self.ended
            .as_ref()
            .is_some_and(|(_, until)| said || *until <= now)
    }

    fn take_batch(&mut self) -> Result<(), LengthError> {
        let now = now();
        let Self {
            role,
            session,
            streams,
            wire,
            ended,
            ..
        } = self;
        let mut heard = false;
        let taken = wire.packets(|packet| {
            let taken = session.input(packet, now, &mut |inner| {
                if let Some(streams) = streams {
                    role.packet(inner, streams, now);
                }
            });
            heard |= taken.is_ok();
            // The next packet may depend on the effects of these events.
            events(role, session, streams, ended, now);
        });
        if heard && let Some(streams) = &mut self.streams {
            streams.heard(now);
        }
        taken
    }

    fn handle_timers(&mut self, now: Moment) {
        if self.session.poll_timeout().is_some_and(|at| at <= now) {
            self.session.handle_timeout(now);
        }
        self.wire.handle_timeout(now);
        if self.clock.take_report(now) {
            self.report();
        }
    }

    fn report(&mut self) {
        self.role
            .report(self.session.stats(), self.streams.as_ref(), self.dropped);
    }

    fn work(&mut self, now: Moment) {
        let Self {
            role,
            session,
            streams,
            ended,
            ..
        } = self;
        if let Some(streams) = streams {
            streams.work(now, &mut |incoming| role.incoming(incoming));
            if streams.take_close() {
                session.close(now);
            }
        }
        events(role, session, streams, ended, now);
        if self.ended.is_some() && self.streams.is_some() {
            self.report();
            self.streams = None;
        }
    }

    /// Collects packets and writes them. Returns true if there may be more to write now.
    fn write(&mut self, now: Moment, cx: &mut Context<'_>) -> Result<bool, WireError> {
        for _ in 0..BATCHES {
            self.collect(now);
            if self.wire.is_empty() || self.wire.poll_flush(cx)?.is_pending() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn collect(&mut self, now: Moment) {
        let Self {
            session,
            streams,
            wire,
            dropped,
            ..
        } = self;
        // Collected even if the buffer is full, because a session with pending output requests turns until all
        // of it is collected. The limit on reading bounds the amount.
        loop {
            let start = wire.out().len();
            if !session.poll_output(now, wire.out()) {
                break;
            }
            wire.cut(start);
        }
        let Some(streams) = streams else {
            return;
        };
        streams.poll_output(now, &mut |packet| {
            if !wire.has_room() {
                return false;
            }
            let start = wire.out().len();
            match session.seal(packet, now, wire.out()) {
                Ok(()) => wire.cut(start),
                // The packet is lost. A later retransmission of the data succeeds unless the packet is too
                // large or the session has ended.
                Err(_) => *dropped += 1,
            }
            true
        });
    }

    fn poll_wait(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), WireError>> {
        if let Some(streams) = &self.streams
            && streams.poll_mail(cx).is_ready()
        {
            return Poll::Ready(Ok(()));
        }
        let timeouts = [
            self.session.poll_timeout(),
            self.streams.as_ref().and_then(Streams::poll_timeout),
            self.wire.poll_timeout(),
            self.ended.as_ref().map(|(_, until)| *until),
        ];
        let timeouts = timeouts.into_iter().flatten();
        self.clock.poll_until(timeouts, cx).map(Ok)
    }
}

/// Passes the events of a session to its role.
fn events<R: Role>(
    role: &mut R,
    session: &mut Session,
    streams: &mut Option<Streams>,
    ended: &mut Option<(Ended, Moment)>,
    now: Moment,
) {
    while let Some(event) = session.poll_event() {
        if let Event::Ended(reason) = &event {
            ended.get_or_insert((reason.clone(), now + LINK_GOODBYE));
        }
        role.event(event, session, streams, now);
    }
}

#[cfg(test)]
mod tests;
