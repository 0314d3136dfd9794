//! Datagrams from the tunnel. Each pair of addresses has its own socket, which is closed when idle. Control
//! planes query the cluster's DNS over UDP.
//!
//! This module owns the pairs of one session. A new pair beyond the limit displaces the pair that has been idle for
//! the longest time. Datagrams for a full socket are dropped, as usual for UDP.

use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use culvert_host::net::listen::{TOO_MANY_FILES, is_last};
use culvert_openvpn::flows::Unreachable;
use culvert_openvpn::ip::{self, Packet, Sum, kind, protocol};
use culvert_openvpn_io::stream::Peer;
use tokio::net::UdpSocket;
use tokio::sync::mpsc::{self, Receiver, Sender, error::TrySendError};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::tunnel::Tunnel;
use crate::metrics::DialFailureReason;

/// Largest number of pairs. Each pair has a socket and a task.
const MAX_PAIRS: usize = 512;

/// Largest number of datagrams queued for one socket.
const MAX_WAITING: usize = 64;

/// Time after which a pair without traffic is closed. Longer than any resolver waits for an answer.
const IDLE: Duration = Duration::from_secs(30);

/// Length of the IPv4 and UDP headers.
const HEADERS: usize = ip::HEADER + 8;

/// Source and destination of a datagram.
type Pair = (SocketAddrV4, SocketAddrV4);

/// Forwards the UDP datagrams of one session.
pub(super) struct Datagrams {
    tunnel: Arc<Tunnel>,
    peer: Peer,
    /// MTU of the tunnel: larger answers are dropped.
    mtu: usize,
    ended: CancellationToken,
    pairs: HashMap<Pair, Entry>,
    /// Number of datagrams so far, from all pairs.
    clock: Arc<AtomicU64>,
}

/// Entry of a pair.
struct Entry {
    sender: Sender<Bytes>,
    used: Used,
}

/// Time of a pair's last datagram, by the clock of its session.
#[derive(Clone)]
struct Used {
    at: Arc<AtomicU64>,
    clock: Arc<AtomicU64>,
}

impl Used {
    fn now(&self) {
        let now = self.clock.fetch_add(1, Ordering::Relaxed);
        self.at.store(now, Ordering::Relaxed);
    }
}

impl Datagrams {
    pub(super) fn new(tunnel: Arc<Tunnel>, peer: Peer, mtu: u16, ended: CancellationToken) -> Self {
        Self {
            tunnel,
            peer,
            mtu: usize::from(mtu),
            ended,
            pairs: HashMap::new(),
            clock: Arc::default(),
        }
    }

    /// Forwards a packet from the tunnel, or drops the packet because of a limit. Returns false if the packet
    /// is not a valid datagram, or if its destination cannot be reached. `own` is the client's own tunnel
    /// address. A packet to `own` is rejected, because the client opens no port at that address.
    pub(super) fn input(&mut self, packet: &[u8], own: Ipv4Addr) -> bool {
        let Some((pair, payload)) = parse(packet) else {
            return false;
        };
        if *pair.1.ip() == own {
            return false;
        }
        if let Some(entry) = self.pairs.get(&pair) {
            match entry.sender.try_send(Bytes::copy_from_slice(payload)) {
                Ok(()) | Err(TrySendError::Full(_)) => return true,
                // The task of the pair has just ended.
                Err(TrySendError::Closed(_)) => {}
            }
        }
        let Ok(target) = self.tunnel.target(pair.1) else {
            return false;
        };
        if let Err(denial) = self.tunnel.agent.destinations.check(target.into()) {
            warn!(client = %pair.0, destination = %target, %denial, "datagram denied");
            let failures = self
                .tunnel
                .agent
                .metrics
                .dial_failures(DialFailureReason::Denied);
            failures.increment(1);
            return false;
        }
        if self.pairs.len() >= MAX_PAIRS {
            self.pairs.retain(|_, entry| !entry.sender.is_closed());
        }
        if self.pairs.len() >= MAX_PAIRS {
            self.displace();
        }
        let (sender, receiver) = mpsc::channel(MAX_WAITING);
        // The new channel has room for one datagram.
        let _ = sender.try_send(Bytes::copy_from_slice(payload));
        let used = Used {
            at: Arc::default(),
            clock: self.clock.clone(),
        };
        used.now();
        let entry = Entry {
            sender,
            used: used.clone(),
        };
        self.pairs.insert(pair, entry);
        let (peer, mtu, ended) = (self.peer.clone(), self.mtu, self.ended.clone());
        self.tunnel.agent.tasks.spawn(async move {
            let carried = carry(pair, target, receiver, &used, &peer, mtu);
            let outcome = ended.run_until_cancelled(carried).await;
            if let Some(Err(error)) = outcome {
                debug!(client = %pair.0, destination = %target, %error, "cannot carry datagrams");
            }
        });
        true
    }

    /// Removes the pair that has been idle for the longest time.
    fn displace(&mut self) {
        let last = |entry: &Entry| entry.used.at.load(Ordering::Relaxed);
        let idlest = self.pairs.iter().min_by_key(|(_, entry)| last(entry));
        if let Some(pair) = idlest.map(|(pair, _)| *pair) {
            // The pair's task sends the queued datagrams and ends.
            self.pairs.remove(&pair);
        }
    }
}

/// Forwards the datagrams of a pair in both directions until the pair is idle.
async fn carry(
    (client, destination): Pair,
    target: SocketAddrV4,
    mut receiver: Receiver<Bytes>,
    used: &Used,
    peer: &Peer,
    mtu: usize,
) -> io::Result<()> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).await?;
    if is_last(&socket) {
        warn!(%client, destination = %target, "datagrams refused: {TOO_MANY_FILES}");
        return Ok(());
    }
    socket.connect(target).await?;
    let mut buffer = BytesMut::new();
    let mut packet = Vec::new();
    let mut last = Bytes::new();
    let mut until = Instant::now() + IDLE;
    loop {
        buffer.clear();
        // A datagram larger than the buffer is truncated here and dropped below.
        buffer.reserve(mtu);
        packet.clear();
        let done = tokio::select! {
            datagram = receiver.recv() => match datagram {
                Some(datagram) => {
                    last = datagram;
                    send(&socket, &last).await
                }
                None => return Ok(()),
            },
            read = socket.recv_buf(&mut buffer) => read.map(|_| {
                // The tunnel's packets are not split into fragments.
                if buffer.len() + HEADERS <= mtu {
                    write(&mut packet, destination, client, &buffer);
                }
            }),
            () = sleep_until(until) => return Ok(()),
        };
        match done {
            // The pair continues, because the port may open soon.
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                write_port_closed(&mut packet, client, destination, &last);
            }
            done => done?,
        }
        if !packet.is_empty() {
            peer.forward(&packet);
        }
        used.now();
        until = Instant::now() + IDLE;
    }
}

/// Sends a datagram.
///
/// # Errors
/// `ConnectionRefused` if the port was closed for an earlier datagram. This datagram was sent nevertheless.
async fn send(socket: &UdpSocket, datagram: &[u8]) -> io::Result<()> {
    match socket.send(datagram).await {
        // The kernel reports the ICMP error of an earlier datagram once, and has sent nothing (udp(7)).
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
            socket.send(datagram).await?;
            Err(error)
        }
        sent => sent.map(drop),
    }
}

/// Parses a complete datagram with a valid checksum into its addresses and its payload.
fn parse(packet: &[u8]) -> Option<(Pair, &[u8])> {
    let packet = Packet::parse(packet).ok()?;
    if packet.protocol() != protocol::UDP || packet.check_udp().is_err() {
        return None;
    }
    let (from, to) = packet.ports()?;
    let length = packet.payload().get(4..6)?.first_chunk::<2>()?;
    let payload = packet
        .payload()
        .get(8..usize::from(u16::from_be_bytes(*length)))?;
    let source = SocketAddrV4::new(packet.source(), from);
    Some((
        (source, SocketAddrV4::new(packet.destination(), to)),
        payload,
    ))
}

/// Appends an IPv4 packet with one datagram.
fn write(out: &mut Vec<u8>, from: SocketAddrV4, to: SocketAddrV4, payload: &[u8]) {
    let length = 8 + payload.len();
    ip::write_header(out, *from.ip(), *to.ip(), protocol::UDP, length);
    let mut header = [0; 8];
    [header[0], header[1]] = from.port().to_be_bytes();
    [header[2], header[3]] = to.port().to_be_bytes();
    [header[4], header[5]] = u16::try_from(length).unwrap_or(u16::MAX).to_be_bytes();
    let sum = ip::pseudo(*from.ip(), *to.ip(), protocol::UDP, length)
        + Sum::of(&header)
        + Sum::of(payload);
    // A checksum of zero means "no checksum" (RFC 768).
    let checksum = match sum.checksum() {
        0 => u16::MAX,
        checksum => checksum,
    };
    [header[6], header[7]] = checksum.to_be_bytes();
    out.extend_from_slice(&header);
    out.extend_from_slice(payload);
}

/// Appends an IPv4 packet with the ICMP error "port unreachable" for a datagram.
fn write_port_closed(out: &mut Vec<u8>, from: SocketAddrV4, to: SocketAddrV4, payload: &[u8]) {
    let mut quote = Vec::new();
    write(&mut quote, from, to, payload);
    quote.truncate(HEADERS);
    let mut header = [0; 8];
    header[..2].copy_from_slice(&[kind::UNREACHABLE, Unreachable::Port.code()]);
    let sum = Sum::of(&header) + Sum::of(&quote);
    header[2..4].copy_from_slice(&sum.checksum().to_be_bytes());
    let length = header.len() + quote.len();
    ip::write_header(out, *to.ip(), *from.ip(), protocol::ICMP, length);
    out.extend_from_slice(&header);
    out.extend_from_slice(&quote);
}

#[cfg(test)]
pub(super) mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]

    use std::net::SocketAddr;

    use culvert_host::net::destinations::Destinations;
    use culvert_konnectivity::excess::OverflowBudget;
    use culvert_openvpn::flows;
    use culvert_openvpn::ip::Icmp;
    use culvert_openvpn_io::now;
    use culvert_openvpn_io::streams::Streams;
    use metrics::Gauge;
    use proptest::prelude::*;
    use socket2::{Domain, SockRef, Socket, Type};

    use super::*;
    use crate::agent::{Agent, Limits};
    use crate::metrics::AgentMetrics;
    use crate::openvpn::nodes::NodeAccess;

    const CLIENT: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 20, 0, 10), 40000);
    const DNS: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 240, 16, 10), 53);

    #[test]
    fn truncated_or_corrupt_datagram_is_rejected() {
        let mut packet = Vec::new();
        write(&mut packet, CLIENT, DNS, b"question");
        assert_eq!(parse(&packet).unwrap().1, b"question");
        for length in 0..packet.len() {
            assert_eq!(parse(&packet[..length]), None);
        }
        let last = packet.len() - 1;
        packet[last] ^= 1;
        assert_eq!(parse(&packet), None);
    }

    /// Returns a tunnel to nodes on this machine, and the token that ends its agent.
    pub(in super::super) fn tunnel() -> (Arc<Tunnel>, CancellationToken) {
        let limits = Limits {
            connection_bytes: 1,
            stall: Duration::from_secs(1),
            excess: OverflowBudget::new(1, Gauge::noop(), Gauge::noop()),
        };
        let (metrics, stop) = (AgentMetrics::new().unwrap(), CancellationToken::new());
        let destinations = Destinations::of_agent();
        let agent = Agent::new(Arc::new(metrics), stop.clone(), limits, destinations);
        let nodes = NodeAccess {
            nodes: vec!["127.0.0.0/16".parse().unwrap()],
            ..NodeAccess::default()
        };
        (Tunnel::new(agent, nodes), stop)
    }

    fn datagrams() -> (Datagrams, Streams) {
        let (tunnel, stop) = tunnel();
        let flows = Streams::new(flows::Config::default(), now());
        let datagrams = Datagrams::new(tunnel, flows.peer(), 1500, stop);
        (datagrams, flows)
    }

    fn accepts(datagrams: &mut Datagrams, client: SocketAddrV4, destination: &str) -> bool {
        let mut packet = Vec::new();
        let destination = destination.parse().unwrap();
        write(&mut packet, client, destination, b"question");
        datagrams.input(&packet, *CLIENT.ip())
    }

    #[tokio::test]
    async fn denied_datagram_is_rejected() {
        let (mut datagrams, _flows) = datagrams();
        assert!(accepts(&mut datagrams, CLIENT, "10.254.0.1:9"));
        assert!(!accepts(&mut datagrams, CLIENT, "169.254.169.254:53"));
    }

    #[tokio::test]
    async fn a_pair_beyond_the_limit_displaces_the_idlest_pair() {
        let server = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        // The node access network maps to 127.0.0.1.
        let target = format!("10.254.0.1:{}", server.local_addr().unwrap().port());
        let client = |port| SocketAddrV4::new(*CLIENT.ip(), port);
        let (mut datagrams, _flows) = datagrams();
        let question = async |datagrams: &mut Datagrams, port| {
            assert!(accepts(datagrams, client(port), &target));
            server.recv_from(&mut [0; 16]).await.unwrap().1
        };
        let first = question(&mut datagrams, 1).await;
        for port in 2..=MAX_PAIRS as u16 {
            question(&mut datagrams, port).await;
        }
        // The first pair has been in use lately.
        assert_eq!(question(&mut datagrams, 1).await, first);
        tokio::task::yield_now().await;
        question(&mut datagrams, 1000).await;
        assert_eq!(datagrams.pairs.len(), MAX_PAIRS);
        let is_open = |port| datagrams.pairs.keys().any(|pair| pair.0 == client(port));
        assert!(is_open(1) && !is_open(2) && is_open(3) && is_open(1000));
    }

    /// Returns a socket that reserves a port, and its address. The kernel refuses the datagrams of other sockets, because
    /// the socket is connected to itself.
    async fn closed_port() -> (UdpSocket, SocketAddrV4) {
        let reserved = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let SocketAddr::V4(address) = reserved.local_addr().unwrap() else {
            panic!("not an IPv4 address");
        };
        reserved.connect(address).await.unwrap();
        // Permits `open_port`. Sockets without this option still cannot bind the port.
        SockRef::from(&reserved).set_reuse_address(true).unwrap();
        (reserved, address)
    }

    /// Opens a port that [`closed_port`] has reserved.
    fn open_port(address: SocketAddrV4) -> UdpSocket {
        let socket = Socket::new(Domain::IPV4, Type::DGRAM.nonblocking(), None).unwrap();
        socket.set_reuse_address(true).unwrap();
        socket.bind(&address.into()).unwrap();
        UdpSocket::from_std(socket.into()).unwrap()
    }

    #[tokio::test]
    async fn pair_with_a_closed_port_continues_once_the_port_opens() {
        let (_reserved, address) = closed_port().await;
        let target = format!("10.254.0.1:{}", address.port());
        let (mut datagrams, mut flows) = datagrams();
        assert!(accepts(&mut datagrams, CLIENT, &target));
        let mut packets = Vec::<Vec<u8>>::new();
        while packets.is_empty() {
            let pair = datagrams.pairs.values().next().unwrap();
            assert!(!pair.sender.is_closed(), "the pair has ended");
            tokio::time::sleep(Duration::from_millis(1)).await;
            flows.work(now(), &mut drop);
            flows.poll_output(now(), &mut |packet| {
                packets.push(packet.to_vec());
                true
            });
        }
        // The client gets the ICMP error with the head of its datagram.
        let packet = Packet::parse(&packets[0]).unwrap();
        assert_eq!(packet.destination(), *CLIENT.ip());
        let error = Icmp::parse(&packet).unwrap();
        assert_eq!((error.kind(), error.code()), (kind::UNREACHABLE, 3));
        let mut sent = Vec::new();
        write(&mut sent, CLIENT, target.parse().unwrap(), b"question");
        assert_eq!(error.body(), &sent[..HEADERS]);

        let server = open_port(address);
        assert!(accepts(&mut datagrams, CLIENT, &target));
        let (length, _) = server.recv_from(&mut [0; 16]).await.unwrap();
        assert_eq!(length, b"question".len());
    }

    #[tokio::test]
    async fn datagram_after_a_refused_one_is_sent() {
        let (_reserved, address) = closed_port().await;
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        socket.connect(address).await.unwrap();
        send(&socket, b"first").await.unwrap();
        socket.ready(tokio::io::Interest::ERROR).await.unwrap();
        let server = open_port(address);
        let refused = send(&socket, b"second").await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        let mut received = [0; 16];
        let (length, _) = server.recv_from(&mut received).await.unwrap();
        assert_eq!(&received[..length], b"second");
    }

    proptest! {
        #[test]
        fn written_datagram_parses_back(payload in prop::collection::vec(any::<u8>(), 0..1400)) {
            let mut packet = Vec::new();
            write(&mut packet, CLIENT, DNS, &payload);
            prop_assert_eq!(parse(&packet), Some(((CLIENT, DNS), payload.as_slice())));
        }
    }
}
