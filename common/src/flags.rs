//! pflag-compatible flag values.
