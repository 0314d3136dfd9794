//! The parts of the tunnel, and the code that starts and connects them.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use culvert_agent::app as agent;
use culvert_agent::config as agent_config;
use culvert_host::flags::HostPort;
use culvert_host::telemetry::logging::LogConfig;
use culvert_host::tls::{self, Identity, TlsOptions};
use culvert_kit::client::FrontEnd;
use culvert_kit::pki::{KONNECTIVITY_NAME, Pki};
use culvert_kit::services::Services;
use culvert_server::app as server;
use culvert_server::config as server_config;
use culvert_server::switch::Settings;
use rustls_pki_types::ServerName;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::balancer;
use super::door::{Door, Endpoints};
use super::openvpn::{Files, OpenVpn};

/// Pause between an agent's attempts to connect. Short, because a person waits.
const SYNC_INTERVAL: Duration = Duration::from_millis(50);

/// A server of the tunnel, with the address of its front end.
pub struct Server {
    /// Display name of the front end.
    pub title: &'static str,
    /// Front end, for the lab's client.
    pub front_end: FrontEnd,
    /// Address of the front end, for display.
    pub front_end_address: String,
    /// Listen addresses of the server.
    pub addresses: server::Addresses,
    /// The server's admin socket, for `culvert status`.
    pub admin_socket: PathBuf,
}

/// An agent of the tunnel.
pub struct Agent {
    /// The agent's way to the servers.
    pub way: Way,
    /// Listen addresses of the agent.
    pub addresses: agent::Addresses,
}

/// An agent's way to the servers.
#[derive(Clone, Copy)]
pub enum Way {
    /// Through a TCP load balancer at this address.
    Balancer(SocketAddr),
    /// Through the front door at this address, by the name [`KONNECTIVITY_NAME`].
    Door(SocketAddr),
}

/// All running parts.
pub struct Tunnel {
    /// The certificates.
    pub pki: Pki,
    /// The services behind the agents.
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

/// Description of a server to start.
struct Plan {
    title: &'static str,
    mode: server_config::Mode,
    /// File name of the front end's Unix socket; `None` means TCP.
    socket: Option<&'static str>,
    /// File name of the admin socket.
    admin: &'static str,
}

const PLANS: [Plan; 3] = [
    Plan {
        title: "gRPC, Unix socket",
        mode: server_config::Mode::Grpc,
        socket: Some("grpc.socket"),
        admin: "grpc.admin",
    },
    Plan {
        title: "CONNECT, Unix socket",
        mode: server_config::Mode::HttpConnect,
        socket: Some("connect.socket"),
        admin: "connect.admin",
    },
    Plan {
        title: "CONNECT, mutual TLS",
        mode: server_config::Mode::HttpConnect,
        socket: None,
        admin: "tls.admin",
    },
];

impl Tunnel {
    /// Starts every part, with OpenVPN only if `with_openvpn`. Writes files into `folder`.
    pub async fn start(folder: &Path, with_openvpn: bool) -> anyhow::Result<Self> {
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
        let endpoints = Endpoints {
            https: start_https(&services, &pki).await?,
            http: services.http,
            raw: services.raw,
            agents: backends.clone(),
        };
        let door = Door::start(folder, &endpoints, &tasks, &shutdown).await?;
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
            // The agents never drain: the command must leave nothing behind.
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
    pub fn connect_tcp(&self) -> String {
        let mut addresses = self.servers.iter().filter_map(|s| s.addresses.frontend);
        addresses
            .next()
            .map_or_else(String::new, |address| address.to_string())
    }

    /// Stops every part and waits for the end of each.
    pub async fn stop(self) {
        self.shutdown.cancel();
        if let Some(openvpn) = self.openvpn {
            openvpn.stop().await;
        }
        self.tasks.close();
        self.tasks.wait().await;
        self.services.shutdown().await;
    }
}

impl Server {
    /// Returns the listen address for OpenVPN clients.
    pub fn openvpn(&self) -> anyhow::Result<SocketAddr> {
        let address = self.addresses.openvpn.first().copied();
        address.with_context(|| format!("{}: no OpenVPN listener", self.title))
    }
}

impl Plan {
    fn config(&self, folder: &Path, pki: &Pki) -> server_config::Config {
        let frontend = match self.socket {
            Some(name) => server_config::Frontend::Uds {
                path: folder.join(name),
                delete_existing: true,
            },
            None => server_config::Frontend::Tcp {
                bind: any_port(),
                tls: server_config::TlsFiles {
                    cert: pki.server.cert.clone(),
                    key: pki.server.key.clone(),
                    ca: pki.ca.clone(),
                },
            },
        };
        server_config::Config {
            mode: self.mode,
            frontend,
            agent_listener: server_config::AgentListener {
                bind: any_port(),
                cert: pki.cluster.cert.clone(),
                key: pki.cluster.key.clone(),
                ca: Some(pki.ca.clone()),
            },
            agent_auth: None,
            admin: any_port(),
            admin_tls: None,
            admin_uds: Some(folder.join(self.admin)),
            openvpn: None,
            switch: Settings::default(),
            health: any_port(),
            keepalive_time: Duration::from_secs(3600),
            frontend_keepalive_time: Duration::from_secs(3600),
            server_id: format!("dev: {}", self.title),
            server_count: i64::try_from(PLANS.len()).unwrap_or(i64::MAX),
            tls: TlsOptions::default(),
            xfr_channel_size: 10,
            excess_buffer_bytes: 64 * 1024 * 1024,
            worker_threads: 1,
            stall_timeout: Duration::from_secs(10),
            backend_dial_timeout: None,
            logging: LogConfig::default(),
            warnings: Vec::new(),
        }
    }

    fn describe(
        &self,
        folder: &Path,
        pki: &Pki,
        addresses: server::Addresses,
    ) -> anyhow::Result<Server> {
        let grpc = self.mode == server_config::Mode::Grpc;
        let (front_end, front_end_address) = match (self.socket, addresses.frontend) {
            (Some(name), _) => {
                let path = folder.join(name);
                let address = path.display().to_string();
                let front_end = if grpc {
                    FrontEnd::GrpcUds(path)
                } else {
                    FrontEnd::ConnectUds(path)
                };
                (front_end, address)
            }
            (None, Some(addr)) => {
                let tls = pki.client_tls(&pki.client, &["http/1.1"])?;
                let server_name = ServerName::from(addr.ip());
                let front_end = FrontEnd::ConnectTcp {
                    addr,
                    tls,
                    server_name,
                };
                (front_end, addr.to_string())
            }
            (None, None) => anyhow::bail!("a TCP front end must have an address"),
        };
        Ok(Server {
            title: self.title,
            front_end,
            front_end_address,
            addresses,
            admin_socket: folder.join(self.admin),
        })
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

/// Returns the settings of an agent that looks for no server.
pub fn agent_settings(id: &str) -> agent_config::Config {
    agent_config::Config {
        server_host: "127.0.0.1".to_owned(),
        server_port: 0,
        server_address: None,
        ca_cert: None,
        client_cert: None,
        alpn: Vec::new(),
        health: any_port(),
        admin: any_port(),
        agent_id: id.to_owned(),
        agent_identifiers: String::new(),
        sync_interval: SYNC_INTERVAL,
        sync_interval_cap: SYNC_INTERVAL * 10,
        probe_interval: SYNC_INTERVAL,
        keepalive_time: Duration::from_secs(3600),
        token_path: None,
        sync_forever: false,
        xfr_channel_size: 150,
        excess_buffer_bytes: 8 * 1024 * 1024,
        stall_timeout: Duration::from_secs(10),
        server_count_source: agent_config::ServerCountSource::Default,
        drain_timeout: Duration::ZERO,
        drain_linger: Duration::ZERO,
        openvpn: None,
        logging: LogConfig::default(),
        warnings: Vec::new(),
    }
}

/// Returns a loopback address with port 0: the system chooses the port.
pub fn any_port() -> HostPort {
    HostPort::new("127.0.0.1", 0)
}

/// Starts the HTTPS service, in place of an API server. The service requests no client certificate.
async fn start_https(services: &Services, pki: &Pki) -> anyhow::Result<SocketAddr> {
    let identity = Identity::load(&pki.server.cert, &pki.server.key)?;
    let config = tls::server_config(&identity, None, &[b"http/1.1"], &TlsOptions::default())?;
    let started = services.start_https(config).await;
    started.context("cannot start the HTTPS service")
}
