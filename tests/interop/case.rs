//! A pairing behind a front end, and the driver as the client.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use culvert_kit::client::FrontEnd;
use culvert_kit::services::Services;
use culvert_tests::interop::Interop;
use culvert_tests::metrics::Metrics;
use culvert_tests::topology::Builder;
use culvert_tests::{Executable, Mode, Topology, Transport, eventually};
use serde_json::Value;

use crate::held::Held;

/// Time limit for an effect to appear. Generous, because two cores run many tests.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// Origin of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Make {
    /// This workspace.
    Ours,
    /// The newest release of upstream.
    Stock,
    /// An older release of upstream.
    Release(&'static str),
}

impl Make {
    /// Returns the program to start: ours, or a program of a release. `stock` chooses the program of the
    /// release. Returns `None` without Go.
    pub(crate) fn executable(self, stock: impl Fn(&Interop) -> &PathBuf) -> Option<Executable> {
        let release = match self {
            Self::Ours => return Some(Executable::Ours),
            Self::Stock => Interop::get()?,
            Self::Release(version) => Interop::release(version)?,
        };
        Some(Executable::At(stock(release).clone()))
    }
}

/// Protocol and socket between the driver and the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Front {
    /// The packet protocol over a Unix socket.
    GrpcUds,
    /// HTTP CONNECT over a Unix socket.
    ConnectUds,
    /// HTTP CONNECT over mutual TLS.
    ConnectTcp,
}

/// A pairing behind a front end.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case {
    /// Origin of the servers.
    pub server: Make,
    /// Origin of the agents.
    pub agent: Make,
    /// Protocol and socket between the driver and the first server.
    pub front: Front,
    /// Release of the driver's client library; `None` is the newest release.
    pub client: Option<&'static str>,
}

impl Case {
    /// Returns true if both programs are ours.
    pub(crate) fn all_ours(self) -> bool {
        self.server == Make::Ours && self.agent == Make::Ours
    }

    /// Returns true if both programs are stock programs.
    pub(crate) fn all_stock(self) -> bool {
        self.server != Make::Ours && self.agent != Make::Ours
    }

    /// Returns true if the front end is HTTP CONNECT.
    pub(crate) fn is_connect(self) -> bool {
        self.front != Front::GrpcUds
    }

    /// Returns the programs of servers and agents. Returns `None` without Go.
    pub(crate) fn programs(self) -> Option<(Executable, Executable)> {
        let server = self.server.executable(|release| &release.proxy_server)?;
        let agent = self.agent.executable(|release| &release.proxy_agent)?;
        Some((server, agent))
    }

    /// Starts `servers` servers, and one agent for each list of additional flags in `agents`. Returns `None`
    /// without Go.
    pub(crate) async fn start(self, servers: usize, agents: &[&[&str]]) -> Option<Tunnel> {
        let interop = match self.client {
            None => Interop::get()?,
            Some(version) => Interop::release(version)?,
        };
        let (mode, transport) = match self.front {
            Front::GrpcUds => (Mode::Grpc, Transport::Uds),
            Front::ConnectUds => (Mode::HttpConnect, Transport::Uds),
            Front::ConnectTcp => (Mode::HttpConnect, Transport::Tcp),
        };
        let (server, agent) = self.programs()?;
        let builder = (0..servers).fold(Topology::builder(mode, transport), |builder, _| {
            builder.server(server.clone(), &[])
        });
        let builder = agents.iter().fold(builder, |builder: Builder, flags| {
            builder.agent(agent.clone(), flags)
        });
        Some(Tunnel {
            case: self,
            interop,
            agents: agents.len(),
            services: Services::start().await.expect("the services"),
            topology: builder.start().await,
        })
    }
}

/// A running tunnel of a case, and the services behind the tunnel.
#[derive(Debug)]
pub(crate) struct Tunnel {
    /// The case under test.
    pub case: Case,
    /// Services behind the agents.
    pub services: Services,
    /// The running programs.
    pub topology: Topology,
    agents: usize,
    interop: &'static Interop,
}

impl Tunnel {
    /// Runs a command of the driver through the first server. Returns the result of a success or a failure.
    pub(crate) async fn run(&self, command: &str, target: &str, flags: &[&str]) -> Value {
        self.run_through(0, command, target, flags).await
    }

    /// Runs a command of the driver through a server. Returns the result of a success or a failure.
    pub(crate) async fn run_through(
        &self,
        server: usize,
        command: &str,
        target: &str,
        flags: &[&str],
    ) -> Value {
        let args = self.args(server, command, target, flags);
        self.interop.run(&args).await
    }

    /// Runs a command of the driver through the first server.
    ///
    /// # Panics
    /// If the command fails.
    pub(crate) async fn succeeds(&self, command: &str, target: SocketAddr, flags: &[&str]) {
        let result = self.run(command, &target.to_string(), flags).await;
        assert_eq!(result["ok"], true, "{result}");
    }

    /// Opens an echo connection through the first server and leaves the connection open.
    pub(crate) async fn hold(&self) -> Held {
        let target = self.services.raw.to_string();
        let args = self.args(0, "hold", &target, &[]);
        Held::open(self.interop.start(&args)).await
    }

    /// Returns the number of an agent's open endpoint connections.
    pub(crate) async fn endpoint_connections(&self, agent: usize) -> f64 {
        let metrics = self.topology.agent_metrics(agent).await;
        agent_value(&metrics, "open_endpoint_connections")
    }

    /// Waits until exactly one agent has the only open connection, and returns the agent's index.
    pub(crate) async fn serving_agent(&self) -> usize {
        eventually("one agent has the connection", LIMIT, async || {
            let mut held = Vec::new();
            for agent in 0..self.agents {
                held.push(self.endpoint_connections(agent).await);
            }
            let busy = held.iter().position(|count| *count == 1.0);
            busy.ok_or_else(|| format!("connections per agent: {held:?}"))
        })
        .await
    }

    /// Waits until the first server counts exactly `count` agents.
    pub(crate) async fn counts_agents(&self, count: usize) {
        eventually("the server's count of agents", LIMIT, async || {
            let ready = self.topology.ready_agents(0).await;
            (ready == count as f64).then_some(()).ok_or(ready)
        })
        .await;
    }

    /// Waits until no connection and no dial is left: in our programs (the first server and all agents, which
    /// must be running), and at the endpoints if at least one program is ours.
    pub(crate) async fn settles(&self) {
        if self.case.server == Make::Ours {
            eventually("the server is idle", LIMIT, async || {
                let metrics = self.topology.server_metrics(0).await;
                let left = [
                    ("pending_backend_dials", None),
                    ("established_connections", None),
                    ("http_connections", None),
                    ("grpc_connections", Some(("service_method", "Proxy"))),
                ]
                .map(|(name, label)| (name, server_value(&metrics, name, label.as_slice())));
                let idle = left.iter().all(|(_, value)| *value == 0.0);
                idle.then_some(()).ok_or_else(|| format!("{left:?}"))
            })
            .await;
        }
        if self.case.agent == Make::Ours {
            for agent in 0..self.agents {
                eventually("the agent is idle", LIMIT, async || {
                    let left = self.endpoint_connections(agent).await;
                    (left == 0.0).then_some(()).ok_or(left)
                })
                .await;
            }
        }
        if !self.case.all_stock() {
            eventually("the endpoints are idle", LIMIT, async || {
                let left = self.services.open_connections();
                (left == 0).then_some(()).ok_or(left)
            })
            .await;
        }
    }

    fn args(&self, server: usize, command: &str, target: &str, flags: &[&str]) -> Vec<String> {
        let mut args = vec![command.to_owned(), format!("--target={target}")];
        match self.topology.front_end_of(server) {
            FrontEnd::GrpcUds(path) => {
                args.extend([
                    "--front=grpc-uds".into(),
                    format!("--uds={}", path.display()),
                ]);
            }
            FrontEnd::ConnectUds(path) => {
                args.extend([
                    "--front=connect-uds".into(),
                    format!("--uds={}", path.display()),
                ]);
            }
            FrontEnd::ConnectTcp { addr, .. } => {
                let pki = self.topology.pki();
                args.extend([
                    "--front=connect-tcp".into(),
                    format!("--addr={addr}"),
                    format!("--ca={}", pki.ca.display()),
                    format!("--cert={}", pki.client.cert.display()),
                    format!("--key={}", pki.client.key.display()),
                ]);
            }
            FrontEnd::GrpcTcp { .. } => unreachable!("no case has this front end"),
        }
        args.extend(flags.iter().copied().map(String::from));
        args
    }
}

/// Returns the value of an upstream metric of an agent, or 0 if the series is missing.
pub(crate) fn agent_value(metrics: &Metrics, name: &str) -> f64 {
    let name = format!("konnectivity_network_proxy_agent_{name}");
    metrics.value(&name, &[]).unwrap_or_default()
}

/// Returns the value of an upstream metric of a server, or 0 if the series is missing.
pub(crate) fn server_value(metrics: &Metrics, name: &str, labels: &[(&str, &str)]) -> f64 {
    let name = format!("konnectivity_network_proxy_server_{name}");
    metrics.value(&name, labels).unwrap_or_default()
}
