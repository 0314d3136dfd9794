//! The QUIC transport between our server and our agent.

pub mod connection_id;
