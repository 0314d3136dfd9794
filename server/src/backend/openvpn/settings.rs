//! The tunnel's settings, from checked flags and a configuration file.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use culvert_host::flags::HostPort;
use culvert_host::net::networks::Networks;
use culvert_openvpn::cipher::Cipher;
use culvert_openvpn::control::push::{self, Topology};
use culvert_openvpn::options::Transport;
use culvert_openvpn::wrap::KeyDirection;
use culvert_openvpn_io::config_file::{Material, Server, TlsAuth};
use ipnet::Ipv4Net;

pub use super::ccd::{ClientConfig, PushChange};

/// The tunnel's settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Listeners for clients; at least one.
    pub listen: Vec<Listen>,
    /// Networks of load balancers that send the PROXY protocol to the TCP listeners.
    pub proxies: Networks,
    /// OpenVPN's own options: the configuration file, overridden by flags.
    pub server: Server,
    /// Network of the VPN.
    pub network: Ipv4Net,
    /// Topology of the network for clients.
    pub topology: Topology,
    /// Node access network. Dialed addresses outside of all `routes` are treated as nodes in this network.
    /// Unused unless it is one of the routes.
    pub node_access: Ipv4Net,
    /// Kubeconfig of the cluster whose Nodes are watched. ExternalIPs and names of watched nodes are dialed
    /// as InternalIPs. `None` disables the watch.
    pub watch_nodes: Option<PathBuf>,
    /// Largest number of connected clients.
    pub max_clients: usize,
    /// Interval of pings in both directions; `None` disables pings.
    pub ping: Option<Duration>,
    /// Silence after which clients reconnect; the server waits twice as long.
    pub ping_restart: Option<Duration>,
}

/// One listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listen {
    /// Transport of the packets.
    pub transport: Transport,
    /// Listening address.
    pub bind: HostPort,
}

impl FromStr for Listen {
    type Err = String;

    /// Parses texts such as `tcp::1194`, `udp:10.0.0.1:1194` or `tcp:[::]:1194`.
    fn from_str(text: &str) -> Result<Self, String> {
        let refused = || {
            format!(
                "{text:?} is not a listener; expected tcp:ADDRESS:PORT or udp:ADDRESS:PORT, with IPv6 in brackets"
            )
        };
        let (transport, address) = text.split_once(':').ok_or_else(refused)?;
        let transport = match transport {
            "tcp" => Transport::Tcp,
            "udp" => Transport::Udp,
            _ => return Err(refused()),
        };
        let (host, port) = address.rsplit_once(':').ok_or_else(refused)?;
        let bare = host.starts_with('[') == host.ends_with(']');
        if !bare || (host.contains(':') && !host.starts_with('[')) {
            return Err(refused());
        }
        let port = port.parse().map_err(|_| refused())?;
        Ok(Self {
            transport,
            bind: HostPort::new(host, port),
        })
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.transport, self.bind)
    }
}

impl Settings {
    /// Returns every option in effect as `name=value`. Contains paths of secrets, never secrets.
    pub fn describe(&self) -> Vec<String> {
        let Self {
            listen,
            proxies,
            server,
            network,
            topology,
            node_access,
            watch_nodes,
            max_clients,
            ping,
            ping_restart,
        } = self;
        let common = &server.common;
        let listen: Vec<_> = listen.iter().map(ToString::to_string).collect();
        let routes: Vec<_> = server.routes.iter().map(ToString::to_string).collect();
        let directory = server.client_config_dir.clone().unwrap_or_default();
        let seconds = |time: &Option<Duration>| time.unwrap_or_default().as_secs();
        let auth = common.tls_auth.as_ref();
        let pushed = server.push.iter().map(String::as_str);
        let ciphers = common.ciphers.as_deref().unwrap_or(&Cipher::DEFAULT);
        vec![
            format!("openvpn-listen={}", listen.join(",")),
            format!("openvpn-proxy-protocol-from={proxies}"),
            format!("openvpn-ca={}", shown(common.ca.as_ref())),
            format!("openvpn-cert={}", shown(common.cert.as_ref())),
            format!("openvpn-key={}", shown(common.key.as_ref())),
            format!("openvpn-tls-auth={}", shown(auth.map(|auth| &auth.key))),
            format!("openvpn-key-direction={}", auth.map_or("", direction)),
            format!("openvpn-tls-crypt={}", shown(common.tls_crypt.as_ref())),
            format!("openvpn-network={network}"),
            format!("openvpn-topology={}", topology.name()),
            format!("openvpn-route={}", routes.join(",")),
            format!("openvpn-push={}", push::for_log(pushed)),
            format!("openvpn-node-access-network={node_access}"),
            format!("openvpn-watch-nodes={}", watch_nodes.is_some()),
            format!("openvpn-client-config-dir={}", directory.display()),
            format!("openvpn-duplicate-cn={}", server.duplicate_cn),
            format!("openvpn-ccd-exclusive={}", server.ccd_exclusive),
            format!("openvpn-max-clients={max_clients}"),
            format!("openvpn-data-ciphers={}", Cipher::list(ciphers)),
            format!("openvpn-auth={}", common.digest),
            format!("openvpn-ping={}s", seconds(ping)),
            format!("openvpn-ping-restart={}s", seconds(ping_restart)),
            format!("openvpn-reneg-sec={}s", common.timers.reneg.as_secs()),
        ]
    }
}

fn shown(material: Option<&Material>) -> String {
    material.map_or_else(String::new, Material::to_string)
}

fn direction(auth: &TlsAuth) -> &'static str {
    match auth.direction {
        KeyDirection::Normal => "0",
        KeyDirection::Inverse => "1",
        KeyDirection::Both => "",
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn listeners_are_parsed() {
        for (text, shown) in [
            ("tcp::1194", "tcp::1194"),
            ("udp:10.0.0.1:1194", "udp:10.0.0.1:1194"),
            ("tcp:[::]:443", "tcp:[::]:443"),
            ("udp:localhost:0", "udp:localhost:0"),
        ] {
            assert_eq!(text.parse::<Listen>().unwrap().to_string(), shown);
        }
        for text in [
            "",
            "1194",
            "tcp:1194",
            "sctp::1194",
            "tcp:::1194",
            "tcp:a:x",
            "tcp:[a:1",
            "tcp::65536",
        ] {
            assert!(text.parse::<Listen>().is_err(), "{text}");
        }
    }
}
