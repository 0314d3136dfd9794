//! The agent end of the tunnel: connects to every server and dials what they ask for.
//! The same as an OpenVPN client: [`openvpn`]. And the node's end of the tunnel to a seed's front door: [`node_tunnel`].

pub mod agent;
pub mod app;
pub mod cli;
pub mod config;
pub mod connect;
pub mod endpoint;
pub mod metrics;
pub mod native;
pub mod node_tunnel;
pub mod openvpn;
pub mod stream;
pub mod sync;
