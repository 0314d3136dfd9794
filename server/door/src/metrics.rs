//! The proxy's metrics: its own series, and the series with Envoy's names, for dashboards.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use tokio::time::Instant;

use culvert_host::label_values;
use culvert_host::telemetry::metrics::{
    Family, GaugeGuard, LabelSet, MetricsError, Registry, closed_connections, register_build_info,
};
use culvert_stream::CloseReason;
use metrics::{Counter, CounterFn, Gauge};
use parking_lot::Mutex;

use super::table::Table;
use super::upstream::{Upstream, add_metrics};

/// Label of the series with Envoy's names about CONNECT requests.
const HTTP: [(&str, &str); 1] = [("envoy_http_conn_manager_prefix", "ingress_http")];

label_values! {
    /// Listener that accepted a connection.
    pub(crate) enum Entrance("listener") {
        /// TLS by server name.
        Sni = "sni",
        /// QUIC by server name.
        Quic = "quic",
        /// CONNECT.
        Tunneling = "tunneling",
        /// Node port of a Service.
        NodePort = "node_port",
    }
}

label_values! {
    /// Reason why a connection or a CONNECT request did not reach an endpoint.
    pub(crate) enum Refusal("reason") {
        /// The client sent no complete hello or request in time.
        Timeout = "timeout",
        /// The first bytes were not the listener's protocol.
        Garbage = "garbage",
        /// The TLS client sent no server name.
        NoServerName = "no_server_name",
        /// No Service is exposed under the name, authority or port.
        Unknown = "unknown",
        /// No endpoint accepted the connection.
        Upstream = "upstream",
        /// The upstream already has the maximum number of connections.
        Overflow = "overflow",
        /// The client's address is in no allowed network, of the listener or of the Service.
        Address = "address",
        /// The client's address has too many connections, or too many clients have sent an incomplete request.
        TooManyConnections = "too_many_connections",
        /// A PROXY protocol header was missing, malformed, or came from an unexpected address.
        ProxyHeader = "proxy_header",
        /// The TLS handshake failed or is missing.
        Tls = "tls",
        /// Most streams of an HTTP/2 connection were reset right after they were opened.
        Flood = "flood",
        /// The unread uploads of an HTTP/2 client were too large.
        BufferExceeded = "buffer_exceeded",
    }
}

label_values! {
    /// Step of the work on the load balancer's Service.
    pub(crate) enum Step("step") {
        /// Read or write the lease of the leading replica.
        Lease = "lease",
        /// Read the Service.
        Read = "read",
        /// Write the Service.
        Write = "write",
    }
}

/// All metrics of one proxy.
pub struct ProxyMetrics {
    registry: Arc<Registry>,
    started: Instant,
    /// Series that are set for each page.
    synced_gauge: Gauge,
    source_up: Gauge,
    live: Gauge,
    uptime: Gauge,
    memory: [Gauge; 2],
    refused: Family<(Entrance, Refusal), Counter>,
    open: Family<Entrance, Gauge>,
    opened: Family<Entrance, Counter>,
    closed: Family<CloseReason, Counter>,
    /// Set once all routes are known and in force.
    pub(crate) synced: AtomicBool,
    /// State of the source of the routes.
    pub(crate) source: Mutex<SourceState>,
    pub(crate) applied: Counter,
    pub(crate) rejected: Counter,
    pub(crate) problems: Gauge,
    pub(crate) closed_ports: Gauge,
    /// Open HTTP/2 connections of the CONNECT port.
    pub(crate) http2_open: Gauge,
    /// Largest number of these connections within the memory limit; 0 without a limit.
    pub(crate) http2_limit: Gauge,
    /// Totals over all clients that send CONNECT requests.
    pub(crate) http_active: Gauge,
    pub(crate) http_requests: Counter,
    http_received: Counter,
    http_sent: Counter,
    /// Set while the proxy drains.
    pub(crate) draining: AtomicBool,
    /// Set by `/healthcheck/fail`.
    pub(crate) failed: AtomicBool,
}

/// Metrics of a front door that maintains the load balancer's Service. Other front doors do not export them.
pub struct BalancerMetrics {
    /// 1 in the replica that maintains the Service.
    pub(crate) leader: Gauge,
    /// Written changes of the Service.
    pub(crate) updates: Counter,
    /// Failed requests.
    pub(crate) failures: Family<Step, Counter>,
}

/// State of the source of the routes. The last good routes stay in force in every state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SourceState {
    /// The routes in force match the source.
    Good,
    /// The source cannot be read, or was not read yet.
    Unreadable,
    /// The contents of the source cannot be used.
    Rejected,
}

/// Adds the bytes of one direction of a CONNECT stream to the totals of its upstream, of all CONNECT streams,
/// and of the CONNECT stream itself.
pub(crate) struct Tally {
    upstream: Arc<Upstream>,
    metrics: Arc<ProxyMetrics>,
    moved: Arc<AtomicU64>,
    upward: bool,
}

/// Guard for a connection to an endpoint; counts the end of the connection when dropped. The close reason is
/// the shutdown of the proxy, unless [`end`](Self::end) is called.
pub(crate) struct CountedConnection<'a> {
    metrics: &'a ProxyMetrics,
    reason: CloseReason,
}

// === impl BalancerMetrics ===

impl BalancerMetrics {
    /// Registers the metrics.
    pub fn new(registry: &Arc<Registry>) -> Self {
        Self {
            leader: registry.gauge(
                "culvert_nodeport_proxy_leader",
                &[],
                "1 while this replica maintains the ports of the load balancer's Service.",
            ),
            updates: registry.counter(
                "culvert_nodeport_proxy_balancer_updates_total",
                &[],
                "Changes of the load balancer's Service that were written.",
            ),
            failures: Family::new(
                registry,
                "culvert_nodeport_proxy_balancer_failures_total",
                "Failed requests for the load balancer's Service and its Lease, by step; the log has the reason.",
            )
            .at_zero(Step::all()),
        }
    }
}

// === impl ProxyMetrics ===

impl ProxyMetrics {
    /// Registers all metrics.
    ///
    /// # Errors
    /// Never in practice; see [`Registry::new`].
    pub fn new() -> Result<Arc<Self>, MetricsError> {
        let registry = Registry::new(&[])?;
        register_build_info(&registry, "nodeport-proxy", env!("CARGO_PKG_VERSION"));
        let gauge = |name, help| registry.gauge(name, &[], help);
        let counter = |name, help| registry.counter(name, &[], help);
        let http = |name, help| registry.counter(name, &HTTP, help);
        Ok(Arc::new(Self {
            started: Instant::now(),
            refused: Family::new(
                &registry,
                "culvert_nodeport_proxy_refused_total",
                "Connections and CONNECT requests that reached no endpoint, by listener and reason.",
            )
            .at_zero(LabelSet::all()),
            open: Family::new(
                &registry,
                "culvert_nodeport_proxy_connections",
                "Open connections of clients.",
            )
            .at_zero(Entrance::all()),
            opened: Family::new(
                &registry,
                "culvert_nodeport_proxy_connections_total",
                "Connections that clients opened.",
            )
            .at_zero(Entrance::all()),
            closed: closed_connections(&registry),
            synced: AtomicBool::new(false),
            synced_gauge: gauge(
                "culvert_nodeport_proxy_synced",
                "1 once all routes are known.",
            ),
            source_up: gauge(
                "culvert_nodeport_proxy_source_up",
                "1 while the routes in use match the Kubernetes API or the file, 0 while the last known routes are served.",
            ),
            source: Mutex::new(SourceState::Unreadable),
            applied: counter(
                "culvert_nodeport_proxy_changes_total",
                "Changes of routes that were applied.",
            ),
            rejected: counter(
                "culvert_nodeport_proxy_rejected_configs_total",
                "Changes of the routes file that were refused; the last good routes stay in use.",
            ),
            problems: gauge(
                "culvert_nodeport_proxy_problems",
                "Services that are not exposed as requested; the log names the Services.",
            ),
            closed_ports: gauge(
                "culvert_nodeport_proxy_closed_ports",
                "Node ports that could not be opened; the log names the ports.",
            ),
            http2_open: gauge(
                "culvert_nodeport_proxy_http2_connections",
                "Open HTTP/2 connections of the CONNECT port.",
            ),
            http2_limit: gauge(
                "culvert_nodeport_proxy_http2_connections_limit",
                "HTTP/2 connections of the CONNECT port that fit the memory limit; 0 without a limit.",
            ),
            http_active: registry.gauge(
                "envoy_http_downstream_cx_active",
                &HTTP,
                "Open connections of clients that send CONNECT requests.",
            ),
            http_requests: http("envoy_http_downstream_rq_total", "Requests."),
            http_received: http(
                "envoy_http_downstream_cx_rx_bytes_total",
                "Bytes of CONNECT streams received from clients.",
            ),
            http_sent: http(
                "envoy_http_downstream_cx_tx_bytes_total",
                "Bytes of CONNECT streams sent to clients.",
            ),
            live: gauge("envoy_server_live", "0 while the proxy drains, and after /healthcheck/fail."),
            uptime: gauge("envoy_server_uptime", "Seconds since the start."),
            memory: [
                "envoy_server_memory_allocated",
                "envoy_server_memory_heap_size",
            ]
            .map(|name| gauge(name, "Resident memory, in bytes.")),
            draining: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            registry,
        }))
    }

    pub(crate) fn refused(&self, entrance: Entrance, reason: Refusal) {
        self.refused.get((entrance, reason)).increment(1);
    }

    /// Counts a client connection; the gauge decreases when the guard is dropped.
    pub(crate) fn open(&self, entrance: Entrance) -> GaugeGuard {
        self.opened.get(entrance).increment(1);
        GaugeGuard::new(self.open.get(entrance))
    }

    /// Registers a connection to an endpoint; the end of the connection is counted when the guard is dropped.
    pub(crate) fn count_connection(&self) -> CountedConnection<'_> {
        CountedConnection {
            metrics: self,
            reason: CloseReason::Shutdown,
        }
    }

    pub(crate) fn is_synced(&self) -> bool {
        self.synced.load(Ordering::Relaxed)
    }

    /// False while the proxy drains, and after `/healthcheck/fail`.
    pub(crate) fn is_healthy(&self) -> bool {
        let is_set = |flag: &AtomicBool| flag.load(Ordering::Relaxed);
        !is_set(&self.draining) && !is_set(&self.failed)
    }

    /// Returns the registry, for registering more series.
    pub fn registry(&self) -> &Arc<Registry> {
        &self.registry
    }

    /// Renders the metrics page.
    pub fn render(&self, table: &Table) -> String {
        let is_up = *self.source.lock() == SourceState::Good;
        self.source_up.set(u8::from(is_up));
        self.synced_gauge.set(u8::from(self.is_synced()));
        self.live.set(u8::from(self.is_healthy()));
        self.uptime.set(self.started.elapsed().as_secs() as f64);
        let memory = resident_bytes() as f64;
        for gauge in &self.memory {
            gauge.set(memory);
        }
        let upstreams = table.upstreams();
        self.registry
            .render_with(|page| add_metrics(&upstreams, page))
    }
}

/// Returns the resident memory of the process in bytes; 0 if `/proc` is not available.
fn resident_bytes() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = pages.split(' ').nth(1).and_then(|pages| pages.parse().ok());
    pages.unwrap_or(0) * rustix::param::page_size() as u64
}

// === impl CountedConnection ===

impl CountedConnection<'_> {
    /// Sets the close reason and counts the end.
    pub(crate) fn end(mut self, reason: CloseReason) {
        self.reason = reason;
    }
}

impl Drop for CountedConnection<'_> {
    fn drop(&mut self) {
        self.metrics.closed.get(self.reason).increment(1);
    }
}

// === impl Tally ===

impl Tally {
    /// Returns the counters for both directions of a CONNECT stream: from the client, and to the client.
    pub(crate) fn both(
        upstream: &Arc<Upstream>,
        metrics: &Arc<ProxyMetrics>,
        moved: &Arc<AtomicU64>,
    ) -> [Counter; 2] {
        [true, false].map(|upward| {
            Counter::from_arc(Arc::new(Self {
                upstream: upstream.clone(),
                metrics: metrics.clone(),
                moved: moved.clone(),
                upward,
            }))
        })
    }
}

impl CounterFn for Tally {
    fn increment(&self, bytes: u64) {
        let (stats, metrics) = (&self.upstream.stats, &self.metrics);
        let (upstream, whole) = match self.upward {
            true => (&stats.sent, &metrics.http_received),
            false => (&stats.received, &metrics.http_sent),
        };
        self.moved.fetch_add(bytes, Ordering::Relaxed);
        upstream.fetch_add(bytes, Ordering::Relaxed);
        whole.increment(bytes);
    }

    /// Does nothing: the trait requires this method, but no caller sets an absolute value.
    fn absolute(&self, _: u64) {}
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn cut_connection_counts_as_a_shutdown() {
        let metrics = ProxyMetrics::new().unwrap();
        metrics.count_connection().end(CloseReason::Finished);
        drop(metrics.count_connection());
        drop(metrics.count_connection());
        let page = metrics.registry().render();
        for line in ["finished\"} 1\n", "shutdown\"} 2\n", "client_lost\"} 0\n"] {
            let line = format!("culvert_connections_closed_total{{reason=\"{line}");
            assert!(page.contains(&line), "{page}");
        }
    }
}
