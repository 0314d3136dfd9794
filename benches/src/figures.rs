//! Figures of measurements, and their metrics.

/// Bytes per MiB and per GiB.
pub(crate) const MIB: f64 = (1u64 << 20) as f64;
pub(crate) const GIB: f64 = (1u64 << 30) as f64;

pub(crate) const RATE: Metric = Metric::higher("MiB/s");
pub(crate) const CPU_PER_GIB: Metric = Metric::lower("CPU s/GiB");
pub(crate) const P50: Metric = Metric::lower("p50 us");
pub(crate) const P99: Metric = Metric::lower("p99 us");
pub(crate) const CPU_PER_ECHO: Metric = Metric::lower("CPU us/echo");
pub(crate) const BULK_RATE: Metric = Metric::higher("bulk MiB/s");
pub(crate) const DIAL_RATE: Metric = Metric::higher("dials/s");
pub(crate) const CPU_PER_DIAL: Metric = Metric::lower("CPU us/dial");
pub(crate) const P99_STALLED: Metric = Metric::lower("p99 stalled");
pub(crate) const RATIO_STALLED: Metric = Metric::lower("by alone");
pub(crate) const ECHO_AFTER: Metric = Metric::lower("echo us after");
pub(crate) const DIAL_AFTER: Metric = Metric::lower("dial us after");
pub(crate) const ECHO_WORST: Metric = Metric::lower("echo worst ms");
pub(crate) const DIAL_WORST: Metric = Metric::lower("dial worst ms");
pub(crate) const ECHO_BY_BEFORE: Metric = Metric::lower("echo by before");
pub(crate) const DIAL_BY_BEFORE: Metric = Metric::lower("dial by before");
pub(crate) const CPU_BY_BEFORE: Metric = Metric::lower("CPU by before");
pub(crate) const MEMORY_START: Metric = Metric::lower("MiB at start");
pub(crate) const MEMORY_AFTER: Metric = Metric::lower("MiB after");
pub(crate) const IDLE_MEMORY: Metric = Metric::lower("KiB each");
pub(crate) const AGENT_MEMORY: Metric = Metric::lower("agent MiB");

/// A figure of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Metric {
    /// Name with the unit.
    pub(crate) name: &'static str,
    /// True if larger values are better.
    pub(crate) higher_is_better: bool,
}

impl Metric {
    /// Creates a metric for which larger values are better.
    pub(crate) const fn higher(name: &'static str) -> Self {
        Self {
            name,
            higher_is_better: true,
        }
    }

    /// Creates a metric for which smaller values are better.
    pub(crate) const fn lower(name: &'static str) -> Self {
        Self {
            name,
            higher_is_better: false,
        }
    }
}

/// Value of a time that exceeded its limit.
pub(crate) const HUNG: f64 = f64::INFINITY;

/// Figures of one measurement.
pub(crate) type Figures = Vec<(Metric, f64)>;
