//! Metrics of the OpenVPN tunnel. They exist only in a server with this tunnel.

use std::sync::Arc;

use culvert_host::label_values;
use culvert_host::telemetry::metrics::{Family, LabelSet as _, Registry};
use culvert_openvpn::forward;
use culvert_openvpn::hub::HubStats;
use culvert_openvpn_io::metrics::{
    Counters, Direction, DropReason, Growth, Reasons, TrafficMetrics,
};
use metrics::{Counter, Gauge};

label_values! {
    /// Result of a client's attempt to connect.
    pub enum Handshake("outcome") {
        /// The client is connected.
        Established = "established",
        /// The client's or the server's certificate was not accepted, or TLS failed otherwise.
        Tls = "tls_failed",
        /// The server's configuration refused the client.
        Rejected = "rejected",
        /// Client and server have no common settings.
        NoAgreement = "no_agreement",
        /// The handshake timed out, or the client left.
        Unfinished = "unfinished",
        /// The peer does not use OpenVPN's protocol, or the wrapping of its packets is wrong.
        Protocol = "protocol_error",
        /// Displaced by another client because of a limit.
        Evicted = "evicted",
    }
}

label_values! {
    /// Result of a renegotiation.
    pub enum Renegotiation("outcome") {
        /// New keys are in use.
        Done = "done",
        /// The old keys stay in use.
        Failed = "failed",
    }
}

const FORWARD_REASONS: &Reasons<forward::Stats> = &[
    (DropReason::Inner, |s| {
        s.malformed + s.bad_checksum + s.fragments
    }),
    (DropReason::Source, |s| s.bad_source),
    (DropReason::NoRoute, |s| s.no_route + s.ttl_exceeded),
    (DropReason::Filtered, |s| s.filtered),
    (DropReason::Full, |s| {
        s.table_full + s.ports_exhausted + s.evicted
    }),
];

const HUB_REASONS: &Reasons<HubStats> = &[
    (DropReason::Malformed, |s| s.malformed),
    (DropReason::Unknown, |s| s.unknown + s.bad_cookies),
    (DropReason::Wrap, |s| s.bad_wrap),
    (DropReason::Full, |s| {
        s.answers_dropped + s.starts_dropped + s.full
    }),
];

/// Metrics of the tunnel.
pub struct OpenvpnMetrics {
    /// Number of connected clients.
    pub clients: Gauge,
    /// Traffic and dropped packets.
    pub traffic: TrafficMetrics,
    handshakes: Family<Handshake, Counter>,
    renegotiations: Family<Renegotiation, Counter>,
    packets: Family<Direction, Counter>,
    retransmitted: Counter,
}

/// Metrics of the Node watch; only in a server that watches Nodes.
#[derive(Clone)]
pub struct NodeMetrics {
    /// 1 while the Kubernetes API answers.
    pub watch_up: Gauge,
    /// Number of nodes with translated addresses.
    pub nodes: Gauge,
}

impl NodeMetrics {
    /// Registers the metrics.
    pub fn new(registry: &Arc<Registry>) -> Self {
        Self {
            watch_up: registry.gauge(
                "culvert_openvpn_node_watch_up",
                &[],
                "1 while Nodes can be watched, 0 while the last known Nodes are used.",
            ),
            nodes: registry.gauge(
                "culvert_openvpn_nodes",
                &[],
                "Nodes whose ExternalIPs and names are known.",
            ),
        }
    }
}

impl OpenvpnMetrics {
    /// Registers the metrics.
    pub fn new(registry: &Arc<Registry>) -> Self {
        Self {
            clients: registry.gauge("culvert_openvpn_clients", &[], "Connected OpenVPN clients."),
            traffic: TrafficMetrics::new(registry, "culvert_openvpn_"),
            handshakes: Family::new(
                registry,
                "culvert_openvpn_handshakes_total",
                "Attempts of OpenVPN clients to connect, by outcome.",
            )
            .at_zero(Handshake::all()),
            renegotiations: Family::new(
                registry,
                "culvert_openvpn_renegotiations_total",
                "Renegotiations of keys with OpenVPN clients, by outcome.",
            )
            .at_zero(Renegotiation::all()),
            packets: Family::new(
                registry,
                "culvert_openvpn_packets_total",
                "Packets inside the OpenVPN tunnels, by direction.",
            )
            .at_zero(Direction::all()),
            retransmitted: registry.counter(
                "culvert_openvpn_retransmitted_segments_total",
                &[],
                "TCP segments that were sent again inside the OpenVPN tunnels.",
            ),
        }
    }

    /// Counts a finished handshake.
    pub fn handshake(&self, outcome: Handshake) {
        self.handshakes.get(outcome).increment(1);
    }

    /// Adds the counts of one client.
    pub fn add_client(&self, growth: &Growth<Counters>) {
        self.traffic.add(growth);
        let add = |counter: &Counter, value| counter.increment(growth.of(value));
        add(self.packets.get(Direction::In), |c| c.session.packets_in);
        add(self.packets.get(Direction::Out), |c| c.session.packets_out);
        let renegotiations = &self.renegotiations;
        add(renegotiations.get(Renegotiation::Done), |c| {
            c.session.rekeys
        });
        add(renegotiations.get(Renegotiation::Failed), |c| {
            c.session.rekeys_failed
        });
        add(&self.retransmitted, |c| c.flows.retransmitted);
    }

    /// Adds the packets that were dropped between clients.
    pub fn add_forward(&self, growth: &Growth<forward::Stats>) {
        self.traffic.add_dropped(growth, FORWARD_REASONS);
    }

    /// Adds the dropped packets of a UDP socket that belong to no session.
    pub fn add_hub(&self, growth: &Growth<HubStats>) {
        self.traffic.add_dropped(growth, HUB_REASONS);
    }
}
