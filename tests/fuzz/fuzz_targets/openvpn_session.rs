//! A session of a server over TCP. Its packets come from a correct client or from an attacker who knows the session
//! ids. The first byte decides if the owner accepts the client. Every later step starts with a byte that selects
//! the action, followed by the bytes that the action needs.
//!
//! Invariants: the session's memory is bounded, even if nothing of its output is ever sent, and so is its output for
//! one packet. Every inner packet was put into the tunnel. The session ends once the client is silent.
#![no_main]

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use bytes::BytesMut;
use culvert_fuzz::Bytes;
use culvert_fuzz::control::{client, made_up, push, server};
use culvert_fuzz::memory::{Counting, Meter, uncounted};
use culvert_openvpn::packet::{ControlPacket, SessionId};
use culvert_openvpn::session::{ClientConfig, Event, ServerConfig, Session, Transport};
use libfuzzer_sys::fuzz_target;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Largest payload of an attacker, in bytes: about as large as the link accepts.
const LARGE: usize = 16_000;

/// Limit of the session's memory, in bytes.
const MAX_HELD: isize = 160 << 10;

/// Limit of the output after one step, in bytes: the send window and acknowledgements, and at the start of the data
/// channel a push reply.
const MAX_OUT: usize = 16 << 10;

/// Largest number of packets that wait for delivery in one direction.
const KEPT: usize = 64;

static CLIENT: LazyLock<Arc<ClientConfig>> = LazyLock::new(|| client("a", Transport::Tcp));

static SERVER: LazyLock<Arc<ServerConfig>> =
    LazyLock::new(|| server(Transport::Tcp, Duration::from_secs(60)));

struct World {
    now: Instant,
    server: Session,
    meter: Meter,
    /// True if the owner accepts the client.
    accepts: bool,
    client: Session,
    to_server: VecDeque<Vec<u8>>,
    to_client: VecDeque<Vec<u8>>,
    /// Session ids of the client and of the server, as seen in their packets.
    ids: (SessionId, SessionId),
    established: bool,
    ended: bool,
    /// Inner packets that are sealed but not yet delivered.
    inside: HashSet<Vec<u8>>,
    sealed: u32,
}

impl World {
    fn new(accepts: bool) -> Self {
        let now = Instant::now();
        Self {
            now,
            server: Session::server(SERVER.clone(), 0, now),
            meter: Meter::default(),
            accepts,
            client: Session::client(CLIENT.clone(), now),
            to_server: VecDeque::new(),
            to_client: VecDeque::new(),
            ids: (SessionId([1; 8]), SessionId([2; 8])),
            established: false,
            ended: false,
            inside: HashSet::new(),
            sealed: 0,
        }
    }

    fn arrives(&mut self, mut packet: Vec<u8>) {
        let (established, inside) = (self.established, &mut self.inside);
        let mut take = |packet: &[u8]| {
            assert!(established, "data before the session is established");
            assert!(uncounted(|| inside.remove(packet)), "never sent");
        };
        let (server, now) = (&mut self.server, self.now);
        self.meter.run(|| {
            let _ = server.input(&mut packet, now, &mut take);
        });
    }

    /// Handles the next event of the server. Returns false if there is none.
    fn takes_event(&mut self) -> bool {
        let (now, accepts) = (self.now, self.accepts);
        let Self {
            server,
            meter,
            established,
            ended,
            ..
        } = self;
        meter.run(|| {
            let Some(event) = server.poll_event() else {
                return false;
            };
            assert!(!*ended, "{event:?} after the end");
            match event {
                Event::Authenticated(_) if accepts => {
                    let accepted = server.accept(push(), now);
                    accepted.expect("options that can be pushed");
                }
                Event::Authenticated(_) => server.reject("no", now),
                Event::Established(_) => *established = true,
                Event::Ended(_) => *ended = true,
                _ => {}
            }
            true
        })
    }

    /// Sends everything that the server has to send.
    fn flush(&mut self) {
        let mut total = 0;
        loop {
            let mut out = BytesMut::with_capacity(4096);
            let (server, now) = (&mut self.server, self.now);
            if !self.meter.run(|| server.poll_output(now, &mut out)) {
                break;
            }
            total += out.len();
            self.to_client.push_back(out[2..].to_vec());
        }
        assert!(total <= MAX_OUT, "{total} bytes");
        while let Some(mut packet) = self.to_client.pop_front() {
            if let Ok(seen) = ControlPacket::parse(&packet) {
                self.ids.1 = seen.session;
            }
            let inside = &mut self.inside;
            let _ = self.client.input(&mut packet, self.now, &mut |packet| {
                assert!(inside.remove(packet), "never sent");
            });
        }
    }

    fn check(&mut self) {
        while self.takes_event() {}
        while self.client.poll_event().is_some() {}
        let mut out = BytesMut::new();
        while self.client.poll_output(self.now, &mut out) {
            let packet = out.split().split_off(2).to_vec();
            if let Ok(seen) = ControlPacket::parse(&packet) {
                self.ids.0 = seen.session;
            }
            self.to_server.push_back(packet);
        }
        self.to_server.truncate(KEPT);
        let held = self.meter.held();
        assert!(held <= MAX_HELD, "{held} bytes");
    }

    fn passes(&mut self, time: Duration) {
        self.now += time;
        let (server, now) = (&mut self.server, self.now);
        self.meter.run(|| server.handle_timeout(now));
        self.client.handle_timeout(now);
    }
}

fuzz_target!(|input: &[u8]| {
    let mut bytes = Bytes(input);
    let mut world = World::new(bytes.byte() % 4 != 0);
    world.check();
    while !bytes.0.is_empty() {
        let now = world.now;
        match bytes.byte() % 12 {
            0 => {
                for _ in 0..10 {
                    while let Some(packet) = world.to_server.pop_front() {
                        world.arrives(packet);
                        world.check();
                    }
                    world.flush();
                    world.check();
                }
            }
            1 => {
                if let Some(packet) = world.to_server.pop_front() {
                    world.arrives(packet);
                }
            }
            2 => world.flush(),
            3 | 4 => {
                let packet = made_up(&mut bytes, world.ids, LARGE);
                world.arrives(packet);
            }
            5 => {
                let packet = bytes.some();
                world.arrives(packet);
            }
            6 => {
                if let Some(mut packet) = world.to_server.pop_front() {
                    let at = usize::from(bytes.byte()) % packet.len();
                    packet[at] ^= bytes.byte();
                    world.arrives(packet);
                }
            }
            7 => world.passes(Duration::from_millis(1 << (bytes.byte() % 17))),
            8 | 9 => {
                world.sealed += 1;
                let packet = [world.sealed.to_be_bytes(); 5].concat();
                let mut out = BytesMut::new();
                if world.client.seal(&packet, now, &mut out).is_ok() {
                    world.inside.insert(packet);
                    world.to_server.push_back(out[2..].to_vec());
                }
            }
            10 => {
                world.sealed += 1;
                let packet = [world.sealed.to_be_bytes(); 5].concat();
                let mut out = BytesMut::with_capacity(4096);
                let server = &mut world.server;
                let sealed = world.meter.run(|| server.seal(&packet, now, &mut out));
                if sealed.is_ok() {
                    world.inside.insert(packet);
                    world.to_client.push_back(out[2..].to_vec());
                }
            }
            _ => {
                let server = &mut world.server;
                world.meter.run(|| server.close(now));
            }
        }
        world.check();
    }
    for _ in 0..5 {
        world.passes(Duration::from_secs(100));
        world.check();
        world.flush();
    }
    assert!(
        world.ended,
        "the session remains after the client is silent"
    );
});
