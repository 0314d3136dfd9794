//! One OpenVPN session in either role, without I/O: control channel, keys, data channel, timers.
//!
//! # Usage
//!
//! * TCP: split the stream into packets (a `u16` length, then the packet) and pass each packet to
//!   [`Session::input`]. UDP: pass each datagram.
//! * After every call with `now`, drain [`Session::poll_event`] and [`Session::poll_output`], then sleep
//!   until [`Session::poll_timeout`] or the next input. At the timeout call [`Session::handle_timeout`].
//! * [`Session::seal`] encrypts outgoing inner packets straight into the owner's buffer. The callback of
//!   [`Session::input`] receives incoming inner packets, decrypted in place. Neither path allocates.
//! * Over TCP, send the bytes of `seal` and `poll_output` in the order of the calls: a stock peer ends the
//!   connection if a packet id goes backwards.

mod client;
mod config;
mod control;
mod event;
mod keys;
mod server;
#[cfg(test)]
pub(crate) mod sim;
mod stats;
#[cfg(test)]
mod tests;
mod timers;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use bytes::{BufMut, BytesMut};

use crate::Role;
use crate::data::OpenError;
use crate::framing;
use crate::negotiation::Negotiation;
use crate::packet::{DataHeader, KeyId, SessionId};
use crate::payload::{EXIT, PING, Payload};
use crate::rate::RateLimit;
use crate::replay::ReplayError;
use crate::tls::PeerIdentity;
use crate::wrap::Wrap;

pub use crate::control::push::NotPushable;
pub use crate::options::Transport;
pub(crate) use config::LARGE_TUN_MTU;
pub use config::{ClientConfig, Common, ServerConfig, Timers};
pub use event::{Authenticated, Ended, Established, Event};
pub use stats::{Dropped, Stats};

use keys::{Agreed, Ids, Keys};
use timers::Clocks;

/// Longest time after the end of a session for which remaining messages are repeated.
const LINGER: Duration = Duration::from_secs(5);

/// Number of texts for the log after a pause, and the time in which another text is allowed.
const NOTICE_BURST: u32 = 5;
const NOTICE_INTERVAL: Duration = Duration::from_secs(10);

/// Options that the server pushes to an accepted client. Each option is one string as in a config file
/// (`route 10.20.0.1`, `topology net30`, `ifconfig 10.20.0.6 10.20.0.5`, `ping 5`), without commas. The
/// session adds the negotiated cipher, peer-id, protocol flags, MTU and compression.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Push {
    /// Options in the order of sending.
    pub options: Vec<String>,
}

/// Role of the session, with its configuration.
#[derive(Clone)]
enum Side {
    Client(Arc<ClientConfig>),
    /// Configuration, and the peer-id for data packets.
    Server(Arc<ServerConfig>, u32),
}

impl Side {
    fn role(&self) -> Role {
        match self {
            Self::Client(_) => Role::Client,
            Self::Server(..) => Role::Server,
        }
    }

    fn common(&self) -> &Common {
        match self {
            Self::Client(config) => &config.common,
            Self::Server(config, _) => &config.common,
        }
    }
}

/// Selects one of the two negotiations of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    /// Negotiation in use.
    Current,
    /// Renegotiation.
    Next,
}

/// State of a session after its end.
struct End {
    /// Time at which the session stops repeating messages.
    until: Instant,
    /// Set when nothing more is sent: after `until`, or without a peer to notify.
    over: bool,
    /// Number of OCC exit notifications still to be sent, one per second.
    exits: u8,
    next_exit: Instant,
}

/// Session with one peer.
pub struct Session {
    side: Side,
    own: SessionId,
    /// Session ids of both sides, once the peer's id is known.
    ids: Option<Ids>,
    wrap: Wrap,
    current: Option<Negotiation>,
    next: Option<Negotiation>,
    keys: Keys,
    agreed: Option<Agreed>,
    /// Server role: state about the client.
    client: server::Client,
    /// Client role: state about the server.
    server: client::Server,
    /// Server role: texts of the PUSH_REPLY.
    reply: Vec<String>,
    /// Texts to be sent after the renegotiation.
    texts: VecDeque<String>,
    events: VecDeque<Event>,
    /// Limit of [`Event::Notice`].
    notices: RateLimit,
    clocks: Clocks,
    ended: Option<End>,
    stats: Stats,
    /// Peer info that a test substitutes for the client's own.
    #[cfg(test)]
    pretended: Option<String>,
    /// Options string that a test substitutes for this side's own.
    #[cfg(test)]
    pretended_options: Option<String>,
}

impl Session {
    /// Creates a session in the client role. [`Session::poll_output`] returns the first packet.
    pub fn client(config: Arc<ClientConfig>, now: Instant) -> Self {
        let first_retry = config.common.timers.tls_timeout;
        let own = SessionId::random(&mut rand::rng());
        let limit = config.connect_timeout;
        let mut this = Self::new(Side::Client(config), own, now);
        let deadline = this.clocks.deadline;
        this.server.answer_by = limit
            .and_then(|limit| now.checked_add(limit))
            .map(|at| at.min(deadline));
        let reset = Negotiation::new(Role::Client, KeyId::FIRST, true, first_retry, now);
        this.current = Some(reset);
        this
    }

    /// Creates a session in the server role, which waits for the client's first packet. Outgoing data packets
    /// contain `peer_id` (24 bits); only a hub uses the value.
    pub fn server(config: Arc<ServerConfig>, peer_id: u32, now: Instant) -> Self {
        let own = SessionId::random(&mut rand::rng());
        Self::new(Side::Server(config, peer_id), own, now)
    }

    /// Creates a session in the server role after a stateless exchange of the RESETs.
    pub(crate) fn after_cookie(
        config: Arc<ServerConfig>,
        peer_id: u32,
        own: SessionId,
        peer: SessionId,
        now: Instant,
    ) -> Self {
        let first_retry = config.common.timers.tls_timeout;
        let mut this = Self::new(Side::Server(config, peer_id), own, now);
        this.ids = Some(Ids { own, peer });
        this.current = Some(Negotiation::after_cookie(first_retry, now));
        this.wrap.skip_first();
        this
    }

    fn new(side: Side, own: SessionId, now: Instant) -> Self {
        let common = side.common();
        let wrap = Wrap::new(common.wrap.clone(), unix_time());
        let clocks = Clocks::new(now, common.timers.hand_window);
        Self {
            side,
            own,
            ids: None,
            wrap,
            current: None,
            next: None,
            keys: Keys::default(),
            agreed: None,
            client: server::Client::default(),
            server: client::Server::default(),
            reply: Vec::new(),
            texts: VecDeque::new(),
            events: VecDeque::new(),
            notices: RateLimit::new(NOTICE_INTERVAL, NOTICE_BURST, now),
            clocks,
            ended: None,
            stats: Stats::default(),
            #[cfg(test)]
            pretended: None,
            #[cfg(test)]
            pretended_options: None,
        }
    }

    /// Processes one packet from the peer, without TCP's length. The packet is decrypted in place, and an
    /// inner packet is passed to `inner`. An error is the reason why the packet was dropped, and is counted
    /// already. Only [`Session::poll_event`] reports the end of the session.
    pub fn input(
        &mut self,
        packet: &mut [u8],
        now: Instant,
        inner: &mut dyn FnMut(&[u8]),
    ) -> Result<(), Dropped> {
        let result = match DataHeader::parse(packet) {
            Some(header) => self.data(header, packet, now, inner),
            None => self.control(packet, now),
        };
        match result {
            Ok(()) => self.clocks.received(now),
            Err(dropped) => self.stats.count(dropped),
        }
        result
    }

    fn data(
        &mut self,
        header: DataHeader,
        packet: &mut [u8],
        now: Instant,
        inner: &mut dyn FnMut(&[u8]),
    ) -> Result<(), Dropped> {
        if self.ended.is_some() {
            return Err(Dropped::Ended);
        }
        let agreed = self.agreed.as_ref().ok_or(Dropped::UnknownKey)?;
        let key = self.keys.named(header.key_id).ok_or(Dropped::UnknownKey)?;
        let payload = key.opener.open(packet, now).map_err(|error| match error {
            OpenError::Replay(ReplayError::Zero) | OpenError::NotData | OpenError::Truncated => {
                Dropped::Malformed
            }
            OpenError::Replay(_) => Dropped::ReplayedData,
            OpenError::Authentication => Dropped::BadData,
        })?;
        key.confirmed = true;
        let finished = self.keys.is_next(header.key_id);
        let payload = agreed.framing.strip(payload).ok_or(Dropped::Compressed)?;
        let payload = Payload::classify(payload);
        if finished {
            // The peer uses the new key, so only its acknowledgements were lost.
            self.renegotiated(now);
        }
        match payload {
            Payload::Inner(packet) => {
                self.stats.packets_in += 1;
                self.stats.bytes_in += packet.len() as u64;
                inner(packet);
            }
            Payload::Ping | Payload::Occ => {}
            Payload::Exit => self.end(Ended::PeerExit, now),
        }
        Ok(())
    }

    /// Encrypts one inner packet and appends the result to `out`, over TCP with its length. Fails before
    /// [`Event::Established`], after the end of the session, and for packets larger than the agreed MTU. On
    /// error `out` is unchanged.
    pub fn seal(
        &mut self,
        inner: &[u8],
        now: Instant,
        out: &mut BytesMut,
    ) -> Result<(), SealError> {
        let agreed = self
            .agreed
            .as_ref()
            .filter(|_| self.ended.is_none())
            .ok_or(SealError::NotEstablished)?;
        if inner.len() > usize::from(agreed.tun_mtu) {
            return Err(SealError::TooLarge);
        }
        self.seal_payload(inner, now, out)?;
        self.stats.packets_out += 1;
        self.stats.bytes_out += inner.len() as u64;
        Ok(())
    }

    /// Seals an inner packet, a ping or an exit notification.
    fn seal_payload(
        &mut self,
        payload: &[u8],
        now: Instant,
        out: &mut BytesMut,
    ) -> Result<(), SealError> {
        let transport = self.side.common().transport;
        let agreed = self.agreed.as_ref().ok_or(SealError::NotEstablished)?;
        let pieces = agreed.framing.frame(payload);
        let (key, newest) = self.keys.sending(now).ok_or(SealError::NotEstablished)?;
        framed(transport, out, |out| {
            let write = |out: &mut BytesMut| pieces.iter().for_each(|piece| out.put_slice(piece));
            key.sealer
                .seal_with(out, write)
                .map_err(|_| SealError::Exhausted)
        })?;
        if newest && key.sealer.is_worn() {
            self.clocks.worn(now);
        }
        self.clocks.sent(now);
        Ok(())
    }

    /// Appends one control packet, ping or exit notification to `out`, over TCP with its length. Returns
    /// false if no packet is due.
    pub fn poll_output(&mut self, now: Instant, out: &mut BytesMut) -> bool {
        self.control_output(now, out) || self.exit_output(now, out) || self.ping_output(now, out)
    }

    fn ping_output(&mut self, now: Instant, out: &mut BytesMut) -> bool {
        if self.ended.is_some() || self.clocks.ping_at().is_none_or(|at| at > now) {
            return false;
        }
        // Restart the interval even if this ping cannot be sent.
        self.clocks.sent(now);
        self.seal_payload(&PING, now, out).is_ok()
    }

    fn exit_output(&mut self, now: Instant, out: &mut BytesMut) -> bool {
        match &mut self.ended {
            Some(end) if end.exits > 0 && end.next_exit <= now => {
                end.exits -= 1;
                end.next_exit = now + Duration::from_secs(1);
            }
            _ => return false,
        }
        self.seal_payload(&EXIT, now, out).is_ok()
    }

    /// Returns the next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Ends the session after the end of the TCP connection. A stock peer that refuses our certificate closes
    /// the connection without sending its TLS alert.
    pub fn disconnected(&mut self, now: Instant) {
        let stage = self.agreed.is_none().then(|| self.stage());
        self.end(Ended::Disconnected { stage }, now);
    }

    /// Ends the session with [`Ended::Closed`]. Over UDP the peer is notified with EXIT in the control
    /// channel or with OCC's EXIT, depending on its abilities. Over TCP the end of the connection is enough.
    pub fn close(&mut self, now: Instant) {
        let udp = self.side.common().transport == Transport::Udp;
        if !self.is_ended() {
            self.close_and_notify(udp, now);
        }
        // Over TCP a session that was never established sends nothing more, even if messages are
        // unacknowledged.
        if !udp
            && self.agreed.is_none()
            && let Some(end) = &mut self.ended
        {
            end.over = true;
        }
    }

    fn close_and_notify(&mut self, udp: bool, now: Instant) {
        let notified = self.agreed.filter(|_| udp);
        // During a renegotiation a control text would have to wait.
        let by_control = notified.is_some_and(|agreed| agreed.cc_exit) && self.next.is_none();
        if by_control {
            self.send_text(crate::control::EXIT, now);
        }
        self.end(Ended::Closed, now);
        if notified.is_some() && !by_control {
            self.send_exits();
        }
    }

    /// Notifies the peer of an ended session with OCC's EXIT, which needs no control channel.
    fn send_exits(&mut self) {
        if let Some(end) = &mut self.ended {
            end.exits = 2;
        }
    }

    /// Ends the session. Only the first call has an effect.
    fn end(&mut self, reason: Ended, now: Instant) {
        if self.ended.is_none() {
            self.stats.rekeys_failed += u64::from(reason.is_failure() && self.next.is_some());
            self.ended = Some(End {
                until: now + LINGER,
                // Without the peer's session id there is no peer to notify.
                over: self.ids.is_none(),
                exits: 0,
                next_exit: now,
            });
            self.events.push_back(Event::Ended(reason));
        }
    }

    /// Returns the names in the peer's certificate; `None` before the certificate is verified.
    pub fn identity(&self) -> Option<PeerIdentity> {
        self.current.as_ref()?.channel()?.identity()
    }

    /// Returns true between [`Event::Established`] and [`Event::Ended`].
    pub fn is_established(&self) -> bool {
        self.agreed.is_some() && self.ended.is_none()
    }

    /// Returns true after [`Event::Ended`].
    pub fn is_ended(&self) -> bool {
        self.ended.is_some()
    }

    /// Returns true if the session has ended and nothing is left to be sent or acknowledged.
    pub fn is_finished(&self) -> bool {
        let active = self.active();
        self.ended.as_ref().is_some_and(|end| {
            let silent =
                active.is_none_or(|active| active.is_drained() && !active.has_pending_acks());
            end.over || silent && end.exits == 0
        })
    }

    /// Returns the negotiation that sends.
    fn active(&self) -> Option<&Negotiation> {
        self.next.as_ref().or(self.current.as_ref())
    }

    /// Returns true if [`Session::poll_event`] has an event.
    pub(crate) fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// Returns true if [`Session::poll_output`] may have a packet now.
    pub(crate) fn has_output(&self, now: Instant) -> bool {
        let due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        let active = self.active();
        let exit = self
            .ended
            .as_ref()
            .filter(|end| end.exits > 0)
            .map(|end| end.next_exit);
        active.is_some_and(|active| active.has_pending_acks() || due(active.timeout()))
            || due(exit)
            || due(self.clocks.ping_at())
    }

    /// Returns true if a new key should be negotiated now.
    pub(crate) fn wants_new_key(&self, now: Instant) -> bool {
        self.next.is_none() && self.clocks.renegotiate_at.is_some_and(|at| at <= now)
    }

    /// Replaces the configuration (server role). New certificates are used from the next negotiation on;
    /// agreed parameters stay.
    pub fn set_config(&mut self, config: Arc<ServerConfig>) {
        if let Side::Server(ours, _) = &mut self.side {
            *ours = config;
        }
    }

    /// Returns the counters.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }
}

/// Returns the Unix time in seconds, for the packet ids of tls-auth and tls-crypt. All packets of a session
/// contain its start time. Nothing else uses the time of day.
pub(crate) fn unix_time() -> u32 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(1, |since| {
        u32::try_from(since.as_secs()).unwrap_or(u32::MAX)
    })
}

/// Appends the output of `build`, over TCP with its length.
fn framed(
    transport: Transport,
    out: &mut BytesMut,
    build: impl FnOnce(&mut BytesMut) -> Result<(), SealError>,
) -> Result<(), SealError> {
    match transport {
        Transport::Tcp => framing::write(out, build),
        Transport::Udp => build(out),
    }
}

/// Reason why an inner packet is dropped instead of sent. The session continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SealError {
    /// The session has no keys yet, or has ended.
    #[error("no established session")]
    NotEstablished,
    /// The packet is larger than the agreed `tun-mtu`.
    #[error("packet larger than the tunnel's MTU")]
    TooLarge,
    /// All packet ids of the key are used, and the next key is not ready.
    #[error("all packet ids of the key are used")]
    Exhausted,
}

impl From<framing::LengthError> for SealError {
    fn from(_: framing::LengthError) -> Self {
        Self::TooLarge
    }
}
