//! The metrics of one program instance, in Prometheus' text format.
//!
//! A [`Registry`] owns every series of one server or one agent. Nothing is global: several servers
//! may live in one process (tests, the developer cluster), each with its own page of metrics.
//! Handles are resolved once and kept by their users; [`Family`] does that for label sets that are
//! closed enums, which is the only kind of label the hot path may use.
//!
//! Names are exported verbatim, because the upstream ones break the naming rules (a counter called
//! `dial_failure_count`, for one) and dashboards depend on them.

pub mod family;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Label, Level, Metadata, Recorder};
use metrics_exporter_prometheus::{
    BuildError, Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder,
};
use metrics_process::Collector;
use tokio_util::sync::CancellationToken;

pub use family::{Family, Handle, LabelSet};

/// The buckets of a histogram without buckets of its own, in seconds: the Prometheus client
/// libraries' defaults. Without any, the exporter would turn the histogram into a summary.
pub const DEFAULT_BUCKETS: [f64; 11] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];

/// How often samples that nobody scrapes are folded into their buckets. Until then each one
/// occupies 8 bytes, so a longer pause costs memory and a shorter one CPU time.
pub const UPKEEP_INTERVAL: Duration = Duration::from_secs(10);

/// Below this bound Go prints a bucket's `le` label in exponent form (`1e-05`).
const GO_EXPONENT_BELOW: f64 = 1e-4;

const METADATA: Metadata<'static> = Metadata::new("culvert", Level::INFO, None);

/// Why a registry could not be built.
#[derive(Debug, thiserror::Error)]
pub enum MetricsError {
    /// A histogram was declared with an empty list of buckets.
    #[error("histogram {name} has no usable buckets: {reason}")]
    Buckets {
        /// The histogram's name.
        name: String,
        /// The exporter's complaint.
        reason: BuildError,
    },
}

/// All series of one program instance.
pub struct Registry {
    recorder: PrometheusRecorder,
    handle: PrometheusHandle,
    process: Collector,
    /// Bucket bounds as the exporter prints them, and as Go does, where the two differ.
    bounds: Vec<(String, String)>,
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry").finish_non_exhaustive()
    }
}

// === impl Registry ===

impl Registry {
    /// A registry whose histograms have the given upper bounds (ascending, without `+Inf`), by
    /// full name. Histograms that are not listed get [`DEFAULT_BUCKETS`].
    ///
    /// # Errors
    ///
    /// A histogram with an empty list of bounds.
    pub fn new(buckets: &[(&str, &[f64])]) -> Result<Arc<Self>, MetricsError> {
        let named = |name: &str| {
            let name = name.to_owned();
            move |reason| MetricsError::Buckets { name, reason }
        };
        let mut builder = PrometheusBuilder::new()
            .set_buckets(&DEFAULT_BUCKETS)
            .map_err(named("(default)"))?;
        let mut bounds = Vec::new();
        for (name, values) in buckets {
            builder = builder
                .set_buckets_for_metric(Matcher::Full((*name).to_owned()), values)
                .map_err(named(name))?;
            bounds.extend(values.iter().filter_map(|bound| go_bound(*bound)));
        }
        bounds.sort();
        bounds.dedup();

        let recorder = builder.build_recorder();
        let process = Collector::default();
        metrics::with_local_recorder(&recorder, || process.describe());
        Ok(Arc::new(Self {
            handle: recorder.handle(),
            recorder,
            process,
            bounds,
        }))
    }

    /// The counter `name` with these labels; created at 0. The first `help` for a name stands.
    pub fn counter(
        &self,
        name: &'static str,
        labels: &[(&'static str, &str)],
        help: &'static str,
    ) -> Counter {
        self.recorder
            .describe_counter(KeyName::from_const_str(name), None, help.into());
        self.recorder
            .register_counter(&key(name, labels), &METADATA)
    }

    /// The gauge `name` with these labels; created at 0. The first `help` for a name stands.
    pub fn gauge(
        &self,
        name: &'static str,
        labels: &[(&'static str, &str)],
        help: &'static str,
    ) -> Gauge {
        self.recorder
            .describe_gauge(KeyName::from_const_str(name), None, help.into());
        self.recorder.register_gauge(&key(name, labels), &METADATA)
    }

    /// The histogram `name` with these labels, created empty. Its buckets are those given to
    /// [`Registry::new`]. The first `help` for a name stands.
    pub fn histogram(
        &self,
        name: &'static str,
        labels: &[(&'static str, &str)],
        help: &'static str,
    ) -> Histogram {
        self.recorder
            .describe_histogram(KeyName::from_const_str(name), None, help.into());
        self.recorder
            .register_histogram(&key(name, labels), &METADATA)
    }

    /// The page of metrics (text format 0.0.4), with fresh `process_*` series. Reads `/proc`, so it
    /// blocks for some tens of microseconds.
    pub fn render(&self) -> String {
        metrics::with_local_recorder(&self.recorder, || self.process.collect());
        self.handle.run_upkeep();
        let page = self.handle.render();
        self.bounds.iter().fold(page, |page, (own, go)| {
            page.replace(&format!("le=\"{own}\""), &format!("le=\"{go}\""))
        })
    }

    /// Folds waiting histogram samples into their buckets every [`UPKEEP_INTERVAL`] until
    /// `shutdown`. A program that is never scraped would otherwise keep every sample.
    pub async fn run_upkeep(&self, shutdown: CancellationToken) {
        let mut tick = tokio::time::interval(UPKEEP_INTERVAL);
        while shutdown.run_until_cancelled(tick.tick()).await.is_some() {
            self.handle.run_upkeep();
        }
    }
}

/// Counts a thing that exists: +1 now, -1 when dropped.
pub struct GaugeGuard(Gauge);

impl GaugeGuard {
    /// Adds one to `gauge` for the life of the guard.
    #[must_use = "the gauge falls back as soon as the guard is dropped"]
    pub fn new(gauge: &Gauge) -> Self {
        gauge.increment(1);
        Self(gauge.clone())
    }
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        self.0.decrement(1);
    }
}

impl fmt::Debug for GaugeGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GaugeGuard")
    }
}

/// Registers `culvert_build_info`, always 1, whose labels name the program and its version.
pub fn register_build_info(registry: &Registry, component: &'static str, version: &'static str) {
    registry
        .gauge(
            "culvert_build_info",
            &[("component", component), ("version", version)],
            "Always 1; the labels tell which program this is and its version.",
        )
        .set(1);
}

fn key(name: &'static str, labels: &[(&'static str, &str)]) -> Key {
    let labels: Vec<Label> = labels
        .iter()
        .map(|(key, value)| Label::new(*key, (*value).to_owned()))
        .collect();
    Key::from_parts(name, labels)
}

/// A bound as Rust and as Go print it, if they differ. `le` is part of a series' identity: sums
/// over both implementations would otherwise have two buckets for one bound.
fn go_bound(bound: f64) -> Option<(String, String)> {
    if bound <= 0.0 || bound >= GO_EXPONENT_BELOW {
        return None;
    }
    let (mantissa, exponent) = format!("{bound:e}")
        .split_once("e-")
        .map(|(mantissa, exponent)| (mantissa.to_owned(), exponent.to_owned()))?;
    Some((bound.to_string(), format!("{mantissa}e-{exponent:0>2}")))
}

#[cfg(test)]
mod tests;
