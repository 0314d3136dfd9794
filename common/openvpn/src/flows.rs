//! The TCP flows of one peer in user space. Flows are dialed into the peer's tunnel or accepted from the
//! tunnel.
//!
//! [`Flows`] owns the flows, their ports and timers, and the packets that wait to be sent. One `Flows` belongs
//! to one tunnel: all its flows use the tunnel's link and end with the tunnel.
//!
//! ```text
//!   owner  dial accept send recv close abort  -->  Flows  --> poll_output -> link (may be full)
//!          poll_event  <-------------------------    ^
//!                                                    +------- input <- packets out of the tunnel
//! ```
//!
//! The owner repeats these steps: call `input` for each received packet, `poll_event` until it returns
//! `None`, `send` and `recv` as the events require, and `poll_output` while the link accepts packets. Then
//! the owner waits for the link, for bytes to send, or until `poll_timeout`.

mod config;
mod events;
mod flow;
mod input;
mod liveness;
mod output;
mod pace;
mod share;
mod slots;
#[cfg(test)]
mod tests;
mod time_wait;

use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Instant;

use rand::RngCore;
use smoltcp::socket::tcp::State;

pub use config::{
    Closed, Config, DialError, Event, FlowId, Gone, Input, Pace, Received, Refusal, Unreachable,
};
use flow::{Clock, Flow, Outbox, Shape};
use liveness::Liveness;
use pace::Pacer;
use share::Share;
use slots::{Slot, Slots};
use time_wait::TimeWait;

use crate::echo::Replies;
use crate::ip::{self, Packet, Segment, kind};
use crate::masquerade::FLOW_PORTS;
use crate::tuple::{Key, Keyed, Table, Tuple};

/// Smallest buffer for one direction of a flow, in bytes.
const MIN_BUFFER: usize = 16 << 10;

/// Counters since the start, and gauges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Segments that belong to a flow.
    pub received: u64,
    /// Packets passed to the link.
    pub sent: u64,
    /// Packets that are not valid IPv4 or TCP: wrong lengths, options or fields.
    pub malformed: u64,
    /// Packets with a wrong checksum.
    pub bad_checksum: u64,
    /// Fragments. They are dropped, because fragments are not reassembled.
    pub fragments: u64,
    /// Segments outside the receive window, mostly repetitions.
    pub out_of_window: u64,
    /// Segments of unknown flows that were answered with a reset.
    pub resets_sent: u64,
    /// Replies that were dropped: rate limit reached, or too many replies waiting.
    pub suppressed: u64,
    /// Segments that were retransmitted.
    pub retransmitted: u64,
    /// SYNs that were dropped: too many SYNs wait for the owner, too many flows are open, or the packet is
    /// too large.
    pub syns_dropped: u64,
    /// Flows dialed.
    pub dialed: u64,
    /// Flows accepted.
    pub accepted: u64,
    /// Flows refused by the owner.
    pub refused: u64,
    /// Current limit of the bytes in flight, with a [`Pace`]; otherwise 0.
    pub in_flight_cap: u64,
    /// Current bytes of all flows' buffers, see [`Config::buffer_budget`].
    pub buffers: u64,
}

/// All flows of one peer.
pub struct Flows {
    config: Config,
    random: Box<dyn RngCore + Send>,
    clock: Clock,
    /// Latest time passed by the owner.
    now: Instant,
    slots: Slots,
    table: Table<Key, u32>,
    /// Flow of the last packet: consecutive packets usually belong to the same flow.
    last: (Key, u32),
    time_wait: TimeWait,
    pending: usize,
    port: u16,
    buffers: usize,
    liveness: Liveness,
    pacer: Option<Pacer>,
    receiving: Share,
    sending: Share,
    /// Bytes in flight of all flows; counted only with a pacer.
    charged: usize,
    replies: Replies,
    outbox: Outbox,
    /// Set when the link was full at the last poll. Polling is useless until the link has room.
    blocked: bool,
    /// Earliest time when the pacer allows the next packet.
    paced_until: Option<Instant>,
    stats: Stats,
}

impl Flows {
    /// Creates an empty flow table. Ports and sequence numbers come from `random`, which must be
    /// unpredictable.
    pub fn new(config: Config, mut random: Box<dyn RngCore + Send>, now: Instant) -> Self {
        let keyed = Keyed::new(&mut random);
        let span = FLOW_PORTS.end() - FLOW_PORTS.start();
        let port = FLOW_PORTS.start() + (random.next_u32() % u32::from(span)) as u16;
        let nowhere = SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0);
        Self {
            clock: Clock::new(now),
            now,
            slots: Slots::default(),
            table: Table::with_hasher(keyed.clone()),
            last: (Key::new(nowhere, nowhere), u32::MAX),
            time_wait: TimeWait::new(keyed),
            pending: 0,
            port,
            buffers: 0,
            liveness: Liveness::new(now),
            pacer: config.pace.clone().map(|pace| Pacer::new(pace, now)),
            receiving: Share::new(config.receive_budget, now),
            sending: Share::new(config.send_budget, now),
            charged: 0,
            replies: Replies::new(now),
            outbox: Outbox::new(usize::from(config.tun_mtu)),
            blocked: false,
            paced_until: None,
            stats: Stats::default(),
            config,
            random,
        }
    }

    /// Dials from the configured address. [`Event::Connected`] or [`Event::Closed`] follows.
    pub fn dial(&mut self, destination: SocketAddrV4, now: Instant) -> Result<FlowId, DialError> {
        self.tick(now);
        if destination.port() == 0
            || !ip::unicast(*destination.ip())
            || *destination.ip() == self.config.address
        {
            return Err(DialError::Undialable(destination));
        }
        if self.slots.len() >= self.config.max_flows {
            return Err(DialError::TooManyFlows(self.config.max_flows));
        }
        let local = self
            .free_port(destination)
            .ok_or(DialError::PortsExhausted(destination))?;
        let tuple = Tuple {
            local,
            remote: destination,
        };
        let mut flow = self.new_flow(tuple, now);
        flow.dial()
            .map_err(|_| DialError::Undialable(destination))?;
        let until = now + self.config.connect_timeout;
        flow.connect_by = Some(until);
        self.buffers += flow.buffers;
        let id = self.slots.insert(Slot::Open(flow));
        self.table.insert(tuple.into(), id.index);
        self.slots.arm(id.index, until);
        self.slots.make_ready(id.index);
        self.stats.dialed += 1;
        Ok(id)
    }

    /// Answers an [`Event::Incoming`] with a SYN-ACK. [`Event::Connected`] follows.
    pub fn accept(&mut self, id: FlowId, now: Instant) -> Result<(), Gone> {
        self.tick(now);
        let entry = self.slots.get(id).ok_or(Gone)?;
        let Slot::Pending(pending) = &mut entry.slot else {
            return Err(Gone);
        };
        if pending.ending.is_some() {
            return Err(Gone);
        }
        let syn = std::mem::take(&mut pending.syn);
        let tuple = pending.tuple;
        let mut flow = self.new_flow(tuple, now);
        flow.listen().map_err(|_| Gone)?;
        if let Ok(packet) = Packet::parse(&syn)
            && let Ok(segment) = Segment::parse(&packet)
        {
            flow.input(&segment, packet.bytes(), &mut self.replies, now);
        }
        let until = now + self.config.connect_timeout;
        flow.connect_by = Some(until);
        self.buffers += flow.buffers;
        self.pending -= 1;
        self.stats.accepted += 1;
        if let Some(entry) = self.slots.get(id) {
            entry.slot = Slot::Open(flow);
        }
        self.slots.arm(id.index, until);
        self.slots.make_ready(id.index);
        Ok(())
    }

    /// Answers an [`Event::Incoming`] with a reset or an ICMP message. No event follows.
    pub fn refuse(&mut self, id: FlowId, refusal: Refusal) {
        let Some(entry) = self.slots.get(id) else {
            return;
        };
        let Slot::Pending(pending) = &mut entry.slot else {
            return;
        };
        let syn = std::mem::take(&mut pending.syn);
        if let Ok(packet) = Packet::parse(&syn)
            && let Ok(segment) = Segment::parse(&packet)
            && pending.ending.is_none()
        {
            self.stats.refused += 1;
            match refusal {
                Refusal::Reset => self.replies.reset(&segment, self.now),
                Refusal::Unreachable(why) => {
                    let from = packet.destination();
                    let what = [kind::UNREACHABLE, why.code()];
                    self.replies.error(&packet, from, what, self.now)
                }
            };
        }
        self.remove(id.index);
    }

    /// Queues bytes and returns how many were accepted: 0 before the flow is connected. If not all were
    /// accepted, [`Event::Writable`] follows.
    pub fn send(&mut self, id: FlowId, bytes: &[u8]) -> Result<usize, Gone> {
        let shared = self.pacer.as_ref().map(|pacer| pacer.room(self.charged));
        self.open(id)?;
        if let Some(flow) = self.slots.flow(id.index) {
            self.sending.moved(&mut flow.sent_in, self.now);
            let share = self.sending.of(flow.sent_in);
            flow.send_share = usize::try_from(share).unwrap_or(usize::MAX);
        }
        let flow = self.open(id)?;
        if !flow.may_send() {
            return Err(Gone);
        }
        let own = flow.send_room();
        let mut room = own;
        if let Some(shared) = shared {
            // A flow with nothing in flight may always send two segments, however much the other flows have
            // in flight.
            let least = (2 * flow.mss()).saturating_sub(flow.charge());
            room = own.min(shared.max(least));
        }
        // Avoid small segments while data is in flight.
        if room < bytes.len() && room < flow.mss() && flow.charge() > 0 {
            room = 0;
        }
        let accepted = if flow.connected {
            flow.send(bytes.get(..room).unwrap_or(bytes))
        } else {
            0
        };
        let short = accepted < bytes.len();
        flow.wants_room |= short;
        if short && room < own {
            self.slots.wait(id.index);
        }
        if accepted > 0 {
            self.recharge(id.index);
            self.slots.make_ready(id.index);
        }
        Ok(accepted)
    }

    /// Passes received bytes to `consume`, which returns the number of bytes to remove. Call `recv` again
    /// until the result is [`Received::Empty`] or [`Received::End`], or until `consume` needs no more data.
    pub fn recv(
        &mut self,
        id: FlowId,
        consume: impl FnOnce(&[u8]) -> usize,
    ) -> Result<Received, Gone> {
        let flow = self.open(id)?;
        let received = flow.recv(consume);
        match received {
            // Reading may have opened the window.
            Received::Bytes(1..) => self.slots.make_ready(id.index),
            Received::Bytes(0) => {}
            Received::Empty => flow.readable_reported = false,
            Received::End => {}
        }
        self.settle(id.index);
        Ok(received)
    }

    /// Returns the number of queued bytes that the remote end has not acknowledged.
    pub fn unacknowledged(&mut self, id: FlowId) -> usize {
        self.open(id).map_or(0, |flow| flow.queued())
    }

    /// Requests one [`Event::Delivered`], which follows at once if nothing is queued.
    pub fn report_delivery(&mut self, id: FlowId) {
        if let Ok(flow) = self.open(id) {
            flow.wants_delivery = true;
            self.settle(id.index);
        }
    }

    /// Closes the sending direction after the queued bytes. The remote end may continue to send.
    pub fn close(&mut self, id: FlowId) {
        if let Ok(flow) = self.open(id) {
            flow.close();
            self.slots.make_ready(id.index);
        }
    }

    /// Ends the flow with a reset and discards queued bytes. No event follows.
    pub fn abort(&mut self, id: FlowId) {
        let Some(entry) = self.slots.get(id) else {
            return;
        };
        entry.events = 0;
        let Slot::Open(flow) = &mut entry.slot else {
            self.refuse(id, Refusal::Reset);
            return;
        };
        flow.abandoned = true;
        // In SYN-SENT no reset is sent, because the remote end has not answered yet.
        flow.dropped |= flow.state() == State::SynSent;
        flow.abort();
        self.slots.make_ready(id.index);
        self.settle(id.index);
    }

    /// Records an authentic packet from the peer, even a ping. `input` does this as well.
    pub fn packet_received(&mut self, now: Instant) {
        self.liveness.received(now);
    }

    /// Number of flows: open, connecting, or waiting for the owner's answer.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// True if there is no flow.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the counters.
    pub fn stats(&self) -> Stats {
        Stats {
            sent: self.outbox.packets,
            suppressed: self.replies.suppressed(),
            in_flight_cap: self.pacer.as_ref().map_or(0, |pacer| pacer.cap() as u64),
            buffers: self.buffers as u64,
            ..self.stats
        }
    }

    fn tick(&mut self, now: Instant) {
        self.now = self.now.max(now);
    }

    fn open(&mut self, id: FlowId) -> Result<&mut Flow, Gone> {
        match self.slots.get(id).map(|entry| &mut entry.slot) {
            Some(Slot::Open(flow)) if !flow.abandoned => Ok(flow),
            _ => Err(Gone),
        }
    }

    /// Returns the next local port without a current or recent flow to this destination. Ports are used in
    /// order, so that each port is reused as late as possible: the remote end may still be in TIME-WAIT.
    fn free_port(&mut self, destination: SocketAddrV4) -> Option<SocketAddrV4> {
        for _ in FLOW_PORTS {
            let local = SocketAddrV4::new(self.config.address, self.port);
            self.port = match self.port.checked_add(1) {
                Some(next) if FLOW_PORTS.contains(&next) => next,
                _ => *FLOW_PORTS.start(),
            };
            let key = Key::new(local, destination);
            if !self.table.contains_key(&key) && !self.time_wait.contains(key) {
                return Some(local);
            }
        }
        None
    }

    fn new_flow(&mut self, tuple: Tuple, now: Instant) -> Box<Flow> {
        let left = self.config.buffer_budget.saturating_sub(self.buffers);
        let fair = (left / 64).max(MIN_BUFFER);
        let shape = Shape {
            tuple,
            mtu: usize::from(self.config.mss.max(536) + 40)
                .min(usize::from(self.config.tun_mtu.max(576))),
            receive_buffer: self
                .config
                .receive_buffer
                .clamp(MIN_BUFFER, 1 << 28)
                .min(fair),
            send_buffer: self.config.send_buffer.clamp(MIN_BUFFER, 1 << 28).min(fair),
            keepalive: self.config.keepalive,
            seed: self.random.next_u64(),
            eager: self.config.pace.is_none(),
        };
        let last_received = self.liveness.now(now);
        Box::new(Flow::new(shape, self.clock, now, last_received))
    }
}
