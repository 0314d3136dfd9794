//! The options of a client.

use std::fmt;
use std::time::Duration;

use culvert_openvpn::options::Transport;

use super::lexer::Directive;
use super::{
    Common, Context, DEFAULT_PORT, Material, Options, Outcome, Taken, note, port, seconds, word,
};

/// A server to connect to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remote {
    /// A host name or an address.
    pub host: String,
    /// Port of the server.
    pub port: u16,
    /// Transport of the packets.
    pub transport: Transport,
}

impl Remote {
    /// Creates a remote. The default port is [`DEFAULT_PORT`], and the default protocol is udp.
    ///
    /// # Errors
    /// Returns a description of the invalid part.
    pub fn new(host: &str, port: Option<&str>, proto: Option<&str>) -> Result<Self, String> {
        if host.is_empty() {
            return Err("needs a host".into());
        }
        let port = match port {
            None => DEFAULT_PORT,
            Some(port) => match port.parse() {
                Ok(port @ 1..) => port,
                _ => return Err(format!("{port:?} is not a port")),
            },
        };
        let transport = match proto {
            None => Transport::Udp,
            Some(proto) => super::proto(proto, "client")?,
        };
        Ok(Self {
            host: host.to_owned(),
            port,
            transport,
        })
    }
}

impl fmt::Display for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = culvert_host::net::dial::join_host_port(&self.host, self.port);
        write!(f, "{address},{}", self.transport)
    }
}

/// A client's configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Client {
    /// Options of both roles.
    pub common: Common,
    /// `remote`, in order. A remote without a port or protocol uses the values of `port`, `rport` and
    /// `proto`.
    pub remotes: Vec<Remote>,
    /// `remote-random`: tries the servers in random order.
    pub random: bool,
    /// `connect-retry`: pause after the first failure, and longest pause.
    pub retry: Option<(Duration, Duration)>,
    /// `connect-timeout`.
    pub connect_timeout: Option<Duration>,
    /// `auth-user-pass`: user name and password on separate lines.
    pub credentials: Option<Material>,
    proto: Option<Transport>,
    named: Vec<Directive>,
}

/// Longest pause between two attempts. The value is the default of OpenVPN 2.6.
const LONGEST_RETRY: Duration = Duration::from_secs(300);

impl Options for Client {
    fn take(&mut self, context: &Context<'_>, directive: &Directive) -> Outcome {
        match directive.name.as_str() {
            "client" | "tls-client" | "pull" => {}
            "mode" => match directive.argument(0) {
                Some("p2p") => {}
                _ => return Err("this is a server's configuration".into()),
            },
            "server" | "tls-server" | "client-config-dir" | "ifconfig-pool" | "duplicate-cn" => {
                return Err("this is a server's configuration".into());
            }
            "remote" => {
                word(directive, 0, "a host")?;
                // Checked here to report the line. Remotes are built at the end, when `port` and `proto` are
                // known.
                self.remote(directive)?;
                self.named.push(directive.clone());
            }
            "proto" => self.proto = Some(Common::proto(directive, "client")?),
            "rport" => self.common.port = Some(port(directive, 0)?),
            "lport" | "local" => {
                return note("not needed: the system chooses the local port");
            }
            "remote-random" => self.random = true,
            "remote-random-hostname" => return Err("names are used unchanged; remove this".into()),
            "connect-retry" => {
                let first = seconds(directive, 0)?.max(Duration::from_secs(1));
                let longest = match directive.argument(1) {
                    Some(_) => seconds(directive, 1)?,
                    None => LONGEST_RETRY,
                };
                self.retry = Some((first, longest.max(first)));
            }
            "connect-retry-max" => {
                return note("servers are tried forever");
            }
            "connect-timeout" | "server-poll-timeout" => {
                let timeout = seconds(directive, 0)?;
                if timeout.is_zero() {
                    return Err("must be more than 0".into());
                }
                self.connect_timeout = Some(timeout);
            }
            "remote-cert-tls" => match word(directive, 0, "server")? {
                "server" => self.common.require_usage = true,
                other => return Err(format!("must be server for a client, got {other:?}")),
            },
            "auth-user-pass" => {
                if directive.block.is_none() && directive.arguments.is_empty() {
                    return Err("there is no terminal to ask for credentials; name a file with user and password".into());
                }
                if let Some(material) = context.material(directive)? {
                    self.credentials = Some(material);
                }
            }
            "crl-verify" => {
                return Err("a server's certificate is not checked against a CRL; use verify-x509-name to set the expected name".into());
            }
            "keepalive" => {
                self.common.timers.ping = Some(super::seconds(directive, 0)?);
                self.common.timers.ping_restart = Some(super::seconds(directive, 1)?);
            }
            "dev" => {
                self.common.take(context, directive)?;
                return note(NO_DEVICE);
            }
            "ifconfig" | "route" | "topology" | "route-nopull" | "pull-filter" => {
                return note(NO_DEVICE);
            }
            "askpass" => return Ok(Taken::No),
            _ => return self.common.take(context, directive),
        }
        Ok(Taken::Yes)
    }

    fn finish(&mut self) -> Vec<String> {
        let named = std::mem::take(&mut self.named);
        self.remotes = named
            .iter()
            .filter_map(|directive| self.remote(directive).ok())
            .collect();
        self.common.finish()
    }
}

const NO_DEVICE: &str =
    "not needed: no tun device and no routes are created, packets end in this process";

impl Client {
    fn remote(&self, directive: &Directive) -> Result<Remote, String> {
        let [host, port, proto] = [0, 1, 2].map(|index| directive.argument(index));
        let mut remote = Remote::new(host.unwrap_or_default(), port, proto)?;
        if port.is_none() {
            remote.port = self.common.port.unwrap_or(DEFAULT_PORT);
        }
        if proto.is_none() {
            remote.transport = self.proto.unwrap_or(Transport::Udp);
        }
        Ok(remote)
    }
}
