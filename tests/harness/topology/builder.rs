//! The builder of a topology.

use culvert_kit::pki::Pki;

use crate::ports::Ports;

use super::{Executable, Mode, Topology, Transport};

/// A program to start, and its extra flags. The extra flags come after the usual flags and override them.
#[derive(Debug, Clone)]
pub(super) struct Part {
    pub(super) executable: Executable,
    pub(super) extra: Vec<String>,
}

impl Part {
    pub(super) fn new(executable: Executable, extra: &[&str]) -> Self {
        Self {
            executable,
            extra: extra.iter().copied().map(String::from).collect(),
        }
    }
}

/// The description of a topology that is not started yet.
#[derive(Debug)]
pub struct Builder {
    pub(super) mode: Mode,
    pub(super) transport: Transport,
    pub(super) servers: Vec<Part>,
    pub(super) agents: Vec<Part>,
    pub(super) server_args: Vec<String>,
    pub(super) agent_args: Vec<String>,
}

impl Builder {
    /// Adds `count` servers of our own.
    #[must_use]
    pub fn servers(mut self, count: usize) -> Self {
        let part = Part::new(Executable::Ours, &[]);
        self.servers.extend(std::iter::repeat_n(part, count));
        self
    }

    /// Adds `count` agents of our own.
    #[must_use]
    pub fn agents(mut self, count: usize) -> Self {
        let part = Part::new(Executable::Ours, &[]);
        self.agents.extend(std::iter::repeat_n(part, count));
        self
    }

    /// Adds a server with extra flags.
    #[must_use]
    pub fn server(mut self, executable: Executable, extra: &[&str]) -> Self {
        self.servers.push(Part::new(executable, extra));
        self
    }

    /// Adds an agent with extra flags.
    #[must_use]
    pub fn agent(mut self, executable: Executable, extra: &[&str]) -> Self {
        self.agents.push(Part::new(executable, extra));
        self
    }

    /// Adds flags for every server.
    #[must_use]
    pub fn server_args(mut self, args: &[&str]) -> Self {
        self.server_args
            .extend(args.iter().copied().map(String::from));
        self
    }

    /// Adds flags for every agent.
    #[must_use]
    pub fn agent_args(mut self, args: &[&str]) -> Self {
        self.agent_args
            .extend(args.iter().copied().map(String::from));
        self
    }

    /// Starts everything and waits until every server answers `/healthz` and counts every agent as ready.
    ///
    /// # Panics
    /// If there is no server, or a program is not ready within [`PATIENCE`](super::PATIENCE).
    pub async fn start(self) -> Topology {
        assert!(
            !self.servers.is_empty(),
            "a topology needs at least one server"
        );
        let dir = tempfile::Builder::new().prefix("culvert-").tempdir();
        let dir = dir.expect("a temporary directory");
        let pki = Pki::create(dir.path()).expect("certificates");
        let mut topology = Topology {
            mode: self.mode,
            transport: self.transport,
            servers: Vec::new(),
            agents: Vec::new(),
            balancer: None,
            ports: Ports::default(),
            pki,
            dir,
        };
        let server_count = self.servers.len();
        for mut part in self.servers {
            part.extra.splice(0..0, self.server_args.iter().cloned());
            topology.add_server(part, server_count);
        }
        for index in 0..server_count {
            topology.wait_for_server(index).await;
        }
        let agent_port = topology.agent_port().await;
        for mut part in self.agents {
            part.extra.splice(0..0, self.agent_args.iter().cloned());
            topology.push_agent(part, agent_port);
        }
        topology.wait_for_agents().await;
        topology
    }
}
