//! OpenVPN clients beside the agents. Every server is also an OpenVPN server and has a Culvert client. The
//! last server has a stock client too, if the stock program is installed and the user may run it.
//!
//! Both clients use the configuration of the stock platform's client. Addresses:
//!
//! | address dialed by a server | address inside the VPN | client | destination |
//! |---|---|---|---|
//! | 127.0.0.1, a node for the server | 10.254.0.1 | Culvert client | 127.0.0.1; the client's node network is 127.0.0.0/16 |
//! | 10.240.16.1, a Service | 10.240.16.1 | stock client | relays in the stock client's own network |

mod stock;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use culvert_agent::app as agent;
use culvert_agent::config as agent_config;
use culvert_agent::openvpn::nodes::{DEFAULT_NETWORK, NodeAccess};
use culvert_kit::pki::{OpenVpnPki, Pair, Pki};
use culvert_kit::services::Services;
use culvert_openvpn::control::push::Topology;
use culvert_openvpn_io::config_file::{self, Read};
use culvert_server::backend::openvpn::settings::Settings;
use ipnet::Ipv4Net;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::stock::Stock;
use super::server::Server;
use super::settings::agent_settings;

/// Name of the Culvert client, the same as in the stock platform.
pub(super) const CLIENT: &str = "user-cluster-client";

/// Name of the stock client.
pub(super) const STOCK_CLIENT: &str = "stock-client";

const NETWORK: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(10, 20, 0, 0), 24);

/// Node network of the Culvert client: addresses of this machine.
const NODES: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(127, 0, 0, 0), 16);

/// Network of the Services behind the stock client.
const SERVICES: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(10, 240, 16, 0), 20);

/// Address of the only Service in [`SERVICES`].
const SERVICE: Ipv4Addr = Ipv4Addr::new(10, 240, 16, 1);

/// Keepalive interval: the default of the Culvert server.
const PING: Duration = Duration::from_secs(5);

/// Silence before a restart of the connection: the default of the Culvert server.
const PING_RESTART: Duration = Duration::from_secs(30);

/// Certificates and configuration files for servers and clients.
pub(super) struct Files {
    folder: PathBuf,
    pki: OpenVpnPki,
    /// Folder with the per-client configuration files.
    clients: PathBuf,
}

pub(super) struct OpenVpn {
    /// Culvert clients, one per server, in the order of the servers.
    pub clients: Vec<agent::Addresses>,
    /// The stock client, or the reason why the stock client is missing.
    pub stock: Result<Stock, String>,
}

impl Files {
    /// Creates the files in `folder`.
    pub(super) fn create(folder: &Path) -> anyhow::Result<Self> {
        let folder = folder.join("openvpn");
        let clients = folder.join("clients");
        std::fs::create_dir_all(&clients)?;
        for (name, network) in [(CLIENT, DEFAULT_NETWORK), (STOCK_CLIENT, SERVICES)] {
            let iroute = format!("iroute {} {}\n", network.network(), network.netmask());
            std::fs::write(clients.join(name), iroute)?;
        }
        Ok(Self {
            pki: Pki::create_openvpn(&folder)?,
            folder,
            clients,
        })
    }

    /// Returns the settings of a server. The configuration text is the stock platform's, except for the port.
    pub(super) fn server(&self) -> anyhow::Result<Settings> {
        let mut text = format!(
            "mode server
proto tcp
dev tun
server {} {}
{}dh none
client-config-dir '{}'
cipher AES-256-GCM
auth SHA1
",
            NETWORK.network(),
            NETWORK.netmask(),
            self.identity(&self.pki.server),
            self.clients.display(),
        );
        for network in [SERVICES, DEFAULT_NETWORK] {
            let route = format!("route {} {}", network.network(), network.netmask());
            text.push_str(&format!("{route}\npush \"{route}\"\n"));
        }
        Ok(Settings {
            proxies: Default::default(),
            listen: vec!["tcp:127.0.0.1:0".parse().map_err(anyhow::Error::msg)?],
            server: read(config_file::server(&text, "the server's configuration"))?,
            network: NETWORK,
            topology: Topology::Net30,
            node_access: DEFAULT_NETWORK,
            watch_nodes: None,
            max_clients: 16,
            ping: Some(PING),
            ping_restart: Some(PING_RESTART),
        })
    }

    /// Returns the configuration of a client. The text is the stock platform's, without the platform's
    /// script, which sets packet filters.
    fn client(&self, pair: &Pair, server: SocketAddr) -> String {
        format!(
            "client
proto tcp
dev tun0
dev-type tun
auth-nocache
remote {} {}
connect-retry 1 2
nobind
{}remote-cert-tls server
cipher AES-256-GCM
auth SHA1
",
            server.ip(),
            server.port(),
            self.identity(pair),
        )
    }

    fn identity(&self, pair: &Pair) -> String {
        format!(
            "ca '{}'\ncert '{}'\nkey '{}'\n",
            self.pki.ca.display(),
            pair.cert.display(),
            pair.key.display(),
        )
    }
}

impl OpenVpn {
    /// Connects a Culvert client to every server, and a stock client to the last server.
    pub(super) async fn start(
        files: &Files,
        servers: &[Server],
        services: &Services,
        tasks: &TaskTracker,
        shutdown: &CancellationToken,
    ) -> anyhow::Result<Self> {
        let mut clients = Vec::new();
        let mut last = None;
        for server in servers {
            let address = server.openvpn()?;
            let text = files.client(&files.pki.user_cluster, address);
            let nodes = vec![NODES];
            let config = agent_config::Config {
                openvpn: Some(agent_config::OpenVpn {
                    client: read(config_file::client(&text, "the client's configuration"))?,
                    nodes: NodeAccess {
                        nodes,
                        ..NodeAccess::default()
                    },
                }),
                ..agent_settings("dev-openvpn")
            };
            let bound = agent::Bound::bind(config, shutdown.clone()).await?;
            clients.push(bound.addresses);
            tasks.spawn(bound.run(CancellationToken::new()));
            last = Some(address);
        }
        let server = last.context("there is no server")?;
        let stock = Stock::start(files, server, services, tasks, shutdown).await;
        let stock = stock.map_err(|why| format!("{why:#}"));
        Ok(Self { clients, stock })
    }

    /// Stops the stock client. The Culvert clients stop at the `shutdown` of [`Self::start`].
    pub(super) async fn stop(self) {
        if let Ok(stock) = self.stock {
            stock.stop().await;
        }
    }
}

/// Returns the parsed configuration, or an error with all problems. Drops the notes about options without
/// effect.
fn read<T>(read: Result<Read<T>, Vec<String>>) -> anyhow::Result<T> {
    let read = read.map_err(|problems| anyhow!(problems.join("; ")))?;
    Ok(read.config)
}
