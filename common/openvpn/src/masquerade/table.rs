//! The table of tracked connections, indexed in both directions.
//!
//! The table owns the connections, their ports and their timers. One source may use a quarter of the table, and
//! therefore about half of the ports toward one destination. A new connection beyond a limit displaces an older
//! one: beyond its share, a connection of its own source; without room or a free port, a connection of the
//! source with the most connections. Answered TCP connections are displaced only after their end. Without another
//! connection, no new connection is tracked.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::{Duration, Instant};

use rand::Rng as _;

use super::MASQUERADE_PORTS;
use crate::ip::{Malformed, protocol};

/// Divisor of the table size for the share of one source. A larger share would let one source use all ports
/// toward one destination. A smaller share would limit the questions of one resolver, whose answered UDP
/// connections stay for 180 s.
const SHARES: usize = 4;
/// Largest number of ports tried for a new connection. Ports are random: while half of the ports are free, all
/// tries fail once in 2^32 connections.
const TRIES: usize = 32;
/// Initial timeout of a new connection, until its first packet sets the timeout.
const FIRST: Duration = Duration::from_secs(30);
/// Longest time until the next timer of a connection. A connection that ends gets an earlier timeout, which takes
/// effect at this timer.
const CHECK: Duration = Duration::from_secs(120);

/// Reason why a packet is not translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Untracked {
    /// The packet is malformed.
    #[error(transparent)]
    Malformed(#[from] Malformed),
    /// The packet belongs to no known connection.
    #[error("the packet belongs to no known connection")]
    Unknown,
    /// The table is full, or the source has used its share.
    #[error("too many tracked connections")]
    Full,
    /// No port is free for this destination.
    #[error("no port is free for this destination")]
    PortsExhausted,
}

#[derive(Debug)]
pub(super) struct Connection {
    protocol: u8,
    pub(super) source: SocketAddrV4,
    destination: SocketAddrV4,
    /// Local port, or the identifier of echoes.
    pub(super) port: u16,
    pub(super) answered: bool,
    pub(super) reset: bool,
    /// FINs received: from the source, and from the destination.
    pub(super) ended: [bool; 2],
    pub(super) until: Instant,
    /// Time of the connection's timer, which packets do not change.
    armed: Instant,
}

/// Connections of one source.
#[derive(Debug, Default)]
struct Source {
    connections: usize,
    /// Timers of connections that were displaceable when the timer was set.
    displaceable: BTreeSet<(Instant, u64)>,
}

type Outward = (u8, SocketAddrV4, SocketAddrV4);
type Inward = (u8, SocketAddrV4, u16);

#[derive(Debug, Default)]
pub(super) struct Table {
    max: usize,
    connections: HashMap<u64, Connection>,
    next: u64,
    outward: HashMap<Outward, u64>,
    inward: HashMap<Inward, u64>,
    timers: BTreeSet<(Instant, u64)>,
    sources: HashMap<Ipv4Addr, Source>,
    pub(super) evicted: u64,
}

impl Connection {
    /// Returns true for a TCP connection after a reset or the end of both directions.
    pub(super) fn is_closed(&self) -> bool {
        self.reset || self.ended == [true; 2]
    }

    /// Returns true if another connection may take this connection's place.
    fn is_displaceable(&self) -> bool {
        !self.answered || self.protocol != protocol::TCP || self.is_closed()
    }
}

impl Table {
    pub(super) fn new(max: usize) -> Self {
        Self {
            max,
            ..Self::default()
        }
    }

    pub(super) fn len(&self) -> usize {
        self.connections.len()
    }

    /// Returns a connection by its addresses on the source's side.
    pub(super) fn outward(
        &mut self,
        protocol: u8,
        source: SocketAddrV4,
        destination: SocketAddrV4,
    ) -> Option<&mut Connection> {
        let id = self.outward.get(&(protocol, source, destination))?;
        self.connections.get_mut(id)
    }

    /// Returns a connection by its addresses on the destination's side.
    pub(super) fn inward(
        &mut self,
        protocol: u8,
        destination: SocketAddrV4,
        port: u16,
    ) -> Option<&mut Connection> {
        let destination = by_destination(protocol, destination, port);
        let id = self.inward.get(&(protocol, destination, port))?;
        self.connections.get_mut(id)
    }

    pub(super) fn open(
        &mut self,
        protocol: u8,
        source: SocketAddrV4,
        destination: SocketAddrV4,
        now: Instant,
    ) -> Result<&mut Connection, Untracked> {
        self.expire(now);
        let share = (self.max / SHARES).max(1);
        if self.used_by(*source.ip()) >= share && !self.displace_of(*source.ip(), now) {
            return Err(Untracked::Full);
        }
        if self.connections.len() >= self.max && !self.displace_of_largest(now) {
            return Err(Untracked::Full);
        }
        let port = self
            .take_port(protocol, source.port(), destination)
            .ok_or(Untracked::PortsExhausted)?;
        let id = self.next;
        self.next += 1;
        let until = now + FIRST;
        self.outward.insert((protocol, source, destination), id);
        self.inward.insert(
            (protocol, by_destination(protocol, destination, port), port),
            id,
        );
        self.timers.insert((until, id));
        let of_source = self.sources.entry(*source.ip()).or_default();
        of_source.connections += 1;
        of_source.displaceable.insert((until, id));
        Ok(self.connections.entry(id).or_insert(Connection {
            protocol,
            source,
            destination,
            port,
            answered: false,
            reset: false,
            ended: [false; 2],
            until,
            armed: until,
        }))
    }

    fn used_by(&self, source: Ipv4Addr) -> usize {
        let of_source = self.sources.get(&source);
        of_source.map_or(0, |of_source| of_source.connections)
    }

    /// Returns the source's own port if free, as in Linux, or else a random free port. If no port is found, a
    /// connection to the same destination gives way.
    fn take_port(&mut self, protocol: u8, wanted: u16, destination: SocketAddrV4) -> Option<u16> {
        let any = protocol == protocol::ICMP;
        let user = |table: &Self, port| {
            let key = (protocol, by_destination(protocol, destination, port), port);
            table.inward.get(&key).copied()
        };
        if (any || MASQUERADE_PORTS.contains(&wanted)) && user(self, wanted).is_none() {
            return Some(wanted);
        }
        let ports = if any { 1..=u16::MAX } else { MASQUERADE_PORTS };
        let mut random = rand::rng();
        let mut displaced: Option<(usize, Reverse<Instant>, u64, u16)> = None;
        for _ in 0..TRIES {
            let port = random.random_range(ports.clone());
            let Some(id) = user(self, port) else {
                return Some(port);
            };
            let found = self.connections.get(&id).filter(|c| c.is_displaceable());
            let found = found.map(|found| {
                let used = self.used_by(*found.source.ip());
                (used, Reverse(found.until), id, port)
            });
            displaced = displaced.max(found);
        }
        let (.., id, port) = displaced?;
        self.displace(id);
        Some(port)
    }

    pub(super) fn expire(&mut self, now: Instant) {
        while let Some((armed, id)) = self.timers.first().copied()
            && armed <= now
        {
            self.timers.pop_first();
            match self.connections.get(&id) {
                Some(connection) if connection.until > now => self.arm(id, now),
                _ => self.forget(id),
            }
        }
    }

    /// Moves the timer of a connection to its timeout, or to an earlier check.
    fn arm(&mut self, id: u64, now: Instant) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        let before = connection.armed;
        let armed = connection.until.min(now + CHECK);
        connection.armed = armed;
        self.timers.remove(&(before, id));
        self.timers.insert((armed, id));
        if let Some(of_source) = self.sources.get_mut(connection.source.ip()) {
            of_source.displaceable.remove(&(before, id));
            if connection.is_displaceable() {
                of_source.displaceable.insert((armed, id));
            }
        }
    }

    /// Removes a displaceable connection of the source with the most connections. Returns false if no source has
    /// such a connection.
    fn displace_of_largest(&mut self, now: Instant) -> bool {
        loop {
            let sources = self.sources.iter();
            let sources = sources.filter(|(_, of_source)| !of_source.displaceable.is_empty());
            let sources = sources.map(|(source, of_source)| (of_source.connections, *source));
            let Some((_, largest)) = sources.max() else {
                return false;
            };
            // The connections of this source may have been answered since their timers were set.
            if self.displace_of(largest, now) {
                return true;
            }
        }
    }

    /// Removes the displaceable connection of a source closest to its timeout. Returns false if the source has
    /// none.
    fn displace_of(&mut self, source: Ipv4Addr, now: Instant) -> bool {
        let mut moved = 0;
        while let Some(of_source) = self.sources.get_mut(&source)
            && let Some((armed, id)) = of_source.displaceable.pop_first()
        {
            let connection = self.connections.get(&id);
            let Some(connection) = connection.filter(|c| c.is_displaceable()) else {
                continue;
            };
            // Packets have postponed the timeout; others may be closer to theirs.
            if connection.until.min(now + CHECK) > armed && moved < TRIES {
                moved += 1;
                self.arm(id, now);
                continue;
            }
            self.displace(id);
            return true;
        }
        false
    }

    fn displace(&mut self, id: u64) {
        self.evicted += 1;
        self.forget(id);
    }

    fn forget(&mut self, id: u64) {
        let Some(gone) = self.connections.remove(&id) else {
            return;
        };
        let destination = by_destination(gone.protocol, gone.destination, gone.port);
        self.outward
            .remove(&(gone.protocol, gone.source, gone.destination));
        self.inward.remove(&(gone.protocol, destination, gone.port));
        self.timers.remove(&(gone.armed, id));
        if let Some(of_source) = self.sources.get_mut(gone.source.ip()) {
            of_source.displaceable.remove(&(gone.armed, id));
            of_source.connections -= 1;
            if of_source.connections == 0 {
                self.sources.remove(gone.source.ip());
            }
        }
    }
}

/// Returns the destination as the index key. For an echo the port is the translated identifier, which the
/// reply carries.
fn by_destination(protocol: u8, destination: SocketAddrV4, port: u16) -> SocketAddrV4 {
    if protocol == protocol::ICMP {
        SocketAddrV4::new(*destination.ip(), port)
    } else {
        destination
    }
}
