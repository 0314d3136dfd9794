//! A hub and its clients, in virtual time.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use std::collections::BTreeMap;
use std::time::Duration;

use super::admission::{BURST, MAX_ANSWERS, MAX_STARTS, MAX_WAITING, RATE};
use super::*;
use crate::options::Transport;
use crate::session::sim::{client_config, push, server_config};
use crate::session::{ClientConfig, Dropped};
use crate::tls::tests::PKI;
use crate::wrap::{KeyDirection, WrapKey};

struct Client {
    session: Session,
    address: SocketAddr,
    events: Vec<Event>,
    inner: usize,
}

/// A network without loss, with a delay of 10 ms.
struct Net {
    now: Instant,
    hub: Hub,
    clients: Vec<Client>,
    /// Address of the server that all clients use.
    local: Option<IpAddr>,
    events: Vec<(PeerId, Event)>,
    /// Counters of each session at its end.
    last: BTreeMap<PeerId, Stats>,
    inner: Vec<(PeerId, Vec<u8>)>,
    flying: BTreeMap<(Instant, u64), (SocketAddr, SocketAddr, Vec<u8>)>,
    serial: u64,
    /// Datagrams to the server, for replays.
    recorded: Vec<(SocketAddr, Vec<u8>)>,
}

const SERVER: ([u8; 4], u16) = ([10, 0, 0, 1], 1194);
const DELAY: Duration = Duration::from_millis(10);

fn at(host: u8, port: u16) -> SocketAddr {
    SocketAddr::from(([10, 0, 1, host], port))
}

impl Net {
    fn new(config: ServerConfig, limits: Limits) -> Self {
        let now = Instant::now();
        Self {
            now,
            hub: Hub::new(Arc::new(config), limits, now),
            clients: Vec::new(),
            local: None,
            events: Vec::new(),
            last: BTreeMap::new(),
            inner: Vec::new(),
            flying: BTreeMap::new(),
            serial: 0,
            recorded: Vec::new(),
        }
    }

    fn default() -> Self {
        Self::new(server_config(Transport::Udp), Limits::default())
    }

    fn join(&mut self, address: SocketAddr, config: ClientConfig) -> usize {
        let session = Session::client(Arc::new(config), self.now);
        self.clients.push(Client {
            session,
            address,
            events: Vec::new(),
            inner: 0,
        });
        self.clients.len() - 1
    }

    fn fly(&mut self, from: SocketAddr, to: SocketAddr, bytes: &[u8]) {
        self.serial += 1;
        self.flying
            .insert((self.now + DELAY, self.serial), (from, to, bytes.to_vec()));
    }

    fn settle(&mut self) {
        let server = SocketAddr::from(SERVER);
        loop {
            while let Some((peer, event)) = self.hub.poll_event() {
                if matches!(event, Event::Authenticated(_)) {
                    let accept = |session: &mut Session| session.accept(push(), self.now).unwrap();
                    self.hub.with(peer, self.now, accept);
                }
                if matches!(event, Event::Ended(_)) {
                    self.last
                        .extend(self.hub.session_stats(peer).map(|stats| (peer, *stats)));
                }
                self.events.push((peer, event));
            }
            let mut out = BytesMut::new();
            match self.hub.poll_output(self.now, &mut out) {
                Some(to) => {
                    assert_eq!(to.local, self.local);
                    self.fly(server, to.remote, &out);
                }
                None => break,
            }
        }
        for index in 0..self.clients.len() {
            let now = self.now;
            loop {
                let client = &mut self.clients[index];
                while let Some(event) = client.session.poll_event() {
                    client.events.push(event);
                }
                let mut out = BytesMut::new();
                if !client.session.poll_output(now, &mut out) {
                    break;
                }
                let from = client.address;
                self.fly(from, server, &out);
            }
        }
    }

    fn run(&mut self, time: Duration) {
        let until = self.now + time;
        let mut stalls = 0;
        while self.now < until {
            self.settle();
            let arrival = self.flying.keys().next().map(|(at, _)| *at);
            let clients = self
                .clients
                .iter()
                .filter_map(|client| client.session.poll_timeout());
            let next = clients.chain(
                [arrival, self.hub.poll_timeout(), Some(until)]
                    .into_iter()
                    .flatten(),
            );
            let next = next.min().unwrap();
            stalls = if next > self.now || arrival == Some(next) {
                0
            } else {
                stalls + 1
            };
            // One call starts only some of the waiting sessions.
            assert!(
                stalls < 5 + BURST as usize / MAX_STARTS,
                "a timeout that nothing comes of: {:?}",
                self.hub.poll_timeout()
            );
            self.now = next.max(self.now);
            while let Some(entry) = self
                .flying
                .first_entry()
                .filter(|entry| entry.key().0 <= self.now)
            {
                let (from, to, mut bytes) = entry.remove();
                self.deliver(from, to, &mut bytes);
            }
            let live = self.hub.live;
            self.hub.handle_timeout(self.now);
            assert!(
                self.hub.live <= live + MAX_STARTS,
                "too many sessions at once"
            );
            for client in &mut self.clients {
                client.session.handle_timeout(self.now);
            }
            self.settle();
        }
    }

    fn deliver(&mut self, from: SocketAddr, to: SocketAddr, bytes: &mut [u8]) {
        if to == SocketAddr::from(SERVER) {
            self.recorded.push((from, bytes.to_vec()));
            let from = Path {
                remote: from,
                local: self.local,
            };
            let inner = &mut self.inner;
            self.hub.input(from, bytes, self.now, &mut |peer, packet| {
                inner.push((peer, packet.to_vec()))
            });
        }
        // Of several clients with the same address, the last is active.
        else if let Some(client) = self.clients.iter_mut().rfind(|client| client.address == to) {
            let inner = &mut client.inner;
            let _ = client.session.input(bytes, self.now, &mut |_| *inner += 1);
        }
    }

    fn established(&self) -> Vec<PeerId> {
        let found = |(peer, event): &(PeerId, Event)| {
            matches!(event, Event::Established(_)).then_some(*peer)
        };
        self.events.iter().filter_map(found).collect()
    }

    fn ended(&self, peer: PeerId) -> Option<&Ended> {
        self.events.iter().find_map(|event| match event {
            (other, Event::Ended(reason)) if *other == peer => Some(reason),
            _ => None,
        })
    }

    /// Sends an inner packet from a client's current address.
    fn send(&mut self, client: usize, byte: u8) {
        let Client {
            session, address, ..
        } = &mut self.clients[client];
        let mut out = BytesMut::new();
        session.seal(&[byte; 50], self.now, &mut out).unwrap();
        let from = *address;
        self.fly(from, SERVER.into(), &out);
    }
}

fn usual() -> ClientConfig {
    client_config(Transport::Udp)
}

#[test]
fn many_clients_share_one_socket() {
    let mut net = Net::default();
    for host in 0..20 {
        net.join(at(host, 1000), usual());
        net.join(at(host, 1001), usual());
    }
    net.run(Duration::from_secs(3));
    let peers = net.established();
    assert_eq!(peers.len(), 40);
    for client in 0..40 {
        net.send(client, client as u8);
    }
    for peer in &peers {
        let mut out = BytesMut::new();
        let to = net.hub.seal(*peer, &[1; 50], net.now, &mut out).unwrap();
        assert_eq!(net.hub.address(*peer), Some(to.remote));
        net.fly(SERVER.into(), to.remote, &out);
    }
    net.run(Duration::from_secs(1));
    assert!(net.clients.iter().all(|client| client.inner == 1));
    let mut senders: Vec<_> = net.inner.iter().map(|(peer, _)| *peer).collect();
    senders.sort();
    assert_eq!(senders, net.hub.peers().collect::<Vec<_>>());
    assert_eq!(net.hub.stats().answers, 40);
}

#[test]
fn packets_with_another_wrap_are_counted_and_their_last_sender_is_kept() {
    let key = crate::keys::KeyBlock::from_bytes([7; crate::keys::KEY_BLOCK_LEN]);
    let mut net = Net::default();
    let auth = WrapKey::tls_auth(&key, KeyDirection::Inverse, crate::cipher::Digest::Sha1);
    let crypt = WrapKey::tls_crypt(&key, crate::Role::Client).unwrap();
    for (host, wrap) in [(1, auth), (2, crypt)] {
        let mut client = client_config(Transport::Udp);
        client.common.wrap = wrap;
        net.join(at(host, 1000), client);
        net.run(Duration::from_secs(30));
        assert_eq!(net.hub.take_mismatched(), Some(at(host, 1000)));
        assert_eq!(net.hub.take_mismatched(), None);
    }
    let stats = net.hub.stats();
    assert!(stats.bad_wrap > 0 && stats.unknown == 0, "{stats:?}");
}

#[test]
fn wrap_that_looks_like_acknowledgements_is_another_wrap() {
    let mut net = Net::default();
    let packet = crate::packet::ControlPacket {
        opcode: crate::packet::Opcode::HardResetClientV2,
        key_id: crate::packet::KeyId::FIRST,
        session: crate::packet::SessionId::random(&mut rand::rng()),
        acks: vec![7; 5],
        peer_session: Some(crate::packet::SessionId::random(&mut rand::rng())),
        id: Some(0),
        payload: &[],
    };
    let mut datagram = BytesMut::new();
    packet.write(&mut datagram);
    let from = Path {
        remote: at(1, 1000),
        local: None,
    };
    net.hub.input(from, &mut datagram, net.now, &mut |_, _| {});
    assert_eq!(net.hub.take_mismatched(), Some(at(1, 1000)));
    // A RESET with tls-crypt-v2.
    datagram[0] = 10 << 3;
    net.hub.input(from, &mut datagram, net.now, &mut |_, _| {});
    assert_eq!(net.hub.take_mismatched(), Some(at(1, 1000)));
    let stats = net.hub.stats();
    assert_eq!((stats.unknown, stats.malformed), (0, 0), "{stats:?}");
}

#[test]
fn wrapped_handshakes_continue_after_the_cookie() {
    let key = || crate::keys::KeyBlock::from_bytes([7; crate::keys::KEY_BLOCK_LEN]);
    for crypt in [false, true] {
        let (mut client, mut server) = (usual(), server_config(Transport::Udp));
        if crypt {
            client.common.wrap = WrapKey::tls_crypt(&key(), crate::Role::Client).unwrap();
            server.common.wrap = WrapKey::tls_crypt(&key(), crate::Role::Server).unwrap();
        } else {
            let wrap =
                |direction| WrapKey::tls_auth(&key(), direction, crate::cipher::Digest::Sha1);
            client.common.wrap = wrap(KeyDirection::Inverse);
            server.common.wrap = wrap(KeyDirection::Normal);
        }
        let mut net = Net::new(server, Limits::default());
        net.join(at(1, 1000), client);
        net.join(at(2, 1000), usual());
        net.run(Duration::from_secs(3));
        assert_eq!(net.established().len(), 1);
        assert!(net.clients[0].session.is_established());
        assert_eq!(net.clients[0].session.stats().replayed_control, 0);
        assert!(net.hub.stats().bad_wrap > 0);
    }
}

#[test]
fn ten_thousand_first_packets_cost_no_memory() {
    let mut net = Net::default();
    let client = net.join(at(1, 1000), usual());
    net.run(Duration::from_secs(1));
    assert!(net.clients[client].session.is_established());
    for number in 0..10_000_u32 {
        let mut reset = vec![7 << 3, 1, 1, 1, 1];
        reset.extend_from_slice(&number.to_be_bytes());
        reset.extend_from_slice(&[0; 5]);
        let from = SocketAddr::from(([10, 1, (number >> 8) as u8, number as u8], 1000));
        net.hub.input(from, &mut reset, net.now, &mut |_, _| {});
    }
    assert_eq!(net.hub.peers().count(), 1);
    assert_eq!(net.hub.answers.len(), MAX_ANSWERS);
    assert_eq!(net.hub.stats().answers_dropped, 10_000 - MAX_ANSWERS as u64);
    assert_eq!(
        (
            net.hub.timers.len(),
            net.hub.ready.len(),
            net.hub.half_open.len()
        ),
        (1, 0, 0)
    );
    net.send(client, 1);
    net.run(Duration::from_secs(1));
    assert_eq!(net.inner.len(), 1);
}

/// Each new session costs the owner's thread a TLS handshake.
#[test]
fn crowd_of_one_host_starts_sessions_at_a_limited_rate_and_delays_no_other_host() {
    let mut net = Net::default();
    let crowd = 2 * BURST as usize;
    for port in 0..crowd as u16 {
        net.join(at(9, 1000 + port), usual());
    }
    // The first packets, their answers and the echoes need 30 ms.
    net.run(Duration::from_millis(130));
    let live = net.hub.live;
    let limit = (BURST + RATE / 10) as usize;
    assert!((BURST as usize..=limit).contains(&live), "{live}");
    let late = net.join(at(1, 1000), usual());
    net.run(Duration::from_millis(250));
    assert!(!net.hub.waiting.is_empty());
    assert!(net.clients[late].session.is_established());
    // Nobody is refused, and no packet is sent again before 2 s.
    net.run(Duration::from_millis(1500));
    assert_eq!(net.established().len(), crowd + 1);
    assert_eq!(net.hub.stats().starts_dropped, 0);
}

#[test]
fn number_of_clients_that_wait_for_a_session_is_limited() {
    let mut net = Net::default();
    let client = SessionId([7; 8]);
    for number in 0..1000_u32 {
        let from = SocketAddr::from(([10, 1, (number >> 8) as u8, number as u8], 1000));
        let packet = crate::packet::ControlPacket {
            opcode: crate::packet::Opcode::AckV1,
            key_id: crate::packet::KeyId::FIRST,
            session: client,
            acks: vec![0],
            peer_session: Some(net.hub.cookies.make(from, client, net.now)),
            id: None,
            payload: &[],
        };
        let mut echo = BytesMut::new();
        packet.write(&mut echo);
        net.hub.input(from, &mut echo, net.now, &mut |_, _| {});
    }
    assert_eq!(net.hub.waiting.len(), MAX_WAITING);
    let dropped = 1000 - MAX_WAITING as u64;
    assert_eq!(net.hub.stats().starts_dropped, dropped);
    net.run(Duration::from_secs(3));
    assert_eq!(net.hub.waiting.len(), 0);
}

#[test]
fn ping_counts_as_a_sign_of_life() {
    let mut config = usual();
    config.common.timers.ping = Some(Duration::from_secs(5));
    let mut net = Net::default();
    net.join(at(1, 1000), config);
    net.run(Duration::from_secs(1));
    let peer = net.established()[0];
    let mut ping = BytesMut::new();
    let later = net.now + Duration::from_secs(6);
    assert!(net.clients[0].session.poll_output(later, &mut ping));
    let mut input = |datagram: &mut [u8]| {
        let from = at(1, 1000);
        net.hub
            .input(from, datagram, later, &mut |_, _| panic!("an inner packet"))
    };
    assert_eq!(input(&mut ping.clone()), Some(peer));
    // A repetition may come from an attacker.
    assert_eq!(input(&mut ping), None);
}

#[test]
fn new_half_open_session_displaces_the_oldest_half_open_session() {
    let limits = Limits {
        sessions: 10,
        half_open: 4,
    };
    let mut net = Net::new(server_config(Transport::Udp), limits);
    let client = net.join(at(1, 1000), usual());
    net.run(Duration::from_secs(1));
    // Clients with a proven address that stop during the handshake.
    for host in 10..30 {
        let stuck = net.join(at(host, 1000), usual());
        net.run(2 * DELAY);
        net.clients[stuck].address = at(host, 2000);
    }
    net.run(Duration::from_secs(1));
    assert!(net.hub.half_open.len() <= 4);
    assert!(net.hub.stats().evicted >= 15, "{:?}", net.hub.stats());
    assert!(net.hub.peers().count() <= 5);
    // A client that completes the handshake is still admitted.
    let late = net.join(at(2, 1000), usual());
    net.run(Duration::from_secs(1));
    assert!(net.clients[late].session.is_established());
    assert!(net.clients[client].session.is_established());
    // Unfinished handshakes time out.
    net.run(Duration::from_secs(110));
    assert_eq!(net.hub.half_open.len(), 0);
    assert_eq!(net.hub.peers().count(), 2);
    assert_eq!(net.hub.by_client.len(), 2);
}

#[test]
fn evicted_client_that_continues_its_handshake_starts_no_session() {
    let limits = Limits {
        sessions: 10,
        half_open: 1,
    };
    let mut net = Net::new(server_config(Transport::Udp), limits);
    net.join(at(1, 1000), usual());
    // The ServerHello arrives, and the client's answer is in flight.
    net.run(4 * DELAY);
    let answer = std::mem::take(&mut net.flying);
    assert!(!answer.is_empty());
    net.join(at(2, 1000), usual());
    net.run(Duration::from_secs(1));
    let established = net.established();
    assert_eq!((established.len(), net.hub.stats().evicted), (1, 1));
    assert_eq!(net.hub.stats().unknown, 0);
    for (from, to, mut packet) in answer.into_values() {
        net.deliver(from, to, &mut packet);
    }
    // The client sends its answer again.
    net.run(Duration::from_secs(2));
    assert!(net.hub.stats().unknown > 1, "{:?}", net.hub.stats());
    assert!(net.hub.peers().eq(established));
}

#[test]
fn full_hub_rejects_new_clients_and_keeps_established_sessions() {
    let limits = Limits {
        sessions: 3,
        half_open: 3,
    };
    let mut net = Net::new(server_config(Transport::Udp), limits);
    for host in 0..6 {
        net.join(at(host, 1000), usual());
        net.run(Duration::from_secs(1));
    }
    assert_eq!(net.established().len(), 3);
    assert!(net.hub.stats().full > 0);
    let peers: Vec<_> = net.hub.peers().collect();
    assert!(
        peers
            .iter()
            .all(|peer| net.hub.session(*peer).unwrap().is_established())
    );
}

#[test]
fn restarted_client_replaces_its_old_session_once_established() {
    let mut net = Net::default();
    let first = net.join(at(1, 1000), usual());
    net.run(Duration::from_secs(1));
    let old = net.established()[0];
    // A RESET alone changes nothing, and neither does a failed handshake.
    let stranger = crate::tls::tests::Pki::new().client("stranger");
    let tls = PKI.client_tls_with(stranger.identity());
    net.join(at(1, 1000), ClientConfig::new(Transport::Udp, tls));
    net.run(Duration::from_secs(3));
    assert!(net.hub.session(old).unwrap().is_established());
    net.send(first, 1);
    net.run(Duration::from_secs(1));
    assert_eq!(net.inner.len(), 1);

    net.join(at(1, 1000), usual());
    net.run(Duration::from_secs(1));
    assert_eq!(net.ended(old), Some(&Ended::Replaced));
    assert_eq!(net.last[&old].packets_in, 1);
    assert!(net.hub.dropped.is_empty());
    assert_eq!(net.established().len(), 2);
    net.run(Duration::from_secs(10));
    assert_eq!(net.hub.peers().count(), 1);
    assert_eq!(net.hub.stats().replaced, 1);
}

#[test]
fn answers_come_from_the_address_that_the_client_uses() {
    let mut net = Net::default();
    let local = |last: u8| Some(IpAddr::from([10, 0, 0, last]));
    net.local = local(1);
    let client = net.join(at(1, 1000), usual());
    // The handshake checks its answers.
    net.run(Duration::from_secs(1));
    let peer = net.established()[0];
    let answer = |net: &mut Net| {
        let sealed = net.hub.seal(peer, &[1; 50], net.now, &mut BytesMut::new());
        sealed.unwrap().local
    };
    assert_eq!(answer(&mut net), local(1));
    // Another address of the server counts once a packet authenticates.
    let mut noise = vec![9 << 3, 0, 0, peer.0 as u8];
    noise.resize(100, 3);
    let path = Path {
        remote: at(1, 1000),
        local: local(2),
    };
    let now = net.now;
    net.hub
        .input(path, &mut noise, now, &mut |_, _| panic!("noise"));
    assert_eq!(answer(&mut net), local(1));
    net.local = local(2);
    net.send(client, 1);
    net.run(Duration::from_secs(1));
    assert_eq!(answer(&mut net), local(2));
}

#[test]
fn a_client_may_move_when_its_data_authenticates() {
    let mut net = Net::default();
    let client = net.join(at(1, 1000), usual());
    net.run(Duration::from_secs(1));
    let peer = net.established()[0];
    // Noise, and replayed packets from another address.
    net.send(client, 1);
    net.run(Duration::from_secs(1));
    for (_, seen) in net.recorded.clone() {
        net.hub
            .input(at(9, 9), &mut seen.clone(), net.now, &mut |_, _| {});
    }
    let mut noise = vec![9 << 3, 0, 0, peer.0 as u8];
    noise.resize(100, 3);
    net.hub
        .input(at(9, 9), &mut noise, net.now, &mut |_, _| panic!("noise"));
    assert_eq!(net.hub.address(peer), Some(at(1, 1000)));

    net.clients[client].address = at(2, 4000);
    net.send(client, 2);
    net.run(Duration::from_secs(1));
    assert_eq!(net.hub.address(peer), Some(at(2, 4000)));
    assert_eq!(net.inner.len(), 2);
    assert_eq!(net.hub.stats().moved, 1);
    // The control channel has moved as well.
    net.clients[client].session.close(net.now);
    net.run(Duration::from_secs(1));
    assert_eq!(net.ended(peer), Some(&Ended::PeerExit));
    net.run(Duration::from_secs(10));
    assert_eq!(net.hub.peers().count(), 0);
    assert!(
        net.hub.by_client.is_empty() && net.hub.by_address.is_empty() && net.hub.timers.is_empty()
    );
}

#[test]
fn client_cannot_move_to_the_address_of_another_client() {
    let mut net = Net::default();
    let client = net.join(at(1, 1000), usual());
    let tls = PKI.client_tls("internal-client");
    net.join(at(2, 1000), ClientConfig::new(Transport::Udp, tls));
    net.run(Duration::from_secs(1));
    assert_eq!(net.established().len(), 2);
    net.clients[client].address = at(2, 1000);
    net.send(client, 1);
    net.run(Duration::from_secs(1));
    assert_eq!((net.inner.len(), net.hub.stats().moved), (0, 0));
    assert_eq!(net.established().len(), 2);
}

/// Clients before 2.6 send the acknowledgement of the RESET once. Without the acknowledgement the client's
/// address is not proven, so the server repeats the RESET.
#[test]
fn lost_echo_is_requested_again() {
    let mut net = Net::default();
    let client = net.join(at(1, 1000), usual());
    net.run(DELAY * 2);
    // The server's RESET has arrived, and the client's answer is in flight. Remove the acknowledgement from
    // the answer.
    let lost: Vec<_> = net.flying.keys().copied().collect();
    for key in lost {
        let (_, _, packet) = net.flying.get_mut(&key).unwrap();
        if packet[0] == 4 << 3 {
            let rest = packet.split_off(10 + 4 + 8);
            packet.truncate(9);
            packet.push(0);
            packet.extend_from_slice(&rest);
        }
    }
    let _ = client;
    net.run(Duration::from_secs(4));
    assert!(net.hub.stats().answers >= 2, "{:?}", net.hub.stats());
    assert_eq!(net.established().len(), 1);
}

#[test]
fn owner_can_end_and_reject_sessions() {
    let mut net = Net::default();
    for host in 0..3 {
        net.join(at(host, 1000), usual());
    }
    net.run(Duration::from_secs(1));
    let peers = net.established();
    net.hub
        .with(peers[0], net.now, |session| session.restart(true, net.now));
    net.hub
        .with(peers[1], net.now, |session| session.close(net.now));
    net.hub.with(peers[2], net.now, |session| {
        session.reject("not any more", net.now);
    });
    net.run(Duration::from_secs(2));
    let ends = net.clients.iter().map(|client| match client.events.last() {
        Some(Event::Ended(reason)) => reason.to_string(),
        other => panic!("{other:?}"),
    });
    let mut ends: Vec<_> = ends.collect();
    ends.sort();
    assert_eq!(
        ends,
        [
            "the peer left",
            "the server asks to connect again",
            "the server refused us: not any more"
        ]
    );
    net.run(Duration::from_secs(10));
    assert_eq!(net.hub.peers().count(), 0);
    let refused = net
        .hub
        .seal(peers[0], &[0; 20], net.now, &mut BytesMut::new());
    assert_eq!(refused, Err(SealError::NotEstablished));
}

#[test]
fn silent_clients_are_removed_and_peer_ids_are_reused_late() {
    let mut config = server_config(Transport::Udp);
    config.common.timers.ping_restart = Some(Duration::from_secs(30));
    let limits = Limits {
        sessions: 4,
        half_open: 4,
    };
    let mut net = Net::new(config, limits);
    let mut seen = Vec::new();
    for round in 0..20 {
        net.join(at(1, 1000 + round), usual());
        net.run(Duration::from_secs(1));
        seen.push(*net.established().last().unwrap());
        net.clients.clear();
        net.run(Duration::from_secs(40));
        assert_eq!(net.hub.peers().count(), 0, "{:?}", net.events);
    }
    assert!(net.hub.slots.len() <= 8);
    for ids in seen.windows(7) {
        let mut ids = ids.to_vec();
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), 7);
    }
}

#[test]
fn noise_and_replays_do_not_disturb_a_session() {
    let mut net = Net::default();
    let client = net.join(at(1, 1000), usual());
    net.run(Duration::from_secs(2));
    net.send(client, 1);
    net.run(Duration::from_secs(1));
    let recorded = net.recorded.clone();
    for round in 0..200_u32 {
        for (from, packet) in &recorded {
            let mut packet = packet.clone();
            let bit = (round as usize * 7919) % (packet.len() * 8);
            if round > 0 && (round % 2 == 0 || bit / 8 > 9) && DataHeader::parse(&packet).is_some()
            {
                packet[bit / 8] ^= 1 << (bit % 8);
            }
            let from = if round % 3 == 0 {
                at(7, round as u16 + 1)
            } else {
                *from
            };
            net.hub.input(from, &mut packet, net.now, &mut |_, _| {
                panic!("a replay was accepted")
            });
        }
        net.run(DELAY);
    }
    assert_eq!(net.hub.peers().count(), 1);
    net.send(client, 2);
    net.run(Duration::from_secs(1));
    assert_eq!(net.inner.len(), 2);
    let stats = net.hub.session(net.established()[0]).unwrap().stats();
    assert!(stats.replayed_data > 0 && stats.bad_data > 0);
    assert_ne!(
        stats.malformed + net.hub.stats().malformed + net.hub.stats().unknown,
        0
    );
    assert_eq!(Dropped::BadData.to_string(), "data does not authenticate");
}

#[test]
fn cookie_is_valid_for_one_client_and_a_short_time() {
    let now = Instant::now();
    let cookies = Cookies::new(Duration::from_secs(60), now);
    let (address, client) = (at(1, 1000), SessionId([3; 8]));
    let cookie = cookies.make(address, client, now);
    let check = |address, client, after| {
        cookies.check(address, client, cookie, now + Duration::from_secs(after))
    };
    assert!(check(address, client, 0));
    assert!(check(address, client, 89));
    assert!(!check(address, client, 91));
    assert!(!check(at(1, 1001), client, 0));
    assert!(!check(at(2, 1000), client, 0));
    assert!(!check(address, SessionId([4; 8]), 0));
    let other = Cookies::new(Duration::from_secs(60), now);
    assert!(!other.check(address, client, cookie, now));
}
