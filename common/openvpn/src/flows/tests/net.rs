//! The simulated tunnel and the applications at its ends.

use std::collections::{BTreeMap, HashMap};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, RngCore, SeedableRng};

use crate::flows::{Closed, Config, Event, FlowId, Flows, Input, Received, Refusal};
use crate::ip::build::icmp;
use crate::ip::{Packet, kind};

pub(crate) const SERVER: Ipv4Addr = Ipv4Addr::new(10, 20, 0, 1);
pub(crate) const POD: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(172, 25, 0, 7), 10250);

const ROUTER: Ipv4Addr = Ipv4Addr::new(172, 25, 0, 1);

/// One direction of the tunnel.
pub(crate) struct Wire {
    pub(crate) delay: Duration,
    /// Largest number of packets in flight; a full wire refuses packets.
    pub(crate) room: usize,
    pub(crate) loss: f64,
    pub(crate) duplicate: f64,
    pub(crate) reorder: f64,
    /// Accepts packets and delivers none.
    pub(crate) stalled: bool,
    /// Receiver's socket buffer in bytes; more bytes in one round are lost.
    pub(crate) socket: usize,
    /// Packets with this source port are lost.
    pub(crate) swallow: Option<[u8; 2]>,
    /// A router on the wire answers larger packets with an ICMP error.
    pub(crate) mtu: u16,
    /// Answers of the router.
    errors: Vec<Vec<u8>>,
    on_the_way: BTreeMap<(Instant, u64), Vec<u8>>,
    count: u64,
    pub(crate) lost: u64,
    /// Bytes in flight: now, and the maximum so far.
    bytes: usize,
    pub(crate) peak: usize,
}

impl Wire {
    fn new() -> Self {
        Self {
            delay: Duration::from_millis(1),
            room: 64,
            loss: 0.0,
            duplicate: 0.0,
            reorder: 0.0,
            stalled: false,
            socket: usize::MAX,
            swallow: None,
            mtu: u16::MAX,
            errors: Vec::new(),
            on_the_way: BTreeMap::new(),
            count: 0,
            lost: 0,
            bytes: 0,
            peak: 0,
        }
    }

    fn take(&mut self, packet: &[u8], now: Instant, random: &mut StdRng) -> bool {
        if self.on_the_way.len() >= self.room {
            return false;
        }
        if self.swallow.is_some_and(|port| packet[20..22] == port) {
            return true;
        }
        if packet.len() > self.mtu.into() {
            let sender = Packet::parse(packet).unwrap().source();
            let [high, low] = self.mtu.to_be_bytes();
            let rest = [0, 0, high, low];
            let from = SocketAddrV4::new(ROUTER, 0);
            let to = SocketAddrV4::new(sender, 0);
            let error = icmp(from, to, [kind::UNREACHABLE, 4], rest, &packet[..28]);
            self.errors.push(error);
            return true;
        }
        let copies = 1 + usize::from(random.random_bool(self.duplicate));
        for _ in 0..copies {
            if random.random_bool(self.loss) {
                self.lost += 1;
                continue;
            }
            let late = random.random_bool(self.reorder);
            let delay = self.delay * if late { 3 } else { 1 };
            self.count += 1;
            self.bytes += packet.len();
            self.peak = self.peak.max(self.bytes);
            self.on_the_way
                .insert((now + delay, self.count), packet.to_vec());
        }
        true
    }

    fn due(&mut self, now: Instant) -> Option<Vec<u8>> {
        let (at, _) = self.on_the_way.first_key_value()?.0;
        if *at > now || self.stalled {
            return None;
        }
        let (_, packet) = self.on_the_way.pop_first()?;
        self.bytes -= packet.len();
        Some(packet)
    }

    fn next(&self) -> Option<Instant> {
        (!self.stalled).then(|| Some(self.on_the_way.first_key_value()?.0.0))?
    }
}

/// Behavior and state of an application for one flow.
#[derive(Debug, Default)]
pub(crate) struct Stream {
    pub(crate) to_send: usize,
    pub(crate) sent: usize,
    pub(crate) received: usize,
    pub(crate) connected: bool,
    /// Reads nothing.
    pub(crate) paused: bool,
    /// Keeps its direction open after `to_send`.
    pub(crate) keep_open: bool,
    pub(crate) closed_own: bool,
    pub(crate) delivered: bool,
    pub(crate) end: bool,
    pub(crate) closed: Option<Closed>,
    pub(crate) seed: u8,
    pub(crate) connected_at: Option<Instant>,
    /// Sends received bytes back instead of `to_send`.
    pub(crate) echo: bool,
    /// Time of the last received bytes.
    pub(crate) last_received: Option<Instant>,
}

fn pattern(at: usize, seed: u8) -> u8 {
    (at as u8) ^ (at >> 8) as u8 ^ ((at >> 16) as u8).wrapping_mul(31) ^ seed
}

/// Answer to incoming connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Accept,
    Refuse(Refusal),
    Silent,
}

pub(crate) struct App {
    pub(crate) flows: Flows,
    pub(crate) streams: HashMap<FlowId, Stream>,
    pub(crate) answer: Answer,
    /// Default of [`Stream::to_send`] for accepted flows.
    pub(crate) to_send: usize,
    pub(crate) echo: bool,
    pub(crate) incoming: Vec<(FlowId, SocketAddrV4, SocketAddrV4)>,
    pub(crate) drops_input: bool,
    buffer: Vec<u8>,
}

impl App {
    fn new(config: Config, seed: u64, now: Instant) -> Self {
        Self {
            flows: Flows::new(config, Box::new(StdRng::seed_from_u64(seed)), now),
            streams: HashMap::new(),
            answer: Answer::Accept,
            to_send: 0,
            echo: false,
            incoming: Vec::new(),
            drops_input: false,
            buffer: Vec::new(),
        }
    }

    fn events(&mut self, now: Instant) {
        while let Some(event) = self.flows.poll_event() {
            match event {
                Event::Incoming {
                    id,
                    source,
                    destination,
                } => {
                    self.incoming.push((id, source, destination));
                    match self.answer {
                        Answer::Accept => {
                            self.flows.accept(id, now).unwrap();
                            self.streams.insert(
                                id,
                                Stream {
                                    to_send: self.to_send,
                                    echo: self.echo,
                                    keep_open: self.echo,
                                    seed: source.port() as u8,
                                    ..Stream::default()
                                },
                            );
                        }
                        Answer::Refuse(refusal) => self.flows.refuse(id, refusal),
                        Answer::Silent => {}
                    }
                }
                Event::Connected(id) => {
                    let stream = self.streams.get_mut(&id).unwrap();
                    stream.connected = true;
                    stream.connected_at = Some(now);
                    self.pump(id, now);
                }
                Event::Readable(id) | Event::Writable(id) => self.pump(id, now),
                Event::Delivered(id) => self.streams.get_mut(&id).unwrap().delivered = true,
                Event::Closed(id, why) => {
                    if let Some(stream) = self.streams.get_mut(&id) {
                        assert_eq!(stream.closed, None, "closed twice");
                        stream.closed = Some(why);
                    }
                }
            }
        }
    }

    /// Reads and writes as much as possible.
    pub(crate) fn pump(&mut self, id: FlowId, now: Instant) {
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        let mut back = Vec::new();
        while !stream.paused && !stream.end {
            let at = stream.received;
            let seed = stream.seed;
            match self.flows.recv(id, |bytes| {
                if stream.echo {
                    back.extend_from_slice(bytes);
                } else {
                    for (i, byte) in bytes.iter().enumerate() {
                        assert_eq!(*byte, pattern(at + i, seed), "at {}", at + i);
                    }
                }
                bytes.len()
            }) {
                Ok(Received::Bytes(n)) => {
                    stream.received += n;
                    stream.last_received = Some(now);
                }
                Ok(Received::Empty) => break,
                Ok(Received::End) => stream.end = true,
                Err(_) => return,
            }
        }
        if stream.echo && !back.is_empty() {
            assert_eq!(self.flows.send(id, &back).unwrap(), back.len());
        }
        while stream.sent < stream.to_send {
            let n = (stream.to_send - stream.sent).min(16 << 10);
            self.buffer.clear();
            self.buffer
                .extend((0..n).map(|i| pattern(stream.sent + i, stream.seed)));
            match self.flows.send(id, &self.buffer) {
                Ok(sent) => {
                    stream.sent += sent;
                    if sent < n {
                        return;
                    }
                }
                Err(_) => return,
            }
        }
        if (!stream.keep_open || (stream.echo && stream.end)) && !stream.closed_own {
            stream.closed_own = true;
            self.flows.close(id);
        }
    }
}

/// The simulated network: `a` dials, `b` accepts.
pub(crate) struct Net {
    pub(crate) now: Instant,
    pub(crate) a: App,
    pub(crate) b: App,
    pub(crate) ab: Wire,
    pub(crate) ba: Wire,
    pub(crate) random: StdRng,
}

impl Net {
    pub(crate) fn new() -> Self {
        Self::with(Config::default(), Config::default(), 1)
    }

    pub(crate) fn with(a: Config, b: Config, seed: u64) -> Self {
        let now = Instant::now();
        let mut random = StdRng::seed_from_u64(seed);
        Self {
            now,
            a: App::new(a, random.next_u64(), now),
            b: App::new(Config { accept: true, ..b }, random.next_u64(), now),
            ab: Wire::new(),
            ba: Wire::new(),
            random,
        }
    }

    pub(crate) fn dial(&mut self, to: SocketAddrV4, to_send: usize) -> FlowId {
        let id = self.a.flows.dial(to, self.now).unwrap();
        // The accepting side derives the same seed from the port.
        let seed = self.port_of(id) as u8;
        self.a.streams.insert(
            id,
            Stream {
                to_send,
                seed,
                ..Stream::default()
            },
        );
        id
    }

    pub(crate) fn port_of(&mut self, id: FlowId) -> u16 {
        self.a
            .flows
            .slots
            .flow(id.index)
            .unwrap()
            .tuple
            .local
            .port()
    }

    /// Processes everything that is due at the current time.
    pub(crate) fn turn(&mut self) {
        let now = self.now;
        for (app, wire) in [(&mut self.a, &mut self.ab), (&mut self.b, &mut self.ba)] {
            for error in wire.errors.drain(..) {
                assert_eq!(app.flows.input(&error, now), Input::Accepted);
            }
        }
        for (app, wire) in [(&mut self.a, &mut self.ba), (&mut self.b, &mut self.ab)] {
            let mut held = 0;
            while let Some(packet) = wire.due(now) {
                held += packet.len();
                if held > wire.socket {
                    wire.lost += 1;
                    continue;
                }
                if app.drops_input {
                    continue;
                }
                if app.flows.input(&packet, now) == Input::Unknown && !app.flows.echo(&packet, now)
                {
                    app.flows.reject(&packet, now);
                }
            }
        }
        for (app, wire) in [(&mut self.a, &mut self.ab), (&mut self.b, &mut self.ba)] {
            app.events(now);
            app.flows
                .poll_output(now, &mut |packet| wire.take(packet, now, &mut self.random));
            app.events(now);
        }
    }

    /// Runs until `done`, at most for `limit` of virtual time.
    pub(crate) fn run(&mut self, limit: Duration, mut done: impl FnMut(&mut Self) -> bool) -> bool {
        let until = self.now + limit;
        loop {
            self.turn();
            if done(self) {
                return true;
            }
            let next = [
                self.ab.next(),
                self.ba.next(),
                self.a.flows.poll_timeout(),
                self.b.flows.poll_timeout(),
            ];
            let Some(next) = next.into_iter().flatten().min() else {
                self.now = until;
                return done(self);
            };
            // Time always advances, so that a full link gets room.
            self.now = next.max(self.now + Duration::from_micros(10));
            if self.now > until {
                self.now = until;
                self.turn();
                return done(self);
            }
        }
    }

    /// Runs until both sides have no flows.
    pub(crate) fn settle(&mut self, limit: Duration) {
        self.run(limit, |net| {
            net.a.flows.is_empty() && net.b.flows.is_empty()
        });
    }

    /// The only stream of the accepting side.
    pub(crate) fn accepted(&self) -> &Stream {
        assert_eq!(self.b.streams.len(), 1);
        self.b.streams.values().next().unwrap()
    }
}
