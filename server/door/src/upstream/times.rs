//! The histogram `envoy_cluster_upstream_rq_time`: the time from the end of a client's bytes to the end of
//! the endpoint's bytes.
//!
//! Envoy measures from the end of a request to the end of the response. The request of a CONNECT tunnel ends
//! with the client's bytes, so Envoy's histogram shows the same time for CONNECT. Connections by server name
//! or by node port have no such time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use culvert_host::telemetry::metrics::Series;

use crate::routes::UpstreamKey;

/// Label of every metric of an upstream, with the upstream's key.
pub(super) const CLUSTER: &str = "envoy_cluster_name";

/// Name of the metric.
pub(super) const NAME: &str = "envoy_cluster_upstream_rq_time";

/// Upper bounds in milliseconds, without `+Inf`, as in Envoy.
const BOUNDS: [f64; 19] = [
    0.5, 1.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1e3, 2.5e3, 5e3, 1e4, 3e4, 6e4, 3e5, 6e5,
    1.8e6, 3.6e6,
];

/// A histogram, in milliseconds.
#[derive(Debug, Default)]
pub(crate) struct Times {
    /// Count of each bucket, not cumulative.
    counts: [AtomicU64; BOUNDS.len()],
    /// Count above the last bound.
    more: AtomicU64,
    sum: AtomicU64,
}

// === impl Times ===

impl Times {
    /// Records a time.
    pub(crate) fn record(&self, time: Duration) {
        let millis = time.as_secs_f64() * 1e3;
        let bound = BOUNDS.iter().position(|bound| millis <= *bound);
        let count = bound.and_then(|bound| self.counts.get(bound));
        count.unwrap_or(&self.more).fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(millis as u64, Ordering::Relaxed);
    }

    /// Adds the histogram of one upstream, unless nothing was counted yet: Envoy has no series then either,
    /// and there may be thousands of upstreams.
    pub(crate) fn write(&self, key: &UpstreamKey, series: &mut Series<'_>) {
        let counts = self.counts.iter().map(|it| it.load(Ordering::Relaxed));
        let buckets: Vec<(f64, u64)> = BOUNDS.into_iter().zip(counts).collect();
        let more = self.more.load(Ordering::Relaxed);
        if more > 0 || buckets.iter().any(|(_, count)| *count > 0) {
            let sum = self.sum.load(Ordering::Relaxed);
            series.histogram((CLUSTER, key.as_str()), buckets, more, sum);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use culvert_host::telemetry::metrics::{Kind, Registry};

    use super::*;

    #[test]
    fn times_are_counted_in_cumulative_buckets() {
        let times = Times::default();
        let key = UpstreamKey::of_service("ns", "a", "");
        let registry = Registry::new(&[]).unwrap();
        let page = |times: &Times| {
            registry.render_with(|page| {
                times.write(&key, &mut page.family(NAME, Kind::Histogram, "h"));
            })
        };
        assert!(!page(&times).contains(&format!("{NAME}_")));
        for millis in [0, 5, 6, 9_000_000] {
            times.record(Duration::from_millis(millis));
        }
        let page = page(&times);
        for line in [
            "_bucket{envoy_cluster_name=\"ns/a\",le=\"0.5\"} 1",
            "_bucket{envoy_cluster_name=\"ns/a\",le=\"5\"} 2",
            "_bucket{envoy_cluster_name=\"ns/a\",le=\"10\"} 3",
            "_bucket{envoy_cluster_name=\"ns/a\",le=\"3600000\"} 3",
            "_bucket{envoy_cluster_name=\"ns/a\",le=\"+Inf\"} 4",
            "_sum{envoy_cluster_name=\"ns/a\"} 9000011",
            "_count{envoy_cluster_name=\"ns/a\"} 4",
        ] {
            assert!(page.contains(&format!("{NAME}{line}\n")), "{line}: {page}");
        }
    }
}
