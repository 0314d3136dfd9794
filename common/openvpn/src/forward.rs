//! The forwarding path of the server: a packet out of one tunnel goes to the server itself, to another peer,
//! or is dropped.
//!
//! Owns the routes, firewall and masquerade of one server, and the counters.

#[cfg(test)]
mod tests;

use std::net::Ipv4Addr;
use std::time::Instant;

use crate::echo::Replies;
use crate::firewall::Firewall;
use crate::ip::{Malformed, Packet, Rewrite, kind, protocol};
use crate::masquerade::{FLOW_PORTS, Masquerade, Untracked};
use crate::routes::{PeerId, Routes};

/// Destination of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The server itself: an ICMP packet, or a segment to the ports of the server's own flows.
    Local,
    /// This peer. The packet has been translated in place.
    To(PeerId),
    /// The packet is dropped and counted.
    Dropped,
}

/// Counters since the start, and gauges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Packets to the server itself.
    pub local: u64,
    /// Packets from one peer to another.
    pub forwarded: u64,
    /// Packets with wrong lengths or invalid fields.
    pub malformed: u64,
    /// Packets with a wrong checksum.
    pub bad_checksum: u64,
    /// Fragments.
    pub fragments: u64,
    /// Packets with a source that is neither the peer's own address nor in its iroutes.
    pub bad_source: u64,
    /// Packets without a route to the destination.
    pub no_route: u64,
    /// Packets that the firewall drops.
    pub filtered: u64,
    /// Packets with an exhausted TTL.
    pub ttl_exceeded: u64,
    /// Packets of new connections that were dropped because the table was full.
    pub table_full: u64,
    /// Packets of new connections that were dropped because no port was free.
    pub ports_exhausted: u64,
    /// Current number of tracked connections.
    pub tracked: u64,
    /// Connections that were removed early to make room.
    pub evicted: u64,
}

/// Routes, rules and tracked connections of one server.
pub struct Forward {
    address: Ipv4Addr,
    /// Addresses and networks of the peers.
    pub routes: Routes,
    firewall: Firewall,
    masquerade: Masquerade,
    replies: Replies,
    stats: Stats,
}

impl Forward {
    /// Creates the forwarding of a server at `address`, with at most `max_tracked` connections of about 300
    /// bytes each.
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

    /// Decides the destination of a packet from `peer`, and translates the packet.
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

    /// Handles a packet to the server's address: an answer to a client, or a packet for the server itself.
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
                // No ICMP error here: the packet was already translated, and the sender would not recognize
                // the quote.
                if !Rewrite::new(packet).is_some_and(|mut rewrite| rewrite.decrement_ttl()) {
                    self.stats.ttl_exceeded += 1;
                    return Verdict::Dropped;
                }
                self.stats.forwarded += 1;
                Verdict::To(to)
            }
            // Only ICMP reaches the server itself.
            Err(Untracked::Unknown) if port.is_none() => {
                self.stats.local += 1;
                Verdict::Local
            }
            Err(why) => self.drop_untracked(why),
        }
    }

    /// Decrements the TTL. With an exhausted TTL the sender gets an ICMP error and the result is false.
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

    /// Returns the next ICMP answer to a sender, and its peer.
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

    /// Returns the counters.
    pub fn stats(&self) -> Stats {
        Stats {
            tracked: self.masquerade.len() as u64,
            evicted: self.masquerade.evicted(),
            ..self.stats
        }
    }
}
