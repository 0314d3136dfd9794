//! The configuration of the node tunnel.

mod flags;

use std::ffi::OsString;
use std::time::Duration;

use culvert_host::flags::{Exit, GoDuration, HostPort};
use culvert_host::telemetry::logging::LogConfig;
use http::uri::Authority;

use self::flags::Flags;
use super::interface::Interface;

/// The program's name in usage texts and log file names.
pub const PROGRAM: &str = "culvert-node-tunnel";

/// Largest number of connections to the proxy. Each connection carries hundreds of streams, so opening more
/// than a few connections would only cost memory at both ends.
pub(crate) const MAX_CONNECTIONS: usize = 64;

/// Complete configuration of a node tunnel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Listeners, with the Service behind each.
    pub routes: Vec<Route>,
    /// Interface to create and maintain for the listen addresses. `None` by default: the node already has the
    /// addresses.
    pub interface: Option<Interface>,
    /// CONNECT port of the seed's nodeport-proxy. A host name is resolved again for each connection.
    pub proxy: HostPort,
    /// Number of HTTP/2 connections to the proxy, 1 to `MAX_CONNECTIONS`. With 1, all clients share one
    /// network path and one processor at each end. Default 2.
    pub connections: usize,
    /// Listener for health and metrics. Default `0.0.0.0:8002`.
    pub stats: HostPort,
    /// Time for clients to disconnect after SIGTERM; the remaining clients are then disconnected. Default
    /// 25 s.
    pub drain_timeout: Duration,
    /// Destination and verbosity of the log.
    pub logging: LogConfig,
    /// Warnings to log once logging works, one line each.
    pub warnings: Vec<String>,
}

/// A listener and its target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// Listen address for clients.
    pub listen: HostPort,
    /// Authority in the CONNECT request to the proxy: the target Service and port.
    pub authority: Authority,
}

// === impl Config ===

impl Config {
    /// Reads a command line, program name first. Flags may have one dash or two, as in Go.
    ///
    /// # Errors
    /// Returns [`Exit`] for a help request (code 0) or an invalid command line (code 1). The text for an
    /// invalid command line lists every problem.
    pub fn from_args(args: impl IntoIterator<Item: Into<OsString>>) -> Result<Self, Exit> {
        Flags::read(args.into_iter().map(Into::into))
    }

    /// Returns every option in effect as `name=value`, for the log at start.
    pub fn describe(&self) -> Vec<String> {
        // Destructured so that a new field cannot be left out.
        let Self {
            routes,
            interface,
            proxy,
            connections,
            stats,
            drain_timeout,
            logging,
            warnings: _,
        } = self;
        let route = |Route { listen, authority }: &Route| format!("listen={listen}={authority}");
        let mut lines: Vec<String> = routes.iter().map(route).collect();
        if let Some(Interface {
            name, addresses, ..
        }) = interface
        {
            lines.push(format!("if={name}"));
            lines.extend(addresses.iter().map(|address| format!("addr={address}")));
        }
        lines.push(format!("proxy={proxy}"));
        lines.push(format!("connections={connections}"));
        lines.push(format!("stats={stats}"));
        lines.push(format!(
            "drain-timeout={}",
            GoDuration::from(*drain_timeout)
        ));
        lines.extend(logging.describe());
        lines
    }
}

#[cfg(test)]
mod tests;
