//! The command-line flags of the node tunnel: names, defaults, help texts and validation.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::Path;

use clap::{Args, Parser};
use culvert_host::flags::parse::with_two_dashes;
use culvert_host::flags::values::go_int;
use culvert_host::flags::{
    Exit, GoDuration, HostPort, KlogFlags, Parsed, Problems, StringSlice, parse,
};
use culvert_host::net::congestion::LinkCongestion;
use culvert_host::net::dial::split_host_port;
use culvert_native::window::Pings;
use http::uri::Authority;
use rustls_pki_types::ServerName;

use super::super::interface::{Interface, KIND};
use super::{Config, MAX_CONNECTIONS, Mode, PINGS, PROGRAM, ProxyTls, Route, envoy};

/// Default verbosity: no log line per connection.
const VERBOSITY: &str = "2";

/// Example of a listen address, for error texts.
const LISTEN: &str = "100.64.30.10:6443";

/// Example of an interface name: the name that KKP (Kubermatic Kubernetes Platform) uses.
const NAME: &str = "envoyagent";
/// Example of an interface address: KKP's default.
const ADDRESS: &str = "100.64.30.10";

/// Default address of health and metrics.
const STATS_HOST: &str = "0.0.0.0";
const STATS_PORT: u16 = 8002;

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
#[command(mut_arg("v", |arg| arg.default_value(VERBOSITY)))]
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

    /// CONNECT port of the seed's nodeport-proxy; plain text without --proxy-ca
    #[arg(long, value_name = "HOST:PORT", default_value = "")]
    proxy: String,

    /// PEM CA bundle that the proxy's certificate must chain to; turns on TLS. Changes of the files for TLS are followed
    #[arg(long, value_name = "FILE", default_value = "")]
    proxy_ca: String,

    /// PEM certificate chain of this node, for a proxy that requires one
    #[arg(long, value_name = "FILE", default_value = "")]
    proxy_cert: String,

    /// PEM private key of --proxy-cert
    #[arg(long, value_name = "FILE", default_value = "")]
    proxy_key: String,

    /// Name that the proxy's certificate must be valid for; empty means the host of --proxy
    #[arg(long, value_name = "NAME", default_value = "")]
    proxy_server_name: String,

    /// Envoy bootstrap file, as KKP writes it for its envoy-agent, instead of --listen and --proxy. A file with other
    /// contents is refused
    #[arg(short = 'c', long, value_name = "FILE", default_value = "")]
    config_path: String,

    /// No effect: unlike Envoy, several instances on one node share no memory
    #[arg(long)]
    use_dynamic_base_id: bool,

    /// HTTP/2 connections to the proxy, shared by all clients
    #[arg(long, value_name = "N", default_value = "2", value_parser = go_int)]
    connections: i64,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Interface")]
struct InterfaceFlags {
    /// Work for the interface only, as in KKP's network-interface-manager: init creates it and exits, probe also
    /// maintains it; empty carries clients too
    #[arg(long, value_name = "MODE", default_value = "")]
    mode: String,

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
    /// Address of health and metrics; empty means all interfaces, IPv4 and IPv6. Default: the stats listener of
    /// --config-path, or 0.0.0.0
    #[arg(long, value_name = "HOST")]
    stats_address: Option<String>,

    /// Port of health and metrics. Default: the stats listener of --config-path, or 8002
    #[arg(long, value_name = "PORT", value_parser = go_int)]
    stats_port: Option<i64>,

    /// Time for clients to disconnect after SIGTERM; 0 disconnects them at once
    #[arg(long, value_name = "DURATION", default_value = "25s")]
    drain_timeout: GoDuration,

    /// Congestion control of connections to the seed's proxy: auto (bbr if the kernel permits it), system (the kernel's
    /// default), or a name such as cubic
    #[arg(long, value_name = "NAME", default_value_t)]
    link_congestion: LinkCongestion,
}

// === impl Flags ===

impl Flags {
    /// Parses, checks and converts a command line.
    pub(super) fn read(mut args: impl Iterator<Item = OsString>) -> Result<Config, Exit> {
        let program = args.next();
        // A single dash is valid too, as in network-interface-manager.
        let args = args.map(|arg| {
            arg.to_str()
                .map(|arg| with_two_dashes(arg).into())
                .unwrap_or(arg)
        });
        let args: Vec<OsString> = program.into_iter().chain(args).collect();
        let Parsed { flags, strays } = parse::<Self, _, _>(args)?;
        flags
            .validate(Problems::new(&strays))
            .map_err(|problems| Exit::problems(PROGRAM, &problems))
    }

    fn validate(self, mut problems: Problems) -> Result<Config, Vec<String>> {
        let p = &mut problems;
        let (tunnel, operations) = (&self.tunnel, &self.operations);
        let mode = self.interface.mode(p);
        let interface = interface(p, &self.interface);
        let target = match mode {
            Mode::Tunnel => tunnel.target(p),
            Mode::Init | Mode::Probe => {
                p.require(interface.is_some(), || {
                    format!("--mode needs an interface; write --if={NAME} and --addr={ADDRESS} too")
                });
                p.require(tunnel.is_empty(), || {
                    "--mode=init and --mode=probe carry no clients: leave out --listen, --proxy..., \
                     and --config-path, or leave out --mode"
                        .to_owned()
                });
                Target::default()
            }
        };
        let tls = tunnel.tls(p, &target.proxy);
        let given = tunnel.connections;
        let connections = usize::try_from(given).unwrap_or(0);
        p.require((1..=MAX_CONNECTIONS).contains(&connections), || {
            format!("--connections must be 1 to {MAX_CONNECTIONS}, got {given}")
        });
        let mut stats = target
            .stats
            .unwrap_or_else(|| HostPort::new(STATS_HOST, STATS_PORT));
        if let Some(host) = &operations.stats_address {
            stats = HostPort::new(host, stats.port);
        }
        if let Some(given) = operations.stats_port {
            stats.port = u16::try_from(given).unwrap_or_else(|_| {
                p.error(format!("--stats-port must be 0 to 65535, got {given}"));
                0
            });
        }
        let drain_timeout = p.not_negative("drain-timeout", operations.drain_timeout);
        let warnings = problems.finish()?;
        Ok(Config {
            mode,
            routes: target.routes,
            interface,
            proxy: target.proxy,
            tls,
            pings: target.pings,
            connections,
            stats,
            drain_timeout,
            link_congestion: self.operations.link_congestion,
            logging: self.klog.log_config(),
            warnings,
        })
    }
}

/// Listeners, proxy and related settings, from flags or from a file.
struct Target {
    routes: Vec<Route>,
    proxy: HostPort,
    pings: Pings,
    stats: Option<HostPort>,
}

impl Default for Target {
    fn default() -> Self {
        Self {
            routes: Vec::new(),
            proxy: HostPort::new("", 0),
            pings: PINGS,
            stats: None,
        }
    }
}

impl TunnelFlags {
    /// True if no flag sets a listener or the proxy.
    fn is_empty(&self) -> bool {
        let texts = [
            &self.proxy,
            &self.proxy_ca,
            &self.proxy_cert,
            &self.proxy_key,
            &self.proxy_server_name,
            &self.config_path,
        ];
        self.listen.is_empty() && texts.into_iter().all(String::is_empty)
    }

    fn target(&self, p: &mut Problems) -> Target {
        let pairs = StringSlice::concat(&self.listen);
        if self.config_path.is_empty() {
            return Target {
                routes: routes(p, &pairs),
                proxy: host_port(&self.proxy, PROXY).unwrap_or_else(|reason| {
                    p.error(format!("--proxy: {reason}"));
                    HostPort::new("", 0)
                }),
                ..Target::default()
            };
        }
        p.require(pairs.is_empty() && self.proxy.is_empty(), || {
            "--config-path sets the listeners and the proxy: leave out --listen and --proxy, or leave out \
             --config-path"
                .to_owned()
        });
        self.translated(p).unwrap_or_else(|reason| {
            p.error(format!("--config-path: {reason}"));
            Target::default()
        })
    }

    /// Returns the contents of the file of `--config-path`.
    fn translated(&self, p: &mut Problems) -> Result<Target, String> {
        let file = envoy::read(Path::new(&self.config_path))?;
        file.warnings.into_iter().for_each(|text| p.warn(text));
        let checked = |address: HostPort| host_port(&address.to_string(), LISTEN);
        let mut routes = Vec::new();
        for (listen, authority) in file.routes {
            add_route(p, &mut routes, Route::new(checked(listen)?, &authority)?);
        }
        Ok(Target {
            routes,
            proxy: checked(file.proxy)?,
            pings: file.pings,
            stats: file.stats,
        })
    }

    fn tls(&self, p: &mut Problems, proxy: &HostPort) -> Option<ProxyTls> {
        let identity = p.key_pair("proxy", &self.proxy_cert, &self.proxy_key);
        let ca = p.file("proxy CA", &self.proxy_ca);
        let name = &self.proxy_server_name;
        p.require(ca.is_some() || (identity.is_none() && name.is_empty()), || {
            "--proxy-cert and --proxy-server-name need --proxy-ca: without it, the connection is plain text"
                .to_owned()
        });
        let name = match name.as_str() {
            "" => proxy.host.clone(),
            name => name.to_owned(),
        };
        let ca = ca?;
        // A missing --proxy is already reported.
        if name.is_empty() {
            return None;
        }
        match ServerName::try_from(name.clone()) {
            Ok(server_name) => Some(ProxyTls {
                ca,
                identity,
                server_name,
            }),
            Err(_) => {
                p.error(format!(
                    "--proxy-server-name: {name:?} is neither a host name nor an address"
                ));
                None
            }
        }
    }
}

impl InterfaceFlags {
    fn mode(&self, p: &mut Problems) -> Mode {
        match self.mode.as_str() {
            "" => Mode::Tunnel,
            "init" => Mode::Init,
            "probe" => Mode::Probe,
            other => {
                p.error(format!(
                    "--mode must be init, probe or empty, got {other:?}"
                ));
                Mode::Tunnel
            }
        }
    }
}

fn routes(p: &mut Problems, pairs: &[String]) -> Vec<Route> {
    p.require(!pairs.is_empty(), || {
        format!("--listen must be set; write HOST:PORT=AUTHORITY, such as {LISTEN}={AUTHORITY}")
    });
    let mut routes: Vec<Route> = Vec::new();
    for pair in pairs {
        match route(pair) {
            Ok(route) => add_route(p, &mut routes, route),
            Err(reason) => p.error(format!("--listen: {reason}")),
        }
    }
    routes
}

/// Adds a route, and reports an address that has a route already.
fn add_route(p: &mut Problems, routes: &mut Vec<Route>, route: Route) {
    let is_new = routes.iter().all(|known| known.listen != route.listen);
    p.require(is_new, || {
        let listen = &route.listen;
        format!("--listen: {listen} is given twice; write one authority for it")
    });
    routes.push(route);
}

fn route(pair: &str) -> Result<Route, String> {
    let (listen, authority) = pair.split_once('=').ok_or_else(|| {
        format!("{pair:?} has no '='; write HOST:PORT=AUTHORITY, such as {LISTEN}={AUTHORITY}")
    })?;
    Route::new(host_port(listen, LISTEN)?, authority)
}

impl Route {
    fn new(listen: HostPort, authority: &str) -> Result<Self, String> {
        let target = host_port(authority, AUTHORITY)?.to_string();
        match Authority::try_from(target) {
            // The `http` crate accepts a user name in an authority; a proxy does not.
            Ok(authority) if !authority.as_str().contains('@') => Ok(Self { listen, authority }),
            _ => Err(format!(
                "{authority:?} is not a valid authority; write one such as {AUTHORITY}"
            )),
        }
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
