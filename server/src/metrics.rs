//! The server's metrics: upstream's names, labels, buckets and HELP texts, plus our own families
//! under the prefix `culvert_`.
//!
//! A series that upstream creates at its first use is created then here too where upstream's tests
//! compare the family sample by sample: extra zeros would fail them. All others start at 0, so
//! that alerts on `== 0` and rates over the first event work.

use std::sync::Arc;

use culvert_host::label_values;
use culvert_host::telemetry::metrics::{
    Family, LabelSet, MetricsError, Registry, register_build_info,
};
use culvert_konnectivity::metrics::StreamNames;
use culvert_konnectivity::metrics::{Segment, StreamMetrics};
use metrics::{Counter, Gauge, Histogram};

use crate::backend::tunnel::Kind;
use crate::router::DialOutcome;
use crate::switch::Mode;

/// Upper bounds of dial and write latencies, in seconds (upstream `pkg/server/metrics`).
const LATENCY_BUCKETS: [f64; 9] = [
    0.000_001, 0.000_01, 0.0001, 0.005, 0.025, 0.1, 0.5, 2.5, 12.5,
];

/// Upper bounds of connection lifetimes, in seconds: 1 s to 24 h (upstream pull request 899).
const CONNECTION_BUCKETS: [f64; 12] = [
    1.0, 5.0, 15.0, 30.0, 60.0, 300.0, 900.0, 1800.0, 3600.0, 14_400.0, 43_200.0, 86_400.0,
];

/// Upper bounds of the time that a switch of tunnels takes, in seconds: 1 s to 1 h.
const SWITCH_BUCKETS: [f64; 9] = [1.0, 5.0, 15.0, 30.0, 60.0, 300.0, 600.0, 1800.0, 3600.0];

const SWITCH_DURATION: &str = "culvert_tunnel_switch_duration_seconds";

macro_rules! name {
    ($name:literal) => {
        concat!("konnectivity_network_proxy_server_", $name)
    };
}

label_values! {
    /// The gRPC method that a stream came in by.
    pub enum ServiceMethod("service_method") {
        /// `ProxyService/Proxy`: front ends.
        Proxy = "Proxy",
        /// `AgentService/Connect`: agents.
        Connect = "Connect",
    }
}

label_values! {
    /// How a backend is chosen.
    pub enum Strategy("proxy_strategy") {
        /// Any agent.
        Default = "default",
        /// The agent that registered the destination host.
        DestHost = "destHost",
        /// An agent that registered itself as default route.
        DefaultRoute = "defaultRoute",
    }
}

label_values! {
    /// Why a dial failed. One dial may count more than once.
    pub enum DialFailureReason("reason") {
        /// No agent is connected that could serve the dial.
        NoAgent = "no_agent",
        /// The agent reported an error.
        ErrorResponse = "error_response",
        /// The agent answered a dial that the server does not know (any more).
        UnrecognizedResponse = "unrecognized_response",
        /// The agent succeeded, but the front end could not be told.
        SendResponse = "send_rsp",
        /// The agent gave the dial up, or its stream ended first.
        BackendClose = "backend_close",
        /// The dial request could not be sent, or was not answered, in time.
        BackendDialTimeout = "backend_dial_timeout",
        /// The front end gave the dial up.
        FrontendClose = "frontend_close",
    }
}

label_values! {
    /// A listener of the server.
    pub enum Listener("listener") {
        /// Where kube-apiserver connects.
        Frontend = "frontend",
        /// Where agents connect.
        Agent = "agent",
        /// Health and metrics.
        Health = "health",
        /// Metrics and profiling.
        Admin = "admin",
    }
}

label_values! {
    /// Why a connection was refused before it became a stream.
    pub enum RejectReason("reason") {
        /// The first bytes were not the listener's protocol.
        Garbage = "garbage",
        /// The TLS handshake failed.
        HandshakeFailed = "handshake_failed",
        /// Handshake or first request took too long.
        Timeout = "timeout",
        /// Too many connections at once.
        TooManyConnections = "too_many_connections",
        /// Authentication failed.
        Unauthenticated = "unauthenticated",
    }
}

/// Where and why: the labels of one `culvert_rejected_total` series.
#[derive(Clone, Copy)]
struct Rejection(Listener, RejectReason);

impl LabelSet for Rejection {
    fn all() -> Vec<Self> {
        let reasons = |listener: Listener| {
            let all = RejectReason::ALL.iter();
            all.map(move |reason| Self(listener, *reason))
        };
        Listener::ALL.iter().copied().flat_map(reasons).collect()
    }

    fn index(self) -> usize {
        self.0.index() * RejectReason::ALL.len() + self.1.index()
    }

    fn labels(self) -> Vec<(&'static str, &'static str)> {
        [self.0.labels(), self.1.labels()].concat()
    }
}

/// The labels of one `culvert_tunnel_dials_total` series.
#[derive(Clone, Copy)]
struct TunnelDials(Kind, DialOutcome);

impl LabelSet for TunnelDials {
    fn all() -> Vec<Self> {
        let outcomes = |kind: Kind| {
            let all = DialOutcome::ALL.iter();
            all.map(move |outcome| Self(kind, *outcome))
        };
        Kind::ALL.iter().copied().flat_map(outcomes).collect()
    }

    fn index(self) -> usize {
        self.0.index() * DialOutcome::ALL.len() + self.1.index()
    }

    fn labels(self) -> Vec<(&'static str, &'static str)> {
        [self.0.labels(), self.1.labels()].concat()
    }
}

/// Every series of one server.
pub struct ServerMetrics {
    registry: Arc<Registry>,
    /// Time from dial request to dial response, in seconds.
    pub dial_duration: Histogram,
    /// Time that one write to a front end blocked, in seconds.
    pub frontend_write_duration: Histogram,
    /// Life of a connection after its dial, in seconds.
    pub connection_duration: Histogram,
    /// Open HTTP CONNECT connections.
    pub http_connections: Gauge,
    /// Distinct agents; deprecated upstream in favour of [`ServerMetrics::ready_backends`].
    pub ready_backend_connections: Gauge,
    /// Dials that wait for their agent.
    pub pending_backend_dials: Gauge,
    /// Connections after their dial.
    pub established_connections: Gauge,
    /// Packets, stream errors, payload bytes, closed connections.
    pub streams: StreamMetrics,
    grpc_connections: Family<ServiceMethod, Gauge>,
    full_receive_channels: Family<ServiceMethod, Gauge>,
    ready_backends: Family<Strategy, Gauge>,
    dial_failures: Family<DialFailureReason, Counter>,
    rejected: Family<Rejection, Counter>,
    /// Time from the request of a tunnel mode until nothing is left of the one before, in seconds.
    pub switch_duration: Histogram,
    /// 1 while a switch of tunnels is in progress.
    pub switching: Gauge,
    tunnel_mode: Family<Mode, Gauge>,
    tunnel_connections: Family<Kind, Gauge>,
    tunnel_dials: Family<TunnelDials, Counter>,
}

// === impl ServerMetrics ===

impl ServerMetrics {
    /// A registry with every family; `strategies` are those that this server is configured with
    /// (only they have a `ready_backends` series, as upstream).
    ///
    /// # Errors
    ///
    /// See [`Registry::new`].
    pub fn new(strategies: &[Strategy]) -> Result<Self, MetricsError> {
        let registry = Registry::new(&[
            (name!("dial_duration_seconds"), &LATENCY_BUCKETS),
            (name!("frontend_write_duration_seconds"), &LATENCY_BUCKETS),
            (name!("connection_duration_seconds"), &CONNECTION_BUCKETS),
            (SWITCH_DURATION, &SWITCH_BUCKETS),
        ])?;
        register_build_info(&registry, "server", env!("CARGO_PKG_VERSION"));
        let names = StreamNames {
            packets: name!("stream_packets_total"),
            errors: name!("stream_errors_total"),
        };
        Ok(Self {
            dial_duration: registry.histogram(
                name!("dial_duration_seconds"),
                &[],
                "Latency of dial to the remote endpoint in seconds",
            ),
            frontend_write_duration: registry.histogram(
                name!("frontend_write_duration_seconds"),
                &[],
                "Latency of write to the frontend in seconds",
            ),
            connection_duration: registry.histogram(
                name!("connection_duration_seconds"),
                &[],
                "Duration of established end-to-end connections in seconds (post-dial).",
            ),
            http_connections: registry.gauge(
                name!("http_connections"),
                &[],
                "Number of current HTTP CONNECT connections",
            ),
            ready_backend_connections: registry.gauge(
                name!("ready_backend_connections"),
                &[],
                "Number of konnectivity agent connected to the proxy server. DEPRECATED, please use ready_backends",
            ),
            pending_backend_dials: registry.gauge(
                name!("pending_backend_dials"),
                &[],
                "Current number of pending backend dial requests",
            ),
            established_connections: registry.gauge(
                name!("established_connections"),
                &[],
                "Current number of established end-to-end connections (post-dial).",
            ),
            streams: StreamMetrics::new(&registry, names, Segment::ALL),
            grpc_connections: Family::new(
                &registry,
                name!("grpc_connections"),
                "Number of current grpc connections, partitioned by service method.",
            )
            .at_zero(ServiceMethod::all()),
            full_receive_channels: Family::new(
                &registry,
                name!("full_receive_channels"),
                "Number of current connections blocked by a full receive channel, partitioned by service method.",
            )
            .at_zero(ServiceMethod::all()),
            ready_backends: Family::new(
                &registry,
                name!("ready_backends"),
                "Number of konnectivity agent connected to the proxy server",
            )
            .at_zero(strategies.iter().copied()),
            dial_failures: Family::new(
                &registry,
                name!("dial_failure_count"),
                "Number of dial failures observed. Multiple failures can occur for a single dial request.",
            ),
            rejected: Family::new(
                &registry,
                "culvert_rejected_total",
                "Connections refused before they became a stream, by listener and reason.",
            )
            .at_zero(Rejection::all()),
            switch_duration: registry.histogram(
                SWITCH_DURATION,
                &[],
                "Time from the request of a tunnel mode until nothing was left of the one before, in seconds.",
            ),
            switching: registry.gauge(
                "culvert_tunnel_switching",
                &[],
                "1 while a switch of tunnels is in progress.",
            ),
            tunnel_mode: Family::new(
                &registry,
                "culvert_tunnel_mode",
                "1 for the tunnel mode that was set last, 0 for all others.",
            )
            .at_zero(Mode::all()),
            tunnel_connections: Family::new(
                &registry,
                "culvert_tunnel_connections",
                "Open connections, by tunnel.",
            )
            .at_zero(Kind::all()),
            tunnel_dials: Family::new(
                &registry,
                "culvert_tunnel_dials_total",
                "Dials, by tunnel and outcome. One dial of a client may count for both tunnels.",
            )
            .at_zero(TunnelDials::all()),
            registry,
        })
    }

    /// The registry, to render it, keep it up and add series to it.
    pub fn registry(&self) -> &Arc<Registry> {
        &self.registry
    }

    /// Open gRPC streams of one method.
    pub fn grpc_connections(&self, method: ServiceMethod) -> &Gauge {
        self.grpc_connections.get(method)
    }

    /// Streams of one method whose receiver is blocked by a full queue right now.
    pub fn full_receive_channels(&self, method: ServiceMethod) -> &Gauge {
        self.full_receive_channels.get(method)
    }

    /// Distinct agent ids or identifiers that one strategy can choose from.
    pub fn ready_backends(&self, strategy: Strategy) -> &Gauge {
        self.ready_backends.get(strategy)
    }

    /// Failed dials of one reason; not on the page before its first use.
    pub fn dial_failures(&self, reason: DialFailureReason) -> &Counter {
        self.dial_failures.get(reason)
    }

    /// Open connections of one tunnel.
    pub fn tunnel_connections(&self, kind: Kind) -> &Gauge {
        self.tunnel_connections.get(kind)
    }

    /// Dials on one tunnel with one outcome.
    pub fn tunnel_dials(&self, kind: Kind, outcome: DialOutcome) -> &Counter {
        self.tunnel_dials.get(TunnelDials(kind, outcome))
    }

    /// Shows the tunnel mode that was set last.
    pub fn set_tunnel_mode(&self, current: Mode) {
        for mode in Mode::ALL {
            let value = f64::from(u8::from(*mode == current));
            self.tunnel_mode.get(*mode).set(value);
        }
    }

    /// Connections refused by one listener.
    pub fn rejected(&self, listener: Listener, reason: RejectReason) -> &Counter {
        self.rejected.get(Rejection(listener, reason))
    }
}

#[cfg(test)]
mod tests;
