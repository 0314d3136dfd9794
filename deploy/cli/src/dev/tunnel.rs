//! The parts of the tunnel, and the code that starts and connects them.

use std::net::SocketAddr;
use std::path::Path;

use anyhow::Context as _;
use culvert_agent::app as agent;
use culvert_agent::config as agent_config;
use culvert_host::tls::{self, Identity, TlsOptions};
use culvert_kit::pki::{KONNECTIVITY_NAME, Pki};
use culvert_kit::services::Services;
use culvert_server::app as server;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::balancer;
use super::door::Door;
use super::openvpn::{Files, OpenVpn};
use super::server::{PLANS, Server};
use super::settings::agent_settings;

pub(super) struct Agent {
    pub way: Way,
    pub addresses: agent::Addresses,
}

/// An agent's way to the servers.
#[derive(Clone, Copy)]
pub(super) enum Way {
    /// Through a TCP load balancer at this address.
    Balancer(SocketAddr),
    /// Through the front door at this address, by the name [`KONNECTIVITY_NAME`].
    Door(SocketAddr),
}

/// All running parts.
pub(super) struct Tunnel {
    pub pki: Pki,
    pub services: Services,
    /// The servers, one for each kind of front end.
    pub servers: Vec<Server>,
    /// The seed's front door and a node tunnel.
    pub door: Door,
    /// The agents, one for each way to the servers, like the replicas in a user cluster.
    pub agents: Vec<Agent>,
    /// OpenVPN clients of the servers, if requested.
    pub openvpn: Option<OpenVpn>,
    tasks: TaskTracker,
    shutdown: CancellationToken,
}

impl Tunnel {
    /// Starts every part, with OpenVPN only if `with_openvpn`. Writes files into `folder`.
    pub(super) async fn start(folder: &Path, with_openvpn: bool) -> anyhow::Result<Self> {
        let pki = Pki::create(folder)?;
        let openvpn = with_openvpn.then(|| Files::create(folder)).transpose()?;
        let services = Services::start()
            .await
            .context("cannot start the services")?;
        let (tasks, shutdown) = (TaskTracker::new(), CancellationToken::new());
        let mut servers = Vec::new();
        for plan in &PLANS {
            let mut config = plan.config(folder, &pki);
            config.openvpn = openvpn.as_ref().map(Files::server).transpose()?;
            let bound = server::Bound::bind(config).await?;
            servers.push(plan.describe(folder, &pki, bound.addresses.clone())?);
            tasks.spawn(bound.run(shutdown.clone()));
        }
        let backends: Vec<SocketAddr> = servers
            .iter()
            .map(|server| server.addresses.agent)
            .collect();
        let https = start_https(&services, &pki).await?;
        let door = Door::start(folder, &services, https, &backends, &tasks, &shutdown).await?;
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let ways = [Way::Balancer(listener.local_addr()?), Way::Door(door.sni)];
        tasks.spawn(balancer::serve(
            listener,
            backends,
            tasks.clone(),
            shutdown.clone(),
        ));
        let mut agents = Vec::new();
        for way in ways {
            let config = way.agent(&pki);
            let bound = agent::Bound::bind(config, shutdown.clone()).await?;
            let addresses = bound.addresses;
            agents.push(Agent { way, addresses });
            // The drain token never fires: the agents stop at shutdown without draining, so that the command
            // leaves nothing behind.
            tasks.spawn(bound.run(CancellationToken::new()));
        }
        let openvpn = match &openvpn {
            Some(files) => {
                Some(OpenVpn::start(files, &servers, &services, &tasks, &shutdown).await?)
            }
            None => None,
        };
        Ok(Self {
            pki,
            services,
            servers,
            door,
            agents,
            openvpn,
            tasks,
            shutdown,
        })
    }

    /// Returns the address of the TCP CONNECT front end, for curl.
    pub(super) fn connect_tcp(&self) -> String {
        let mut addresses = self.servers.iter().filter_map(|s| s.addresses.frontend);
        addresses
            .next()
            .map_or_else(String::new, |address| address.to_string())
    }

    /// Stops every part and waits for the end of each.
    pub(super) async fn stop(self) {
        self.door.stop_node_tunnel().await;
        self.shutdown.cancel();
        if let Some(openvpn) = self.openvpn {
            openvpn.stop().await;
        }
        self.tasks.close();
        self.tasks.wait().await;
        self.services.shutdown().await;
    }
}

impl Way {
    fn agent(self, pki: &Pki) -> agent_config::Config {
        let (id, host, address) = match self {
            Self::Balancer(address) => ("dev-balancer", address.ip().to_string(), address),
            Self::Door(address) => ("dev-door", KONNECTIVITY_NAME.to_owned(), address),
        };
        agent_config::Config {
            server_host: host,
            server_port: address.port(),
            server_address: Some(address),
            ca_cert: Some(pki.ca.clone()),
            client_cert: Some(agent_config::ClientCert {
                cert: pki.agent.cert.clone(),
                key: pki.agent.key.clone(),
            }),
            ..agent_settings(id)
        }
    }
}

/// Starts the HTTPS service, in place of an API server. The service requests no client certificate.
async fn start_https(services: &Services, pki: &Pki) -> anyhow::Result<SocketAddr> {
    let identity = Identity::load(&pki.server.cert, &pki.server.key)?;
    let config = tls::server_config(&identity, None, &[b"http/1.1"], &TlsOptions::default())?;
    let started = services.start_https(config).await;
    started.context("cannot start the HTTPS service")
}
