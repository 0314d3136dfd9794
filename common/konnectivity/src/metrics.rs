//! The metrics of packet streams and connections, shared by the server and the agent.

use std::sync::Arc;

use culvert_host::label_values;
use culvert_host::telemetry::metrics::{Family, LabelSet, Registry, closed_connections};
use culvert_proto::PacketType;
use culvert_stream::CloseReason;
use metrics::{Counter, Gauge};
use tonic::Code;
use tracing::trace;

use crate::message::Message;

label_values! {
    /// One of the four directed parts of a tunnel, as seen from the server in the middle.
    pub enum Segment("segment") {
        /// Packets from the client (kube-apiserver) to the server.
        FromClient = "from_client",
        /// Packets from the server to the client.
        ToClient = "to_client",
        /// Packets from the agent to the server.
        FromAgent = "from_agent",
        /// Packets from the server to the agent.
        ToAgent = "to_agent",
    }
}

label_values! {
    /// Direction of payload, as seen from the client.
    pub enum Direction("direction") {
        /// From the client toward the endpoint that the agent dialed.
        ToEndpoint = "to_endpoint",
        /// From the endpoint toward the client.
        FromEndpoint = "from_endpoint",
    }
}

const PACKET_TYPES: [PacketType; 7] = [
    PacketType::DialReq,
    PacketType::DialRsp,
    PacketType::CloseReq,
    PacketType::CloseRsp,
    PacketType::Data,
    PacketType::DialCls,
    PacketType::Drain,
];

/// Names of a program's two stream families.
#[derive(Clone, Copy, Debug)]
pub struct StreamNames {
    /// Name of the packet counter.
    pub packets: &'static str,
    /// Name of the error counter.
    pub errors: &'static str,
}

/// Packets, stream errors, payload bytes and closed connections of one program.
pub struct StreamMetrics {
    registry: Arc<Registry>,
    errors: &'static str,
    packets: Family<(Segment, Kind), Counter>,
    bytes: Family<Direction, Counter>,
    /// Closed connections, by reason.
    pub closed: Family<CloseReason, Counter>,
    /// Bytes queued by connections beyond their own budgets.
    pub excess_bytes: Gauge,
}

// === impl StreamMetrics ===

impl StreamMetrics {
    /// Registers the families. `segments` lists the segments that this program uses; their packet counters
    /// appear on the page at 0.
    pub fn new(registry: &Arc<Registry>, names: StreamNames, segments: &[Segment]) -> Self {
        let members = <(Segment, Kind)>::all()
            .into_iter()
            .filter(|(segment, _)| segments.contains(segment));
        Self {
            registry: Arc::clone(registry),
            errors: names.errors,
            packets: Family::new(
                registry,
                names.packets,
                "Count of packets processed, by segment and packet type (example: from_client, DIAL_REQ)",
            )
            .at_zero(members),
            bytes: Family::new(
                registry,
                "culvert_tunnel_bytes_total",
                "Payload bytes carried for connections, by direction.",
            )
            .at_zero(Direction::all()),
            closed: closed_connections(registry),
            excess_bytes: registry.gauge(
                "culvert_excess_buffer_bytes",
                &[],
                "Bytes in use of --excess-buffer-bytes, by connections beyond their own buffers.",
            ),
        }
    }

    /// Returns the counter of one packet type on one segment.
    pub fn packets(&self, segment: Segment, packet_type: PacketType) -> &Counter {
        self.packets.get((segment, Kind(packet_type)))
    }

    /// Counts an event of the `native` transport as the packet that the `packet` transport would send. The
    /// `native` transport has no packets; dashboards keep working with these counts.
    pub fn count_as(&self, segment: Segment, packet_type: PacketType) {
        self.packets(segment, packet_type).increment(1);
    }

    /// Counts one packet on one segment, and logs the packet at trace level. A packet type that this version
    /// does not know is not counted.
    pub fn count(&self, segment: Segment, message: &Message) {
        if let Some(packet_type) = message.packet_type() {
            trace!(
                segment = segment.as_str(),
                packet = packet_type.as_str_name(),
                "packet"
            );
            self.packets(segment, packet_type).increment(1);
        }
    }

    /// Returns the counters of payload bytes to and from endpoints.
    pub fn both_directions(&self) -> [Counter; 2] {
        [Direction::ToEndpoint, Direction::FromEndpoint]
            .map(|direction| self.bytes.get(direction).clone())
    }

    /// Counts one gRPC stream error. `packet_type` is the type of the packet that could not be sent; `None`
    /// means a receive error. Each call looks up the series, because errors are rare.
    pub fn stream_error(&self, segment: Segment, code: Code, packet_type: Option<PacketType>) {
        let labels = [
            ("segment", segment.as_str()),
            ("code", grpc_code_name(code)),
            (
                "packet_type",
                packet_type.map_or("Unknown", |packet_type| packet_type.as_str_name()),
            ),
        ];
        self.registry
            .counter(
                self.errors,
                &labels,
                "Count of gRPC stream errors, by segment, grpc Code, packet type. (example: from_agent, Code.Unavailable, DIAL_RSP)",
            )
            .increment(1);
    }
}

/// Packet type as a label of the packet counter.
#[derive(Clone, Copy, Debug)]
struct Kind(PacketType);

impl LabelSet for Kind {
    fn all() -> Vec<Self> {
        PACKET_TYPES.map(Self).to_vec()
    }

    fn count() -> usize {
        PACKET_TYPES.len()
    }

    fn index(self) -> usize {
        self.0 as usize
    }

    fn labels(self) -> Vec<(&'static str, &'static str)> {
        vec![("packet_type", self.0.as_str_name())]
    }
}

/// Returns the name of a gRPC status code in Go, the value of the `code` label.
pub const fn grpc_code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "Canceled",
        Code::Unknown => "Unknown",
        Code::InvalidArgument => "InvalidArgument",
        Code::DeadlineExceeded => "DeadlineExceeded",
        Code::NotFound => "NotFound",
        Code::AlreadyExists => "AlreadyExists",
        Code::PermissionDenied => "PermissionDenied",
        Code::ResourceExhausted => "ResourceExhausted",
        Code::FailedPrecondition => "FailedPrecondition",
        Code::Aborted => "Aborted",
        Code::OutOfRange => "OutOfRange",
        Code::Unimplemented => "Unimplemented",
        Code::Internal => "Internal",
        Code::Unavailable => "Unavailable",
        Code::DataLoss => "DataLoss",
        Code::Unauthenticated => "Unauthenticated",
    }
}

#[cfg(test)]
mod tests;
