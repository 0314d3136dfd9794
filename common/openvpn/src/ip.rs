//! Views of untrusted IPv4, TCP, UDP and ICMP packets, and their checksums.
//!
//! A view exists only for a packet with correct lengths and checksums, so its fields need no further checks.

#[cfg(test)]
pub(crate) mod build;
mod checksum;
mod icmp;
mod rewrite;
mod tcp;
#[cfg(test)]
mod tests;

use std::net::Ipv4Addr;

pub use checksum::Sum;
use checksum::adjust;
pub(crate) use icmp::Quote;
pub use icmp::{Icmp, kind};
pub(crate) use rewrite::Rewrite;
pub(crate) use tcp::window_scale;
pub use tcp::{Segment, flags};

/// Length of an IPv4 header without options, in bytes.
pub const HEADER: usize = 20;

/// IP protocol numbers.
pub mod protocol {
    /// ICMP.
    pub const ICMP: u8 = 1;
    /// TCP.
    pub const TCP: u8 = 6;
    /// UDP.
    pub const UDP: u8 = 17;
}

/// Reason why a packet is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Not IP version 4.
    #[error("not IPv4")]
    Version,
    /// Lengths that contradict each other or the packet.
    #[error("wrong length")]
    Length,
    /// Wrong checksum of a header or of the payload.
    #[error("wrong checksum")]
    Checksum,
    /// A fragment. Fragments are not reassembled, because TCP never needs them.
    #[error("fragment")]
    Fragment,
    /// An address that is not unicast, equal endpoints, port 0, or flags that exclude each other.
    #[error("invalid fields")]
    Fields,
}

/// A complete IPv4 packet.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    header: &'a [u8; HEADER],
    /// Header with options, and payload, without trailing bytes.
    bytes: &'a [u8],
    payload: &'a [u8],
}

impl<'a> Packet<'a> {
    /// Checks the header of a packet. Bytes after the end of the packet are ignored.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let header = bytes.first_chunk::<HEADER>().ok_or(Malformed::Length)?;
        if header[0] >> 4 != 4 {
            return Err(Malformed::Version);
        }
        let header_len = usize::from(header[0] & 15) * 4;
        let total = usize::from(u16::from_be_bytes([header[2], header[3]]));
        let bytes = bytes.get(..total).ok_or(Malformed::Length)?;
        if header_len < HEADER {
            return Err(Malformed::Length);
        }
        let (head, payload) = bytes
            .split_at_checked(header_len)
            .ok_or(Malformed::Length)?;
        if Sum::of(head).fold() != 0xffff {
            return Err(Malformed::Checksum);
        }
        // The "more fragments" flag, or an offset.
        if u16::from_be_bytes([header[6], header[7]]) & 0x3fff != 0 {
            return Err(Malformed::Fragment);
        }
        let packet = Self {
            header,
            bytes,
            payload,
        };
        if !unicast(packet.source()) || !unicast(packet.destination()) {
            return Err(Malformed::Fields);
        }
        Ok(packet)
    }

    /// Returns the source address.
    pub fn source(&self) -> Ipv4Addr {
        let h = self.header;
        Ipv4Addr::new(h[12], h[13], h[14], h[15])
    }

    /// Returns the destination address.
    pub fn destination(&self) -> Ipv4Addr {
        let h = self.header;
        Ipv4Addr::new(h[16], h[17], h[18], h[19])
    }

    /// Returns the protocol number, see [`protocol`].
    pub fn protocol(&self) -> u8 {
        self.header[9]
    }

    /// Returns the remaining hops.
    pub fn ttl(&self) -> u8 {
        self.header[8]
    }

    /// Returns the bytes after the header.
    pub fn payload(&self) -> &'a [u8] {
        self.payload
    }

    /// Returns the whole packet.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Returns the source and destination ports of a TCP or UDP packet. Further lengths are not checked.
    pub fn ports(&self) -> Option<(u16, u16)> {
        if !matches!(self.protocol(), protocol::TCP | protocol::UDP) {
            return None;
        }
        let p = self.payload.first_chunk::<4>()?;
        Some((
            u16::from_be_bytes([p[0], p[1]]),
            u16::from_be_bytes([p[2], p[3]]),
        ))
    }

    /// Checks the length of a UDP packet, and its checksum if present.
    pub fn check_udp(&self) -> Result<(), Malformed> {
        let h = self.payload.first_chunk::<8>().ok_or(Malformed::Length)?;
        let length = usize::from(u16::from_be_bytes([h[4], h[5]]));
        if length < 8 || length > self.payload.len() {
            return Err(Malformed::Length);
        }
        let datagram = self.payload.get(..length).ok_or(Malformed::Length)?;
        if [h[6], h[7]] != [0, 0]
            && (pseudo(self.source(), self.destination(), protocol::UDP, length)
                + Sum::of(datagram))
            .fold()
                != 0xffff
        {
            return Err(Malformed::Checksum);
        }
        Ok(())
    }
}

/// True if the address can belong to one host. Addresses in 0.0.0.0/8 cannot.
pub(crate) fn unicast(address: Ipv4Addr) -> bool {
    !address.is_multicast() && !address.is_broadcast() && address.octets()[0] != 0
}

/// Returns the sum of the pseudo header, which TCP and UDP checksums cover in addition to their own bytes.
pub fn pseudo(source: Ipv4Addr, destination: Ipv4Addr, protocol: u8, length: usize) -> Sum {
    let mut bytes = [0; 12];
    let [s0, s1, s2, s3] = source.octets();
    let [d0, d1, d2, d3] = destination.octets();
    let [l0, l1] = u16::try_from(length).unwrap_or(u16::MAX).to_be_bytes();
    bytes.copy_from_slice(&[s0, s1, s2, s3, d0, d1, d2, d3, 0, protocol, l0, l1]);
    Sum::of(&bytes)
}

/// Appends an IPv4 header without options for a payload of `length` bytes.
pub fn write_header(
    out: &mut Vec<u8>,
    source: Ipv4Addr,
    destination: Ipv4Addr,
    protocol: u8,
    length: usize,
) {
    let total = u16::try_from(HEADER + length).unwrap_or(u16::MAX);
    let mut header = [0; HEADER];
    header[0] = 0x45;
    [header[2], header[3]] = total.to_be_bytes();
    header[6] = 0x40; // don't fragment
    header[8] = 64;
    header[9] = protocol;
    [header[12], header[13], header[14], header[15]] = source.octets();
    [header[16], header[17], header[18], header[19]] = destination.octets();
    [header[10], header[11]] = Sum::of(&header).checksum().to_be_bytes();
    out.extend_from_slice(&header);
}
