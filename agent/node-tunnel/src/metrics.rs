//! The node tunnel's metrics: series of its own, and series under Envoy's names for existing dashboards.

use std::sync::Arc;

use culvert_host::label_values;
use culvert_host::telemetry::metrics::{
    Family, GaugeGuard, LabelSet, MetricsError, Registry, closed_connections, register_build_info,
};
use culvert_stream::CloseReason;
use metrics::{Counter, Gauge};

/// Label name and value of the series under Envoy's names; dashboards select series by this label.
const CLUSTER: [(&str, &str); 1] = [("envoy_cluster_name", "proxy_cluster")];

label_values! {
    /// Reason for disconnecting a client that got no stream.
    pub(crate) enum Refusal("reason") {
        /// The proxy has no such Service.
        NotFound = "404",
        /// No endpoint of the Service accepts connections.
        Unavailable = "503",
        /// The proxy answered with another status.
        OtherStatus = "other_status",
        /// The proxy did not answer in time.
        NoAnswer = "no_answer",
        /// The stream or the connection to the proxy ended before the answer.
        Lost = "lost",
        /// The proxy cannot be reached.
        Unreachable = "unreachable",
        /// Every connection has as many streams as the proxy allows.
        Full = "full",
        /// The clients of the address have their share of all streams.
        TooManyConnections = "too_many_connections",
    }
}

/// All metrics of one node tunnel.
pub struct TunnelMetrics {
    registry: Arc<Registry>,
    pub(crate) connections: Gauge,
    pub(crate) connected: Counter,
    pub(crate) connect_failed: Counter,
    pub(crate) streams: Gauge,
    pub(crate) requests: Counter,
    pub(crate) received: Counter,
    pub(crate) sent: Counter,
    pub(crate) interface_repairs: Counter,
    pub(crate) interface_failures: Counter,
    clients: Gauge,
    accepted: Counter,
    pub(crate) refused: Family<Refusal, Counter>,
    closed: Family<CloseReason, Counter>,
}

// === impl TunnelMetrics ===

impl TunnelMetrics {
    /// Registers all series.
    ///
    /// # Errors
    /// Does not fail in practice; see [`Registry::new`].
    pub fn new() -> Result<Arc<Self>, MetricsError> {
        let registry = Registry::new(&[])?;
        register_build_info(&registry, "node-tunnel", env!("CARGO_PKG_VERSION"));
        let envoy = |name, help| registry.counter(name, &CLUSTER, help);
        let envoy_gauge = |name, help| registry.gauge(name, &CLUSTER, help);
        let counter = |name, help| registry.counter(name, &[], help);
        Ok(Arc::new(Self {
            connections: envoy_gauge(
                "envoy_cluster_upstream_cx_active",
                "Open connections to the proxy.",
            ),
            connected: envoy(
                "envoy_cluster_upstream_cx_total",
                "Connections opened to the proxy.",
            ),
            connect_failed: envoy(
                "envoy_cluster_upstream_cx_connect_fail",
                "Failed attempts to connect to the proxy.",
            ),
            streams: envoy_gauge("envoy_cluster_upstream_rq_active", "Open CONNECT streams."),
            requests: envoy("envoy_cluster_upstream_rq_total", "CONNECT requests."),
            received: envoy(
                "envoy_cluster_upstream_cx_rx_bytes_total",
                "Bytes of streams received from the proxy.",
            ),
            sent: envoy(
                "envoy_cluster_upstream_cx_tx_bytes_total",
                "Bytes of streams sent to the proxy.",
            ),
            interface_repairs: counter(
                "culvert_node_tunnel_interface_repairs_total",
                "Repairs of the interface after another program changed it.",
            ),
            interface_failures: counter(
                "culvert_node_tunnel_interface_failures_total",
                "Failed repairs of the interface.",
            ),
            clients: registry.gauge(
                "culvert_node_tunnel_clients",
                &[],
                "Open connections of clients.",
            ),
            accepted: counter(
                "culvert_node_tunnel_clients_total",
                "Connections that clients opened.",
            ),
            refused: Family::new(
                &registry,
                "culvert_node_tunnel_refused_total",
                "Clients that were disconnected without a stream, by the answer of the proxy or another reason.",
            )
            .at_zero(Refusal::all()),
            closed: closed_connections(&registry),
            registry,
        }))
    }

    /// Returns the registry, for rendering the metrics page and for [`Registry::run_upkeep`].
    pub fn registry(&self) -> &Arc<Registry> {
        &self.registry
    }

    /// Counts a new client. The gauge of open clients decreases when the guard is dropped.
    pub(crate) fn client(&self) -> GaugeGuard {
        self.accepted.increment(1);
        GaugeGuard::new(&self.clients)
    }

    pub(crate) fn closed(&self, reason: CloseReason) {
        self.closed.get(reason).increment(1);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn dashboard_series_exist_from_the_start() {
        let metrics = TunnelMetrics::new().unwrap();
        metrics.refused.get(Refusal::NotFound).increment(1);
        let page = metrics.registry().render();
        for name in [
            "cx_active",
            "cx_total",
            "cx_connect_fail",
            "cx_rx_bytes_total",
            "cx_tx_bytes_total",
            "rq_active",
            "rq_total",
        ] {
            let series = "{envoy_cluster_name=\"proxy_cluster\"} 0";
            let line = format!("envoy_cluster_upstream_{name}{series}\n");
            assert!(page.contains(&line), "{line} is missing from\n{page}");
        }
        assert!(page.contains("culvert_node_tunnel_refused_total{reason=\"404\"} 1\n"));
        assert!(page.contains("culvert_node_tunnel_refused_total{reason=\"full\"} 0\n"));
    }
}
