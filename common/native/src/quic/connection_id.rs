//! The connection ids of a server's QUIC connections: the front door forwards packets by them without state.
//!
//! ```text
//! | tag, 4 bytes | shard, 1 byte | random, 3 bytes |
//! ```
//!
//! The tag depends only on the address and port that the server receives on, so every front door can compute
//! the tags of all endpoints in its routes. The ids are not secret: a forged id sends a packet to a server
//! that drops the packet.

use std::net::{IpAddr, SocketAddr};

use aws_lc_rs::digest::{Context, SHA256};

/// Length of a connection id, in bytes.
pub const CONNECTION_ID_BYTES: usize = TAG_BYTES + 1 + RANDOM_BYTES;

/// Number of random bytes in a connection id.
pub const RANDOM_BYTES: usize = 3;

/// Length of a tag, in bytes.
const TAG_BYTES: usize = 4;

/// Mark of the server's address in its connection ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag([u8; TAG_BYTES]);

/// Connection id that a server chooses for one of its connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConnectionId {
    /// Mark of the server's address.
    pub tag: Tag,
    /// Shard of the server that owns the connection.
    pub shard: u8,
    /// Bytes that distinguish the connections of one shard.
    pub random: [u8; RANDOM_BYTES],
}

// === impl Tag ===

impl Tag {
    /// Returns the tag of the server that receives on `address`: the first 4 bytes of
    /// SHA-256("culvert" || address || port).
    ///
    /// The address is hashed as 4 bytes (IPv4) or 16 bytes (IPv6), the port as 2 bytes, all in network byte
    /// order. An IPv4-mapped IPv6 address (`::ffff:10.0.0.1`) counts as IPv4, because sockets for both families
    /// report IPv4 addresses in this form. Zone and flow label of an IPv6 address do not count.
    pub fn of(address: SocketAddr) -> Self {
        let mut context = Context::new(&SHA256);
        context.update(b"culvert");
        match address.ip().to_canonical() {
            IpAddr::V4(ip) => context.update(&ip.octets()),
            IpAddr::V6(ip) => context.update(&ip.octets()),
        }
        context.update(&address.port().to_be_bytes());
        let digest = context.finish();
        // Cannot fail: the digest has 32 bytes.
        Self(digest.as_ref().first_chunk().copied().unwrap_or_default())
    }
}

// === impl ConnectionId ===

impl ConnectionId {
    /// Parses the bytes of a connection id; `None` if the length is wrong.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let &[a, b, c, d, shard, ref random @ ..] =
            <&[u8; CONNECTION_ID_BYTES]>::try_from(bytes).ok()?;
        Some(Self {
            tag: Tag([a, b, c, d]),
            shard,
            random: *random,
        })
    }

    /// Returns the bytes for the wire.
    pub fn to_bytes(self) -> [u8; CONNECTION_ID_BYTES] {
        let (Tag([a, b, c, d]), [x, y, z]) = (self.tag, self.random);
        [a, b, c, d, self.shard, x, y, z]
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]

    use super::*;

    fn tag(address: &str) -> Tag {
        Tag::of(address.parse().unwrap())
    }

    /// Values computed by another implementation of SHA-256.
    #[test]
    fn tag_is_the_recorded_hash_of_address_and_port() {
        assert_eq!(tag("10.0.0.1:6443"), Tag([0x32, 0x1a, 0xc7, 0x8c]));
        assert_eq!(tag("10.0.0.1:6444"), Tag([0xc6, 0xd2, 0xca, 0x40]));
        assert_eq!(tag("[2001:db8::1]:6443"), Tag([0x83, 0x52, 0x75, 0x8a]));
    }

    #[test]
    fn form_of_the_address_does_not_change_the_tag() {
        assert_eq!(tag("[::ffff:10.0.0.1]:6443"), tag("10.0.0.1:6443"));
        assert_eq!(tag("[2001:db8::1%7]:6443"), tag("[2001:db8::1]:6443"));
    }

    #[test]
    fn connection_id_round_trips_through_its_bytes() {
        let id = ConnectionId {
            tag: tag("10.0.0.1:6443"),
            shard: 5,
            random: [1, 2, 3],
        };
        let bytes = id.to_bytes();
        assert_eq!(bytes, [0x32, 0x1a, 0xc7, 0x8c, 5, 1, 2, 3]);
        assert_eq!(ConnectionId::parse(&bytes), Some(id));
        for wrong in [&bytes[..7], &[0; 9], &[]] {
            assert_eq!(ConnectionId::parse(wrong), None);
        }
    }
}
