//! QUIC connections.

pub mod initial;
