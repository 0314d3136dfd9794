//! Logging in klog's form and the metrics registry.

pub mod logging;
pub mod metrics;
