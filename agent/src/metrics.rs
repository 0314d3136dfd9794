//! Metrics
