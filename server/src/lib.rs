//! The server end of the tunnel: accepts kube-apiserver's connections and passes each to an agent.
//!
//! ```text
//! frontend/grpc ---------\
//! frontend/http_connect --+--> Dial --> router --> backend (agents' streams)
//!                                        ^
//!                         switch: the choice between two tunnels
//! ```

pub mod app;
pub mod backend;
pub mod cli;
pub mod config;
pub mod files;
mod frontend;
mod leases;
mod listener;
pub mod metrics;
mod router;
pub mod switch;
pub mod tunnel;
