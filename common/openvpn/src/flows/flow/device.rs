//! The two ends of smoltcp's network device: one packet in, one packet out.
//!
//! Owns the buffer for outgoing packets, and one packet that a full link has refused.

use std::net::Ipv4Addr;

use smoltcp::phy::{Checksum, Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::time::Instant;

use super::track::{Emitted, Offer};
use crate::echo::Replies;
use crate::ip::{HEADER, Sum, flags, protocol, pseudo};

/// Returns the device's capabilities. smoltcp's own checksums are disabled: this crate computes and checks
/// them once, and faster.
fn capabilities(mtu: usize) -> DeviceCapabilities {
    let mut capabilities = DeviceCapabilities::default();
    capabilities.medium = Medium::Ip;
    capabilities.max_transmission_unit = mtu;
    capabilities.checksum.ipv4 = Checksum::None;
    capabilities.checksum.tcp = Checksum::None;
    capabilities.checksum.icmpv4 = Checksum::None;
    capabilities
}

/// Lowers the advertised window to the offer, and corrects the sequence number of an acknowledgement without data. The
/// window of a SYN stays unchanged: it is small and never scaled.
fn correct(packet: &mut [u8], offer: Offer) {
    let Some((_, tcp)) = packet.split_first_chunk_mut::<HEADER>() else {
        return;
    };
    let Some((head, rest)) = tcp.split_first_chunk_mut::<HEADER>() else {
        return;
    };
    if head[13] & (flags::SYN | flags::RST | flags::ACK) != flags::ACK {
        return;
    }
    let has_data = rest.len() + HEADER > usize::from(head[12] >> 4) * 4;
    if !has_data && head[13] & flags::FIN == 0 {
        let sequence = u32::from_be_bytes([head[4], head[5], head[6], head[7]]);
        let [a, b, c, d] = offer.sequence(sequence).to_be_bytes();
        [head[4], head[5], head[6], head[7]] = [a, b, c, d];
    }
    let acknowledgement = u32::from_be_bytes([head[8], head[9], head[10], head[11]]);
    let window = u16::from_be_bytes([head[14], head[15]]);
    [head[14], head[15]] = offer.window(acknowledgement, window).to_be_bytes();
}

/// Fills in both checksums of a TCP packet without IP options.
fn fill_checksums(packet: &mut [u8]) {
    let Some((header, tcp)) = packet.split_first_chunk_mut::<HEADER>() else {
        return;
    };
    [header[10], header[11]] = [0, 0];
    [header[10], header[11]] = Sum::of(header).checksum().to_be_bytes();
    let source = Ipv4Addr::new(header[12], header[13], header[14], header[15]);
    let destination = Ipv4Addr::new(header[16], header[17], header[18], header[19]);
    let length = tcp.len();
    let Some(head) = tcp.first_chunk_mut::<HEADER>() else {
        return;
    };
    [head[16], head[17]] = [0, 0];
    let sum = pseudo(source, destination, protocol::TCP, length) + Sum::of(tcp);
    if let Some(head) = tcp.first_chunk_mut::<HEADER>() {
        [head[16], head[17]] = sum.checksum().to_be_bytes();
    }
}

/// The packet buffer in front of the link.
#[derive(Debug)]
pub(crate) struct Outbox {
    buffer: Vec<u8>,
    /// Length of the packet that the link has refused; 0 if no packet waits.
    refused: usize,
    /// Packets and bytes that the link has accepted.
    pub(crate) packets: u64,
    pub(crate) bytes: u64,
}

impl Outbox {
    pub(crate) fn new(mtu: usize) -> Self {
        Self {
            buffer: vec![0; mtu.max(576)],
            refused: 0,
            packets: 0,
            bytes: 0,
        }
    }

    /// True if a packet waits for the link.
    pub(crate) fn is_full(&self) -> bool {
        self.refused > 0
    }

    /// Offers the waiting packet to the link again. Returns true if no packet waits afterwards.
    pub(crate) fn flush(&mut self, link: &mut dyn FnMut(&[u8]) -> bool) -> bool {
        let length = std::mem::take(&mut self.refused);
        length == 0 || self.offer(length, link)
    }

    fn offer(&mut self, length: usize, link: &mut dyn FnMut(&[u8]) -> bool) -> bool {
        let accepted = self.buffer.get(..length).is_none_or(link);
        if accepted {
            self.packets += 1;
            self.bytes += length as u64;
        } else {
            self.refused = length;
        }
        accepted
    }
}

/// Receiver of the packets that smoltcp emits.
pub(crate) enum Sink<'a> {
    /// Packets are discarded. Used where smoltcp has no packet to emit.
    None,
    /// Packets go to the link.
    Link(&'a mut Outbox, &'a mut dyn FnMut(&[u8]) -> bool),
    /// The answer to a received packet goes to the replies.
    Replies(&'a mut Replies),
}

/// smoltcp's device for one packet in either direction.
pub(crate) struct Wire<'a> {
    /// Packet to receive; empty if none.
    packet: &'a [u8],
    sink: Sink<'a>,
    mtu: usize,
    offer: Offer,
    emitted: Option<Emitted>,
}

impl<'a> Wire<'a> {
    pub(crate) fn new(packet: &'a [u8], sink: Sink<'a>, mtu: usize, offer: Offer) -> Self {
        Self {
            packet,
            sink,
            mtu,
            offer,
            emitted: None,
        }
    }

    /// Returns the header of the emitted packet, if smoltcp emitted one.
    pub(crate) fn emitted(self) -> Option<Emitted> {
        self.emitted
    }
}

impl<'a> Device for Wire<'a> {
    type RxToken<'b>
        = Received<'b>
    where
        Self: 'b;
    type TxToken<'b>
        = Emit<'a, 'b>
    where
        Self: 'b;

    fn receive(&mut self, _: Instant) -> Option<(Received<'_>, Emit<'a, '_>)> {
        let packet = std::mem::take(&mut self.packet);
        (!packet.is_empty()).then_some((Received(packet), Emit(self)))
    }

    fn transmit(&mut self, _: Instant) -> Option<Emit<'a, '_>> {
        match &self.sink {
            Sink::Link(outbox, _) if !outbox.is_full() => Some(Emit(self)),
            _ => None,
        }
    }

    fn capabilities(&self) -> DeviceCapabilities {
        capabilities(self.mtu)
    }
}

/// Token to receive the packet.
pub(crate) struct Received<'a>(&'a [u8]);

impl RxToken for Received<'_> {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, read: F) -> R {
        read(self.0)
    }
}

/// Token to emit one packet.
pub(crate) struct Emit<'a, 'b>(&'b mut Wire<'a>);

impl TxToken for Emit<'_, '_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, length: usize, make: F) -> R {
        let Wire {
            sink,
            offer,
            emitted,
            ..
        } = self.0;
        let finish = |packet: &mut [u8]| {
            correct(packet, *offer);
            fill_checksums(packet);
            Emitted::of(packet)
        };
        match sink {
            Sink::Link(outbox, link) => {
                if length > outbox.buffer.len() {
                    outbox.buffer.resize(length, 0);
                }
                // The resize above guarantees the length; `unwrap_or` never applies.
                let packet = outbox.buffer.get_mut(..length).unwrap_or(&mut []);
                let result = make(packet);
                *emitted = finish(packet);
                outbox.offer(length, *link);
                result
            }
            Sink::Replies(replies) => {
                let mut packet = replies.buffer();
                packet.resize(length, 0);
                let result = make(&mut packet);
                let header = finish(&mut packet);
                if replies.queue(packet) {
                    *emitted = header;
                }
                result
            }
            Sink::None => make(&mut vec![0; length]),
        }
    }
}
