//! The plain HTTP listener for health, metrics and admin paths.
