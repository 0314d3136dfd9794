//! The configuration of the node tunnel.

mod envoy;
mod flags;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use culvert_host::flags::{Exit, GoDuration, HostPort};
use culvert_host::net::congestion::LinkCongestion;
use culvert_host::telemetry::logging::LogConfig;
use culvert_native::window::Pings;
use http::uri::Authority;
use rustls_pki_types::ServerName;

use self::flags::Flags;
use super::interface::Interface;

/// The program's name in usage texts and log file names.
pub const PROGRAM: &str = "culvert-node-tunnel";

/// Largest number of connections to the proxy. Each connection carries hundreds of streams, so opening more
/// than a few connections would only cost memory at both ends.
pub(crate) const MAX_CONNECTIONS: usize = 64;

/// Times of the pings to the proxy, unless a file sets others. KKP sets the same times for Envoy.
pub const PINGS: Pings = Pings {
    idle: Duration::from_secs(30),
    timeout: Duration::from_secs(5),
};

/// Complete configuration of a node tunnel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Work of the program. Default [`Mode::Tunnel`].
    pub mode: Mode,
    /// Listeners, with the Service behind each. Empty without [`Mode::Tunnel`].
    pub routes: Vec<Route>,
    /// Interface to create and maintain for the listen addresses. `None` by default: the node already has the
    /// addresses.
    pub interface: Option<Interface>,
    /// CONNECT port of the seed's nodeport-proxy. A host name is resolved again for each connection. Empty without
    /// [`Mode::Tunnel`].
    pub proxy: HostPort,
    /// TLS to the nodeport-proxy; `None` means plain text.
    pub tls: Option<ProxyTls>,
    /// Times of the pings to the nodeport-proxy. Default [`PINGS`].
    pub pings: Pings,
    /// Number of HTTP/2 connections to the proxy, 1 to `MAX_CONNECTIONS`. With 1, all clients share one
    /// network path and one processor at each end. Default 2.
    pub connections: usize,
    /// Listener for health and metrics. Default `0.0.0.0:8002`.
    pub stats: HostPort,
    /// Time for clients to disconnect after SIGTERM; the remaining clients are then disconnected. Default
    /// 25 s.
    pub drain_timeout: Duration,
    /// Congestion control of connections to the proxy. Default [`LinkCongestion::Auto`].
    pub link_congestion: LinkCongestion,
    /// Destination and verbosity of the log.
    pub logging: LogConfig,
    /// Warnings to log once logging works, one line each.
    pub warnings: Vec<String>,
}

/// Work of the program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Carry clients to the proxy, and maintain the interface, if there is one.
    #[default]
    Tunnel,
    /// Create the interface, then exit: network-interface-manager's mode `init`.
    Init,
    /// Create and maintain the interface: network-interface-manager's mode `probe`.
    Probe,
}

/// TLS to the nodeport-proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProxyTls {
    /// CA bundle that the proxy's certificate must chain to.
    pub ca: PathBuf,
    /// Certificate and key of this node; `None` presents no certificate.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// Name that the proxy's certificate must be valid for. Default: the host of the proxy.
    pub server_name: ServerName<'static>,
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
            mode,
            routes,
            interface,
            proxy,
            tls,
            pings,
            connections,
            stats,
            drain_timeout,
            link_congestion,
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
        let time = |time: Duration| GoDuration::from(time);
        match mode {
            Mode::Init => lines.push("mode=init".to_owned()),
            Mode::Probe => lines.push("mode=probe".to_owned()),
            Mode::Tunnel => {
                lines.push(format!("proxy={proxy}"));
                lines.push(format!("ping-idle={}", time(pings.idle)));
                lines.push(format!("ping-timeout={}", time(pings.timeout)));
                lines.push(format!("connections={connections}"));
                lines.push(format!("stats={stats}"));
                lines.push(format!("drain-timeout={}", time(*drain_timeout)));
                lines.push(format!("link-congestion={link_congestion}"));
            }
        }
        if let Some(tls) = tls {
            lines.push(format!("proxy-ca={}", tls.ca.display()));
            lines.push(format!("proxy-mtls={}", tls.identity.is_some()));
            lines.push(format!("proxy-server-name={}", tls.server_name.to_str()));
        }
        lines.extend(logging.describe());
        lines
    }
}

#[cfg(test)]
mod tests;
