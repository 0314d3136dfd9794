//! The table of tracked connections, indexed in both directions.
//!
//! The table owns the connections, their ports and their timers. One source may use half of the table. When
//! the table is full, the unanswered connection closest to its timeout is removed, as in Linux. Without an
//! unanswered connection, no new connection is tracked.

use std::collections::{BTreeSet, HashMap};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::{Duration, Instant};

use super::MASQUERADE_PORTS;
use crate::ip::{Malformed, protocol};

/// Divisor of the table size for the share of one source.
const SHARES: usize = 2;
/// Largest number of ports tried for a new connection.
const TRIES: usize = 4096;
/// Initial timeout of a new connection, until its first packet sets the timeout.
const FIRST: Duration = Duration::from_secs(30);

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
    /// Time of the connection's timer. Packets change `until`, but not the timer.
    armed: Instant,
    unanswered_timer: bool,
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
    /// Timers of connections that were unanswered when the timer was set.
    unanswered: BTreeSet<(Instant, u64)>,
    sources: HashMap<Ipv4Addr, usize>,
    port: u16,
    pub(super) evicted: u64,
}

impl Table {
    pub(super) fn new(max: usize) -> Self {
        Self {
            max,
            port: *MASQUERADE_PORTS.start(),
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
        let of_source = self.sources.get(source.ip()).copied().unwrap_or(0);
        if of_source >= (self.max / SHARES).max(1) {
            return Err(Untracked::Full);
        }
        if self.connections.len() >= self.max && !self.evict() {
            return Err(Untracked::Full);
        }
        let port = self
            .free_port(protocol, source.port(), destination)
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
        self.unanswered.insert((until, id));
        *self.sources.entry(*source.ip()).or_default() += 1;
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
            unanswered_timer: true,
        }))
    }

    /// Returns the source's own port if free, as in Linux, or else the next free port.
    fn free_port(&mut self, protocol: u8, wanted: u16, destination: SocketAddrV4) -> Option<u16> {
        let any = protocol == protocol::ICMP;
        let free = |inward: &HashMap<_, _>, port| {
            !inward.contains_key(&(protocol, by_destination(protocol, destination, port), port))
        };
        if (any || MASQUERADE_PORTS.contains(&wanted)) && free(&self.inward, wanted) {
            return Some(wanted);
        }
        for _ in 0..TRIES {
            self.port = match self.port.checked_add(1) {
                Some(next) if any || MASQUERADE_PORTS.contains(&next) => next,
                _ => *MASQUERADE_PORTS.start(),
            };
            if free(&self.inward, self.port) {
                return Some(self.port);
            }
        }
        None
    }

    pub(super) fn expire(&mut self, now: Instant) {
        while let Some((armed, id)) = self.timers.first().copied()
            && armed <= now
        {
            self.timers.pop_first();
            self.unanswered.remove(&(armed, id));
            let Some(connection) = self.connections.get_mut(&id) else {
                continue;
            };
            if connection.until <= now {
                self.forget(id);
                continue;
            }
            // Packets have postponed the timeout; move the timer now.
            connection.armed = connection.until;
            connection.unanswered_timer = !connection.answered;
            self.timers.insert((connection.until, id));
            if !connection.answered {
                self.unanswered.insert((connection.until, id));
            }
        }
    }

    /// Removes the unanswered connection closest to its timeout. Returns false if every connection is
    /// answered.
    fn evict(&mut self) -> bool {
        while let Some((_, id)) = self.unanswered.pop_first() {
            let Some(connection) = self.connections.get_mut(&id) else {
                continue;
            };
            connection.unanswered_timer = false;
            if !connection.answered {
                self.evicted += 1;
                self.forget(id);
                return true;
            }
        }
        false
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
        if gone.unanswered_timer {
            self.unanswered.remove(&(gone.armed, id));
        }
        if let Some(count) = self.sources.get_mut(gone.source.ip()) {
            *count -= 1;
            if *count == 0 {
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
