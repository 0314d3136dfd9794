//! Simulation of the flows between two OpenVPN peers, with their handles in other tasks. The input selects the
//! actions of the handles, of the two owners, of a network that loses, repeats and reorders packets, and of a
//! peer that sends garbage.
//!
//! Invariants: bytes arrive in order and unchanged, and all of them before an orderly end. Once the network loses
//! nothing and all readers read, all bytes arrive. The bytes of one direction that were written and not read are
//! bounded. Packets that wait for the link are bounded. No flow is left, or counted, after its handles are gone.

use std::collections::{BTreeMap, VecDeque};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use culvert_openvpn::flows::Config;
use culvert_openvpn_io::stream::{Broken, FlowSink, FlowSource, Incoming, Peer, Stream};
use culvert_openvpn_io::streams::Streams;
use culvert_openvpn_io::{Moment, now};
use culvert_stream::{CloseReason, Sink as _, Source as _};
use tokio_util::task::TaskTracker;

/// Buffer of a flow for each direction, in bytes.
const FLOW_BYTES: usize = 16 << 10;

/// Largest write, in bytes.
const WRITE_BYTES: usize = 255 << 8;

/// Bound for the bytes of one direction between writer and reader: two pipes of 128 KiB, two buffers of a
/// flow, and a write that is in progress.
const DIRECTION_BYTES: u64 = 2 * (128 << 10) + 2 * FLOW_BYTES as u64 + WRITE_BYTES as u64;

/// Bound for forwarded packets that wait for the link, in bytes.
const FORWARDED_BYTES: usize = 256 << 10;

/// Number of turns for the bytes under way to arrive, and the time between two turns.
const SETTLE_TURNS: usize = 10_000;
const SETTLE_PAUSE: Duration = Duration::from_millis(50);

/// Largest number of turns of a second until all flows without handles are gone. A flow ends after its last byte, or after
/// 30 s without progress.
const END_TURNS: usize = 1000;

/// Largest number of packets under way in one direction.
const WIRE_PACKETS: usize = 64;

const MAX_DIALS: u16 = 16;

/// Most time that passes in pauses. A flow whose handles are dropped ends after 30 s without progress
/// (`culvert_stream::CLOSE_STALL`), and the pauses of its retransmissions double.
const MOST_PAUSED: Duration = Duration::from_secs(17);

/// First port of the dialed destinations. Every dial has its own port.
const FIRST_PORT: u16 = 1000;

type Dial = Pin<Box<dyn Future<Output = Result<Stream, Broken>>>>;

/// One end of a flow.
struct End {
    source: Option<FlowSource>,
    sink: Option<FlowSink>,
    /// Bytes passed to the sink, and bytes returned by the source.
    written: u64,
    read: u64,
    /// True once the source has returned the orderly end.
    ended: bool,
    /// True while the sink has not accepted the last write.
    busy: bool,
}

struct Side {
    streams: Streams,
    peer: Peer,
    ends: BTreeMap<u16, End>,
    /// Packets under way to the other side.
    wire: VecDeque<Vec<u8>>,
    /// Bytes of forwarded packets that the peer accepted and that did not leave yet.
    forwarded: usize,
}

struct World {
    now: Moment,
    /// Sum of all pauses.
    paused: Duration,
    sides: [Side; 2],
    dials: BTreeMap<u16, Dial>,
    dialed: u16,
    /// Counts flows whose sinks are gone and whose bytes are under way.
    leaving: TaskTracker,
}

/// Runs the operations that the bytes encode, three bytes per operation.
///
/// # Panics
/// If an invariant does not hold.
pub fn run(input: &[u8]) {
    let mut world = World::new();
    for operation in input.chunks_exact(3) {
        let [kind, a, b] = [operation[0], operation[1], operation[2]];
        world.step(kind % 16, a, b);
        world.check();
    }
    world.end();
}

/// Returns byte `offset` of the bytes that `side` writes to a flow.
fn pattern(number: u16, side: usize, offset: u64) -> u8 {
    (offset ^ (offset >> 8) ^ u64::from(number) ^ ((side as u64) << 7)) as u8
}

fn poll<T>(work: impl Future<Output = T>) -> Poll<T> {
    pin!(work).poll(&mut Context::from_waker(Waker::noop()))
}

impl World {
    fn new() -> Self {
        let now = now();
        let side = |last, accept| {
            let config = Config {
                address: Ipv4Addr::new(10, 20, 0, last),
                receive_buffer: FLOW_BYTES,
                send_buffer: FLOW_BYTES,
                accept,
                ..Config::default()
            };
            let streams = Streams::new(config, now);
            Side {
                peer: streams.peer(),
                streams,
                ends: BTreeMap::new(),
                wire: VecDeque::new(),
                forwarded: 0,
            }
        };
        Self {
            now,
            paused: Duration::ZERO,
            sides: [side(1, false), side(6, true)],
            dials: BTreeMap::new(),
            dialed: 0,
            leaving: TaskTracker::new(),
        }
    }

    fn step(&mut self, kind: u8, a: u8, b: u8) {
        let which = usize::from(a & 1);
        let flow = a >> 1;
        match kind {
            0 => self.dial(),
            1 => self.poll_dials(),
            2 | 3 => self.turn(which, usize::from(b)),
            4 | 5 => self.deliver(which, usize::from(b % 16)),
            6 => self.damage(which, b),
            7 => self.sides[which].write(which, flow, usize::from(b) << 8),
            8 => self.sides[which].read(which, flow, b % 8),
            9 => {
                if let Some(end) = self.sides[which].pick(flow)
                    && let Some(sink) = &mut end.1.sink
                    && !end.1.busy
                {
                    let _ = poll(sink.finish());
                }
            }
            10 => {
                if let Some((_, end)) = self.sides[which].pick(flow) {
                    end.source = None;
                }
            }
            11 => {
                if let Some((_, end)) = self.sides[which].pick(flow) {
                    match (end.sink.take(), b % 3) {
                        (Some(sink), 0) => sink.reset(&self.leaving),
                        (Some(sink), 1) if !end.busy => sink.end(&self.leaving),
                        (sink, _) => drop(sink),
                    }
                }
            }
            12 => {
                let pause = Duration::from_millis(1 << (b % 15));
                if self.paused + pause <= MOST_PAUSED {
                    self.paused += pause;
                    self.now += pause;
                }
            }
            13 => {
                let side = &mut self.sides[which];
                let packet = vec![0; 8 * usize::from(b) + 1];
                if side.peer.forward(&packet) {
                    side.forwarded += packet.len();
                }
            }
            14 => {
                let garbage = [a, b, 0x45, 0, 0, b].repeat(usize::from(b % 32));
                self.sides[which].streams.input(&garbage, self.now);
            }
            _ => {
                if let Some((number, _)) = self.dials.pop_first() {
                    self.sides[1].ends.remove(&number);
                }
            }
        }
    }

    fn dial(&mut self) {
        if self.dialed < MAX_DIALS {
            let port = FIRST_PORT + self.dialed;
            let (number, peer) = (self.dialed, self.sides[0].peer.clone());
            let target = SocketAddrV4::new(Ipv4Addr::new(172, 25, 1, 10), port);
            let dial = async move { peer.dial(target).await };
            self.dials.insert(number, Box::pin(dial));
            self.dialed += 1;
            self.poll_dials();
        }
    }

    fn poll_dials(&mut self) {
        let mut cx = Context::from_waker(Waker::noop());
        let ends = &mut self.sides[0].ends;
        self.dials
            .retain(|number, dial| match dial.as_mut().poll(&mut cx) {
                Poll::Ready(Ok(stream)) => {
                    ends.insert(*number, End::new(stream));
                    false
                }
                Poll::Ready(Err(_)) => false,
                Poll::Pending => true,
            });
    }

    /// Runs a turn of an owner. The link accepts at most `room` packets.
    fn turn(&mut self, which: usize, mut room: usize) {
        let side = &mut self.sides[which];
        let mut incoming = Vec::new();
        side.streams.work(self.now, &mut |one| incoming.push(one));
        for incoming in incoming {
            side.accept(incoming);
        }
        let (wire, forwarded) = (&mut side.wire, &mut side.forwarded);
        side.streams.poll_output(self.now, &mut |packet| {
            if room == 0 {
                return false;
            }
            room -= 1;
            if packet.iter().all(|byte| *byte == 0) {
                *forwarded -= packet.len();
            } else if wire.len() < WIRE_PACKETS {
                wire.push_back(packet.to_vec());
            }
            true
        });
    }

    fn deliver(&mut self, which: usize, count: usize) {
        for _ in 0..=count {
            let Some(packet) = self.sides[which].wire.pop_front() else {
                return;
            };
            let to = &mut self.sides[1 - which].streams;
            to.input(&packet, self.now);
            to.heard(self.now);
        }
    }

    fn damage(&mut self, which: usize, how: u8) {
        let wire = &mut self.sides[which].wire;
        match how % 4 {
            0 => drop(wire.pop_front()),
            1 => wire.rotate_left(usize::from(how / 4) % wire.len().max(1)),
            2 => {
                if let Some(again) = wire.front().cloned() {
                    wire.push_back(again);
                }
            }
            _ => {
                if let Some(packet) = wire.front_mut() {
                    let at = usize::from(how / 4) % packet.len();
                    // A damaged checksum: smoltcp must drop the packet.
                    packet[at] ^= 1;
                }
            }
        }
    }

    fn check(&self) {
        for (which, side) in self.sides.iter().enumerate() {
            assert!(side.forwarded <= FORWARDED_BYTES, "{}", side.forwarded);
            for (number, end) in &side.ends {
                let other = self.sides[1 - which].ends.get(number);
                let read = other.map_or(0, |other| other.read);
                assert!(read <= end.written, "more bytes were read than written");
                if other.is_some_and(|other| other.ended) {
                    assert_eq!(read, end.written, "bytes before an orderly end are lost");
                }
                // A pipe without a reader discards bytes.
                let is_read = other.is_none_or(|other| other.source.is_some());
                assert!(
                    end.sink.is_none() || !is_read || end.written - read <= DIRECTION_BYTES,
                    "{} bytes wait",
                    end.written - read
                );
            }
        }
    }

    /// Lets all readers read, over a network that loses nothing, until all bytes have arrived.
    ///
    /// # Panics
    /// If bytes are missing after [`SETTLE_TURNS`].
    fn settle(&mut self) {
        for _ in 0..SETTLE_TURNS {
            if self.waiting().is_none() {
                return;
            }
            self.now += SETTLE_PAUSE;
            for which in 0..2 {
                self.turn(which, WIRE_PACKETS);
                self.deliver(which, WIRE_PACKETS);
                let side = &mut self.sides[which];
                for flow in 0..side.ends.len() as u8 {
                    if side.pick(flow).is_some_and(|(_, end)| end.busy) {
                        side.write(which, flow, 0);
                    }
                    side.read(which, flow, u8::MAX);
                }
            }
            self.check();
        }
        assert_eq!(self.waiting(), None, "bytes of a flow do not arrive");
    }

    /// Returns a flow whose ends are both open and whose bytes have not all arrived.
    fn waiting(&self) -> Option<u16> {
        let mut pairs = [0, 1].into_iter().flat_map(|which| {
            let others = &self.sides[1 - which].ends;
            let ends = self.sides[which].ends.iter();
            ends.filter_map(|(number, end)| Some((*number, end, others.get(number)?)))
        });
        pairs.find_map(|(number, from, to)| {
            // Only a read shows that a flow is broken.
            let is_open = from.sink.is_some() && (from.source.is_some() || from.ended);
            (is_open && to.source.is_some() && to.read < from.written).then_some(number)
        })
    }

    /// Lets all readers read until all bytes have arrived. Then drops all handles, and lets the owners work until all flows
    /// must be gone.
    fn end(mut self) {
        self.settle();
        self.dials.clear();
        for side in &mut self.sides {
            side.ends.clear();
        }
        for turn in 0..END_TURNS {
            self.now += Duration::from_secs(1);
            for which in 0..2 {
                self.turn(which, usize::MAX);
                self.sides[which].ends.clear();
                self.deliver(which, WIRE_PACKETS);
            }
            if turn >= 100 && self.sides.iter().all(|side| side.peer.flows() == 0) {
                break;
            }
        }
        for side in &self.sides {
            assert_eq!(side.peer.flows(), 0, "flows are left without handles");
            assert_eq!(side.forwarded, 0, "packets are left");
        }
        assert_eq!(self.leaving.len(), 0, "flows without handles are counted");
    }
}

impl Side {
    fn accept(&mut self, incoming: Incoming) {
        let number = incoming.destination.port().wrapping_sub(FIRST_PORT);
        // A dial is accepted once. Dropping the request refuses a repeated or damaged SYN.
        if number < MAX_DIALS
            && !self.ends.contains_key(&number)
            && let Some(stream) = incoming.accept()
        {
            self.ends.insert(number, End::new(stream));
        }
    }

    fn pick(&mut self, which: u8) -> Option<(u16, &mut End)> {
        let index = usize::from(which).checked_rem(self.ends.len())?;
        let (number, end) = self.ends.iter_mut().nth(index)?;
        Some((*number, end))
    }

    fn write(&mut self, side: usize, flow: u8, count: usize) {
        let Some((number, end)) = self.pick(flow) else {
            return;
        };
        let Some(sink) = &mut end.sink else { return };
        // While a write is in progress, an empty write continues it.
        let count = if end.busy { 0 } else { count };
        let from = end.written;
        let bytes = (from..from + count as u64).map(|offset| pattern(number, side, offset));
        let bytes = Bytes::from_iter(bytes);
        end.written += count as u64;
        match poll(sink.send(bytes)) {
            Poll::Ready(Ok(())) => end.busy = false,
            Poll::Ready(Err(_)) => {
                // Also a write after the end, which sends nothing.
                end.written -= count as u64;
                end.sink = None;
            }
            Poll::Pending => end.busy = true,
        }
    }

    fn read(&mut self, side: usize, flow: u8, chunks: u8) {
        let Some((number, end)) = self.pick(flow) else {
            return;
        };
        for _ in 0..=chunks {
            let Some(source) = &mut end.source else {
                return;
            };
            match poll(source.recv()) {
                Poll::Ready(Ok(Some(bytes))) => {
                    assert!(!bytes.is_empty());
                    for byte in bytes {
                        assert_eq!(byte, pattern(number, 1 - side, end.read), "at {}", end.read);
                        end.read += 1;
                    }
                }
                Poll::Ready(end_of_source) => {
                    end.ended = end_of_source.is_ok();
                    end.source = None;
                }
                Poll::Pending => return,
            }
        }
    }
}

impl End {
    fn new(stream: Stream) -> Self {
        let (source, sink) = stream.halves(|_| CloseReason::AgentLost);
        Self {
            source: Some(source),
            sink: Some(sink),
            written: 0,
            read: 0,
            ended: false,
            busy: false,
        }
    }
}
