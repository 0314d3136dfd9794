//! The tunnels with two peers each.
//!
//! Each peer finds the other side at an address of its own on loopback. Packets from and to that address belong to
//! that peer only.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, bail};
use bytes::Bytes;
use culvert_kit::client::FrontEnd;
use culvert_kit::pki::{CLUSTER_NAME, KONNECTIVITY_NAME};
use culvert_tests::hello::client_hello;
use culvert_tests::interop::Interop;
use culvert_tests::kube_api::{KubeApi, service, slice};
use culvert_tests::namespace::{Direction, hosts};
use culvert_tests::ports::Ports;
use culvert_tests::{Executable, Mode, Program, Topology, Transport};
use serde_json::json;
use tempfile::TempDir;
use tokio::net::TcpSocket;
use tokio::time::{Instant, sleep, timeout};

use super::Cause;
use crate::endpoint::Endpoints;
use crate::entry::Entry;
use crate::harness::{ask, harness};
use crate::load::Echo;
use crate::names::{AGENT, OURS, OURS_STOCK, PROXY, SERVER, STOCK};
use crate::openvpn::{Files, Ground, Proto, server_words};
use crate::programs::Programs;
use crate::sockets;

/// Names and addresses of the other side, one for each peer. The names are in the server's certificate.
pub(super) const ADDRESSES: [(&str, &str); 2] = [
    (CLUSTER_NAME, "127.0.0.5"),
    (KONNECTIVITY_NAME, "127.0.0.6"),
];

/// Time limit for a tunnel to carry the first byte, and the pause between attempts.
const START_LIMIT: Duration = Duration::from_secs(30);
const TRY_LIMIT: Duration = Duration::from_secs(2);
const TRY_INTERVAL: Duration = Duration::from_millis(50);

/// Server name of the Service behind the front door.
const HOST: &str = "silence.example.com";

/// Flags of production, as in `tunnel`.
const AGENT_FLAGS: [&str; 3] = ["--v=1", "--sync-interval=1s", "--sync-interval-cap=10s"];

/// A tunnel to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Subject {
    /// A server and two agents. `true` means ours.
    Agents { server: bool, agents: bool },
    /// A server and two OpenVPN clients with the same network, all of them ours. The newest client gets all dials.
    OpenVpn,
    /// A front door and a Service with two endpoints.
    Door,
}

const fn agents(server: bool, agents: bool) -> Subject {
    Subject::Agents { server, agents }
}

pub(super) const SUBJECTS: [Subject; 6] = [
    agents(true, true),
    agents(true, false),
    agents(false, true),
    agents(false, false),
    Subject::OpenVpn,
    Subject::Door,
];

impl Subject {
    /// Returns the name in the table.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Agents {
                server: true,
                agents: true,
            } => OURS,
            Self::Agents {
                server: true,
                agents: false,
            } => OURS_STOCK,
            Self::Agents {
                server: false,
                agents: true,
            } => "stock+ours",
            Self::Agents {
                server: false,
                agents: false,
            } => STOCK,
            Self::OpenVpn => "openvpn",
            Self::Door => "door",
        }
    }

    /// Returns true if a program is a stock program.
    pub(super) fn needs_stock(self) -> bool {
        matches!(self, Self::Agents { server, agents } if !(server && agents))
    }

    /// Returns true if the server is a stock server.
    pub(super) fn has_stock_server(self) -> bool {
        matches!(self, Self::Agents { server: false, .. })
    }

    /// Returns true if new dials use both peers.
    pub(super) fn uses_both(self) -> bool {
        self != Self::OpenVpn
    }

    /// Returns true if the measurement is possible. The endpoints of the front door are not programs of their own, and
    /// the kernel accepts connections for a frozen endpoint.
    pub(super) fn has(self, cause: Cause) -> bool {
        self != Self::Door || cause != Cause::Frozen
    }

    /// Converts directions from the address of the other side to the address that [`ADDRESSES`] means for this tunnel:
    /// for the front door, the peer is the endpoint and has its own address.
    pub(super) fn seen_from_peer(self, directions: &'static [Direction]) -> &'static [Direction] {
        match (self, directions) {
            (Self::Door, [Direction::From]) => &[Direction::To],
            (Self::Door, [Direction::To]) => &[Direction::From],
            _ => directions,
        }
    }
}

/// The running programs.
enum Running {
    Topology(Box<Topology>),
    OpenVpn {
        clients: Box<[Program; 2]>,
        _server: Box<Program>,
        _files: Box<Files>,
    },
    Door {
        endpoints: Box<[Endpoints; 2]>,
        _door: Box<Program>,
        _api: KubeApi,
    },
}

/// A running tunnel with two peers. Dropping it kills its programs.
pub(super) struct Pair {
    /// Entry of dials.
    pub entry: Entry,
    /// Target of dials.
    pub target: SocketAddr,
    programs: Running,
    _endpoints: Endpoints,
    _ports: Ports,
    // The last field, so that the programs end before their files are removed.
    _dir: TempDir,
}

/// Makes the names of [`ADDRESSES`] known in this network.
pub(super) fn prepare() {
    hosts(&ADDRESSES);
}

impl Pair {
    /// Starts a tunnel, and waits until it carries data.
    pub(super) async fn start(
        subject: Subject,
        programs: &Programs,
        ground: &Ground,
    ) -> anyhow::Result<Self> {
        let pair = match subject {
            Subject::Agents { server, agents } => Self::agents(server, agents, programs).await?,
            Subject::OpenVpn => Self::openvpn(programs, ground).await?,
            Subject::Door => Self::door(programs).await?,
        };
        let begin = Instant::now();
        loop {
            let echo = timeout(TRY_LIMIT, Echo::proven(&pair.entry, pair.target)).await;
            match echo.context("no answer").flatten() {
                Ok(_) => return Ok(pair),
                Err(error) if begin.elapsed() > START_LIMIT => return Err(error),
                Err(_) => sleep(TRY_INTERVAL).await,
            }
        }
    }

    /// Works on the program of a peer.
    pub(super) fn with_peer<T>(
        &mut self,
        peer: usize,
        work: impl FnOnce(&Program) -> T,
    ) -> anyhow::Result<T> {
        match &mut self.programs {
            Running::Topology(topology) => ask(|| work(topology.agent(peer))),
            Running::OpenVpn { clients, .. } => {
                let client = clients.get(peer).context("no such client")?;
                ask(|| work(client))
            }
            Running::Door { .. } => bail!("endpoints are not programs"),
        }
    }

    /// Returns the command to the endpoint whose answer shows the peer.
    pub(super) fn question(&self) -> &'static str {
        match &self.programs {
            Running::Door { .. } => "port\n",
            Running::Topology(_) | Running::OpenVpn { .. } => "peer\n",
        }
    }

    /// Returns the peer that has opened a connection from `port` to the endpoint, or the endpoint with that port behind
    /// a front door.
    pub(super) fn peer_with(&mut self, port: u16) -> anyhow::Result<usize> {
        if let Running::Door { endpoints, .. } = &self.programs {
            let mut endpoints = endpoints.iter();
            let found = endpoints.position(|endpoint| endpoint.lean().port() == port);
            return found.context("unknown endpoint");
        }
        for peer in 0..ADDRESSES.len() {
            let pid = self.with_peer(peer, Program::pid)?;
            if sockets::tcp_ports(pid)?.contains(&port) {
                return Ok(peer);
            }
        }
        bail!("no peer has port {port}")
    }

    async fn agents(is_ours: bool, are_ours: bool, programs: &Programs) -> anyhow::Result<Self> {
        let program = |is_ours: bool, name, stock: fn(&Interop) -> &std::path::PathBuf| {
            let path = match is_ours {
                true => programs.path(name),
                false => stock(programs.stock.context("needs Go")?).clone(),
            };
            anyhow::Ok(Executable::At(path))
        };
        let server = program(is_ours, SERVER, |stock| &stock.proxy_server)?;
        let agent = program(are_ours, AGENT, |stock| &stock.proxy_agent)?;
        let mut builder = Topology::builder(Mode::HttpConnect, Transport::Uds)
            .server(server, &["--v=1", "--agent-bind-address=0.0.0.0"])
            .agent_args(&AGENT_FLAGS);
        for (name, _) in ADDRESSES {
            let host = format!("--proxy-server-host={name}");
            builder = builder.agent(agent.clone(), &[&host]);
        }
        let topology = harness(builder.start()).await?;
        let FrontEnd::ConnectUds(front) = topology.front_end() else {
            bail!("the front end is not a Unix socket");
        };
        let endpoints = Endpoints::start().await?;
        Ok(Self {
            entry: Entry::Connect(front.clone()),
            target: endpoints.lean(),
            programs: Running::Topology(Box::new(topology)),
            _endpoints: endpoints,
            _ports: Ports::default(),
            _dir: tempfile::tempdir()?,
        })
    }

    async fn openvpn(programs: &Programs, ground: &Ground) -> anyhow::Result<Self> {
        let dir = tempfile::Builder::new().prefix("culvert-").tempdir()?;
        let mut ports = Ports::default();
        let files = Files::write(dir.path(), ground.address)?;
        let [front, admin] =
            ["front", "admin"].map(|name| dir.path().join(format!("{name}.socket")));
        let port = ports.next_port();
        let mut words = server_words(&files.pki, [&front, &admin], &mut ports);
        words.extend(files.server(Proto::Tcp, SocketAddr::from(([0, 0, 0, 0], port))));
        words.push("--openvpn-duplicate-cn".to_owned());
        let server = ask(|| Program::spawn(programs.path(SERVER), &words, &[]))?;
        let mut client = |address: &str| {
            let remote = SocketAddr::new(address.parse()?, port);
            let words = files.client(Proto::Tcp, remote, &mut ports);
            ask(|| Program::spawn(programs.path(AGENT), &words, &[]))
        };
        let [(_, first), (_, second)] = ADDRESSES;
        let clients = [client(first)?, client(second)?];
        let own = SocketAddr::from((ground.address, 0));
        let endpoints = Endpoints::on(TcpSocket::new_v4()?, own).await?;
        let deadline = Instant::now() + START_LIMIT;
        while crate::openvpn::connected(&admin).await.unwrap_or_default() < 2.0 {
            if Instant::now() > deadline {
                bail!("the clients do not connect");
            }
            sleep(TRY_INTERVAL).await;
        }
        Ok(Self {
            entry: Entry::Connect(front),
            target: endpoints.lean(),
            programs: Running::OpenVpn {
                clients: Box::new(clients),
                _server: Box::new(server),
                _files: Box::new(files),
            },
            _endpoints: endpoints,
            _ports: ports,
            _dir: dir,
        })
    }

    async fn door(programs: &Programs) -> anyhow::Result<Self> {
        const NAMESPACE: &str = "silence";
        const PORT: &str = "secure";
        let dir = tempfile::Builder::new().prefix("culvert-").tempdir()?;
        let mut ports = Ports::default();
        let api = KubeApi::start().await;
        let mapping = json!({ PORT: HOST }).to_string();
        let exposed = service(NAMESPACE, "it")
            .port(PORT, 443)
            .annotation("nodeport-proxy.k8s.io/expose", "SNI")
            .annotation("nodeport-proxy.k8s.io/port-mapping", &mapping);
        api.put("services", exposed);
        let mut endpoints = Vec::new();
        for (number, (_, address)) in ADDRESSES.into_iter().enumerate() {
            let at = SocketAddr::new(address.parse()?, 0);
            let endpoint = Endpoints::on(TcpSocket::new_v4()?, at).await?;
            let slice = slice(NAMESPACE, "it")
                .name(&format!("it-{number}"))
                .port(PORT, endpoint.lean().port())
                .ready(address);
            api.put("endpointslices", slice);
            endpoints.push(endpoint);
        }
        let [sni, tunnel, stats] =
            [(); 3].map(|()| SocketAddr::from(([127, 0, 0, 1], ports.next_port())));
        let words = [
            format!("--kubeconfig={}", api.kubeconfig(dir.path()).display()),
            "--bind-address=127.0.0.1".to_owned(),
            format!("--envoy-sni-port={}", sni.port()),
            format!("--envoy-tunneling-port={}", tunnel.port()),
            format!("--envoy-stats-port={}", stats.port()),
        ];
        let door = ask(|| Program::spawn(programs.path(PROXY), &words, &[]))?;
        let Ok(endpoints) = <[Endpoints; 2]>::try_from(endpoints) else {
            bail!("a peer is missing");
        };
        Ok(Self {
            entry: Entry::Sni {
                door: sni,
                hello: Bytes::from(client_hello(HOST)),
            },
            target: sni,
            programs: Running::Door {
                endpoints: Box::new(endpoints),
                _door: Box::new(door),
                _api: api,
            },
            _endpoints: Endpoints::start().await?,
            _ports: ports,
            _dir: dir,
        })
    }
}
