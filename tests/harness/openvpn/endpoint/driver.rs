//! The task that owns session, flows and socket.

use std::collections::HashMap;
use std::future::{Future as _, poll_fn};
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use culvert_kit::client::BoxedStream;
use culvert_openvpn::flows::{self, FlowId, Flows, Input, Refusal};
use culvert_openvpn::ip::{self, Icmp, Packet, Sum};
use culvert_openvpn::session::{ClientConfig, Event, ServerConfig};
use parking_lot::Mutex;
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, Sleep, sleep_until};

use super::super::cluster::{NODE, NODE_ACCESSED};
use super::super::network::Namespace;
use super::Seen;
use super::core::{Core, now};
use super::link::Link;
use super::pipe::Pipe;

/// The server's address in the tunnel.
const SERVER: Ipv4Addr = Ipv4Addr::new(10, 20, 0, 1);

/// Capacity of the pipe to a dialed flow, in bytes, in each direction.
const PIPE: usize = 64 * 1024;

/// Requests from the owner of an endpoint.
pub(super) enum Command {
    Dial(SocketAddrV4, oneshot::Sender<io::Result<BoxedStream>>),
    Ping(Ipv4Addr, u16),
    Close,
}

/// State of the task; see the module.
pub(super) struct Driver {
    link: Link,
    core: Core,
    /// `None` until the endpoint's own address is known.
    flows: Option<Flows>,
    own: Ipv4Addr,
    push: Vec<String>,
    cluster: Option<Namespace>,
    commands: mpsc::UnboundedReceiver<Command>,
    pipes: HashMap<FlowId, Pipe>,
    dialing: HashMap<FlowId, oneshot::Sender<io::Result<BoxedStream>>>,
    /// Connection attempts to the targets of flows from the tunnel.
    targets: JoinSet<(FlowId, io::Result<TcpStream>)>,
    reached: HashMap<FlowId, TcpStream>,
    seen: Arc<Mutex<Seen>>,
    timer: Pin<Box<Sleep>>,
}

impl Driver {
    pub(super) fn server(
        link: Link,
        config: ServerConfig,
        push: Vec<String>,
        commands: mpsc::UnboundedReceiver<Command>,
        seen: Arc<Mutex<Seen>>,
    ) -> Self {
        let mut driver = Self::new(link, Core::server(config), commands, seen);
        driver.push = push;
        driver.open_flows(SERVER, 1500);
        driver
    }

    pub(super) fn client(
        link: Link,
        config: ClientConfig,
        cluster: Option<Namespace>,
        commands: mpsc::UnboundedReceiver<Command>,
        seen: Arc<Mutex<Seen>>,
    ) -> Self {
        let mut driver = Self::new(link, Core::client(config), commands, seen);
        driver.cluster = cluster;
        driver
    }

    fn new(
        link: Link,
        core: Core,
        commands: mpsc::UnboundedReceiver<Command>,
        seen: Arc<Mutex<Seen>>,
    ) -> Self {
        Self {
            link,
            core,
            flows: None,
            own: Ipv4Addr::UNSPECIFIED,
            push: Vec::new(),
            cluster: None,
            commands,
            pipes: HashMap::new(),
            dialing: HashMap::new(),
            targets: JoinSet::new(),
            reached: HashMap::new(),
            seen,
            timer: Box::pin(sleep_until(Instant::now())),
        }
    }

    fn open_flows(&mut self, own: Ipv4Addr, tun_mtu: u16) {
        let config = flows::Config {
            address: own,
            tun_mtu,
            accept: self.cluster.is_some(),
            ..flows::Config::default()
        };
        self.own = own;
        self.flows = Some(Flows::new(config, Box::new(StdRng::from_os_rng()), now()));
    }

    /// Runs until the session has ended and everything is sent.
    pub(super) async fn run(mut self) {
        poll_fn(|cx| self.poll(cx)).await;
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let mut turns = 0;
        loop {
            let read = self.read(cx);
            let told = self.obey(cx);
            let pumped = self.pump(cx);
            self.session_events();
            self.produce();
            self.seen.lock().stats = self.core.stats();
            let (read, flushed) = match (read, self.link.poll_flush(cx)) {
                (Ok(read), Ok(flushed)) => (read, flushed),
                (Err(_), _) | (_, Err(_)) => {
                    self.core.disconnected();
                    self.session_events();
                    return Poll::Ready(());
                }
            };
            if self.core.is_finished() && self.link.is_empty() {
                return Poll::Ready(());
            }
            if read || told || pumped || flushed {
                continue;
            }
            let Some(at) = self.timeout() else {
                return Poll::Pending;
            };
            turns += 1;
            assert!(
                turns < 10_000,
                "timeouts are due again and again: {:?}",
                self.seen.lock()
            );
            self.timer.as_mut().reset(at);
            if self.timer.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            self.core.handle_timeout();
        }
    }

    fn timeout(&self) -> Option<Instant> {
        let flows = self.flows.as_ref().and_then(Flows::poll_timeout);
        // While the link is full, the flows wait for the link instead of a timeout.
        let flows = flows.filter(|_| !self.link.is_full() && self.core.is_established());
        let flows = flows.map(Instant::from_std);
        self.core.timeout().into_iter().chain(flows).min()
    }

    fn read(&mut self, cx: &mut Context<'_>) -> io::Result<bool> {
        let mut is_read = false;
        // Bounded, so that the other work of the loop gets a turn.
        for _ in 0..64 {
            let Poll::Ready(packet) = self.link.poll_packet(cx) else {
                break;
            };
            is_read = true;
            let (flows, seen, own) = (&mut self.flows, &self.seen, self.own);
            let mut inner = |packet: &[u8]| {
                if let Some(flows) = flows {
                    inner(flows, packet, own, seen);
                }
            };
            let (mut packet, from) = packet?;
            if let Some(first) = packet.first() {
                let mut seen = self.seen.lock();
                *seen.received.entry(first >> 3).or_default() += 1;
            }
            self.core.input(from, &mut packet, &mut inner);
        }
        Ok(is_read)
    }

    fn obey(&mut self, cx: &mut Context<'_>) -> bool {
        let mut is_told = false;
        while let Poll::Ready(Some(command)) = self.commands.poll_recv(cx) {
            is_told = true;
            match command {
                Command::Close => self.core.close(),
                Command::Ping(to, sequence) => {
                    let request = echo_request(self.own, to, sequence);
                    if let Ok((packet, to)) = self.core.seal(&request) {
                        self.link.queue(packet, to);
                    }
                }
                Command::Dial(to, answer) => {
                    let dialed = self.flows.as_mut().map(|flows| flows.dial(to, now()));
                    match dialed {
                        Some(Ok(id)) => drop(self.dialing.insert(id, answer)),
                        Some(Err(error)) => drop(answer.send(Err(io::Error::other(error)))),
                        None => drop(answer.send(Err(io::ErrorKind::NotConnected.into()))),
                    }
                }
            }
        }
        is_told
    }

    fn pump(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(mut flows) = self.flows.take() else {
            return false;
        };
        let mut is_moved = false;
        while let Poll::Ready(Some(target)) = self.targets.poll_join_next(cx) {
            is_moved = true;
            match target.expect("a connection attempt") {
                (id, Ok(stream)) => {
                    if flows.accept(id, now()).is_ok() {
                        self.reached.insert(id, stream);
                    }
                }
                (id, Err(_)) => flows.refuse(id, Refusal::Reset),
            }
        }
        // Pipes first: each pipe reads the received bytes before its flow is closed.
        for (id, pipe) in &mut self.pipes {
            is_moved |= pipe.pump(*id, &mut flows, cx);
        }
        while let Some(event) = flows.poll_event() {
            is_moved = true;
            self.flow_event(event);
        }
        self.flows = Some(flows);
        is_moved
    }

    fn flow_event(&mut self, event: flows::Event) {
        match event {
            flows::Event::Incoming {
                id, destination, ..
            } => {
                let cluster = self.cluster.clone();
                self.targets.spawn(async move {
                    let cluster = cluster.ok_or(io::ErrorKind::ConnectionRefused);
                    match cluster {
                        Ok(cluster) => (id, cluster.connect(real(destination)).await),
                        Err(refused) => (id, Err(refused.into())),
                    }
                });
            }
            flows::Event::Connected(id) => {
                if let Some(stream) = self.reached.remove(&id) {
                    stream.set_nodelay(true).ok();
                    self.pipes.insert(id, Pipe::new(Box::new(stream)));
                }
                if let Some(answer) = self.dialing.remove(&id) {
                    let (near, far) = tokio::io::duplex(PIPE);
                    self.pipes.insert(id, Pipe::new(Box::new(near)));
                    answer.send(Ok(Box::new(far))).ok();
                }
            }
            flows::Event::Closed(id, why) => {
                // The stream just ends; the output of a failed test has the reason.
                if why != flows::Closed::Finished {
                    eprintln!("a flow is closed: {why}");
                }
                self.pipes.remove(&id);
                self.reached.remove(&id);
                if let Some(answer) = self.dialing.remove(&id) {
                    answer.send(Err(io::Error::other(why))).ok();
                }
            }
            // The loop polls every pipe in each turn anyway.
            flows::Event::Readable(_) | flows::Event::Writable(_) | flows::Event::Delivered(_) => {}
        }
    }

    fn session_events(&mut self) {
        while let Some(event) = self.core.poll_event() {
            let mut seen = self.seen.lock();
            match event {
                Event::Authenticated(_) => {
                    self.core.accept(self.push.clone());
                }
                Event::Established(established) => {
                    let own = established.push.as_ref().and_then(|push| push.ifconfig);
                    seen.ended = None;
                    seen.sessions += 1;
                    seen.established = Some((*established).clone());
                    drop(seen);
                    if let Some(ifconfig) = own {
                        self.open_flows(ifconfig.local, established.tun_mtu);
                    }
                }
                Event::Rekeyed { key_id } => seen.rekeyed.push(key_id),
                Event::Notice(text) => seen.notices.push(text),
                Event::Ended(why) => seen.ended = Some(why.to_string()),
            }
        }
    }

    /// Queues everything that is ready to be sent.
    fn produce(&mut self) {
        while let Some((packet, to)) = self.core.poll_output() {
            self.link.queue(packet, to);
        }
        let Some(flows) = self.flows.as_mut().filter(|_| self.core.is_established()) else {
            return;
        };
        flows.poll_output(now(), &mut |packet| {
            if self.link.is_full() {
                return false;
            }
            if let Ok((packet, to)) = self.core.seal(packet) {
                self.link.queue(packet, to);
            }
            true
        });
    }
}

fn inner(flows: &mut Flows, packet: &[u8], own: Ipv4Addr, seen: &Mutex<Seen>) {
    if flows.input(packet, now()) != Input::Unknown || flows.echo(packet, now()) {
        return;
    }
    let pong = Packet::parse(packet).ok().filter(|packet| {
        let icmp = Icmp::parse(packet);
        packet.destination() == own && icmp.is_ok_and(|icmp| icmp.kind() == ip::kind::ECHO_REPLY)
    });
    match pong {
        Some(_) => seen.lock().pongs += 1,
        None => flows.reject(packet, now()),
    }
}

/// Translates the seed's address of the lab's node to the node's own address.
fn real(destination: SocketAddrV4) -> SocketAddrV4 {
    let address = match *destination.ip() {
        NODE_ACCESSED => NODE,
        other => other,
    };
    SocketAddrV4::new(address, destination.port())
}

fn echo_request(from: Ipv4Addr, to: Ipv4Addr, sequence: u16) -> Vec<u8> {
    let body = [0x55; 56];
    let [high, low] = sequence.to_be_bytes();
    let mut header = [ip::kind::ECHO, 0, 0, 0, 0, 1, high, low];
    let sum = Sum::of(&header) + Sum::of(&body);
    [header[2], header[3]] = sum.checksum().to_be_bytes();
    let mut packet = Vec::new();
    ip::write_header(
        &mut packet,
        from,
        to,
        ip::protocol::ICMP,
        header.len() + body.len(),
    );
    packet.extend_from_slice(&header);
    packet.extend_from_slice(&body);
    packet
}
