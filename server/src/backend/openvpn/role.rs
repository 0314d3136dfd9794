//! The server's decisions for one client, for both transports.

use std::net::{Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use culvert_host::net::admission::Candidate;
use culvert_openvpn::flows::{self, Input, Pace};
use culvert_openvpn::ip::{Icmp, Packet, kind, protocol};
use culvert_openvpn::options::Transport;
use culvert_openvpn::session::{
    Authenticated, Ended, Established, Event, Push, ServerConfig, Session, Stats,
};
use culvert_openvpn_io::link::Role;
use culvert_openvpn_io::metrics::Counters;
use culvert_openvpn_io::streams::Streams;
use culvert_openvpn_io::{Moment, now};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::CONNECT_TIMEOUT;
use super::ccd::ClientConfig;
use super::clients::{Admission, Clients};
use super::metrics::Handshake;

/// State of one client, from its first packet to its end.
pub(super) struct Client {
    clients: Arc<Clients>,
    remote: SocketAddr,
    transport: Transport,
    kick: CancellationToken,
    /// Slot among the half-open connections.
    candidate: Option<Arc<Candidate>>,
    /// Client with a valid certificate whose file is not read yet.
    waiting: Option<Waiting>,
    /// Common name of the verified certificate, before admission.
    common_name: Option<String>,
    admission: Option<Admission>,
    established: bool,
    /// Set when the reason of a refusal was already logged.
    refused: bool,
    /// Session settings over TCP, which change when certificates are renewed.
    config: Option<watch::Receiver<Arc<ServerConfig>>>,
    counters: Counters,
}

/// A client, and the read of its file.
struct Waiting {
    client: Box<Authenticated>,
    file: Pin<Box<dyn Future<Output = ClientFile> + Send>>,
}

type ClientFile = Result<Option<ClientConfig>, String>;

impl Client {
    /// Creates the state of a client that has not authenticated. The registry fires `kick` to end the client.
    pub(super) fn new(
        clients: Arc<Clients>,
        remote: SocketAddr,
        transport: Transport,
        kick: CancellationToken,
        candidate: Option<Arc<Candidate>>,
    ) -> Self {
        // A dual-stack listener reports IPv4 clients with mapped IPv6 addresses.
        let remote = SocketAddr::new(remote.ip().to_canonical(), remote.port());
        Self {
            clients,
            remote,
            transport,
            kick,
            candidate,
            waiting: None,
            common_name: None,
            admission: None,
            established: false,
            refused: false,
            config: None,
            counters: Counters::default(),
        }
    }

    /// Lets the session use renewed certificates from `config`.
    pub(super) fn following(mut self, config: watch::Receiver<Arc<ServerConfig>>) -> Self {
        self.config = Some(config);
        self
    }

    /// Returns the client's name for logs; "?" before its certificate is verified.
    pub(super) fn name(&self) -> &str {
        let admitted = self.admission.as_ref().map(|known| known.name.as_str());
        admitted.or(self.common_name.as_deref()).unwrap_or("?")
    }

    /// Admits or refuses a client with a valid certificate.
    fn decide(&mut self, client: &Authenticated, file: ClientFile, session: &mut Session) {
        let (remote, kick, now) = (self.remote, self.kick.clone(), now());
        match self
            .clients
            .admit(client, file, remote, self.transport, kick)
        {
            Ok(admission) => {
                let options = admission.push.clone();
                self.admission = Some(admission);
                if let Err(error) = session.accept(Push { options }, now) {
                    self.refused = true;
                    warn!(
                        client = self.name(),
                        %remote,
                        "OpenVPN client refused: {error}; check --openvpn-push and the client's file"
                    );
                    session.reject("", now);
                }
            }
            Err(refused) => {
                warn!(
                    client = client.identity.common_name,
                    %remote,
                    "OpenVPN client refused: {}",
                    refused.reason
                );
                self.refused = true;
                session.reject(&refused.told, now);
            }
        }
    }

    /// Marks the client as connected and creates the state of its flows.
    pub(super) fn established(&mut self, agreed: &Established, now: Moment) -> Option<Streams> {
        let admission = self.admission.as_ref()?;
        if let Some(candidate) = self.candidate.take() {
            candidate.admit();
        }
        self.established = true;
        self.clients.metrics.handshake(Handshake::Established);
        let streams = Streams::new(self.flow_config(agreed), now);
        admission.connected(streams.peer());
        info!(
            client = admission.name,
            remote = %self.remote,
            address = %admission.address,
            cipher = agreed.cipher.name(),
            keys = if agreed.exporter { "exporter" } else { "PRF" },
            tls = agreed.tls,
            networks = ?admission.iroutes,
            "OpenVPN client connected"
        );
        Some(streams)
    }

    fn flow_config(&self, agreed: &Established) -> flows::Config {
        flows::Config {
            address: self.clients.server(),
            connect_timeout: CONNECT_TIMEOUT,
            pace: match (self.transport, agreed.ours) {
                (Transport::Tcp, _) => None,
                (Transport::Udp, false) => Some(Pace::default()),
                (Transport::Udp, true) => Some(Pace::to_own_client()),
            },
            ..flows::Config::for_tunnel(self.transport, agreed.tun_mtu)
        }
    }

    /// Handles the other events of a session. `session` is `None` for a session that was removed already.
    pub(super) fn note(&mut self, event: &Event, session: Option<&Session>) {
        if self.admission.is_none() {
            let identity = session.and_then(Session::identity);
            self.common_name = identity.map(|identity| identity.common_name);
        }
        match event {
            Event::Rekeyed { key_id } => {
                debug!(client = self.name(), key_id, "OpenVPN keys renewed");
            }
            Event::Notice(text) => info!(client = self.name(), "OpenVPN: {text}"),
            Event::Ended(ended) => self.ended(ended),
            Event::Authenticated(_) | Event::Established(_) => {}
        }
    }

    fn ended(&mut self, ended: &Ended) {
        // A client that has left must not be admitted: it would replace another client of its name.
        self.waiting = None;
        let remote = self.remote;
        if self.established {
            let client = self.name();
            if ended.is_failure() {
                warn!(client, %remote, reason = %ended, "OpenVPN client disconnected");
            } else {
                info!(client, %remote, reason = %ended, "OpenVPN client disconnected");
            }
            return;
        }
        let outcome = match ended {
            Ended::Tls(_) => Handshake::Tls,
            Ended::Rejected(_) | Ended::NoSharedCipher { .. } => Handshake::Rejected,
            Ended::Negotiation(_) => Handshake::NoAgreement,
            Ended::Protocol(_) => Handshake::Protocol,
            Ended::Evicted => Handshake::Evicted,
            Ended::Closed if self.is_displaced() => Handshake::Evicted,
            _ => Handshake::Unfinished,
        };
        let advice = match ended {
            Ended::NoSharedCipher { .. } => {
                "; add a cipher of the client to --openvpn-data-ciphers, or an allowed cipher to the client's data-ciphers"
            }
            _ => "",
        };
        self.failed(outcome, &format!("{ended}{advice}"));
    }

    /// Returns true if another connection has displaced this half-open connection.
    fn is_displaced(&self) -> bool {
        let candidate = self.candidate.as_ref();
        candidate.is_some_and(|candidate| candidate.is_displaced())
    }

    /// Logs and counts a failed handshake.
    pub(super) fn failed(&mut self, outcome: Handshake, why: &str) {
        // Prevents a second log line and count.
        self.established = true;
        self.clients.metrics.handshake(outcome);
        let (client, remote) = (self.name(), self.remote);
        match outcome {
            // Port checks of load balancers end like this.
            Handshake::Unfinished | Handshake::Evicted => {
                debug!(client, %remote, "OpenVPN handshake did not finish: {why}");
            }
            Handshake::Rejected if self.refused => debug!(client, %remote, "OpenVPN: {why}"),
            _ => warn!(client, %remote, "OpenVPN handshake failed: {why}"),
        }
    }

    /// Returns true if the client waits for the read of its file.
    pub(super) fn is_waiting(&self) -> bool {
        self.waiting.is_some()
    }

    /// Returns true if the client never connected and no failure was logged yet.
    pub(super) fn is_untold(&self) -> bool {
        !self.established
    }
}

/// Returns source and destination of a packet that is not validated yet.
fn addresses(packet: &[u8]) -> Option<(Ipv4Addr, Ipv4Addr)> {
    let (source, destination) = packet.get(12..20)?.split_first_chunk::<4>()?;
    let destination: [u8; 4] = destination.try_into().ok()?;
    Some((Ipv4Addr::from(*source), Ipv4Addr::from(destination)))
}

/// Returns true for an ICMP error about a packet that did not reach its destination. Any router behind the client may
/// send such an error, also a router outside the client's networks; the flows check the quoted packet.
fn is_unreachable(packet: &[u8]) -> bool {
    Packet::parse(packet).is_ok_and(|packet| {
        packet.protocol() == protocol::ICMP
            && Icmp::parse(&packet).is_ok_and(|icmp| icmp.kind() == kind::UNREACHABLE)
    })
}

impl Role for Client {
    fn event(
        &mut self,
        event: Event,
        session: &mut Session,
        streams: &mut Option<Streams>,
        now: Moment,
    ) {
        match event {
            Event::Authenticated(client) => {
                let file = self
                    .clients
                    .clone()
                    .file(client.identity.common_name.clone());
                let file = Box::pin(file);
                self.waiting = Some(Waiting { client, file });
            }
            Event::Established(agreed) => *streams = self.established(&agreed, now),
            other => self.note(&other, Some(session)),
        }
    }

    fn turn(&mut self, session: &mut Session, cx: &mut Context<'_>) {
        if session.is_ended() {
            self.waiting = None;
        }
        if let Some(waiting) = &mut self.waiting
            && let Poll::Ready(file) = waiting.file.as_mut().poll(cx)
            && let Some(Waiting { client, .. }) = self.waiting.take()
        {
            self.decide(&client, file, session);
        }
        if let Some(config) = &mut self.config
            && config.has_changed().unwrap_or(false)
        {
            session.set_config(config.borrow_and_update().clone());
        }
    }

    fn packet(&mut self, packet: &[u8], streams: &mut Streams, now: Moment) {
        let Some(admission) = &self.admission else {
            return;
        };
        let Some((source, destination)) = addresses(packet) else {
            return;
        };
        let to_server = destination == self.clients.server();
        let is_permitted = admission.permits(source);
        if to_server
            && (is_permitted || is_unreachable(packet))
            && streams.input(packet, now) != Input::Unknown
        {
            return;
        }
        if to_server
            && is_permitted
            && (streams.flows().echo(packet, now) || admission.silence.input(packet))
        {
            return;
        }
        if self.clients.forward(admission.id, packet, now) {
            streams.flows().reject(packet, now);
        }
    }

    fn report(&mut self, session: &Stats, streams: Option<&Streams>, unsealed: u64) {
        let flows = streams.map(Streams::stats);
        let growth = self.counters.update(session, flows, unsealed);
        self.clients.metrics.add_client(&growth);
        self.clients.report();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]

    use std::future::poll_fn;

    use culvert_openvpn::flows::{Closed, Unreachable};
    use culvert_openvpn::ip::{self, Sum};
    use culvert_openvpn_io::stream::Broken;

    use super::super::clients::tests::{World, authenticated};
    use super::super::listen::tests::server_config;
    use super::*;

    /// Returns an ICMP message to the server: type and code, 4 more bytes of the header, and a body.
    fn icmp(from: [u8; 4], kind_and_code: [u8; 2], rest: [u8; 4], body: &[u8]) -> Vec<u8> {
        let mut message = [&kind_and_code[..], &[0, 0], &rest, body].concat();
        let sum = Sum::of(&message).checksum().to_be_bytes();
        message.splice(2..4, sum);
        let (from, server) = (from.into(), [10, 20, 0, 1].into());
        let mut packet = Vec::new();
        ip::write_header(&mut packet, from, server, protocol::ICMP, message.len());
        packet.extend(message);
        packet
    }

    fn sent(streams: &mut Streams) -> Vec<Vec<u8>> {
        let mut packets = Vec::new();
        streams.work(now(), &mut drop);
        streams.poll_output(now(), &mut |packet| {
            packets.push(packet.to_vec());
            true
        });
        packets
    }

    #[tokio::test]
    async fn client_is_admitted_once_its_file_is_read() {
        let world = World::new(|_| {});
        world.file("user", "iroute 172.25.0.0 255.255.0.0\n");
        let remote = "192.0.2.1:1000".parse().unwrap();
        let (clients, kick) = (world.clients.clone(), CancellationToken::new());
        let mut client = Client::new(clients, remote, Transport::Tcp, kick, None);
        let config = server_config(Transport::Tcp);
        let mut session = Session::server(Arc::new(config), 0, now());
        let event = Event::Authenticated(Box::new(authenticated("user", "")));
        client.event(event, &mut session, &mut None, now());
        // The event reads no file: the read may hang.
        assert!(client.is_waiting() && client.admission.is_none());
        poll_fn(|cx| {
            client.turn(&mut session, cx);
            match client.is_waiting() {
                true => Poll::Pending,
                false => Poll::Ready(()),
            }
        })
        .await;
        let admission = client.admission.unwrap();
        assert_eq!(admission.iroutes[0].to_string(), "172.25.0.0/16");
    }

    /// The address of a router between the client and the target is neither the client's own nor in its networks.
    #[tokio::test]
    async fn errors_of_any_router_reach_the_flow_that_they_quote() {
        let world = World::new(|_| {});
        world.file("user", "iroute 172.25.0.0 255.255.0.0\n");
        let (admission, kick) = world.admit("user").unwrap();
        let remote = "192.0.2.1:1000".parse().unwrap();
        let clients = world.clients.clone();
        let mut client = Client::new(clients, remote, Transport::Udp, kick, None);
        let mut streams = Streams::new(flows::Config::default(), now());
        admission.connected(streams.peer());
        client.admission = Some(admission);
        sent(&mut streams);

        let peer = streams.peer();
        let dial = async move { peer.dial("172.25.3.4:10250".parse().unwrap()).await };
        let dial = tokio::spawn(dial);
        tokio::task::yield_now().await;
        let syn = sent(&mut streams).remove(0);
        let router = [198, 51, 100, 1];
        let mut other_flow = syn.clone();
        other_flow[21] ^= 1;
        for (kind_and_code, quoted) in [
            ([kind::UNREACHABLE, 1], &other_flow),
            ([kind::ECHO, 0], &syn),
        ] {
            let message = icmp(router, kind_and_code, [0; 4], quoted);
            client.packet(&message, &mut streams, now());
        }
        assert_eq!(world.bad_sources(), 2);
        assert!(sent(&mut streams).is_empty() && !dial.is_finished());
        let error = icmp(router, [kind::UNREACHABLE, 1], [0; 4], &syn[..28]);
        client.packet(&error, &mut streams, now());
        assert_eq!(world.bad_sources(), 2);
        sent(&mut streams);
        let Err(broken) = dial.await.unwrap() else {
            panic!("the dial succeeded");
        };
        let expected = Broken::Flow(Closed::Unreachable(Unreachable::Host));
        assert_eq!(broken, expected);
    }
}
