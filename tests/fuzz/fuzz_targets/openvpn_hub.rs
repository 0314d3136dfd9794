//! The sessions of a UDP server. Their datagrams come from correct clients, from a network that loses,
//! reorders, damages and repeats datagrams, and from attackers. The first byte sets the behavior of the hub's
//! owner. Every later step starts with a byte that selects the action, followed by the bytes that the action
//! needs.
//!
//! Invariants: every established session that goes away reports an `Ended` event, and all sessions end once
//! all peers are silent. The number of sessions and the hub's memory are bounded. The hub sends only to addresses
//! that have sent a datagram. Every inner packet that leaves a tunnel was put into the tunnel, and leaves only
//! once.
#![no_main]

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use bytes::BytesMut;
use culvert_fuzz::Bytes;
use culvert_fuzz::control::{client, made_up, push, server};
use culvert_fuzz::memory::{Counting, Meter, uncounted};
use culvert_openvpn::hub::{Hub, Limits, PeerId};
use culvert_openvpn::packet::{ControlPacket, Opcode, SessionId};
use culvert_openvpn::session::{ClientConfig, Event, ServerConfig, Session, Transport};
use libfuzzer_sys::fuzz_target;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const LIMITS: Limits = Limits {
    sessions: 4,
    half_open: 2,
};
const MAX_CLIENTS: usize = 6;

/// Largest number of datagrams kept in each queue: datagrams under way, and arrived datagrams that a later
/// step may repeat.
const KEPT: usize = 64;

/// Largest datagram, in bytes.
const LARGE: usize = 60_000;

/// Limit of the hub's memory, in bytes: 256 packets of clients that wait for a session, and the sessions.
const MAX_HELD: isize = 1 << 20;

/// The configurations of two different clients.
static CLIENTS: LazyLock<[Arc<ClientConfig>; 2]> =
    LazyLock::new(|| ["a", "b"].map(|name| client(name, Transport::Udp)));

/// The server's configurations before and after the operator renews the certificate.
static SERVERS: LazyLock<[Arc<ServerConfig>; 2]> =
    LazyLock::new(|| [60, 20].map(|reneg| server(Transport::Udp, Duration::from_secs(reneg))));

fn address(number: u8) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, number & 7], 1194))
}

struct World {
    now: Instant,
    hub: Hub,
    meter: Meter,
    /// True if the hub's owner accepts every authenticated client at once.
    decided: bool,
    clients: Vec<(SocketAddr, Session)>,
    /// Datagrams from clients, each with the index of its client.
    wire: VecDeque<(usize, Vec<u8>)>,
    /// Datagrams that have arrived at the hub.
    old: VecDeque<Vec<u8>>,
    /// Addresses that have sent at least one datagram.
    heard: BTreeSet<SocketAddr>,
    /// By client address: the session id of the last client that the server has answered, and the server's
    /// own session id.
    answered: HashMap<SocketAddr, (SessionId, SessionId)>,
    /// The hub's sessions: established now, established at any time, and ended.
    open: BTreeSet<PeerId>,
    established: BTreeSet<PeerId>,
    ended: BTreeSet<PeerId>,
    /// Inner packets that are sealed but not yet delivered.
    inside: HashSet<Vec<u8>>,
    sealed: u32,
}

impl World {
    fn new(decided: bool) -> Self {
        let now = Instant::now();
        // Created outside of the meter.
        let _ = (&*CLIENTS, &*SERVERS);
        Self {
            now,
            hub: Hub::new(SERVERS[0].clone(), LIMITS, now),
            meter: Meter::default(),
            decided,
            clients: Vec::new(),
            wire: VecDeque::new(),
            old: VecDeque::new(),
            heard: BTreeSet::new(),
            answered: HashMap::new(),
            open: BTreeSet::new(),
            established: BTreeSet::new(),
            ended: BTreeSet::new(),
            inside: HashSet::new(),
            sealed: 0,
        }
    }

    /// Returns a new, unique inner packet, `out` to a client or otherwise from a client.
    fn packet(&mut self, peer: u32, out: bool) -> Vec<u8> {
        self.sealed += 1;
        let words = [u32::from(out), peer, self.sealed];
        words.iter().flat_map(|word| word.to_be_bytes()).collect()
    }

    fn arrives(&mut self, from: SocketAddr, mut datagram: Vec<u8>) {
        self.heard.insert(from);
        let (open, inside) = (&self.open, &mut self.inside);
        let mut take = |peer, packet: &[u8]| {
            assert!(
                open.contains(&peer),
                "data from a peer without an established session"
            );
            assert!(
                uncounted(|| inside.remove(packet)),
                "an inner packet was never sent, or was delivered twice"
            );
            assert_eq!(packet[..4], [0; 4], "from the server");
        };
        let (hub, now) = (&mut self.hub, self.now);
        self.meter
            .run(|| hub.input(from, &mut datagram, now, &mut take));
        self.check();
    }

    /// Removes and returns the next datagram of a client, and keeps a copy for repetition.
    fn next(&mut self) -> Option<(SocketAddr, Vec<u8>)> {
        let (client, datagram) = self.wire.pop_front()?;
        if self.old.len() == KEPT {
            self.old.pop_front();
        }
        self.old.push_back(datagram.clone());
        Some((self.clients[client].0, datagram))
    }

    /// Handles all events and delivers all output of the hub, then queues the output of the clients.
    fn settle(&mut self) {
        let now = self.now;
        loop {
            while self.takes_event() {}
            let mut out = BytesMut::with_capacity(4096);
            let hub = &mut self.hub;
            let sent = self.meter.run(|| hub.poll_output(now, &mut out));
            let Some(to) = sent.map(|path| path.remote) else {
                break;
            };
            self.delivers(to, &out);
        }
        for (number, (_, session)) in self.clients.iter_mut().enumerate() {
            while session.poll_event().is_some() {}
            let mut out = BytesMut::new();
            while session.poll_output(now, &mut out) {
                self.wire.push_back((number, out.split().to_vec()));
            }
        }
        self.wire.truncate(KEPT);
    }

    /// Handles the next event. Returns false if there is none.
    fn takes_event(&mut self) -> bool {
        let (now, decided) = (self.now, self.decided);
        let Self {
            hub,
            meter,
            open,
            established,
            ended,
            ..
        } = self;
        meter.run(|| {
            let Some((peer, event)) = hub.poll_event() else {
                return false;
            };
            assert!(!ended.contains(&peer), "{event:?} after the end");
            match event {
                Event::Authenticated(_) if decided => {
                    hub.with(peer, now, |session| {
                        let accepted = session.accept(push(), now);
                        accepted.expect("options that can be pushed");
                    });
                }
                Event::Established(_) => uncounted(|| {
                    open.insert(peer);
                    established.insert(peer);
                }),
                Event::Ended(_) => uncounted(|| {
                    open.remove(&peer);
                    ended.insert(peer);
                }),
                _ => {}
            }
            true
        })
    }

    fn timers(&mut self) {
        let (hub, now) = (&mut self.hub, self.now);
        self.meter.run(|| hub.handle_timeout(now));
    }

    /// Delivers one datagram of the hub to every client at this address.
    fn delivers(&mut self, to: SocketAddr, datagram: &[u8]) {
        assert!(
            self.heard.contains(&to),
            "datagram to {to}, which has never sent one"
        );
        if let Ok(packet) = ControlPacket::parse(datagram)
            && packet.opcode == Opcode::HardResetServerV2
            && let Some(client) = packet.peer_session
        {
            self.answered.insert(to, (client, packet.session));
        }
        let inside = &mut self.inside;
        let there = self.clients.iter_mut().filter(|(at, _)| *at == to);
        for (_, session) in there {
            let _ = session.input(&mut datagram.to_vec(), self.now, &mut |packet| {
                assert!(
                    inside.remove(packet),
                    "an inner packet was never sent, or was delivered twice"
                );
                assert_eq!(packet[..4], [0, 0, 0, 1], "from a client");
            });
        }
    }

    fn passes(&mut self, time: Duration) {
        self.now += time;
        for (_, session) in &mut self.clients {
            session.handle_timeout(self.now);
        }
        self.timers();
    }

    /// Checks the invariants that hold after every step.
    fn check(&mut self) {
        self.settle();
        let due = |hub: &Hub, now| hub.poll_timeout().is_some_and(|at| at <= now);
        for _ in 0..5 {
            if due(&self.hub, self.now) {
                self.timers();
                self.settle();
            }
        }
        assert!(
            !due(&self.hub, self.now),
            "a timeout is still due after five calls"
        );

        let peers: BTreeSet<PeerId> = self.hub.peers().collect();
        assert!(peers.len() <= LIMITS.sessions);
        assert!(
            self.open.is_subset(&peers),
            "an established session is gone without an Ended event"
        );
        self.established.retain(|peer| peers.contains(peer));
        self.ended.retain(|peer| peers.contains(peer));
        assert!(peers.len() - self.established.len() <= LIMITS.half_open);
        let held = self.meter.held();
        assert!(held <= MAX_HELD, "{held} bytes");
    }
}

fuzz_target!(|input: &[u8]| {
    let mut bytes = Bytes(input);
    let mut world = World::new(bytes.byte() % 4 != 0);
    while !bytes.0.is_empty() {
        let step = bytes.byte();
        let who = step >> 4;
        let client = usize::from(who) % world.clients.len().max(1);
        let peer = PeerId(u32::from(who) % (2 * LIMITS.sessions as u32));
        let now = world.now;
        match step & 15 {
            0 => {
                for _ in 0..world.wire.len() {
                    if let Some((from, datagram)) = world.next() {
                        world.arrives(from, datagram);
                    }
                }
            }
            1 => {
                if let Some((from, datagram)) = world.next() {
                    world.arrives(from, datagram);
                }
            }
            2 => drop(world.next()),
            3 => {
                if let Some((from, mut datagram)) = world.next() {
                    let at = usize::from(bytes.byte()) % datagram.len();
                    datagram[at] ^= bytes.byte();
                    world.arrives(from, datagram);
                }
            }
            4 => {
                if let Some((_, datagram)) = world.next() {
                    world.arrives(address(who), datagram);
                }
            }
            5 => {
                let at = usize::from(bytes.byte()) % world.old.len().max(1);
                if let Some(datagram) = world.old.get(at).cloned() {
                    world.arrives(address(who), datagram);
                }
            }
            6 => {
                let config = CLIENTS[usize::from(bytes.byte() & 1)].clone();
                if world.clients.len() < MAX_CLIENTS {
                    let session = Session::client(config, now);
                    world.clients.push((address(who), session));
                }
            }
            7 => {
                let to = address(bytes.byte());
                if let Some((at, _)) = world.clients.get_mut(client) {
                    *at = to;
                }
            }
            8 => {
                let packet = world.packet(client as u32, false);
                let mut out = BytesMut::new();
                if let Some((_, session)) = world.clients.get_mut(client)
                    && session.seal(&packet, now, &mut out).is_ok()
                {
                    world.inside.insert(packet);
                    world.wire.push_back((client, out.to_vec()));
                }
            }
            9 => {
                let packet = world.packet(peer.0, true);
                let mut out = BytesMut::with_capacity(4096);
                let hub = &mut world.hub;
                let sealed = world.meter.run(|| hub.seal(peer, &packet, now, &mut out));
                if let Ok(to) = sealed {
                    world.inside.insert(packet);
                    world.delivers(to.remote, &out);
                }
            }
            10 => world.passes(Duration::from_millis(1 << (bytes.byte() % 17))),
            11 => {
                let datagram = bytes.some();
                world.arrives(address(who), datagram);
            }
            12 => {
                let from = address(who);
                let unknown = (SessionId([1; 8]), SessionId([2; 8]));
                let ids = world.answered.get(&from).copied().unwrap_or(unknown);
                let datagram = made_up(&mut bytes, ids, LARGE);
                world.arrives(from, datagram);
            }
            13 => {
                let choice = bytes.byte() % 6;
                let hub = &mut world.hub;
                world.meter.run(|| {
                    hub.with(peer, now, |session| match choice {
                        0 => session.close(now),
                        1 => session.restart(false, now),
                        2 => session.reject("no", now),
                        3 => drop(session.accept(push(), now)),
                        _ => {}
                    });
                    if choice >= 4 {
                        let config = SERVERS[usize::from(choice & 1)].clone();
                        hub.set_config(config);
                    }
                });
            }
            14 => {
                if let Some((_, session)) = world.clients.get_mut(client) {
                    session.close(now);
                }
            }
            _ => world.wire.rotate_left(1.min(world.wire.len())),
        }
        world.check();
    }
    // All peers are silent from here on.
    for _ in 0..5 {
        world.passes(Duration::from_secs(100));
        world.check();
    }
    assert_eq!(
        world.hub.peers().count(),
        0,
        "sessions remain after all peers are silent"
    );
});
