//! The agent end of the tunnel: connects to every server and dials what they ask for.
//! The same as an OpenVPN client: [`openvpn`].

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
