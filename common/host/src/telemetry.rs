//! Logging in klog's format, failures that are logged once, and the metrics registry.

pub mod log_once;
pub mod logging;
pub mod metrics;
