//! One TCP flow: a smoltcp interface with one socket, plus the state that smoltcp does not expose.
//!
//! Owns the socket with its buffers, and the state of both directions as seen on the wire: sequence numbers,
//! windows and loss. Each flow has an interface of its own, because a smoltcp interface searches all its
//! sockets for every packet.

mod device;
mod track;

use std::time::Instant;

use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::socket::tcp::{self, CongestionControl, RecvError, Socket, State};
use smoltcp::time::{Duration as SmolDuration, Instant as SmolInstant};
use smoltcp::wire::{HardwareAddress, IpAddress, IpCidr, IpListenEndpoint};

pub(crate) use device::Outbox;
use device::{Sink, Wire};
use track::DEFAULT_MSS;
pub(crate) use track::Track;

use super::config::{Closed, Received};
use super::share::NO_SHARE;
use crate::echo::Replies;
use crate::ip::{Segment, flags};
use crate::session::LARGE_TUN_MTU;
use crate::tuple::Tuple;

/// smoltcp's clock. The clock starts at one second, because some smoltcp timers use zero for "long ago".
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock(Instant);

impl Clock {
    pub(crate) fn new(now: Instant) -> Self {
        Self(now)
    }

    fn at(self, now: Instant) -> SmolInstant {
        let passed = now.saturating_duration_since(self.0).as_micros();
        SmolInstant::from_micros(i64::try_from(passed).unwrap_or(i64::MAX / 2) + 1_000_000)
    }

    fn back(self, at: SmolInstant) -> Instant {
        let passed = u64::try_from(at.total_micros() - 1_000_000).unwrap_or(0);
        self.0 + std::time::Duration::from_micros(passed)
    }
}

/// Parameters of a new flow.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) tuple: Tuple,
    pub(crate) mtu: usize,
    pub(crate) receive_buffer: usize,
    pub(crate) send_buffer: usize,
    pub(crate) keepalive: std::time::Duration,
    pub(crate) seed: u64,
    /// Set to start without congestion control, see [`Flow::send_room`].
    pub(crate) eager: bool,
}

/// Result of one sending turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// The flow has nothing left to send.
    Done,
    /// The flow has more to send and waits for its next turn.
    More,
    /// The link is full.
    Full,
}

/// Bytes that a flow may send in one turn.
pub(crate) const QUANTUM: usize = 32 << 10;

/// Segment payload between two Culvert programs, which need no tun device. A kernel with a tun device
/// accepts only packets that fit the device, usually 1500 bytes.
const OWN_MSS: u16 = LARGE_TUN_MTU - 40;

/// Smallest MTU that a flow accepts, in bytes: every host accepts packets of this size (RFC 791, 3.1). A smaller MTU only
/// multiplies the number of packets.
const MIN_MTU: usize = 576;

pub(crate) struct Flow {
    interface: Interface,
    sockets: SocketSet<'static>,
    handle: SocketHandle,
    clock: Clock,
    mtu: usize,
    pub(crate) tuple: Tuple,
    pub(crate) track: Track,
    /// Largest receive window that the flow advertises.
    pub(crate) receive_share: u32,
    /// Slot of the receive share in which the flow last received data.
    pub(crate) received_in: u64,
    /// Limit for queued bytes, including sent bytes that are not yet acknowledged.
    pub(crate) send_share: usize,
    /// Slot of the send share in which the owner last sent data.
    pub(crate) sent_in: u64,
    /// Bytes of both buffers, charged to the buffer budget.
    pub(crate) buffers: usize,
    /// Number of bytes read by the owner, modulo 2^32.
    read: u32,
    /// Set when the handshake has succeeded.
    pub(crate) connected: bool,
    /// Set when the owner has closed the sending direction.
    pub(crate) closing: bool,
    /// Why the flow ends, once known.
    pub(crate) ending: Option<Closed>,
    /// Set when the owner has aborted the flow.
    pub(crate) abandoned: bool,
    /// Set when the flow ends without sending another packet.
    pub(crate) dropped: bool,
    /// Set from a `Readable` event until `recv` finds nothing more to read.
    pub(crate) readable_reported: bool,
    /// Set when `send` could not accept all bytes.
    pub(crate) wants_room: bool,
    /// Set when the owner waits for a `Delivered` event.
    pub(crate) wants_delivery: bool,
    /// Deadline for the handshake; `None` once connected.
    pub(crate) connect_by: Option<Instant>,
    /// Time of the last segment from the remote end, on the liveness clock.
    pub(crate) last_received: Instant,
    /// Retransmitted segments since this counter was last reset.
    pub(crate) retransmitted: u64,
    /// Set during the flow's own slow start: acknowledged bytes widen the window.
    eager: bool,
}

/// Creates the interface of a flow.
fn interface(tuple: Tuple, mtu: usize, seed: u64, at: smoltcp::time::Instant) -> Interface {
    let mut config = Config::new(HardwareAddress::Ip);
    config.random_seed = seed;
    let mut device = Wire::new(&[], Sink::None, mtu, Track::default().offer(u32::MAX));
    let mut interface = Interface::new(config, &mut device, at);
    interface.update_ip_addrs(|addresses| {
        // The list has room for at least one address.
        let _ = addresses.push(IpCidr::new(IpAddress::Ipv4(*tuple.local.ip()), 32));
    });
    interface
}

/// True for a segment that only acknowledges.
fn is_acknowledgement(segment: &Segment<'_>) -> bool {
    let kind = segment.flags() & (flags::SYN | flags::FIN | flags::RST | flags::ACK);
    kind == flags::ACK && segment.payload().is_empty()
}

impl Flow {
    pub(crate) fn new(shape: Shape, clock: Clock, now: Instant, last_received: Instant) -> Self {
        let track = Track::default();
        let interface = interface(shape.tuple, shape.mtu, shape.seed, clock.at(now));
        let mut socket = Socket::new(
            tcp::SocketBuffer::new(vec![0; shape.receive_buffer]),
            tcp::SocketBuffer::new(vec![0; shape.send_buffer]),
        );
        socket.set_keep_alive(Some(SmolDuration::from_millis(
            u64::try_from(shape.keepalive.as_millis()).unwrap_or(u64::MAX / 2),
        )));
        if shape.eager {
            socket.set_congestion_control(CongestionControl::None);
        }
        let mut sockets = SocketSet::new(Vec::with_capacity(1));
        let handle = sockets.add(socket);
        Self {
            interface,
            sockets,
            handle,
            clock,
            mtu: shape.mtu,
            tuple: shape.tuple,
            track,
            receive_share: u32::MAX,
            received_in: 0,
            send_share: usize::MAX,
            sent_in: 0,
            buffers: shape.receive_buffer + shape.send_buffer,
            read: 0,
            connected: false,
            closing: false,
            ending: None,
            abandoned: false,
            dropped: false,
            readable_reported: false,
            wants_room: false,
            wants_delivery: false,
            connect_by: None,
            last_received,
            retransmitted: 0,
            eager: shape.eager,
        }
    }

    /// Answers a segment with more bytes than the receive buffer can store, and returns true. smoltcp would accept such
    /// a segment and then panic: it also scales the window of a SYN. The answer is that to a window probe, which an
    /// honest remote end sends while the buffer is full.
    pub(crate) fn refuses(&self, segment: &Segment<'_>, replies: &mut Replies) -> bool {
        let capacity = self.socket().recv_capacity();
        let is_beyond = self.track.is_beyond_buffer(segment, self.read, capacity);
        if is_beyond {
            replies.acknowledge(segment, self.track.sent(), self.track.expected());
        }
        is_beyond
    }

    /// Starts to dial: the next poll sends a SYN.
    pub(crate) fn dial(&mut self) -> Result<(), tcp::ConnectError> {
        let Tuple { local, remote } = self.tuple;
        let socket = self.sockets.get_mut::<Socket<'_>>(self.handle);
        socket.connect(self.interface.context(), remote, local)
    }

    /// Waits for a SYN, which must be passed to `input` next.
    pub(crate) fn listen(&mut self) -> Result<(), tcp::ListenError> {
        let local = self.tuple.local;
        self.socket_mut().listen(IpListenEndpoint::from(local))
    }

    fn socket(&self) -> &Socket<'static> {
        self.sockets.get(self.handle)
    }

    fn socket_mut(&mut self) -> &mut Socket<'static> {
        self.sockets.get_mut(self.handle)
    }

    pub(crate) fn state(&self) -> State {
        self.socket().state()
    }

    /// Processes a segment of this flow. Returns the number of newly acknowledged bytes.
    pub(crate) fn input(
        &mut self,
        segment: &Segment<'_>,
        packet: &[u8],
        replies: &mut Replies,
        now: Instant,
    ) -> u32 {
        let before = self.state();
        if before == State::SynSent && !self.answers_syn(segment) {
            // The remote end may have a half-open connection of an earlier flow. The reset ends it, and the next SYN
            // opens this flow (RFC 9293, 3.5.1).
            let acknowledged = segment.acknowledgement();
            if self.track.syn_sent() && segment.has(flags::ACK) && acknowledged != self.track.sent()
            {
                replies.reset(segment, now);
            }
            return 0;
        }
        if self.is_repeated_before_fin(segment) {
            return 0;
        }
        let acknowledged = self.track.input(segment, self.mss());
        if self.mss() >= OWN_MSS.into() {
            (self.received_in, self.sent_in) = (NO_SHARE, NO_SHARE);
        }
        let offer = self.track.offer(self.receive_share);
        let adapted = self.adapted(segment, packet);
        let packet = adapted.as_deref().unwrap_or(packet);
        let mut device = Wire::new(packet, Sink::Replies(replies), self.mtu, offer);
        self.interface
            .poll_ingress_single(self.clock.at(now), &mut device, &mut self.sockets);
        if let Some(emitted) = device.emitted() {
            self.track.output(&emitted, now);
        }
        let state = self.state();
        // In TIME-WAIT both directions have already ended; a reset only means that the remote end has
        // forgotten the flow.
        if segment.has(flags::RST)
            && before != State::TimeWait
            && matches!(state, State::Closed | State::Listen)
        {
            self.ending.get_or_insert(if before == State::SynSent {
                Closed::Refused
            } else {
                Closed::Reset
            });
        }
        if self.closing && state == State::CloseWait {
            self.close_socket();
        }
        acknowledged
    }

    /// Returns the packet in the form that smoltcp needs, if that differs from the received form.
    fn adapted(&self, segment: &Segment<'_>, packet: &[u8]) -> Option<Vec<u8>> {
        let sequence = self.early_acknowledgement(segment);
        let window = self.track.window_for_repeats(segment);
        if sequence.is_none() && window.is_none() {
            return None;
        }
        let mut packet = packet.to_vec();
        let tcp = packet.len() - segment.payload().len() - segment.header_len();
        let header: &mut [u8; 20] = packet.get_mut(tcp..)?.first_chunk_mut()?;
        if let Some(sequence) = sequence {
            [header[4], header[5], header[6], header[7]] = sequence.to_be_bytes();
        }
        if let Some(window) = window {
            [header[14], header[15]] = window.to_be_bytes();
        }
        Some(packet)
    }

    /// Returns the expected sequence number, if the segment is an acknowledgement without data that follows missing bytes.
    /// smoltcp ignores an acknowledgement outside its window, also at the end of the window. The flow could then send
    /// nothing until its reader continues, and the reader may wait for what the flow sends. RFC 9293, 3.10.7.4, requires
    /// that a receiver with a full buffer accepts acknowledgements. The acknowledgement of a segment with data stays
    /// ignored: the other end repeats it without data.
    fn early_acknowledgement(&self, segment: &Segment<'_>) -> Option<u32> {
        if !is_acknowledgement(segment) {
            return None;
        }
        let expected = self.expected()?;
        // Behind a whole window there may be a window probe or a FIN.
        let most = self.socket().recv_capacity() as u32 + 1;
        let early = segment.sequence().wrapping_sub(expected);
        (1..=most).contains(&early).then_some(expected)
    }

    /// Returns the next sequence number of the remote end; `None` before the handshake and after the remote end's FIN.
    fn expected(&self) -> Option<u32> {
        let is_open = matches!(
            self.state(),
            State::Established | State::FinWait1 | State::FinWait2
        );
        let first = self.track.first().filter(|_| is_open)?;
        let unread = self.socket().recv_queue() as u32;
        Some(first.wrapping_add(self.read).wrapping_add(unread))
    }

    /// True if the segment says only again that the FIN of this flow is missing. Three such segments make smoltcp repeat the
    /// FIN at its next packet, without a timer for it; its keepalive would then have a byte in the place of the FIN.
    fn is_repeated_before_fin(&self, segment: &Segment<'_>) -> bool {
        self.state() == State::FinWait1
            && is_acknowledgement(segment)
            && self.queued() == 0
            && self.track.in_flight() == 1
            && self.track.acknowledges_nothing(segment)
            && (self.expected() == Some(segment.sequence())
                || self.early_acknowledgement(segment).is_some())
    }

    /// True if smoltcp may process `segment` in SYN-SENT. Simultaneous open and segments that arrive before
    /// the SYN is sent are not supported, and would make smoltcp's window arithmetic underflow.
    fn answers_syn(&self, segment: &Segment<'_>) -> bool {
        self.track.syn_sent()
            && segment.has(flags::ACK)
            && segment.acknowledgement() == self.track.sent()
            && segment.has(flags::SYN | flags::RST)
    }

    /// Sends for one turn, at most `packets` packets.
    pub(crate) fn transmit(
        &mut self,
        now: Instant,
        packets: usize,
        outbox: &mut Outbox,
        link: &mut dyn FnMut(&[u8]) -> bool,
    ) -> Turn {
        let at = self.clock.at(now);
        for _ in 0..packets {
            // Nagle: a partial segment waits while data is in flight, except for the last bytes of the queue.
            let nagle = self.unsent() >= self.mss();
            self.socket_mut().set_nagle_enabled(nagle);
            let offer = self.track.offer(self.receive_share);
            let mut device = Wire::new(&[], Sink::Link(outbox, link), self.mtu, offer);
            self.interface
                .poll_egress(at, &mut device, &mut self.sockets);
            let Some(emitted) = device.emitted() else {
                return if outbox.is_full() {
                    Turn::Full
                } else {
                    Turn::Done
                };
            };
            if self.track.output(&emitted, now) {
                self.retransmitted += 1;
                // Nothing lies behind the peer if the peer is one of our programs: the tunnel stood still, and nothing
                // is lost.
                let has_path = self.mss() < OWN_MSS.into();
                if has_path && std::mem::take(&mut self.eager) {
                    // After the first loss the flow uses normal congestion control.
                    self.socket_mut()
                        .set_congestion_control(CongestionControl::Cubic);
                }
            }
            if outbox.is_full() {
                return Turn::Full;
            }
        }
        Turn::More
    }

    /// Returns the time at which the flow must be polled next; a time in the past means now.
    pub(crate) fn poll_at(&mut self, now: Instant) -> Option<Instant> {
        self.interface
            .poll_at(self.clock.at(now), &self.sockets)
            .map(|at| self.clock.back(at))
    }

    /// Returns the largest payload of a segment, as far as known.
    pub(crate) fn mss(&self) -> usize {
        let own = self.mtu - 40;
        match self.track.remote_mss() {
            0 => own,
            // An MSS below the default is treated as the default, because every host accepts the default.
            remote => own.min(remote.max(DEFAULT_MSS).into()),
        }
    }

    /// Lowers the size of packets to the MTU of a network on the path. Lost packets are repeated with the new size.
    pub(crate) fn lower_mtu(&mut self, mtu: u16, now: Instant) {
        let mtu = usize::from(mtu);
        if (MIN_MTU..self.mtu).contains(&mtu) {
            self.mtu = mtu;
            // smoltcp takes the MTU from the interface, which has no other state of the connection. The seed is for the
            // sequence number of a dial.
            self.interface = interface(self.tuple, mtu, 0, self.clock.at(now));
        }
    }

    /// Returns the number of queued bytes that are not acknowledged.
    pub(crate) fn queued(&self) -> usize {
        self.socket().send_queue()
    }

    /// True if the remote end has acknowledged all queued bytes, and the end of the direction if the owner has closed it.
    pub(crate) fn is_delivered(&self) -> bool {
        let has_end = matches!(
            self.state(),
            State::FinWait2 | State::TimeWait | State::Closed
        );
        self.queued() == 0 && (has_end || !self.closing)
    }

    fn unsent(&self) -> usize {
        let in_flight = usize::try_from(self.track.in_flight()).unwrap_or(usize::MAX);
        self.socket().send_queue().saturating_sub(in_flight)
    }

    /// Returns the bytes that count as in flight: all queued bytes that fit the remote window.
    pub(crate) fn charge(&self) -> usize {
        // During a retransmission at most two segments count as in flight; the other sent bytes are probably
        // lost.
        let most = if self.track.is_repeating() {
            2 * self.mss()
        } else {
            usize::MAX
        };
        let window = self.track.remote_window();
        self.socket().send_queue().min(window).min(most)
    }

    fn send_limit(&self) -> usize {
        self.socket().send_capacity().min(self.send_share)
    }

    /// Returns how many bytes may be queued now.
    ///
    /// Over a stream transport nothing is lost inside the tunnel. The flow therefore starts without smoltcp's
    /// congestion control and its initial window of 2 KiB. The window is ten segments (RFC 6928) plus all
    /// bytes acknowledged so far, which doubles with each round trip. This slow start ends with the first
    /// loss, which can only have happened behind a stock peer.
    pub(crate) fn send_room(&self) -> usize {
        let queue = self.socket().send_queue();
        let mut limit = self.send_limit();
        if self.eager {
            let acknowledged = usize::try_from(self.track.acknowledged()).unwrap_or(usize::MAX);
            limit = limit.min((10 * self.mss()).saturating_add(acknowledged));
        }
        limit.saturating_sub(queue)
    }

    /// Returns how large [`send_room`](Self::send_room) must be before the owner is notified.
    pub(crate) fn room_to_report(&self) -> usize {
        (self.send_limit() / 4).clamp(1, 8 * self.mss())
    }

    /// True if the sending direction is open, or will be after the handshake.
    pub(crate) fn may_send(&self) -> bool {
        !self.closing && self.ending.is_none() && (!self.connected || self.socket().may_send())
    }

    /// Queues bytes. Returns how many were accepted.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> usize {
        self.socket_mut().send_slice(bytes).unwrap_or(0)
    }

    /// True if data or the end of the data can be read.
    pub(crate) fn is_readable(&mut self) -> bool {
        match self.socket_mut().peek(1) {
            Ok(bytes) => !bytes.is_empty(),
            Err(RecvError::Finished) => self.connected && self.ending.is_none(),
            Err(RecvError::InvalidState) => false,
        }
    }

    /// True if the owner has not read all received bytes.
    pub(crate) fn unread(&self) -> bool {
        self.socket().can_recv()
    }

    pub(crate) fn recv(&mut self, consume: impl FnOnce(&[u8]) -> usize) -> Received {
        let read = self.socket_mut().recv(|bytes| {
            if bytes.is_empty() {
                return (0, None);
            }
            let read = consume(bytes).min(bytes.len());
            (read, Some(read))
        });
        match read {
            Ok(Some(read)) => {
                self.read = self.read.wrapping_add(read as u32);
                Received::Bytes(read)
            }
            Ok(None) => Received::Empty,
            Err(RecvError::Finished) => Received::End,
            // After a reset, another event reports the reset. Before the handshake there is nothing to read.
            Err(RecvError::InvalidState) => Received::Empty,
        }
    }

    /// Closes the sending direction. During the handshake the close is delayed, because smoltcp would skip
    /// the rest of the handshake.
    pub(crate) fn close(&mut self) {
        self.closing = true;
        if self.connected {
            self.close_socket();
        }
    }

    /// Closes smoltcp's socket. After the remote end's FIN, the close waits until the remote window has room for all queued
    /// bytes: after both FINs, smoltcp ignores window updates.
    fn close_socket(&mut self) {
        let waits = self.state() == State::CloseWait && self.queued() > self.track.remote_window();
        if !waits {
            self.socket_mut().close();
        }
    }

    /// Records the end of the handshake. Returns true only at the first call after a successful handshake.
    pub(crate) fn becomes_connected(&mut self) -> bool {
        if self.connected || matches!(self.state(), State::SynSent | State::SynReceived) {
            return false;
        }
        // Closed or Listen here means that the flow was reset.
        self.connected = !matches!(self.state(), State::Closed | State::Listen);
        self.connect_by = None;
        if self.connected && self.closing {
            self.close_socket();
        }
        self.connected
    }

    /// Ends the flow with a reset, which is sent at the next poll.
    pub(crate) fn abort(&mut self) {
        self.socket_mut().abort();
    }

    /// True if smoltcp has finished: nothing more will be sent or received. Received data may be unread. A
    /// flow that is over must not be polled: smoltcp discards unread data when its TIME-WAIT ends.
    pub(crate) fn is_over(&self) -> bool {
        match self.state() {
            _ if self.dropped => true,
            // While smoltcp still knows the remote endpoint, the reset is not yet sent.
            State::Closed => self.socket().remote_endpoint().is_none(),
            State::TimeWait => self.track.end_is_acknowledged(),
            State::Listen => true,
            _ => false,
        }
    }
}
