//! The servers of the tunnel.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use culvert_host::net::congestion::LinkCongestion;
use culvert_host::net::destinations::Destinations;
use culvert_host::telemetry::logging::LogConfig;
use culvert_host::tls::TlsOptions;
use culvert_kit::client::FrontEnd;
use culvert_kit::pki::Pki;
use culvert_server::app as server;
use culvert_server::config as server_config;
use culvert_server::metrics::Strategy;
use culvert_server::switch::Settings;
use rustls_pki_types::ServerName;

use super::settings::any_port;

/// A server of the tunnel, with the address of its front end.
pub(super) struct Server {
    /// Display name of the front end.
    pub title: &'static str,
    /// Front end, in the form that the test kit's client needs.
    pub front_end: FrontEnd,
    /// Address of the front end, for display.
    pub front_end_address: String,
    pub addresses: server::Addresses,
    /// The server's admin socket, for `culvert status`.
    pub admin_socket: PathBuf,
}

pub(super) struct Plan {
    title: &'static str,
    mode: server_config::Mode,
    /// File name of the front end's Unix socket; `None` means TCP.
    socket: Option<&'static str>,
    admin: &'static str,
}

/// The servers to start, one for each kind of front end.
pub(super) const PLANS: [Plan; 3] = [
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

impl Server {
    /// Returns the listen address for OpenVPN clients.
    pub(super) fn openvpn(&self) -> anyhow::Result<SocketAddr> {
        let address = self.addresses.openvpn.first().copied();
        address.with_context(|| format!("{}: no OpenVPN listener", self.title))
    }
}

impl Plan {
    /// Returns the settings of the server. Its sockets are in `folder`.
    pub(super) fn config(&self, folder: &Path, pki: &Pki) -> server_config::Config {
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
                proxies: Default::default(),
                bind: any_port(),
                cert: pki.cluster.cert.clone(),
                key: pki.cluster.key.clone(),
                ca: Some(pki.ca.clone()),
                quic_port: None,
            },
            agent_auth: None,
            agent_id_from: None,
            link_congestion: LinkCongestion::System,
            resume_grace: Duration::ZERO,
            destinations: Destinations::default(),
            admin: any_port(),
            admin_tls: None,
            admin_uds: Some(folder.join(self.admin)),
            openvpn: None,
            switch: Settings::default(),
            health: any_port(),
            ready_without_agents: false,
            keepalive_time: Duration::from_secs(3600),
            frontend_keepalive_time: Duration::from_secs(3600),
            server_id: format!("dev: {}", self.title),
            server_count: i64::try_from(PLANS.len()).unwrap_or(i64::MAX),
            strategies: vec![Strategy::Default],
            limits: server_config::Limits::default(),
            graceful_shutdown_timeout: Duration::ZERO,
            drain_linger: Duration::ZERO,
            lease: None,
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

    /// Describes the running server, which listens on `addresses`.
    pub(super) fn describe(
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
