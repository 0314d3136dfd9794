//! All clients of one UDP socket, in one task.
//!
//! A turn visits every client, at the cost of a few memory loads per client. A turn receives up to [`READS`]
//! batches of datagrams, and stops after the batch that reaches [`TURN_BYTES`].

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use culvert_openvpn::hub::{Hub, HubStats, Limits, PeerId};
use culvert_openvpn::options::Transport;
use culvert_openvpn::session::{Ended, Event, ServerConfig};
use culvert_openvpn::wrap::WRAP_HINT;
use culvert_openvpn_io::clock::{Clock, UDP_SERVER_GOODBYE};
use culvert_openvpn_io::datagrams::Datagrams;
use culvert_openvpn_io::link::Role as _;
use culvert_openvpn_io::metrics::Growth;
use culvert_openvpn_io::streams::Streams;
use culvert_openvpn_io::{Moment, now};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::info;

use super::clients::Clients;
use super::metrics::Handshake;
use super::role::Client;

/// Largest number of batches received in one turn.
const READS: usize = 8;

/// Received bytes after which a turn starts to send. Bounds the delay of outgoing packets.
const TURN_BYTES: usize = 256 << 10;

/// Size of an outgoing batch, in bytes.
const OUT_BYTES: usize = 64 << 10;

/// Limit of sessions that are not established; see [`Limits::half_open`].
const MAX_HALF_OPEN: usize = 256;

/// Shortest time between two lines about packets with another wrap. Strangers may send such packets from forged
/// addresses.
const MISMATCH_PAUSE: Duration = Duration::from_secs(60);

struct Member {
    client: Client,
    kick: CancellationToken,
    streams: Option<Streams>,
    /// Inner packets that could not be encrypted.
    unsealed: u64,
}

/// State of one UDP socket; see the module.
pub(super) struct Udp {
    socket: Datagrams,
    hub: Hub,
    config: watch::Receiver<Arc<ServerConfig>>,
    clients: Arc<Clients>,
    members: BTreeMap<PeerId, Member>,
    /// Client that sends first in the next turn.
    first: Option<PeerId>,
    clock: Clock,
    reported: HubStats,
    /// Time of the last line about a packet with another wrap.
    mismatch_logged: Option<Moment>,
}

impl Udp {
    /// Creates a socket without clients.
    pub(super) fn new(
        socket: Datagrams,
        config: watch::Receiver<Arc<ServerConfig>>,
        clients: Arc<Clients>,
        max_clients: usize,
    ) -> Self {
        let first = config.borrow().clone();
        let limits = Limits {
            sessions: max_clients.saturating_add(MAX_HALF_OPEN),
            half_open: MAX_HALF_OPEN,
        };
        Self {
            socket,
            hub: Hub::new(first, limits, now()),
            config,
            clients,
            members: BTreeMap::new(),
            first: None,
            clock: Clock::default(),
            reported: HubStats::default(),
            mismatch_logged: None,
        }
    }

    /// Serves clients until the token fires, and then notifies them of the shutdown.
    pub(super) async fn serve(mut self, shutdown: CancellationToken) {
        let served = async {
            loop {
                self.turn().await;
            }
        };
        let _: Option<()> = shutdown.run_until_cancelled(served).await;
        let now = now();
        for peer in self.members.keys().copied().collect::<Vec<_>>() {
            self.hub
                .with(peer, now, |session| session.restart(false, now));
        }
        let told = async {
            while !self.members.is_empty() || !self.socket.is_empty() {
                self.turn().await;
            }
        };
        let _ = tokio::time::timeout(UDP_SERVER_GOODBYE, told).await;
        self.report();
    }

    async fn turn(&mut self) {
        poll_fn(|cx| self.poll_turn(cx)).await;
        tokio::task::yield_now().await;
    }

    /// Runs one turn. Ready after progress, when there may be more work.
    fn poll_turn(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let mut active = false;
        let now = now();
        if self.config.has_changed().unwrap_or(false) {
            let config = self.config.borrow_and_update().clone();
            self.hub.set_config(config);
        }
        let mut taken = 0;
        for _ in 0..READS {
            if taken >= TURN_BYTES || self.poll_receive(now, cx).is_pending() {
                break;
            }
            active = true;
            taken += self.socket.received();
        }
        // Receiving may have taken a while, so the clock is read again.
        let now = self::now();
        if self.hub.poll_timeout().is_some_and(|at| at <= now) {
            self.hub.handle_timeout(now);
        }
        self.events(now);
        self.work(now);
        self.events(now);
        let sent = self.send(now, cx);
        self.work(now);
        active |= self.decide(now, cx);
        if self.clock.take_report(now) {
            self.report();
        }
        if active || sent || !self.members.is_empty() {
            self.clock.report_soon(now);
        }
        if active || sent {
            return Poll::Ready(());
        }
        self.poll_wait(cx)
    }

    fn poll_receive(&mut self, now: Moment, cx: &mut Context<'_>) -> Poll<()> {
        ready!(self.socket.poll_receive(cx));
        loop {
            let Self {
                socket,
                hub,
                members,
                ..
            } = self;
            let Some((from, datagram)) = socket.take() else {
                return Poll::Ready(());
            };
            let mut is_inner = false;
            let heard = hub.input(from, datagram, now, &mut |peer, packet| {
                if let Some(member) = members.get_mut(&peer)
                    && let Some(streams) = &mut member.streams
                {
                    is_inner = true;
                    streams.heard(now);
                    member.client.packet(packet, streams, now);
                }
            });
            // A ping, or another packet that does not leave the tunnel.
            if let Some(peer) = heard.filter(|_| !is_inner)
                && let Some(member) = members.get_mut(&peer)
                && let Some(streams) = &mut member.streams
            {
                streams.heard(now);
            }
            self.events(now);
        }
    }

    fn events(&mut self, now: Moment) {
        while let Some((peer, event)) = self.hub.poll_event() {
            if matches!(event, Event::Authenticated(_)) {
                let Some(remote) = self.hub.address(peer) else {
                    continue;
                };
                let kick = CancellationToken::new();
                let clients = self.clients.clone();
                let mut client = Client::new(clients, remote, Transport::Udp, kick.clone(), None);
                let mut streams = None;
                self.hub.with(peer, now, |session| {
                    client.event(event, session, &mut streams, now);
                });
                let member = Member {
                    client,
                    kick,
                    streams,
                    unsealed: 0,
                };
                self.members.insert(peer, member);
                continue;
            }
            let Some(member) = self.members.get_mut(&peer) else {
                self.stranger(peer, &event);
                continue;
            };
            match &event {
                Event::Established(agreed) => {
                    member.streams = member.client.established(agreed, now);
                }
                other => member.client.note(other, self.hub.session(peer)),
            }
            if matches!(event, Event::Ended(_)) {
                if let Some(stats) = self.hub.session_stats(peer) {
                    let (streams, unsealed) = (member.streams.as_ref(), member.unsealed);
                    member.client.report(stats, streams, unsealed);
                }
                self.members.remove(&peer);
            }
        }
    }

    /// Handles the end of a session whose client never presented a valid certificate.
    fn stranger(&self, peer: PeerId, event: &Event) {
        match (self.hub.address(peer), event) {
            (Some(remote), _) => {
                let kick = CancellationToken::new();
                let clients = self.clients.clone();
                let mut client = Client::new(clients, remote, Transport::Udp, kick, None);
                client.note(event, self.hub.session(peer));
            }
            // An evicted session is removed at once, so its address is unknown.
            (None, Event::Ended(Ended::Evicted)) => {
                self.clients.metrics.handshake(Handshake::Evicted);
            }
            (None, _) => {}
        }
    }

    /// Decides about clients whose file has been read. Returns true after a decision.
    fn decide(&mut self, now: Moment, cx: &mut Context<'_>) -> bool {
        let mut has_decided = false;
        for (peer, member) in &mut self.members {
            let client = &mut member.client;
            if client.is_waiting() {
                self.hub
                    .with(*peer, now, |session| client.turn(session, cx));
                has_decided |= !client.is_waiting();
            }
        }
        has_decided
    }

    fn work(&mut self, now: Moment) {
        let mut close = Vec::new();
        for (peer, member) in &mut self.members {
            // The registry may have ended the client before the state of its flows existed, so `kick` is
            // checked for every client.
            let mut over = member.kick.is_cancelled();
            if let Some(streams) = &mut member.streams {
                streams.work(now, &mut drop);
                over |= streams.take_close();
            }
            if over {
                close.push(*peer);
            }
        }
        for peer in close {
            self.hub.with(peer, now, |session| session.close(now));
        }
    }

    /// Collects and sends packets. Returns true if there may be more to send now.
    fn send(&mut self, now: Moment, cx: &mut Context<'_>) -> bool {
        if self.socket.poll_flush(cx).is_pending() {
            // The timers of the flows run only in `poll_output`. Expired timers would end each wait at once.
            let members = self.members.values_mut();
            for streams in members.filter_map(|member| member.streams.as_mut()) {
                streams.poll_output(now, &mut |_| false);
            }
            return false;
        }
        loop {
            let start = self.socket.len();
            let Some(to) = self.hub.poll_output(now, self.socket.out()) else {
                break;
            };
            self.socket.cut(to, start);
        }
        let first = self.first.unwrap_or(PeerId(0));
        let order: Vec<PeerId> = self
            .members
            .range(first..)
            .chain(self.members.range(..first))
            .map(|(peer, _)| *peer)
            .collect();
        for peer in order {
            let Self {
                hub,
                members,
                socket,
                ..
            } = self;
            let Some(member) = members.get_mut(&peer) else {
                continue;
            };
            let Some(streams) = &mut member.streams else {
                continue;
            };
            let unsealed = &mut member.unsealed;
            streams.poll_output(now, &mut |packet| {
                let start = socket.len();
                if start >= OUT_BYTES {
                    return false;
                }
                match hub.seal(peer, packet, now, socket.out()) {
                    Ok(to) => socket.cut(to, start),
                    Err(_) => *unsealed += 1,
                }
                true
            });
            if self.socket.len() >= OUT_BYTES {
                // The next turn starts with the following client.
                self.first = Some(PeerId(peer.0 + 1));
                break;
            }
        }
        !self.socket.is_empty() && self.socket.poll_flush(cx).is_ready()
    }

    fn poll_wait(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let streams = || self.members.values().filter_map(|m| m.streams.as_ref());
        // Every mailbox is polled, because each has a waker of its own.
        if streams().filter(|s| s.poll_mail(cx).is_ready()).count() > 0 {
            return Poll::Ready(());
        }
        let timeouts = streams().filter_map(Streams::poll_timeout);
        let timeouts = timeouts.chain(self.hub.poll_timeout());
        self.clock.poll_until(timeouts, cx)
    }

    /// Returns the sender of a packet with another wrap, at most once in [`MISMATCH_PAUSE`].
    fn take_mismatched(&mut self, now: Moment) -> Option<SocketAddr> {
        let remote = self.hub.take_mismatched()?;
        let paused = |at| now < at + MISMATCH_PAUSE;
        if self.mismatch_logged.is_some_and(paused) {
            return None;
        }
        self.mismatch_logged = Some(now);
        Some(SocketAddr::new(remote.ip().to_canonical(), remote.port()))
    }

    fn report(&mut self) {
        for (peer, member) in &mut self.members {
            if let Some(stats) = self.hub.session_stats(*peer) {
                let (streams, unsealed) = (member.streams.as_ref(), member.unsealed);
                member.client.report(stats, streams, unsealed);
            }
        }
        if let Some(remote) = self.take_mismatched(now()) {
            info!(%remote, "OpenVPN packet dropped: first packet not readable: {WRAP_HINT}");
        }
        let growth = Growth::update(&mut self.reported, *self.hub.stats());
        self.clients.metrics.add_hub(&growth);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io;

    use culvert_openvpn::flows::Config;
    use tokio::io::Interest;
    use tokio::net::UdpSocket;

    use super::super::clients::tests::World;
    use super::super::listen::tests::server_config;
    use super::*;

    #[tokio::test]
    async fn packets_with_another_wrap_cause_one_line_in_a_minute() {
        let world = World::new(|_| {});
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let config = watch::Sender::new(Arc::new(server_config(Transport::Udp))).subscribe();
        let mut udp = Udp::new(
            Datagrams::new(socket).unwrap(),
            config,
            world.clients.clone(),
            10,
        );
        let start = now();
        let mut lines = Vec::new();
        for second in 0..120_u16 {
            // The header of a RESET, and an impossible number of acknowledgements.
            let mut packet = [&[7 << 3][..], &[1; 8], &[196]].concat();
            let from = SocketAddr::from(([192, 0, 2, 1], second));
            let at = start + Duration::from_secs(second.into());
            udp.hub.input(from, &mut packet, at, &mut |_, _| {});
            lines.extend(udp.take_mismatched(at));
        }
        let expected = [0, 60].map(|port| SocketAddr::from(([192, 0, 2, 1], port)));
        assert_eq!(lines, expected);
    }

    #[tokio::test(start_paused = true)]
    async fn socket_that_is_not_writable_lets_the_task_sleep() {
        let world = World::new(|_| {});
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let remote = socket.local_addr().unwrap();
        // tokio regards the socket as not writable until the kernel reports a change.
        socket.writable().await.unwrap();
        let blocked = || Err::<(), _>(io::Error::from(io::ErrorKind::WouldBlock));
        assert!(socket.try_io(Interest::WRITABLE, blocked).is_err());
        let config = watch::Sender::new(Arc::new(server_config(Transport::Udp))).subscribe();
        let (clients, kick) = (world.clients.clone(), CancellationToken::new());
        let mut udp = Udp::new(Datagrams::new(socket).unwrap(), config, clients.clone(), 10);
        udp.socket.out().extend_from_slice(b"x");
        udp.socket.cut(remote, 0);
        let streams = Streams::new(Config::default(), now());
        let peer = streams.peer();
        let member = Member {
            client: Client::new(clients, remote, Transport::Udp, kick.clone(), None),
            kick,
            streams: Some(streams),
            unsealed: 0,
        };
        udp.members.insert(PeerId(0), member);
        let dial = async move {
            peer.dial("172.25.3.4:10250".parse().unwrap())
                .await
                .map(drop)
        };
        let dial = tokio::spawn(dial);
        tokio::task::yield_now().await;
        for _ in 0..3 {
            let turn = poll_fn(|cx| Poll::Ready(udp.poll_turn(cx))).await;
            assert!(turn.is_pending() && !udp.socket.is_empty());
            // The SYN is due again.
            tokio::time::advance(std::time::Duration::from_secs(2)).await;
        }
        assert!(!dial.is_finished());
    }
}
