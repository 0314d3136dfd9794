//! The operator's tool, and the lab that it shares with the tests and the benchmarks.

pub mod dev;
pub mod lab;
