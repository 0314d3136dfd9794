//! The tunnel's series: its own, and those under Envoy's names that dashboards read.

use std::sync::Arc;

use culvert_host::label_values;
use culvert_host::telemetry::metrics::{
    Family, GaugeGuard, LabelSet, MetricsError, Registry, register_build_info,
};
use culvert_stream::CloseReason;
use metrics::{Counter, Gauge};

/// What Envoy's series are told apart by; dashboards ask for this name.
const CLUSTER: [(&str, &str); 1] = [("envoy_cluster_name", "proxy_cluster")];

label_values! {
    /// Why a client was turned away.
    pub enum Refusal("reason") {
        /// The proxy knows no such Service.
        NotFound = "404",
        /// No endpoint of the Service accepts.
        Unavailable = "503",
        /// The proxy gave another answer.
        OtherStatus = "other_status",
        /// The proxy gave no answer in time.
        NoAnswer = "no_answer",
        /// The stream, or the connection below it, ended before there was an answer.
        Lost = "lost",
        /// The proxy can not be reached.
        Unreachable = "unreachable",
        /// Every connection carries as many streams as the proxy allows.
        Full = "full",
    }
}

/// All series of one tunnel.
pub struct TunnelMetrics {
    registry: Arc<Registry>,
    /// Open connections to the proxy.
    pub connections: Gauge,
    /// Connections that were opened to the proxy.
    pub connected: Counter,
    /// Attempts to connect to the proxy that failed.
    pub connect_failed: Counter,
    /// Open CONNECT streams, those that wait for their answer included.
    pub streams: Gauge,
    /// CONNECT requests.
    pub requests: Counter,
    /// Bytes of clients from the proxy.
    pub received: Counter,
    /// Bytes of clients to the proxy.
    pub sent: Counter,
    /// Repairs of the interface after others changed it.
    pub interface_repairs: Counter,
    /// Repairs of the interface that failed.
    pub interface_failures: Counter,
    clients: Gauge,
    accepted: Counter,
    refused: Family<Refusal, Counter>,
    closed: Vec<(CloseReason, Counter)>,
}

// === impl TunnelMetrics ===

impl TunnelMetrics {
    /// Registers all series.
    ///
    /// # Errors
    /// Never in practice; see [`Registry::new`].
    pub fn new() -> Result<Arc<Self>, MetricsError> {
        let registry = Registry::new(&[])?;
        register_build_info(&registry, "node-tunnel", env!("CARGO_PKG_VERSION"));
        let closed = |reason: &CloseReason| {
            let counter = registry.counter(
                "culvert_connections_closed_total",
                &[("reason", reason.label())],
                "Connections that ended, by reason.",
            );
            (*reason, counter)
        };
        Ok(Arc::new(Self {
            connections: registry.gauge(
                "envoy_cluster_upstream_cx_active",
                &CLUSTER,
                "Open connections to the proxy.",
            ),
            connected: registry.counter(
                "envoy_cluster_upstream_cx_total",
                &CLUSTER,
                "Connections opened to the proxy.",
            ),
            connect_failed: registry.counter(
                "envoy_cluster_upstream_cx_connect_fail",
                &CLUSTER,
                "Attempts to connect to the proxy that failed.",
            ),
            streams: registry.gauge(
                "envoy_cluster_upstream_rq_active",
                &CLUSTER,
                "Open CONNECT streams.",
            ),
            requests: registry.counter(
                "envoy_cluster_upstream_rq_total",
                &CLUSTER,
                "CONNECT requests.",
            ),
            received: registry.counter(
                "envoy_cluster_upstream_cx_rx_bytes_total",
                &CLUSTER,
                "Bytes of streams received from the proxy.",
            ),
            sent: registry.counter(
                "envoy_cluster_upstream_cx_tx_bytes_total",
                &CLUSTER,
                "Bytes of streams sent to the proxy.",
            ),
            interface_repairs: registry.counter(
                "culvert_node_tunnel_interface_repairs_total",
                &[],
                "Repairs of the interface after others changed it.",
            ),
            interface_failures: registry.counter(
                "culvert_node_tunnel_interface_failures_total",
                &[],
                "Repairs of the interface that failed.",
            ),
            clients: registry.gauge(
                "culvert_node_tunnel_clients",
                &[],
                "Open connections of clients.",
            ),
            accepted: registry.counter(
                "culvert_node_tunnel_clients_total",
                &[],
                "Connections that clients opened.",
            ),
            refused: Family::new(
                &registry,
                "culvert_node_tunnel_refused_total",
                "Clients that were turned away, by the proxy's answer or the lack of one.",
            )
            .at_zero(Refusal::all()),
            closed: CloseReason::ALL.iter().map(closed).collect(),
            registry,
        }))
    }

    /// The registry, to render it and keep it up.
    pub fn registry(&self) -> &Arc<Registry> {
        &self.registry
    }

    /// A client's connection; the gauge falls back when the guard is dropped.
    pub fn client(&self) -> GaugeGuard {
        self.accepted.increment(1);
        GaugeGuard::new(&self.clients)
    }

    /// Counts a client that was turned away.
    pub fn refused(&self, reason: Refusal) {
        self.refused.get(reason).increment(1);
    }

    /// Counts the end of a client's connection.
    pub fn closed(&self, reason: CloseReason) {
        if let Some((_, counter)) = self.closed.iter().find(|(known, _)| *known == reason) {
            counter.increment(1);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn what_dashboards_ask_for_is_there_from_the_start() {
        let metrics = TunnelMetrics::new().unwrap();
        metrics.refused(Refusal::NotFound);
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
