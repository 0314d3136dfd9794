//! The flows of one peer, together with their handles in other tasks.
//!
//! [`Streams`] belongs to the peer's task. All handles report [`Broken::TunnelLost`] after [`Streams`] is
//! dropped.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddrV4;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

use culvert_openvpn::flows::{Config, Event, FlowId, Flows, Input, Received, Stats};
use culvert_stream::CLOSE_STALL;
use rand::SeedableRng as _;
use rand::rngs::StdRng;

use super::Moment;
use super::mailbox::{Mail, Mailbox, Order};
use super::pipe::{Next, Pipe};
use super::stream::{Broken, Incoming, Peer};

/// Bytes discarded after a reader was dropped. Then the flow receives nothing, and is reset after its own last byte.
const DISCARD_BYTES: usize = 1 << 20;

/// The handles of one flow, as seen by the owner.
struct Entry {
    pipe: Arc<Pipe>,
    /// Bytes discarded because the reader was dropped.
    discarded: usize,
    /// True if the flow is in `left`.
    is_left: bool,
}

/// The flows of one peer; see the module documentation.
pub struct Streams {
    flows: Flows,
    entries: HashMap<FlowId, Entry>,
    mailbox: Arc<Mailbox<Pipe>>,
    /// Packets from other peers.
    packets: VecDeque<Vec<u8>>,
    /// True if the flows are the first to fill the link in this turn.
    flows_first: bool,
    /// Flows with dropped handles, their deadlines, and the number of bytes that they must have fewer by then.
    left: VecDeque<(Moment, FlowId, usize)>,
    close_wanted: bool,
}

impl Streams {
    /// Creates an empty set of flows.
    pub fn new(config: Config, now: Moment) -> Self {
        let random = Box::new(StdRng::from_os_rng());
        Self {
            flows: Flows::new(config, random, now),
            entries: HashMap::new(),
            mailbox: Mailbox::new(),
            packets: VecDeque::new(),
            flows_first: false,
            left: VecDeque::new(),
            close_wanted: false,
        }
    }

    /// Returns the handle of this peer for other tasks.
    pub fn peer(&self) -> Peer {
        Peer(self.mailbox.clone())
    }

    /// Passes a packet from the tunnel to the flows. The caller handles packets that belong to no flow.
    pub fn input(&mut self, packet: &[u8], now: Moment) -> Input {
        self.flows.input(packet, now)
    }

    /// Returns the flows, for answers to packets that belong to no flow.
    pub fn flows(&mut self) -> &mut Flows {
        &mut self.flows
    }

    /// Returns the counters since the start.
    pub fn stats(&self) -> Stats {
        self.flows.stats()
    }

    /// Records an authentic packet from the peer.
    pub fn heard(&mut self, now: Moment) {
        self.flows.packet_received(now);
        self.mailbox.hear(now);
    }

    /// Processes the requests of other tasks and moves bytes between flows and handles. Calls `incoming` for
    /// each request to open a flow.
    pub fn work(&mut self, now: Moment, incoming: &mut dyn FnMut(Incoming)) {
        if let Some(mail) = self.mailbox.take(&mut self.packets) {
            self.carry_out(mail, now);
        }
        while let Some(event) = self.flows.poll_event() {
            match event {
                Event::Incoming {
                    id,
                    source,
                    destination,
                } => incoming(Incoming {
                    source,
                    destination,
                    id,
                    mailbox: Some(self.mailbox.clone()),
                }),
                Event::Connected(id) => {
                    if let Some(entry) = self.entries.get(&id) {
                        entry.pipe.opened();
                    }
                    self.send(id, now);
                }
                Event::Readable(id) => self.receive(id),
                Event::Writable(id) => self.send(id, now),
                Event::Delivered(id) => self.delivered(id),
                Event::Closed(id, why) => self.forget(id, Broken::Flow(why)),
            }
        }
        while let Some((_, id, before)) = self.left.front().copied().filter(|(at, ..)| *at <= now) {
            self.left.pop_front();
            match self.unsent(id) {
                Some(unsent) if unsent < before => {
                    self.left.push_back((now + CLOSE_STALL, id, unsent))
                }
                Some(_) => self.abort(id),
                None => {}
            }
        }
    }

    /// Returns how many bytes from the writer the other side has not acknowledged.
    fn unsent(&mut self, id: FlowId) -> Option<usize> {
        let entry = self.entries.get(&id)?;
        Some(entry.pipe.up_bytes() + self.flows.unacknowledged(id))
    }

    fn carry_out(&mut self, mail: Mail<Pipe>, now: Moment) {
        for order in mail.orders {
            match order {
                Order::Dial(destination, pipe) => self.dial(destination, pipe, now),
                Order::Accept(id, pipe) => match self.flows.accept(id, now) {
                    Ok(()) => self.adopt(id, pipe),
                    Err(_) => pipe.ended(Broken::Aborted),
                },
                Order::Refuse(id, how) => self.flows.refuse(id, how),
                Order::Close => self.close_wanted = true,
            }
        }
        for pipe in mail.pipes {
            pipe.unring();
            if let Some(id) = pipe.flow() {
                self.send(id, now);
                self.receive(id);
            }
        }
    }

    fn dial(&mut self, destination: SocketAddrV4, pipe: Arc<Pipe>, now: Moment) {
        match self.flows.dial(destination, now) {
            Ok(id) => {
                pipe.belongs_to(id);
                self.adopt(id, pipe);
                // The handles may have been dropped before the flow had an id.
                self.send(id, now);
            }
            Err(error) => pipe.ended(Broken::Dial(error)),
        }
    }

    fn adopt(&mut self, id: FlowId, pipe: Arc<Pipe>) {
        let entry = Entry {
            pipe,
            discarded: 0,
            is_left: false,
        };
        self.entries.insert(id, entry);
        self.mailbox
            .flows
            .store(self.entries.len(), Ordering::Relaxed);
    }

    fn forget(&mut self, id: FlowId, why: Broken) {
        if let Some(entry) = self.entries.remove(&id) {
            entry.pipe.ended(why);
            self.mailbox
                .flows
                .store(self.entries.len(), Ordering::Relaxed);
        }
    }

    fn abort(&mut self, id: FlowId) {
        self.flows.abort(id);
        self.forget(id, Broken::Aborted);
    }

    /// Moves bytes from the writer to the flow.
    fn send(&mut self, id: FlowId, now: Moment) {
        let Some(entry) = self.entries.get_mut(&id) else {
            return;
        };
        let flows = &mut self.flows;
        match entry.pipe.take(|bytes| flows.send(id, bytes).ok()) {
            Next::Close => {
                self.flows.close(id);
                self.flows.report_delivery(id);
            }
            Next::Reset => self.flows.report_delivery(id),
            Next::Nothing => {}
        }
        if !entry.is_left && entry.pipe.is_left() {
            entry.is_left = true;
            let unsent = self.unsent(id).unwrap_or_default();
            self.left.push_back((now + CLOSE_STALL, id, unsent));
        }
    }

    /// Records that the peer has acknowledged everything. Ends a flow that waited for this before its reset.
    fn delivered(&mut self, id: FlowId) {
        let entry = self.entries.get(&id);
        if entry.is_some_and(|entry| entry.pipe.delivered()) {
            self.abort(id);
        }
    }

    /// Moves bytes from the flow to the reader.
    fn receive(&mut self, id: FlowId) {
        let Some(entry) = self.entries.get_mut(&id) else {
            return;
        };
        loop {
            let is_over = entry.discarded > DISCARD_BYTES;
            let received = self.flows.recv(id, |bytes| match is_over {
                true => 0,
                false => entry.pipe.put(bytes),
            });
            match received {
                Ok(Received::Bytes(0)) if is_over => return entry.pipe.reset(),
                Ok(Received::Bytes(taken @ 1..)) => {
                    if entry.pipe.reader_gone() {
                        entry.discarded += taken;
                    }
                }
                Ok(Received::End) => return entry.pipe.put_end(),
                Ok(Received::Bytes(0) | Received::Empty) | Err(_) => return,
            }
        }
    }

    /// Passes packets to the link until `link` returns false because the link is full. The flows and the packets of
    /// other peers are first in turn, because each of them may fill the link. The timers of the flows run at each call.
    pub fn poll_output(&mut self, now: Moment, link: &mut dyn FnMut(&[u8]) -> bool) {
        let mut is_full = false;
        let mut link = |packet: &[u8]| {
            is_full = is_full || !link(packet);
            !is_full
        };
        self.flows_first = !self.flows_first;
        if self.flows_first {
            self.flows.poll_output(now, &mut link);
            self.forward(&mut link);
        } else {
            self.forward(&mut link);
            self.flows.poll_output(now, &mut link);
        }
    }

    fn forward(&mut self, link: &mut dyn FnMut(&[u8]) -> bool) {
        let mut sent = 0;
        while let Some(packet) = self.packets.front() {
            if !link(packet) {
                break;
            }
            sent += packet.len();
            self.packets.pop_front();
        }
        self.mailbox.sent(sent);
    }

    /// Returns the time of the next call of [`work`](Self::work) and [`poll_output`](Self::poll_output) if no
    /// packet arrives.
    pub fn poll_timeout(&self) -> Option<Moment> {
        let left = self.left.front().map(|(at, ..)| *at);
        [left, self.flows.poll_timeout()]
            .into_iter()
            .flatten()
            .min()
    }

    /// Ready once other tasks have requests for [`work`](Self::work).
    pub fn poll_mail(&self, cx: &Context<'_>) -> Poll<()> {
        self.mailbox.poll(cx)
    }

    /// Returns true once after a request to end the session.
    pub fn take_close(&mut self) -> bool {
        std::mem::take(&mut self.close_wanted)
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        let mail = self.mailbox.close();
        for order in mail.orders {
            if let Order::Dial(_, pipe) | Order::Accept(_, pipe) = order {
                pipe.ended(Broken::TunnelLost);
            }
        }
        for (_, entry) in self.entries.drain() {
            entry.pipe.ended(Broken::TunnelLost);
        }
        self.mailbox.flows.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
