//! One OpenVPN session in either role, without I/O: control channel, keys, data channel, timers.
//!
//! # How an owner drives it
//!
//! * TCP: cut the stream into packets (`u16` length, then so many bytes) and give each to
//!   [`Session::input`]; UDP: give it each datagram.
//! * After every call that takes `now`, drain [`Session::poll_event`] and [`Session::poll_output`],
//!   then sleep until [`Session::poll_timeout`] or the next input. At the timeout call
//!   [`Session::handle_timeout`].
//! * Inner packets go in by [`Session::seal`], which encrypts straight into the owner's buffer, and
//!   come out by the callback of [`Session::input`], decrypted in place. Neither allocates.
//! * Over TCP the bytes of `seal` and `poll_output` go out in the order in which they were made: a
//!   stock peer ends the connection at a packet id that goes backwards.

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
use crate::replay::ReplayError;
use crate::wrap::Wrap;

pub use crate::control::push::NotPushable;
pub use crate::options::Transport;
pub use config::{ClientConfig, Common, LARGE_TUN_MTU, ServerConfig, Timers};
pub use event::{Authenticated, Ended, Established, Event};
pub use stats::{Dropped, Stats};

use keys::{Agreed, Ids, Keys};
use timers::Clocks;

/// How long what is left to be said at the end is repeated.
const LINGER: Duration = Duration::from_secs(5);

/// What the server tells a client it lets in. Each option is one string as in a config file (`route
/// 10.20.0.1`, `topology net30`, `ifconfig 10.20.0.6 10.20.0.5`, `ping 5`), without commas. Cipher,
/// peer-id, protocol flags, MTU and compression are added by the session, from what was negotiated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Push {
    /// In the order in which they are sent.
    pub options: Vec<String>,
}

/// The role, with what belongs to it.
#[derive(Clone)]
enum Side {
    Client(Arc<ClientConfig>),
    /// With the peer-id of its data packets.
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

/// Which of the two negotiations of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    /// The one in use.
    Current,
    /// A renegotiation.
    Next,
}

/// The end of a session.
struct End {
    /// When to stop repeating what is left to be said.
    until: Instant,
    /// That moment has passed.
    over: bool,
    /// OCC's exit notifications that are still to be sent, one each second.
    exits: u8,
    next_exit: Instant,
}

/// One session with one peer.
pub struct Session {
    side: Side,
    own: SessionId,
    /// Both session ids, once the peer's is known.
    ids: Option<Ids>,
    wrap: Wrap,
    current: Option<Negotiation>,
    next: Option<Negotiation>,
    keys: Keys,
    agreed: Option<Agreed>,
    /// A server's view of its client, and the other way round.
    client: server::Client,
    server: client::Server,
    /// A server's PUSH_REPLY.
    reply: Vec<String>,
    /// Texts that wait for the end of a renegotiation.
    texts: VecDeque<String>,
    events: VecDeque<Event>,
    clocks: Clocks,
    ended: Option<End>,
    stats: Stats,
    /// What a client says of itself, where a test has it pretend to be another.
    #[cfg(test)]
    pretended: Option<String>,
    /// Its options string.
    #[cfg(test)]
    pretended_options: Option<String>,
}

impl Session {
    /// A client's side: its first packet is in [`Session::poll_output`].
    pub fn client(config: Arc<ClientConfig>, now: Instant) -> Self {
        let first_retry = config.common.timers.tls_timeout;
        let own = SessionId::random(&mut rand::rng());
        let mut this = Self::new(Side::Client(config), own, now);
        let reset = Negotiation::new(Role::Client, KeyId::FIRST, true, first_retry, now);
        this.current = Some(reset);
        this
    }

    /// A server's side, which waits for the client's first packet. `peer_id` (24 bits) goes into its data
    /// packets; only a hub gives it a meaning.
    pub fn server(config: Arc<ServerConfig>, peer_id: u32, now: Instant) -> Self {
        let own = SessionId::random(&mut rand::rng());
        Self::new(Side::Server(config, peer_id), own, now)
    }

    /// A server's side whose RESETs were exchanged without state.
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
            clocks,
            ended: None,
            stats: Stats::default(),
            #[cfg(test)]
            pretended: None,
            #[cfg(test)]
            pretended_options: None,
        }
    }

    /// Takes one packet from the peer (without TCP's length), which is decrypted in place. Inner packets
    /// are handed to `inner`. An error says why the packet was dropped and is counted already; what ends
    /// the session is told by [`Session::poll_event`] alone.
    pub fn input(
        &mut self,
        packet: &mut [u8],
        now: Instant,
        inner: &mut dyn FnMut(&[u8]),
    ) -> Result<(), Dropped> {
        let taken = match DataHeader::parse(packet) {
            Some(header) => self.data(header, packet, now, inner),
            None => self.control(packet, now),
        };
        match taken {
            Ok(()) => self.clocks.received(now),
            Err(dropped) => self.stats.count(dropped),
        }
        taken
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
        let payload = agreed
            .framing
            .strip(payload)
            .map_err(|_| Dropped::Compressed)?;
        match Payload::classify(payload) {
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

    /// Encrypts one inner packet and appends it to `out`, over TCP with its length. Fails, with `out` as
    /// it was, before [`Event::Established`], after the end, and for packets larger than the agreed MTU.
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

    /// Also pings and the like.
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

    /// Appends one packet of the control channel, or a ping, to `out` (over TCP with its length). False
    /// if there is none now.
    pub fn poll_output(&mut self, now: Instant, out: &mut BytesMut) -> bool {
        self.control_output(now, out) || self.exit_output(now, out) || self.ping_output(now, out)
    }

    fn ping_output(&mut self, now: Instant, out: &mut BytesMut) -> bool {
        if self.ended.is_some() || self.clocks.ping_at().is_none_or(|at| at > now) {
            return false;
        }
        // Also where it cannot be sent: the next one is due in its time.
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

    /// The next thing to be known.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// The TCP connection has ended. A stock peer ends it without a word when it refuses our certificate: its
    /// alert never leaves it.
    pub fn disconnected(&mut self, now: Instant) {
        let stage = self.agreed.is_none().then(|| self.stage());
        self.end(Ended::Disconnected { stage }, now);
    }

    /// Leaves: tells the peer (EXIT, or OCC's EXIT as it can) and ends with [`Ended::Closed`]. Over TCP
    /// closing the connection says it all.
    pub fn close(&mut self, now: Instant) {
        let udp = self.side.common().transport == Transport::Udp;
        if !self.is_ended() {
            self.leave(udp, now);
        }
        // Nor is anything owed there to who never got in, whatever it has not acknowledged.
        if !udp
            && self.agreed.is_none()
            && let Some(end) = &mut self.ended
        {
            end.over = true;
        }
    }

    fn leave(&mut self, udp: bool, now: Instant) {
        let tell = self.agreed.filter(|_| udp);
        // During a renegotiation a text would have to wait.
        let by_control = tell.is_some_and(|agreed| agreed.cc_exit) && self.next.is_none();
        if by_control {
            self.say(crate::control::EXIT, now);
        }
        self.end(Ended::Closed, now);
        if let Some(end) = self
            .ended
            .as_mut()
            .filter(|_| tell.is_some() && !by_control)
        {
            end.exits = 2;
        }
    }

    /// Ends the session, once.
    fn end(&mut self, reason: Ended, now: Instant) {
        if self.ended.is_none() {
            self.ended = Some(End {
                until: now + LINGER,
                // Nobody is there to be told.
                over: self.ids.is_none(),
                exits: 0,
                next_exit: now,
            });
            self.events.push_back(Event::Ended(reason));
        }
    }

    /// Whether [`Event::Established`] has come, and [`Event::Ended`] has not.
    pub fn is_established(&self) -> bool {
        self.agreed.is_some() && self.ended.is_none()
    }

    /// Whether [`Event::Ended`] has come.
    pub fn is_ended(&self) -> bool {
        self.ended.is_some()
    }

    /// Whether the session has ended and nothing is left to be sent or acknowledged.
    pub fn is_finished(&self) -> bool {
        let talking = self.next.as_ref().or(self.current.as_ref());
        self.ended.as_ref().is_some_and(|end| {
            let silent = talking.is_none_or(|talking| talking.is_drained() && !talking.owes_acks());
            end.over || silent && end.exits == 0
        })
    }

    /// Whether [`Session::poll_event`] has something.
    pub(crate) fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// Whether [`Session::poll_output`] may have something now.
    pub(crate) fn has_output(&self, now: Instant) -> bool {
        let due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        let talking = self.next.as_ref().or(self.current.as_ref());
        let exit = self
            .ended
            .as_ref()
            .filter(|end| end.exits > 0)
            .map(|end| end.next_exit);
        talking.is_some_and(|talking| talking.owes_acks() || due(talking.timeout()))
            || due(exit)
            || due(self.clocks.ping_at())
    }

    /// Whether the key is used up so far that a new one should be negotiated now.
    pub(crate) fn wants_new_key(&self, now: Instant) -> bool {
        self.next.is_none() && self.clocks.renegotiate_at.is_some_and(|at| at <= now)
    }

    /// Server role: other certificates, from the next negotiation on. What was agreed stays.
    pub fn set_config(&mut self, config: Arc<ServerConfig>) {
        if let Side::Server(ours, _) = &mut self.side {
            *ours = config;
        }
    }

    /// Counters.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }
}

/// What tls-auth and tls-crypt call the time of a packet, which is that of the session's begin. Nothing
/// else asks for the time of day.
pub(crate) fn unix_time() -> u32 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(1, |since| {
        u32::try_from(since.as_secs()).unwrap_or(u32::MAX)
    })
}

/// Appends what `build` appends, over TCP with its length.
fn framed<E: From<framing::LengthError>>(
    transport: Transport,
    out: &mut BytesMut,
    build: impl FnOnce(&mut BytesMut) -> Result<(), E>,
) -> Result<(), E> {
    match transport {
        Transport::Tcp => framing::write(out, build),
        Transport::Udp => build(out),
    }
}

/// Why an inner packet is not sent. It is dropped; nothing else happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SealError {
    /// There are no keys yet, or the session has ended.
    #[error("no established session")]
    NotEstablished,
    /// Larger than the agreed `tun-mtu`.
    #[error("packet larger than the tunnel's MTU")]
    TooLarge,
    /// All packet ids of the key are used and a new one is not there yet.
    #[error("the key is used up")]
    Exhausted,
}

impl From<framing::LengthError> for SealError {
    fn from(_: framing::LengthError) -> Self {
        Self::TooLarge
    }
}
