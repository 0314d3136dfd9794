//! The options of a server.

use std::path::PathBuf;

use culvert_openvpn::control::push::Topology;
use culvert_openvpn::options::Transport;
use ipnet::Ipv4Net;

use super::lexer::Directive;
use super::{Common, Context, Material, Options, Outcome, Taken, network, note, port, value, word};

/// A server's configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Server {
    /// Options of both roles.
    pub common: Common,
    /// `proto`.
    pub transport: Option<Transport>,
    /// `local`: the address to listen on.
    pub local: Option<String>,
    /// `server`: network of the VPN. Its first address belongs to the server.
    pub network: Option<Ipv4Net>,
    /// `topology`.
    pub topology: Option<Topology>,
    /// `push`. The times of `keepalive` are in `common.timers`, so that flags can replace them; they are pushed from there.
    pub push: Vec<String>,
    /// `route`: networks behind clients.
    pub routes: Vec<Ipv4Net>,
    /// `client-config-dir`.
    pub client_config_dir: Option<PathBuf>,
    /// `ccd-exclusive`: refuses clients without a file in `client-config-dir`.
    pub ccd_exclusive: bool,
    /// `duplicate-cn`: clients with the same name do not replace each other.
    pub duplicate_cn: bool,
    /// `client-to-client`: forwards packets between clients.
    pub client_to_client: bool,
    /// `max-clients`.
    pub max_clients: Option<usize>,
    /// `crl-verify`.
    pub crl: Option<Material>,
}

impl Options for Server {
    fn take(&mut self, context: &Context<'_>, directive: &Directive) -> Outcome {
        match directive.name.as_str() {
            "tls-server" | "mode" if directive.argument(0) != Some("p2p") => {}
            "client" | "remote" | "tls-client" | "pull" | "mode" => {
                return Err("this is a client's configuration".into());
            }
            "server" => {
                let network = network(directive, 0)?;
                if network.prefix_len() > 29 {
                    return Err(format!("{network} has no room for clients"));
                }
                self.network = Some(network);
            }
            "topology" => {
                let name = word(directive, 0, "net30, subnet or p2p")?;
                let topology = Topology::from_name(name)
                    .ok_or_else(|| format!("{name:?} is not one of net30, subnet, p2p"))?;
                self.topology = Some(topology);
            }
            "proto" => self.transport = Some(Common::proto(directive, "server")?),
            "local" => self.local = Some(word(directive, 0, "an address")?.to_owned()),
            "lport" => self.common.port = Some(port(directive, 0)?),
            "rport" => return Ok(Taken::Note("not needed: clients may use any port".into())),
            "push" => {
                let option = directive.arguments.join(" ");
                if option.trim().is_empty() {
                    return Err("needs an option".into());
                }
                let pushable = |c: char| matches!(c, ' '..='~') && c != ',';
                if option.len() > 900 || !option.chars().all(pushable) {
                    return Err("only printable ASCII without commas can be pushed".into());
                }
                self.push.push(option);
            }
            "keepalive" => {
                let (ping, restart): (u32, u32) = (
                    value(directive, 0, "a number of seconds")?,
                    value(directive, 1, "a number of seconds")?,
                );
                if ping == 0 || restart / 2 < ping {
                    return Err("the second number must be at least twice the first".into());
                }
                let time = |seconds: u32| Some(std::time::Duration::from_secs(seconds.into()));
                self.common.timers.ping = time(ping);
                self.common.timers.ping_restart = time(restart.saturating_mul(2));
            }
            "route" => self.routes.push(network(directive, 0)?),
            "client-config-dir" => {
                let path = word(directive, 0, "a directory")?;
                self.client_config_dir = Some(context.path(path));
            }
            "ccd-exclusive" => self.ccd_exclusive = true,
            "duplicate-cn" => self.duplicate_cn = true,
            "client-to-client" => self.client_to_client = true,
            "max-clients" => {
                let clients = value(directive, 0, "a number of clients")?;
                if clients == 0 {
                    return Err("must be at least 1".into());
                }
                self.max_clients = Some(clients);
            }
            "remote-cert-tls" => match word(directive, 0, "client")? {
                "client" => self.common.require_usage = true,
                other => return Err(format!("must be client for a server, got {other:?}")),
            },
            "verify-client-cert" => match directive.argument(0) {
                None | Some("require") => {}
                _ => return Err("clients are identified by their certificates".into()),
            },
            "verify-x509-name" => {
                return Err(
                    "a server has many clients; use client-config-dir with ccd-exclusive".into(),
                );
            }
            "crl-verify" => {
                if directive.argument(1) == Some("dir") {
                    return Err("a directory of serial numbers is not read; use a CRL file".into());
                }
                self.crl = context.material(directive)?;
            }
            "dev" => {
                self.common.take(context, directive)?;
                return note("not needed: no tun device is created, packets end in this process");
            }
            "ifconfig-pool-persist" => {
                return note(
                    "a client that reconnects keeps its address only while its old session exists; set fixed addresses with `ifconfig-push` in client-config-dir",
                );
            }
            "max-routes-per-client"
            | "stale-routes-check"
            | "connect-freq"
            | "connect-freq-initial"
            | "push-peer-info" => {
                return note("not needed: limits are built in");
            }
            "ifconfig" | "ifconfig-pool" => {
                return Err("set the VPN's network with `server NETWORK NETMASK`".into());
            }
            "ifconfig-push" | "iroute" | "disable" | "push-reset" | "push-remove" => {
                return Err("belongs in a file of client-config-dir".into());
            }
            _ => return self.common.take(context, directive),
        }
        Ok(Taken::Yes)
    }

    fn finish(&mut self) -> Vec<String> {
        let mut problems = self.common.finish();
        if self.ccd_exclusive && self.client_config_dir.is_none() {
            problems.push("ccd-exclusive needs client-config-dir".into());
        }
        problems
    }
}
