//! The flags of the OpenVPN client, their validation, and their combination with an OpenVPN configuration
//! file. Flags override the file.

use std::net::Ipv4Addr;
use std::path::PathBuf;

use clap::Args;
use culvert_host::flags::{Problems, StringSlice};
use culvert_openvpn::cipher::Cipher;
use culvert_openvpn::options::Transport;
use culvert_openvpn_io::config_file::{self, Client, Material, Remote};
use ipnet::Ipv4Net;

use crate::openvpn::nodes::NodeAccess;

/// Configuration of the OpenVPN client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenVpn {
    /// Servers, key material, and session settings.
    pub client: Client,
    /// Mapping from addresses of the node access network to nodes.
    pub nodes: NodeAccess,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "OpenVPN client")]
pub(super) struct OpenVpnFlags {
    /// OpenVPN client configuration file in OpenVPN's own syntax; enables the OpenVPN client. The flags below
    /// override the file
    #[arg(long, value_name = "FILE", default_value = "")]
    pub(super) openvpn_config: String,

    /// OpenVPN server as `HOST:PORT[,PROTO]` with tcp (the default) or udp; repeatable; enables the OpenVPN
    /// client
    #[arg(long, value_name = "REMOTE")]
    pub(super) openvpn_remote: Vec<String>,

    /// PEM CA bundle that the OpenVPN server's certificate must chain to
    #[arg(long, value_name = "FILE", default_value = "")]
    pub(super) openvpn_ca: String,

    /// PEM certificate chain of the OpenVPN client
    #[arg(long, value_name = "FILE", default_value = "")]
    pub(super) openvpn_cert: String,

    /// PEM private key of --openvpn-cert
    #[arg(long, value_name = "FILE", default_value = "")]
    pub(super) openvpn_key: String,

    /// Ciphers allowed for the data channel, best first, colon-separated; empty means
    /// AES-256-GCM:AES-128-GCM:CHACHA20-POLY1305
    #[arg(long, value_name = "LIST", default_value = "")]
    pub(super) openvpn_data_ciphers: String,

    /// HMAC digest for CBC ciphers and --openvpn-tls-auth; must match the server; empty means SHA1
    #[arg(long, value_name = "DIGEST", default_value = "")]
    pub(super) openvpn_auth: String,

    /// Static key that authenticates control packets (tls-auth)
    #[arg(long, value_name = "FILE", default_value = "")]
    pub(super) openvpn_tls_auth: String,

    /// Key direction of --openvpn-tls-auth: 1 if the server uses 0, otherwise 0; empty uses the same half of
    /// the key in both directions
    #[arg(long, value_name = "DIRECTION", default_value = "")]
    pub(super) openvpn_key_direction: String,

    /// Static key that encrypts control packets (tls-crypt)
    #[arg(long, value_name = "FILE", default_value = "")]
    pub(super) openvpn_tls_crypt: String,

    /// Network of the node addresses inside the tunnel: X.Y.c.d stands for the node a.b.c.d of
    /// --openvpn-nodes
    #[arg(long, value_name = "CIDR", default_value = "10.254.0.0/16")]
    pub(super) openvpn_node_access_network: String,

    /// Node addresses and node networks (/16 or smaller), comma-separated; the first entry that contains an
    /// address with the last two octets c.d wins
    #[arg(long, value_name = "LIST")]
    pub(super) openvpn_nodes: Vec<StringSlice>,
}

impl OpenVpnFlags {
    /// Returns the checked configuration, or `None` if the flags do not enable the OpenVPN client.
    pub(super) fn validate(&self, p: &mut Problems) -> Option<OpenVpn> {
        let is_wanted = !self.openvpn_config.is_empty() || !self.openvpn_remote.is_empty();
        if !is_wanted {
            let set = self.set();
            p.require(set.is_empty(), || {
                let flags = set.join(", ");
                format!("{flags}: --openvpn-config or --openvpn-remote must be set, too")
            });
            return None;
        }
        let mut client = self.file(p)?;
        self.remotes(&mut client, p);
        self.material(&mut client, p);
        self.session(&mut client, p);
        let nodes = self.nodes(p);
        Some(OpenVpn { client, nodes })
    }

    /// Returns the names of the flags that differ from their defaults.
    fn set(&self) -> Vec<&'static str> {
        let texts = [
            ("--openvpn-ca", &self.openvpn_ca),
            ("--openvpn-cert", &self.openvpn_cert),
            ("--openvpn-key", &self.openvpn_key),
            ("--openvpn-data-ciphers", &self.openvpn_data_ciphers),
            ("--openvpn-auth", &self.openvpn_auth),
            ("--openvpn-tls-auth", &self.openvpn_tls_auth),
            ("--openvpn-key-direction", &self.openvpn_key_direction),
            ("--openvpn-tls-crypt", &self.openvpn_tls_crypt),
        ];
        let mut set: Vec<_> = texts
            .into_iter()
            .filter_map(|(name, value)| (!value.is_empty()).then_some(name))
            .collect();
        if self.openvpn_node_access_network != NodeAccess::default().network.to_string() {
            set.push("--openvpn-node-access-network");
        }
        if !self.openvpn_nodes.is_empty() {
            set.push("--openvpn-nodes");
        }
        set
    }

    /// Reads the configuration file. Returns `None` if the file is unusable, and default settings if no file
    /// is configured.
    fn file(&self, p: &mut Problems) -> Option<Client> {
        let name = &self.openvpn_config;
        if name.is_empty() {
            let mut client = Client::default();
            client.common.require_usage = true;
            return Some(client);
        }
        let text = match std::fs::read_to_string(name) {
            Ok(text) => text,
            Err(error) => {
                p.error(format!("cannot read --openvpn-config {name}: {error}"));
                return None;
            }
        };
        match config_file::client(&text, name) {
            Ok(read) => {
                read.notes.into_iter().for_each(|note| p.warn(note));
                if !read.config.common.require_usage && read.config.common.name.is_none() {
                    p.warn(format!(
                        "{name}: without `remote-cert-tls server` other clients of the same CA could pose as the server"
                    ));
                }
                Some(read.config)
            }
            Err(problems) => {
                problems.into_iter().for_each(|problem| p.error(problem));
                None
            }
        }
    }

    fn remotes(&self, client: &mut Client, p: &mut Problems) {
        let mut remotes = Vec::new();
        for text in &self.openvpn_remote {
            match remote(text) {
                Ok(remote) => remotes.push(remote),
                Err(problem) => p.error(format!("--openvpn-remote={text}: {problem}")),
            }
        }
        if !self.openvpn_remote.is_empty() {
            client.remotes = remotes;
        }
        p.require(
            !client.remotes.is_empty() || !self.openvpn_remote.is_empty(),
            || {
                format!(
                    "{}: no server configured; add `remote`, or set --openvpn-remote",
                    self.openvpn_config
                )
            },
        );
    }

    fn material(&self, client: &mut Client, p: &mut Problems) {
        let common = &mut client.common;
        let file = |path: &str| (!path.is_empty()).then(|| Material::File(PathBuf::from(path)));
        common.ca = file(&self.openvpn_ca).or(common.ca.take());
        let given = (!self.openvpn_cert.is_empty(), !self.openvpn_key.is_empty());
        p.require(given.0 == given.1, || {
            "--openvpn-cert and --openvpn-key must be set together".to_owned()
        });
        if given == (true, true) {
            common.cert = file(&self.openvpn_cert);
            common.key = file(&self.openvpn_key);
        }
        let (auth, crypt) = (file(&self.openvpn_tls_auth), file(&self.openvpn_tls_crypt));
        p.require(auth.is_none() || crypt.is_none(), || {
            "--openvpn-tls-auth and --openvpn-tls-crypt exclude each other".to_owned()
        });
        // A tls-auth or tls-crypt key from the flags replaces the file's tls-auth and tls-crypt keys.
        if auth.is_some() || crypt.is_some() {
            (common.tls_auth, common.tls_crypt) = (None, crypt);
        }
        common.lay_tls_auth(auth, &self.openvpn_key_direction, p);
        p.require(common.ca.is_some(), || {
            "the OpenVPN client needs `ca` or --openvpn-ca: the system's CAs are not used"
                .to_owned()
        });
        p.require(
            common.cert.is_some() || client.credentials.is_some(),
            || {
                "the OpenVPN client needs `cert` and `key`, or --openvpn-cert and --openvpn-key"
                    .to_owned()
            },
        );
        let common = &client.common;
        let files = [
            ("ca", &common.ca),
            ("cert", &common.cert),
            ("key", &common.key),
            (
                "tls-auth key",
                &common.tls_auth.as_ref().map(|auth| auth.key.clone()),
            ),
            ("tls-crypt key", &common.tls_crypt),
            ("credentials", &client.credentials),
        ];
        for (what, material) in files {
            if let Some(Material::File(path)) = material {
                p.file(&format!("OpenVPN {what}"), &path.to_string_lossy());
            }
        }
    }

    fn session(&self, client: &mut Client, p: &mut Problems) {
        let common = &mut client.common;
        if !self.openvpn_data_ciphers.is_empty() {
            let (known, unknown) = config_file::ciphers(&self.openvpn_data_ciphers);
            p.require(unknown.is_empty() && !known.is_empty(), || {
                let (unknown, all) = (unknown.join(", "), Cipher::list(&Cipher::ALL));
                format!("--openvpn-data-ciphers: unsupported: {unknown}; supported: {all}")
            });
            (common.ciphers, common.cipher, common.ncp_disable) = (Some(known), None, false);
        }
        if !self.openvpn_auth.is_empty() {
            match self.openvpn_auth.parse() {
                Ok(digest) => common.digest = digest,
                Err(_) => p.error(format!(
                    "--openvpn-auth must be one of SHA1, SHA256, SHA384, SHA512, got {:?}",
                    self.openvpn_auth
                )),
            }
        }
    }

    fn nodes(&self, p: &mut Problems) -> NodeAccess {
        let mut access = NodeAccess::default();
        match self.openvpn_node_access_network.parse::<Ipv4Net>() {
            Ok(network) if network.prefix_len() <= 16 => access.network = network,
            _ => p.error(format!(
                "--openvpn-node-access-network must be an IPv4 network like 10.254.0.0/16, got {:?}",
                self.openvpn_node_access_network
            )),
        }
        for text in StringSlice::concat(&self.openvpn_nodes) {
            let text = text.trim();
            let address = text.parse::<Ipv4Addr>().map(Ipv4Net::from);
            match address.or_else(|_| text.parse::<Ipv4Net>()) {
                Ok(nodes) if nodes.prefix_len() >= 16 => access.nodes.push(nodes.trunc()),
                _ => p.error(format!(
                    "--openvpn-nodes: {text:?} is neither an IPv4 address nor a network of /16 or smaller"
                )),
            }
        }
        if access.nodes.is_empty() {
            p.warn(format!(
                "--openvpn-nodes is empty: connections to {} are refused",
                access.network
            ));
        }
        for (first, second) in access.collisions() {
            p.warn(format!(
                "--openvpn-nodes: {second} is never reached: the earlier entry {first} covers the same last two octets"
            ));
        }
        access
    }
}

impl OpenVpn {
    /// Returns every option in effect as `name=value`.
    pub(super) fn describe(&self) -> Vec<String> {
        let Self { client, nodes } = self;
        let common = &client.common;
        let name = |material: &Option<Material>| {
            material
                .as_ref()
                .map(ToString::to_string)
                .unwrap_or_default()
        };
        let join = |all: Vec<String>| all.join(" ");
        let mut session = culvert_openvpn::session::Common::new(Transport::Tcp);
        common.apply(&mut session);
        let auth = common.tls_auth.as_ref().map(|auth| auth.key.clone());
        vec![
            format!(
                "openvpn-remote={}",
                join(client.remotes.iter().map(ToString::to_string).collect())
            ),
            format!("openvpn-ca={}", name(&common.ca)),
            format!("openvpn-cert={}", name(&common.cert)),
            format!("openvpn-key={}", name(&common.key)),
            format!("openvpn-data-ciphers={}", Cipher::list(&session.ciphers)),
            format!("openvpn-auth={}", session.digest),
            format!("openvpn-tls-auth={}", name(&auth)),
            format!("openvpn-tls-crypt={}", name(&common.tls_crypt)),
            format!("openvpn-node-access-network={}", nodes.network),
            format!(
                "openvpn-nodes={}",
                join(nodes.nodes.iter().map(ToString::to_string).collect())
            ),
        ]
    }
}

/// Parses `HOST:PORT[,PROTO]`; the default protocol is tcp.
fn remote(text: &str) -> Result<Remote, String> {
    let (address, proto) = text.rsplit_once(',').unwrap_or((text, "tcp"));
    let (host, port) = culvert_host::net::dial::split_host_port(address)
        .map_err(|error| error.reason.to_owned())?;
    Remote::new(host, Some(port), Some(proto))
}

#[cfg(test)]
mod tests;
