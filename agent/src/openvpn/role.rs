//! The decisions of a client about its tunnel: when the tunnel is up, and where its packets go.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::task::Context;

use culvert_host::reload::Latest;
use culvert_openvpn::control::push;
use culvert_openvpn::flows::{self, Input, Pace, Refusal};
use culvert_openvpn::options::Transport;
use culvert_openvpn::session::{Established, Event, Session, Stats};
use culvert_openvpn::tls::ClientTls;
use culvert_openvpn_io::Moment;
use culvert_openvpn_io::link::Role;
use culvert_openvpn_io::metrics::Counters;
use culvert_openvpn_io::stream::Incoming;
use culvert_openvpn_io::streams::Streams;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::endpoint::Endpoint;
use super::metrics::Outcome;
use super::tunnel::Tunnel;
use super::udp::Datagrams;

/// Limit for the buffers of all flows together, in bytes. Agents run in small pods.
const BUFFER_BUDGET: usize = 64 << 20;

/// One session with one server.
pub(super) struct ClientRole {
    tunnel: Arc<Tunnel>,
    transport: Transport,
    tls: Latest<Arc<ClientTls>>,
    /// Fires when the tunnel ends.
    ended: CancellationToken,
    /// True once the tunnel has been established, and still true after the tunnel ends.
    pub(super) established: bool,
    counters: Counters,
    datagrams: Option<(Datagrams, Ipv4Addr)>,
}

impl ClientRole {
    pub(super) fn new(
        tunnel: Arc<Tunnel>,
        transport: Transport,
        tls: Latest<Arc<ClientTls>>,
    ) -> Self {
        let ended = tunnel.agent.shutdown.child_token();
        Self {
            tunnel,
            transport,
            tls,
            ended,
            established: false,
            counters: Counters::default(),
            datagrams: None,
        }
    }

    fn established(
        &mut self,
        established: &Established,
        session: &mut Session,
        streams: &mut Option<Streams>,
        now: Moment,
    ) {
        let server = established
            .identity
            .as_ref()
            .map_or("", |identity| identity.common_name.as_str());
        info!(
            server,
            cipher = %established.cipher,
            tls = established.tls,
            tls_exporter = established.exporter,
            mtu = established.tun_mtu,
            pushed = push::for_log(established.options.iter().map(String::as_str)),
            "the OpenVPN tunnel is up"
        );
        let pushed = established.push.as_ref();
        let Some(ifconfig) = pushed.and_then(|push| push.ifconfig) else {
            warn!("the OpenVPN server pushed no address (push \"ifconfig\"): closing the session");
            session.close(now);
            return;
        };
        if pushed.is_some_and(|push| push.compresses) {
            warn!(
                "the OpenVPN server pushes compression, and compressed packets are dropped: set \"compress stub-v2\" at the server, and push it"
            );
        }
        let config = flows::Config {
            address: ifconfig.local,
            buffer_budget: BUFFER_BUDGET,
            accept: true,
            pace: match (self.transport, established.ours) {
                (Transport::Tcp, _) => None,
                (Transport::Udp, false) => Some(Pace::default()),
                (Transport::Udp, true) => Some(Pace::to_own_server()),
            },
            ..flows::Config::for_tunnel(self.transport, established.tun_mtu)
        };
        let flows = Streams::new(config, now);
        let (tunnel, peer, mtu) = (self.tunnel.clone(), flows.peer(), established.tun_mtu);
        let datagrams = Datagrams::new(tunnel, peer, mtu, self.ended.clone());
        self.datagrams = Some((datagrams, ifconfig.local));
        *streams = Some(flows);
        self.established = true;
        self.tunnel.metrics.connect(Outcome::Established);
        self.tunnel.set_up(true);
    }
}

impl Role for ClientRole {
    fn event(
        &mut self,
        event: Event,
        session: &mut Session,
        streams: &mut Option<Streams>,
        now: Moment,
    ) {
        match event {
            Event::Established(established) => {
                self.established(&established, session, streams, now);
            }
            Event::Rekeyed { key_id } => debug!(key_id, "the OpenVPN tunnel has new keys"),
            Event::Notice(text) => info!(text, "notice from the OpenVPN server"),
            // `Authenticated` occurs only in the server role. The caller of `Link::run` logs `Ended`.
            Event::Authenticated(_) | Event::Ended(_) => {}
        }
    }

    fn turn(&mut self, session: &mut Session, _cx: &mut Context<'_>) {
        if let Some(newer) = self.tls.take_change() {
            session.set_authorities(&newer);
        }
    }

    fn packet(&mut self, packet: &[u8], streams: &mut Streams, now: Moment) {
        if streams.input(packet, now) != Input::Unknown || streams.flows().echo(packet, now) {
            return;
        }
        let datagrams = self.datagrams.as_mut();
        if !datagrams.is_some_and(|(datagrams, own)| datagrams.input(packet, *own)) {
            streams.flows().reject(packet, now);
        }
    }

    fn incoming(&mut self, incoming: Incoming) {
        let own = self.datagrams.as_ref().map(|(_, own)| own);
        if own == Some(incoming.destination.ip()) {
            // The client opens no port at its address, and a host of the cluster may have this address.
            return incoming.refuse(Refusal::Reset);
        }
        let endpoint = Endpoint {
            tunnel: self.tunnel.clone(),
            incoming,
            ended: self.ended.clone(),
        };
        self.tunnel.agent.tasks.spawn(endpoint.run());
    }

    fn report(&mut self, session: &Stats, streams: Option<&Streams>, dropped: u64) {
        let flows = streams.map(Streams::stats);
        let growth = self.counters.update(session, flows, dropped);
        self.tunnel.metrics.add(&growth);
    }
}

impl Drop for ClientRole {
    fn drop(&mut self) {
        self.ended.cancel();
        if self.established {
            self.tunnel.set_up(false);
        }
    }
}
