//! The server's decisions for one client, whichever transport it came by.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use culvert_openvpn::flows::{self, Input, Pace};
use culvert_openvpn::options::Transport;
use culvert_openvpn::session::{
    Authenticated, Ended, Established, Event, NotPushable, Push, ServerConfig, Session, Stats,
};
use culvert_openvpn_io::Moment;
use culvert_openvpn_io::link::Role;
use culvert_openvpn_io::streams::Streams;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::CONNECT_TIMEOUT;
use super::clients::{Admission, Clients};
use super::half_open::HalfOpen;
use super::metrics::{Drop as Dropped, Handshake};

/// What is decided about a client, as its transport carries it out.
pub enum Decision {
    /// It is let in and told this.
    Accept(Push),
    /// It is not, and told why.
    Reject(String),
}

/// See the module.
pub struct Client {
    clients: Arc<Clients>,
    remote: SocketAddr,
    transport: Transport,
    kick: CancellationToken,
    /// Its place among those who are not in yet.
    half_open: Option<HalfOpen>,
    admission: Option<Admission>,
    established: bool,
    /// Why it is not let in was told where that was decided.
    refused: bool,
    /// The session's settings over TCP, as they change with the certificates.
    config: Option<watch::Receiver<Arc<ServerConfig>>>,
    session: Stats,
    flows: flows::Stats,
    unsealed: u64,
}

impl Client {
    /// A client of which nothing is known but where it comes from. `kick` ends it.
    pub fn new(
        clients: Arc<Clients>,
        remote: SocketAddr,
        transport: Transport,
        kick: CancellationToken,
        half_open: Option<HalfOpen>,
    ) -> Self {
        // A listener of both families gives IPv4 clients addresses of IPv6.
        let remote = SocketAddr::new(remote.ip().to_canonical(), remote.port());
        Self {
            clients,
            remote,
            transport,
            kick,
            half_open,
            admission: None,
            established: false,
            refused: false,
            config: None,
            session: Stats::default(),
            flows: flows::Stats::default(),
            unsealed: 0,
        }
    }

    /// Gives its session other certificates when there are any.
    pub fn following(mut self, config: watch::Receiver<Arc<ServerConfig>>) -> Self {
        self.config = Some(config);
        self
    }

    /// Who is it, for the log.
    pub fn name(&self) -> &str {
        self.admission.as_ref().map_or("?", |known| &known.name)
    }

    /// Its certificate is good: may it come in?
    pub fn decide(&mut self, client: &Authenticated) -> Decision {
        let kick = self.kick.clone();
        let admitted = self
            .clients
            .admit(client, self.remote, self.transport, kick);
        match admitted {
            Ok(admission) => {
                let options = admission.push.clone();
                self.admission = Some(admission);
                Decision::Accept(Push { options })
            }
            Err(refused) => {
                warn!(
                    client = client.identity.common_name,
                    remote = %self.remote,
                    "OpenVPN client refused: {}",
                    refused.reason
                );
                self.refused = true;
                Decision::Reject(refused.told)
            }
        }
    }

    /// It was to be let in, but can not be told what it needs.
    pub fn not_pushable(&mut self, error: &NotPushable) {
        self.refused = true;
        warn!(
            client = self.name(),
            remote = %self.remote,
            "OpenVPN client refused: {error}; look at --openvpn-push and the client's file"
        );
    }

    /// It is connected.
    pub fn established(&mut self, agreed: &Established, now: Moment) -> Option<Streams> {
        let admission = self.admission.as_ref()?;
        self.half_open = None;
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
            ..flows::Config::for_mtu(agreed.tun_mtu)
        }
    }

    /// A session's other events.
    pub fn note(&mut self, event: &Event) {
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
        let remote = self.remote;
        if self.established {
            info!(client = self.name(), %remote, reason = %ended, "OpenVPN client disconnected");
            return;
        }
        let outcome = match ended {
            Ended::Tls(_) => Handshake::Tls,
            Ended::Rejected(_) => Handshake::Rejected,
            Ended::Negotiation(_) => Handshake::NoAgreement,
            Ended::Protocol(_) => Handshake::Protocol,
            Ended::Evicted => Handshake::Evicted,
            Ended::Closed if self.is_displaced() => Handshake::Evicted,
            _ => Handshake::Unfinished,
        };
        self.failed(outcome, &ended.to_string());
    }

    /// Whether its place among those who are not in yet went to another one.
    fn is_displaced(&self) -> bool {
        self.half_open.as_ref().is_some_and(HalfOpen::is_displaced)
    }

    /// It did not get in.
    pub fn failed(&mut self, outcome: Handshake, why: &str) {
        // Told and counted once.
        self.established = true;
        self.clients.metrics.handshake(outcome);
        let (client, remote) = (self.name(), self.remote);
        match outcome {
            // Port checks of load balancers do nothing else.
            Handshake::Unfinished | Handshake::Evicted => {
                debug!(client, %remote, "OpenVPN handshake did not finish: {why}");
            }
            Handshake::Rejected if self.refused => debug!(client, %remote, "OpenVPN: {why}"),
            _ => warn!(client, %remote, "OpenVPN handshake failed: {why}"),
        }
    }

    /// Whether it never got in, and nobody has said why yet.
    pub fn is_untold(&self) -> bool {
        !self.established
    }

    /// A packet out of its tunnel.
    pub fn inner(&mut self, packet: &[u8], streams: &mut Streams, now: Moment) {
        let Some(admission) = &self.admission else {
            return;
        };
        let Some((source, destination)) = addresses(packet) else {
            return;
        };
        let local = destination == self.clients.server() && admission.permits(source);
        if local {
            match streams.input(packet, now) {
                Input::Taken | Input::Dropped => return,
                Input::Unknown => {}
            }
            if streams.flows().echo(packet, now) {
                return;
            }
        }
        if self.clients.forward(admission.id, packet, now) {
            streams.flows().reject(packet, now);
        }
    }

    /// Counts what happened since the last time.
    pub fn count(&mut self, session: &Stats, streams: Option<&Streams>, unsealed: u64) {
        let metrics = &self.clients.metrics;
        metrics.add_session(&self.session, session);
        self.session = *session;
        if let Some(streams) = streams {
            let flows = streams.stats();
            metrics.add_flows(&self.flows, &flows);
            self.flows = flows;
        }
        metrics.dropped(Dropped::Unsealed, unsealed.saturating_sub(self.unsealed));
        self.unsealed = unsealed;
        self.clients.report();
    }
}

/// Source and destination, unchecked.
fn addresses(packet: &[u8]) -> Option<(Ipv4Addr, Ipv4Addr)> {
    let (source, destination) = packet.get(12..20)?.split_first_chunk::<4>()?;
    let destination: [u8; 4] = destination.try_into().ok()?;
    Some((Ipv4Addr::from(*source), Ipv4Addr::from(destination)))
}

impl Role for Client {
    fn event(
        &mut self,
        event: Event,
        session: &mut Session,
        streams: &mut Option<Streams>,
        now: Moment,
    ) {
        match &event {
            Event::Authenticated(client) => match self.decide(client) {
                Decision::Accept(push) => {
                    if let Err(error) = session.accept(push, now) {
                        self.not_pushable(&error);
                        session.reject("", now);
                    }
                }
                Decision::Reject(told) => session.reject(&told, now),
            },
            Event::Established(agreed) => *streams = self.established(agreed, now),
            other => self.note(other),
        }
    }

    fn turn(&mut self, session: &mut Session) {
        if let Some(config) = &mut self.config
            && config.has_changed().unwrap_or(false)
        {
            session.set_config(config.borrow_and_update().clone());
        }
    }

    fn packet(&mut self, packet: &[u8], streams: &mut Streams, now: Moment) {
        self.inner(packet, streams, now);
    }

    fn report(&mut self, session: &Stats, streams: Option<&Streams>, dropped: u64) {
        self.count(session, streams, dropped);
    }
}
