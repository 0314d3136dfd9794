//! The options string of the "options consistency check", which each side puts into its key method 2
//! message:
//!
//! ```text
//! V4,dev-type tun,link-mtu 1549,tun-mtu 1500,proto UDPv4,cipher AES-256-GCM,auth [null-digest],
//! keysize 256,key-method 2,tls-client
//! ```
//!
//! A peer only warns about differences, but uses two of the options: `cipher` where ciphers can not be
//! negotiated, and `comp-lzo`.

#[cfg(test)]
mod tests;

use crate::Role;
use crate::cipher::{Cipher, Digest};
use crate::compress::Framing;
use crate::wrap::KeyDirection;
use std::fmt::Write;

/// What carries the packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Transport {
    /// A stream.
    Tcp,
    /// Datagrams.
    Udp,
}

/// What a peer's options string says, as far as anything depends on it. What is missing or not
/// understood is as if it were not there.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PeerOptions {
    /// The cipher where none is negotiated, as the peer spells it.
    pub cipher: Option<String>,
    /// The digest of its MACs.
    pub auth: Option<String>,
    /// Whether payloads have a compression framing.
    pub comp_lzo: bool,
    /// Whether the peer splits packets with `fragment`, which needs a header that is not supported.
    pub mtu_dynamic: bool,
    /// Its largest packet on the wire, as it calculates it.
    pub link_mtu: Option<u16>,
    /// Its largest inner packet.
    pub tun_mtu: Option<u16>,
    /// Whether it is a TAP peer, which carries Ethernet frames.
    pub tap: bool,
}

impl PeerOptions {
    /// Reads an options string.
    pub fn parse(options: &str) -> Self {
        let mut peer = Self::default();
        for option in options.split(',') {
            let (name, value) = option.split_once(' ').unwrap_or((option, ""));
            match name {
                "cipher" => peer.cipher = Some(value.to_owned()),
                "auth" => peer.auth = Some(value.to_owned()),
                "comp-lzo" => peer.comp_lzo = true,
                "mtu-dynamic" => peer.mtu_dynamic = true,
                "link-mtu" => peer.link_mtu = value.parse().ok(),
                "tun-mtu" => peer.tun_mtu = value.parse().ok(),
                "dev-type" => peer.tap = value == "tap",
                _ => {}
            }
        }
        peer
    }
}

/// The string that a peer expects from us, made from its own: each side names its own role. With
/// it, a stock peer's log stays clean.
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

/// What our own string is made from, where there is no peer's to mirror.
#[derive(Debug, Clone, Copy)]
pub struct LocalOptions {
    /// Ours.
    pub role: Role,
    /// What carries the packets.
    pub transport: Transport,
    /// The largest inner packet.
    pub tun_mtu: u16,
    /// The cipher where none is negotiated.
    pub cipher: Cipher,
    /// The digest of MACs.
    pub digest: Digest,
    /// Of payloads, as configured.
    pub framing: Framing,
    /// Ours, if tls-auth is used.
    pub tls_auth: Option<KeyDirection>,
}

impl LocalOptions {
    /// Writes the string as stock does.
    pub fn build(&self) -> String {
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

    /// Stock's calculation, which counts room that no packet uses; only equality matters.
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
