//! Translation of addresses and ports in place.

use std::net::Ipv4Addr;

use super::{HEADER, Sum, adjust, protocol};

/// A packet to be changed, or the start of a packet quoted by an ICMP error.
///
/// Checksums are adjusted, not recomputed: a wrong checksum stays wrong, and a quoted packet may be
/// truncated. Fields outside the available bytes are ignored.
#[derive(Debug)]
pub(crate) struct Rewrite<'a> {
    bytes: &'a mut [u8],
    header_len: usize,
    protocol: u8,
}

impl<'a> Rewrite<'a> {
    /// Returns `None` if the header is incomplete.
    pub(crate) fn new(bytes: &'a mut [u8]) -> Option<Self> {
        let header = bytes.first_chunk::<HEADER>()?;
        let header_len = usize::from(header[0] & 15) * 4;
        let protocol = header[9];
        (header_len >= HEADER && header_len <= bytes.len()).then_some(Self {
            bytes,
            header_len,
            protocol,
        })
    }

    pub(crate) fn set_source(&mut self, address: Ipv4Addr) {
        self.set_address(12, address);
    }

    pub(crate) fn set_destination(&mut self, address: Ipv4Addr) {
        self.set_address(16, address);
    }

    /// Changes the source port, or the identifier of an ICMP echo.
    pub(crate) fn set_source_port(&mut self, port: u16) {
        self.set_port(0, port);
    }

    /// Changes the destination port, or the identifier of an ICMP echo.
    pub(crate) fn set_destination_port(&mut self, port: u16) {
        self.set_port(2, port);
    }

    /// Decrements the TTL. Returns false, without a change, if the TTL is already 1 or 0.
    pub(crate) fn decrement_ttl(&mut self) -> bool {
        let Some([ttl, protocol]) = self.word(8).map(u16::to_be_bytes) else {
            return false;
        };
        if ttl <= 1 {
            return false;
        }
        self.set_word(8, u16::from_be_bytes([ttl - 1, protocol]), [Some(10), None]);
        true
    }

    /// Returns the packet quoted by an ICMP error.
    pub(crate) fn quoted(&mut self) -> Option<Rewrite<'_>> {
        Rewrite::new(self.bytes.get_mut(self.header_len + 8..)?)
    }

    /// Recomputes the checksum of an ICMP message after its quote was changed.
    pub(crate) fn fill_icmp_checksum(&mut self) {
        let Some(message) = self.bytes.get_mut(self.header_len..) else {
            return;
        };
        if let Some(field) = message.get_mut(2..4) {
            field.fill(0);
        }
        let sum = Sum::of(message).checksum().to_be_bytes();
        if let Some(field) = message.get_mut(2..4) {
            field.copy_from_slice(&sum);
        }
    }

    fn set_address(&mut self, at: usize, address: Ipv4Addr) {
        let [a, b, c, d] = address.octets();
        let checksums = [Some(10), self.transport_checksum(false)];
        self.set_word(at, u16::from_be_bytes([a, b]), checksums);
        self.set_word(at + 2, u16::from_be_bytes([c, d]), checksums);
    }

    fn set_port(&mut self, at: usize, port: u16) {
        // The identifier of an echo follows the checksum.
        let at = match self.protocol {
            protocol::TCP | protocol::UDP => self.header_len + at,
            protocol::ICMP => self.header_len + 4,
            _ => return,
        };
        let checksum = self.transport_checksum(true);
        self.set_word(at, port, [checksum, None]);
    }

    /// Returns the offset of the transport checksum, if present. The ICMP checksum does not cover addresses.
    fn transport_checksum(&self, ports: bool) -> Option<usize> {
        let at = match self.protocol {
            protocol::TCP => self.header_len + 16,
            // A UDP checksum of 0 means that the packet has no checksum.
            protocol::UDP if self.word(self.header_len + 6) != Some(0) => self.header_len + 6,
            protocol::ICMP if ports => self.header_len + 2,
            _ => return None,
        };
        (at + 2 <= self.bytes.len()).then_some(at)
    }

    fn word(&self, at: usize) -> Option<u16> {
        let word = self.bytes.get(at..)?.first_chunk::<2>()?;
        Some(u16::from_be_bytes(*word))
    }

    fn set_word(&mut self, at: usize, new: u16, checksums: [Option<usize>; 2]) {
        let Some(old) = self.word(at) else {
            return;
        };
        self.put(at, new);
        for field in checksums.into_iter().flatten() {
            let Some(checksum) = self.word(field) else {
                continue;
            };
            let adjusted = adjust(checksum, old, new);
            let of_udp = self.protocol == protocol::UDP && field != 10;
            let adjusted = if of_udp && adjusted == 0 {
                0xffff
            } else {
                adjusted
            };
            self.put(field, adjusted);
        }
    }

    fn put(&mut self, at: usize, word: u16) {
        if let Some(field) = self.bytes.get_mut(at..at + 2) {
            field.copy_from_slice(&word.to_be_bytes());
        }
    }
}
