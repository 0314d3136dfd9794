//! The operator's tool.

pub mod lab;
