//! One TCP flow: a smoltcp interface with one socket, and what smoltcp does not tell of it.
//!
//! Owns the socket with its buffers, and what was seen of both directions on the wire: sequence
//! numbers, windows and loss. An interface for each flow, because an interface looks through all
//! of its sockets for every packet.

mod device;
mod track;

use std::time::Instant;

use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::socket::tcp::{self, CongestionControl, RecvError, Socket, State};
use smoltcp::time::{Duration as SmolDuration, Instant as SmolInstant};
use smoltcp::wire::{HardwareAddress, IpAddress, IpCidr, IpListenEndpoint};

pub(crate) use device::Outbox;
use device::{Inbound, Outbound};
use track::DEFAULT_MSS;
pub(crate) use track::Track;

use crate::echo::Replies;
use crate::flows::{APART, Closed, Received};
use crate::ip::{Segment, flags};
use crate::session::LARGE_TUN_MTU;
use crate::tuple::Tuple;

/// smoltcp's clock, which starts a second after its zero: some of its timers use zero as "long
/// ago".
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

/// What a new flow is made of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) tuple: Tuple,
    pub(crate) mtu: usize,
    pub(crate) receive_buffer: usize,
    pub(crate) send_buffer: usize,
    pub(crate) keepalive: std::time::Duration,
    pub(crate) seed: u64,
    /// Begin with an open congestion window, see [`Flow::send_room`].
    pub(crate) eager: bool,
}

/// How far one turn of sending got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// There is nothing more to send.
    Done,
    /// There is more; it is others' turn.
    More,
    /// The link took no more.
    Full,
}

/// Bytes that a flow may send before it is others' turn.
pub(crate) const QUANTUM: usize = 32 << 10;

/// What the ends of a flow take in a segment if both are programs of ours, which need no tun device. A kernel behind one
/// takes what fits its device, 1500 bytes as a rule.
const OWN_MSS: u16 = LARGE_TUN_MTU - 40;

pub(crate) struct Flow {
    interface: Interface,
    sockets: SocketSet<'static>,
    handle: SocketHandle,
    clock: Clock,
    mtu: usize,
    pub(crate) tuple: Tuple,
    pub(crate) track: Track,
    /// The largest window that the other side is told.
    pub(crate) receive_share: u32,
    /// When bytes came last, as the shares are counted.
    pub(crate) received_in: u64,
    /// What may be queued at most until it is acknowledged.
    pub(crate) send_share: usize,
    /// When the owner gave bytes last.
    pub(crate) sent_in: u64,
    /// Bytes of both buffers, for the budget.
    pub(crate) buffers: usize,
    /// The handshake is over.
    pub(crate) connected: bool,
    /// The owner has closed its direction.
    pub(crate) closing: bool,
    /// Why it ends, once that is known.
    pub(crate) ending: Option<Closed>,
    /// The owner wants no more of it.
    pub(crate) abandoned: bool,
    /// It ends without another word on the wire.
    pub(crate) dropped: bool,
    /// `Readable` was told, and the owner has not seen the end of it yet.
    pub(crate) told_readable: bool,
    /// The owner had more to send than there was room.
    pub(crate) wants_room: bool,
    /// When a dial ends without an answer.
    pub(crate) connect_by: Option<Instant>,
    /// When something was heard last, by the clock of the living link.
    pub(crate) heard: Instant,
    /// Segments sent again since this was last taken.
    pub(crate) retransmitted: u64,
    /// Still at its own slow start: what was acknowledged so far widens the window.
    eager: bool,
}

impl Flow {
    fn new(shape: Shape, clock: Clock, now: Instant, heard: Instant) -> Self {
        let mut config = Config::new(HardwareAddress::Ip);
        config.random_seed = shape.seed;
        let mut replies = None;
        let track = Track::new();
        let offer = track.offer(u32::MAX);
        let mut device = Inbound::new(&[], &mut replies, shape.mtu, offer);
        let mut interface = Interface::new(config, &mut device, clock.at(now));
        interface.update_ip_addrs(|addresses| {
            // The first of several that it has room for.
            let _ = addresses.push(IpCidr::new(IpAddress::Ipv4(*shape.tuple.local.ip()), 32));
        });
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
            connected: false,
            closing: false,
            ending: None,
            abandoned: false,
            dropped: false,
            told_readable: false,
            wants_room: false,
            connect_by: None,
            heard,
            retransmitted: 0,
            eager: shape.eager,
        }
    }

    /// A flow that sends a SYN as soon as it is polled.
    pub(crate) fn dial(
        shape: Shape,
        clock: Clock,
        now: Instant,
        heard: Instant,
    ) -> Result<Box<Self>, tcp::ConnectError> {
        let mut flow = Box::new(Self::new(shape, clock, now, heard));
        let (local, remote) = (shape.tuple.local, shape.tuple.remote);
        let flow_mut = &mut *flow;
        flow_mut
            .sockets
            .get_mut::<Socket<'_>>(flow_mut.handle)
            .connect(flow_mut.interface.context(), remote, local)?;
        Ok(flow)
    }

    /// A flow that waits for the SYN that it is given next.
    pub(crate) fn listen(
        shape: Shape,
        clock: Clock,
        now: Instant,
        heard: Instant,
    ) -> Result<Box<Self>, tcp::ListenError> {
        let mut flow = Box::new(Self::new(shape, clock, now, heard));
        let local = shape.tuple.local;
        flow.socket_mut().listen(IpListenEndpoint::from(local))?;
        Ok(flow)
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

    /// Feeds a segment of this flow. Returns how many bytes it acknowledged.
    pub(crate) fn input(
        &mut self,
        segment: &Segment<'_>,
        packet: &[u8],
        replies: &mut Replies,
        now: Instant,
    ) -> u32 {
        let before = self.state();
        if before == State::SynSent && !self.answers_syn(segment) {
            return 0;
        }
        let acknowledged = self.track.input(segment);
        if self.mss() >= OWN_MSS.into() {
            (self.received_in, self.sent_in) = (APART, APART);
        }
        let mut replies = Some(replies);
        let offer = self.track.offer(self.receive_share);
        let mut device = Inbound::new(packet, &mut replies, self.mtu, offer);
        self.interface
            .poll_ingress_single(self.clock.at(now), &mut device, &mut self.sockets);
        if let Some(emitted) = device.emitted() {
            self.track.output(&emitted, now);
        }
        let state = self.state();
        // After both ends have been said a reset only tells that the other side has forgotten.
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
        acknowledged
    }

    /// Whether smoltcp may see this in SYN-SENT. Simultaneous open and what comes before the SYN
    /// has left are of no use here, and make smoltcp's window arithmetic underflow.
    fn answers_syn(&self, segment: &Segment<'_>) -> bool {
        self.track.syn_sent()
            && segment.has(flags::ACK)
            && segment.acknowledgement() == self.track.sent()
            && segment.has(flags::SYN | flags::RST)
    }

    /// Sends for one turn, at most `packets`.
    pub(crate) fn transmit(
        &mut self,
        now: Instant,
        packets: usize,
        outbox: &mut Outbox,
        link: &mut dyn FnMut(&[u8]) -> bool,
    ) -> Turn {
        let at = self.clock.at(now);
        for _ in 0..packets {
            // Segments that are not full are held back while more is in flight, except for the
            // last bytes of what is queued: these should not wait.
            let nagle = self.unsent() >= self.mss();
            self.socket_mut().set_nagle_enabled(nagle);
            let offer = self.track.offer(self.receive_share);
            let mut device = Outbound::new(outbox, link, self.mtu, offer);
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
                if std::mem::take(&mut self.eager) {
                    // Something got lost: from here on as everybody else.
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

    /// When it wants to be polled; in the past: now.
    pub(crate) fn poll_at(&mut self, now: Instant) -> Option<Instant> {
        self.interface
            .poll_at(self.clock.at(now), &self.sockets)
            .map(|at| self.clock.back(at))
    }

    /// The largest payload of a segment, as far as known.
    pub(crate) fn mss(&self) -> usize {
        let own = self.mtu - 40;
        match self.track.remote_mss() {
            0 => own,
            // Less than anybody has to take is not meant.
            remote => own.min(remote.max(DEFAULT_MSS).into()),
        }
    }

    fn unsent(&self) -> usize {
        let in_flight = usize::try_from(self.track.in_flight()).unwrap_or(usize::MAX);
        self.socket().send_queue().saturating_sub(in_flight)
    }

    /// Bytes that the flow has, or will have, on the way: all that is queued and that the other
    /// side has a window for.
    pub(crate) fn charge(&self) -> usize {
        // What is being repeated is lost rather than on the way.
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

    /// How much may be queued now.
    ///
    /// Over a stream transport nothing is lost inside the tunnel, so that a flow begins without
    /// smoltcp's congestion control and its initial window of 2 KiB: ten segments (RFC 6928) and
    /// all that was acknowledged so far, which doubles with each round trip. It ends with the
    /// first loss, which can only be behind the peer.
    pub(crate) fn send_room(&self) -> usize {
        let queue = self.socket().send_queue();
        let mut limit = self.send_limit();
        if self.eager {
            let acknowledged = usize::try_from(self.track.acknowledged()).unwrap_or(usize::MAX);
            limit = limit.min((10 * self.mss()).saturating_add(acknowledged));
        }
        limit.saturating_sub(queue)
    }

    /// Bytes that [`send_room`](Self::send_room) has to reach until the owner is told.
    pub(crate) fn room_worth_telling(&self) -> usize {
        (self.send_limit() / 4).clamp(1, 8 * self.mss())
    }

    /// The own direction is open, or will be.
    pub(crate) fn may_send(&self) -> bool {
        !self.closing && self.ending.is_none() && (!self.connected || self.socket().may_send())
    }

    /// Queues bytes.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> usize {
        self.socket_mut().send_slice(bytes).unwrap_or(0)
    }

    /// Something can be read, or the end of it.
    pub(crate) fn is_readable(&self) -> bool {
        self.socket().can_recv()
            || (self.connected && self.ending.is_none() && !self.socket().may_recv())
    }

    /// Received bytes that the owner has not read.
    pub(crate) fn unread(&self) -> bool {
        self.socket().can_recv()
    }

    pub(crate) fn recv(&mut self, take: impl FnOnce(&[u8]) -> usize) -> Received {
        let taken = self.socket_mut().recv(|bytes| {
            if bytes.is_empty() {
                return (0, None);
            }
            let taken = take(bytes).min(bytes.len());
            (taken, Some(taken))
        });
        match taken {
            Ok(Some(taken)) => Received::Bytes(taken),
            Ok(None) => Received::Empty,
            Err(RecvError::Finished) => Received::End,
            // Reset: told by another event. Not yet connected: nothing.
            Err(RecvError::InvalidState) => Received::Empty,
        }
    }

    /// Ends the own direction; smoltcp would skip the handshake if it were not over.
    pub(crate) fn close(&mut self) {
        self.closing = true;
        if self.connected {
            self.socket_mut().close();
        }
    }

    /// Notes the end of the handshake, once.
    pub(crate) fn becomes_connected(&mut self) -> bool {
        if self.connected || matches!(self.state(), State::SynSent | State::SynReceived) {
            return false;
        }
        // Closed or listening again: it was reset.
        self.connected = !matches!(self.state(), State::Closed | State::Listen);
        self.connect_by = None;
        if self.connected && self.closing {
            self.socket_mut().close();
        }
        self.connected
    }

    /// Ends with a reset, which is sent when polled.
    pub(crate) fn abort(&mut self) {
        self.socket_mut().abort();
    }

    /// smoltcp is through with it: nothing will be sent or received any more.
    pub(crate) fn is_over(&self) -> bool {
        match self.state() {
            _ if self.dropped => true,
            // A reset is still to be sent while the addresses are known.
            State::Closed => self.socket().remote_endpoint().is_none(),
            State::TimeWait => self.track.end_is_acknowledged(),
            State::Listen => true,
            _ => false,
        }
    }
}
