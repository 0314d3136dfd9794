//! The Konnectivity agent: connects to every server and dials endpoints on request.
//!
//! The agent can also be an OpenVPN client: [`openvpn`].

pub mod agent;
pub mod app;
pub mod cli;
pub mod config;
pub mod connect;
pub mod metrics;
pub mod native;
pub mod openvpn;
pub mod packet;
pub mod servers;
