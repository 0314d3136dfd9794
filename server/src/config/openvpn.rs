//! The flags of the OpenVPN tunnel, and their combination with a configuration file.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use culvert_host::flags::values::go_int;
use culvert_host::flags::{GoDuration, HostPort, Problems, StringSlice};
use culvert_openvpn::cipher::{Cipher, Digest};
use culvert_openvpn::control::push::Topology;
use culvert_openvpn::options::Transport;
use culvert_openvpn_io::config_file::{self, DEFAULT_PORT, Material, Server};
use ipnet::Ipv4Net;

use crate::backend::openvpn::settings::{Listen, Settings};

/// Default interval of pings in both directions.
const PING: Duration = Duration::from_secs(5);
/// Default silence after which a client reconnects.
const PING_RESTART: Duration = Duration::from_secs(30);
/// Default limit of clients. The stock program uses the same value.
const MAX_CLIENTS: usize = 1024;

/// Flags of the OpenVPN tunnel. An empty flag uses the value of the configuration file, or else the default
/// from the help text.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
#[command(next_help_heading = "OpenVPN clients (they connect here)")]
pub(super) struct OpenvpnFlags {
    /// Listeners for OpenVPN clients: tcp:ADDRESS:PORT or udp:ADDRESS:PORT, comma-separated; empty uses
    /// --openvpn-config; without both flags OpenVPN is disabled
    #[arg(long, value_name = "LIST")]
    pub(super) openvpn_listen: Vec<StringSlice>,

    /// Networks of load balancers that send the PROXY protocol (version 1 or 2) to the TCP listeners,
    /// comma-separated; peers in these networks must send it
    #[arg(long, value_name = "CIDR,...")]
    pub(super) openvpn_proxy_protocol_from: Vec<StringSlice>,

    /// Configuration file of an OpenVPN server; flags take precedence over it
    #[arg(long, value_name = "FILE", default_value = "")]
    pub(super) openvpn_config: String,

    /// PEM CA bundle that clients' certificates must chain to
    #[arg(long, value_name = "FILE", default_value = "")]
    pub(super) openvpn_ca: String,

    /// PEM certificate chain presented to clients
    #[arg(long, value_name = "FILE", default_value = "")]
    pub(super) openvpn_cert: String,

    /// PEM private key of --openvpn-cert
    #[arg(long, value_name = "FILE", default_value = "")]
    pub(super) openvpn_key: String,

    /// Static key that authenticates control packets (tls-auth)
    #[arg(long, value_name = "FILE", default_value = "")]
    pub(super) openvpn_tls_auth: String,

    /// Key direction of --openvpn-tls-auth: 0 or 1; empty uses the same half of the key in both directions
    #[arg(long, value_name = "DIRECTION", default_value = "")]
    pub(super) openvpn_key_direction: String,

    /// Static key that encrypts control packets (tls-crypt)
    #[arg(long, value_name = "FILE", default_value = "")]
    pub(super) openvpn_tls_crypt: String,

    /// Network of the VPN; its first address belongs to this server; empty means 10.20.0.0/24
    #[arg(long, value_name = "CIDR", default_value = "")]
    pub(super) openvpn_network: String,

    /// Topology of the network for clients: net30, subnet or p2p; empty means net30
    #[arg(long, value_name = "TOPOLOGY", default_value = "")]
    pub(super) openvpn_topology: String,

    /// Networks behind clients, comma-separated: pods, services, node access. Other clients may connect to
    /// them. If the node access network is listed, addresses outside of all listed networks are treated as
    /// nodes
    #[arg(long, value_name = "LIST")]
    pub(super) openvpn_route: Vec<StringSlice>,

    /// Networks pushed to clients as routes into the VPN, comma-separated; a client does not receive the
    /// route to a network that is behind that client
    #[arg(long, value_name = "LIST")]
    pub(super) openvpn_push_route: Vec<StringSlice>,

    /// Options pushed to clients, comma-separated
    #[arg(long, value_name = "LIST")]
    pub(super) openvpn_push: Vec<StringSlice>,

    /// Network for node access: its addresses end with the last two octets of a node's address; empty means
    /// 10.254.0.0/16
    #[arg(long, value_name = "CIDR", default_value = "")]
    pub(super) openvpn_node_access_network: String,

    /// Watch the Nodes of the cluster of --kubeconfig, and dial their ExternalIPs and names as InternalIPs
    #[arg(long)]
    pub(super) openvpn_watch_nodes: bool,

    /// Folder with per-client files, named after the common names of the certificates
    #[arg(long, value_name = "DIR", default_value = "")]
    pub(super) openvpn_client_config_dir: String,

    /// Refuse clients without a file in --openvpn-client-config-dir
    #[arg(long)]
    pub(super) openvpn_ccd_exclusive: bool,

    /// Allow several clients with the same name; otherwise a new client replaces the previous client
    #[arg(long)]
    pub(super) openvpn_duplicate_cn: bool,

    /// Largest number of connected clients; empty means 1024
    #[arg(long, value_name = "N", value_parser = go_int)]
    pub(super) openvpn_max_clients: Option<i64>,

    /// Ciphers of the data channel, colon-separated, best first; empty means
    /// AES-256-GCM:AES-128-GCM:CHACHA20-POLY1305
    #[arg(long, value_name = "LIST", default_value = "")]
    pub(super) openvpn_data_ciphers: String,

    /// Digest of tls-auth, and of ciphers without authentication; empty means SHA1
    #[arg(long, value_name = "DIGEST", default_value = "")]
    pub(super) openvpn_auth: String,

    /// Interval of pings in both directions; 0 disables pings; empty means 5s
    #[arg(long, value_name = "DURATION")]
    pub(super) openvpn_ping: Option<GoDuration>,

    /// Silence after which a client reconnects; the server waits twice as long; 0 means never; empty means
    /// 30s
    #[arg(long, value_name = "DURATION")]
    pub(super) openvpn_ping_restart: Option<GoDuration>,

    /// Age in seconds at which keys are renewed; 0 leaves renewal to clients; empty means 3600
    #[arg(long, value_name = "SECONDS", value_parser = go_int)]
    pub(super) openvpn_reneg_sec: Option<i64>,
}

impl OpenvpnFlags {
    /// Returns the tunnel's settings, or `None` if the flags do not enable the tunnel. `kubeconfig` is the
    /// value of the flag with that name.
    pub(super) fn settings(&self, p: &mut Problems, kubeconfig: Option<&Path>) -> Option<Settings> {
        let read = self.file(p);
        let is_known = read.is_some();
        let mut server = read.unwrap_or_default();
        let listen = self.listen(p, &server);
        if listen.is_empty() {
            let is_given = !self.openvpn_listen.is_empty();
            p.require(*self == Self::default() || !is_known || is_given, || {
                "the --openvpn flags need --openvpn-listen, such as --openvpn-listen=tcp::1194, or --openvpn-config".to_owned()
            });
            return None;
        }
        self.keys(p, &mut server, is_known);
        self.data_channel(p, &mut server);
        self.networks(p, &mut server);
        self.members(p, &mut server);
        let network = cidr(p, "openvpn-network", &self.openvpn_network).or(server.network);
        let network = network.unwrap_or_else(|| net([10, 20, 0, 0], 24));
        p.require(network.prefix_len() <= 29, || {
            format!("--openvpn-network: {network} has no room for clients, /29 is the smallest")
        });
        let access = cidr(
            p,
            "openvpn-node-access-network",
            &self.openvpn_node_access_network,
        );
        let access = access.unwrap_or_else(|| net([10, 254, 0, 0], 16));
        p.require(access.prefix_len() <= 16, || {
            format!("--openvpn-node-access-network: {access} has no room for the two octets of a node, /16 is the smallest")
        });
        for warning in overlaps(network, access, &server.routes) {
            p.warn(warning);
        }
        let file = &server.common.timers;
        let ping = time(
            p,
            "openvpn-ping",
            self.openvpn_ping,
            file.ping.or(Some(PING)),
        );
        // The file has the server's own timeout, which is twice the clients' timeout.
        // Without pings, a restart would end every idle tunnel, so it needs an explicit time. The file's time does not
        // count if a flag has replaced the file's pings.
        let is_unpinged = ping.is_none() && self.openvpn_ping.is_some();
        let restart = file
            .ping_restart
            .filter(|_| !is_unpinged)
            .map(|time| time / 2)
            .or(ping.map(|_| PING_RESTART));
        let ping_restart = time(
            p,
            "openvpn-ping-restart",
            self.openvpn_ping_restart,
            restart,
        );
        if let (Some(ping), Some(restart)) = (ping, ping_restart) {
            p.require(restart >= 2 * ping, || {
                format!(
                    "openvpn-ping-restart must be at least twice openvpn-ping, got {}s and {}s",
                    restart.as_secs(),
                    ping.as_secs()
                )
            });
        }
        let max_clients = match self.openvpn_max_clients {
            None => server.max_clients.unwrap_or(MAX_CLIENTS),
            Some(count) => usize::try_from(count).unwrap_or(0),
        };
        p.require((1..=1 << 20).contains(&max_clients), || {
            format!("openvpn-max-clients must be 1 to 1048576, got {max_clients}")
        });
        let proxies = p.networks(
            "openvpn-proxy-protocol-from",
            &self.openvpn_proxy_protocol_from,
        );
        let has_tcp = listen.iter().any(|one| one.transport == Transport::Tcp);
        p.require(has_tcp || proxies.is_empty(), || {
            "--openvpn-proxy-protocol-from needs a TCP listener".to_owned()
        });
        Some(Settings {
            listen,
            proxies,
            topology: self
                .topology(p)
                .or(server.topology)
                .unwrap_or(Topology::Net30),
            network,
            node_access: access,
            watch_nodes: kubeconfig
                .filter(|_| self.openvpn_watch_nodes)
                .map(Path::to_owned),
            max_clients,
            ping,
            ping_restart,
            server,
        })
    }

    /// Returns the content of the file; `None` if the file has errors.
    fn file(&self, p: &mut Problems) -> Option<Server> {
        if self.openvpn_config.is_empty() {
            return Some(Server::default());
        }
        let path = PathBuf::from(&self.openvpn_config);
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) => {
                p.error(format!(
                    "--openvpn-config: cannot read {}: {error}",
                    path.display()
                ));
                return None;
            }
        };
        match config_file::server(&text, &path.display().to_string()) {
            Ok(read) => {
                for note in read.notes {
                    p.warn(note);
                }
                Some(read.config)
            }
            Err(problems) => {
                for problem in problems {
                    p.error(problem);
                }
                None
            }
        }
    }

    fn listen(&self, p: &mut Problems, file: &Server) -> Vec<Listen> {
        let texts = StringSlice::concat(&self.openvpn_listen);
        if texts.is_empty() && !self.openvpn_config.is_empty() {
            let host = file.local.as_deref().unwrap_or_default();
            return vec![Listen {
                transport: file.transport.unwrap_or(Transport::Udp),
                bind: HostPort::new(host, file.common.port.unwrap_or(DEFAULT_PORT)),
            }];
        }
        let mut listen = Vec::new();
        for text in texts {
            match text.parse::<Listen>() {
                Ok(one) if one.bind.port == 0 => {
                    p.error(format!("--openvpn-listen: {text:?} has no port"));
                    listen.push(one);
                }
                Ok(one) => listen.push(one),
                Err(error) => {
                    p.error(format!("--openvpn-listen: {error}"));
                }
            }
        }
        listen
    }

    /// `is_known` is false if the file has errors, and may name the key material.
    fn keys(&self, p: &mut Problems, server: &mut Server, is_known: bool) {
        let file = |path: Option<PathBuf>| path.map(Material::File);
        let ca = file(p.file("OpenVPN CA", &self.openvpn_ca));
        let pair = p.key_pair("openvpn", &self.openvpn_cert, &self.openvpn_key);
        let common = &mut server.common;
        if let Some((cert, key)) = pair {
            common.cert = Some(Material::File(cert));
            common.key = Some(Material::File(key));
        }
        common.ca = ca.or(common.ca.take());
        let given = !self.openvpn_cert.is_empty() || !self.openvpn_key.is_empty();
        let is_complete = common.ca.is_some() && (given || common.cert.is_some());
        p.require(is_complete || !is_known, || {
            "--openvpn-ca, --openvpn-cert and --openvpn-key must be set: OpenVPN clients authenticate with certificates".to_owned()
        });
        let auth = file(p.file("OpenVPN tls-auth key", &self.openvpn_tls_auth));
        common.lay_tls_auth(auth, &self.openvpn_key_direction, p);
        let crypt = file(p.file("OpenVPN tls-crypt key", &self.openvpn_tls_crypt));
        common.tls_crypt = crypt.or(common.tls_crypt.take());
        p.require(
            common.tls_auth.is_none() || common.tls_crypt.is_none(),
            || "--openvpn-tls-auth and --openvpn-tls-crypt exclude each other".to_owned(),
        );
    }

    fn data_channel(&self, p: &mut Problems, server: &mut Server) {
        let common = &mut server.common;
        if !self.openvpn_data_ciphers.is_empty() {
            let (known, unknown) = config_file::ciphers(&self.openvpn_data_ciphers);
            for name in unknown {
                let all = Cipher::list(&Cipher::ALL);
                p.error(format!(
                    "--openvpn-data-ciphers: {name} is not supported; supported: {all}"
                ));
            }
            common.ciphers = Some(known);
        }
        if !self.openvpn_auth.is_empty() {
            match self.openvpn_auth.parse::<Digest>() {
                Ok(digest) => common.digest = digest,
                Err(error) => p.error(format!("--openvpn-auth: {error}")),
            }
        }
        if let Some(seconds) = self.openvpn_reneg_sec {
            match u32::try_from(seconds) {
                Ok(seconds) => common.timers.reneg = Duration::from_secs(seconds.into()),
                Err(_) => p.error(format!("openvpn-reneg-sec must be >= 0, got {seconds}")),
            }
        }
    }

    fn networks(&self, p: &mut Problems, server: &mut Server) {
        let routes = cidrs(p, "openvpn-route", &self.openvpn_route);
        if !routes.is_empty() {
            server.routes = routes;
        }
        for route in cidrs(p, "openvpn-push-route", &self.openvpn_push_route) {
            let (network, mask) = (route.network(), route.netmask());
            server.push.push(format!("route {network} {mask}"));
        }
        for option in StringSlice::concat(&self.openvpn_push) {
            let pushable = option.bytes().all(|byte| matches!(byte, b' '..=b'~'));
            p.require(pushable && !option.trim().is_empty() && option.len() < 900, || {
                format!("--openvpn-push: {option:?} cannot be pushed; use printable ASCII, less than 900 bytes")
            });
            server.push.push(option);
        }
    }

    fn members(&self, p: &mut Problems, server: &mut Server) {
        let directory = &self.openvpn_client_config_dir;
        if !directory.is_empty() {
            server.client_config_dir = Some(PathBuf::from(directory));
        }
        if let Some(directory) = &server.client_config_dir {
            p.require(directory.is_dir(), || {
                let directory = directory.display();
                format!("--openvpn-client-config-dir: there is no folder {directory}; create or mount it")
            });
        }
        server.ccd_exclusive |= self.openvpn_ccd_exclusive;
        p.require(
            !server.ccd_exclusive || server.client_config_dir.is_some(),
            || "--openvpn-ccd-exclusive needs --openvpn-client-config-dir".to_owned(),
        );
        server.duplicate_cn |= self.openvpn_duplicate_cn;
    }

    fn topology(&self, p: &mut Problems) -> Option<Topology> {
        let name = self.openvpn_topology.as_str();
        let topology = Topology::from_name(name);
        p.require(topology.is_some() || name.is_empty(), || {
            format!("--openvpn-topology must be net30, subnet or p2p, got {name:?}")
        });
        topology
    }
}

/// Returns a warning for each route that shares addresses with the VPN or with the node access network, and for these two
/// networks. Routes may overlap each other. A node access network that is not one of the routes is not used.
fn overlaps(network: Ipv4Net, access: Ipv4Net, routes: &[Ipv4Net]) -> Vec<String> {
    let vpn = ("--openvpn-network", network);
    let access = routes
        .contains(&access)
        .then_some(("--openvpn-node-access-network", access));
    let others = routes
        .iter()
        .filter(|route| access.is_none_or(|(_, net)| net != **route));
    let others = others.map(|route| ("--openvpn-route", *route));
    let with_vpn = access.into_iter().chain(others.clone());
    let timeouts = "hosts of that network may look for the server's VPN address among themselves, so dials time out";
    let with_vpn = with_vpn.map(|other| (vpn, other, timeouts));
    let with_access = access.into_iter().flat_map(|access| {
        others.clone().map(move |other| {
            (
                access,
                other,
                "one address may belong to a node and to another host",
            )
        })
    });
    let all = with_vpn.chain(with_access);
    let shared = all.filter(|((_, one), (_, other), _)| one.contains(other) || other.contains(one));
    shared
        .map(|((flag, net), (other_flag, other), effect)| {
            format!("{flag} {net} overlaps {other_flag} {other}: {effect}; choose networks that do not overlap")
        })
        .collect()
}

fn net(octets: [u8; 4], length: u8) -> Ipv4Net {
    Ipv4Net::new(octets.into(), length).unwrap_or_default()
}

fn cidr(p: &mut Problems, flag: &str, text: &str) -> Option<Ipv4Net> {
    if text.is_empty() {
        return None;
    }
    let network: Option<Ipv4Net> = text.parse().ok();
    let network = network.filter(|network| network.addr() == network.network());
    p.require(network.is_some(), || {
        format!("--{flag}: {text:?} is not an IPv4 network such as 10.20.0.0/24")
    });
    network
}

fn cidrs(p: &mut Problems, flag: &str, lists: &[StringSlice]) -> Vec<Ipv4Net> {
    let texts = StringSlice::concat(lists);
    texts
        .iter()
        .filter_map(|text| cidr(p, flag, text))
        .collect()
}

/// Parses a time in whole seconds, as OpenVPN requires. 0 means never, also in the configuration file.
fn time(
    p: &mut Problems,
    flag: &str,
    given: Option<GoDuration>,
    otherwise: Option<Duration>,
) -> Option<Duration> {
    let given = given.map(|given| {
        let time = given.saturating();
        p.require(given.nanos() >= 0 && time.subsec_nanos() == 0, || {
            format!("{flag} must be whole seconds, got {given}")
        });
        time
    });
    given.or(otherwise).filter(|time| !time.is_zero())
}

#[cfg(test)]
mod tests;
