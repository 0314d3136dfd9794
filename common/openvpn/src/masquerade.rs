//! Translation of what VPN clients send into the user cluster, so that it comes from the server's
//! own address: what `iptables -j MASQUERADE` and connection tracking do in the kernel.
//!
//! Owns the tracked connections, their ports and timeouts. Peers do not appear here: who has an
//! address is asked for each packet, so that connections survive a peer's reconnect.

mod table;
#[cfg(test)]
mod tests;

use std::net::{Ipv4Addr, SocketAddrV4};
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use table::{Connection, Table};

use crate::ip::{Icmp, Malformed, Packet, Quote, Rewrite, Segment, flags, kind, protocol};

pub use table::Untracked;

/// Local ports of masqueraded connections. Those of the own flows are [`FLOW_PORTS`].
pub const MASQUERADE_PORTS: RangeInclusive<u16> = 1024..=32767;
/// Local ports of dialed flows.
pub const FLOW_PORTS: RangeInclusive<u16> = 32768..=65535;

/// How long a connection is kept that nothing passes through, about as long as Linux does; an
/// established one a day instead of five.
mod kept {
    use super::Duration;

    pub(super) const OPENING: Duration = Duration::from_secs(120);
    pub(super) const ESTABLISHED: Duration = Duration::from_secs(24 * 3600);
    pub(super) const CLOSING: Duration = Duration::from_secs(120);
    pub(super) const RESET: Duration = Duration::from_secs(10);
    pub(super) const UDP: Duration = Duration::from_secs(30);
    pub(super) const UDP_ANSWERED: Duration = Duration::from_secs(180);
    pub(super) const ICMP: Duration = Duration::from_secs(30);
}

/// The ends of a packet, as far as translation goes: an echo's identifier stands for both ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ends {
    protocol: u8,
    source: SocketAddrV4,
    destination: SocketAddrV4,
    /// Flags, of TCP.
    flags: u8,
    /// An echo reply, which opens nothing.
    reply: bool,
}

/// What a packet is to the translation.
enum Kind {
    Packet(Ends),
    Error(Quote),
    /// Nothing that is tracked.
    Other,
}

/// The translation table.
#[derive(Debug)]
pub struct Masquerade {
    address: Ipv4Addr,
    table: Table,
}

impl Masquerade {
    /// Translates to `address`, for at most `max_tracked` connections.
    pub fn new(address: Ipv4Addr, max_tracked: usize) -> Self {
        Self {
            address,
            table: Table::new(max_tracked),
        }
    }

    /// Translates a packet on its way out. A new connection is tracked only
    /// if `open`; a segment in the middle of one counts as new, too, as it does in Linux.
    pub fn outward(
        &mut self,
        packet: &mut [u8],
        open: bool,
        now: Instant,
    ) -> Result<(), Untracked> {
        match Kind::of(packet)? {
            Kind::Packet(ends) => {
                let connection =
                    match self
                        .table
                        .outward(ends.protocol, ends.source, ends.destination)
                    {
                        Some(connection) => connection,
                        None if open && !ends.reply => {
                            self.table
                                .open(ends.protocol, ends.source, ends.destination, now)?
                        }
                        None => return Err(Untracked::Unknown),
                    };
                connection.pass(&ends, false, now);
                let port = connection.port;
                if let Some(mut rewrite) = Rewrite::new(packet) {
                    rewrite.set_source(self.address);
                    rewrite.set_source_port(port);
                }
                Ok(())
            }
            // About a packet that came in: it was for the client, as the client saw it.
            Kind::Error(quote) => {
                let (remote, client) = quote_ends(&quote);
                let connection = self
                    .table
                    .outward(quote.protocol, client, remote)
                    .filter(|_| !quote.echo_request)
                    .ok_or(Untracked::Unknown)?;
                let port = connection.port;
                if let Some(mut rewrite) = Rewrite::new(packet) {
                    if let Some(mut quoted) = rewrite.quoted() {
                        quoted.set_destination(self.address);
                        quoted.set_destination_port(port);
                    }
                    rewrite.fill_icmp_checksum();
                    rewrite.set_source(self.address);
                }
                Ok(())
            }
            Kind::Other => Err(Untracked::Unknown),
        }
    }

    /// Translates a packet to the own address back, and returns whom it is for.
    pub fn inward(&mut self, packet: &mut [u8], now: Instant) -> Result<Ipv4Addr, Untracked> {
        match Kind::of(packet)? {
            Kind::Packet(ends) => {
                if ends.protocol == protocol::ICMP && !ends.reply {
                    return Err(Untracked::Unknown);
                }
                let connection = self
                    .table
                    .inward(ends.protocol, ends.source, ends.destination.port())
                    .ok_or(Untracked::Unknown)?;
                connection.pass(&ends, true, now);
                let client = connection.source;
                if let Some(mut rewrite) = Rewrite::new(packet) {
                    rewrite.set_destination(*client.ip());
                    rewrite.set_destination_port(client.port());
                }
                Ok(*client.ip())
            }
            // About a packet that went out: it came from here.
            Kind::Error(quote) => {
                let (own, remote) = quote_ends(&quote);
                if *own.ip() != self.address
                    || (quote.protocol == protocol::ICMP && !quote.echo_request)
                {
                    return Err(Untracked::Unknown);
                }
                let connection = self
                    .table
                    .inward(quote.protocol, remote, own.port())
                    .ok_or(Untracked::Unknown)?;
                let client = connection.source;
                if let Some(mut rewrite) = Rewrite::new(packet) {
                    if let Some(mut quoted) = rewrite.quoted() {
                        quoted.set_source(*client.ip());
                        quoted.set_source_port(client.port());
                    }
                    rewrite.fill_icmp_checksum();
                    rewrite.set_destination(*client.ip());
                }
                Ok(*client.ip())
            }
            Kind::Other => Err(Untracked::Unknown),
        }
    }

    /// Forgets connections whose time is over.
    pub fn expire(&mut self, now: Instant) {
        self.table.expire(now);
    }

    /// Tracked connections.
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// Nothing is tracked.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Connections that were forgotten early, to make room.
    pub fn evicted(&self) -> u64 {
        self.table.evicted
    }
}

fn quote_ends(quote: &Quote) -> (SocketAddrV4, SocketAddrV4) {
    (
        SocketAddrV4::new(quote.source, quote.ports.0),
        SocketAddrV4::new(quote.destination, quote.ports.1),
    )
}

impl Kind {
    fn of(packet: &[u8]) -> Result<Self, Malformed> {
        let packet = Packet::parse(packet)?;
        let mut reply = false;
        let mut tcp_flags = 0;
        let (from, to) = match packet.protocol() {
            protocol::TCP => {
                let segment = Segment::parse(&packet)?;
                tcp_flags = segment.flags();
                (segment.source().port(), segment.destination().port())
            }
            protocol::UDP => {
                packet.check_udp()?;
                packet.ports().ok_or(Malformed::Length)?
            }
            protocol::ICMP => {
                let icmp = Icmp::parse(&packet)?;
                if let Some(quote) = icmp.quote() {
                    return Ok(Self::Error(quote));
                }
                if !matches!(icmp.kind(), kind::ECHO | kind::ECHO_REPLY) {
                    return Ok(Self::Other);
                }
                reply = icmp.kind() == kind::ECHO_REPLY;
                (icmp.identifier(), icmp.identifier())
            }
            _ => return Ok(Self::Other),
        };
        Ok(Self::Packet(Ends {
            protocol: packet.protocol(),
            source: SocketAddrV4::new(packet.source(), from),
            destination: SocketAddrV4::new(packet.destination(), to),
            flags: tcp_flags,
            reply,
        }))
    }
}

impl Connection {
    /// Notes a packet, which may change how long the connection is kept.
    fn pass(&mut self, ends: &Ends, inward: bool, now: Instant) {
        self.answered |= inward;
        if ends.protocol == protocol::TCP {
            if ends.flags & flags::SYN != 0 && !inward {
                // The ports are used again.
                (self.reset, self.ended) = (false, [false; 2]);
            }
            self.reset |= ends.flags & flags::RST != 0;
            if ends.flags & flags::FIN != 0 {
                let [out, back] = &mut self.ended;
                *(if inward { back } else { out }) = true;
            }
        }
        let keep = match ends.protocol {
            protocol::TCP if self.reset => kept::RESET,
            protocol::TCP if self.ended == [true; 2] => kept::CLOSING,
            protocol::TCP if self.answered => kept::ESTABLISHED,
            protocol::TCP => kept::OPENING,
            protocol::UDP if self.answered => kept::UDP_ANSWERED,
            protocol::UDP => kept::UDP,
            _ => kept::ICMP,
        };
        self.until = now + keep;
    }
}
