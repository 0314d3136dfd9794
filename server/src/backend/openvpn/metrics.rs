//! Metrics of the OpenVPN tunnel. They exist only in a server with this tunnel.

use std::sync::Arc;

use culvert_host::label_values;
use culvert_host::telemetry::metrics::{Family, LabelSet as _, Registry};
use culvert_openvpn::{flows, forward, hub, session};
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

label_values! {
    /// Direction of a packet, as seen from the server.
    pub enum Direction("direction") {
        /// From clients.
        In = "in",
        /// To clients.
        Out = "out",
    }
}

label_values! {
    /// Reason for dropping a packet.
    pub enum Drop("reason") {
        /// Not a packet of the protocol, or of an unsupported kind.
        Malformed = "malformed",
        /// tls-auth or tls-crypt does not match.
        Wrap = "wrap_mismatch",
        /// Received before.
        Replayed = "replayed",
        /// Data packet with failed authentication.
        Forged = "not_authentic",
        /// For an unknown session or key.
        Unknown = "unknown_session",
        /// Compressed.
        Compressed = "compressed",
        /// The inner packet has wrong lengths, fields or checksums, or is a fragment.
        Inner = "bad_inner_packet",
        /// The source address is not the client's.
        Source = "bad_source",
        /// No client has the destination.
        NoRoute = "no_route",
        /// No rule allows the packet.
        Filtered = "filtered",
        /// A limit is reached: of connections, or of a link's queue.
        Full = "full",
        /// Not encrypted: the packet is too large, or no key is usable.
        Unsealed = "not_sealed",
    }
}

/// Metrics of the tunnel.
pub struct OpenvpnMetrics {
    /// Number of connected clients.
    pub clients: Gauge,
    handshakes: Family<Handshake, Counter>,
    renegotiations: Family<Renegotiation, Counter>,
    bytes: Family<Direction, Counter>,
    packets: Family<Direction, Counter>,
    dropped: Family<Drop, Counter>,
    /// Number of retransmitted segments of flows.
    pub retransmitted: Counter,
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
                "1 while Nodes can be watched; the last known ones stay in force otherwise.",
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
            clients: registry.gauge(
                "culvert_openvpn_clients",
                &[],
                "OpenVPN clients that are connected.",
            ),
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
            bytes: Family::new(
                registry,
                "culvert_openvpn_bytes_total",
                "Bytes of packets inside the OpenVPN tunnels, by direction.",
            )
            .at_zero(Direction::all()),
            packets: Family::new(
                registry,
                "culvert_openvpn_packets_total",
                "Packets inside the OpenVPN tunnels, by direction.",
            )
            .at_zero(Direction::all()),
            dropped: Family::new(
                registry,
                "culvert_openvpn_dropped_packets_total",
                "Packets of OpenVPN clients that were dropped, by reason.",
            )
            .at_zero(Drop::all()),
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

    /// Counts dropped packets.
    pub fn dropped(&self, why: Drop, count: u64) {
        if count > 0 {
            self.dropped.get(why).increment(count);
        }
    }

    /// Adds a session's counts since `before`.
    pub fn add_session(&self, before: &session::Stats, now: &session::Stats) {
        let count = |counter: &Counter, of: fn(&session::Stats) -> u64| {
            counter.increment(of(now).saturating_sub(of(before)));
        };
        count(self.packets.get(Direction::In), |s| s.packets_in);
        count(self.packets.get(Direction::Out), |s| s.packets_out);
        count(self.bytes.get(Direction::In), |s| s.bytes_in);
        count(self.bytes.get(Direction::Out), |s| s.bytes_out);
        count(self.renegotiations.get(Renegotiation::Done), |s| s.rekeys);
        count(self.renegotiations.get(Renegotiation::Failed), |s| {
            s.rekeys_failed
        });
        count(self.dropped.get(Drop::Malformed), |s| {
            s.malformed + s.unsupported
        });
        count(self.dropped.get(Drop::Wrap), |s| s.bad_wrap);
        count(self.dropped.get(Drop::Replayed), |s| {
            s.replayed_control + s.replayed_data + s.out_of_window
        });
        count(self.dropped.get(Drop::Forged), |s| s.bad_data);
        count(self.dropped.get(Drop::Unknown), |s| {
            s.wrong_session + s.wrong_key + s.unknown_key + s.after_end
        });
        count(self.dropped.get(Drop::Compressed), |s| s.compressed);
    }

    /// Adds the counts of a client's flows since `before`.
    pub fn add_flows(&self, before: &flows::Stats, now: &flows::Stats) {
        let since = |of: fn(&flows::Stats) -> u64| of(now).saturating_sub(of(before));
        self.dropped(
            Drop::Inner,
            since(|s| s.malformed + s.bad_checksum + s.fragments),
        );
        self.dropped(Drop::Full, since(|s| s.suppressed));
        self.retransmitted.increment(since(|s| s.retransmitted));
    }

    /// Adds the counts of forwarding between clients since `before`.
    pub fn add_forward(&self, before: &forward::Stats, now: &forward::Stats) {
        let since = |of: fn(&forward::Stats) -> u64| of(now).saturating_sub(of(before));
        self.dropped(
            Drop::Inner,
            since(|s| s.malformed + s.bad_checksum + s.fragments),
        );
        self.dropped(Drop::Source, since(|s| s.bad_source));
        self.dropped(Drop::NoRoute, since(|s| s.no_route + s.ttl_exceeded));
        self.dropped(Drop::Filtered, since(|s| s.filtered));
        self.dropped(
            Drop::Full,
            since(|s| s.table_full + s.ports_exhausted + s.evicted),
        );
    }

    /// Adds the counts of a UDP socket's packets without a session since `before`.
    pub fn add_hub(&self, before: &hub::HubStats, now: &hub::HubStats) {
        let since = |of: fn(&hub::HubStats) -> u64| of(now).saturating_sub(of(before));
        self.dropped(Drop::Malformed, since(|s| s.malformed));
        self.dropped(Drop::Unknown, since(|s| s.unknown + s.bad_cookies));
        self.dropped(Drop::Wrap, since(|s| s.bad_wrap));
        self.dropped(Drop::Full, since(|s| s.answers_dropped + s.full));
    }
}
