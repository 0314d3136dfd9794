//! Logging in klog's format, failures that are logged once while they repeat, panics, and the metrics registry.

pub mod log_once;
pub mod logging;
pub mod metrics;
pub mod panics;
