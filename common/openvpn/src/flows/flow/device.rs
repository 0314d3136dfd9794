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

/// Lowers the advertised window to the offer. The window of a SYN stays unchanged: it is small and never
/// scaled.
fn limit_window(packet: &mut [u8], offer: Offer) {
    let Some((_, tcp)) = packet.split_first_chunk_mut::<HEADER>() else {
        return;
    };
    let Some(head) = tcp.first_chunk_mut::<HEADER>() else {
        return;
    };
    if head[13] & (flags::SYN | flags::RST | flags::ACK) != flags::ACK {
        return;
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

/// smoltcp's device for sending: packets go to the link.
pub(crate) struct Outbound<'a> {
    outbox: &'a mut Outbox,
    link: &'a mut dyn FnMut(&[u8]) -> bool,
    mtu: usize,
    offer: Offer,
    emitted: Option<Emitted>,
}

impl<'a> Outbound<'a> {
    pub(crate) fn new(
        outbox: &'a mut Outbox,
        link: &'a mut dyn FnMut(&[u8]) -> bool,
        mtu: usize,
        offer: Offer,
    ) -> Self {
        Self {
            outbox,
            link,
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

impl Device for Outbound<'_> {
    type RxToken<'b>
        = Received<'b>
    where
        Self: 'b;
    type TxToken<'b>
        = ToLink<'b>
    where
        Self: 'b;

    fn receive(&mut self, _: Instant) -> Option<(Received<'_>, ToLink<'_>)> {
        None
    }

    fn transmit(&mut self, _: Instant) -> Option<ToLink<'_>> {
        if self.outbox.is_full() {
            return None;
        }
        Some(ToLink {
            outbox: self.outbox,
            link: self.link,
            offer: self.offer,
            emitted: &mut self.emitted,
        })
    }

    fn capabilities(&self) -> DeviceCapabilities {
        capabilities(self.mtu)
    }
}

/// Token to send one packet to the link.
pub(crate) struct ToLink<'a> {
    outbox: &'a mut Outbox,
    link: &'a mut dyn FnMut(&[u8]) -> bool,
    offer: Offer,
    emitted: &'a mut Option<Emitted>,
}

impl TxToken for ToLink<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, length: usize, make: F) -> R {
        if length > self.outbox.buffer.len() {
            self.outbox.buffer.resize(length, 0);
        }
        // The resize above guarantees the length; `unwrap_or` never applies.
        let packet = self.outbox.buffer.get_mut(..length).unwrap_or(&mut []);
        let result = make(packet);
        limit_window(packet, self.offer);
        fill_checksums(packet);
        *self.emitted = Emitted::of(packet);
        self.outbox.offer(length, self.link);
        result
    }
}

/// smoltcp's device for receiving: one packet comes in, and its answer goes to the replies.
pub(crate) struct Inbound<'a, 'b> {
    packet: &'a [u8],
    replies: &'a mut Option<&'b mut Replies>,
    mtu: usize,
    offer: Offer,
    emitted: Option<Emitted>,
}

impl<'a, 'b> Inbound<'a, 'b> {
    pub(crate) fn new(
        packet: &'a [u8],
        replies: &'a mut Option<&'b mut Replies>,
        mtu: usize,
        offer: Offer,
    ) -> Self {
        Self {
            packet,
            replies,
            mtu,
            offer,
            emitted: None,
        }
    }

    /// Returns the header of the emitted answer, if smoltcp emitted one.
    pub(crate) fn emitted(self) -> Option<Emitted> {
        self.emitted
    }
}

impl Device for Inbound<'_, '_> {
    type RxToken<'c>
        = Received<'c>
    where
        Self: 'c;
    type TxToken<'c>
        = ToReplies<'c>
    where
        Self: 'c;

    fn receive(&mut self, _: Instant) -> Option<(Received<'_>, ToReplies<'_>)> {
        let replies = self.replies.as_deref_mut()?;
        let packet = std::mem::take(&mut self.packet);
        let to = ToReplies(replies, self.offer, &mut self.emitted);
        (!packet.is_empty()).then_some((Received(packet), to))
    }

    fn transmit(&mut self, _: Instant) -> Option<ToReplies<'_>> {
        None
    }

    fn capabilities(&self) -> DeviceCapabilities {
        capabilities(self.mtu)
    }
}

/// The packet to receive.
pub(crate) struct Received<'a>(&'a [u8]);

impl RxToken for Received<'_> {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, take: F) -> R {
        take(self.0)
    }
}

/// Token to queue the answer.
pub(crate) struct ToReplies<'a>(&'a mut Replies, Offer, &'a mut Option<Emitted>);

impl TxToken for ToReplies<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, length: usize, make: F) -> R {
        let mut packet = self.0.buffer();
        packet.resize(length, 0);
        let result = make(&mut packet);
        limit_window(&mut packet, self.1);
        fill_checksums(&mut packet);
        let emitted = Emitted::of(&packet);
        if self.0.queue(packet) {
            *self.2 = emitted;
        }
        result
    }
}
