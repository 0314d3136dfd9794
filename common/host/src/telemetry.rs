//! Logging in klog's format, and the metrics registry.

pub mod logging;
pub mod metrics;
