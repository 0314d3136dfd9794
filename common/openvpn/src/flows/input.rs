//! The input of the flows: packets out of the tunnel go to their flows.

use std::time::Instant;

use super::slots::{Pending, Slot, event};
use super::{Closed, Flows, Input, Unreachable};
use crate::ip::{Icmp, Malformed, Packet, Segment, flags, kind, protocol};
use crate::tuple::{Key, Tuple};

/// Largest packet of a SYN, in bytes: options, and little or no data.
const MAX_SYN: usize = 256;

/// Code of an ICMP "destination unreachable" message: the packet is too large for the next network (RFC 792).
const TOO_LARGE: u8 = 4;

impl Flows {
    /// Processes an inner packet out of the tunnel.
    pub fn input(&mut self, packet: &[u8], now: Instant) -> Input {
        self.tick(now);
        self.liveness.received(now);
        let segment = Packet::parse(packet).and_then(|packet| {
            Ok(match packet.protocol() {
                protocol::TCP => Some((packet, Segment::parse(&packet)?)),
                _ => None,
            })
        });
        match segment {
            Ok(Some((packet, segment))) => self.segment(&packet, &segment, now),
            Ok(None) => Packet::parse(packet).map_or(Input::Unknown, |packet| self.icmp(&packet)),
            Err(malformed) => {
                self.count(malformed);
                Input::Dropped
            }
        }
    }

    fn segment(&mut self, packet: &Packet<'_>, segment: &Segment<'_>, now: Instant) -> Input {
        let key = Key::new(segment.destination(), segment.source());
        let index = if self.last.0 == key && self.last.1 != u32::MAX {
            self.last.1
        } else if let Some(index) = self.table.get(&key) {
            self.last = (key, *index);
            *index
        } else {
            return self.unknown_flow(packet, segment, key, now);
        };
        self.stats.received += 1;
        let last_received = self.liveness.now(now);
        let Some(entry) = self.slots.entry(index) else {
            return Input::Unknown;
        };
        let flow = match &mut entry.slot {
            Slot::Open(flow) => flow,
            Slot::Pending(pending) => {
                // A repeated SYN changes nothing: the first SYN still waits for the owner.
                if segment.has(flags::RST) && pending.ending.is_none() {
                    pending.ending = Some(Closed::Reset);
                    self.give_up(index);
                }
                return Input::Accepted;
            }
            Slot::Free => return Input::Unknown,
        };
        let beyond = flow.refuses(segment, &mut self.replies);
        if beyond || flow.connected && flow.track.outside_window(segment) {
            self.stats.out_of_window += 1;
        }
        if beyond {
            return Input::Accepted;
        }
        if !segment.payload().is_empty() {
            self.receiving.moved(&mut flow.received_in, now);
        }
        flow.receive_share = self.receiving.of(flow.received_in);
        let repeating = flow.track.is_repeating();
        let acknowledged = flow.input(segment, packet.bytes(), &mut self.replies, now);
        flow.last_received = last_received;
        self.slots.make_ready(index);
        if self.pacer.is_some() {
            self.paced_input(index, acknowledged, repeating && acknowledged > 0, now);
        }
        self.settle(index);
        self.wake_waiting();
        Input::Accepted
    }

    /// Passes an acknowledgement to the pacer. A repeated segment counts as lost only if the repetition was
    /// acknowledged (`repaired`). Segments to a host that is gone are not a loss on the path.
    fn paced_input(&mut self, index: u32, acknowledged: u32, repaired: bool, now: Instant) {
        let measured = self
            .slots
            .flow(index)
            .and_then(|flow| flow.track.round_trip(now));
        if let Some(pacer) = &mut self.pacer {
            if let Some(measured) = measured {
                pacer.round_trip(measured, now);
            }
            if repaired {
                pacer.lost(now);
            } else if acknowledged > 0 {
                pacer.acknowledged(acknowledged as usize, self.charged, now);
            }
        }
        self.recharge(index);
    }

    /// Processes a segment of an unknown flow.
    fn unknown_flow(
        &mut self,
        packet: &Packet<'_>,
        segment: &Segment<'_>,
        key: Key,
        now: Instant,
    ) -> Input {
        if segment.opens() && self.config.accept && segment.destination().port() != 0 {
            self.incoming(packet, segment, key, now);
            return Input::Accepted;
        }
        let Some(last) = self.time_wait.last(key) else {
            return Input::Unknown;
        };
        if segment.length() > 0 && !segment.has(flags::SYN | flags::RST) {
            self.replies
                .acknowledge(segment, last.sequence, last.expected);
        }
        Input::Accepted
    }

    fn incoming(&mut self, packet: &Packet<'_>, segment: &Segment<'_>, key: Key, now: Instant) {
        if self.pending >= self.config.max_pending
            || self.slots.len() >= self.config.max_flows
            || packet.bytes().len() > MAX_SYN
        {
            self.stats.syns_dropped += 1;
            return;
        }
        self.time_wait.remove(key);
        let until = now + self.config.accept_timeout;
        let id = self.slots.insert(Slot::Pending(Pending {
            tuple: Tuple {
                local: segment.destination(),
                remote: segment.source(),
            },
            syn: packet.bytes().to_vec(),
            until,
            ending: None,
        }));
        self.pending += 1;
        self.table.insert(key, id.index);
        self.slots.arm(id.index, until);
        self.slots.report(id.index, event::INCOMING);
    }

    /// Ends a flow that waits for the owner. If the owner has not received the `Incoming` event yet, no event
    /// follows.
    pub(super) fn give_up(&mut self, index: u32) {
        if let Some(entry) = self.slots.entry(index) {
            if entry.events & event::INCOMING != 0 {
                self.remove(index);
            } else {
                self.slots.report(index, event::CLOSED);
            }
        }
    }

    /// Processes an ICMP error about a packet that a flow sent.
    fn icmp(&mut self, packet: &Packet<'_>) -> Input {
        if packet.protocol() != protocol::ICMP {
            return Input::Unknown;
        }
        let icmp = match Icmp::parse(packet) {
            Ok(icmp) => icmp,
            Err(malformed) => {
                self.count(malformed);
                return Input::Dropped;
            }
        };
        let Some(quote) = icmp.quote() else {
            return Input::Unknown;
        };
        if quote.protocol != protocol::TCP || *quote.source.ip() != packet.destination() {
            return Input::Unknown;
        }
        let tuple = Tuple {
            local: quote.source,
            remote: quote.destination,
        };
        let Some(index) = self.table.get(&tuple.into()).copied() else {
            return Input::Unknown;
        };
        let now = self.now;
        let flow = self.slots.flow(index).filter(|flow| {
            flow.ending.is_none()
                && flow.track.is_in_flight(quote.sequence)
                && icmp.kind() == kind::UNREACHABLE
        });
        match flow {
            // The last two bytes are the MTU of the network after the router (RFC 1191, 4).
            Some(flow) if icmp.code() == TOO_LARGE => {
                let [.., high, low] = icmp.rest();
                flow.lower_mtu(u16::from_be_bytes([high, low]), now);
            }
            // Once connected, other errors are only hints (RFC 1122, 4.2.3.9): a broken path may recover.
            Some(flow) if !flow.connected => {
                flow.ending = Some(Closed::Unreachable(Unreachable::from_code(icmp.code())));
                flow.dropped = true;
                self.settle(index);
            }
            _ => {}
        }
        Input::Accepted
    }

    /// Answers an echo request to the configured address. Returns false for any other packet.
    pub fn echo(&mut self, packet: &[u8], now: Instant) -> bool {
        self.tick(now);
        let Ok(packet) = Packet::parse(packet) else {
            return false;
        };
        if packet.protocol() != protocol::ICMP || packet.destination() != self.config.address {
            return false;
        }
        let Ok(icmp) = Icmp::parse(&packet) else {
            return false;
        };
        let is_request = icmp.kind() == kind::ECHO && icmp.code() == 0;
        if is_request {
            self.replies.echo(&packet, &icmp);
        }
        is_request
    }

    /// Answers an unwanted packet: TCP with a reset, ICMP never, any other protocol with an ICMP error. The
    /// rate of the answers is limited.
    pub fn reject(&mut self, packet: &[u8], now: Instant) {
        self.tick(now);
        let Ok(packet) = Packet::parse(packet) else {
            return;
        };
        let code = match packet.protocol() {
            protocol::TCP => {
                if let Ok(segment) = Segment::parse(&packet)
                    && self.replies.reset(&segment, now)
                {
                    self.stats.resets_sent += 1;
                }
                return;
            }
            protocol::ICMP => return,
            protocol::UDP => Unreachable::Port,
            _ => Unreachable::Protocol,
        };
        let what = [kind::UNREACHABLE, code.code()];
        self.replies.error(&packet, packet.destination(), what, now);
    }

    fn count(&mut self, malformed: Malformed) {
        *match malformed {
            Malformed::Checksum => &mut self.stats.bad_checksum,
            Malformed::Fragment => &mut self.stats.fragments,
            _ => &mut self.stats.malformed,
        } += 1;
    }
}
