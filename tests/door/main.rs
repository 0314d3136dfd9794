//! The seed's front door: the real program, with good and bad input and foreign peers.
//!
//! | module | what it holds |
//! |---|---|
//! | [`support`] | a running nodeport-proxy and its routes, endpoints, clients |
//! | [`frames`] | HTTP/2 in single frames |
//! | [`abuse`] | clients that mean ill |
//! | [`judge`] | Envoy and ours, side by side |
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

mod frames;
mod support;

mod abuse;
mod balancer;
mod changes;
mod discovery;
mod interface;
mod judge;
mod node;
mod node_ports;
mod peers;
mod silence;
mod sni;
mod tokens;
mod tunnels;
