//! A UDP server's sessions behind one socket, without I/O: which session a datagram belongs to, who may
//! start one, and where a client is that has moved.
//!
//! * A first packet costs no memory: the answer's session id is a cookie, and there is a session
//!   once the client has echoed it. It never touches a session that exists, also not one from the same
//!   address: that is replaced when the new one is established.
//! * Control packets belong to the session with their address and session id; data packets to the one
//!   with their peer-id, or, in the old form, with their address.
//! * Data with a known peer-id that comes from another address moves the session there, once it has
//!   authenticated.

mod admission;
mod cookie;
mod stats;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use bytes::{Bytes, BytesMut};

use crate::packet::{ControlHeader, DataHeader, SessionId};
use crate::session::{Ended, Event, NotPushable, Push, SealError, ServerConfig, Session};

use cookie::Cookies;
pub use stats::HubStats;

/// Names a session of a hub; also its peer-id on the wire. Not reused soon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerId(pub u32);

/// What a hub holds at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Sessions in all, up to 2^22. What is established is never displaced.
    pub sessions: usize,
    /// Sessions that are not established yet. A new one displaces the oldest of them, so that those who
    /// only begin cannot keep others out.
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
    /// The client's name for the session.
    client: SessionId,
    /// The certificate, once the session is established.
    fingerprint: Option<[u8; 32]>,
    /// The entry in `timers`.
    scheduled: Option<Instant>,
    /// Whether it is in `ready`.
    queued: bool,
}

/// All sessions behind one UDP socket. Driven like a [`Session`].
pub struct Hub {
    config: Arc<ServerConfig>,
    limits: Limits,
    cookies: Cookies,
    /// By peer-id.
    slots: Vec<Option<Box<Entry>>>,
    /// Peer-ids to be used again, the longest unused first.
    free: VecDeque<PeerId>,
    live: usize,
    half_open: VecDeque<PeerId>,
    by_client: HashMap<(SocketAddr, SessionId), PeerId>,
    /// Established sessions, for data without a peer-id.
    by_address: HashMap<SocketAddr, PeerId>,
    timers: BTreeSet<(Instant, PeerId)>,
    /// Sessions that may have something to send.
    ready: VecDeque<PeerId>,
    answers: VecDeque<(SocketAddr, Bytes)>,
    events: VecDeque<(PeerId, Event)>,
    stats: HubStats,
}

impl Hub {
    /// No sessions yet.
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
            by_client: HashMap::new(),
            by_address: HashMap::new(),
            timers: BTreeSet::new(),
            ready: VecDeque::new(),
            answers: VecDeque::new(),
            events: VecDeque::new(),
            stats: HubStats::default(),
        }
    }

    /// Another configuration for new sessions, and other certificates for all.
    pub fn set_config(&mut self, config: Arc<ServerConfig>) {
        for entry in self.slots.iter_mut().flatten() {
            entry.session.set_config(config.clone());
        }
        self.config = config;
    }

    fn entry(&mut self, peer: PeerId) -> Option<&mut Entry> {
        self.slots.get_mut(peer.0 as usize)?.as_deref_mut()
    }

    /// Takes one datagram, which is decrypted in place. Inner packets are handed to `inner` with the
    /// session they came from.
    pub fn input(
        &mut self,
        from: SocketAddr,
        datagram: &mut [u8],
        now: Instant,
        inner: &mut dyn FnMut(PeerId, &[u8]),
    ) {
        match DataHeader::parse(datagram) {
            Some(header) => self.data(from, header, datagram, now, inner),
            None => self.control(from, datagram, now, inner),
        }
    }

    fn data(
        &mut self,
        from: SocketAddr,
        header: DataHeader,
        datagram: &mut [u8],
        now: Instant,
        inner: &mut dyn FnMut(PeerId, &[u8]),
    ) {
        let named = header
            .peer_id
            .map(PeerId)
            .or_else(|| self.by_address.get(&from).copied());
        let Some((peer, entry)) = named.and_then(|peer| Some((peer, self.entry(peer)?))) else {
            self.stats.unknown += 1;
            return;
        };
        let moved = entry.address != from;
        if moved && !self.may_move(peer, from) {
            self.stats.unknown += 1;
            return;
        }
        let Some(entry) = self.entry(peer) else {
            return;
        };
        let taken = entry
            .session
            .input(datagram, now, &mut |packet| inner(peer, packet));
        // Data makes no output and moves timers away only: most of it ends here.
        let told = entry.session.has_events();
        if moved && taken.is_ok() {
            self.relocate(peer, from);
        }
        if told {
            self.collect(peer, now);
        }
    }

    /// Whether a session may move to an address: not if a client with another certificate lives there.
    fn may_move(&self, peer: PeerId, to: SocketAddr) -> bool {
        let fingerprint = |peer: PeerId| self.slots.get(peer.0 as usize)?.as_ref()?.fingerprint;
        let Some(own) = fingerprint(peer) else {
            return false;
        };
        self.by_address
            .get(&to)
            .is_none_or(|there| fingerprint(*there) == Some(own))
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

    /// Whoever had `address` before `peer` has come again as `peer`.
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

    /// Forgets a session for the sake of another, and says so unless it had ended anyway.
    fn drop_session(&mut self, peer: PeerId, reason: Ended) {
        let ended = self
            .entry(peer)
            .is_none_or(|entry| entry.session.is_ended());
        self.remove(peer);
        if !ended {
            self.events.push_back((peer, Event::Ended(reason)));
        }
    }

    fn control(
        &mut self,
        from: SocketAddr,
        datagram: &mut [u8],
        now: Instant,
        inner: &mut dyn FnMut(PeerId, &[u8]),
    ) {
        let Ok((header, _)) = ControlHeader::split(datagram) else {
            self.stats.malformed += 1;
            return;
        };
        let known = self.by_client.get(&(from, header.session)).copied();
        let Some(peer) = known.or_else(|| self.stranger(from, header, datagram, now)) else {
            return;
        };
        let Some(entry) = self.entry(peer) else {
            return;
        };
        let _ = entry
            .session
            .input(datagram, now, &mut |packet| inner(peer, packet));
        self.collect(peer, now);
    }

    /// Forgets a session.
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

    /// Takes a session's events, and sees to its output and its timer.
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
        let Some(entry) = self.slots.get_mut(peer.0 as usize).and_then(Option::as_mut) else {
            return;
        };
        // A later time is left for when the earlier one comes: traffic moves it on with every packet.
        let at = entry.session.poll_timeout();
        let sooner = |at: &Instant| entry.scheduled.is_none_or(|scheduled| *at < scheduled);
        if let Some(at) = at.filter(sooner) {
            if let Some(before) = entry.scheduled.replace(at) {
                self.timers.remove(&(before, peer));
            }
            self.timers.insert((at, peer));
        }
    }

    /// Appends one datagram to `out` and says where it goes.
    pub fn poll_output(&mut self, now: Instant, out: &mut BytesMut) -> Option<SocketAddr> {
        if let Some((to, answer)) = self.answers.pop_front() {
            out.extend_from_slice(&answer);
            return Some(to);
        }
        while let Some(peer) = self.ready.front().copied() {
            if let Some(entry) = self.entry(peer) {
                if entry.session.poll_output(now, out) {
                    return Some(entry.address);
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

    /// The next event of any session. After [`Event::Ended`] the hub says its goodbyes and forgets the
    /// session by itself.
    pub fn poll_event(&mut self) -> Option<(PeerId, Event)> {
        self.events.pop_front()
    }

    /// When to call [`Hub::handle_timeout`]; may be in the past.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Instant) {
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
            // What is due is sent by the next output, which sets the timer again.
            self.queue(peer);
        }
    }

    /// Encrypts one inner packet into `out` and says where the datagram goes.
    pub fn seal(
        &mut self,
        peer: PeerId,
        inner: &[u8],
        now: Instant,
        out: &mut BytesMut,
    ) -> Result<SocketAddr, SealError> {
        let entry = self.entry(peer).ok_or(SealError::NotEstablished)?;
        entry.session.seal(inner, now, out)?;
        let address = entry.address;
        if entry.session.wants_new_key(now) {
            self.schedule(peer);
        }
        Ok(address)
    }

    /// See [`Session::accept`].
    pub fn accept(&mut self, peer: PeerId, push: Push, now: Instant) -> Result<(), NotPushable> {
        let Some(entry) = self.entry(peer) else {
            return Ok(());
        };
        let accepted = entry.session.accept(push, now);
        self.collect(peer, now);
        accepted
    }

    /// See [`Session::reject`].
    pub fn reject(&mut self, peer: PeerId, reason: &str, now: Instant) {
        self.with(peer, now, |session| session.reject(reason, now));
    }

    /// See [`Session::restart`].
    pub fn restart(&mut self, peer: PeerId, next_server: bool, now: Instant) {
        self.with(peer, now, |session| session.restart(next_server, now));
    }

    /// See [`Session::close`].
    pub fn close(&mut self, peer: PeerId, now: Instant) {
        self.with(peer, now, |session| session.close(now));
    }

    fn with(&mut self, peer: PeerId, now: Instant, act: impl FnOnce(&mut Session)) {
        if let Some(entry) = self.entry(peer) {
            act(&mut entry.session);
            self.collect(peer, now);
        }
    }

    /// The session, for its counters.
    pub fn session(&self, peer: PeerId) -> Option<&Session> {
        self.slots
            .get(peer.0 as usize)?
            .as_ref()
            .map(|entry| &entry.session)
    }

    /// Where the client is now.
    pub fn address(&self, peer: PeerId) -> Option<SocketAddr> {
        self.slots
            .get(peer.0 as usize)?
            .as_ref()
            .map(|entry| entry.address)
    }

    /// All sessions, also those that are not established.
    pub fn peers(&self) -> impl Iterator<Item = PeerId> + '_ {
        let live = self
            .slots
            .iter()
            .enumerate()
            .filter(|(_, slot)| slot.is_some());
        live.filter_map(|(index, _)| u32::try_from(index).ok().map(PeerId))
    }

    /// Counters of what belongs to no session.
    pub fn stats(&self) -> &HubStats {
        &self.stats
    }
}
