//! The agent end.

pub mod config;
pub mod metrics;
