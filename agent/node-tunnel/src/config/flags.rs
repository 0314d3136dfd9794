//! The command-line flags of the node tunnel: names, defaults, help texts and validation.

use std::ffi::OsString;
use std::net::IpAddr;

use clap::{Args, Parser};
use culvert_host::flags::parse::with_two_dashes;
use culvert_host::flags::values::go_int;
use culvert_host::flags::{
    Exit, GoDuration, HostPort, KlogFlags, Parsed, Problems, StringSlice, parse,
};
use culvert_host::net::dial::split_host_port;
use http::uri::Authority;

use super::super::interface::{Interface, KIND};
use super::{Config, MAX_CONNECTIONS, PROGRAM, Route};

/// Default verbosity: no log line per connection.
const VERBOSITY: &str = "--v=2";

/// Example of a listen address, for error texts.
const LISTEN: &str = "100.64.30.10:6443";

/// Example of an interface name: the name that KKP (Kubermatic Kubernetes Platform) uses.
const NAME: &str = "envoyagent";
/// Example of an interface address: KKP's default.
const ADDRESS: &str = "100.64.30.10";

/// Longest interface name, in bytes (IFNAMSIZ without the terminating NUL).
const MAX_NAME: usize = 15;

/// Example of an authority, for error texts.
const AUTHORITY: &str = "apiserver-external.cluster-x.svc.cluster.local:443";

/// Example of a proxy address, for error texts.
const PROXY: &str = "cluster-x.seed.example.com:8088";

/// Listens on addresses of this node and carries the accepted connections to Services of the seed, as CONNECT
/// streams over a few HTTP/2 connections to the seed's nodeport-proxy.
#[derive(Parser, Debug)]
#[command(name = PROGRAM, version)]
pub(super) struct Flags {
    #[command(flatten)]
    tunnel: TunnelFlags,
    #[command(flatten)]
    interface: InterfaceFlags,
    #[command(flatten)]
    operations: OperationsFlags,
    #[command(flatten)]
    klog: KlogFlags,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Tunnel")]
struct TunnelFlags {
    /// Listen address, and the authority to request from the proxy; comma-separated, or repeated
    #[arg(long, value_name = "HOST:PORT=AUTHORITY,...")]
    listen: Vec<StringSlice>,

    /// CONNECT port of the seed's nodeport-proxy; the connection is plain text
    #[arg(long, value_name = "HOST:PORT", default_value = "")]
    proxy: String,

    /// HTTP/2 connections to the proxy, shared by all clients
    #[arg(long, value_name = "N", default_value = "2", value_parser = go_int)]
    connections: i64,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Interface")]
struct InterfaceFlags {
    /// Dummy interface to create and maintain; needs CAP_NET_ADMIN. Empty means no interface
    #[arg(long = "if", value_name = "NAME", default_value = "")]
    name: String,

    /// Addresses of the interface; comma-separated, or repeated
    #[arg(long = "addr", value_name = "IP,...")]
    addresses: Vec<StringSlice>,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Operation")]
struct OperationsFlags {
    /// Address of health and metrics; empty means all interfaces, IPv4 and IPv6
    #[arg(long, value_name = "HOST", default_value = "0.0.0.0")]
    stats_address: String,

    /// Port of health and metrics
    #[arg(long, value_name = "PORT", default_value = "8002", value_parser = go_int)]
    stats_port: i64,

    /// Time for clients to disconnect after SIGTERM; 0 disconnects them at once
    #[arg(long, value_name = "DURATION", default_value = "25s")]
    drain_timeout: GoDuration,
}

// === impl Flags ===

impl Flags {
    /// Parses, checks and converts a command line.
    pub(super) fn read(mut args: impl Iterator<Item = OsString>) -> Result<Config, Exit> {
        let program = args.next();
        let verbosity = OsString::from(VERBOSITY);
        // A single dash is valid too, as in network-interface-manager.
        let args = args.map(|arg| {
            arg.to_str()
                .map(|arg| with_two_dashes(arg).into())
                .unwrap_or(arg)
        });
        let args: Vec<OsString> = program.into_iter().chain([verbosity]).chain(args).collect();
        let Parsed { flags, strays } = parse::<Self, _, _>(args)?;
        flags
            .validate(Problems::new(&strays))
            .map_err(|problems| Exit::problems(PROGRAM, &problems))
    }

    fn validate(self, mut problems: Problems) -> Result<Config, Vec<String>> {
        let p = &mut problems;
        let (tunnel, operations) = (&self.tunnel, &self.operations);
        let routes = routes(p, &StringSlice::concat(&tunnel.listen));
        let interface = interface(p, &self.interface);
        let proxy = host_port(&tunnel.proxy, PROXY).unwrap_or_else(|reason| {
            p.error(format!("--proxy: {reason}"));
            HostPort::new("", 0)
        });
        let given = tunnel.connections;
        let connections = usize::try_from(given).unwrap_or(0);
        p.require((1..=MAX_CONNECTIONS).contains(&connections), || {
            format!("--connections must be 1 to {MAX_CONNECTIONS}, got {given}")
        });
        let given = operations.stats_port;
        let stats_port = u16::try_from(given).unwrap_or_else(|_| {
            p.error(format!("--stats-port must be 0 to 65535, got {given}"));
            0
        });
        let warnings = problems.finish()?;
        Ok(Config {
            routes,
            interface,
            proxy,
            connections,
            stats: HostPort::new(&operations.stats_address, stats_port),
            drain_timeout: operations.drain_timeout.saturating(),
            logging: self.klog.log_config(),
            warnings,
        })
    }
}

fn routes(p: &mut Problems, pairs: &[String]) -> Vec<Route> {
    p.require(!pairs.is_empty(), || {
        format!("--listen must be set; write HOST:PORT=AUTHORITY, such as {LISTEN}={AUTHORITY}")
    });
    let mut routes: Vec<Route> = Vec::new();
    for pair in pairs {
        match route(pair) {
            Ok(route) => {
                let is_new = routes.iter().all(|known| known.listen != route.listen);
                p.require(is_new, || {
                    let listen = &route.listen;
                    format!("--listen: {listen} is given twice; write one authority for it")
                });
                routes.push(route);
            }
            Err(reason) => p.error(format!("--listen: {reason}")),
        }
    }
    routes
}

fn route(pair: &str) -> Result<Route, String> {
    let (listen, authority) = pair.split_once('=').ok_or_else(|| {
        format!("{pair:?} has no '='; write HOST:PORT=AUTHORITY, such as {LISTEN}={AUTHORITY}")
    })?;
    let listen = host_port(listen, LISTEN)?;
    let target = host_port(authority, AUTHORITY)?.to_string();
    match Authority::try_from(target) {
        // The `http` crate accepts a user name in an authority; a proxy does not.
        Ok(authority) if !authority.as_str().contains('@') => Ok(Route { listen, authority }),
        _ => Err(format!(
            "{authority:?} is not a valid authority; write one such as {AUTHORITY}"
        )),
    }
}

fn interface(p: &mut Problems, flags: &InterfaceFlags) -> Option<Interface> {
    let (name, texts) = (&flags.name, StringSlice::concat(&flags.addresses));
    if name.is_empty() {
        p.require(texts.is_empty(), || {
            format!("--addr needs an interface; write --if={NAME} too")
        });
        return None;
    }
    p.require(is_name(name), || {
        format!("--if: {name:?} is not a valid interface name; write one such as {NAME}")
    });
    p.require(!texts.is_empty(), || {
        format!("--if needs an address; write --addr={ADDRESS}, or another address")
    });
    let mut addresses = Vec::new();
    for text in &texts {
        match text.parse::<IpAddr>() {
            Ok(address)
                if address.is_unspecified() || address.is_multicast() || address.is_loopback() =>
            {
                                p.error(format!("--addr: a dummy interface cannot have the address {address}"));
            }
            Ok(address) if addresses.contains(&address) => {
                p.error(format!("--addr: {address} is given twice"));
            }
            Ok(address) => addresses.push(address),
            Err(_) => p.error(format!(
                                "--addr: {text:?} is not an IP address; write one such as {ADDRESS}, without a prefix"
            )),
        }
    }
    Some(Interface {
        name: name.clone(),
        kind: KIND,
        addresses,
    })
}

/// True if the kernel accepts the name unchanged. The kernel replaces `%d` with a number, so `%` is not
/// allowed.
fn is_name(name: &str) -> bool {
    let is_taken = |c: char| c.is_ascii_graphic() && !matches!(c, '/' | ':' | '%');
    name.len() <= MAX_NAME && name.chars().all(is_taken) && !matches!(name, "." | "..")
}

/// Parses a host and a port, both required. An empty host would mean all addresses of the node, and any
/// neighbor of the node could reach the Service.
fn host_port(text: &str, example: &str) -> Result<HostPort, String> {
    let wrong = |what: &str| format!("{text:?} {what}; write HOST:PORT, such as {example}");
    let (host, port) = split_host_port(text).map_err(|error| wrong(error.reason))?;
    if host.is_empty() {
        return Err(wrong("has no host"));
    }
    match port.parse::<u16>() {
        Ok(port) if port != 0 => Ok(HostPort::new(host, port)),
        _ => Err(wrong("has no port from 1 to 65535")),
    }
}
