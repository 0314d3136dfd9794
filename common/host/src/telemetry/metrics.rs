//! The metrics of one program instance, in Prometheus' text format.
//!
//! A [`Registry`] owns every series of one server or one agent. No registry is global, because several
//! servers may run in one process (tests, the developer cluster), each with its own metrics page. Callers
//! resolve a handle once and keep it. [`Family`] does this for label sets that are closed enums; the hot path
//! may use only such labels.
//!
//! Names are exported verbatim, because some upstream names break the naming rules (for example, a counter
//! called `dial_failure_count`) and dashboards depend on them.

pub(crate) mod family;
pub(crate) mod page;
mod process;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use metrics::{Gauge, Key, Label, Level, Metadata};
use metrics_exporter_prometheus::{
    BuildError, Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder,
};
use tokio_util::sync::CancellationToken;

pub use family::{Family, Handle, LabelSet, closed_connections};
pub use page::{Kind, Page, Series};

use super::logging::{LostLine, lost_lines};
use super::panics;

/// Default histogram buckets in seconds: the defaults of the Prometheus client libraries. Without buckets,
/// the exporter would turn a histogram into a summary.
pub const DEFAULT_BUCKETS: [f64; 11] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];

/// Interval for folding waiting histogram samples into their buckets. A waiting sample uses 8 bytes, so a
/// longer interval costs memory and a shorter interval costs CPU time.
pub const UPKEEP_INTERVAL: Duration = Duration::from_secs(10);

/// Bound below which Go prints a bucket's `le` label in exponent form (`1e-05`).
const GO_EXPONENT_BELOW: f64 = 1e-4;

const METADATA: Metadata<'static> = Metadata::new("culvert", Level::INFO, None);

/// Error while building a registry: a histogram was declared with an empty list of buckets.
#[derive(Debug, thiserror::Error)]
#[error("histogram {name} has no usable buckets: {reason}")]
pub struct MetricsError {
    name: String,
    reason: BuildError,
}

/// All series of one program instance.
pub struct Registry {
    recorder: PrometheusRecorder,
    handle: PrometheusHandle,
    /// Bucket bounds that the exporter and Go print differently: the exporter's text, then Go's text.
    bounds: Vec<(String, String)>,
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry").finish_non_exhaustive()
    }
}

// === impl Registry ===

impl Registry {
    /// Creates a registry. `buckets` lists the upper bounds of histograms (ascending, without `+Inf`), by
    /// full name. Other histograms get [`DEFAULT_BUCKETS`].
    ///
    /// # Errors
    ///
    /// Fails if a histogram has an empty list of bounds.
    pub fn new(buckets: &[(&str, &[f64])]) -> Result<Arc<Self>, MetricsError> {
        let named = |name: &str| {
            let name = name.to_owned();
            move |reason| MetricsError { name, reason }
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
        Ok(Arc::new(Self {
            handle: recorder.handle(),
            recorder,
            bounds,
        }))
    }

    /// Renders the metrics page (text format 0.0.4), with current `process_*` series. The call reads `/proc`,
    /// and therefore blocks for some tens of microseconds.
    pub fn render(&self) -> String {
        self.render_with(|_| ())
    }

    /// Renders the metrics page as [`Registry::render`] does, with the families from `add` at its end.
    pub fn render_with(&self, add: impl FnOnce(&mut Page)) -> String {
        self.handle.run_upkeep();
        let page = self.handle.render();
        let page = self.bounds.iter().fold(page, |page, (own, go)| {
            page.replace(&format!("le=\"{own}\""), &format!("le=\"{go}\""))
        });
        let mut page = Page(page);
        process::add(&mut page);
        let help = "Panics of the process. Each panic is a bug.";
        page.single("culvert_panics_total", Kind::Counter, help, panics::count());
        let help = "Lines of the process that are missing from its log.";
        let mut lost = page.family("culvert_log_lost_lines_total", Kind::Counter, help);
        for reason in LostLine::ALL {
            lost.value(("reason", reason.as_str()), lost_lines(*reason));
        }
        add(&mut page);
        page.0
    }

    /// Folds waiting histogram samples into their buckets every [`UPKEEP_INTERVAL`] until `shutdown`. Without
    /// this task, a program that is never scraped would keep every sample.
    pub async fn run_upkeep(self: Arc<Self>, shutdown: CancellationToken) {
        let mut tick = tokio::time::interval(UPKEEP_INTERVAL);
        while shutdown.run_until_cancelled(tick.tick()).await.is_some() {
            self.handle.run_upkeep();
        }
    }
}

/// Guard that counts an existing object: +1 when created, -1 when dropped.
pub struct GaugeGuard(Gauge);

impl GaugeGuard {
    /// Increments `gauge` until the guard is dropped.
    #[must_use = "dropping the guard decrements the gauge"]
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

/// Registers `culvert_build_info`, always 1, with labels for the program and its version.
pub fn register_build_info(registry: &Registry, component: &'static str, version: &'static str) {
    registry
        .gauge(
            "culvert_build_info",
            &[("component", component), ("version", version)],
            "Always 1; the labels name the program and its version.",
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

/// Returns a bound as Rust and as Go print it; `None` if the texts are equal. `le` is part of a series'
/// identity: with two texts for one bound, sums over both implementations would have two buckets.
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
