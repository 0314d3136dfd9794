//! The ClientHello in the Initial packets of a QUIC client, and the connection ids in packet headers (RFC 9000,
//! RFC 9001). No I/O.
//!
//! Initial packets are encrypted, but everybody who receives them can derive the keys from the destination
//! connection id that the client has chosen. A hello with post-quantum key shares needs two datagrams, which may
//! arrive in any order.

#[cfg(test)]
pub(super) mod tests;

use rustls::Side;
use rustls::crypto::aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256;
use rustls::quic::{Keys, Version};

use crate::client_hello::{Hello, HelloError, parse_message};

use InitialError::{Malformed, NotInitial, TooLarge, Undecryptable};

/// Smallest datagram with an Initial packet of a client (RFC 9000, 14.1).
pub const MIN_DATAGRAM_BYTES: usize = 1200;

/// Largest datagram with an Initial packet that is read: the MTU of Ethernet.
pub const MAX_DATAGRAM_BYTES: usize = 1500;

/// Largest ClientHello, in bytes. Hellos with post-quantum key shares have up to 2,000 bytes.
pub const MAX_HELLO_BYTES: usize = 4096;

/// Largest connection id of version 1, in bytes.
pub const MAX_ID_BYTES: usize = 20;

/// Smallest destination id in a client's first packets, in bytes (RFC 9000, 7.2).
const MIN_FIRST_ID_BYTES: usize = 8;

const VERSION_1: [u8; 4] = [0, 0, 0, 1];

// Bits of the first byte (RFC 9000, 17.2).
const LONG: u8 = 0x80;
const FIXED: u8 = 0x40;
const KIND: u8 = 0x30;
const NUMBER_LENGTH: u8 = 0x03;

/// Value of [`KIND`] for Initial packets.
const INITIAL: u8 = 0x00;

/// Distance from the packet number to the sample of header protection, in bytes (RFC 9001, 5.4.2). Also the
/// largest length of a packet number.
const SAMPLE_OFFSET: usize = 4;

// Frames that a client sends before the first answer (RFC 9000, 12.4).
const PADDING: u8 = 0x00;
const PING: u8 = 0x01;
const CRYPTO: u8 = 0x06;

/// Unencrypted part of a packet's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Header<'a> {
    /// Long header of version 1.
    Long {
        /// True for an Initial packet.
        is_initial: bool,
        /// Connection id of the receiver.
        destination: &'a [u8],
        /// Connection id of the sender.
        source: &'a [u8],
    },
    /// Short header, with everything behind its first byte. The header does not contain the length of the
    /// receiver's connection id, which comes first.
    Short(&'a [u8]),
}

/// Reason why Initial packets do not route their connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InitialError {
    /// The datagram does not begin with an Initial packet of a client, or has a wrong size.
    #[error(
        "not an Initial packet of QUIC version 1 in a datagram of {MIN_DATAGRAM_BYTES} to {MAX_DATAGRAM_BYTES} bytes; check the client"
    )]
    NotInitial,
    /// The keys that belong to the connection id do not decrypt a packet.
    #[error("the Initial packet cannot be decrypted; check the client and the network between")]
    Undecryptable,
    /// The frames in a packet are malformed, or not allowed before the first answer.
    #[error("the Initial packet has malformed or unexpected frames; check the client")]
    Malformed,
    /// The ClientHello exceeds [`MAX_HELLO_BYTES`].
    #[error(
        "the ClientHello is larger than {MAX_HELLO_BYTES} bytes; make the client offer less, or use TCP"
    )]
    TooLarge,
    /// The ClientHello is unusable.
    #[error(transparent)]
    Hello(#[from] HelloError),
}

/// The handshake bytes of a client, with gaps.
#[derive(Clone, Debug, Default)]
pub struct CryptoStream(Vec<Option<u8>>);

/// An encrypted Initial packet.
struct InitialPacket<'a> {
    bytes: &'a [u8],
    /// Length of the header without the packet number.
    number_at: usize,
}

/// The unread rest of a packet or of frames.
struct Fields<'a>(&'a [u8]);

// === impl Header ===

impl<'a> Header<'a> {
    /// Parses the header of the first packet in a datagram. `None` if the packet has another version, or is
    /// truncated.
    pub fn parse(datagram: &'a [u8]) -> Option<Self> {
        let mut fields = Fields(datagram);
        let first = fields.u8()?;
        if first & LONG == 0 {
            return Some(Self::Short(fields.0));
        }
        if fields.bytes(VERSION_1.len())? != VERSION_1 {
            return None;
        }
        Some(Self::Long {
            is_initial: first & (FIXED | KIND) == FIXED | INITIAL,
            destination: fields.id()?,
            source: fields.id()?,
        })
    }
}

// === impl CryptoStream ===

impl CryptoStream {
    /// Adds the Initial packets in a datagram of the client that has chosen the destination id `id`. The datagrams of a
    /// client may come in any order.
    ///
    /// # Errors
    /// [`InitialError`]: packets before the wrong one may have been added. The hello may still arrive in another
    /// datagram.
    pub fn add_datagram(&mut self, id: &[u8], datagram: &[u8]) -> Result<(), InitialError> {
        let has_valid_size = (MIN_DATAGRAM_BYTES..=MAX_DATAGRAM_BYTES).contains(&datagram.len());
        if id.len() < MIN_FIRST_ID_BYTES || !has_valid_size {
            return Err(NotInitial);
        }
        let mut packets = Fields(datagram);
        let mut packet = packets.initial(id).ok_or(NotInitial)?;
        let suite = TLS13_AES_128_GCM_SHA256.tls13();
        let suite = suite.and_then(|suite| suite.quic_suite());
        let keys = suite.ok_or(Undecryptable)?;
        let keys = keys.keys(id, Side::Server, Version::V1);
        // Other packets may follow in the same datagram. Only Initial packets matter.
        loop {
            let frames = packet.decrypt(&keys).ok_or(Undecryptable)?;
            self.add_frames(&frames)?;
            match packets.initial(id) {
                Some(next) => packet = next,
                None => return Ok(()),
            }
        }
    }

    /// Adds the frames of one packet.
    ///
    /// # Errors
    /// [`InitialError::Malformed`] or [`InitialError::TooLarge`].
    pub fn add_frames(&mut self, frames: &[u8]) -> Result<(), InitialError> {
        let mut frames = Fields(frames);
        while let Some(kind) = frames.u8() {
            match kind {
                PADDING | PING => {}
                CRYPTO => {
                    let offset = frames.varint().ok_or(Malformed)?;
                    let len = frames.varint().ok_or(Malformed)?;
                    self.add(offset, frames.bytes(len).ok_or(Malformed)?)?;
                }
                _ => return Err(Malformed),
            }
        }
        Ok(())
    }

    fn add(&mut self, offset: usize, bytes: &[u8]) -> Result<(), InitialError> {
        let end = offset.checked_add(bytes.len());
        let end = end.filter(|end| *end <= MAX_HELLO_BYTES).ok_or(TooLarge)?;
        if self.0.len() < end {
            self.0.resize(end, None);
        }
        for (to, &byte) in self.0.iter_mut().skip(offset).zip(bytes) {
            *to = Some(byte);
        }
        Ok(())
    }

    /// Returns the memory of the stream, in bytes.
    pub(super) fn memory(&self) -> usize {
        self.0.capacity() * size_of::<Option<u8>>()
    }

    /// Returns the hello; `None` while it is incomplete.
    ///
    /// # Errors
    /// [`InitialError::TooLarge`] or [`InitialError::Hello`].
    pub fn hello(&self) -> Result<Option<Hello>, InitialError> {
        let message: Vec<u8> = self.0.iter().map_while(|byte| *byte).collect();
        match parse_message(&message, MAX_HELLO_BYTES) {
            Err(HelloError::TooLarge) => Err(TooLarge),
            parsed => Ok(parsed?),
        }
    }
}

// === impl InitialPacket ===

impl InitialPacket<'_> {
    /// Returns the frames of the packet. The caller's bytes stay as they are, because they are forwarded.
    fn decrypt(&self, keys: &Keys) -> Option<Vec<u8>> {
        let keys = &keys.remote;
        let mut packet = self.bytes.to_vec();
        let (header, rest) = packet.split_at_mut_checked(self.number_at)?;
        let (number, rest) = rest.split_at_mut_checked(SAMPLE_OFFSET)?;
        let sample = rest.get(..keys.header.sample_len())?;
        let first = header.first_mut()?;
        keys.header.decrypt_in_place(sample, first, number).ok()?;
        let number_len = usize::from(*first & NUMBER_LENGTH) + 1;
        let number = number.iter().take(number_len);
        // The first packet numbers of a connection are small, so their encoding has all their bits.
        let number = number.fold(0, |value, &byte| value << 8 | u64::from(byte));
        let (header, payload) = packet.split_at_mut_checked(self.number_at + number_len)?;
        let frames = keys.packet.decrypt_in_place(number, header, payload).ok()?;
        Some(frames.to_vec())
    }
}

// === impl Fields ===

impl<'a> Fields<'a> {
    fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(bytes)
    }

    fn u8(&mut self) -> Option<u8> {
        let (&byte, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(byte)
    }

    /// Reads a connection id and its length.
    fn id(&mut self) -> Option<&'a [u8]> {
        let len = usize::from(self.u8()?);
        (len <= MAX_ID_BYTES).then(|| self.bytes(len))?
    }

    /// Reads an integer of variable length (RFC 9000, 16).
    fn varint(&mut self) -> Option<usize> {
        let first = self.u8()?;
        let rest = self.bytes((1 << (first >> 6)) - 1)?;
        let value = rest.iter().fold(u64::from(first & 0x3f), |value, &byte| {
            value << 8 | u64::from(byte)
        });
        value.try_into().ok()
    }

    /// Reads an Initial packet with the destination id `id`; `None` if something else comes next.
    fn initial(&mut self, id: &[u8]) -> Option<InitialPacket<'a>> {
        let start = self.0;
        let Header::Long {
            is_initial: true,
            destination,
            ..
        } = Header::parse(start)?
        else {
            return None;
        };
        if destination != id {
            return None;
        }
        self.bytes(1 + VERSION_1.len())?;
        let (_destination, _source) = (self.id()?, self.id()?);
        let token = self.varint()?;
        self.bytes(token)?;
        let len = self.varint()?;
        let number_at = start.len() - self.0.len();
        self.bytes(len)?;
        Some(InitialPacket {
            bytes: start.get(..number_at + len)?,
            number_at,
        })
    }
}
