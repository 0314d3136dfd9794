//! The sessions of a UDP server behind one socket, without I/O. The hub assigns datagrams to sessions, admits
//! new clients, and follows clients that change their address.
//!
//! * A first packet allocates no memory: the session id in the answer is a cookie, and a session starts when
//!   the client has echoed the cookie. A first packet never changes an existing session. An established
//!   session of the same address is replaced only when the new session is established.
//! * The rate of new sessions is limited, because each session costs a TLS handshake on the owner's thread.
//! * Control packets are assigned by address and session id; data packets by peer-id or, in the old form, by
//!   address.
//! * A data packet with a known peer-id from another address moves the session to this address, if the packet
//!   authenticates.

mod admission;
mod cookie;
mod stats;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};

use crate::packet::{ControlHeader, DataHeader, PacketError, SessionId};
use crate::rate::RateLimit;
use crate::session::{Ended, Event, SealError, ServerConfig, Session, Stats};

use admission::{BURST, RATE, Start};
use cookie::Cookies;
pub use stats::HubStats;

/// Identifier of a session in a hub, and its peer-id on the wire. Reused as late as possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerId(pub u32);

/// Addresses of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    /// Address of the client.
    pub remote: SocketAddr,
    /// Address of the server that the client uses, for a socket that receives at several addresses; `None` for other sockets.
    pub local: Option<IpAddr>,
}

impl From<SocketAddr> for Path {
    fn from(remote: SocketAddr) -> Self {
        Self {
            remote,
            local: None,
        }
    }
}

/// Limits of a hub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Largest number of sessions, up to 2^22. An established session is never displaced by a new client.
    pub sessions: usize,
    /// Largest number of sessions that are not yet established. A new session displaces one of them, chosen
    /// by `half_open::makes_room`, so that unfinished handshakes cannot block other clients.
    pub half_open: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            sessions: 4096,
            half_open: 256,
        }
    }
}

struct Entry {
    session: Session,
    address: SocketAddr,
    /// Address of the server that the client uses, see [`Path::local`].
    local: Option<IpAddr>,
    /// The client's session id.
    client: SessionId,
    /// Fingerprint of the client certificate; `None` until the session is established.
    fingerprint: Option<[u8; 32]>,
    /// Time of the session's entry in `timers`.
    scheduled: Option<Instant>,
    /// True if the session is in `ready`.
    queued: bool,
}

impl Entry {
    fn path(&self) -> Path {
        Path {
            remote: self.address,
            local: self.local,
        }
    }
}

/// All sessions behind one UDP socket. Driven like a [`Session`].
pub struct Hub {
    config: Arc<ServerConfig>,
    limits: Limits,
    cookies: Cookies,
    /// Sessions by peer-id.
    slots: Vec<Option<Box<Entry>>>,
    /// Free peer-ids, the longest unused first.
    free: VecDeque<PeerId>,
    live: usize,
    half_open: VecDeque<PeerId>,
    /// Clients with a proven address that wait for a session, the oldest first.
    waiting: VecDeque<Start>,
    starts: RateLimit,
    by_client: HashMap<(SocketAddr, SessionId), PeerId>,
    /// Established sessions, for data packets without a peer-id.
    by_address: HashMap<SocketAddr, PeerId>,
    timers: BTreeSet<(Instant, PeerId)>,
    /// Sessions that may have something to send.
    ready: VecDeque<PeerId>,
    answers: VecDeque<(Path, Bytes)>,
    events: VecDeque<(PeerId, Event)>,
    /// Last counters of dropped sessions whose end is in `events`.
    dropped: HashMap<PeerId, Stats>,
    stats: HubStats,
    /// Sender of the last packet in [`HubStats::bad_wrap`], until the owner takes it.
    mismatched: Option<SocketAddr>,
}

impl Hub {
    /// Creates a hub without sessions.
    pub fn new(config: Arc<ServerConfig>, limits: Limits, now: Instant) -> Self {
        Self {
            cookies: Cookies::new(config.common.timers.hand_window, now),
            config,
            limits: Limits {
                sessions: limits.sessions.min(1 << 22),
                ..limits
            },
            slots: Vec::new(),
            free: VecDeque::new(),
            live: 0,
            half_open: VecDeque::new(),
            waiting: VecDeque::new(),
            starts: RateLimit::new(Duration::from_secs(1) / RATE, BURST, now),
            by_client: HashMap::new(),
            by_address: HashMap::new(),
            timers: BTreeSet::new(),
            ready: VecDeque::new(),
            answers: VecDeque::new(),
            events: VecDeque::new(),
            dropped: HashMap::new(),
            stats: HubStats::default(),
            mismatched: None,
        }
    }

    /// Sets the configuration of new sessions, and the certificates of all sessions.
    pub fn set_config(&mut self, config: Arc<ServerConfig>) {
        for entry in self.slots.iter_mut().flatten() {
            entry.session.set_config(config.clone());
        }
        self.config = config;
    }

    fn get(&self, peer: PeerId) -> Option<&Entry> {
        self.slots.get(peer.0 as usize)?.as_deref()
    }

    fn entry(&mut self, peer: PeerId) -> Option<&mut Entry> {
        self.slots.get_mut(peer.0 as usize)?.as_deref_mut()
    }

    /// Processes one datagram, which is decrypted in place. Inner packets go to `inner` with their session.
    /// Returns the session of an authentic data packet, even of a ping.
    pub fn input(
        &mut self,
        from: impl Into<Path>,
        datagram: &mut [u8],
        now: Instant,
        inner: &mut dyn FnMut(PeerId, &[u8]),
    ) -> Option<PeerId> {
        let from = from.into();
        match DataHeader::parse(datagram) {
            Some(header) => self.data(from, header, datagram, now, inner),
            None => {
                self.control(from, datagram, now);
                None
            }
        }
    }

    fn data(
        &mut self,
        Path {
            remote: from,
            local,
        }: Path,
        header: DataHeader,
        datagram: &mut [u8],
        now: Instant,
        inner: &mut dyn FnMut(PeerId, &[u8]),
    ) -> Option<PeerId> {
        let named = header
            .peer_id
            .map(PeerId)
            .or_else(|| self.by_address.get(&from).copied());
        let Some((peer, entry)) = named.and_then(|peer| Some((peer, self.entry(peer)?))) else {
            self.stats.unknown += 1;
            return None;
        };
        let moved = entry.address != from;
        if moved && !self.may_move(peer, from) {
            self.stats.unknown += 1;
            return None;
        }
        let entry = self.entry(peer)?;
        let result = entry
            .session
            .input(datagram, now, &mut |packet| inner(peer, packet));
        // Data produces no output and only postpones timers, so most data packets need no further work.
        let has_events = entry.session.has_events();
        if result.is_ok() {
            entry.local = local;
        }
        if moved && result.is_ok() {
            self.relocate(peer, from);
        }
        if has_events {
            self.collect(peer, now);
        }
        result.ok().map(|()| peer)
    }

    /// True if a session may move to the address `to`. An address with an established session of another
    /// certificate is refused.
    fn may_move(&self, peer: PeerId, to: SocketAddr) -> bool {
        let fingerprint = |peer: PeerId| self.get(peer)?.fingerprint;
        let Some(own) = fingerprint(peer) else {
            return false;
        };
        self.by_address
            .get(&to)
            .is_none_or(|peer| fingerprint(*peer) == Some(own))
    }

    fn relocate(&mut self, peer: PeerId, to: SocketAddr) {
        self.stats.moved += 1;
        self.displace(to, peer);
        let Some(entry) = self.entry(peer) else {
            return;
        };
        let (from, client) = (std::mem::replace(&mut entry.address, to), entry.client);
        self.by_client.remove(&(from, client));
        self.by_client.insert((to, client), peer);
        if self.by_address.get(&from) == Some(&peer) {
            self.by_address.remove(&from);
        }
        self.by_address.insert(to, peer);
    }

    /// Drops the other established session at `address`: its client has started again as `peer`.
    fn displace(&mut self, address: SocketAddr, peer: PeerId) {
        let Some(before) = self
            .by_address
            .get(&address)
            .copied()
            .filter(|before| *before != peer)
        else {
            return;
        };
        self.stats.replaced += 1;
        self.drop_session(before, Ended::Replaced);
    }

    /// Drops a session in favor of another. Reports the end unless the session had already ended.
    fn drop_session(&mut self, peer: PeerId, reason: Ended) {
        let session = self.session(peer).filter(|session| !session.is_ended());
        let stats = session.map(|session| *session.stats());
        self.remove(peer);
        if let Some(stats) = stats {
            self.dropped.insert(peer, stats);
            self.events.push_back((peer, Event::Ended(reason)));
        }
    }

    fn control(&mut self, from: Path, datagram: &mut [u8], now: Instant) {
        let header = match ControlHeader::split(datagram) {
            Ok((header, _)) => header,
            Err(PacketError::TlsCryptV2) => return self.mismatch(from),
            Err(_) => {
                self.stats.malformed += 1;
                return;
            }
        };
        match self.by_client.get(&(from.remote, header.session)).copied() {
            Some(peer) => self.known_session(peer, datagram, now),
            None => self.unknown_session(from, header, datagram, now),
        }
    }

    /// Passes a control packet to its session.
    fn known_session(&mut self, peer: PeerId, datagram: &mut [u8], now: Instant) {
        if let Some(entry) = self.entry(peer) {
            let _ = entry.session.input(datagram, now, &mut |_| {});
            self.collect(peer, now);
        }
    }

    fn remove(&mut self, peer: PeerId) {
        let Some(entry) = self.slots.get_mut(peer.0 as usize).and_then(Option::take) else {
            return;
        };
        self.live -= 1;
        self.free.push_back(peer);
        self.half_open.retain(|other| *other != peer);
        self.by_client.remove(&(entry.address, entry.client));
        if self.by_address.get(&entry.address) == Some(&peer) {
            self.by_address.remove(&entry.address);
        }
        if let Some(at) = entry.scheduled {
            self.timers.remove(&(at, peer));
        }
    }

    /// Collects a session's events, and schedules its output and timer.
    fn collect(&mut self, peer: PeerId, now: Instant) {
        while let Some(event) = self
            .entry(peer)
            .and_then(|entry| entry.session.poll_event())
        {
            if let Event::Established(established) = &event {
                let identity = established.identity.as_ref();
                self.establish(peer, identity.map(|identity| identity.fingerprint));
            }
            self.events.push_back((peer, event));
        }
        let Some(entry) = self.entry(peer) else {
            return;
        };
        if entry.session.has_output(now) || entry.session.is_ended() {
            self.queue(peer);
        }
        self.schedule(peer);
    }

    fn establish(&mut self, peer: PeerId, fingerprint: Option<[u8; 32]>) {
        self.half_open.retain(|other| *other != peer);
        let Some(entry) = self.entry(peer) else {
            return;
        };
        entry.fingerprint = fingerprint;
        let address = entry.address;
        self.displace(address, peer);
        self.by_address.insert(address, peer);
    }

    fn queue(&mut self, peer: PeerId) {
        if let Some(entry) = self.entry(peer).filter(|entry| !entry.queued) {
            entry.queued = true;
            self.ready.push_back(peer);
        }
    }

    fn schedule(&mut self, peer: PeerId) {
        let Some(Some(entry)) = self.slots.get_mut(peer.0 as usize) else {
            return;
        };
        // Only an earlier time moves the timer. Traffic postpones the timeout with every packet, so a later
        // time is set when the timer fires.
        let at = entry.session.poll_timeout();
        let sooner = |at: &Instant| entry.scheduled.is_none_or(|scheduled| *at < scheduled);
        if let Some(at) = at.filter(sooner) {
            if let Some(before) = entry.scheduled.replace(at) {
                self.timers.remove(&(before, peer));
            }
            self.timers.insert((at, peer));
        }
    }

    /// Appends one datagram to `out` and returns its addresses.
    pub fn poll_output(&mut self, now: Instant, out: &mut BytesMut) -> Option<Path> {
        if let Some((to, answer)) = self.answers.pop_front() {
            out.extend_from_slice(&answer);
            return Some(to);
        }
        while let Some(peer) = self.ready.front().copied() {
            if let Some(entry) = self.entry(peer) {
                if entry.session.poll_output(now, out) {
                    return Some(entry.path());
                }
                entry.queued = false;
                if entry.session.is_finished() {
                    self.remove(peer);
                } else {
                    self.schedule(peer);
                }
            }
            self.ready.pop_front();
        }
        None
    }

    /// Returns the next event of any session. After [`Event::Ended`] the hub sends the session's last packets
    /// and removes the session.
    pub fn poll_event(&mut self) -> Option<(PeerId, Event)> {
        let event = self.events.pop_front();
        if event.is_none() {
            self.dropped.clear();
        }
        event
    }

    /// Returns when to call [`Hub::handle_timeout`]; may be in the past.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let start = (!self.waiting.is_empty()).then(|| self.starts.next());
        let timer = self.timers.first().map(|(at, _)| *at);
        [start, timer].into_iter().flatten().min()
    }

    /// Handles all timers that are due, and starts some of the sessions that clients wait for.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.start_sessions(now);
        while let Some((_, peer)) = self.timers.first().copied().filter(|(at, _)| *at <= now) {
            self.timers.pop_first();
            let Some(entry) = self.entry(peer) else {
                continue;
            };
            entry.scheduled = None;
            entry.session.handle_timeout(now);
            while let Some(event) = self
                .entry(peer)
                .and_then(|entry| entry.session.poll_event())
            {
                self.events.push_back((peer, event));
            }
            // The next output sends the due packets and sets the timer again.
            self.queue(peer);
        }
    }

    /// Encrypts one inner packet into `out` and returns the addresses of the datagram.
    pub fn seal(
        &mut self,
        peer: PeerId,
        inner: &[u8],
        now: Instant,
        out: &mut BytesMut,
    ) -> Result<Path, SealError> {
        let entry = self.entry(peer).ok_or(SealError::NotEstablished)?;
        entry.session.seal(inner, now, out)?;
        let path = entry.path();
        if entry.session.wants_new_key(now) {
            self.schedule(peer);
        }
        Ok(path)
    }

    /// Runs `act` with a session, and then collects its events and output. Returns `None` if the session does
    /// not exist.
    pub fn with<T>(
        &mut self,
        peer: PeerId,
        now: Instant,
        act: impl FnOnce(&mut Session) -> T,
    ) -> Option<T> {
        let result = act(&mut self.entry(peer)?.session);
        self.collect(peer, now);
        Some(result)
    }

    /// Returns the counters of a session. The counters of a session that was dropped in favor of another are available
    /// until [`Hub::poll_event`] returns `None`.
    pub fn session_stats(&self, peer: PeerId) -> Option<&Stats> {
        let current = self.session(peer).map(Session::stats);
        current.or_else(|| self.dropped.get(&peer))
    }

    /// Returns the session.
    pub fn session(&self, peer: PeerId) -> Option<&Session> {
        self.get(peer).map(|entry| &entry.session)
    }

    /// Returns the client's current address.
    pub fn address(&self, peer: PeerId) -> Option<SocketAddr> {
        self.get(peer).map(|entry| entry.address)
    }

    /// Returns all sessions, including sessions that are not yet established.
    pub fn peers(&self) -> impl Iterator<Item = PeerId> + '_ {
        let live = self
            .slots
            .iter()
            .enumerate()
            .filter(|(_, slot)| slot.is_some());
        live.filter_map(|(index, _)| u32::try_from(index).ok().map(PeerId))
    }

    /// Returns the sender of the last packet that counts in [`HubStats::bad_wrap`], once. The address may be forged.
    pub fn take_mismatched(&mut self) -> Option<SocketAddr> {
        self.mismatched.take()
    }

    /// Returns the counters.
    pub fn stats(&self) -> &HubStats {
        &self.stats
    }
}
