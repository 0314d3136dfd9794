//! The metrics that both ends of a tunnel have: traffic inside the tunnel, and dropped packets.

use std::mem;
use std::sync::Arc;

use culvert_host::label_values;
use culvert_host::telemetry::metrics::{Family, LabelSet as _, Registry};
use culvert_openvpn::{flows, session};
use metrics::Counter;

label_values! {
    /// Direction of a packet, as seen from this program.
    pub enum Direction("direction") {
        /// From the tunnel.
        In = "in",
        /// Into the tunnel.
        Out = "out",
    }
}

label_values! {
    /// Reason for dropping a packet.
    pub enum DropReason("reason") {
        /// Not a packet of the protocol, or of an unsupported kind.
        Malformed = "malformed",
        /// tls-auth or tls-crypt does not match.
        Wrap = "wrap_mismatch",
        /// Received before, or outside of the receive window.
        Replayed = "replayed",
        /// Data packet that failed authentication.
        Forged = "not_authentic",
        /// For an unknown session or key.
        Unknown = "unknown_session",
        /// Compressed; compression is not supported.
        Compressed = "compressed",
        /// The inner packet has wrong lengths, fields or checksums, or is a fragment.
        Inner = "bad_inner_packet",
        /// The source address is not the client's. Only servers check it.
        Source = "bad_source",
        /// No client has the destination. Only servers forward packets.
        NoRoute = "no_route",
        /// No rule allows the packet. Only servers have rules.
        Filtered = "filtered",
        /// A limit was reached, such as the number of connections or the length of a link's queue.
        Full = "full",
        /// Not encrypted: the packet is too large, or no key is usable.
        Unsealed = "not_sealed",
    }
}

/// Metrics of the traffic in the tunnels of one program.
pub struct TrafficMetrics {
    bytes: Family<Direction, Counter>,
    dropped: Family<DropReason, Counter>,
}

/// Counters and gauges of one session and its flows.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    /// Counters of the session.
    pub session: session::Stats,
    /// Counters of the flows.
    pub flows: flows::Stats,
    /// Number of inner packets that could not be encrypted.
    pub unsealed: u64,
}

/// Growth of a set of counters between two times.
pub struct Growth<T> {
    before: T,
    now: T,
}

/// The counters that add up to the dropped packets of each reason.
pub type Reasons<T> = [(DropReason, fn(&T) -> u64)];

const REASONS: &Reasons<Counters> = &[
    (DropReason::Malformed, |c| {
        c.session.malformed + c.session.unsupported
    }),
    (DropReason::Wrap, |c| c.session.bad_wrap),
    (DropReason::Replayed, |c| {
        c.session.replayed_control + c.session.replayed_data + c.session.out_of_window
    }),
    (DropReason::Forged, |c| c.session.bad_data),
    (DropReason::Unknown, |c| {
        let known = c.session.wrong_key + c.session.unknown_key;
        known + c.session.wrong_session + c.session.after_end
    }),
    (DropReason::Compressed, |c| c.session.compressed),
    (DropReason::Inner, |c| {
        c.flows.malformed + c.flows.bad_checksum + c.flows.fragments
    }),
    (DropReason::Full, |c| {
        c.flows.suppressed + c.flows.syns_dropped
    }),
    (DropReason::Unsealed, |c| c.unsealed),
];

impl TrafficMetrics {
    /// Registers the metrics. Their names begin with `prefix`, which ends with an underscore.
    pub fn new(registry: &Arc<Registry>, prefix: &str) -> Self {
        // The registry needs names that live as long as the program. A program registers them once.
        let name = |name: &str| -> &'static str { format!("{prefix}{name}").leak() };
        Self {
            bytes: Family::new(
                registry,
                name("bytes_total"),
                "Bytes of packets inside the OpenVPN tunnels, by direction.",
            )
            .at_zero(Direction::all()),
            dropped: Family::new(
                registry,
                name("dropped_packets_total"),
                "Packets of OpenVPN tunnels that were dropped, by reason.",
            )
            .at_zero(DropReason::all()),
        }
    }

    /// Counts a dropped packet.
    pub fn dropped(&self, reason: DropReason) {
        self.dropped.get(reason).increment(1);
    }

    /// Adds the growth of dropped packets.
    pub fn add_dropped<T>(&self, growth: &Growth<T>, reasons: &Reasons<T>) {
        for (reason, value) in reasons {
            self.dropped.get(*reason).increment(growth.of(*value));
        }
    }

    /// Adds the traffic and the dropped packets of one session and its flows.
    pub fn add(&self, growth: &Growth<Counters>) {
        let bytes = |direction, value| self.bytes.get(direction).increment(growth.of(value));
        bytes(Direction::In, |c| c.session.bytes_in);
        bytes(Direction::Out, |c| c.session.bytes_out);
        self.add_dropped(growth, REASONS);
    }
}

impl Counters {
    /// Updates the counters and returns their growth. If `flows` is `None`, the counters of the flows do not
    /// grow.
    pub fn update(
        &mut self,
        session: &session::Stats,
        flows: Option<flows::Stats>,
        unsealed: u64,
    ) -> Growth<Self> {
        let flows = flows.unwrap_or(self.flows);
        let session = *session;
        Growth::update(
            self,
            Self {
                session,
                flows,
                unsealed,
            },
        )
    }
}

impl<T: Copy> Growth<T> {
    /// Replaces old counters and returns their growth.
    pub fn update(counters: &mut T, now: T) -> Self {
        let before = mem::replace(counters, now);
        Self { before, now }
    }
}

impl<T> Growth<T> {
    /// Returns the growth of one counter, or of a sum of counters.
    pub fn of(&self, value: fn(&T) -> u64) -> u64 {
        value(&self.now).saturating_sub(value(&self.before))
    }
}
