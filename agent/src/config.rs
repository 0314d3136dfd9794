//! Flags
