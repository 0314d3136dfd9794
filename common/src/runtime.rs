//! Task tracking, shutdown, signals.
