//! What the node's end of the tunnel is told to do.

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

/// The most connections to the proxy. Each carries hundreds of streams; more than a few only cost
/// memory at both ends.
pub const MAX_CONNECTIONS: usize = 64;

/// Everything the tunnel is told at start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Where it listens, and for whom.
    pub routes: Vec<Route>,
    /// The interface to make and keep for these addresses; by default others see to it.
    pub interface: Option<Interface>,
    /// The CONNECT port of the seed's nodeport-proxy. A name is looked up anew for each connection.
    pub proxy: HostPort,
    /// How many HTTP/2 connections to the proxy there are at once, 1 to [`MAX_CONNECTIONS`]. One
    /// shares a single path, and one processor here and at the proxy, among all clients. Default 2.
    pub connections: usize,
    /// Health and metrics. Default `0.0.0.0:8002`.
    pub stats: HostPort,
    /// How long clients may take to end after SIGTERM; then they are cut. Default 25 s.
    pub drain_timeout: Duration,
    /// Where log lines go and how many of them.
    pub logging: LogConfig,
    /// What the operator should be told once logging works: one line each.
    pub warnings: Vec<String>,
}

/// One listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// Where clients connect.
    pub listen: HostPort,
    /// What the proxy is asked for.
    pub authority: Authority,
}

// === impl Config ===

impl Config {
    /// Reads a command line, program name first. Flags may have one dash or two, as in Go.
    ///
    /// # Errors
    /// [`Exit`] when there is nothing to run: help was asked for (code 0), or the command line is
    /// wrong in one or more ways (code 1), all of which are named.
    pub fn from_args<I, A>(args: I) -> Result<Self, Exit>
    where
        I: IntoIterator<Item = A>,
        A: Into<OsString>,
    {
        Flags::read(args.into_iter().map(Into::into))
    }

    /// Every option in effect as `name=value`, for the log at start.
    pub fn describe(&self) -> Vec<String> {
        // Destructured so that a new field can not be left out.
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
