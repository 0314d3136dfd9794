//! The Konnectivity agent: connects to every server and dials endpoints on request.
//!
//! The agent can also be an OpenVPN client: [`openvpn`].

pub mod agent;
pub mod app;
pub mod cli;
pub mod config;
pub mod connect;
pub mod endpoint;
pub mod metrics;
pub mod native;
pub mod openvpn;
pub mod stream;
pub mod sync;
