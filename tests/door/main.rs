//! Tests of the seed's front door: the real program with good and bad input and with foreign peers.
//!
//! | module | content |
//! |---|---|
//! | [`support`] | a running nodeport-proxy with routes, endpoints and clients |
//! | [`frames`] | HTTP/2 in single frames |
//! | [`abuse`] | malicious clients |
//! | [`judge`] | comparison with Envoy |
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

mod frames;
mod support;

mod abuse;
mod balancer;
mod changes;
mod congestion;
mod discovery;
mod interface;
mod judge;
mod long_path;
mod memory;
mod node;
mod node_ports;
mod origins;
mod peers;
mod quic;
mod resets;
mod rolls;
mod rotation;
mod silence;
mod sni;
mod tokens;
mod tunnels;
