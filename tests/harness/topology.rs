//! A whole connected tunnel: servers, agents, certificates and ports. Each program may be ours or stock.
//!
//! ```no_run
//! # async fn example() {
//! use culvert_tests::{Executable, Mode, Topology, Transport};
//!
//! let topology = Topology::builder(Mode::HttpConnect, Transport::Tcp)
//!     .servers(2)
//!     .agents(3)
//!     .agent(Executable::At("/opt/proxy-agent".into()), &["--v=4"])
//!     .start()
//!     .await;
//! let stream = topology.connect("127.0.0.1:80").await.unwrap();
//! # }
//! ```
//!
//! Programs get the flags that operators use, with intervals short enough for tests. With more than one
//! server, agents connect through a [random balancer](Balancer), as through a Service.

mod builder;
mod flags;
mod member;

use std::collections::HashSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use culvert_kit::client::{self, BoxedStream, ClientError, FrontEnd};
use culvert_kit::pki::Pki;
use tempfile::TempDir;

use crate::balancer::Balancer;
use crate::metrics::{Metrics, scrape};
use crate::ports::Ports;
use crate::process::{Program, Signal};
use crate::wait::eventually;

pub use self::builder::Builder;
use self::builder::Part;
use self::member::Member;

/// Time limit for programs to start, or to connect to each other. Generous, because many tests share two
/// cores.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Metric of an agent with the number of servers that the agent is connected to.
const OPEN_SERVERS: &str = "konnectivity_network_proxy_agent_open_server_connections";

/// Protocol of the front end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// gRPC, `--mode=grpc`.
    Grpc,
    /// HTTP CONNECT, `--mode=http-connect`.
    HttpConnect,
}

/// Transport between the front end and its client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// A Unix socket, in plain text.
    Uds,
    /// TCP with mutual TLS.
    Tcp,
}

/// The program of a server or an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Executable {
    /// The program of this workspace.
    Ours,
    /// Any program with the same flags, for example the stock program.
    At(PathBuf),
}

impl Executable {
    fn path<'a>(&'a self, ours: &'a str) -> &'a Path {
        match self {
            Self::Ours => Path::new(ours),
            Self::At(path) => path,
        }
    }
}

/// A server, its port for agents and its front end.
#[derive(Debug)]
struct Server {
    member: Member,
    agent_port: u16,
    front_end: FrontEnd,
}

/// A running tunnel. Dropping the value kills all programs.
#[derive(Debug)]
pub struct Topology {
    mode: Mode,
    transport: Transport,
    servers: Vec<Server>,
    agents: Vec<Member>,
    balancer: Option<Balancer>,
    ports: Ports,
    pki: Pki,
    // Last field, so that the programs are killed before their files are deleted.
    dir: TempDir,
}

impl Topology {
    /// Starts the description of a topology.
    pub fn builder(mode: Mode, transport: Transport) -> Builder {
        Builder {
            mode,
            transport,
            servers: Vec::new(),
            agents: Vec::new(),
            server_args: Vec::new(),
            agent_args: Vec::new(),
        }
    }

    /// Starts a tunnel with a server and an agent of our own.
    pub async fn simple(mode: Mode, transport: Transport) -> Self {
        Self::builder(mode, transport)
            .servers(1)
            .agents(1)
            .start()
            .await
    }

    /// Returns the certificates.
    pub fn pki(&self) -> &Pki {
        &self.pki
    }

    /// Returns the directory of certificates and sockets. A test may add its own files.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Returns a port for a test's own use.
    pub fn next_port(&mut self) -> u16 {
        self.ports.next_port()
    }

    /// Returns the number of servers.
    pub fn server_count(&self) -> usize {
        self.servers.len()
    }

    /// Returns the number of agents.
    pub fn agent_count(&self) -> usize {
        self.agents.len()
    }

    /// Returns the settings to reach the first server's front end.
    pub fn front_end(&self) -> &FrontEnd {
        self.front_end_of(0)
    }

    /// Returns the settings to reach a server's front end.
    pub fn front_end_of(&self, server: usize) -> &FrontEnd {
        &self.servers[server].front_end
    }

    /// Opens a connection through the tunnel of the first server.
    ///
    /// # Errors
    /// See [`client::connect`].
    pub async fn connect(&self, target: &str) -> Result<BoxedStream, ClientError> {
        client::connect(self.front_end(), target, PATIENCE).await
    }

    /// Returns the address of a server's listener for agents.
    pub fn agent_address(&self, server: usize) -> SocketAddr {
        loopback(self.servers[server].agent_port)
    }

    /// Returns the address of a server's health listener.
    pub fn server_health(&self, server: usize) -> SocketAddr {
        self.servers[server].member.health
    }

    /// Returns the address of a server's admin listener.
    pub fn server_admin(&self, server: usize) -> SocketAddr {
        self.servers[server].member.admin
    }

    /// Returns the address of an agent's health listener.
    pub fn agent_health(&self, agent: usize) -> SocketAddr {
        self.agents[agent].health
    }

    /// Returns the address of an agent's admin listener.
    pub fn agent_admin(&self, agent: usize) -> SocketAddr {
        self.agents[agent].admin
    }

    /// Returns a server's metrics.
    ///
    /// # Panics
    /// If the server does not answer.
    pub async fn server_metrics(&self, server: usize) -> Metrics {
        server_metrics(&self.servers[server].member)
            .await
            .expect("a server's metrics")
    }

    /// Returns an agent's metrics.
    ///
    /// # Panics
    /// If the agent does not answer.
    pub async fn agent_metrics(&self, agent: usize) -> Metrics {
        scrape(self.agent_health(agent))
            .await
            .expect("an agent's metrics")
    }

    /// Returns a running server.
    ///
    /// # Panics
    /// If the server was killed and not started again.
    pub fn server(&mut self, server: usize) -> &mut Program {
        self.servers[server].member.running()
    }

    /// Returns a running agent.
    ///
    /// # Panics
    /// If the agent was killed and not started again.
    pub fn agent(&mut self, agent: usize) -> &mut Program {
        self.agents[agent].running()
    }

    /// Returns the balancer in front of the servers.
    ///
    /// # Panics
    /// If there is only one server.
    pub fn balancer(&self) -> &Balancer {
        self.balancer.as_ref().expect("several servers")
    }

    /// Starts another agent with extra flags, and returns its index. Does not wait for the agent.
    pub async fn add_agent(&mut self, executable: Executable, extra: &[&str]) -> usize {
        let port = self.agent_port().await;
        self.push_agent(Part::new(executable, extra), port);
        self.agents.len() - 1
    }

    /// Kills a server with SIGKILL, without a shutdown.
    pub fn kill_server(&mut self, server: usize) {
        self.servers[server].member.program = None;
    }

    /// Kills an agent with SIGKILL, without a shutdown.
    pub fn kill_agent(&mut self, agent: usize) {
        self.agents[agent].program = None;
    }

    /// Starts a killed server with the same flags, and waits until the server is healthy.
    ///
    /// # Panics
    /// If the server already runs, or does not become healthy.
    pub async fn start_server(&mut self, server: usize) {
        self.servers[server].member.start();
        self.wait_for_server(server).await;
    }

    /// Starts a killed agent with the same flags, and waits until the agent is healthy.
    ///
    /// # Panics
    /// If the agent already runs, or does not become healthy.
    pub async fn start_agent(&mut self, agent: usize) {
        self.agents[agent].start();
        self.agents[agent].wait_for_health().await;
    }

    /// Stops a server as an operator does, with SIGTERM and enough time, and starts the server again. Its
    /// agents are connected again when [`wait_for_agents`](Self::wait_for_agents) returns.
    ///
    /// # Panics
    /// If the server does not run, does not exit, or does not become healthy.
    pub async fn restart_server(&mut self, server: usize) {
        let program = self.server(server);
        program.signal(Signal::TERM);
        program.wait_exit(PATIENCE).await;
        self.kill_server(server);
        self.start_server(server).await;
    }

    /// Returns the number of agents that a server counts as ready. Agents with the same id count once.
    ///
    /// # Panics
    /// If the server does not answer.
    pub async fn ready_agents(&self, server: usize) -> f64 {
        ready_backends(&self.server_metrics(server).await)
    }

    /// Waits until every running server counts every running agent as ready (agents with the same id count
    /// once), and until every agent reports a connection to every running server. Both checks are necessary:
    /// a server counts an agent before the agent has read the server's answer.
    ///
    /// # Panics
    /// If the counts are not complete within [`PATIENCE`].
    pub async fn wait_for_agents(&mut self) {
        let running = self.agents.iter_mut().filter(|a| a.program.is_some());
        let mut ids = HashSet::new();
        for agent in running {
            agent.wait_for_health().await;
            // A program uses the last value of a repeated flag.
            ids.extend(
                agent
                    .args
                    .iter()
                    .rfind(|a| a.starts_with("--agent-id="))
                    .cloned(),
            );
        }
        let count = ids.len();
        for server in self.servers.iter().filter(|s| s.member.program.is_some()) {
            let what = format!("{} has {count} agents", server.member.name);
            eventually(&what, PATIENCE, async || {
                let metrics = server_metrics(&server.member).await;
                let ready = ready_backends(&metrics.map_err(|error| format!("{error:#}"))?);
                (ready >= count as f64)
                    .then_some(())
                    .ok_or_else(|| format!("{ready} agents"))
            })
            .await;
        }
        let servers = self.servers.iter();
        let servers = servers.filter(|s| s.member.program.is_some()).count();
        for agent in self.agents.iter().filter(|a| a.program.is_some()) {
            let what = format!("{} has {servers} servers", agent.name);
            eventually(&what, PATIENCE, async || {
                let metrics = scrape(agent.health).await;
                let metrics = metrics.map_err(|error| format!("{error:#}"))?;
                let open = metrics.value(OPEN_SERVERS, &[]).unwrap_or_default();
                (open >= servers as f64)
                    .then_some(())
                    .ok_or_else(|| format!("{open} servers"))
            })
            .await;
        }
    }

    fn add_server(&mut self, part: Part, server_count: usize) {
        let index = self.servers.len();
        let [front_port, agent_port, admin_port, health_port] =
            std::array::from_fn(|_| self.ports.next_port());
        let socket = self.dir.path().join(format!("front-{index}.socket"));
        let front_end = self.front_end_at(&socket, front_port);
        let mut args = flags::front(self.mode, self.transport, &self.pki, &socket, front_port);
        args.extend(flags::server(
            &self.pki,
            index,
            server_count,
            [agent_port, admin_port, health_port],
        ));
        args.extend(part.extra);
        let mut member = Member {
            name: format!("server {index}"),
            path: part.executable.path("culvert-server").to_owned(),
            args,
            health: loopback(health_port),
            admin: loopback(admin_port),
            program: None,
        };
        member.start();
        self.servers.push(Server {
            member,
            agent_port,
            front_end,
        });
    }

    fn push_agent(&mut self, part: Part, server_port: u16) {
        let index = self.agents.len();
        let [admin_port, health_port] = std::array::from_fn(|_| self.ports.next_port());
        let mut args = flags::agent(&self.pki, index, [server_port, admin_port, health_port]);
        args.extend(part.extra);
        let mut member = Member {
            name: format!("agent {index}"),
            path: part.executable.path("culvert-agent").to_owned(),
            args,
            health: loopback(health_port),
            admin: loopback(admin_port),
            program: None,
        };
        member.start();
        self.agents.push(member);
    }

    fn front_end_at(&self, socket: &Path, port: u16) -> FrontEnd {
        let addr = loopback(port);
        let server_name = "localhost".try_into().expect("a name");
        let tls = |alpn: &[&str]| {
            let tls = self.pki.client_tls(&self.pki.client, alpn);
            tls.expect("a client's TLS configuration")
        };
        match (self.mode, self.transport) {
            (Mode::Grpc, Transport::Uds) => FrontEnd::GrpcUds(socket.to_owned()),
            (Mode::HttpConnect, Transport::Uds) => FrontEnd::ConnectUds(socket.to_owned()),
            (Mode::Grpc, Transport::Tcp) => FrontEnd::GrpcTcp {
                addr,
                tls: tls(&["h2"]),
                server_name,
            },
            (Mode::HttpConnect, Transport::Tcp) => FrontEnd::ConnectTcp {
                addr,
                tls: tls(&[]),
                server_name,
            },
        }
    }

    /// Waits for health and for the front listener, which a stock server may open after the health listener.
    async fn wait_for_server(&mut self, server: usize) {
        let Server {
            member, front_end, ..
        } = &mut self.servers[server];
        member.wait_for_health().await;
        let what = format!("{} listens for front ends", member.name);
        eventually(&what, PATIENCE, async || match &*front_end {
            FrontEnd::GrpcUds(path) | FrontEnd::ConnectUds(path) => {
                tokio::net::UnixStream::connect(path).await.map(drop)
            }
            FrontEnd::GrpcTcp { addr, .. } | FrontEnd::ConnectTcp { addr, .. } => {
                tokio::net::TcpStream::connect(addr).await.map(drop)
            }
        })
        .await;
    }

    /// Returns the port for agents: the port of the only server, or of a balancer in front of all servers.
    async fn agent_port(&mut self) -> u16 {
        if let [only] = self.servers.as_slice() {
            return only.agent_port;
        }
        if let Some(balancer) = &self.balancer {
            return balancer.addr().port();
        }
        let backends = self
            .servers
            .iter()
            .map(|s| loopback(s.agent_port))
            .collect();
        let balancer = Balancer::start(backends).await;
        let port = balancer.addr().port();
        self.balancer = Some(balancer);
        port
    }
}

/// Returns a server's metrics. Stock servers before v0.31 have them only at the admin listener.
async fn server_metrics(server: &Member) -> anyhow::Result<Metrics> {
    match scrape(server.health).await {
        Ok(metrics) => Ok(metrics),
        Err(_) => scrape(server.admin).await,
    }
}

/// Returns the number of agents that a server counts as ready. Strategies count separately, and a strategy
/// ignores agents without a matching identifier, so the largest count is the number of agents. Stock servers
/// before v0.31 have only the metric without strategies.
fn ready_backends(metrics: &Metrics) -> f64 {
    let by_strategy = metrics
        .samples("konnectivity_network_proxy_server_ready_backends")
        .map(|sample| sample.value);
    let total = metrics.value(
        "konnectivity_network_proxy_server_ready_backend_connections",
        &[],
    );
    by_strategy.reduce(f64::max).or(total).unwrap_or_default()
}

fn loopback(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

#[cfg(test)]
mod tests;
