//! The agent's metrics: upstream's names, labels, buckets and HELP texts, plus families under the prefix
//! `culvert_`.
//!
//! A dial failure series appears only after the first failure: upstream's tests compare that family sample by
//! sample, and extra samples with the value 0 would make the tests fail. Every other series is present from
//! the start, with the value 0; upstream's tests expect this for `open_server_connections`.

use std::sync::Arc;

use culvert_host::label_values;
use culvert_host::net::dial::DialError;
use culvert_host::telemetry::metrics::{
    Family, LabelSet, MetricsError, Registry, register_build_info,
};
use culvert_konnectivity::metrics::StreamNames;
use culvert_konnectivity::metrics::{Segment, StreamMetrics};
use culvert_kube::calls::CallMetrics;
use metrics::{Counter, Gauge, Histogram};

/// Upper bounds of dial latencies, in seconds: 5 ms to 30 s (upstream `pkg/agent/metrics`).
const LATENCY_BUCKETS: [f64; 7] = [0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 30.0];

/// Packet directions that an agent counts.
const SEGMENTS: [Segment; 2] = [Segment::FromAgent, Segment::ToAgent];

macro_rules! name {
    ($name:literal) => {
        concat!("konnectivity_network_proxy_agent_", $name)
    };
}

const LEASE_LIST_LATENCY: &str = name!("lease_list_latency_seconds");

label_values! {
    /// Reason for a failed dial of an endpoint.
    pub enum DialFailureReason("reason") {
        /// The endpoint did not answer in time.
        Timeout = "timeout",
        /// The policy for destinations denied the dial.
        Denied = "denied",
        /// Any other failure.
        Unknown = "unknown",
    }
}

impl From<&DialError> for DialFailureReason {
    fn from(error: &DialError) -> Self {
        match error.denial {
            Some(_) => Self::Denied,
            None if error.is_timeout() => Self::Timeout,
            None => Self::Unknown,
        }
    }
}

label_values! {
    /// Direction in which the stream to a server failed.
    pub enum ServerDirection("direction") {
        /// Sending to the server failed.
        ToServer = "to_server",
        /// Receiving from the server failed.
        FromServer = "from_server",
    }
}

label_values! {
    /// Result of an attempt to connect to a server.
    pub enum AttemptOutcome("outcome") {
        /// The attempt found a new server.
        Added = "added",
        /// The attempt reached a connected server.
        Duplicate = "duplicate",
        /// The attempt reached no server.
        Failed = "failed",
    }
}

label_values! {
    /// Result of an attempt to add a QUIC link.
    pub enum ProbeOutcome("outcome") {
        /// The link carries packets of all sizes.
        Connected = "connected",
        /// The server did not answer over UDP, or refused the link.
        Failed = "failed",
    }
}

label_values! {
    /// Result of the attempts to resume the link to a server.
    pub enum ResumeOutcome("outcome") {
        /// The link continues.
        Resumed = "resumed",
        /// The server has ended the session.
        Over = "over",
        /// The link did not resume in time.
        Expired = "expired",
    }
}

/// All metrics of one agent.
pub struct AgentMetrics {
    registry: Arc<Registry>,
    /// Duration of successful dials of endpoints, in seconds.
    pub dial_duration: Histogram,
    /// Number of servers with an open stream.
    pub open_server_connections: Gauge,
    /// Number of servers the agent tries to connect to.
    pub known_server_count: Gauge,
    /// Number of open connections to endpoints.
    pub open_endpoint_connections: Gauge,
    /// Packets, stream errors, payload bytes and closed connections.
    pub streams: StreamMetrics,
    dial_failures: Family<DialFailureReason, Counter>,
    /// Attempts to connect to servers.
    pub attempts: Family<AttemptOutcome, Counter>,
    /// QUIC links to servers.
    pub quic_links: Gauge,
    /// Attempts to add a QUIC link.
    pub quic_probes: Family<ProbeOutcome, Counter>,
    /// Resumed links to servers, and links that were given up.
    pub resumes: Family<ResumeOutcome, Counter>,
    /// Servers whose link broke and has not resumed yet.
    pub servers_away: Gauge,
    /// Stream failures in one direction. Deprecated upstream in favour of [`StreamMetrics::stream_error`].
    pub server_failures: Family<ServerDirection, Counter>,
}

// === impl AgentMetrics ===

impl AgentMetrics {
    /// Creates a registry with every family.
    ///
    /// # Errors
    ///
    /// See [`Registry::new`].
    pub fn new() -> Result<Self, MetricsError> {
        let registry = Registry::new(&[
            (name!("dial_duration_seconds"), &LATENCY_BUCKETS),
            (LEASE_LIST_LATENCY, &LATENCY_BUCKETS),
        ])?;
        register_build_info(&registry, "agent", env!("CARGO_PKG_VERSION"));
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
            open_server_connections: registry.gauge(
                name!("open_server_connections"),
                &[],
                "Current number of open server connections.",
            ),
            known_server_count: registry.gauge(
                name!("known_server_count"),
                &[],
                "Current number of servers agent is trying to connect to.",
            ),
            open_endpoint_connections: registry.gauge(
                name!("open_endpoint_connections"),
                &[],
                "Current number of open endpoint connections.",
            ),
            streams: StreamMetrics::new(&registry, names, &SEGMENTS),
            dial_failures: Family::new(
                &registry,
                name!("endpoint_dial_failure_total"),
                "Number of failures dialing the remote endpoint, by reason (example: timeout).",
            ),
            attempts: Family::new(
                &registry,
                "culvert_connect_attempts_total",
                "Attempts to connect to servers, by outcome: a new server (added), a connected server (duplicate) or none (failed).",
            )
            .at_zero(AttemptOutcome::all()),
            quic_links: registry.gauge("culvert_quic_links", &[], "QUIC links to servers."),
            quic_probes: Family::new(
                &registry,
                "culvert_quic_probes_total",
                "Attempts to add a QUIC link to a server, by outcome.",
            )
            .at_zero(ProbeOutcome::all()),
            resumes: Family::new(
                &registry,
                "culvert_server_resumes_total",
                "Broken links to servers, by outcome: the link continues (resumed), the server has given up the link (over), or the link did not resume in time (expired).",
            )
            .at_zero(ResumeOutcome::all()),
            servers_away: registry.gauge(
                "culvert_servers_away",
                &[],
                "Current number of servers whose link broke and may still resume.",
            ),
            server_failures: Family::new(
                &registry,
                name!("server_connection_failure_count"),
                "Count of failures to send to or receive from the proxy server, labeled by the direction (from_server or to_server). DEPRECATED, please use stream_events_error_total",
            )
            .at_zero(ServerDirection::all()),
            registry,
        })
    }

    /// Returns the registry, for rendering the metrics page, for [`Registry::run_upkeep`], and for
    /// registering more series.
    pub fn registry(&self) -> &Arc<Registry> {
        &self.registry
    }

    /// Returns the metrics of lists of leases.
    pub fn lease_lists(&self) -> CallMetrics {
        CallMetrics {
            registry: self.registry.clone(),
            code: "http_response_code",
            total: [
                name!("lease_lists_total"),
                "Count of server lease list calls made by the agent to the k8s apiserver, labeled by HTTP response code and reason",
            ],
            latency: Some([
                LEASE_LIST_LATENCY,
                "Latency of server lease listing in seconds",
            ]),
        }
    }

    /// Returns the metric that shows whether the agent counts live leases. Only an agent that counts leases has the series.
    pub fn leases_counted(&self) -> Gauge {
        self.registry.gauge(
            "culvert_leases_counted",
            &[],
            "1 while the agent counts live leases of servers, 0 while no lease is live or the Kubernetes API fails.",
        )
    }

    /// Returns the metric of watches of leases. Upstream counts watches as lists.
    pub fn lease_watches(&self) -> CallMetrics {
        CallMetrics {
            registry: self.registry.clone(),
            code: "http_response_code",
            total: [
                name!("lease_watches_total"),
                "Count of server lease watch calls made by the agent to the k8s apiserver, labeled by HTTP response code and reason",
            ],
            latency: None,
        }
    }

    /// Returns the counter of failed dials for a reason. The series is missing from the metrics page until
    /// first used.
    pub fn dial_failures(&self, reason: DialFailureReason) -> &Counter {
        self.dial_failures.get(reason)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

    use super::*;

    fn has_line(page: &str, line: &str) -> bool {
        page.lines().any(|candidate| candidate == line)
    }

    #[test]
    fn families_that_upstream_tests_compare_match_upstream() {
        let metrics = AgentMetrics::new().unwrap();
        let page = metrics.registry().render();
        assert!(!page.contains("endpoint_dial_failure_total{"));
        assert!(page.contains(
            "# HELP konnectivity_network_proxy_agent_open_endpoint_connections Current number of open endpoint connections.\n\
             # TYPE konnectivity_network_proxy_agent_open_endpoint_connections gauge\n\
             konnectivity_network_proxy_agent_open_endpoint_connections 0\n"
        ));

        metrics
            .dial_failures(DialFailureReason::Unknown)
            .increment(1);
        assert!(metrics.registry().render().contains(
            "# HELP konnectivity_network_proxy_agent_endpoint_dial_failure_total Number of failures dialing the remote endpoint, by reason (example: timeout).\n\
             # TYPE konnectivity_network_proxy_agent_endpoint_dial_failure_total counter\n\
             konnectivity_network_proxy_agent_endpoint_dial_failure_total{reason=\"unknown\"} 1\n\n"
        ));
    }

    #[test]
    fn other_series_start_at_zero() {
        let page = AgentMetrics::new().unwrap().registry().render();
        for series in [
            "open_server_connections",
            "known_server_count",
            "dial_duration_seconds_count",
            r#"dial_duration_seconds_bucket{le="30"}"#,
            r#"server_connection_failure_count{direction="to_server"}"#,
            r#"server_connection_failure_count{direction="from_server"}"#,
            r#"stream_packets_total{segment="from_agent",packet_type="DIAL_RSP"}"#,
            r#"stream_packets_total{segment="to_agent",packet_type="DATA"}"#,
        ] {
            let line = format!("konnectivity_network_proxy_agent_{series} 0");
            assert!(has_line(&page, &line), "{line} is missing from\n{page}");
        }
        assert!(!page.contains(r#"segment="from_client""#));
        assert!(page.contains(r#"culvert_build_info{component="agent","#));
    }
}
