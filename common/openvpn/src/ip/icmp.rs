//! ICMP messages, and the packets quoted by ICMP errors.

use std::net::SocketAddrV4;

use super::{HEADER, Malformed, Packet, Sum, protocol};

/// Message types.
pub mod kind {
    /// Echo reply.
    pub const ECHO_REPLY: u8 = 0;
    /// Destination unreachable.
    pub const UNREACHABLE: u8 = 3;
    /// Echo request.
    pub const ECHO: u8 = 8;
    /// Time exceeded.
    pub(crate) const TIME_EXCEEDED: u8 = 11;
    /// Parameter problem: a header field is wrong.
    pub(crate) const PARAMETER_PROBLEM: u8 = 12;
}

/// A complete ICMP message.
#[derive(Clone, Copy, Debug)]
pub struct Icmp<'a> {
    header: &'a [u8; 8],
    body: &'a [u8],
}

impl<'a> Icmp<'a> {
    /// Checks the message in a packet.
    pub fn parse(packet: &Packet<'a>) -> Result<Self, Malformed> {
        let bytes = packet.payload();
        let header = bytes.first_chunk::<8>().ok_or(Malformed::Length)?;
        let body = bytes.get(8..).ok_or(Malformed::Length)?;
        if Sum::of(bytes).fold() != 0xffff {
            return Err(Malformed::Checksum);
        }
        Ok(Self { header, body })
    }

    /// Returns the type, see [`kind`].
    pub fn kind(&self) -> u8 {
        self.header[0]
    }

    /// Returns the code, which refines the type.
    pub fn code(&self) -> u8 {
        self.header[1]
    }

    /// Returns the identifier of an echo request or reply.
    pub(crate) fn identifier(&self) -> u16 {
        u16::from_be_bytes([self.header[4], self.header[5]])
    }

    /// Returns the four bytes after the checksum.
    pub fn rest(&self) -> [u8; 4] {
        let h = self.header;
        [h[4], h[5], h[6], h[7]]
    }

    /// Returns the bytes after the header.
    pub fn body(&self) -> &'a [u8] {
        self.body
    }

    /// Returns the quoted packet of an error message. `None` for other messages.
    pub(crate) fn quote(&self) -> Option<Quote> {
        matches!(
            self.kind(),
            kind::UNREACHABLE | kind::TIME_EXCEEDED | kind::PARAMETER_PROBLEM
        )
        .then(|| Quote::parse(self.body))
        .flatten()
    }
}

/// The start of a packet, as quoted by an ICMP error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Quote {
    /// Source address and port. For an ICMP echo, both ports are the identifier.
    pub(crate) source: SocketAddrV4,
    /// Destination address and port.
    pub(crate) destination: SocketAddrV4,
    /// Protocol number, see [`protocol`].
    pub(crate) protocol: u8,
    /// Sequence number, for TCP.
    pub(crate) sequence: u32,
    /// True for an ICMP echo request, false for its reply and for other protocols.
    pub(crate) echo_request: bool,
}

impl Quote {
    /// Parses a header and the eight bytes after it, which every host quotes (RFC 792). Returns `None` for a
    /// later fragment, and for ICMP messages other than echo requests and replies.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let h = bytes.first_chunk::<HEADER>()?;
        let header_len = usize::from(h[0] & 15) * 4;
        if h[0] >> 4 != 4 || header_len < HEADER || u16::from_be_bytes([h[6], h[7]]) & 0x1fff != 0 {
            return None;
        }
        let p = bytes.get(header_len..)?.first_chunk::<8>()?;
        let icmp = h[9] == protocol::ICMP;
        if icmp && !matches!(p[0], kind::ECHO | kind::ECHO_REPLY) {
            return None;
        }
        let [first, second, third] =
            [[p[0], p[1]], [p[2], p[3]], [p[4], p[5]]].map(u16::from_be_bytes);
        let (from, to) = match icmp {
            true => (third, third),
            false => (first, second),
        };
        Some(Self {
            source: SocketAddrV4::new([h[12], h[13], h[14], h[15]].into(), from),
            destination: SocketAddrV4::new([h[16], h[17], h[18], h[19]].into(), to),
            protocol: h[9],
            sequence: u32::from_be_bytes([p[4], p[5], p[6], p[7]]),
            echo_request: icmp && p[0] == kind::ECHO,
        })
    }
}
