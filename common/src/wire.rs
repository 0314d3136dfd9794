//! The packet dialect's codec-level parts.

pub mod authority;
