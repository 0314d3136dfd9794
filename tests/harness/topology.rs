//! Servers and agents of any make, certificates, ports: a whole tunnel, connected.
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
//! Programs get their settings as operators pass them, and intervals short enough for tests. With more than one
//! server, agents reach them through a [random balancer](Balancer), as through a Service.

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

/// How long programs may take to start, or to find each other. Generous: two cores run many tests.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The agents' count of servers.
const OPEN_SERVERS: &str = "konnectivity_network_proxy_agent_open_server_connections";

/// What a front end speaks to the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// `--mode=grpc`.
    Grpc,
    /// `--mode=http-connect`.
    HttpConnect,
}

/// How a front end reaches the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// A Unix socket, in plain text.
    Uds,
    /// TCP with mutual TLS.
    Tcp,
}

/// Which program plays a part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Executable {
    /// The one of this workspace.
    Ours,
    /// Any program with the same flags, such as the stock one.
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

/// Ports, files and flags of one server's front.
#[derive(Debug)]
struct Server {
    member: Member,
    agent_port: u16,
    front_end: FrontEnd,
}

/// A running tunnel. Dropping it kills all programs.
#[derive(Debug)]
pub struct Topology {
    mode: Mode,
    transport: Transport,
    servers: Vec<Server>,
    agents: Vec<Member>,
    balancer: Option<Balancer>,
    ports: Ports,
    pki: Pki,
    // Last, so that programs are gone before their files are.
    dir: TempDir,
}

impl Topology {
    /// Begins to describe a topology.
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

    /// One server and one agent of our own.
    pub async fn simple(mode: Mode, transport: Transport) -> Self {
        Self::builder(mode, transport)
            .servers(1)
            .agents(1)
            .start()
            .await
    }

    /// The certificates.
    pub fn pki(&self) -> &Pki {
        &self.pki
    }

    /// Where certificates and sockets are; free for a test's own files.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// A port for a test's own use.
    pub fn next_port(&mut self) -> u16 {
        self.ports.next_port()
    }

    /// How front ends reach the first server.
    pub fn front_end(&self) -> &FrontEnd {
        self.front_end_of(0)
    }

    /// How front ends reach a server.
    pub fn front_end_of(&self, server: usize) -> &FrontEnd {
        &self.servers[server].front_end
    }

    /// Opens a tunnelled connection through the first server.
    ///
    /// # Errors
    /// See [`client::connect`].
    pub async fn connect(&self, target: &str) -> Result<BoxedStream, ClientError> {
        client::connect(self.front_end(), target, PATIENCE).await
    }

    /// A server's listener for agents.
    pub fn agent_address(&self, server: usize) -> SocketAddr {
        loopback(self.servers[server].agent_port)
    }

    /// A server's health listener.
    pub fn server_health(&self, server: usize) -> SocketAddr {
        self.servers[server].member.health
    }

    /// A server's admin listener.
    pub fn server_admin(&self, server: usize) -> SocketAddr {
        self.servers[server].member.admin
    }

    /// An agent's health listener.
    pub fn agent_health(&self, agent: usize) -> SocketAddr {
        self.agents[agent].health
    }

    /// An agent's admin listener.
    pub fn agent_admin(&self, agent: usize) -> SocketAddr {
        self.agents[agent].admin
    }

    /// A server's metrics.
    ///
    /// # Panics
    /// When it does not answer.
    pub async fn server_metrics(&self, server: usize) -> Metrics {
        scrape(self.server_health(server))
            .await
            .expect("a server's metrics")
    }

    /// An agent's metrics.
    ///
    /// # Panics
    /// When it does not answer.
    pub async fn agent_metrics(&self, agent: usize) -> Metrics {
        scrape(self.agent_health(agent))
            .await
            .expect("an agent's metrics")
    }

    /// A running server.
    ///
    /// # Panics
    /// When it was killed and not started again.
    pub fn server(&mut self, server: usize) -> &mut Program {
        self.servers[server].member.running()
    }

    /// A running agent.
    ///
    /// # Panics
    /// When it was killed and not started again.
    pub fn agent(&mut self, agent: usize) -> &mut Program {
        self.agents[agent].running()
    }

    /// Kills a server without a word (SIGKILL).
    pub fn kill_server(&mut self, server: usize) {
        self.servers[server].member.program = None;
    }

    /// Kills an agent without a word (SIGKILL).
    pub fn kill_agent(&mut self, agent: usize) {
        self.agents[agent].program = None;
    }

    /// Starts a killed server as it was, and waits until it is healthy.
    ///
    /// # Panics
    /// When it runs already, or does not come up.
    pub async fn start_server(&mut self, server: usize) {
        self.servers[server].member.start();
        self.wait_for_server(server).await;
    }

    /// Starts a killed agent as it was, and waits until it is healthy.
    ///
    /// # Panics
    /// When it runs already, or does not come up.
    pub async fn start_agent(&mut self, agent: usize) {
        self.agents[agent].start();
        self.agents[agent].wait_for_health().await;
    }

    /// Ends a server as an operator does (SIGTERM, and all the time it wants), and starts it anew.
    /// Its agents are back once [`wait_for_agents`](Self::wait_for_agents) returns.
    ///
    /// # Panics
    /// When it does not run, does not end, or does not come up.
    pub async fn restart_server(&mut self, server: usize) {
        let program = self.server(server);
        program.signal(Signal::TERM);
        program.wait_exit(PATIENCE).await;
        self.kill_server(server);
        self.start_server(server).await;
    }

    /// How many agents a server counts as ready. Those with one id count once.
    ///
    /// # Panics
    /// When it does not answer.
    pub async fn ready_agents(&self, server: usize) -> f64 {
        ready_backends(&self.server_metrics(server).await)
    }

    /// Waits until every running server counts every running agent as ready (of several agents with
    /// one id, one), and every agent knows as many servers: a server counts an agent before that
    /// has read the answer.
    ///
    /// # Panics
    /// When that does not come to be in [`PATIENCE`].
    pub async fn wait_for_agents(&mut self) {
        let running = self.agents.iter_mut().filter(|a| a.program.is_some());
        let mut ids = HashSet::new();
        for agent in running {
            agent.wait_for_health().await;
            // The last one wins.
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
                let metrics = scrape(server.member.health).await;
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

    fn add_agent(&mut self, part: Part, server_port: u16) {
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

    /// Waits for health and for the front listener, which a stock server may open later.
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

    /// Where agents connect to: the only server, or a balancer before all of them.
    async fn agent_port(&mut self) -> u16 {
        if let [only] = self.servers.as_slice() {
            return only.agent_port;
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

/// How many agents a server counts as ready. Strategies count separately, and one that knows an agent
/// by nothing counts it not at all, so the largest count is the one that says it.
fn ready_backends(metrics: &Metrics) -> f64 {
    metrics
        .samples("konnectivity_network_proxy_server_ready_backends")
        .map(|sample| sample.value)
        .fold(0.0, f64::max)
}

fn loopback(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

#[cfg(test)]
mod tests;
