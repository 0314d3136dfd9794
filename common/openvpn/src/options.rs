//! The options string of the "options consistency check". Each side sends the string in its key method 2
//! message:
//!
//! ```text
//! V4,dev-type tun,link-mtu 1549,tun-mtu 1500,proto UDPv4,cipher AES-256-GCM,auth [null-digest],
//! keysize 256,key-method 2,tls-client
//! ```
//!
//! A peer only warns about differences, but uses two of the options: `cipher` if ciphers cannot be
//! negotiated, and `comp-lzo`.

#[cfg(test)]
mod tests;

use crate::Role;
use crate::cipher::{Cipher, Digest};
use crate::compress::Framing;
use crate::wrap::KeyDirection;
use std::fmt::{self, Write};

/// Protocol that carries the packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Transport {
    /// TCP, a byte stream.
    Tcp,
    /// UDP, one datagram per packet.
    Udp,
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        })
    }
}

/// Options string of a peer, as far as this crate uses the options. A malformed option counts as missing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PeerOptions {
    /// Cipher for use without negotiation, in the peer's spelling.
    pub cipher: Option<String>,
    /// True if payloads have a compression framing.
    pub comp_lzo: bool,
    /// True if the peer splits packets with `fragment`, which needs an unsupported header.
    pub mtu_dynamic: bool,
    /// Largest inner packet of the peer, in bytes.
    pub tun_mtu: Option<u16>,
    /// True for a TAP peer, which carries Ethernet frames.
    pub tap: bool,
}

impl PeerOptions {
    /// Parses an options string.
    pub fn parse(options: &str) -> Self {
        let mut peer = Self::default();
        for option in options.split(',') {
            let (name, value) = option.split_once(' ').unwrap_or((option, ""));
            match name {
                "cipher" => peer.cipher = Some(value.to_owned()),
                "comp-lzo" => peer.comp_lzo = true,
                "mtu-dynamic" => peer.mtu_dynamic = true,
                "tun-mtu" => peer.tun_mtu = value.parse().ok(),
                "dev-type" => peer.tap = value == "tap",
                _ => {}
            }
        }
        peer
    }
}

/// Returns the options string that a peer with the string `peer` expects: the same options with both roles
/// swapped. A stock peer then logs no warnings.
pub fn mirror(peer: &str) -> String {
    let mirrored = peer.split(',').map(|option| match option {
        "proto TCPv4_SERVER" => "proto TCPv4_CLIENT",
        "proto TCPv4_CLIENT" => "proto TCPv4_SERVER",
        "proto TCPv6_SERVER" => "proto TCPv6_CLIENT",
        "proto TCPv6_CLIENT" => "proto TCPv6_SERVER",
        "keydir 0" => "keydir 1",
        "keydir 1" => "keydir 0",
        "tls-server" => "tls-client",
        "tls-client" => "tls-server",
        other => other,
    });
    mirrored.collect::<Vec<_>>().join(",")
}

/// Input for this side's options string, used if no string of the peer can be mirrored.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LocalOptions {
    pub(crate) role: Role,
    /// Protocol that carries the packets.
    pub(crate) transport: Transport,
    /// Largest inner packet, in bytes.
    pub(crate) tun_mtu: u16,
    /// Cipher for use without negotiation.
    pub(crate) cipher: Cipher,
    pub(crate) digest: Digest,
    /// Configured framing of payloads.
    pub(crate) framing: Framing,
    /// Key direction of this side; `None` without tls-auth.
    pub(crate) tls_auth: Option<KeyDirection>,
}

impl LocalOptions {
    /// Builds the same string as stock.
    pub(crate) fn build(&self) -> String {
        let (role, proto) = match (self.role, self.transport) {
            (Role::Client, Transport::Tcp) => ("client", "TCPv4_CLIENT"),
            (Role::Server, Transport::Tcp) => ("server", "TCPv4_SERVER"),
            (Role::Client, Transport::Udp) => ("client", "UDPv4"),
            (Role::Server, Transport::Udp) => ("server", "UDPv4"),
        };
        let mut out = String::with_capacity(256);
        let _ = write!(
            out,
            "V4,dev-type tun,link-mtu {},tun-mtu {},proto {proto}",
            self.link_mtu(),
            self.tun_mtu
        );
        if self.framing != Framing::None {
            out.push_str(",comp-lzo");
        }
        match self.tls_auth {
            Some(KeyDirection::Normal) => out.push_str(",keydir 0"),
            Some(KeyDirection::Inverse) => out.push_str(",keydir 1"),
            Some(KeyDirection::Both) | None => {}
        }
        let auth = if self.cipher.is_aead() {
            "[null-digest]"
        } else {
            self.digest.name()
        };
        let _ = write!(
            out,
            ",cipher {},auth {auth},keysize {}",
            self.cipher,
            self.cipher.key_len() * 8
        );
        if self.tls_auth.is_some() {
            out.push_str(",tls-auth");
        }
        let _ = write!(out, ",key-method 2,tls-{role}");
        out
    }

    /// Calculates the link MTU like stock, which counts room that no packet uses. Peers only compare the
    /// values for equality.
    fn link_mtu(&self) -> u32 {
        const OPCODE: usize = 1;
        const PACKET_ID: usize = 4;
        let cipher = match self.cipher {
            Cipher::Aes256Gcm | Cipher::Aes192Gcm | Cipher::Aes128Gcm => 12 + 16 + 16,
            Cipher::ChaCha20Poly1305 => 12 + 16 + 1,
            Cipher::Aes256Cbc | Cipher::Aes192Cbc | Cipher::Aes128Cbc => {
                16 + 16 + self.digest.output_len()
            }
        };
        let framing = usize::from(matches!(self.framing, Framing::Lzo | Framing::Stub));
        let transport = if self.transport == Transport::Tcp {
            2
        } else {
            0
        };
        u32::from(self.tun_mtu) + (OPCODE + PACKET_ID + cipher + framing + transport) as u32
    }
}
