//! The server's way for a packet that came out of one tunnel: to itself, to another peer, or
//! nowhere.
//!
//! Owns routes, firewall and masquerade of one server, and what is counted.

#[cfg(test)]
mod tests;

use std::net::Ipv4Addr;
use std::time::Instant;

use crate::echo::Replies;
use crate::firewall::Firewall;
use crate::ip::{Malformed, Packet, Rewrite, kind, protocol};
use crate::masquerade::{FLOW_PORTS, Masquerade, Untracked};
use crate::routes::{PeerId, Routes};

/// Where a packet goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// To the server itself: ICMP, or a segment of one of its flows with this peer.
    Local,
    /// To this peer; the packet has been translated in place.
    To(PeerId),
    /// Nowhere. Counted.
    Dropped,
}

/// What has been counted since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Packets to the server itself.
    pub local: u64,
    /// Packets from one peer to another.
    pub forwarded: u64,
    /// Packets with contradictory lengths or senseless fields.
    pub malformed: u64,
    /// Packets with a wrong checksum.
    pub bad_checksum: u64,
    /// Fragments.
    pub fragments: u64,
    /// Packets whose source is neither the peer's own address nor in its iroutes.
    pub bad_source: u64,
    /// Packets to nobody.
    pub no_route: u64,
    /// Packets that no rule lets through.
    pub filtered: u64,
    /// Packets that came too far.
    pub ttl_exceeded: u64,
    /// Packets of new connections that had no place in the table.
    pub table_full: u64,
    /// Packets of new connections for which there was no port.
    pub ports_exhausted: u64,
    /// Connections that are tracked now.
    pub tracked: u64,
    /// Connections that were forgotten early, to make room.
    pub evicted: u64,
}

/// Routes, rules and tracked connections of one server.
pub struct Forward {
    address: Ipv4Addr,
    /// Who is where.
    pub routes: Routes,
    firewall: Firewall,
    masquerade: Masquerade,
    replies: Replies,
    stats: Stats,
}

impl Forward {
    /// A server at `address` with these rules, tracking at most `max_tracked` connections, of
    /// about 300 bytes each.
    pub fn new(address: Ipv4Addr, firewall: Firewall, max_tracked: usize, now: Instant) -> Self {
        Self {
            address,
            routes: Routes::new(),
            firewall,
            masquerade: Masquerade::new(address, max_tracked),
            replies: Replies::new(now),
            stats: Stats::default(),
        }
    }

    /// Looks at a packet from `peer` and translates it.
    pub fn input(&mut self, peer: PeerId, packet: &mut [u8], now: Instant) -> Verdict {
        self.masquerade.expire(now);
        let (source, destination, port) = match Packet::parse(packet) {
            Ok(view) => {
                let port = match view.protocol() {
                    protocol::ICMP => None,
                    _ => Some(view.ports().map_or(0, |(_, port)| port)),
                };
                let tcp = view.protocol() == protocol::TCP;
                (
                    view.source(),
                    view.destination(),
                    port.map(|port| (tcp, port)),
                )
            }
            Err(malformed) => {
                self.count(malformed);
                return Verdict::Dropped;
            }
        };
        if !self.routes.permits(peer, source) {
            self.stats.bad_source += 1;
            return Verdict::Dropped;
        }
        if destination == self.address {
            return self.inward(packet, port, now);
        }
        let Some(to) = self.routes.lookup(destination) else {
            self.stats.no_route += 1;
            return Verdict::Dropped;
        };
        if !self.one_hop(packet, now) {
            return Verdict::Dropped;
        }
        let open = self.firewall.permits(source, destination);
        match self.masquerade.outward(packet, open, now) {
            Ok(()) => {
                self.stats.forwarded += 1;
                Verdict::To(to)
            }
            Err(why) => self.drop_untracked(why),
        }
    }

    /// A packet to the own address: back to a client, or for the server.
    fn inward(&mut self, packet: &mut [u8], port: Option<(bool, u16)>, now: Instant) -> Verdict {
        match port {
            Some((true, port)) if FLOW_PORTS.contains(&port) => {
                self.stats.local += 1;
                return Verdict::Local;
            }
            _ => {}
        }
        match self.masquerade.inward(packet, now) {
            Ok(client) => {
                let Some(to) = self.routes.lookup(client) else {
                    self.stats.no_route += 1;
                    return Verdict::Dropped;
                };
                // It has been translated: its sender would not know it any more.
                if !Rewrite::new(packet).is_some_and(|mut rewrite| rewrite.decrement_ttl()) {
                    self.stats.ttl_exceeded += 1;
                    return Verdict::Dropped;
                }
                self.stats.forwarded += 1;
                Verdict::To(to)
            }
            // Nothing but ICMP reaches the server itself.
            Err(Untracked::Unknown) if port.is_none() => {
                self.stats.local += 1;
                Verdict::Local
            }
            Err(why) => self.drop_untracked(why),
        }
    }

    /// Takes one hop off, or tells the sender that none was left.
    fn one_hop(&mut self, packet: &mut [u8], now: Instant) -> bool {
        if Rewrite::new(packet).is_some_and(|mut rewrite| rewrite.decrement_ttl()) {
            return true;
        }
        self.stats.ttl_exceeded += 1;
        if let Ok(view) = Packet::parse(packet) {
            self.replies
                .error(&view, self.address, [kind::TIME_EXCEEDED, 0], now);
        }
        false
    }

    fn drop_untracked(&mut self, why: Untracked) -> Verdict {
        match why {
            Untracked::Malformed(malformed) => self.count(malformed),
            Untracked::Unknown => self.stats.filtered += 1,
            Untracked::Full => self.stats.table_full += 1,
            Untracked::PortsExhausted => self.stats.ports_exhausted += 1,
        }
        Verdict::Dropped
    }

    fn count(&mut self, malformed: Malformed) {
        *match malformed {
            Malformed::Checksum => &mut self.stats.bad_checksum,
            Malformed::Fragment => &mut self.stats.fragments,
            _ => &mut self.stats.malformed,
        } += 1;
    }

    /// An answer (ICMP) to a sender, and the peer that it goes to.
    pub fn poll_reply(&mut self) -> Option<(PeerId, Vec<u8>)> {
        loop {
            let reply = self.replies.take()?;
            if let Ok(packet) = Packet::parse(&reply)
                && let Some(peer) = self.routes.lookup(packet.destination())
            {
                return Some((peer, reply));
            }
        }
    }

    /// Counted since the start.
    pub fn stats(&self) -> Stats {
        Stats {
            tracked: self.masquerade.len() as u64,
            evicted: self.masquerade.evicted(),
            ..self.stats
        }
    }
}
