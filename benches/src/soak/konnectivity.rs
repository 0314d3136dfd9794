//! Events of the Konnectivity tunnel: two servers of ours, one for each front end, and agents with connections to both.
//!
//! Two agents are ours and use the native transport. The third one is the stock agent, if Go is installed: our server
//! uses the packet transport only with stock agents.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, bail};
use culvert_kit::client::FrontEnd;
use culvert_kit::pki::Pki;
use culvert_tests::{Executable, Mode, Signal, Topology, Transport};
use tokio::time::{Instant, sleep};

use crate::entry::Entry;
use crate::harness::{ask, harness};
use crate::names::{AGENT, SERVER};
use crate::programs::Programs;
use crate::soak::Run;
use crate::soak::ledger::{OutageGuard, Path, Scope};
use crate::soak::random::Random;
use crate::soak::unit::{exits, runs};
use crate::sockets;

/// Paths through each server.
const PATHS: [Path; 2] = [Path::Connect, Path::Grpc];

const SERVERS: [&str; 2] = ["server 0", "server 1"];
const AGENTS: [&str; 3] = ["agent 0", "agent 1", STOCK];

/// Name of the stock agent.
pub(super) const STOCK: &str = "stock agent";

/// Number of agents of ours.
const OURS: usize = 2;

/// Time limit for a program to exit after SIGTERM, or to become ready.
const LIMIT: Duration = Duration::from_secs(60);

/// An event in the life of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    KillAgent(usize),
    DrainAgent(usize),
    FreezeAgent(usize),
    KillServer(usize),
    StopServer(usize),
    FreezeServer(usize),
}

impl Event {
    fn ends_a_program(self) -> bool {
        !matches!(self, Self::FreezeAgent(_) | Self::FreezeServer(_))
    }
}

/// The running tunnel.
pub(super) struct Konnectivity {
    topology: Topology,
    agents: usize,
    run: Run,
    random: Random,
}

impl Konnectivity {
    /// Starts the programs.
    pub(super) async fn start(
        programs: &Programs,
        run: Run,
        random: Random,
    ) -> anyhow::Result<Self> {
        let socket_mode = ["--v=1", "--mode=grpc"];
        let ours = |name| Executable::At(programs.path(name));
        let mut builder = Topology::builder(Mode::HttpConnect, Transport::Uds)
            .server(ours(SERVER), &["--v=1"])
            .server(ours(SERVER), &socket_mode);
        for _ in 0..OURS {
            // A connection of the plan may last longer than the default drain.
            builder = builder.agent(ours(AGENT), &["--v=1", "--drain-timeout=50s"]);
        }
        if let Some(stock) = programs.stock {
            let agent = Executable::At(stock.proxy_agent.clone());
            builder = builder.agent(agent, &["--v=1", "--sync-forever=true"]);
        }
        let topology = harness(builder.start()).await?;
        let agents = OURS + usize::from(programs.stock.is_some());
        let mut this = Self {
            topology,
            agents,
            run,
            random,
        };
        for server in 0..SERVERS.len() {
            this.server_begins(server)?;
        }
        for agent in 0..agents {
            this.agent_begins(agent)?;
        }
        Ok(this)
    }

    /// Returns the entries of the paths.
    pub(super) fn entries(&self) -> anyhow::Result<[(Path, Entry); 2]> {
        let (FrontEnd::ConnectUds(connect), FrontEnd::ConnectUds(grpc)) =
            (self.topology.front_end_of(0), self.topology.front_end_of(1))
        else {
            bail!("a front end is not a Unix socket");
        };
        Ok([
            (Path::Connect, Entry::Connect(connect.clone())),
            (Path::Grpc, Entry::Grpc(grpc.clone())),
        ])
    }

    /// Returns the addresses of the listeners for agents and for health checks.
    pub(super) fn listeners(&self) -> [SocketAddr; 2] {
        [
            self.topology.agent_address(0),
            self.topology.server_health(0),
        ]
    }

    /// Returns the certificates.
    pub(super) fn pki(&self) -> &Pki {
        self.topology.pki()
    }

    /// Lets one event follow another until the end of the run.
    pub(super) async fn live(mut self, end: Instant) -> anyhow::Result<Self> {
        while self.run.pause(&mut self.random, end).await {
            let event = self.choose();
            if event.ends_a_program() && !self.run.may_end(end) {
                continue;
            }
            self.happens(event)
                .await
                .with_context(|| format!("{event:?}"))?;
        }
        Ok(self)
    }

    fn choose(&mut self) -> Event {
        let agent = self.random.below(self.agents as u64) as usize;
        let server = self.random.below(SERVERS.len() as u64) as usize;
        match self.random.below(10) {
            0..3 => Event::KillAgent(agent),
            // A stock agent closes its connections at once.
            3..5 => Event::DrainAgent(agent % OURS),
            5..7 => Event::FreezeAgent(agent),
            7 => Event::KillServer(server),
            8 => Event::StopServer(server),
            _ => Event::FreezeServer(server),
        }
    }

    async fn happens(&mut self, event: Event) -> anyhow::Result<()> {
        match event {
            Event::KillAgent(agent) => {
                runs(self.topology.agent(agent))?;
                // The frozen agent opens no connection between the look at its ports and its end.
                let pid = ask(|| {
                    let program = self.topology.agent(agent);
                    program.signal(Signal::STOP);
                    program.pid()
                })?;
                self.run.ledger.loses(&PATHS, &sockets::tcp_ports(pid)?);
                self.event(AGENTS, agent, "SIGKILL");
                self.topology.kill_agent(agent);
                self.agent_returns(agent).await
            }
            Event::DrainAgent(agent) => {
                self.event(AGENTS, agent, "SIGTERM");
                let program = self.topology.agent(agent);
                runs(program)?;
                ask(|| program.signal(Signal::TERM))?;
                exits(program, LIMIT).await?;
                self.topology.kill_agent(agent);
                self.agent_returns(agent).await
            }
            Event::FreezeAgent(agent) => {
                let time = self.random.millis(1000, 6000);
                self.event(AGENTS, agent, format_args!("frozen for {time:.1?}"));
                ask(|| self.topology.agent(agent).signal(Signal::STOP))?;
                sleep(time).await;
                ask(|| self.topology.agent(agent).signal(Signal::CONT))?;
                self.ready().await
            }
            Event::KillServer(server) => {
                let _outage = self.outage(server);
                self.event(SERVERS, server, "SIGKILL");
                runs(self.topology.server(server))?;
                self.topology.kill_server(server);
                self.server_returns(server).await
            }
            Event::StopServer(server) => {
                let _outage = self.outage(server);
                self.event(SERVERS, server, "SIGTERM");
                let program = self.topology.server(server);
                runs(program)?;
                ask(|| program.signal(Signal::TERM))?;
                exits(program, LIMIT).await?;
                self.topology.kill_server(server);
                self.server_returns(server).await
            }
            Event::FreezeServer(server) => {
                let time = self.random.millis(1000, 4000);
                self.event(SERVERS, server, format_args!("frozen for {time:.1?}"));
                ask(|| self.topology.server(server).signal(Signal::STOP))?;
                sleep(time).await;
                ask(|| self.topology.server(server).signal(Signal::CONT))?;
                self.ready().await
            }
        }
    }

    fn event<const N: usize>(&self, names: [&str; N], at: usize, what: impl std::fmt::Display) {
        let name = names.get(at).copied().unwrap_or_default();
        self.run.ledger.event(format_args!("{name}: {what}"));
    }

    fn outage(&self, server: usize) -> OutageGuard {
        let path = PATHS.get(server).copied();
        let paths: Vec<Path> = path.into_iter().collect();
        self.run.ledger.outage(&paths, Scope::Everything)
    }

    async fn agent_returns(&mut self, agent: usize) -> anyhow::Result<()> {
        let name = AGENTS.get(agent).copied().unwrap_or_default();
        self.run.lives.ends(name);
        sleep(self.random.millis(0, 2000)).await;
        harness(self.topology.start_agent(agent)).await?;
        self.agent_begins(agent)?;
        self.ready().await
    }

    async fn server_returns(&mut self, server: usize) -> anyhow::Result<()> {
        let name = SERVERS.get(server).copied().unwrap_or_default();
        self.run.lives.ends(name);
        sleep(self.random.millis(0, 2000)).await;
        harness(self.topology.start_server(server)).await?;
        self.server_begins(server)?;
        self.ready().await
    }

    /// Waits until every agent is connected to every server.
    async fn ready(&mut self) -> anyhow::Result<()> {
        harness(self.topology.wait_for_agents()).await
    }

    fn agent_begins(&mut self, agent: usize) -> anyhow::Result<()> {
        let name = AGENTS.get(agent).copied().unwrap_or_default();
        let pid = ask(|| self.topology.agent(agent).pid())?;
        self.run.lives.begins(name, pid);
        Ok(())
    }

    fn server_begins(&mut self, server: usize) -> anyhow::Result<()> {
        let name = SERVERS.get(server).copied().unwrap_or_default();
        let pid = ask(|| self.topology.server(server).pid())?;
        self.run.lives.begins(name, pid);
        Ok(())
    }
}
