//! Floods against our server, and tampered links to our server and to our agent. A well-behaved peer stays
//! connected and must not be affected.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

use bytes::BytesMut;
use culvert_openvpn::packet::{ControlPacket, KeyId, Opcode, SessionId};
use culvert_tests::eventually;
use culvert_tests::namespace::alone;
use culvert_tests::openvpn::cluster::{CLIENT, NODE, NODE_ACCESSED, POD, RAW, SEED, SEED_INSIDE};
use culvert_tests::openvpn::relay::{Relay, Way, said};
use culvert_tests::openvpn::scenario::{BULK, Dial as _};
use culvert_tests::openvpn::tamper::Tamper;
use culvert_tests::openvpn::{Cluster, Namespace, OpenVpn, kkp, scenario};
use culvert_tests::topology::PATIENCE;
use rand::Rng as _;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::agent::{Agent, platform_file};
use crate::ours::Ours;
use crate::server::{Server, client_at, client_with, masquerade};

/// Address of the server.
const TO: SocketAddrV4 = SocketAddrV4::new(SEED, 1194);

/// Port of the tampering relay, next to a server or a client.
const TAMPERED: u16 = 1195;

/// Number of first packets over UDP. Every packet has a separate source port.
const FIRST: usize = 2000;

/// Number of unfinished handshakes over each transport.
const HALF: usize = 10_000;

/// Number of unfinished TCP connections that stay open at a time: more than the server keeps, and fewer than
/// the limit of open files.
const HELD: usize = 900;

/// Limit of the server's additional descriptors during a flood: the 256 connections that the server keeps, eight
/// times as many that wait for a slot, and connections that the server is about to close.
const DESCRIPTORS: usize = 2700;

/// Limit of the growth of the server's resident memory during a flood, in bytes. The server keeps 256 half-open
/// sessions of each transport, with about 20 KiB each before TLS begins. The rest is for data and the
/// allocator.
const GROWTH: u64 = 48 << 20;

/// A stream through the tunnel that checks its echo until the test stops the stream.
struct Long {
    stop: CancellationToken,
    task: JoinHandle<std::io::Result<()>>,
}

impl Long {
    async fn start(server: &Server) -> Self {
        let stop = CancellationToken::new();
        let stream = server.dial(SocketAddrV4::new(POD, RAW)).await.unwrap();
        let task = tokio::spawn(scenario::long(stream, stop.clone()));
        Self { stop, task }
    }

    /// Stops the stream, and asserts that the echo was right to the end.
    async fn end(self) {
        self.stop.cancel();
        self.task.await.unwrap().unwrap();
    }
}

/// Waits until a counter has reached `wanted`.
async fn counts(ours: &Ours, name: &str, label: (&str, &str), wanted: f64) {
    let what = format!("{name} with {label:?} reaches {wanted}");
    eventually(&what, PATIENCE, async || {
        let seen = ours.metric(name, &[label]).await;
        (seen >= wanted).then_some(()).ok_or(seen)
    })
    .await;
}

/// Waits until packets were dropped for each of these reasons.
async fn dropped(ours: &Ours, reasons: &[&str]) {
    for reason in reasons {
        counts(ours, "dropped_packets_total", ("reason", reason), 1.0).await;
    }
}

fn noise(length: usize) -> Vec<u8> {
    let mut noise = vec![0; length];
    rand::rng().fill(noise.as_mut_slice());
    noise
}

/// Encodes a client's control packet. `server` is the server's session if the packet answers the server.
fn packet(opcode: Opcode, client: SessionId, server: Option<SessionId>, payload: &[u8]) -> Vec<u8> {
    let mut out = BytesMut::new();
    let packet = ControlPacket {
        opcode,
        key_id: KeyId::FIRST,
        session: client,
        acks: server.map(|_| vec![0]).unwrap_or_default(),
        peer_session: server,
        id: match opcode {
            Opcode::AckV1 => None,
            Opcode::ControlV1 => Some(1),
            _ => Some(0),
        },
        payload,
    };
    packet.write(&mut out);
    out.to_vec()
}

fn first_packet() -> Vec<u8> {
    let client = SessionId::random(&mut rand::rng());
    packet(Opcode::HardResetClientV2, client, None, &[])
}

/// Prepends the packet length, which OpenVPN requires over TCP.
fn framed(packet: &[u8]) -> Vec<u8> {
    let length = u16::try_from(packet.len()).unwrap();
    [&length.to_be_bytes(), packet].concat()
}

/// Sends a first packet, and acknowledges the server's answer. `tls` is an optional payload that is not TLS.
async fn half_handshake(at: &Namespace, tls: Option<&[u8]>) {
    let socket = at.udp(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0));
    socket.connect(TO).await.unwrap();
    let client = SessionId::random(&mut rand::rng());
    let first = packet(Opcode::HardResetClientV2, client, None, &[]);
    let mut bytes = [0; 2000];
    // A retry sends the packet again, because a datagram may be lost.
    let length = eventually("an answer to a first packet", PATIENCE, async || {
        socket.send(&first).await.unwrap();
        let answer = timeout(Duration::from_secs(1), socket.recv(&mut bytes)).await;
        answer.map(Result::unwrap)
    })
    .await;
    let answer = ControlPacket::parse(&bytes[..length]).unwrap();
    let echo = match tls {
        Some(tls) => packet(Opcode::ControlV1, client, Some(answer.session), tls),
        None => packet(Opcode::AckV1, client, Some(answer.session), &[]),
    };
    socket.send(&echo).await.unwrap();
}

/// Sends first packets, invalid packets and unfinished handshakes over UDP.
async fn flood_udp(at: &Namespace) {
    for _ in 0..FIRST {
        let socket = at.udp(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0));
        socket.send_to(&first_packet(), TO).await.unwrap();
    }
    let socket = at.udp(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0));
    for length in 0..1000 {
        let mut bytes = noise(length);
        match length % 4 {
            // Packets with an unknown opcode, truncated packets, and data packets of possible sessions.
            0 => bytes.fill(0),
            1 => bytes = first_packet()[..length % 14].to_vec(),
            2 => bytes
                .splice(..4.min(length), [0x48, 0, 0, 0])
                .for_each(drop),
            _ => {}
        }
        socket.send_to(&bytes, TO).await.unwrap();
    }
    for number in 0..HALF {
        let tls = (number % 10 == 0).then(|| noise(200));
        half_handshake(at, tls.as_deref()).await;
    }
}

/// Sends invalid packets and unfinished handshakes over TCP. Returns the unfinished connections that are still
/// open.
async fn flood_tcp(at: &Namespace, server: &Server) -> VecDeque<TcpStream> {
    let before = server.program.fd_count();
    let client = SessionId::random(&mut rand::rng());
    let first = framed(&packet(Opcode::HardResetClientV2, client, None, &[]));
    let no_tls = framed(&packet(Opcode::ControlV1, client, None, &noise(300)));
    let huge = [&[0xff, 0xff][..], &noise(70_000)].concat();
    let attempts = [
        noise(4096),
        huge.clone(),
        vec![0, 0],
        vec![0],
        first[..9].to_vec(),
        first.clone(),
        [first.clone(), no_tls].concat(),
        [first.clone(), huge].concat(),
        [first.clone(), framed(&noise(1400))].concat(),
    ];
    for attempt in attempts.iter().cycle().take(5 * attempts.len()) {
        said(at.connect(TO).await.unwrap(), attempt).await;
    }
    let mut held = VecDeque::new();
    for number in 0..HALF {
        let mut stream = at.connect(TO).await.unwrap();
        // Every fourth connection sends nothing.
        if number % 4 > 0 {
            stream.write_all(&first).await.unwrap();
        }
        held.push_back(stream);
        if held.len() > HELD {
            held.pop_front();
            let more = server.program.fd_count().saturating_sub(before);
            assert!(more < DESCRIPTORS, "{more} descriptors after {number}");
        }
    }
    held
}

/// Sends first packets over TCP as fast as possible until `stop` is cancelled.
async fn flood_on(at: Namespace, stop: CancellationToken) {
    let first = framed(&first_packet());
    let mut held = VecDeque::new();
    while !stop.is_cancelled() {
        let mut stream = at.connect(TO).await.unwrap();
        stream.write_all(&first).await.unwrap();
        held.push_back(stream);
        if held.len() > HELD {
            held.pop_front();
        }
    }
}

async fn a_flood(proto: &str) {
    let Some(openvpn) = OpenVpn::get() else {
        return;
    };
    let cluster = Cluster::start().await;
    masquerade(&cluster);
    let flags = ["--openvpn-listen=tcp::1194,udp::1194"];
    let server = Server::start(&cluster, "http-connect", &flags).await;
    let pair = &cluster.pki.user_cluster;
    let with = format!("--proto {proto}");
    let mut user = client_with(openvpn, &cluster, "tun5", pair, &with);
    user.is_up().await;
    server.has_clients(1).await;
    scenario::carries(&server, POD, BULK).await;
    let before = server.program.rss();

    let long = Long::start(&server).await;
    flood_udp(&cluster.client).await;
    let held = flood_tcp(&cluster.client, &server).await;
    scenario::carries(&server, POD, BULK).await;
    let grown = server.program.rss().saturating_sub(before);
    eprintln!("memory has grown by {grown} bytes from {before}");
    assert!(
        grown < GROWTH,
        "memory has grown by {grown} bytes from {before}"
    );
    // Another host connects during the flood: the flooding host displaces only its own sessions.
    let stop = CancellationToken::new();
    let more = tokio::spawn(flood_on(cluster.client.clone(), stop.clone()));
    let dir = cluster.dir("sidecar");
    let options = kkp::sidecar(&cluster.pki, &dir, &SEED_INSIDE.to_string());
    let mut inside = openvpn.start(&cluster.sidecar, &options);
    inside.is_up().await;
    server.has_clients(2).await;
    stop.cancel();
    more.await.unwrap();
    long.end().await;
    drop(held);

    for (outcome, count) in [
        ("protocol_error", 5.0),
        ("tls_failed", 5.0),
        ("evicted", 1.0),
        ("unfinished", 1.0),
    ] {
        counts(&server, "handshakes_total", ("outcome", outcome), count).await;
    }
    // A newcomer over TCP displaces an older handshake, or ends while it waits for a slot. The machine's speed decides
    // which is more frequent; together they are the TCP handshakes. Over UDP only some get a session, because the rate
    // is limited.
    eventually(
        "the handshakes of the flood have ended",
        PATIENCE,
        async || {
            let ended = async |outcome| {
                server
                    .metric("handshakes_total", &[("outcome", outcome)])
                    .await
            };
            let sum = ended("evicted").await + ended("unfinished").await;
            (sum >= 9_000.0).then_some(()).ok_or(sum)
        },
    )
    .await;
    dropped(&server, &["malformed", "unknown_session", "full"]).await;
    scenario::reaches_everything(&server, &cluster, NODE).await;
    let established = [("outcome", "established")];
    assert_eq!(server.metric("handshakes_total", &established).await, 2.0);
    assert!(!server.program.log().contains("disconnected"));
}

#[test]
fn a_flood_does_not_affect_a_client_over_tcp() {
    alone(async || a_flood("tcp").await);
}

#[test]
fn a_flood_does_not_affect_a_client_over_udp() {
    alone(async || a_flood("udp").await);
}

#[test]
fn our_server_survives_a_tampered_link_over_udp() {
    alone(async || {
        let Some(openvpn) = OpenVpn::get() else {
            return;
        };
        let cluster = Cluster::start().await;
        masquerade(&cluster);
        let (key, _) = cluster.pki.static_key();
        let crypt = format!("--openvpn-tls-crypt={}", key.display());
        let flags = ["--openvpn-listen=udp::1194", &crypt];
        let server = Server::start(&cluster, "http-connect", &flags).await;
        let near = SocketAddrV4::new(SEED, TAMPERED);
        let tamper = Tamper::start(&cluster.seed, near, TO);
        let with = format!(
            "--proto udp --tls-crypt {} --reneg-sec 3 --remote {SEED} {TAMPERED}",
            key.display()
        );
        let pair = &cluster.pki.user_cluster;
        let mut user = client_at(openvpn, &cluster, "tun5", pair, &with);
        user.is_up().await;
        server.has_clients(1).await;
        scenario::reaches_everything(&server, &cluster, NODE).await;
        let long = Long::start(&server).await;
        scenario::carries(&server, POD, 1_000_001).await;
        counts(&server, "renegotiations_total", ("outcome", "done"), 1.0).await;
        long.end().await;
        eprintln!("{} datagrams were added", tamper.added());
        let reasons = [
            "malformed",
            "wrap_mismatch",
            "replayed",
            "not_authentic",
            "unknown_session",
        ];
        dropped(&server, &reasons).await;
        let established = [("outcome", "established")];
        assert_eq!(server.metric("handshakes_total", &established).await, 1.0);
    });
}

#[test]
fn our_server_survives_a_tampered_link_over_tcp() {
    alone(async || {
        let Some(openvpn) = OpenVpn::get() else {
            return;
        };
        let cluster = Cluster::start().await;
        masquerade(&cluster);
        let flags = ["--openvpn-listen=tcp::1194", "--openvpn-ping=1s"];
        let server = Server::start(&cluster, "http-connect", &flags).await;
        let near = SocketAddrV4::new(SEED, TAMPERED);
        let relay = Relay::start(&cluster.seed, near, TO);
        let with = format!("--proto tcp --remote {SEED} {TAMPERED}");
        let pair = &cluster.pki.user_cluster;
        let mut user = client_at(openvpn, &cluster, "tun5", pair, &with);
        user.is_up().await;
        server.has_clients(1).await;
        scenario::reaches_everything(&server, &cluster, NODE).await;
        let long = Long::start(&server).await;
        scenario::carries(&server, POD, 1_000_001).await;
        eventually("packets were repeated", PATIENCE, async || {
            let added = relay.added();
            (added >= 8).then_some(()).ok_or(added)
        })
        .await;
        // The damage of one packet has no other effect than its loss.
        relay.damage(Way::ToServer).await;
        dropped(&server, &["not_authentic"]).await;
        long.end().await;
        let established = ("outcome", "established");
        let seen = server.metric("handshakes_total", &[established]).await;
        assert_eq!(seen, 1.0);
        // The stock client ends the connection after a damaged packet, and reconnects.
        relay.damage(Way::ToClient).await;
        user.is_up_again(2).await;
        server.has_clients(1).await;
        scenario::carries(&server, POD, 200_001).await;
        counts(&server, "handshakes_total", established, 2.0).await;
    });
}

#[test]
fn our_agent_survives_a_tampered_link_over_udp() {
    alone(async || {
        let Some(openvpn) = OpenVpn::get() else {
            return;
        };
        let cluster = Cluster::start().await;
        let (key, _) = cluster.pki.static_key();
        let options = kkp::server(&cluster.pki, &cluster.dir("server"))
            .with("--proto udp --reneg-sec 3")
            .option("--tls-crypt", &key);
        let mut server = openvpn.start(&cluster.seed, &options);
        server.is_up().await;
        let near = SocketAddrV4::new(CLIENT, TAMPERED);
        let tamper = Tamper::start(&cluster.client, near, TO);
        let crypt = format!("--openvpn-tls-crypt={}", key.display());
        let mut agent = agent_by(&cluster, &format!("{near},udp"), &[&crypt]);
        agent.is_ready(true).await;
        scenario::reaches_everything(&cluster.seed, &cluster, NODE_ACCESSED).await;
        scenario::carries(&cluster.seed, POD, 1_000_001).await;
        eventually("keys were renewed", PATIENCE, async || {
            let rekeys = agent.metric("rekeys_total", &[]).await;
            (rekeys >= 1.0).then_some(()).ok_or(rekeys)
        })
        .await;
        scenario::carries(&cluster.seed, POD, 200_001).await;
        eprintln!("{} datagrams were added", tamper.added());
        dropped(&agent, &["malformed", "not_authentic", "replayed"]).await;
        let established = [("outcome", "established")];
        assert_eq!(agent.metric("connects_total", &established).await, 1.0);
        assert!(!agent.program.log().contains("lost the OpenVPN server"));
    });
}

#[test]
fn our_agent_survives_a_tampered_link_over_tcp() {
    alone(async || {
        let Some(openvpn) = OpenVpn::get() else {
            return;
        };
        let cluster = Cluster::start().await;
        let options = kkp::server(&cluster.pki, &cluster.dir("server"))
            .with("--ping 1 --push \"ping 1\" --push \"ping-restart 30\"");
        let mut server = openvpn.start(&cluster.seed, &options);
        server.is_up().await;
        let near = SocketAddrV4::new(CLIENT, TAMPERED);
        let relay = Relay::start(&cluster.client, near, TO);
        let mut agent = agent_by(&cluster, &near.to_string(), &[]);
        agent.is_ready(true).await;
        scenario::carries(&cluster.seed, POD, 1_000_001).await;
        // The damage of one packet has no other effect than its loss.
        relay.damage(Way::ToClient).await;
        dropped(&agent, &["not_authentic"]).await;
        scenario::carries(&cluster.seed, POD, 200_001).await;
        assert!(!agent.program.log().contains("lost the OpenVPN server"));
        // The stock server ends the connection after a damaged packet.
        relay.damage(Way::ToServer).await;
        agent.says("lost the OpenVPN server").await;
        let established = ("outcome", "established");
        counts(&agent, "connects_total", established, 2.0).await;
        agent.is_ready(true).await;
        scenario::reaches_everything(&cluster.seed, &cluster, NODE_ACCESSED).await;
        scenario::carries(&cluster.seed, POD, 200_001).await;
    });
}

/// Starts an agent with the platform's file, but with `remote` as the address of the server.
fn agent_by(cluster: &Cluster, remote: &str, flags: &[&str]) -> Agent {
    let config = platform_file(cluster, "");
    let config = format!("--openvpn-config={}", config.display());
    let remote = format!("--openvpn-remote={remote}");
    let flags = [&[config.as_str(), &remote], flags].concat();
    Agent::start(&cluster.client, &flags)
}
