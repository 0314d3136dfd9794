//! A TCP segment inside an IPv4 packet.

use std::net::SocketAddrV4;

use super::{Malformed, Packet, Sum, protocol, pseudo};

/// Flag bits of a segment.
pub mod flags {
    /// The sender has no further data.
    pub const FIN: u8 = 1;
    /// Opens a connection.
    pub const SYN: u8 = 2;
    /// Aborts a connection.
    pub const RST: u8 = 4;
    /// The acknowledgement number is valid.
    pub const ACK: u8 = 16;
}

/// A complete TCP segment.
#[derive(Clone, Copy, Debug)]
pub struct Segment<'a> {
    header: &'a [u8; 20],
    options: &'a [u8],
    payload: &'a [u8],
    source: SocketAddrV4,
    destination: SocketAddrV4,
}

impl<'a> Segment<'a> {
    /// Checks the segment in a packet: lengths, checksum, ports, flags and options.
    pub fn parse(packet: &Packet<'a>) -> Result<Self, Malformed> {
        let bytes = packet.payload();
        let header = bytes.first_chunk::<20>().ok_or(Malformed::Length)?;
        let (_, after) = bytes.split_at_checked(20).ok_or(Malformed::Length)?;
        let options_len = (usize::from(header[12] >> 4) * 4)
            .checked_sub(20)
            .ok_or(Malformed::Length)?;
        let (options, payload) = after
            .split_at_checked(options_len)
            .ok_or(Malformed::Length)?;
        let (from, to) = (packet.source(), packet.destination());
        let sum = pseudo(from, to, protocol::TCP, bytes.len()) + Sum::of(bytes);
        if sum.fold() != 0xffff {
            return Err(Malformed::Checksum);
        }
        let segment = Self {
            header,
            options,
            payload,
            source: SocketAddrV4::new(from, u16::from_be_bytes([header[0], header[1]])),
            destination: SocketAddrV4::new(to, u16::from_be_bytes([header[2], header[3]])),
        };
        let flags = segment.flags();
        let kinds = flags & (flags::SYN | flags::FIN | flags::RST);
        if segment.source.port() == 0
            || segment.destination.port() == 0
            || segment.source == segment.destination
            || kinds.count_ones() > 1
        {
            return Err(Malformed::Fields);
        }
        if !options.is_empty() && self::options(options).any(|option| option.is_none()) {
            return Err(Malformed::Length);
        }
        Ok(segment)
    }

    /// Returns the sender's address and port.
    pub fn source(&self) -> SocketAddrV4 {
        self.source
    }

    /// Returns the receiver's address and port.
    pub fn destination(&self) -> SocketAddrV4 {
        self.destination
    }

    /// Returns the length of the header with its options, in bytes.
    pub(crate) fn header_len(&self) -> usize {
        self.header.len() + self.options.len()
    }

    /// Returns the sequence number of the first byte.
    pub fn sequence(&self) -> u32 {
        let h = self.header;
        u32::from_be_bytes([h[4], h[5], h[6], h[7]])
    }

    /// Returns the sequence number of the next byte that the sender expects. Valid only with [`flags::ACK`].
    pub fn acknowledgement(&self) -> u32 {
        let h = self.header;
        u32::from_be_bytes([h[8], h[9], h[10], h[11]])
    }

    /// Returns the flags, see [`flags`].
    pub fn flags(&self) -> u8 {
        self.header[13] & 0x3f
    }

    /// True if at least one of `flags` is set.
    pub fn has(&self, flags: u8) -> bool {
        self.flags() & flags != 0
    }

    /// True if the segment requests a new connection.
    pub(crate) fn opens(&self) -> bool {
        self.flags() & (flags::SYN | flags::ACK) == flags::SYN
    }

    /// Returns the window field, unscaled.
    pub fn window(&self) -> u16 {
        u16::from_be_bytes([self.header[14], self.header[15]])
    }

    /// Returns the data.
    pub fn payload(&self) -> &'a [u8] {
        self.payload
    }

    /// Returns the number of sequence numbers that the segment uses.
    pub fn length(&self) -> u32 {
        let data = u32::try_from(self.payload.len()).unwrap_or(u32::MAX);
        data + u32::from(self.has(flags::SYN | flags::FIN))
    }

    /// Returns the window scale option of a SYN: the shift for the windows of later segments.
    pub(crate) fn window_scale(&self) -> Option<u8> {
        window_scale(self.options)
    }

    /// Returns the MSS option of a SYN: the largest payload that the sender accepts (RFC 9293, 3.7.1).
    pub(crate) fn mss(&self) -> Option<u16> {
        options(self.options)
            .flatten()
            .find_map(|option| match option {
                [2, 4, high, low] => Some(u16::from_be_bytes([*high, *low])),
                _ => None,
            })
    }
}

/// Returns the window scale option (RFC 7323), at most 14.
pub(crate) fn window_scale(bytes: &[u8]) -> Option<u8> {
    options(bytes).flatten().find_map(|option| match option {
        [3, 3, shift] => Some((*shift).min(14)),
        _ => None,
    })
}

/// Iterates over the options with a length field. Yields `None` for a malformed option, and then ends.
fn options(mut rest: &[u8]) -> impl Iterator<Item = Option<&[u8]>> {
    std::iter::from_fn(move || {
        while let [1, after @ ..] = rest {
            rest = after;
        }
        let (kind, length) = match rest {
            [] | [0, ..] => return None,
            [kind] => (kind, 0),
            [kind, length, ..] => (kind, usize::from(*length)),
        };
        let valid = match kind {
            2 => length == 4,
            3 => length == 3,
            4 => length == 2,
            5 => matches!(length, 10 | 18 | 26 | 34),
            8 => length == 10,
            _ => length >= 2,
        };
        let split = rest.split_at_checked(length).filter(|_| valid);
        rest = split.map_or(&[], |(_, after)| after);
        Some(split.map(|(option, _)| option))
    })
}
