//! Packets for tests.

use std::net::SocketAddrV4;

use super::{HEADER, Sum, kind, protocol, pseudo, write_header};

/// Sequence number, acknowledgement number and window of a segment.
#[derive(Clone, Copy, Default)]
pub(crate) struct Numbers(pub(crate) u32, pub(crate) u32, pub(crate) u16);

/// Builds a TCP packet with correct checksums.
pub(crate) fn tcp(
    from: SocketAddrV4,
    to: SocketAddrV4,
    Numbers(sequence, acknowledgement, window): Numbers,
    flags: u8,
    options: &[u8],
    data: &[u8],
) -> Vec<u8> {
    let mut segment = ports(from, to);
    segment.extend(sequence.to_be_bytes());
    segment.extend(acknowledgement.to_be_bytes());
    segment.extend([((5 + options.len() / 4) as u8) << 4, flags]);
    segment.extend(window.to_be_bytes());
    segment.extend([0; 4]);
    segment.extend_from_slice(options);
    segment.extend_from_slice(data);
    whole(from, to, protocol::TCP, segment, 16)
}

/// Builds a UDP packet with correct checksums.
pub(crate) fn udp(from: SocketAddrV4, to: SocketAddrV4, data: &[u8]) -> Vec<u8> {
    let mut datagram = ports(from, to);
    datagram.extend((8 + data.len() as u16).to_be_bytes());
    datagram.extend([0; 2]);
    datagram.extend_from_slice(data);
    whole(from, to, protocol::UDP, datagram, 6)
}

/// Builds an ICMP packet with correct checksums. The ports of both endpoints are ignored.
pub(crate) fn icmp(
    from: SocketAddrV4,
    to: SocketAddrV4,
    kind_and_code: [u8; 2],
    rest: [u8; 4],
    body: &[u8],
) -> Vec<u8> {
    let mut message = kind_and_code.to_vec();
    message.extend([0; 2]);
    message.extend(rest);
    message.extend_from_slice(body);
    let sum = Sum::of(&message).checksum().to_be_bytes();
    message.splice(2..4, sum);
    let mut packet = Vec::new();
    write_header(
        &mut packet,
        *from.ip(),
        *to.ip(),
        protocol::ICMP,
        message.len(),
    );
    packet.extend(message);
    packet
}

/// Builds an echo request or an echo reply.
pub(crate) fn echo(from: SocketAddrV4, to: SocketAddrV4, reply: bool, id: u16) -> Vec<u8> {
    let kind = if reply { kind::ECHO_REPLY } else { kind::ECHO };
    let [high, low] = id.to_be_bytes();
    icmp(from, to, [kind, 0], [high, low, 0, 1], b"0123456789")
}

fn ports(from: SocketAddrV4, to: SocketAddrV4) -> Vec<u8> {
    [from.port().to_be_bytes(), to.port().to_be_bytes()].concat()
}

fn whole(
    from: SocketAddrV4,
    to: SocketAddrV4,
    protocol: u8,
    mut payload: Vec<u8>,
    checksum: usize,
) -> Vec<u8> {
    let sum = pseudo(*from.ip(), *to.ip(), protocol, payload.len()) + Sum::of(&payload);
    payload.splice(checksum..checksum + 2, sum.checksum().to_be_bytes());
    let mut packet = Vec::with_capacity(HEADER + payload.len());
    write_header(&mut packet, *from.ip(), *to.ip(), protocol, payload.len());
    packet.extend(payload);
    packet
}
