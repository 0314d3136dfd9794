//! A UDP server's sessions: with clients that are as they should be, with what becomes of their datagrams on
//! the way, and with what others make up. The first byte chooses what the owner does. After that every step is a
//! byte that chooses what happens, and what it needs.
//!
//! A session goes only with a word, and all of them do once nobody speaks any more. Their number is bounded.
//! Nothing is sent to where nothing came from. What comes out of a tunnel was put into it, and comes out once.
#![no_main]

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use bytes::BytesMut;
use culvert_fuzz::pki;
use culvert_openvpn::hub::{Hub, Limits, PeerId};
use culvert_openvpn::packet::{Acks, ControlPacket, KeyId, Opcode, SessionId};
use culvert_openvpn::session::{ClientConfig, Event, Push, ServerConfig, Session, Transport};
use libfuzzer_sys::fuzz_target;
use rcgen::ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};

const LIMITS: Limits = Limits {
    sessions: 4,
    half_open: 2,
};
const MAX_CLIENTS: usize = 6;

/// Datagrams that are kept, on their way or to be repeated.
const KEPT: usize = 64;

/// Two clients.
static CLIENTS: LazyLock<[Arc<ClientConfig>; 2]> = LazyLock::new(|| {
    ["a", "b"].map(|name| {
        let identity = pki::identity(&pki::leaf(name, ClientAuth)).expect("an identity");
        let mut config = ClientConfig::new(Transport::Udp, pki::client_tls(identity));
        config.common.timers.ping = Some(Duration::from_secs(5));
        Arc::new(config)
    })
});

/// Before and after the operator's certificate was renewed.
static SERVERS: LazyLock<[Arc<ServerConfig>; 2]> = LazyLock::new(|| {
    [60, 20].map(|reneg| {
        let identity = pki::identity(&pki::leaf("server", ServerAuth)).expect("an identity");
        let mut config = ServerConfig::new(Transport::Udp, pki::server_tls(identity));
        config.common.timers.reneg = Duration::from_secs(reneg);
        config.common.timers.tran_window = Duration::from_secs(2 * reneg);
        config.common.timers.ping_restart = Some(Duration::from_secs(30));
        Arc::new(config)
    })
});

/// The input, from which zeros come once it is over.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn byte(&mut self) -> u8 {
        let (first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        *first
    }

    fn some(&mut self) -> Vec<u8> {
        let length = usize::from(self.byte()).min(self.0.len());
        let (bytes, rest) = self.0.split_at(length);
        self.0 = rest;
        bytes.to_vec()
    }
}

fn address(number: u8) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, number & 7], 1194))
}

fn push() -> Push {
    let options = ["topology net30", "ifconfig 10.20.0.6 10.20.0.5"];
    Push {
        options: options.map(str::to_owned).to_vec(),
    }
}

struct World {
    now: Instant,
    hub: Hub,
    /// Whether clients are let in at once.
    decided: bool,
    clients: Vec<(SocketAddr, Session)>,
    /// From clients, by their number.
    wire: VecDeque<(usize, Vec<u8>)>,
    /// What has arrived.
    old: VecDeque<Vec<u8>>,
    /// Where anything came from.
    heard: BTreeSet<SocketAddr>,
    /// The newest session that the server has answered there, and its own name for it.
    answered: HashMap<SocketAddr, (SessionId, SessionId)>,
    /// Of the hub's sessions: those that are established, that ever were, and that have ended.
    open: BTreeSet<PeerId>,
    established: BTreeSet<PeerId>,
    ended: BTreeSet<PeerId>,
    /// Inner packets that have not come out, and how many there were.
    inside: HashSet<Vec<u8>>,
    sealed: u32,
}

impl World {
    fn new(decided: bool) -> Self {
        let now = Instant::now();
        Self {
            now,
            hub: Hub::new(SERVERS[0].clone(), LIMITS, now),
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

    /// An inner packet that was not there before, for a client or from one.
    fn packet(&mut self, peer: u32, out: bool) -> Vec<u8> {
        self.sealed += 1;
        let words = [u32::from(out), peer, self.sealed];
        words.iter().flat_map(|word| word.to_be_bytes()).collect()
    }

    fn arrives(&mut self, from: SocketAddr, mut datagram: Vec<u8>) {
        self.heard.insert(from);
        let (open, inside) = (&self.open, &mut self.inside);
        self.hub
            .input(from, &mut datagram, self.now, &mut |peer, packet| {
                assert!(open.contains(&peer), "data of no session");
                assert!(inside.remove(packet), "not sent, or taken twice");
                assert_eq!(packet[..4], [0; 4], "from the server");
            });
        self.check();
    }

    /// The next datagram of a client.
    fn next(&mut self) -> Option<(SocketAddr, Vec<u8>)> {
        let (client, datagram) = self.wire.pop_front()?;
        if self.old.len() == KEPT {
            self.old.pop_front();
        }
        self.old.push_back(datagram.clone());
        Some((self.clients[client].0, datagram))
    }

    /// The hub says all that it has to, and clients answer.
    fn settle(&mut self) {
        let now = self.now;
        loop {
            while let Some((peer, event)) = self.hub.poll_event() {
                assert!(!self.ended.contains(&peer), "{event:?} after the end");
                match event {
                    Event::Authenticated(_) if self.decided => {
                        self.hub
                            .accept(peer, push(), now)
                            .expect("it can be pushed");
                    }
                    Event::Established(_) => {
                        self.open.insert(peer);
                        self.established.insert(peer);
                    }
                    Event::Ended(_) => {
                        self.open.remove(&peer);
                        self.ended.insert(peer);
                    }
                    _ => {}
                }
            }
            let mut out = BytesMut::new();
            let Some(to) = self.hub.poll_output(now, &mut out) else {
                break;
            };
            assert!(self.heard.contains(&to), "nothing came from {to}");
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

    /// To clients.
    fn delivers(&mut self, to: SocketAddr, datagram: &[u8]) {
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
                assert!(inside.remove(packet), "not sent, or taken twice");
                assert_eq!(packet[..4], [0, 0, 0, 1], "from a client");
            });
        }
    }

    fn passes(&mut self, time: Duration) {
        self.now += time;
        for (_, session) in &mut self.clients {
            session.handle_timeout(self.now);
        }
        self.hub.handle_timeout(self.now);
    }

    /// What always holds.
    fn check(&mut self) {
        self.settle();
        let due = |hub: &Hub, now| hub.poll_timeout().is_some_and(|at| at <= now);
        for _ in 0..5 {
            if due(&self.hub, self.now) {
                self.hub.handle_timeout(self.now);
                self.settle();
            }
        }
        assert!(!due(&self.hub, self.now), "a timeout that nothing comes of");

        let peers: BTreeSet<PeerId> = self.hub.peers().collect();
        assert!(peers.len() <= LIMITS.sessions);
        assert!(self.open.is_subset(&peers), "gone without a word");
        self.established.retain(|peer| peers.contains(peer));
        self.ended.retain(|peer| peers.contains(peer));
        assert!(peers.len() - self.established.len() <= LIMITS.half_open);
    }
}

/// A control packet that fits to what was answered last at an address, as far as `bytes` want it.
fn made_up(bytes: &mut Bytes<'_>, answered: Option<&(SessionId, SessionId)>) -> Vec<u8> {
    let unknown = (SessionId([1; 8]), SessionId([2; 8]));
    let (client, server) = answered.copied().unwrap_or(unknown);
    let (shape, key) = (bytes.byte(), bytes.byte());
    let opcodes = [
        Opcode::HardResetClientV2,
        Opcode::ControlV1,
        Opcode::AckV1,
        Opcode::SoftResetV1,
    ];
    let echoes = shape & 4 == 0;
    let opcode = opcodes[usize::from(shape & 3)];
    let (id, payload) = (bytes.byte(), bytes.some());
    let packet = ControlPacket {
        opcode,
        key_id: KeyId::of(key),
        session: client,
        acks: Acks::from_iter(echoes.then_some(u32::from(shape >> 4))),
        peer_session: echoes.then_some(server),
        id: (opcode != Opcode::AckV1).then_some(id.into()),
        payload: &payload,
    };
    let mut out = BytesMut::new();
    packet.write(&mut out);
    out.to_vec()
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
                let mut out = BytesMut::new();
                if let Ok(to) = world.hub.seal(peer, &packet, now, &mut out) {
                    world.inside.insert(packet);
                    world.delivers(to, &out);
                }
            }
            10 => world.passes(Duration::from_millis(1 << (bytes.byte() % 17))),
            11 => {
                let datagram = bytes.some();
                world.arrives(address(who), datagram);
            }
            12 => {
                let from = address(who);
                let datagram = made_up(&mut bytes, world.answered.get(&from));
                world.arrives(from, datagram);
            }
            13 => match bytes.byte() % 6 {
                0 => world.hub.close(peer, now),
                1 => world.hub.restart(peer, false, now),
                2 => world.hub.reject(peer, "no", now),
                3 => drop(world.hub.accept(peer, push(), now)),
                choice => {
                    let config = SERVERS[usize::from(choice & 1)].clone();
                    world.hub.set_config(config);
                }
            },
            14 => {
                if let Some((_, session)) = world.clients.get_mut(client) {
                    session.close(now);
                }
            }
            _ => world.wire.rotate_left(1.min(world.wire.len())),
        }
        world.check();
    }
    // Nobody says anything any more.
    for _ in 0..5 {
        world.passes(Duration::from_secs(100));
        world.check();
    }
    assert_eq!(world.hub.peers().count(), 0, "kept for ever");
});
