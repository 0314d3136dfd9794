//! The server end.

pub mod config;
pub mod metrics;
