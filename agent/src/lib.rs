//! The Konnectivity agent: connects to every server and dials endpoints on request.
//!
//! The agent can also be an OpenVPN client: [`openvpn`].

mod addresses;
mod agent;
pub mod app;
pub mod cli;
pub mod config;
mod connect;
pub mod files;
mod introduction;
mod leases;
mod link;
pub mod metrics;
mod native;
pub mod openvpn;
mod packet;
mod path;
mod process;
mod quic;
mod resume;
mod search;
mod server_count;
mod servers;
