//! The server's metrics: upstream's families with the same names, labels, buckets and HELP texts, and
//! additional families with the prefix `culvert_`.
//!
//! Upstream creates some series at first use, and upstream's tests compare their families sample by sample.
//! Extra zeros would fail the tests, so the same series appear at first use here too. Other series start at
//! 0, so that alerts on `== 0` and rates over the first event work.

use std::sync::Arc;

use culvert_host::label_values;
use culvert_host::telemetry::metrics::{
    Family, LabelSet, MetricsError, Registry, register_build_info,
};
use culvert_konnectivity::metrics::{Segment, StreamMetrics, StreamNames};
use culvert_kube::calls::CallMetrics;
use metrics::{Counter, Gauge, Histogram};
use tokio::time::Instant;

use crate::tunnel::{Health, Kind, Mode, TunnelStatus};

/// Upper bounds of dial and write latencies, in seconds (upstream `pkg/server/metrics`).
const LATENCY_BUCKETS: [f64; 9] = [
    0.000_001, 0.000_01, 0.0001, 0.005, 0.025, 0.1, 0.5, 2.5, 12.5,
];

/// Upper bounds of connection lifetimes, in seconds: 1 s to 24 h (upstream pull request 899).
const CONNECTION_BUCKETS: [f64; 12] = [
    1.0, 5.0, 15.0, 30.0, 60.0, 300.0, 900.0, 1800.0, 3600.0, 14_400.0, 43_200.0, 86_400.0,
];

/// Upper bounds of the duration of a tunnel switch, in seconds: 1 s to 1 h.
const SWITCH_BUCKETS: [f64; 9] = [1.0, 5.0, 15.0, 30.0, 60.0, 300.0, 600.0, 1800.0, 3600.0];

const SWITCH_DURATION: &str = "culvert_tunnel_switch_duration_seconds";

macro_rules! name {
    ($name:literal) => {
        concat!("konnectivity_network_proxy_server_", $name)
    };
}

label_values! {
    /// gRPC method of a stream.
    pub enum ServiceMethod("service_method") {
        /// `ProxyService/Proxy`: front ends.
        Proxy = "Proxy",
        /// `AgentService/Connect`: agents.
        Connect = "Connect",
    }
}

label_values! {
    /// Strategy for choosing an agent, a value of `--proxy-strategies`. `Cidr` is ours; upstream reads the
    /// identifiers and never uses them.
    pub enum Strategy("proxy_strategy") {
        /// Any agent.
        Default = "default",
        /// The agent that registered the destination host.
        DestHost = "destHost",
        /// An agent that registered itself as default route.
        DefaultRoute = "defaultRoute",
        /// The agent that registered the longest network with the destination address.
        Cidr = "cidr",
    }
}

label_values! {
    /// Reason for a failed dial. A dial may count more than once.
    pub enum DialFailureReason("reason") {
        /// No connected agent could serve the dial.
        NoAgent = "no_agent",
        /// The agent reported an error.
        ErrorResponse = "error_response",
        /// The agent answered an unknown or forgotten dial.
        UnrecognizedResponse = "unrecognized_response",
        /// The agent succeeded, but the response could not be sent to the front end.
        SendResponse = "send_rsp",
        /// The agent abandoned the dial, or its stream ended first.
        BackendClose = "backend_close",
        /// The dial request could not be sent in time, or was not answered in time.
        BackendDialTimeout = "backend_dial_timeout",
        /// The front end cancelled the dial.
        FrontendClose = "frontend_close",
        /// The policy for destinations denied the dial.
        Denied = "denied",
        /// Too many dials waited for an answer.
        TooManyDials = "too_many_dials",
    }
}

label_values! {
    /// Outcome of a dial on a tunnel.
    pub enum DialOutcome("outcome") {
        /// A connection is open.
        Opened = "opened",
        /// The peer could not reach the endpoint, or the endpoint's address is denied.
        Refused = "refused",
        /// No peer was connected.
        NoPeer = "no_peer",
        /// The peer left, or abandoned the dial.
        Lost = "lost",
        /// No answer arrived in time.
        TimedOut = "timed_out",
        /// A switch ended the use of the tunnel, and the dial continued on the other tunnel.
        Moved = "moved",
        /// The client left before the outcome.
        GivenUp = "given_up",
    }
}

label_values! {
    /// A listener of the server.
    pub enum Listener("listener") {
        /// Listener for kube-apiserver.
        Frontend = "frontend",
        /// Listener for agents.
        Agent = "agent",
        /// Admin listener with TLS.
        Admin = "admin",
    }
}

label_values! {
    /// Reason for refusing a connection before it became a stream.
    pub enum RejectReason("reason") {
        /// The first bytes were not the listener's protocol.
        Garbage = "garbage",
        /// The TLS handshake failed.
        HandshakeFailed = "handshake_failed",
        /// The handshake or the first request took too long.
        Timeout = "timeout",
        /// Too many connections at once.
        TooManyConnections = "too_many_connections",
        /// Authentication failed.
        Unauthenticated = "unauthenticated",
        /// The review of a token had no outcome.
        ReviewFailed = "review_failed",
        /// A PROXY protocol header was missing, malformed, or came from an unexpected address.
        ProxyHeader = "proxy_header",
    }
}

label_values! {
    /// Outcome of a dial over QUIC.
    pub enum QuicDial("outcome") {
        /// The connection was opened.
        Opened = "opened",
        /// The agent refused the dial, or did not answer in time.
        Failed = "failed",
        /// The link was silent or ended, and the dial moved to the TCP connection of the agent.
        Moved = "moved",
    }
}

label_values! {
    /// Outcome of a request to resume the link of an agent, or of the wait for a request.
    pub enum ResumeOutcome("outcome") {
        /// The link continues.
        Resumed = "resumed",
        /// The link continues, although the token of the agent could not be reviewed.
        Unreviewed = "unreviewed",
        /// The session has already ended, or belongs to another server.
        Unknown = "unknown",
        /// The agent did not prove that the session is its own, or its token was not accepted.
        Refused = "refused",
        /// The agent did not return in time.
        Expired = "expired",
        /// Another process has taken the place of the agent's process.
        Replaced = "replaced",
    }
}

/// All metrics of a server.
pub struct ServerMetrics {
    registry: Arc<Registry>,
    /// Time from dial request to dial response, in seconds.
    pub dial_duration: Histogram,
    /// Time for which a write to a front end blocked, in seconds.
    pub frontend_write_duration: Histogram,
    /// Lifetime of an established connection, in seconds.
    pub connection_duration: Histogram,
    /// Open HTTP CONNECT connections.
    pub http_connections: Gauge,
    /// Distinct agents; deprecated upstream in favour of [`ServerMetrics::ready_backends`].
    pub ready_backend_connections: Gauge,
    /// Dials that wait for an agent's answer.
    pub pending_backend_dials: Gauge,
    /// Established connections.
    pub established_connections: Gauge,
    /// Packets, stream errors, payload bytes, closed connections.
    pub streams: StreamMetrics,
    /// Open gRPC streams of a method.
    pub grpc_connections: Family<ServiceMethod, Gauge>,
    /// Streams of a method whose receiver is currently blocked by a full queue.
    pub full_receive_channels: Family<ServiceMethod, Gauge>,
    /// Distinct agent ids or identifiers available to a strategy.
    pub ready_backends: Family<Strategy, Gauge>,
    dial_failures: Family<DialFailureReason, Counter>,
    /// Expired leases deleted by this server.
    pub culled_leases: Counter,
    /// Connections refused by a listener for a reason.
    pub rejected: Family<(Listener, RejectReason), Counter>,
    /// Requests to resume the links of agents, and links that were given up.
    pub resumes: Family<ResumeOutcome, Counter>,
    /// Agents whose link broke and has not resumed yet.
    pub agents_away: Gauge,
    /// Time from the request of a tunnel mode until nothing uses the previous tunnel, in seconds.
    pub switch_duration: Histogram,
    /// 1 while the readiness check finds a peer.
    pub tunnel_ready: Gauge,
    tunnel_peers: Family<(Kind, Health), Gauge>,
    /// 1 while a switch of tunnels is in progress.
    pub switching: Gauge,
    /// Number of problems of the tunnel mode that the status shows.
    pub switch_problems: Gauge,
    tunnel_mode: Family<Mode, Gauge>,
    /// Open connections of a tunnel.
    pub tunnel_connections: Family<Kind, Gauge>,
    /// Dials on a tunnel with an outcome.
    pub tunnel_dials: Family<(Kind, DialOutcome), Counter>,
    /// QUIC links of agents.
    pub quic_links: Gauge,
    /// Dials over QUIC with an outcome.
    pub quic_dials: Family<QuicDial, Counter>,
}

/// Counts a connection as open until dropped, and then its lifetime.
pub(crate) struct OpenConnection {
    metrics: Arc<ServerMetrics>,
    opened: Instant,
}

// === impl OpenConnection ===

impl OpenConnection {
    /// Begins to count a connection.
    pub(crate) fn new(metrics: &Arc<ServerMetrics>) -> Self {
        metrics.established_connections.increment(1.0);
        Self {
            metrics: metrics.clone(),
            opened: Instant::now(),
        }
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.metrics.established_connections.decrement(1.0);
        let lifetime = self.opened.elapsed().as_secs_f64();
        self.metrics.connection_duration.record(lifetime);
    }
}

// === impl ServerMetrics ===

impl ServerMetrics {
    /// Creates a registry with every family. Only the configured `strategies` get a `ready_backends`
    /// series, as in the stock server.
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
            culled_leases: registry.counter(
                name!("culled_leases_count"),
                &[],
                "Count of expired leases that the lease garbage collection controller has culled.",
            ),
            rejected: Family::new(
                &registry,
                "culvert_rejected_total",
                "Connections refused before they became a stream, by listener and reason.",
            )
            .at_zero(LabelSet::all()),
            resumes: Family::new(
                &registry,
                "culvert_agent_resumes_total",
                "Requests of agents to resume a broken link, by outcome, and links that did not resume in time (expired), or whose agent has restarted (replaced).",
            )
            .at_zero(ResumeOutcome::all()),
            agents_away: registry.gauge(
                "culvert_agents_away",
                &[],
                "Current number of agents whose link broke and may still resume.",
            ),
            switch_duration: registry.histogram(
                SWITCH_DURATION,
                &[],
                "Time from the request of a tunnel mode until nothing uses the previous tunnel, in seconds.",
            ),
            tunnel_ready: registry.gauge(
                "culvert_tunnel_ready",
                &[],
                "1 while /readyz finds a peer: an agent of one of the strategies, or an OpenVPN client with routes.",
            ),
            tunnel_peers: Family::new(
                &registry,
                "culvert_tunnel_peers",
                "Agent connections and OpenVPN clients, by tunnel and health. A doubtful peer does not answer, or its link broke; it gets dials only if no other peer can take them.",
            )
            .at_zero(states_of_peers()),
            switching: registry.gauge(
                "culvert_tunnel_switching",
                &[],
                "1 while a switch of tunnels is in progress.",
            ),
            switch_problems: registry.gauge(
                "culvert_tunnel_switch_problems",
                &[],
                "Number of problems of the tunnel mode that culvert status shows: a mode file that cannot be used, or a \
                 state file that cannot be used or saved.",
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
            .at_zero(LabelSet::all()),
            quic_links: registry.gauge("culvert_quic_links", &[], "QUIC links of agents."),
            quic_dials: Family::new(
                &registry,
                "culvert_quic_dials_total",
                "Dials over QUIC links, by outcome. A moved dial continues over TCP. Dials that their clients cancel do not count.",
            )
            .at_zero(LabelSet::all()),
            registry,
        })
    }

    /// Sets the numbers of peers of the tunnels.
    pub(crate) fn set_peers(&self, tunnels: &[TunnelStatus]) {
        for (kind, health) in states_of_peers() {
            let of_kind = tunnels.iter().filter(|tunnel| tunnel.tunnel == kind);
            let peers = of_kind.flat_map(|tunnel| &tunnel.peers);
            let count = peers.filter(|peer| peer.health == health).count();
            self.tunnel_peers.get((kind, health)).set(count as f64);
        }
    }

    /// Returns the registry, for rendering the metrics page, for [`Registry::run_upkeep`], and for
    /// registering more series.
    pub fn registry(&self) -> &Arc<Registry> {
        &self.registry
    }

    /// Returns the count of failed dials for a reason. The series appears at first use.
    pub fn dial_failures(&self, reason: DialFailureReason) -> &Counter {
        self.dial_failures.get(reason)
    }

    /// Returns the metrics of lists of leases. The help texts are upstream's.
    pub fn lease_lists(&self) -> CallMetrics {
        CallMetrics {
            registry: self.registry.clone(),
            code: "http_status_code",
            total: [
                name!("lease_list_total"),
                "Count of lease deletion calls by the garbage collection controller. Labeled by HTTP status code and reason.",
            ],
            latency: Some([
                name!("lease_list_latency_seconds"),
                "Latency of lease list calls by the garbage collection controller in seconds.",
            ]),
        }
    }

    /// Returns the metric that shows whether this server keeps its lease. Only a server with a lease has the series.
    pub fn lease_kept(&self) -> Gauge {
        self.registry.gauge(
            "culvert_lease_kept",
            &[],
            "1 while the server renews its lease, 0 before the first write and once all renewals have failed for 30 s, NaN once the server gave the lease up.",
        )
    }

    /// Returns the metrics of deletions of expired leases. The help texts are upstream's.
    pub fn lease_deletions(&self) -> CallMetrics {
        CallMetrics {
            registry: self.registry.clone(),
            code: "http_status_code",
            total: [
                name!("lease_delete_total"),
                "Count of lease delection calls by the garbage collection controller. Labeled by HTTP status code and reason.",
            ],
            latency: Some([
                name!("lease_delete_latency_seconds"),
                "Latency of lease deletion calls by the garbage collection controller in seconds.",
            ]),
        }
    }

    /// Sets the gauges of the tunnel mode.
    pub fn set_tunnel_mode(&self, current: Mode) {
        for mode in Mode::ALL {
            let value = f64::from(u8::from(*mode == current));
            self.tunnel_mode.get(*mode).set(value);
        }
    }
}

/// Returns the states of connected peers of every tunnel.
fn states_of_peers() -> impl Iterator<Item = (Kind, Health)> {
    let states = <(Kind, Health)>::all().into_iter();
    states.filter(|(_, health)| *health != Health::Absent)
}

#[cfg(test)]
mod tests;
