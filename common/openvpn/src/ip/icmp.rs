//! ICMP messages, and the packets that errors quote.

use std::net::Ipv4Addr;

use super::{HEADER, Malformed, Packet, Sum, protocol};

/// Message types.
pub mod kind {
    /// Answer to an echo request.
    pub const ECHO_REPLY: u8 = 0;
    /// The destination can not be reached.
    pub const UNREACHABLE: u8 = 3;
    /// Ping.
    pub const ECHO: u8 = 8;
    /// Too many hops.
    pub const TIME_EXCEEDED: u8 = 11;
    /// A header field is wrong.
    pub const PARAMETER_PROBLEM: u8 = 12;
}

/// An ICMP message, whole.
#[derive(Clone, Copy, Debug)]
pub struct Icmp<'a> {
    header: &'a [u8; 8],
    body: &'a [u8],
}

impl<'a> Icmp<'a> {
    /// Checks a packet's message.
    pub fn parse(packet: &Packet<'a>) -> Result<Self, Malformed> {
        let bytes = packet.payload();
        let header = bytes.first_chunk::<8>().ok_or(Malformed::Length)?;
        let body = bytes.get(8..).ok_or(Malformed::Length)?;
        if Sum::of(bytes).fold() != 0xffff {
            return Err(Malformed::Checksum);
        }
        Ok(Self { header, body })
    }

    /// See [`kind`].
    pub fn kind(&self) -> u8 {
        self.header[0]
    }

    /// What it says in detail.
    pub fn code(&self) -> u8 {
        self.header[1]
    }

    /// The identifier of an echo or its reply.
    pub fn identifier(&self) -> u16 {
        u16::from_be_bytes([self.header[4], self.header[5]])
    }

    /// The four bytes behind the checksum.
    pub fn rest(&self) -> [u8; 4] {
        let h = self.header;
        [h[4], h[5], h[6], h[7]]
    }

    /// What is behind the header.
    pub fn body(&self) -> &'a [u8] {
        self.body
    }

    /// The packet that an error message is about.
    pub fn quote(&self) -> Option<Quote> {
        matches!(
            self.kind(),
            kind::UNREACHABLE | kind::TIME_EXCEEDED | kind::PARAMETER_PROBLEM
        )
        .then(|| Quote::parse(self.body))
        .flatten()
    }
}

/// The beginning of a packet, as an ICMP error quotes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quote {
    /// Who sent the quoted packet.
    pub source: Ipv4Addr,
    /// Whom it was for.
    pub destination: Ipv4Addr,
    /// See [`protocol`].
    pub protocol: u8,
    /// Source and destination port; twice the identifier for an ICMP echo.
    pub ports: (u16, u16),
    /// The sequence number, for TCP.
    pub sequence: u32,
    /// For ICMP: whether it was an echo request rather than its reply.
    pub echo_request: bool,
}

impl Quote {
    /// A header and the eight bytes that every host quotes (RFC 792). None for a fragment, and
    /// for an ICMP message that is no echo.
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
        let first = u16::from_be_bytes([p[0], p[1]]);
        let second = u16::from_be_bytes([p[2], p[3]]);
        let third = u16::from_be_bytes([p[4], p[5]]);
        Some(Self {
            source: Ipv4Addr::new(h[12], h[13], h[14], h[15]),
            destination: Ipv4Addr::new(h[16], h[17], h[18], h[19]),
            protocol: h[9],
            ports: if icmp {
                (third, third)
            } else {
                (first, second)
            },
            sequence: u32::from_be_bytes([p[4], p[5], p[6], p[7]]),
            echo_request: icmp && p[0] == kind::ECHO,
        })
    }
}
