//! The contenders and their running programs.
//!
//! A tunnel is one server and one agent on loopback, with mutual TLS between them and a Unix socket as the
//! front end. Every pair gets the same flags and the same log level.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail};
use culvert_kit::client::FrontEnd;
use culvert_tests::interop::Interop;
use culvert_tests::ports::Ports;
use culvert_tests::{Executable, Mode, Program, Topology, Transport};

use crate::entry::Entry;
use crate::harness::{ask, harness};
use crate::measure::Subject;
use crate::names::{AGENT, DIRECT, OURS, OURS_STOCK, QUIC, RESUME, SERVER, STOCK};
use crate::programs::Programs;
use crate::ready::{OverQuic, PREFER_QUIC};
use crate::tunnel::delay::{Delay, Path};
use crate::tunnel::relay::{self, Relay};

/// Flags added to the flags of the harness, for conditions as in production: operators run the stock programs
/// with these flags, and the probes are slower than in tests.
const SERVER_FLAGS: [&str; 1] = ["--v=1"];
const AGENT_FLAGS: [&str; 4] = [
    "--v=1",
    "--sync-interval=1s",
    "--sync-interval-cap=10s",
    "--probe-interval=1s",
];

/// Flag of both programs for [`Link::Resumable`].
const RESUME_GRACE: &str = "--resume-grace=30s";

/// Maker of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Make {
    Ours,
    Stock,
}

impl Make {
    /// Returns our program of this name, or its stock counterpart.
    fn executable(
        self,
        programs: &Programs,
        name: &str,
        stock: impl Fn(&Interop) -> &PathBuf,
    ) -> anyhow::Result<Executable> {
        let path = match self {
            Self::Ours => programs.path(name),
            Self::Stock => stock(programs.stock.context("the stock programs need Go")?).clone(),
        };
        Ok(Executable::At(path))
    }
}

/// The link between a server and an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Link {
    /// The default.
    Tcp,
    /// New connections use QUIC. Only for our programs.
    Quic,
    /// TCP, resumed after a cut. Only for our programs.
    Resumable,
}

/// Programs of a contender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A server and an agent.
    Pair {
        server: Make,
        agent: Make,
        link: Link,
    },
    /// A relay, which leads to one endpoint only.
    Relay(relay::Kind),
    /// No program: the load goes straight to the endpoint.
    Direct,
}

/// A tunnel to measure.
#[derive(Debug, Clone, Copy)]
pub(super) struct Contender {
    /// Server and agent, one word if both have the same maker, or the name of another kind of contender.
    pub name: &'static str,
    kind: Kind,
}

const fn pair(name: &'static str, server: Make, agent: Make, link: Link) -> Contender {
    Contender {
        name,
        kind: Kind::Pair {
            server,
            agent,
            link,
        },
    }
}

/// Name of the pair with the stock server and our agent.
pub(super) const STOCK_OURS: &str = "stock+ours";
/// Name of the relay that shows the cost of TLS alone.
pub(super) const RELAY: &str = "relay";
/// Name of the tunnel with TLS and HTTP/2 and nothing else.
pub(super) const BARE: &str = "bare";
/// Name of the tunnel without TLS.
pub(super) const RATHOLE: &str = "rathole";

/// All contenders, ours first.
pub(super) const CONTENDERS: [Contender; 10] = [
    pair(OURS, Make::Ours, Make::Ours, Link::Tcp),
    pair(STOCK, Make::Stock, Make::Stock, Link::Tcp),
    pair(OURS_STOCK, Make::Ours, Make::Stock, Link::Tcp),
    pair(STOCK_OURS, Make::Stock, Make::Ours, Link::Tcp),
    Contender {
        name: RELAY,
        kind: Kind::Relay(relay::Kind::Tls),
    },
    Contender {
        name: BARE,
        kind: Kind::Relay(relay::Kind::Bare),
    },
    Contender {
        name: RATHOLE,
        kind: Kind::Relay(relay::Kind::Rathole),
    },
    pair(QUIC, Make::Ours, Make::Ours, Link::Quic),
    pair(RESUME, Make::Ours, Make::Ours, Link::Resumable),
    Contender {
        name: DIRECT,
        kind: Kind::Direct,
    },
];

impl Contender {
    /// Returns the reason if the contender cannot run on this machine.
    pub(super) fn missing(&self, programs: &Programs) -> Option<&'static str> {
        match self.kind {
            Kind::Pair { server, agent, .. } => {
                let needs_stock = [server, agent].contains(&Make::Stock);
                (needs_stock && programs.stock.is_none()).then_some("needs Go")
            }
            Kind::Relay(kind) => kind.missing(),
            Kind::Direct => None,
        }
    }

    /// Returns true for a server and an agent. Other contenders have no front end.
    pub(super) fn is_pair(&self) -> bool {
        matches!(self.kind, Kind::Pair { .. })
    }

    /// Returns true if the contender is measured only if an option names it.
    pub(super) fn is_optional(&self) -> bool {
        matches!(self.kind, Kind::Pair { link, .. } if link != Link::Tcp)
    }

    /// Returns true unless connections use QUIC.
    pub(super) fn is_over_tcp(&self) -> bool {
        !matches!(
            self.kind,
            Kind::Pair {
                link: Link::Quic,
                ..
            }
        )
    }

    /// Returns true if the contender has processes with processor time and memory.
    pub(super) fn has_programs(&self) -> bool {
        self.kind != Kind::Direct
    }

    /// File descriptors that the busiest process needs per connection.
    pub(super) fn descriptors_per_connection(&self) -> u64 {
        match self.kind {
            Kind::Pair { .. } => 1,
            Kind::Relay(_) => 2,
            Kind::Direct => 0,
        }
    }
}

/// The running programs.
#[derive(Debug)]
enum Parts {
    Pair(Box<Topology>),
    Relay(Box<Relay>),
    Nothing,
}

/// A running contender. Dropping it kills its programs.
#[derive(Debug)]
pub(super) struct Tunnel {
    parts: Parts,
    /// Number of the agent whose figures are read.
    agent: usize,
    /// Entry of the load.
    pub entry: Entry,
    /// Check of the dials; `None` if they need not use QUIC.
    over_quic: Option<OverQuic>,
    /// The simulated path between the two halves, if any.
    _delay: Option<Delay>,
}

impl Tunnel {
    /// Starts a contender and waits until it can carry data to `target`. The two halves are connected by
    /// `path`, or by loopback. The programs log to stderr.
    pub(super) async fn start(
        contender: Contender,
        mode: Mode,
        programs: &Programs,
        target: SocketAddr,
        path: Option<Path>,
    ) -> anyhow::Result<Self> {
        match contender.kind {
            Kind::Pair {
                server,
                agent,
                link,
            } => {
                let server = server.executable(programs, SERVER, |stock| &stock.proxy_server)?;
                let agent = agent.executable(programs, AGENT, |stock| &stock.proxy_agent)?;
                let mut tunnel = Self::pair(server, [agent].into(), link, mode, path).await?;
                if let (Link::Quic, Parts::Pair(topology)) = (link, &tunnel.parts) {
                    let begin = OverQuic::begin(topology, &tunnel.entry, target);
                    tunnel.over_quic = Some(begin.await?);
                }
                Ok(tunnel)
            }
            Kind::Relay(kind) => {
                let mut ports = Ports::default();
                let middle = SocketAddr::from(([127, 0, 0, 1], ports.next_port()));
                let delay = Delay::to(middle, path).await?;
                let entry = delay.as_ref().map_or(middle, Delay::address);
                let starting = Relay::start(kind, ports, [entry, middle], target);
                let relay = harness(starting).await??;
                Ok(Self {
                    entry: relay.entry.clone(),
                    parts: Parts::Relay(Box::new(relay)),
                    agent: 0,
                    over_quic: None,
                    _delay: delay,
                })
            }
            Kind::Direct => {
                let delay = Delay::to(target, path).await?;
                Ok(Self {
                    parts: Parts::Nothing,
                    agent: 0,
                    entry: Entry::Plain(delay.as_ref().map_or(target, Delay::address)),
                    over_quic: None,
                    _delay: delay,
                })
            }
        }
    }

    /// Starts a server and two agents.
    pub(super) async fn with_spare(
        contender: Contender,
        mode: Mode,
        programs: &Programs,
    ) -> anyhow::Result<Self> {
        let Kind::Pair {
            server,
            agent,
            link,
        } = contender.kind
        else {
            bail!("not a pair");
        };
        let server = server.executable(programs, SERVER, |stock| &stock.proxy_server)?;
        let agent = agent.executable(programs, AGENT, |stock| &stock.proxy_agent)?;
        Self::pair(server, vec![agent.clone(), agent], link, mode, None).await
    }

    async fn pair(
        server: Executable,
        agents: Vec<Executable>,
        link: Link,
        mode: Mode,
        path: Option<Path>,
    ) -> anyhow::Result<Self> {
        // The harness chooses the agent port during its start, but a simulated path needs the port earlier.
        // Later flags override earlier flags of the same name.
        let mut ports = Ports::default();
        let listener = SocketAddr::from(([127, 0, 0, 1], ports.next_port()));
        let delay = Delay::to(listener, path).await?;
        let (mut server_flags, mut agent_flags) = (SERVER_FLAGS.to_vec(), AGENT_FLAGS.to_vec());
        let agent_port = format!("--agent-port={}", listener.port());
        let server_port;
        if let Some(delay) = &delay {
            server_port = format!("--proxy-server-port={}", delay.address().port());
            server_flags.push(&agent_port);
            agent_flags.push(&server_port);
        }
        let quic_port;
        match link {
            Link::Tcp => {}
            Link::Quic => {
                quic_port = format!("--agent-quic-port={}", ports.next_port());
                server_flags.push(&quic_port);
                agent_flags.push(PREFER_QUIC);
            }
            Link::Resumable => {
                server_flags.push(RESUME_GRACE);
                agent_flags.push(RESUME_GRACE);
            }
        }
        let mut builder = Topology::builder(mode, Transport::Uds).server(server, &server_flags);
        for agent in agents {
            builder = builder.agent(agent, &agent_flags);
        }
        let topology = harness(builder.start()).await?;
        let entry = match topology.front_end() {
            FrontEnd::GrpcUds(path) => Entry::Grpc(path.clone()),
            FrontEnd::ConnectUds(path) => Entry::Connect(path.clone()),
            other => bail!("the front end is not a Unix socket: {other:?}"),
        };
        Ok(Self {
            parts: Parts::Pair(Box::new(topology)),
            agent: 0,
            entry,
            over_quic: None,
            _delay: delay,
        })
    }

    /// Fails if dials since the last check or since the start used TCP, although the contender is to use QUIC.
    pub(super) async fn check_link(&mut self) -> anyhow::Result<()> {
        match (&mut self.over_quic, &self.parts) {
            (Some(over_quic), Parts::Pair(topology)) => over_quic.check(topology).await,
            _ => Ok(()),
        }
    }

    /// Resident memory of the agent, or of the far program of a relay, in bytes.
    pub(super) fn agent_rss(&mut self) -> anyhow::Result<Option<u64>> {
        let [_, far] = self.ask(Program::rss)?;
        Ok(far)
    }

    /// Kills an agent.
    pub(super) fn lose_agent(&mut self, agent: usize) -> anyhow::Result<()> {
        let topology = self.topology()?;
        ask(|| topology.kill_agent(agent))
    }

    /// Starts a killed agent, and waits until the server uses it.
    pub(super) async fn start_agent(&mut self, agent: usize) -> anyhow::Result<()> {
        let topology = self.topology()?;
        harness(async {
            topology.start_agent(agent).await;
            topology.wait_for_agents().await;
        })
        .await
    }

    /// Reads the figures of this agent from now on.
    pub(super) fn observe_agent(&mut self, agent: usize) {
        self.agent = agent;
    }

    fn topology(&mut self) -> anyhow::Result<&mut Topology> {
        match &mut self.parts {
            Parts::Pair(topology) => Ok(topology),
            Parts::Relay(_) | Parts::Nothing => bail!("not a pair"),
        }
    }

    /// Reads a figure of both programs.
    fn ask<T>(&mut self, figure: impl Fn(&Program) -> T) -> anyhow::Result<[Option<T>; 2]> {
        ask(|| match &mut self.parts {
            Parts::Pair(topology) => [
                Some(figure(topology.server(0))),
                Some(figure(topology.agent(self.agent))),
            ],
            Parts::Relay(relay) => [&relay.near, &relay.far].map(|p| Some(figure(p))),
            Parts::Nothing => [None, None],
        })
    }
}

impl Subject for Tunnel {
    fn entry(&self) -> &Entry {
        &self.entry
    }

    fn cpu_time(&mut self) -> anyhow::Result<Option<Duration>> {
        let [near, far] = self.ask(Program::cpu_time)?;
        Ok(near.zip(far).map(|(near, far)| near + far))
    }

    fn rss(&mut self) -> anyhow::Result<Option<u64>> {
        let [near, far] = self.ask(Program::rss)?;
        Ok(near.zip(far).map(|(near, far)| near + far))
    }
}
