//! Source translation of connections from VPN clients into the user cluster: the destination receives packets
//! from the server's own address. `iptables -j MASQUERADE` and connection tracking do the same in the kernel.
//!
//! Owns the tracked connections, their ports and timeouts. Entries do not refer to peers: the peer of an
//! address is looked up for each packet, so connections survive the reconnect of a peer.

mod table;
#[cfg(test)]
mod tests;

use std::net::{Ipv4Addr, SocketAddrV4};
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use table::{Connection, Table};

use crate::ip::{Icmp, Malformed, Packet, Quote, Rewrite, Segment, flags, kind, protocol};

pub(crate) use table::Untracked;

/// Local ports of masqueraded connections. The server's own flows use [`FLOW_PORTS`].
pub(crate) const MASQUERADE_PORTS: RangeInclusive<u16> = 1024..=32767;
/// Local ports of dialed flows.
pub(crate) const FLOW_PORTS: RangeInclusive<u16> = 32768..=65535;

/// Idle timeouts of connections. They are about as long as in Linux, except for established TCP connections:
/// one day instead of five.
mod timeout {
    use super::Duration;

    pub(super) const OPENING: Duration = Duration::from_secs(120);
    pub(super) const ESTABLISHED: Duration = Duration::from_secs(24 * 3600);
    pub(super) const CLOSING: Duration = Duration::from_secs(120);
    pub(super) const RESET: Duration = Duration::from_secs(10);
    pub(super) const UDP: Duration = Duration::from_secs(30);
    pub(super) const UDP_ANSWERED: Duration = Duration::from_secs(180);
    pub(super) const ICMP: Duration = Duration::from_secs(30);
}

/// Both ends of a packet, as seen by the translation. For an echo, both ports are the identifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ends {
    protocol: u8,
    source: SocketAddrV4,
    destination: SocketAddrV4,
    /// TCP flags; 0 for other protocols.
    flags: u8,
    /// Set for an echo reply, which opens no connection.
    reply: bool,
}

/// Kind of a packet, as seen by the translation.
enum Kind {
    Packet(Ends),
    Error(Quote),
    /// A packet that is not tracked.
    Other,
}

/// The translation table.
#[derive(Debug)]
pub(crate) struct Masquerade {
    address: Ipv4Addr,
    table: Table,
}

impl Masquerade {
    /// Creates a table for at most `max_tracked` connections, translated to `address`.
    pub(crate) fn new(address: Ipv4Addr, max_tracked: usize) -> Self {
        Self {
            address,
            table: Table::new(max_tracked),
        }
    }

    /// Translates an outgoing packet. A new connection is tracked only if `open` is true. As in Linux, a
    /// segment from the middle of an unknown TCP connection counts as a new connection.
    pub(crate) fn outward(
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
                connection.record(&ends, false, now);
                let port = connection.port;
                if let Some(mut rewrite) = Rewrite::new(packet) {
                    rewrite.set_source(self.address);
                    rewrite.set_source_port(port);
                }
                Ok(())
            }
            // The error quotes an incoming packet, with the client's address as destination.
            Kind::Error(quote) => {
                let connection = self
                    .table
                    .outward(quote.protocol, quote.destination, quote.source)
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

    /// Translates a packet to the server's address back to the client's address, and returns the client's
    /// address.
    pub(crate) fn inward(
        &mut self,
        packet: &mut [u8],
        now: Instant,
    ) -> Result<Ipv4Addr, Untracked> {
        match Kind::of(packet)? {
            Kind::Packet(ends) => {
                if ends.protocol == protocol::ICMP && !ends.reply {
                    return Err(Untracked::Unknown);
                }
                let connection = self
                    .table
                    .inward(ends.protocol, ends.source, ends.destination.port())
                    .ok_or(Untracked::Unknown)?;
                connection.record(&ends, true, now);
                let client = connection.source;
                if let Some(mut rewrite) = Rewrite::new(packet) {
                    rewrite.set_destination(*client.ip());
                    rewrite.set_destination_port(client.port());
                }
                Ok(*client.ip())
            }
            // The error quotes an outgoing packet, with the server's address as source.
            Kind::Error(quote) => {
                let (own, remote) = (quote.source, quote.destination);
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

    pub(crate) fn expire(&mut self, now: Instant) {
        self.table.expire(now);
    }

    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    pub(crate) fn evicted(&self) -> u64 {
        self.table.evicted
    }
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
    /// Records a packet, which may change the connection's timeout.
    fn record(&mut self, ends: &Ends, inward: bool, now: Instant) {
        self.answered |= inward;
        if ends.protocol == protocol::TCP {
            if ends.flags & flags::SYN != 0 && !inward {
                // A SYN from the client starts a new connection with the same ports.
                (self.reset, self.ended) = (false, [false; 2]);
            }
            self.reset |= ends.flags & flags::RST != 0;
            if ends.flags & flags::FIN != 0 {
                let [out, back] = &mut self.ended;
                *(if inward { back } else { out }) = true;
            }
        }
        let keep = match ends.protocol {
            protocol::TCP if self.reset => timeout::RESET,
            protocol::TCP if self.is_closed() => timeout::CLOSING,
            protocol::TCP if self.answered => timeout::ESTABLISHED,
            protocol::TCP => timeout::OPENING,
            protocol::UDP if self.answered => timeout::UDP_ANSWERED,
            protocol::UDP => timeout::UDP,
            _ => timeout::ICMP,
        };
        self.until = now + keep;
    }
}
