//! The metrics of upstreams, under Envoy's names.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use culvert_host::telemetry::metrics::{Kind, Page};

use super::times::{self, CLUSTER};
use super::{Stats, Upstream};

/// A metric of every upstream: name, type, help, value.
type Metric = (&'static str, Kind, &'static str, fn(&Upstream) -> u64);

/// Metrics that KKP's dashboards read, and related Envoy metrics.
const METRICS: [Metric; 11] = [
    (
        "envoy_cluster_membership_total",
        Kind::Gauge,
        "Endpoints.",
        |upstream| upstream.endpoint_count() as u64,
    ),
    (
        "envoy_cluster_membership_healthy",
        Kind::Gauge,
        "Ready endpoints. Endpoints that are not ready are not members.",
        |upstream| upstream.endpoint_count() as u64,
    ),
    (
        "envoy_cluster_upstream_cx_active",
        Kind::Gauge,
        "Connections to endpoints, open or being opened.",
        |upstream| upstream.stats.active.load(Ordering::Relaxed),
    ),
    (
        "envoy_cluster_upstream_cx_total",
        Kind::Counter,
        "Attempts to connect to endpoints.",
        |upstream| {
            let Stats {
                opened,
                failed,
                timed_out,
                ..
            } = &upstream.stats;
            let all = [opened, failed, timed_out];
            all.iter().map(|count| count.load(Ordering::Relaxed)).sum()
        },
    ),
    (
        "envoy_cluster_upstream_cx_connect_fail",
        Kind::Counter,
        "Failed attempts to connect, with timeouts.",
        |upstream| {
            let stats = &upstream.stats;
            stats.failed.load(Ordering::Relaxed) + stats.timed_out.load(Ordering::Relaxed)
        },
    ),
    (
        "envoy_cluster_upstream_cx_connect_timeout",
        Kind::Counter,
        "Attempts to connect that timed out.",
        |upstream| upstream.stats.timed_out.load(Ordering::Relaxed),
    ),
    (
        "envoy_cluster_upstream_cx_overflow",
        Kind::Counter,
        "Connections refused because of --max-connections.",
        |upstream| upstream.stats.overflowed.load(Ordering::Relaxed),
    ),
    (
        "envoy_cluster_upstream_cx_rx_bytes_total",
        Kind::Counter,
        "Bytes received from endpoints.",
        |upstream| upstream.stats.received.load(Ordering::Relaxed),
    ),
    (
        "envoy_cluster_upstream_cx_tx_bytes_total",
        Kind::Counter,
        "Bytes sent to endpoints.",
        |upstream| upstream.stats.sent.load(Ordering::Relaxed),
    ),
    (
        "envoy_cluster_upstream_rq_total",
        Kind::Counter,
        "Connections and CONNECT requests that reached an endpoint.",
        |upstream| upstream.stats.opened.load(Ordering::Relaxed),
    ),
    (
        "envoy_cluster_circuit_breakers_default_cx_open",
        Kind::Gauge,
        "1 while the number of connections is --max-connections.",
        |upstream| u64::from(upstream.stats.active.load(Ordering::Relaxed) >= upstream.limit),
    ),
];

/// Adds the metrics of all `upstreams`. Computed on request, so the metrics of a removed Service disappear
/// together with the Service.
pub(crate) fn add_metrics(upstreams: &[Arc<Upstream>], page: &mut Page) {
    for (name, kind, help, value) in METRICS {
        let mut series = page.family(name, kind, help);
        for upstream in upstreams {
            series.value((CLUSTER, upstream.key.as_str()), value(upstream));
        }
    }
    let help = "Milliseconds from the end of the client's direction of a CONNECT stream to the end of the endpoint's direction.";
    let mut series = page.family(times::NAME, Kind::Histogram, help);
    for upstream in upstreams {
        upstream.stats.times.write(&upstream.key, &mut series);
    }
}
